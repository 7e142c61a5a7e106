"""`bench trainer`: tokens per second of a training step beside the same model in transformers under FSDP2, on 1 and on 2 ranks.

Both sides are in the same processes, start from the same weights, train on the same batch and take turns (trainer_ranks.py).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from prl.bench import machine
from prl.bench.ops import peaks
from prl.bench.rows import Goal, Result, Row, quartiles
from prl.bench.runs import BenchError, say, watch
from prl.bench.trainer_ranks import IMPLEMENTATIONS
from prl.config.load import load
from prl.models.hf import save_hf
from prl.models.registry import build, count_parameters, init_weights
from prl.models.spec import ModelSpec, read_spec
from prl.plan import flops

SPEED, OVERHEAD = Goal(least=1.3), Goal(most=0.03)
DOCUMENTS, SHORTEST, LONGEST = 16, 112, 144
"""Of each rank. Lengths are close together, so that padded rows waste little."""
ROWS = 8
"""Documents of one of transformers' padded rows."""
AGREE = 0.01
"""Relative difference of the first losses above which the two would not be doing the same."""


def rows_of(found: Mapping[str, Any], spec: ModelSpec, lengths: Sequence[int], ranks: int, peak: float) -> list[Row]:
    """Of one number of ranks. `peak`: FLOP/s of a thread; the ranks have one each."""
    tokens, scored = sum(lengths), sum(n - n // 2 for n in lengths)
    step = flops.training(spec, lengths, scored)
    ours, theirs = zip(*found["turns"], strict=True)
    ratios = [b / a for a, b in found["turns"]]
    parts, total = found["parts"], sum(found["parts"].values())
    where = f"{ranks} rank{'s' if ranks > 1 else ''}"
    rest = parts.get("own", 0.0) + parts.get("data", 0.0)
    return [
        Row(
            f"{where}: tokens",
            tokens / statistics.median(ours),
            "per s",
            quartiles([tokens / s for s in ours]),
            statistics.median(ratios),
            f"transformers', {found['implementation']}",
            SPEED if ranks > 1 else None,
            quartiles(ratios),
        ),
        Row(
            f"{where}: tokens, transformers",
            tokens / statistics.median(theirs),
            "per s",
            quartiles([tokens / s for s in theirs]),
        ),
        Row(f"{where}: MFU", step / (statistics.median(ours) * ranks * peak), ""),
        Row(f"{where}: MFU, transformers", step / (statistics.median(theirs) * ranks * peak), ""),
        *(Row(f"{where}: {part}", s / total, "of the step") for part, s in sorted(parts.items(), key=lambda kv: -kv[1])),
        Row(f"{where}: own Python (own, data)", rest / total, "of the step", goal=OVERHEAD),
        Row(f"{where}: peak memory of a rank, both sides", found["peak_rss_mb"], "MiB", timed=False),
    ]


def measure(config_path: Path, overrides: Sequence[str] = (), *, turns: int, timeout_s: float = 900.0) -> Result:
    """Raises BenchError, ConfigError."""
    config = load(config_path, overrides)
    spec = read_spec(config.model.architecture or config.model.path or {})
    before = machine.calibrate()
    peak, _ = peaks()
    rows: list[Row] = []
    during, details = [], {}
    with tempfile.TemporaryDirectory(prefix="prl-bench-") as name:
        folder = Path(name)
        model = build(spec)
        init_weights(model, config.run.seed)
        save_hf(folder / "model", spec, model.state_dict().items())
        for ranks in (1, 2):
            say(f"trainer on {ranks} rank{'s' if ranks > 1 else ''}")
            lengths = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, DOCUMENTS * ranks).tolist()
            run = config.model_copy(
                update={
                    "model": config.model.model_copy(update={"architecture": None, "path": folder / "model"}),
                    "trainer": config.trainer.model_copy(update={"ranks": ranks}),
                }
            )
            given = {
                "config": run.model_dump(mode="json"),
                "ranks": ranks,
                "n_experts": spec.n_experts,
                "vocabulary": spec.vocab_size,
                "lengths": lengths,
                "rows": ROWS,
                "implementations": IMPLEMENTATIONS,
                "turns": turns,
            }
            file = folder / "spec.json"
            file.write_bytes(orjson.dumps(given))
            done = watch(f"{ranks} ranks", [sys.executable, "-m", "prl.bench.trainer_ranks", str(file)], timeout_s=timeout_s)
            found = orjson.loads(done.stdout)
            a, b = found["losses"]
            if not abs(a - b) <= AGREE * abs(b):
                raise BenchError(f"{ranks} ranks: the first loss is {a:.5f} here and {b:.5f} in transformers")
            rows += rows_of(found, spec, lengths, ranks, peak)
            during.append((f"{ranks} ranks", done.others))
            details[f"{ranks} ranks"] = found
    total, active = count_parameters(spec)
    return Result(
        bench="trainer",
        rows=rows,
        machine=machine.facts(),
        load={"others": before.others, "spread": before.spread, **dict(during)},
        loaded=machine.reasons(before, during),
        settings={"config": str(config_path), "overrides": list(overrides), "turns": turns, "peak_flops_per_rank": peak}
        | {"parameters": total, "active": active, "documents": DOCUMENTS, "lengths": [SHORTEST, LONGEST]},
        details=details,
    )
