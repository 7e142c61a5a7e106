"""vLLM's weight-transfer engine of the run's store: read beside the steps, swapped in between two of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from prl.config.schema import Transport
from prl.inference.vllm.settings import required
from prl.models.hf import to_hf
from prl.models.spec import read_spec
from prl.transport.run_dir import RunDir
from prl.transport.weights import WeightStore

Staged = list[tuple[str, torch.Tensor]]


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing: the store is where the run's folder is."""


@dataclass
class Update(WeightTransferUpdateInfo):
    version: int


class StoreTransfer(WeightTransferEngine[Init, Update]):
    """`stage` reads a version in a thread, checksums compared; `staged` says when it has. Then, in a pause, vLLM's own three
    calls: start, update (which version), finish (swap). Until finish the model is as it was."""

    init_info_cls, update_info_cls = Init, Update
    supports_draft_weight_update = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        s = required()
        self._store = WeightStore(
            RunDir(s.folder), Transport.model_validate({"weights": s.weights, "keep_versions": s.keep_versions})
        )
        self._spec = read_spec(self.model_config.model)
        self._thread: threading.Thread | None = None
        self._staged: tuple[int, Staged] | None = None
        self._error = ""

    def stage(self, version: int) -> None:
        if self._thread is not None:
            self._thread.join()
        self._staged, self._error = None, ""
        self._thread = threading.Thread(target=self._read, args=(version,), name="weights", daemon=True)
        self._thread.start()

    def staged(self) -> str | None:
        """None: not yet; "": all is there; else why it will not be."""
        if self._thread is not None and self._thread.is_alive():
            return None
        return self._error or ("" if self._staged else "no version was asked for")

    def _read(self, version: int) -> None:
        try:
            self._staged = version, list(to_hf(self._spec, self._store.load(version)))
        except Exception as e:
            self._error = f"{type(e).__name__}: {e}"

    def init_transfer_engine(self, init_info: Init) -> None:
        pass

    def start_weight_update(self) -> None:
        if self.staged() != "":
            raise RuntimeError(f"no weight version is staged: {self.staged() or 'still being read'}")

    def receive_weights(self, update_info: Update) -> None:
        if self._staged is None or self._staged[0] != update_info.version:
            staged = self._staged[0] if self._staged else "none"
            raise RuntimeError(f"weight version {update_info.version} was asked for, {staged} is staged")

    def finish_weight_update(self) -> None:
        if self._staged is None:
            raise RuntimeError("no weight version is staged")
        expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(self._staged[1]))
        finalize_layerwise_reload(self.model, self.model_config)
        self._staged = None
        if missing := sorted(expected - set(loaded)):
            raise RuntimeError(f"the version lacks {len(missing)} of this engine's parameters: {', '.join(missing[:5])}")

    def shutdown(self) -> None:
        pass
