"""`bench bitwise`: what run.bitwise costs a training step and the engine: on beside off, taking turns in one process.

What it is for is checked on the way: with it on, the trainer's logprobs of what the engine sampled are the engine's own bits.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prl.bench import machine
from prl.bench.rows import Goal, Result, Row, quartiles
from prl.bench.runs import BenchError, say
from prl.bench.trainer_ranks import rollouts
from prl.config.load import load
from prl.config.schema import RunConfig
from prl.distributed.mesh import ALONE
from prl.inference.api import GenerateRequest
from prl.inference.engine import Engine
from prl.kernels.lm_head import IGNORE, logprobs
from prl.layers.layout import PackedLayout
from prl.models import precision
from prl.models.base import ForwardInput, Model
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec
from prl.samples import Batch, pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper

GOAL = Goal(most=1.5)
"""Of the time on over the time off; the figure published for a bitwise mode is 2.4."""
DOCUMENTS, SHORTEST, LONGEST = 16, 112, 144
REQUESTS, PROMPT, NEW = 32, 32, 64


class _Trainer:
    def __init__(self, config: RunConfig, batch: Batch):
        self.batch = batch
        self.state = TrainState(config, config.trainer.optim, ALONE)
        self.stepper = Stepper(self.state, config.trainer, 1)

    def __call__(self) -> None:
        self.stepper(self.batch)


class _Engine:
    """Each call generates the same requests anew; `answers` are the last call's."""

    def __init__(self, model: Model, bitwise: bool, requests: Sequence[GenerateRequest]):
        self.model, self.requests = model, requests
        self.engine = Engine(model, model.spec, max_batch=REQUESTS, kv_tokens=2 * REQUESTS * (PROMPT + NEW), bitwise=bitwise)
        self.answers: dict[str, Any] = {}

    def __call__(self) -> None:
        self.engine.reset_prefix_cache()
        for request in self.requests:
            self.engine.add(request)
        while self.engine.ready:
            for event in self.engine.step():
                self.answers[event.request_id] = event.generation


def _different(served: _Engine) -> int:
    """Generated tokens whose logprob in one packed forward is not the engine's to the last bit."""
    given = [(r, served.answers[r.request_id]) for r in served.requests]
    lines = [np.concatenate([r.tokens, g.tokens]) for r, g in given]
    tokens = torch.from_numpy(np.concatenate(lines)).long()
    positions = torch.cat([torch.arange(len(line)) for line in lines])
    with torch.no_grad():
        out = served.model(ForwardInput(tokens, positions, PackedLayout([len(line) for line in lines])))
        labels = torch.where(positions.roll(-1) == 0, IGNORE, tokens.roll(-1))
        scored, _ = logprobs(out.hidden_TD, served.model.lm_head_weight, labels, 1.0, chunk=4096)
    parts = scored.split([len(line) for line in lines])
    return sum(int((p[len(r.tokens) - 1 : -1].numpy() != g.logprobs).sum()) for p, (r, g) in zip(parts, given, strict=True))


def _turns(what: str, off: Any, on: Any, turns: int) -> list[tuple[float, float]]:
    """Seconds of each, off and on, in turns; who goes first changes."""
    say(what)
    out = []
    for turn in range(-1, turns):
        seconds = {}
        for which in (off, on) if turn % 2 else (on, off):
            t = time.perf_counter()
            which()
            seconds[which] = time.perf_counter() - t
        if turn >= 0:  # the first is a warm-up
            out.append((seconds[off], seconds[on]))
    return out


def rows_of(what: str, found: Sequence[tuple[float, float]], tokens: int) -> list[Row]:
    ratios = [on / off for off, on in found]
    off, on = (list(s) for s in zip(*found, strict=True))
    return [
        Row(f"{what}: tokens", tokens / statistics.median(off), "per s", quartiles([tokens / s for s in off])),
        Row(f"{what}, bitwise: tokens", tokens / statistics.median(on), "per s", quartiles([tokens / s for s in on])),
        Row(
            f"{what}, bitwise: time",
            statistics.median(on),
            "s",
            quartiles(on),
            statistics.median(ratios),
            "off",
            GOAL,
            quartiles(ratios),
        ),
    ]


def measure(config_path: Path, overrides: Sequence[str] = (), *, turns: int) -> Result:
    """Raises BenchError, ConfigError, SetupError."""
    config = load(config_path, overrides)
    spec = read_spec(config.model.architecture or config.model.path or {})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    before, rows, found = machine.calibrate(), [], {}
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, spec.vocab_size, (REQUESTS, PROMPT)).astype(np.int32)
    requests = [GenerateRequest(p, NEW, seed=i, request_id=str(i)) for i, p in enumerate(prompts)]
    lengths = rng.integers(SHORTEST, LONGEST + 1, DOCUMENTS).tolist()
    start = machine.CpuTimes.now()
    for dtype in ("bfloat16", "float32"):
        run = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        switched = run.model_copy(update={"run": run.run.model_copy(update={"bitwise": True})})
        batch = pack(rollouts(0, lengths, spec.vocab_size), step=1, budget=run.trainer.pack_tokens, ranks=1)[0]
        trainers = [_Trainer(c, batch) for c in (run, switched)]
        name = f"trainer's step in {dtype}"
        found[name] = _turns(name, trainers[0], trainers[1], turns)
        rows += rows_of(name, found[name], sum(lengths))
        engines = []
        for bitwise in (False, True):
            model = build(spec, dtype=getattr(torch, dtype))
            init_weights(model, run.run.seed)
            precision.hold_codes(model, precision.engine_layers(run, model))
            engines.append(_Engine(model, bitwise, requests))
        name = f"engine in {dtype}"
        found[name] = _turns(name, engines[0], engines[1], turns)
        rows += rows_of(name, found[name], REQUESTS * NEW)
        off, on = (_different(e) for e in engines)
        if on:
            raise BenchError(f"{name}: {on} of {REQUESTS * NEW} logprobs are not the trainer's, with run.bitwise")
        title = f"{name}: logprobs that are not the trainer's to the last bit"
        rows += [
            Row(title, off, f"of {REQUESTS * NEW}", timed=False),
            Row(f"{title}, bitwise", on, f"of {REQUESTS * NEW}", goal=Goal(most=0), timed=False),
        ]
    during = [("the turns", machine.share_of_others(start, machine.CpuTimes.now()))]
    return Result(
        bench="bitwise",
        rows=rows,
        machine=machine.facts(),
        load={"others": before.others, "spread": before.spread, **dict(during)},
        loaded=machine.reasons(before, during),
        settings={"config": str(config_path), "overrides": list(overrides), "turns": turns}
        | {"documents": DOCUMENTS, "lengths": [SHORTEST, LONGEST], "requests": REQUESTS, "prompt": PROMPT, "new": NEW},
        details={name: {"off_on_s": seconds} for name, seconds in found.items()},
    )
