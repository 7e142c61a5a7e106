"""`python -m prl.launch doctor --site YAML`: whether a run can live on a cluster, found out by a one-minute job on it.

The settings of Slurm are judged first, then a job with the components of the site file is submitted as a run's would be. Its
batch host starts a probe (probe.py) on every node as a role is started, asks them, and writes what it finds to its folder.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, Problem, load_site
from prl.config.schema import Slurm
from prl.launch.local import role_environment
from prl.launch.slurm import probe
from prl.launch.slurm.environment import Allocation, allocation, ask, of_the_job, scrubbed
from prl.launch.slurm.executor import Ended, HetSlurmExecutor
from prl.launch.slurm.findings import (
    SEEN_WARN_S,
    Finding,
    of_clocks,
    of_cluster,
    of_nodes,
    of_software,
    partitions,
    settings,
    worst,
)
from prl.launch.slurm.script import Part, run_job, srun
from prl.launch.slurm.state import over, states
from prl.launch.supervisor import CONFIG
from prl.rl import say, store
from prl.transport import ports
from prl.transport.run_dir import keep_private

HELP = """Check a cluster before the first run, in a job of about a minute with the nodes of the site file.

Prints what it finds, each with a mend. Exit codes: 0 a run can live here, 1 something would stop it, 2 configuration.

\b
Examples:
  python -m prl.launch doctor --site configs/site/mine.yaml
  python -m prl.launch doctor --site configs/site/mine.yaml launch.slurm.trainer.nodes=2
"""
TIME_MIN = 5
"""The job's time limit; it needs about one."""
ANSWER_S, SEE_S, RACE_S, MEET_S = 90.0, 15.0, 2.0, 60.0
"""For an answer, for a file to be seen, for renames against reads, for a sum over all nodes."""
ASKED, FINDINGS = "slurm.json", "findings.json"
NO_FOLDER = "put run.dir on a filesystem that every node mounts, in both partitions"
NO_PORT = f"ask for TCP between the nodes of both partitions: ports {ports.FIRST} to {ports.LAST}, and those of the kernel"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Lost(OSError):
    """A node does not answer."""


