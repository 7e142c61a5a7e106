"""Runs of configs/slurm_tiny.yaml on the local cluster: submit, watch, and look at what is left."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from prl.orchestrator.audit import audit
from prl.trainer import ledger
from prl.transport.run_dir import RunDir
from tests.slurm.lab import Lab, clean, until

ROOT = Path(__file__).parents[2]
SITE = "configs/site/lab.yaml"


def measured(fault: str, **seconds: float) -> None:
    """Add what a fault cost to the file that PRL_SLURM_FAULTS names."""
    if not (named := os.environ.get("PRL_SLURM_FAULTS")):
        return
    path = Path(named)
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept["command"] = f"PRL_SLURM_FAULTS={named} make test-slurm"
    kept.setdefault("faults", {})[fault] = {name: round(value, 1) for name, value in seconds.items()}
    path.write_text(json.dumps(kept, indent=1) + "\n")


class Run:
    """One run, submitted as a user would: `sbatch slurm/rl_tiny.sh` on the login node, with `overrides`.

    `folder` is one of the nodes; what the follower says goes to `log`, a folder of theirs and of this machine. `user` are words
    before sbatch that make its user another one; `env` is added to the environment.
    """

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *overrides: str,
        name: str = "run",
        log: Path | None = None,
        user: Sequence[str] = (),
        env: Mapping[str, str] = {},
        export: str = "ALL",
    ):
        self.lab, self.root, self.log = lab, folder / name, (log or folder) / f"{name}.follower.log"
        self.dir = RunDir(lab.seen(self.root) if log else self.root)
        env = clean() | {"PYTHONPATH": str(ROOT), "PRL_SITE": SITE, "PRL_PYTHON": sys.executable, **env}
        options = ("--parsable", f"--export={export}", "--partition=all", "--nodelist=infer0", f"--output={self.log}")
        given = (f"run.dir={folder}", f"run.name={name}", *overrides)
        self.follower = lab.run(*user, "sbatch", *options, "slurm/rl_tiny.sh", *given, cwd=ROOT, env=env).stdout.strip()

    @property
    def job(self) -> str:
        return str(json.loads((self.dir / "job.json").read_text())["job"])

    def entries(self) -> list[dict[str, Any]]:
        """The trainer's ledger: one line a step, and one a resume."""
        path = self.dir / "ledger.jsonl"
        return ledger.read(path) if path.exists() else []

    def losses(self) -> dict[int, float]:
        return {entry["step"]: entry["loss"] for entry in ledger.surviving(self.entries())}

    def step(self) -> int:
        """The last optimizer step that was trained and not undone."""
        return max(self.losses(), default=0)

    def until_step(self, step: int, timeout_s: float = 240) -> None:
        def reached() -> bool:
            assert not self.ended(), self.told()
            return self.step() >= step

        until(f"step {step} of {self.dir.root} ({self.log})", reached, timeout_s)

    def ended(self) -> bool:
        return not self.lab.run("squeue", "-h", "-j", self.follower, check=False).stdout.strip()

    def told(self) -> str:
        """What the follower has written."""
        return self.log.read_text() if self.log.exists() else ""

    def code(self, timeout_s: float = 400) -> int:
        """The follower's exit code, which is the run's; 128 and more where Slurm or a signal ended it."""
        until(f"the end of {self.dir.root} ({self.log})", self.ended, timeout_s)
        shown = self.lab.run("scontrol", "show", "job", self.follower).stdout
        code, number = shown.partition("ExitCode=")[2].split(maxsplit=1)[0].split(":")
        return int(code) or (int(number) and 128 + int(number))

    def pid(self, who: str) -> int:
        """This machine's id of a role's process, or of the supervisor's (`lead`)."""
        role, _, index = who.partition("-")
        words = f"prl.launch.role\0{role}\0--run\0{self.root}\0--index\0{index or 0}\0"
        if who == "lead":
            words = f"prl.launch.slurm.component\0{self.root}/slurm/trainer\0"
        (pid,) = (pid for node in self.lab.nodes for pid in self.lab.processes(node, words))
        return pid

    def replica_restarts(self) -> list[dict[str, Any]]:
        """What the supervisor says about the replicas that it has started again."""
        path = self.dir / "metrics.jsonl"
        records = map(orjson.loads, path.read_bytes().splitlines()) if path.exists() else ()
        return [r for r in records if r.get("name") == "restart" and r["role"] == "supervisor"]

    def serves(self, replica: str) -> bool:
        """Whether the replica has announced itself and says that it lives."""
        status = self.dir.read_status(replica)
        return self.dir.address(replica) is not None and status is not None and status["phase"] == "serving"

    def node(self, replica: str) -> str:
        address = self.dir.address(replica)
        assert address is not None
        return next(node for node in self.lab.nodes if self.lab.address(node) == address["host"])

    def restarts(self) -> int:
        shown = self.lab.run("scontrol", "show", "job", self.job, check=False).stdout
        return int(shown.partition("Restarts=")[2].split()[0])

    def until_restart(self, before: int, timeout_s: float = 120) -> None:
        """Until Slurm has run the job again more often than `before`."""

        def restarted() -> bool:
            assert not self.ended(), self.told()
            return self.restarts() > before

        until(f"restart {before + 1} of job {self.job} ({self.log})", restarted, timeout_s)

    def reach_the_time_limit(self) -> None:
        """Give this life one or two minutes more, and the next one its full time again."""
        before, shown = self.restarts(), self.lab.run("scontrol", "show", "job", self.job).stdout
        hours, minutes, _ = shown.partition("RunTime=")[2].split()[0].split(":")
        self.lab.run("scontrol", "update", f"JobId={self.job}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}")
        self.until_restart(before, 150)
        self.lab.run("scontrol", "update", f"JobId={self.job}", "TimeLimit=20")

    def until_ready(self, *roles: str, timeout_s: float = 90) -> None:
        """Until each of the roles has just said that it runs."""

        def ready() -> bool:
            assert not self.ended(), self.told()
            told = [self.dir.read_status(role) for role in roles]
            return all(s and s["phase"] == "running" and time.time() - s["t"] < 1.5 for s in told)

        until(f"all roles of {self.dir.root} ({self.log})", ready, timeout_s)

    def lives(self) -> int:
        """How often the supervisor has begun."""
        log = self.dir / "logs" / "slurm.log"
        return len(re.findall(r"^job \d+: trainer on ", log.read_text(), re.M)) if log.exists() else 0

    def ends_in_a_resume(self, fault: str, act: Callable[[], object], timeout_s: float = 120) -> None:
        """Let the fault happen and wait until the next life has trained a step that the one before had not.

        Measured from the fault: until Slurm has ended the life, the next one's supervisor begins, its first step is trained,
        and it is further than before.
        """
        lives, restarts, began = self.lives(), self.restarts(), time.time()
        act()
        self.until_restart(restarts, timeout_s)
        noticed = time.time() - began
        until(f"life {lives + 1} of {self.dir.root} ({self.log})", lambda: self.lives() > lives, timeout_s)
        again = time.time() - began
        steps = [(e["step"], e["t"] - began) for e in self.entries() if e["kind"] == "step"]
        self.until_step(1 + max(n for n, t in steps if t < again))
        times = [(e["step"], e["t"] - began) for e in self.entries() if e["kind"] == "step" and e["t"] > began + again]
        measured(fault, ended_s=noticed, again_s=again, trains_s=times[0][1], further_s=times[-1][1])

    def ends_in_a_restart(self, fault: str, replica: str, act: Callable[[], object], timeout_s: float = 120) -> None:
        """Let the fault happen and wait until the replica, and no other, was lost within 20 s, started again, and serves."""
        told, began = len(self.replica_restarts()), time.time()
        act()
        until(f"the restart of {replica}", lambda: len(self.replica_restarts()) > told, 60)
        *_, restart = self.replica_restarts()
        assert (restart["of"], len(self.replica_restarts())) == (replica, told + 1)
        assert restart["t"] - began < 20, restart
        until(f"{replica} serving again", lambda: self.serves(replica), timeout_s)
        measured(fault, noticed_s=restart["t"] - began, serves_s=time.time() - began)

    def assert_nothing_left(self, seconds: float = 30) -> None:
        """Nodes are idle and no process of the run is anywhere, within `seconds`."""

        def idle() -> bool:
            running = [pid for node in self.lab.nodes for pid in self.lab.processes(node, str(self.root))]
            return not running and set(self.lab.states().values()) == {"idle"}

        until(f"idle nodes after {self.dir.root}", idle, seconds)
        assert not (self.dir / "steps").exists() and not (self.dir / "weights").exists()

    def assert_whole(self, steps: int) -> None:
        """Every step was trained, and every rollout and task accounted for."""
        assert sorted(self.losses()) == list(range(1, steps + 1))
        report = audit(self.dir)
        assert report.ok, str(report)
