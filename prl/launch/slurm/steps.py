"""Roles as steps of a Slurm job: `SlurmExecutor` starts, watches and ends them from the batch host through their sruns."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prl.launch import guard
from prl.launch.local import GONE, RoleSpec, role_environment, tail
from prl.launch.slurm import task
from prl.launch.slurm.environment import Allocation, of_the_job, scrubbed
from prl.launch.slurm.script import Part, srun
from prl.transport.run_dir import RunDir

RENEW_S = 1.0
"""How often the tasks are told that the supervisor lives."""
KILL_S = 12.0
"""Longer than Slurm takes from SIGTERM to SIGKILL where KillWait is short."""
SILENT_S = 11.0
"""A task that is not heard for that long (it says task.ALIVE_S) has lost its node, or its node the network."""
GENTLE_S = 3.0
"""How long tasks have to end by themselves before their srun is told to end the step."""


@dataclass
class Step:
    """An srun, and those of its roles that have not ended."""

    process: subprocess.Popen[bytes]
    file: Path
    nodes: tuple[str, ...]
    roles: set[str]
    stopped: set[str] = field(default_factory=set)
    heard: dict[str, float] = field(default_factory=dict)
    """When each role's task that has begun last said anything."""
    unread: bytes = b""

    def lines(self) -> list[str]:
        """What the tasks said since the last call."""
        assert self.process.stdout is not None
        while True:
            try:
                if not (data := os.read(self.process.stdout.fileno(), 1 << 16)):
                    break
            except BlockingIOError:
                break
            self.unread += data
        *whole, self.unread = self.unread.split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def tell(self, text: str) -> None:
        """To every task; one whose srun is ending misses it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(self.process.stdin.fileno(), text.encode())


class SlurmExecutor:
    """Ranks of one role are one step over the nodes of their component, every other role is a step of its own.

    Nothing outlives the executor: the tasks' standard input ends with it, they kill what they run, and Slurm kills what is left
    of a step, and the steps of a job that has ended. Where its host is gone, or it hangs for `lost_s`, the tasks kill what they
    run and have the job run again. `cleanup` are folders to delete at the end, `lost` nodes to start nothing on; `folder` is
    the executor's own.
    """

    def __init__(
        self,
        run: RunDir,
        allocation: Allocation,
        *,
        lost_s: float,
        lost: Sequence[str] = (),
        keep_env: Sequence[str] = (),
        cleanup: Sequence[Path] = (),
        folder: str = "steps",
    ):
        self.run, self.allocation, self.keep_env, self._cleanup = run, allocation, keep_env, cleanup
        self.lost_s = lost_s
        self._steps: list[Step] = []
        self._log_from: dict[str, int] = {}
        self._lost: Counter[str] = Counter(lost)
        """Nodes to how often a step on them ended without a word of its tasks, or had to be given up."""
        self._numbers = itertools.count()
        self._folder = run / folder
        self._remove()
        self._folder.mkdir(mode=0o700)
        self._listened = time.monotonic()
        self._alive, self._renewed, self._beats = self._folder / "alive", 0.0, itertools.count()
        self._renew()

    def start(self, specs: Sequence[RoleSpec]) -> None:
        groups: dict[str, list[RoleSpec]] = {}
        for spec in specs:
            role = spec.name.partition("-")[0]
            groups.setdefault(spec.name if role == "inference" else role, []).append(spec)
        for name, group in groups.items():
            self._start(name, sorted(group, key=lambda spec: int(spec.name.partition("-")[2] or 0)))

    def part_of(self, role: str) -> Part:
        """The component that a role runs in."""
        return self.allocation.parts["inference" if role.startswith("inference-") else "trainer"]

    def nodes_of(self, roles: Sequence[str]) -> tuple[str, ...]:
        """Where the roles of one step run: ranks over all nodes of their component, the orchestrator on the batch host, replica
        i on node i modulo their number, or on the node that lost the fewest steps where that one has lost some.
        """
        part = self.part_of(roles[0])
        kind, _, number = roles[0].partition("-")
        if kind == "inference":
            own = part.nodes[int(number) % len(part.nodes)]
            return (min(part.nodes, key=lambda node: (self._lost[node], node != own)),)
        return part.nodes if len(roles) > 1 else part.nodes[:1]

    def _start(self, name: str, specs: Sequence[RoleSpec]) -> None:
        part, nodes = self.part_of(specs[0].name), self.nodes_of([spec.name for spec in specs])
        logs = {spec.name: self.run / "logs" / f"{spec.name}.log" for spec in specs}
        for spec in specs:
            self._log_from[spec.name] = logs[spec.name].stat().st_size if logs[spec.name].exists() else 0
        tasks = [
            {
                "name": spec.name,
                "command": list(spec.command),
                "log": str(logs[spec.name].resolve()),
                "env": {guard.MARK: self.run.id, **spec.env},
            }
            for spec in specs
        ]
        file = self._folder / f"{next(self._numbers)}-{name}.json"
        step = {
            "mark": self.run.id,
            "job": self.allocation.job,
            "alive": str(self._alive.resolve()),
            "lost_s": self.lost_s,
            "addresses": dict(self.allocation.addresses),
            "tasks": tasks,
        }
        file.write_text(json.dumps(step))
        words = srun(
            part,
            name=name,
            nodes=nodes,
            tasks_per_node=len(specs) // len(nodes),
            cpus_per_task=max(spec.threads for spec in specs),
            command=(sys.executable, "-I", "-S", task.__file__, str(file.resolve())),
        )
        inherited = role_environment(scrubbed(os.environ), self.keep_env, max(spec.threads for spec in specs))
        with (self.run / "logs" / "srun.log").open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=inherited | of_the_job(os.environ),
                start_new_session=True,  # a signal for the batch host's process group is no concern of its steps
            )
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._steps.append(Step(process, file, nodes, {spec.name for spec in specs}))

    def _renew(self) -> None:
        """Say that the supervisor lives: by a file's content, since a shared filesystem may hold back its attributes."""
        if time.monotonic() < self._renewed + RENEW_S:
            return
        self._renewed = time.monotonic()
        with suppress(OSError), open(self._alive, "r+b" if self._alive.exists() else "wb") as f:
            f.write(b"%20d\n" % next(self._beats))  # in place: a full disk does not stop it

    def poll(self) -> dict[str, int]:
        self._renew()
        ended: dict[str, int] = {}
        now = time.monotonic()
        deaf, self._listened = now > self._listened + SILENT_S / 2, now  # what was said meanwhile may not have come yet
        for step in list(self._steps):
            over = step.process.poll() is not None  # asked before the last lines are read
            for line in step.lines():
                what, _, rest = line.partition(" ")
                name, _, code = rest.partition(" ")
                if name not in step.roles:
                    continue
                step.heard[name] = now
                match what:
                    case "stopped":
                        step.stopped.add(name)
                    case "continued":
                        step.stopped.discard(name)
                    case "ended":
                        ended[name] = int(code)
                        step.roles.discard(name)
            if over:
                for name in step.roles:
                    ended[name] = self._recorded(step, name)
                    if ended[name] == GONE:
                        self._lost.update(step.nodes)
                self._forget(step)
            elif deaf:
                step.heard = dict.fromkeys(step.heard, now)
            elif silent := {name for name in step.roles & step.heard.keys() if now > step.heard[name] + SILENT_S}:
                ended |= dict.fromkeys(silent, GONE)
                self._give_up(step, silent)
        return ended

    def _recorded(self, step: Step, name: str) -> int:
        """What a role that said nothing has written."""
        try:
            return int((self._folder / "ended" / f"{step.file.stem}.{name}").read_text())
        except (OSError, ValueError):
            return GONE  # srun itself may have ended with 0

    def _forget(self, step: Step) -> None:
        for stream in (step.process.stdin, step.process.stdout):
            assert stream is not None
            stream.close()
        self._steps.remove(step)

    def end(self, names: Sequence[str]) -> None:
        for step in self._steps:
            if gone := step.roles & set(names):
                self._give_up(step, gone)

    def _give_up(self, step: Step, gone: Set[str]) -> None:
        self._lost.update(step.nodes)
        step.tell("".join(f"{signal.SIGKILL:d} {name}\n" for name in gone))
        step.roles -= gone
        if not step.roles:
            step.process.terminate()  # its node may be out of reach: srun ends the step, or waits for nobody

    def stopped(self) -> set[str]:
        return {name for step in self._steps for name in step.stopped & step.roles}

    def signal(self, names: Sequence[str], number: int) -> None:
        for step in self._steps:
            if text := "".join(f"{number:d} {name}\n" for name in names if name in step.roles):
                step.tell(text)

    def kill(self) -> list[str]:
        began = time.monotonic()
        for step in self._steps:
            assert step.process.stdin is not None
            step.process.stdin.close()
        told: set[int] = set()
        while left := [step for step in self._steps if step.process.poll() is None]:
            spent = time.monotonic() - began
            if spent > KILL_S:
                break
            for step in left:
                step.lines()  # a full pipe would keep srun
                if spent > GENTLE_S and step.process.pid not in told:
                    told.add(step.process.pid)
                    step.process.terminate()  # which makes srun end its step
            time.sleep(0.02)
        for step in left:
            step.process.kill()
            step.process.wait()
        for step in list(self._steps):
            self._forget(step)
        return [f"step {step.file.stem} of job {self.allocation.job}" for step in left]

    def log_tail(self, name: str, lines: int) -> list[str]:
        return tail(self.run / "logs" / f"{name}.log", self._log_from.get(name, 0), lines)

    def close(self) -> None:
        self.kill()
        self._remove()

    def _remove(self) -> None:
        for path in (self._folder, *self._cleanup):
            shutil.rmtree(path, ignore_errors=True)