@dataclass
class Node:
    """A node's probe, and how it is asked."""

    name: str
    address: str
    process: subprocess.Popen[str]
    errors: Path

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """Its answer; {"error": words} where it cannot give one. Lost where nothing comes in time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        late = threading.Timer(ANSWER_S, self.process.kill)
        late.start()
        try:
            self.process.stdin.write(json.dumps({"do": do, **question}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if not line.endswith("\n"):
            words = self.errors.read_text(errors="replace").strip().splitlines()
            raise Lost(f"{self.name} did not answer" + (f": {words[-1]}" if words else ""))
        return dict(json.loads(line))


Answers = dict[str, dict[str, Any]]


class Ward:
    """The probes of all nodes of a job, on its batch host."""

    def __init__(self, job: Allocation, folder: Path):
        self.job, self.folder = job, folder
        environment = role_environment(scrubbed(os.environ), (), 1) | of_the_job(os.environ)
        self.own = Path(tempfile.mkdtemp(prefix="prl-doctor-"))  # the folder itself may be what is wrong
        self.nodes: dict[str, Node] = {}
        for part in job.parts.values():
            for name in part.nodes:
                self.nodes[name] = self._start(part, name, environment)

    def _start(self, part: Part, name: str, environment: Mapping[str, str]) -> Node:
        command = (sys.executable, "-I", "-S", probe.__file__)
        words = srun(part, name="doctor", nodes=(name,), tasks_per_node=1, cpus_per_task=1, command=command)
        errors = self.own / name
        with errors.open("w") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment},
                start_new_session=True,
            )
        return Node(name, self.job.addresses[name], process, errors)

    def close(self) -> None:
        for node in self.nodes.values():
            assert node.process.stdin is not None
            node.process.stdin.close()
        deadline = time.monotonic() + 10
        for node in self.nodes.values():
            try:
                node.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
        shutil.rmtree(self.own, ignore_errors=True)

    def ask(self, questions: Mapping[str, Mapping[str, Any]]) -> Answers:
        """Ask several nodes at once."""

        def one(name: str) -> dict[str, Any]:
            try:
                return self.nodes[name].ask(**questions[name])
            except Lost as e:
                return {"error": str(e)}

        with ThreadPoolExecutor(max_workers=len(questions)) as pool:
            return dict(zip(questions, pool.map(one, questions), strict=True))

    def all(self, do: str, **question: Any) -> Answers:
        return self.ask({name: {"do": do, **question} for name in self.nodes})

    # -- what is found out ---------------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """All of it. Nodes that do not answer are left out of what comes after."""
        facts = self.all("facts", folder=str(self.folder))
        yield from of_nodes(self.job.parts, facts)
        for name, node in facts.items():
            if "limits" not in node:
                self.nodes.pop(name).process.kill()
        if not self.nodes:
            return
        yield from of_clocks(self.skews())
        unshared = []
        for finding, name in self.folder_seen():
            yield finding
            unshared += [name] if name else []
        apart = [name for name in self.nodes if name not in unshared]
        if len(apart) > 1:
            yield from self.renames(apart)
            yield from self.renames(apart[::-1])
            yield from self.locks(apart)
        answers = self.all("software", python=sys.executable)
        shown = {name: Part(p.group, tuple(n for n in p.nodes if n in answers), p.gpus_per_node) for name, p in self.parts()}
        software = list(of_software(shown, answers))
        yield from software
        unreached = list(self.reached())
        yield from unreached
        if len(self.nodes) > 1 and not any(f.level == "stop" for f in [*software, *unreached]):
            yield from self.sums()

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from self.job.parts.items()

    def skews(self) -> dict[str, float]:
        """From the quickest of several answers."""
        skews = {}
        for name, node in self.nodes.items():
            tried = []
            for _ in range(5):
                before = time.time()
                there = node.ask("clock")["t"]
                after = time.time()
                tried.append((after - before, there - (before + after) / 2))
            skews[name] = min(tried)[1]
        return skews

    def folder_seen(self) -> Iterator[tuple[Finding, str]]:
        """Whether every node sees what the batch host writes, it what they write, and how soon; the node that does not."""
        token = secrets.token_hex(8)
        late, sound = 0.0, True
        here, path = self.folder / "from-batch-host", str(self.folder / "from-batch-host")
        here.write_text(token)
        for name, answer in self.all("see", path=path, text=token, within_s=SEE_S).items():
            if answer.get("s") is None:
                sound = False
                yield Finding("stop", f"{name} does not see {self.folder} as the batch host does", NO_FOLDER), name
                continue
            late = max(late, answer["s"])
            there = self.folder / f"from-{name}"
            wrote = self.nodes[name].ask("write", path=str(there), text=token)
            seen = probe.see(str(there), token, SEE_S)["s"]
            if "error" in wrote or seen is None:
                sound = False
                yield (
                    Finding("stop", f"{name} cannot write to {self.folder}: {wrote.get('error', 'not seen')}", NO_FOLDER),
                    name,
                )
            else:
                late = max(late, seen)
        if late > SEEN_WARN_S:
            mend = "mount it with shorter attribute caching (NFS: actimeo=1), or use another filesystem"
            yield Finding("warn", f"a new file in {self.folder} is seen after {late:.1f} s", mend), ""
        if sound:
            yield Finding("ok", f"every node sees {self.folder}, after {late:.2g} s"), ""

    def renames(self, names: Sequence[str]) -> Iterator[Finding]:
        """One node puts new files under an old name, the others read: each sees the old one or the new one."""
        path = str(self.folder / "replaced")
        writer, *readers = names
        self.nodes[writer].ask("replace", path=path, seconds=0.02)
        questions: dict[str, dict[str, Any]] = {name: {"do": "reread", "path": path, "seconds": RACE_S} for name in readers}
        questions[writer] = {"do": "replace", "path": path, "seconds": RACE_S + 0.5}
        answers = self.ask(questions)
        wrong = {name: a for name, a in answers.items() if a.get("missing") or a.get("torn") or "error" in a}
        for name, a in wrong.items():
            what = a.get("error") or f"{a['missing']} of {a['n']} reads found no file, {a['torn']} a torn one"
            mend = "use a filesystem whose rename replaces a file at once (NFS, Lustre, GPFS and BeeGFS do)"
            yield Finding("stop", f"{name}, as {writer} renames a file over an old one: {what}", mend)
        if not wrong:
            yield Finding(
                "ok", f"a file that {writer} replaces by a rename stays whole ({sum(a['n'] for a in answers.values())} tries)"
            )

    def locks(self, names: Sequence[str]) -> Iterator[Finding]:
        """A lock and a new name belong to one node."""
        path, sound = str(self.folder / "lock"), True
        first, *others = names
        for name in others:
            held = self.nodes[first].ask("lock", path=path).get("got")
            second = self.nodes[name].ask("lock", path=path)
            freed = held and "error" not in self.nodes[first].ask("unlock", path=path)
            after = freed and (second.get("got") or self.nodes[name].ask("lock", path=path).get("got"))
            if second.get("got") or not after:
                sound = False
                what = "both have it" if second.get("got") else second.get("error", "the second never gets it")
                mend = "mount it with locks that all nodes share (Lustre: -o flock; NFS: without nolock or local_lock)"
                yield Finding("stop", f"a lock of {first} and {name} on one file: {what}", mend)
            if after:
                self.nodes[name].ask("unlock", path=path)
        made = self.ask({name: {"do": "create", "path": str(self.folder / "created")} for name in names})
        if (n := sum(bool(answer.get("made")) for answer in made.values())) != 1:
            sound = False
            yield Finding("stop", f"{n} nodes have created one file with O_EXCL", "use another filesystem for run.dir")
        if sound:
            yield Finding("ok", "a lock on a file is one node's alone")

    def reached(self) -> Iterator[Finding]:
        """Connections from every node to every other one, on ports that roles would listen on."""
        candidates = list(ports.ports("doctor"))
        asked = {name: {"do": "listen", "host": node.address, "ports": candidates} for name, node in self.nodes.items()}
        found = self.ask(asked)
        for name, answer in found.items():
            if "error" in answer:
                yield Finding("stop", f"{name}: {answer['error']}", f"free ports from {ports.FIRST} to {ports.LAST} there")
        pairs, wrong = 0, 0
        listening = {name: answer["port"] for name, answer in found.items() if "port" in answer}
        for to, port in listening.items():
            host = self.nodes[to].address
            answers = self.ask({n: {"do": "connect", "host": host, "port": port} for n in self.nodes})
            for name, answer in answers.items():
                pairs += 1
                if "error" in answer:
                    wrong += 1
                    yield Finding("stop", f"{name} does not reach {to} ({host}:{port}): {answer['error']}", NO_PORT)
        if not wrong and len(listening) == len(found):
            yield Finding(
                "ok", f"every node reaches every other one ({pairs} connections, ports from {min(listening.values())})"
            )

    def sums(self) -> Iterator[Finding]:
        """gloo, and NCCL where every node has GPUs, over all nodes of both components."""
        backends = ["gloo", *(["nccl"] if all(p.gpus_per_node for p in self.job.parts.values()) else [])]
        for backend in backends:
            names = list(self.nodes)
            host = self.nodes[names[0]].address
            with socket.create_server((host, 0)) as free:  # rank 0 runs here: the batch host is the first node
                port = free.getsockname()[1]
            spec = {"do": "collective", "python": sys.executable, "world": len(names), "host": host, "port": port}
            spec |= {"backend": backend, "timeout_s": MEET_S}
            began = time.monotonic()
            answers = self.ask({n: {**spec, "rank": i, "address": self.nodes[n].address} for i, n in enumerate(names)})
            for name, answer in answers.items():
                if "error" in answer:
                    mend = NO_PORT if backend == "gloo" else f"{NO_PORT}; NCCL_DEBUG=INFO says more"
                    yield Finding("stop", f"{name}: no sum over all nodes by {backend}: {answer['error']}", mend)
            if not any("error" in answer for answer in answers.values()):
                yield Finding("ok", f"a sum over {len(names)} nodes by {backend} ({time.monotonic() - began:.1f} s)")


class Examine:
    """The function of the job's first component."""

    handles_signals = True

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self) -> None:
        if code := inside(self.folder):
            raise Ended(code, f"a run could not live here: see {self.folder / FINDINGS}")


