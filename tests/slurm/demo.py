"""`make slurm-demo`: a Slurm cluster on this machine, `sbatch slurm/rl_tiny.sh` on it, and a node that loses power on the way.

Installs Debian's Slurm where it is missing, needs root, and leaves the run's folder in outputs/. The exit code is the run's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.slurm.lab import Lab, until, why_not
from tests.slurm.runs import Run

LOST, LOST_AT, STEPS = "infer1", 10, 100


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def main() -> int:
    if reason := why_not():
        print(f"slurm-demo: {reason}", file=sys.stderr)
        return 1
    say("a cluster of four nodes, in namespaces of this machine")
    folder = Path("outputs").resolve()
    folder.mkdir(exist_ok=True)
    with Lab() as lab:
        print(lab.run("sinfo").stdout, end="")
        run = Run(lab, folder, f"trainer.steps={STEPS}", name=time.strftime("slurm-demo-%Y%m%d-%H%M%S"))
        say(f"sbatch slurm/rl_tiny.sh trainer.steps={STEPS}: job {run.follower}, which writes {run.log}")
        shown, off = 0, False

        def followed() -> bool:
            nonlocal shown, off
            told = run.told()
            print(told[shown:], end="", flush=True)
            shown = len(told)
            if not off and run.step() >= LOST_AT and run.serves("inference-0") and run.serves("inference-1"):
                off = True
                lab.power_off(LOST)
                say(f"{LOST} has lost power")
            return run.ended()

        until("the end of the run", followed, 900)
        code = run.code()
        followed()
        restarts = ", ".join(f"{r['of']} ({r['why']})" for r in run.replica_restarts())
        say(f"exit code {code}, {run.step()} of {STEPS} steps; started again: {restarts}; report: {run.dir / 'report.html'}")
        if not off:
            say(f"{LOST} was never switched off: the run ended before step {LOST_AT}")
        return code if code or off else 1


if __name__ == "__main__":
    sys.exit(main())
