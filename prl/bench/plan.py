"""Step times of the plan beside real steps on this CPU, after a calibration that makes an entry of hardware.yaml of it.

Calibration: seconds of each kind of product as a trainer computes it (forward and backward), of a copy, of what ranks exchange
over gloo, and two steps of small models, of which what their products do not take is the time of all the small ops. Then steps
of other models are predicted and measured. Seconds are those of a rank's own threads, which other work on the machine changes
little; on a quiet machine they are the clock's, but for waits between ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from prl.bench import machine
from prl.bench.memory import MODELS, Case, launch
from prl.bench.rows import Goal, Result, Row
from prl.bench.runs import say
from prl.config.mesh import resolve
from prl.launch.local import usable_cores
from prl.models.spec import read_spec
from prl.plan.hardware import Hardware, find
from prl.plan.work import Batch, Times, Work, times, training

NEAR = Goal(0.75, 1.25)
STEPS = 4
"""Of each case; the first does not count."""
SCORED = 0.5
"""Of a document's tokens, as `prl.bench.trainer_ranks.rollouts` makes them."""


def wider(model: str) -> dict[str, Any]:
    return MODELS[model] | {"hidden_size": 384, "intermediate_size": 1280}


REFERENCES: dict[str, Case] = {
    "dense, float32": Case(MODELS["dense"], (256,) * 8),
    "GLM-4.5, bfloat16": Case(MODELS["GLM-4.5"], (256,) * 8, "bfloat16"),
}
_TWO: dict[str, Any] = {"ranks": 2}
DP_2 = Case(wider("dense"), (512,) * 4, "bfloat16", {**_TWO, "pack_tokens": 1024})
CASES: dict[str, Case] = {
    "dense, width 384, float32": Case(wider("dense"), (512,) * 4),
    "GLM-4.5, width 384, bfloat16, recompute full": Case(wider("GLM-4.5"), (1024,) * 2, "bfloat16", {"recompute": "full"}),
    "GLM-4.5, width 384, FP8, two micro-batches": Case(
        wider("GLM-4.5"), (512,) * 4, "bfloat16", {"precision": "fp8", "pack_tokens": 1024}
    ),
    "GLM-5, width 384, bfloat16": Case(wider("GLM-5"), (512,) * 4, "bfloat16"),
    "GLM-5, bfloat16, recompute selective, short documents": Case(
        MODELS["GLM-5"], (128,) * 24, "bfloat16", {"recompute": "selective"}
    ),
    "dense, width 384, bfloat16, dp 2": DP_2,
    "GLM-4.5, width 384, bfloat16, ep 2": Case(
        wider("GLM-4.5"), (512,) * 4, "bfloat16", {**_TWO, "mesh": {"ep": 2}, "pack_tokens": 1024}
    ),
    "GLM-5, float32, cp 2": Case(MODELS["GLM-5"], (1024,) * 2, "float32", {**_TWO, "mesh": {"cp": 2, "ep": 1}}),
}
"""None of them is a reference, nor has a reference's widths, documents and recomputation."""


KEPT = find("cpu").achieved.usable
"""What malloc leaves of a process's memory."""


def entry(rates: Mapping[str, float], link: float, memory: float) -> dict[str, Any]:
    """Of hardware.yaml's form. `memory`: share of a copy's rate that small ops reach."""
    bf16 = max(rates["peak bf16"], rates["bf16"], rates["attention"])
    fp8, float32 = max(rates["fp8"], bf16), max(rates["peak float32"], rates["float32"])
    copy, ram = rates["copy"], float(psutil.virtual_memory().total) / usable_cores()
    achieved = {"float32": rates["float32"] / float32, "bf16": rates["bf16"] / bf16, "fp8": rates["fp8"] / fp8}
    achieved |= {"attention": rates["attention"] / bf16, "memory": memory, "link": 1.0, "network": 1.0, "host": memory}
    return {
        "kind": "cpu",
        "flops": {"float32": float32, "bf16": bf16, "fp8": fp8},
        "memory_bytes": ram,
        "memory_bytes_per_s": copy,
        "link_bytes_per_s": link,
        "network_bytes_per_s": link,
        "gpus_per_node": usable_cores(),
        "host_bytes": ram,
        "host_bytes_per_s": copy,
        "pcie_bytes_per_s": copy,
        "achieved": achieved | {"pcie": 1.0, "usable": KEPT, "host_usable": KEPT},
        "latency_s": 1e-5,
    }


