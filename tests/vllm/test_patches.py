"""Each patch is still needed: a test fails once vLLM no longer has the fault. In this process nothing is patched."""

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest

from prl.inference.vllm import installed, patches
from prl.inference.vllm.patches import (
    distribution_name,
    moe_reload,
    routed_experts_config,
    routed_experts_runner,
    seeded_prefill,
    token_ids,
)

pytestmark = pytest.mark.vllm
ALL = (distribution_name, *patches.everywhere(), *patches.workers())


def test_each_names_its_versions_and_its_fault() -> None:
    assert len(ALL) == 6
    for module in ALL:
        assert (
            module.__doc__
            and "vllm/" in module.__doc__
            or "._" in module.__doc__
            or "Connector" in module.__doc__
            or "Renderer" in module.__doc__
        )
        assert set(module.VERSIONS) <= set(installed.TESTED)
        assert module.needed(), module.__name__


def test_none_is_applied_to_a_version_that_it_does_not_name() -> None:
    module = mock.Mock(VERSIONS=("0.32.0",), __name__="x.y")
    patches.apply((module,), "0.33.0")
    module.apply.assert_not_called()
    patches.apply((module,), "0.32.0+cpu")
    module.apply.assert_called_once()


def prepacks() -> int:
    """How often the experts prepack when a layer is set up twice."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    experts = mock.Mock()
    method = SimpleNamespace(moe_kernel=None, unquantized_backend=None)
    method._init_moe_kernel = lambda _: setattr(method, "moe_kernel", SimpleNamespace(fused_experts=experts))
    layer = SimpleNamespace(moe_config=None)
    with (
        mock.patch.object(module, "convert_to_unquantized_kernel_format", lambda *_, **__: (1, 2)),
        mock.patch.object(module, "replace_parameter"),
    ):
        for _ in range(2):
            module.UnquantizedFusedMoEMethod._setup_kernel(method, layer, 1, 2)
    return int(experts.process_weights_after_loading.call_count)


def test_moe_reload() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    assert prepacks() == 1, "vLLM prepacks on a reload by itself now"
    with mock.patch.object(Method, "_setup_kernel", Method._setup_kernel):
        moe_reload.apply()
        assert prepacks() == 2


def test_routed_experts_config() -> None:
    from vllm.config import VllmConfig

    config = mock.Mock(use_v2_model_runner=False, speculative_config=None, kv_transfer_config=None)
    config.model_config.runner_type = "generate"
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        setattr(config.parallel_config, name, 1)
    verify = "_verify_aux_output_compatibility"
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        getattr(VllmConfig, verify)(config)
    with mock.patch.object(VllmConfig, verify, getattr(VllmConfig, verify)):
        routed_experts_config.apply()
        getattr(VllmConfig, verify)(config)
        config.parallel_config.pipeline_parallel_size = 2
        with pytest.raises(ValueError, match="pipeline"):  # vLLM's other checks stay
            getattr(VllmConfig, verify)(config)


def test_routed_experts_runner() -> None:
    from vllm.v1.worker import cpu_model_runner, gpu_model_runner

    assert not any("aux_output" in inspect.getsource(m) for m in (cpu_model_runner, gpu_model_runner))
    assert routed_experts_runner.needed()


def test_seeded_prefill() -> None:
    assert seeded_prefill.needed()


def test_token_ids() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.base import BaseRenderer

    renderer = SimpleNamespace(tokenizer=None, model_config=SimpleNamespace(get_vocab_size=lambda: 8))
    BaseRenderer.validate_token_ids(renderer, [8])  # vLLM looks now, where this raises
    with mock.patch.object(BaseRenderer, "validate_token_ids", BaseRenderer.validate_token_ids):
        token_ids.apply()
        BaseRenderer.validate_token_ids(renderer, [0, 7])
        BaseRenderer.validate_token_ids(renderer, [])
        for wrong in (8, -1):
            with pytest.raises(VLLMValidationError, match=f"Token id {wrong} is out of vocabulary"):
                BaseRenderer.validate_token_ids(renderer, [0, wrong, 7])


def test_distribution_name() -> None:
    from importlib import metadata

    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm")
    with mock.patch.object(metadata, "version", metadata.version):
        distribution_name.apply()
        assert metadata.version("vllm") == installed.vllm_version() and metadata.version("torch")
