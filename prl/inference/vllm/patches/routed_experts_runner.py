"""The first model runner never feeds the connector that carries routed experts to the scheduler (`AuxOutputWorkerConnector`);
only the second does. Here the CPU's runner does: tell it of the step, give it the step's batch, hand on what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VERSIONS = ("0.32.0",)


def needed() -> bool:
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return bool(current_platform.is_cpu()) and not hasattr(GPUModelRunner, "aux_output_connector")


@dataclass
class Batch:
    """What the connector reads of a step's batch of R requests."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    """[R + 1]."""
    num_computed_tokens_np: np.ndarray
    """[R], before the step."""


class Feeding:
    """Above a CPUModelRunner."""

    _connector: Any = None
    _rows: Any = None

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)  # type: ignore[misc]
        config = self.vllm_config  # type: ignore[attr-defined]
        if config.aux_output_config.enabled and not is_profiling:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            self._connector = get_aux_output_connector(self.model, config, kv_cache_config)  # type: ignore[attr-defined]

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        if self._connector is not None:
            self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        out = super().execute_model(scheduler_output, intermediate_tensors)  # type: ignore[misc]
        if self._connector is not None and self.execute_model_state is not None:  # type: ignore[attr-defined]
            batch = self.input_batch  # type: ignore[attr-defined]
            n = batch.num_reqs
            starts = self.query_start_loc.np[: n + 1].copy()  # type: ignore[attr-defined]
            computed = batch.num_computed_tokens_cpu[:n].copy()
            self._rows = self._connector.prepare_output(Batch(list(batch.req_ids[:n]), starts, computed))
        return out

    def sample_tokens(self, grammar_output: Any) -> Any:
        out = super().sample_tokens(grammar_output)  # type: ignore[misc]
        rows, self._rows = self._rows, None
        if rows is not None:
            sampled = np.array([len(tokens) for tokens in out.sampled_token_ids])
            rows.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            out.aux_output_connector_output = rows.process_output()
        return out


def apply() -> None:
    import vllm.v1.worker.cpu_worker as worker

    worker.CPUModelRunner = type("CPUModelRunner", (Feeding, worker.CPUModelRunner), {})
