"""Two ordinary users on one cluster: one has a run, the other one tries to get at it, from the login node and from a job on the
same nodes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab, LabError, clean, why_not
from tests.slurm.runs import ROOT, Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

OWNER, INTRUDER = 61001, 61002
TOKENS = {"HF_TOKEN": "hf_planted", "NVIDIA_API_KEY": "nv_planted", "MINE": "mine_planted"}


def by(user: int, *words: str) -> tuple[str, ...]:
    """The words as a command of a user with the usual umask."""
    me = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    return (*me, "bash", "-c", 'umask 022; exec "$@"', "-", *words)


def admit_users(lab: Lab) -> None:
    """Give the cluster its two users, who may use this checkout and its Python wherever they lie: a folder above them that is
    closed to others is covered by an empty one with nothing but them in it, in the cluster's namespaces alone."""
    users = {"owner": OWNER, "intruder": INTRUDER}
    passwd = "".join(f"{name}:x:{n}:{n}::/:/bin/bash\n" for name, n in users.items())
    (lab.root / "passwd").write_text(Path("/etc/passwd").read_text() + passwd)
    (lab.root / "group").write_text(Path("/etc/group").read_text() + "".join(f"{name}:x:{n}:\n" for name, n in users.items()))
    script = [f"mount --bind {lab.root}/{name} /etc/{name}" for name in ("passwd", "group")]
    closed: dict[Path, list[Path]] = {}
    for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve()):
        if (above := next((p for p in reversed(path.parents) if not p.stat().st_mode & 0o001), None)) is not None:
            closed.setdefault(above, []).append(path)
    for above, paths in closed.items():
        aside = [f"/run/aside{path}" for path in paths]
        script += [f"mkdir -p {a}; mount --bind {p} {a}" for a, p in zip(aside, paths, strict=True)]
        script += [f"mount -t tmpfs -o mode=755 tmpfs {above}"]
        script += [f"mkdir -p {p}; mount --move {a} {p}" for a, p in zip(aside, paths, strict=True)]
    for node in ("head", *lab.nodes):
        lab.run("bash", "-ec", "\n".join(script), node=node)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A cluster of its own: pytest's folders are closed to others."""
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="prl-lab-", dir="/var/tmp"))
    folder.chmod(0o755)
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # Slurm's daemons hand it on to jobs
    try:
        with Lab(folder) as lab:
            admit_users(lab)
            try:
                lab.run(
                    *by(INTRUDER, sys.executable, "-c", "import prl.transport.batches"), env=clean() | {"PYTHONPATH": str(ROOT)}
                )
            except LabError as e:
                pytest.skip(f"other users cannot read this checkout or its Python: {e}")
            yield lab
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
        shutil.rmtree(folder)


class Process:
    """One of the owner's processes on a node, as root sees it."""

    def __init__(self, folder: Path):
        self.words = (folder / "cmdline").read_bytes().decode().split("\0")
        self.environment = (folder / "environ").read_bytes().decode()
        self.status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        core = next(line for line in (folder / "limits").read_text().splitlines() if line.startswith("Max core"))
        self.core = core.split()[4]
        self.sockets = set()
        for fd in (folder / "fd").iterdir():
            try:
                self.sockets.add(os.readlink(fd))
            except OSError:
                continue

    @property
    def role(self) -> str:
        """Of the run's roles, "" where it is none."""
        return self.words[self.words.index("prl.launch.role") + 1] if "prl.launch.role" in self.words else ""


def processes(lab: Lab, node: str) -> list[Process]:
    found = []
    for pid in lab.processes(node, ""):
        folder = Path(f"/proc/{pid}")
        try:
            if folder.stat().st_uid == OWNER:
                found.append(Process(folder))
        except OSError:
            continue
    return found


def listening(lab: Lab, node: str) -> dict[str, tuple[str, int]]:
    """Socket (as in /proc/PID/fd) to its address and port, of all TCP sockets that listen on a node."""
    found = {}
    for family in ("tcp", "tcp6"):
        for line in lab.run("cat", f"/proc/net/{family}", node=node).stdout.splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, _, port = fields[1].partition(":")
                dotted = ".".join(str(b) for b in reversed(bytes.fromhex(address))) if len(address) == 8 else address
                found[f"socket:[{fields[9]}]"] = (dotted, int(port, 16))
    return found


def logged(run: Run) -> dict[str, int]:
    """Bytes of the roles' logs."""
    return {path.name: path.stat().st_size for path in (run.dir / "logs").iterdir() if path.name != "slurm.log"}


def stop(lab: Lab, run: Run) -> None:
    """As its owner does: save and end."""
    lab.run(*by(OWNER, "scancel", "--batch", "--signal=USR2", run.job))


