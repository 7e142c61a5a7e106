"""The machine that a bench runs on: what it is, and whether anything else uses it meanwhile.

A figure taken beside other work says nothing about the code, so it is printed and not judged. Two things tell: the share of
all CPU time that other processes used, over a second before the runs and over each run, and how much one fixed matrix
product, timed many times, varies (other work on the same cores, and a hypervisor that gives them away, both show there).
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from prl.launch.local import usable_cores

MAX_OTHERS = 0.10
"""Share of all CPU time used by processes that are not ours, above which the machine counts as loaded."""
MAX_SPREAD = 0.30
"""(90th − 10th percentile) / median of the fixed product's seconds, above which it does."""
REPEATS = 60
SIZE = 512
PACKAGES = ("torch", "transformers", "numpy", "reasoning-gym")


@dataclass(frozen=True)
class Load:
    others: float
    spread: float


def reasons(load: Load, during: Sequence[tuple[str, float]] = ()) -> list[str]:
    """Why the machine counts as loaded; empty where it is quiet. `during`: (run, share of CPU time others used in it)."""
    found = []
    if not load.others <= MAX_OTHERS:
        found.append(f"before the runs others used {load.others:.0%} of the CPU time, at most {MAX_OTHERS:.0%} is quiet")
    if not load.spread <= MAX_SPREAD:
        found.append(f"a fixed matrix product varies by {load.spread:.0%} in time, at most {MAX_SPREAD:.0%} is quiet")
    noisy = [(share, name) for name, share in during if not share <= MAX_OTHERS]
    if noisy:
        share, name = max(noisy)
        found.append(
            f"during {len(noisy)} of {len(during)} runs others used more than {MAX_OTHERS:.0%} of the CPU time, "
            f"most in {name}: {share:.0%}"
        )
    return found


@dataclass(frozen=True)
class CpuTimes:
    """Seconds so far, summed over cores: all, not idle, and those of this process with its children that have ended."""

    total: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> CpuTimes:
        t = psutil.cpu_times()
        guests = getattr(t, "guest", 0.0) + getattr(t, "guest_nice", 0.0)  # counted in user and nice too
        total = sum(t) - guests
        return cls(total, total - t.idle - getattr(t, "iowait", 0.0), sum(os.times()[:4]))


def share_of_others(before: CpuTimes, after: CpuTimes) -> float:
    """CPU time between the two that neither idled nor was ours, as a share of all; NaN where the clocks stand still.

    Children count from the moment they have ended and were waited for: compare before a child's start with after its end.
    """
    total = after.total - before.total
    if total <= 0:
        return float("nan")
    return max(0.0, (after.busy - before.busy) - (after.own - before.own)) / total


def spread(seconds: Sequence[float]) -> float:
    low, middle, high = np.quantile(np.asarray(seconds, np.float64), [0.1, 0.5, 0.9])
    return float((high - low) / middle)


def calibrate(seconds: float = 1.0) -> Load:
    """Look at the machine while this process does nothing, then time the fixed product on all usable cores."""
    import torch

    before = CpuTimes.now()
    time.sleep(seconds)
    others = share_of_others(before, CpuTimes.now())
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        a = torch.ones(SIZE, SIZE)
        times = []
        for _ in range(REPEATS + REPEATS // 4):
            t0 = time.perf_counter()
            torch.mm(a, a)
            times.append(time.perf_counter() - t0)
    finally:
        torch.set_num_threads(threads)
    return Load(others, spread(times[-REPEATS:]))


def facts() -> dict[str, Any]:
    """What a figure depends on beside the code: CPU, cores, memory, versions, and the commit (+ where files differ from it)."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "commit": _commit(Path(__file__).parents[2]),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit(root: Path) -> str | None:
    """None outside of a git checkout."""
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "prl", "csrc", "configs"], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed.stdout else "")
