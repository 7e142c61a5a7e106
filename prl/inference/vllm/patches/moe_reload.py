"""On CPU a reload leaves the experts' weights in the loader's layout: `UnquantizedFusedMoEMethod._setup_kernel` has the experts
prepack them on its first call alone, since later calls keep the tensors where CUDA graphs expect them. Logprobs are then wrong
by several nats, without an error (vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py)."""

from __future__ import annotations

from typing import Any

VERSIONS = ("0.32.0",)


def needed() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def apply() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    setup = Method._setup_kernel

    def _setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        reload = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if reload:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    Method._setup_kernel = _setup_kernel