def work(case: Case, hardware: Hardware) -> Work:
    config, spec = case.config, read_spec(case.model)
    batch = Batch(len(case.lengths), case.lengths[0], SCORED)
    return training(spec, config, resolve(config.trainer, spec.n_experts), hardware, batch)


def run(cases: Mapping[str, Case], ranks: int) -> list[dict[str, Any]]:
    """What each of so many ranks found."""
    each = {n: {"config": c.config.model_dump(mode="json"), "lengths": c.lengths, "steps": STEPS} for n, c in cases.items()}
    return launch("prl.bench.plan_rank", ranks, {"ranks": ranks, "cases": each})


def step_seconds(found: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float]:
    """Of the slowest rank, (of its threads, on the clock); medians but of the first step."""
    cpu, wall = ([statistics.median(x[i] for x in rank["cases"][name][1:]) for rank in found] for i in (1, 0))
    return max(cpu), max(wall)


def small_ops(rates: Mapping[str, float], references: Mapping[str, float]) -> float:
    """Share of a copy's rate that all that is no product of the reference steps reaches, at most 1. `references`: seconds."""
    machine = Hardware.model_validate(entry(rates, 1.0, 1.0))
    moved = left = 0.0
    for name, took in references.items():
        found = work(REFERENCES[name], machine)
        moved += found.memory
        left += took - times(found, machine).compute
    return min(moved / rates["copy"] / left, 1.0) if left > 0 else 1.0


def measure(hardware_to: Path | None, only: Sequence[str] = ()) -> Result:
    """BenchError where a case fails. `hardware_to`: where the machine's entry is written."""
    before, started = machine.calibrate(), machine.CpuTimes.now()
    chosen = {n: c for n, c in CASES.items() if not only or any(part in n for part in only)}
    single = REFERENCES | {n: c for n, c in chosen.items() if c.config.trainer.ranks == 1}
    double = {n: c for n, c in chosen.items() if c.config.trainer.ranks == 2} or {"dense, width 384, bfloat16, dp 2": DP_2}
    say("products, and steps of one rank")
    alone = run(single, 1)
    say("exchanges, and steps of two ranks")
    together = run(double, 2)
    rates = {kind: statistics.harmonic_mean([*each.values()]) for kind, each in alone[0]["rates"].items()}
    link = min(r["bytes"] / statistics.median(c for _, c in r["exchanges"]) for r in together)
    mine = entry(rates, link, small_ops(rates, {n: step_seconds(alone, n)[0] for n in REFERENCES}))
    hardware = Hardware.model_validate(mine)
    rows = [Row(f"rate: {kind}", rate / 1e9, "G/s") for kind, rate in rates.items()]
    rows += [Row("rate: exchange of two ranks", link / 1e9, "GB/s")]
    rows += [Row("rate: small ops", hardware.achieved.memory, "of a copy's")]
    parts: dict[str, Times] = {}
    for name, case in chosen.items():
        cpu, wall = step_seconds(alone if name in single else together, name)
        planned = parts[name] = times(work(case, hardware), hardware)
        rows.append(
            Row(f"{name}: planned step", planned.serial, "s", None, planned.serial / cpu, "measured", NEAR, timed=False)
        )
        rows.append(Row(f"{name}: on the clock", wall, "s"))
    if hardware_to is not None:
        hardware_to.write_text(yaml.safe_dump(mine, sort_keys=False))
    others = machine.share_of_others(started, machine.CpuTimes.now())
    cases = {n: {"lengths": c.lengths, "dtype": c.dtype, "trainer": dict(c.trainer)} for n, c in (REFERENCES | CASES).items()}
    return Result(
        "plan",
        rows,
        machine.facts(),
        {**vars(before), "all": others},
        machine.reasons(before, [("all", others)]),
        {"cases": cases},
        {"hardware": mine, "one rank": alone, "two ranks": together, "parts": {n: vars(t) for n, t in parts.items()}},
    )
