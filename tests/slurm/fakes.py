"""The commands of a job with fake roles (tests/launch/fakes.py), which need no model: `python -m tests.slurm.fakes MODULE …`.

Submission, supervisor, steps and signals are the real ones.
"""

from __future__ import annotations

import importlib
import sys

import prl.launch.__main__
import prl.rl
from prl.launch.slurm import guests
from prl.launch.slurm.lead import Lead
from tests.launch import fakes


class FakeLead(Lead):
    def __call__(self) -> None:
        prl.rl.role_specs = fakes.specs  # type: ignore[assignment]
        super().__call__()


class FakeBring(guests.Bring):
    def __call__(self) -> None:
        guests.role_specs = fakes.specs  # type: ignore[attr-defined]
        super().__call__()


def main(module: str, *words: str) -> int:
    prl.launch.__main__.Lead = FakeLead  # type: ignore[misc]
    guests.Bring = FakeBring  # type: ignore[misc]
    return int(importlib.import_module(module).main(list(words)))


if __name__ == "__main__":
    from tests.slurm.fakes import main as of_the_module  # whose classes the batch host can import

    sys.exit(of_the_module(*sys.argv[1:]))