def test_another_user_gets_at_nothing_of_a_run(lab: Lab, request: pytest.FixtureRequest) -> None:
    home = lab.root / "owner"
    home.mkdir()
    os.chown(home, OWNER, OWNER)
    run = Run(lab, home, "trainer.steps=10000", "checkpoint.every=2", "launch.slurm.at_limit=end", user=by(OWNER), env=TOKENS)
    run.until_step(2)
    secret = (run.dir / "secret").read_text()
    everyone = {node: processes(lab, node) for node in lab.nodes}

    # What root sees: the secret is in its file alone, and so are the owner's tokens in the shell they came from.
    everybody = [p for node in everyone.values() for p in node]
    assert {p.role for p in everybody} == {"", "trainer", "orchestrator", "inference"}
    for p in everybody:
        assert secret not in p.environment and secret not in " ".join(p.words), p.words
        if f"SLURM_JOB_ID={run.job}\0" in p.environment:
            assert "_planted" not in p.environment, p.words
        if p.role or "prl.launch.slurm.component" in p.words:
            assert p.core == "0" and p.status["Umask"].strip() == "0077", p.words
    marks = {e for p in everybody if p.role for e in p.environment.split("\0") if e.startswith("PRL_RUN=")}
    (mark,) = (entry.removeprefix("PRL_RUN=") for entry in marks)
    scratch = list(Path("/tmp").glob(f"prl-{mark}-*"))
    request.addfinalizer(lambda: [shutil.rmtree(path, ignore_errors=True) for path in scratch])  # which a killed node leaves
    assert len(scratch) == 5, scratch
    modes = {path: path.stat() for path in (*run.dir.root.rglob("*"), *scratch)}
    for path, stat in modes.items():
        assert stat.st_uid == OWNER and not stat.st_mode & 0o077, f"{path}: {stat.st_mode:o}"

    # The roles listen on the job's interface alone.
    ports = []
    for node in lab.nodes:
        addresses = listening(lab, node)
        for p in everyone[node]:
            for address, port in {addresses[s] for s in p.sockets & addresses.keys()} if p.role else ():
                assert address == lab.address(node), (p.words, address)
                store = run.dir.address("trainer-store")
                is_store = store is not None and (store["host"], store["port"]) == (address, port)
                ports.append((address, port, "store" if is_store else p.role))
    kinds = sorted(kind for _, _, kind in ports)
    assert kinds.count("inference") == 2 and kinds.count("orchestrator") == 1 and kinds.count("store") == 1
    assert kinds.count("trainer") >= 2  # gloo

    # The intruder, from a job on the same nodes.
    what = lab.root / "what.json"
    paths = [str(path) for path in (run.dir.root, *modes)]
    what.write_text(json.dumps({"ports": ports, "paths": paths, "user": OWNER, "spool": f"{lab.root}/spool/"}))
    program = (sys.executable, "-B", str(ROOT / "tests" / "slurm" / "intruder.py"), str(what))
    told = lab.root / "intruder"  # a file each: srun cuts long lines to pieces
    told.mkdir()
    os.chown(told, INTRUDER, INTRUDER)
    options = ("--partition=all", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--mem=500")
    options += (f"--output={told}/%t", "--error=none")
    srun = ("srun", *options, *program)
    before, written = run.step(), logged(run)
    lab.run(*by(INTRUDER, *srun), cwd="/tmp", timeout_s=240)
    reports = [json.loads(path.read_text()) for path in told.iterdir()]
    assert sorted(r["node"] for r in reports) == sorted(lab.nodes)
    got = sorted({thing for r in reports for thing in r["got"]})
    assert not got, "\n".join(got)
    assert not any(secret in r["seen"] for r in reports) and all(str(run.dir.root) in r["seen"] for r in reports)
    grown = {name: size - written[name] for name, size in logged(run).items()}
    assert max(grown.values()) < 10_000, f"strangers fill the disk: {grown}"
    # The residual risk of docs/slurm.md: c10d's store lets anybody in.
    assert any(r["store"] for r in reports)

    # And from the login node.
    job = run.job
    steps = [s for s in lab.run("squeue", "--noheader", "--steps", "--format=%i").stdout.split() if s[-1].isdigit()]
    assert len(steps) > 3, steps
    shown = [
        lab.run(*by(INTRUDER, *words.split())).stdout
        for words in (
            f"scontrol show job {job}",
            "scontrol show step",
            "squeue --all --format=%all",
            "squeue --steps",
            "ps -ef",
        )
    ]
    assert not any(secret in text or "_planted" in text for text in shown)
    assert "Comment=" not in shown[0]
    for words in (  # some end with 0 all the same
        f"scancel {job}",
        f"scancel --signal=USR2 {job}",
        f"scontrol requeue {job}",
        f"scontrol update jobid={job} comment=x",
        f"scontrol write batch_script {job} -",
        f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --mem=0 id",
        *(f"sattach {step}" for step in steps),
    ):
        done = lab.run(*by(INTRUDER, "timeout", "10", *words.split()), check=False)
        refused = done.returncode not in (0, 124) or any(w in done.stderr for w in ("Invalid user id", "no tasks running"))
        assert refused and not done.stdout, (words, done.stdout, done.stderr)

    # None of it has hurt the run, and nothing was written down.
    run.until_step(before + 4)
    stop(lab, run)
    assert run.code() == 75, run.told()
    run.assert_nothing_left()
    assert sorted(run.losses()) == list(range(1, run.step() + 1)) and run.restarts() == 0
    written_by_all = [path for path in lab.root.rglob("*") if path.is_file()]  # Slurm's state and job scripts too
    assert [path for path in written_by_all if secret.encode() in path.read_bytes()] == [run.dir / "secret"]
    pickles = [path for path in run.dir.root.rglob("*") if path.is_file() and path.read_bytes()[:1] == b"\x80"]
    assert {path.name for path in pickles if not path.is_relative_to(run.dir / "slurm")} == {".metadata"}
