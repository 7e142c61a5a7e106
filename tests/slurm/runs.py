"""Runs of configs/slurm_tiny.yaml on the local cluster: submit, watch, and look at what is left."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from prl.orchestrator.audit import audit
from prl.trainer import ledger
from prl.transport.run_dir import RunDir
from tests.slurm.lab import Lab, clean, until

ROOT = Path(__file__).parents[2]
SITE = "configs/site/lab.yaml"


class Run:
    """One run, submitted as a user would: `sbatch slurm/rl_tiny.sh` on the login node, with `overrides`.

    `user` are words before sbatch that make its user another one; `env` is added to the environment.
    """

    _restarts = 0

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *overrides: str,
        name: str = "run",
        user: Sequence[str] = (),
        env: Mapping[str, str] = {},
    ):
        self.lab, self.dir, self.log = lab, RunDir(folder / name), folder / f"{name}.follower.log"
        env = clean() | {"PYTHONPATH": str(ROOT), "PRL_SITE": SITE, "PRL_PYTHON": sys.executable, **env}
        options = ("--parsable", "--partition=all", "--nodelist=infer0", f"--output={self.log}")
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
        words = f"prl.launch.role\0{role}\0--run\0{self.dir.root}\0--index\0{index or 0}\0"
        if who == "lead":
            words = f"prl.launch.slurm.lead\0{self.dir.root}\0"
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

    def until_restart(self, timeout_s: float = 120) -> None:
        """Until Slurm has the job run once more than before."""
        self._restarts += 1

        def restarted() -> bool:
            assert not self.ended(), self.told()
            return self.restarts() >= self._restarts

        until(f"restart {self._restarts} of job {self.job} ({self.log})", restarted, timeout_s)

    def assert_nothing_left(self, seconds: float = 30) -> None:
        """Nodes are idle and no process of the run is anywhere, within `seconds`."""

        def idle() -> bool:
            running = [pid for node in self.lab.nodes for pid in self.lab.processes(node, str(self.dir.root))]
            return not running and set(self.lab.states().values()) == {"idle"}

        until(f"idle nodes after {self.dir.root}", idle, seconds)
        assert not (self.dir / "steps").exists() and not (self.dir / "weights").exists()

    def assert_whole(self, steps: int) -> None:
        """Every step was trained, and every rollout and task accounted for."""
        assert sorted(self.losses()) == list(range(1, steps + 1))
        report = audit(self.dir)
        assert report.ok, str(report)
