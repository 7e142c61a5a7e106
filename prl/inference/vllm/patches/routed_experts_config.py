"""vLLM refuses `--enable-return-routed-experts` with the first model runner, the only one that runs on CPU (the second needs
Triton, which has no CPU backend), although all of the plumbing but one hook is free of devices
(`VllmConfig._verify_aux_output_compatibility`). `routed_experts_runner` has the hook."""

from __future__ import annotations

from typing import Any
from unittest import mock

VERSIONS = ("0.32.0",)


def needed() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def apply() -> None:
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    verify = VllmConfig._verify_aux_output_compatibility

    def _verify_aux_output_compatibility(self: Any) -> None:
        # Platforms of third parties are let through the check of the runner; every other one stays.
        with mock.patch.object(type(current_platform), "is_out_of_tree", lambda _: True):
            verify(self)

    VllmConfig._verify_aux_output_compatibility = _verify_aux_output_compatibility
