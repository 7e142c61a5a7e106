"""A step whose loss or gradient is not finite is skipped, counted and kept for replay; too many end the run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from prl.samples import Batch
from prl.transport.wire import batch_to_message, decode, message_to_batch

RUN_ID = "nonfinite"
"""Run id inside the dumps, so that any run can read them."""


class NonFiniteError(RuntimeError):
    """More steps were skipped than `trainer.max_nonfinite` allows."""


class Guard:
    """Keeps the batches of skipped steps, and ends the run after more than `limit` of them."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit

    def dump(self, batch: Batch, rank: int, reason: str) -> Path:
        """Write this rank's batch for replay."""
        self.folder.mkdir(exist_ok=True, mode=0o700)
        path = self.folder / f"step_{batch.step}.rank{rank}.msgpack"
        frames = [bytes(f) for f in batch_to_message(batch, run_id=RUN_ID)]
        path.write_bytes(msgspec.msgpack.encode({"reason": reason, "frames": frames}))
        return path

    def check(self, skipped: int) -> None:
        """NonFiniteError once more steps were skipped than allowed."""
        if skipped > self.limit:
            raise NonFiniteError(
                f"{skipped} steps had a loss or gradient that is not finite; trainer.max_nonfinite allows {self.limit}. "
                f"Their batches lie in {self.folder} (prl.trainer.nonfinite.load reads one). Look at trainer.optim.lr, "
                "model.dtype and the mismatch in metrics.jsonl"
            )


def load(path: Path) -> tuple[Batch, str]:
    """A dumped batch and the reason why it was skipped."""
    dump = msgspec.msgpack.decode(path.read_bytes())
    return message_to_batch(decode(dump["frames"], run_id=RUN_ID, kinds=["batch"]))[0], dump["reason"]
