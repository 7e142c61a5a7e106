"""FP8 layers chosen by name, and how their weights travel."""

from collections.abc import Sequence

import pytest
import torch

from prl.config.named import SetupError
from prl.config.schema import RunConfig
from prl.models import precision
from prl.models.base import Model
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec
from tests.models.configs import TINY

WIDE = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "v_head_dim": 32,
    "q_lora_rank": 128,
}


def model(name: str = "glm_moe_dsa", device: str = "meta") -> Model:
    return build(read_spec(TINY[name] | WIDE | {"model_type": name}), device=device)


def test_what_can_be_fp8_is_experts_and_linear_layers_that_fit() -> None:
    m = model()
    names = precision.candidates(m)
    kinds = {n.removeprefix(".".join(n.split(".")[:3]) + ".") for n in names}
    assert {"self_attn.o_proj", "mlp.experts", "mlp.gate_proj", "mlp.shared_experts.down_proj"} <= kinds
    assert not any("kv_b_proj" in n or "indexer" in n or "lm_head" in n or n.endswith("gate") for n in names)
    widths = {n: p.shape[-2:] for n in precision.weights_of(m, names) if (p := m.get_parameter(n)) is not None}
    assert all(a % 128 == b % 128 == 0 for a, b in widths.values())
    assert "self_attn.kv_a_proj_with_mqa" not in kinds, "a width of no multiple of 128"


def fp8(
    patterns: Sequence[str], engine: Sequence[str] | None = None, precisions: tuple[str, str] = ("fp8", "fp8")
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "trainer": {"precision": precisions[0], "fp8_layers": list(patterns)},
            "inference": {"precision": precisions[1], "fp8_layers": None if engine is None else list(engine)},
        }
    )


def test_names_and_regular_expressions_are_matched_against_full_names() -> None:
    m = model()
    experts = [n for n in precision.candidates(m) if n.endswith("experts") and "shared" not in n]
    assert precision.trainer_layers(fp8([r".*\.mlp\.experts"]), m) == sorted(experts)
    assert precision.trainer_layers(fp8([experts[0]]), m) == experts[:1]
    assert precision.trainer_layers(fp8([".*"]), m) == sorted(precision.candidates(m))
    assert precision.trainer_layers(fp8([".*"], precisions=("bf16", "fp8")), m) == []
    assert precision.engine_layers(fp8([experts[0]]), m) == experts[:1], "an engine follows the trainer"
    assert precision.engine_layers(fp8([experts[0]], [experts[1]]), m) == experts[1:2]
    assert precision.engine_layers(fp8([".*"], precisions=("fp8", "bf16")), m) == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("experts", r"'experts' fits no layer that can be FP8; nearest are .*experts"),
        ("model.layers.9.mlp.experts", "nearest are model.layers.[0-9].mlp.experts"),
        (
            r"model\.layers\.0\.self_attn\.kv_b_proj",
            "kv_b_proj, which cannot be FP8: only routed experts and",
        ),
        (r"model\.layers\.0\.self_attn\.kv_a_proj_with_mqa", r"cannot be FP8: its widths \[\d+, 128\] are no multiples of 128"),
        ("lm_head", "lm_head, which cannot be FP8"),
        (r"model\.layers\.0\.mlp", "model.layers.0.mlp, which cannot be FP8"),
        (r".*\.gate_proj", "gate_proj and .*up_proj are one product: choose both, or neither"),
    ],
)
def test_what_cannot_be_fp8_is_an_error_that_names_it(pattern: str, message: str) -> None:
    with pytest.raises(SetupError, match=r"trainer\.fp8_layers: .*" + message):
        precision.trainer_layers(fp8([pattern]), model())


def test_an_engine_computes_from_the_codes_that_travelled() -> None:
    m = model("glm4_moe", "cpu")
    init_weights(m, 0)
    layers = precision.candidates(m)
    sent = dict(precision.held(m))
    for name in precision.weights_of(m, layers):
        sent |= dict(precision.coded(name, m.get_parameter(name)))
    other = model("glm4_moe", "cpu")
    init_weights(other, 1)
    precision.hold_codes(other, layers)
    here = precision.held(other)
    assert here.keys() == sent.keys() and precision.layers_in(here) == sorted(layers)
    for name, t in here.items():
        assert (t.dtype, t.shape) == (sent[name].dtype, sent[name].shape), name
        t.copy_(sent[name])
    precision.set_fp8(m, layers)
    x, layer = torch.randn(5, 128), m.layers[0].mlp
    with torch.inference_mode():
        assert torch.equal(layer(x), other.layers[0].mlp(x)), "gate and up, one product"


def test_differences_and_short_names() -> None:
    apart = precision.differences(["a", "b"], ["b", "c"], ("the engine", "the trainer"))
    assert apart == "a in the engine alone; c in the trainer alone"
    assert precision.differences(["a"], ["a"], ("x", "y")) == ""
    names = [f"model.layers.{i}.mlp.experts" for i in (1, 2, 3, 7)] + ["model.layers.0.mlp.up_proj"]
    assert precision.shortened(names) == "model.layers.{1-3,7}.mlp.experts, model.layers.0.mlp.up_proj"