def inside(folder: Path) -> int:
    """On the batch host."""
    slurm = Slurm.model_validate_json((folder / ASKED).read_bytes())
    findings: list[Finding] = []
    try:
        job = allocation(slurm)
        say(f"job {job.job}: {', '.join(f'{name} on {chr(32).join(part.nodes)}' for name, part in job.parts.items())}")
        ward = Ward(job, folder)
        try:
            findings += ward.findings()
        finally:
            ward.close()
    except OSError as e:
        findings.append(Finding("stop", str(e), "the job's log says more"))
    store(folder / FINDINGS, msgspec.json.encode(findings).decode())
    return worst(findings)


def told(finding: Finding) -> str:
    return f"{finding.level:<5} {finding.what}" + (f"\n      → {finding.mend}" if finding.mend else "")


def by_job(slurm: Slurm, folder: Path, wait_s: float) -> Iterator[Finding]:
    """Submit the job and wait for what it finds."""
    job = run_job("doctor", folder, slurm, Path.cwd(), Examine(folder))
    try:
        inherited = role_environment(scrubbed(os.environ), (), 1)
        number = HetSlurmExecutor(job.folder, environment=inherited).submit_job(job).job_id
    except (OSError, ValueError) as e:
        words, _, mend = str(e).partition("; ")
        yield Finding("stop", f"the job is refused: {words}", mend or "mend what it says in the site file")
        return
    say(f"job {number}: its log is {job.log}")
    deadline, reason = time.monotonic() + wait_s, ""
    try:
        while (found := states(number)) is None or not over(found):
            waits = [why for state, why in (found or {}).values() if state == "PENDING"]
            reason = waits[0] if waits else ""
            if time.monotonic() > deadline and (waits or found is None):
                mend = "try again with a longer --wait-s, or ask for what the reason says (man squeue, JOB REASON CODES)"
                yield Finding("stop", f"job {number} has not begun within {wait_s:g} s: {reason or 'no answer'}", mend)
                return
            time.sleep(0.5)
    finally:
        ask("scancel", number)  # also where this command is ended
    path, began = folder / FINDINGS, time.monotonic()
    while not path.exists() and time.monotonic() - began < SEE_S:  # a shared filesystem may show it late
        time.sleep(0.2)
    if path.exists():
        yield from msgspec.json.decode(path.read_bytes(), type=list[Finding])
        return
    lines = job.log.read_text(errors="replace").splitlines() if job.log.exists() else []
    last = f"; its last line: {lines[-1]}" if lines else f"; {folder} may not be visible from {slurm.trainer.partition}"
    yield Finding("stop", f"job {number} ended without findings{last}", NO_FOLDER)


