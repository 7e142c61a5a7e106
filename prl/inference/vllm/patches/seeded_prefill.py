"""A request with a seed whose prompt takes several steps ends the engine on CPU ("CPU Generator does not use offset"): what is
sampled in the middle of a prompt is thrown away, and the generator is put back by CUDA's counter, which a CPU generator has not
(`GPUModelRunner._bookkeeping_sync`). Here its whole state is put back."""

from __future__ import annotations

from typing import Any

import numpy as np

VERSIONS = ("0.32.0",)


def needed() -> bool:
    """CPU generators still have no counter, and vLLM still wants one."""
    import inspect

    import torch
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not current_platform.is_cpu() or "set_offset" not in inspect.getsource(GPUModelRunner._bookkeeping_sync):
        return False
    try:
        torch.Generator().get_offset()
    except RuntimeError:
        return True
    return False


class Rewinding:
    """Above a CPUModelRunner."""

    def _thrown_away(self) -> dict[int, Any]:
        """Generators, by row, of requests whose prompt has not ended in this step."""
        batch = self.input_batch  # type: ignore[attr-defined]
        rows = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])  # type: ignore[attr-defined]
        return {row: batch.generators[row] for row in rows.tolist() if row in batch.generators}

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        before = [(generator, generator.get_state()) for generator in self._thrown_away().values()]
        out = super()._sample(*args, **kwargs)  # type: ignore[misc]
        for generator, state in before:
            generator.set_state(state)
        return out

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators  # type: ignore[attr-defined]
        hidden = {row: generators.pop(row) for row in self._thrown_away()}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        finally:
            generators.update(hidden)


def apply() -> None:
    import vllm.v1.worker.cpu_worker as worker

    worker.CPUModelRunner = type("CPUModelRunner", (Rewinding, worker.CPUModelRunner), {})
