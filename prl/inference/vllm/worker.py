"""What every vLLM worker answers beside vLLM's own calls (`--worker-extension-cls`). vLLM imports this before it makes the
worker's model runner, and in workers alone, so their patches are applied here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prl.inference.vllm import patches
from prl.inference.vllm.installed import vllm_version

if TYPE_CHECKING:
    from prl.inference.vllm.transfer import StoreTransfer

patches.apply(patches.workers(), vllm_version())


class WorkerExtension:
    weight_transfer_engine: StoreTransfer

    def prl_stage(self, version: int) -> None:
        self.weight_transfer_engine.stage(version)

    def prl_staged(self) -> str | None:
        return self.weight_transfer_engine.staged()