@app.command(help=HELP)
def command(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]…")] = None,
    site: Annotated[Path | None, typer.Option(metavar="YAML", envvar="PRL_SITE", help="What is true of the cluster.")] = None,
    wait_s: Annotated[float, typer.Option(help="How long the job may wait for its nodes.")] = 300.0,
) -> None:
    keep_private()
    try:
        if site is None:
            raise ConfigError("command line", [Problem("--site", "missing: name a site file (copy configs/site/example.yaml)")])
        config = load_site(site, overrides or [])
        slurm = config.launch.slurm or Slurm()
    except ConfigError as e:
        say(str(e))
        raise typer.Exit(CONFIG) from None
    findings = []

    def tell(found: Iterator[Finding]) -> None:
        for finding in found:
            findings.append(finding)
            print(told(finding), flush=True)

    try:
        told_by_slurm = settings(ask("scontrol", "show", "config"))
        tell(of_cluster(slurm, told_by_slurm, partitions(ask("scontrol", "--oneliner", "show", "partition"))))
    except OSError as e:
        tell(iter([Finding("stop", f"Slurm does not answer here: {e}", "run this on a login node")]))
    if not worst(findings):
        folder = (config.run.dir / f"doctor-{secrets.token_hex(4)}").resolve()
        (folder / "logs").mkdir(parents=True, mode=0o700)
        short = slurm.model_copy(update={"time_min": min(TIME_MIN, slurm.time_min)})
        store(folder / ASKED, short.model_dump_json())
        tell(by_job(short, folder, wait_s))
        if not worst(findings):
            shutil.rmtree(folder, ignore_errors=True)
    stops = sum(finding.level == "stop" for finding in findings)
    say(f"{stops} of {len(findings)} findings would stop a run" if stops else "a run can live here")
    raise typer.Exit(worst(findings))


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 nothing would stop a run, 1 something would, 2 configuration."""
    return exit_code(app, args, "python -m prl.launch doctor")


if __name__ == "__main__":
    sys.exit(main())
