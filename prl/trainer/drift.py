"""Every step's mismatch against the band of its pair; one clear line, and the tokens to look at, when a run leaves it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prl.config.schema import RunConfig
from prl.monitor import bands
from prl.monitor.metrics import Metrics
from prl.samples import Batch
from prl.transport.run_dir import RunDir

log = logging.getLogger(__name__)
DOCUMENTS = 64
"""Of the batch, kept for prl.score."""


class DriftError(RuntimeError):
    """Trainer and engine drift apart, and monitor.drift is stop."""


class Drift:
    """Judges the records of one trainer; `alarm` is the line of the last alarm, empty before."""

    def __init__(self, run: RunDir, config: RunConfig, metrics: Metrics):
        self.run_dir, self.config, self.metrics = run, config, metrics
        self.pair, self.watch, self.alarm = bands.Pair.of(config), bands.Watch(), ""

    def __call__(self, batch: Batch, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the step's record says of it; None where the step trained no RL tokens."""
        if "mismatch_kl" not in record:
            return None
        verdict, self.watch = bands.judge(record, self.pair, self.watch)
        if verdict.raised:
            tokens = keep(batch, self.run_dir.root / "drift")
            self.alarm = bands.alarm_line(verdict, batch.step, self._next(tokens))
            log.warning("%s", self.alarm)
            self.metrics.log("event", name="drift", step=batch.step, text=self.alarm, causes=list(verdict.causes))
        return verdict.record()

    def _next(self, tokens: Path) -> str:
        c = self.config
        model = self.run_dir.root / "sft" / "model" if c.sft is not None else c.model.path or self.run_dir.root / "model"
        return f"python -m prl.score {model} --tokens {tokens} --dtype {c.inference.dtype} --against embedded"


def keep(batch: Batch, folder: Path) -> Path:
    """Tokens of some of the batch's documents, as prl.score reads them."""
    folder.mkdir(exist_ok=True, mode=0o700)
    path = folder / f"step_{batch.step}.jsonl"
    documents = [d for mb in batch.micro_batches for d in np.split(mb.sample.tokens, np.cumsum(mb.lengths)[:-1]) if len(d) > 1]
    path.write_text("".join(json.dumps({"tokens": d.tolist()}) + "\n" for d in documents[:DOCUMENTS]), "utf-8")
    return path
