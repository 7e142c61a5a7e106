"""The command line that a configuration becomes, and vLLM's own parser on it."""

import itertools
from pathlib import Path

import pytest

from prl.config.load import load
from prl.config.schema import RunConfig
from prl.inference.vllm.arguments import arguments, config_json, environment, kv_bytes
from prl.inference.vllm.settings import VARIABLE, Settings
from prl.models.spec import read_spec
from tests.vllm.rig import CONFIGS, ROOT

pytestmark = pytest.mark.vllm
SETTINGS = Settings(folder="/run", name="inference-0", weights="filesystem")


def parsed(argv: list[str]):  # type: ignore[no-untyped-def]
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    return args


def of(config: RunConfig, architecture: str = "glm4_moe", settings: Settings = SETTINGS) -> list[str]:
    spec = read_spec(CONFIGS[architecture])
    return arguments(config, spec, model=Path("/m"), host="127.0.0.1", port=8000, settings=settings)


def test_vllms_parser_takes_what_any_configuration_becomes() -> None:
    values = {
        "dtype": ["float32", "bfloat16"],
        "record_routes": [True, False],
        "prefix_cache": [True, False],
        "vllm": [{"eager": True}, {"tensor_parallel": 2}],
        "kv_tokens": [1024, 4096],
    }
    for choice in itertools.product(*values.values()):
        inference = dict(zip(values, choice, strict=True))
        config = RunConfig.model_validate({"inference": inference})
        args = parsed(of(config, settings=SETTINGS if choice[1] else Settings("/run", "x")))
        assert args.model_tag == "/m" and args.dtype == inference["dtype"]
        assert args.enable_return_routed_experts is inference["record_routes"]
        assert args.enable_prefix_caching is inference["prefix_cache"]
        assert args.tensor_parallel_size == config.inference.vllm.tensor_parallel
        assert args.max_model_len == min(2048, config.inference.kv_tokens)
        assert args.load_format == ("dummy" if choice[1] else "safetensors")
        assert args.middleware == ["prl.inference.vllm.guard.Guard"] and args.weight_transfer_config.backend == "prl"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_vllms_parser_takes_what_the_shipped_configurations_become(path: Path) -> None:
    try:
        config = load(path, planning=True)
    except ValueError as e:
        pytest.skip(str(e))
    if config.inference.engine == "vllm":
        parsed(of(config))


def test_a_wrong_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed([*of(RunConfig()), "--no-such-flag"])
    assert "no-such-flag" in capsys.readouterr().err


def test_the_cache_is_as_large_as_configured() -> None:
    """Blocks of 128 tokens, two (keys, values) heads of 32 in 3 layers, and vLLM's own empty block."""
    spec = read_spec(CONFIGS["glm4_moe"])
    assert kv_bytes(spec, 8192, "float32", 1) == (8192 + 128) * 3 * 2 * 2 * 32 * 4
    assert kv_bytes(spec, 8193, "bfloat16", 2) == (8192 + 256) * 3 * 2 * 1 * 32 * 2


def test_the_models_folder_says_how_it_is_trained() -> None:
    spec = read_spec(CONFIGS["glm4_moe"] | {"quantization_config": {"quant_method": "fp8"}})
    written = config_json(spec, "bfloat16")
    assert written["dtype"] == "bfloat16" and "quantization_config" not in written
    assert read_spec(written).moe_layers == spec.moe_layers


def test_the_environment_has_no_secret_in_it() -> None:
    env = environment(RunConfig(), SETTINGS)
    assert env["VLLM_PLUGINS"] == "prl" and env["VLLM_SERVER_DEV_MODE"] == "1" and '"folder":"/run"' in env[VARIABLE]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment(
        RunConfig.model_validate({"inference": {"vllm": {"tensor_parallel": 2}}}), SETTINGS
    )
