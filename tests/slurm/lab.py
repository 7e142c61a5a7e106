"""A real Slurm cluster on one Linux machine: `with Lab(folder) as lab: lab.run("srun", "-N2", "hostname")`.

    head (slurmctld, munged, bridge br0, 198.18.80.1)
     ├─ train0  198.18.80.10   slurmd      each node: namespaces of its own for network, processes, host name, shared
     ├─ train1  198.18.80.11   slurmd      memory and mounts; the files are this machine's, which makes them the
     ├─ infer0  198.18.80.12   slurmd      cluster's shared filesystem
     └─ infer1  198.18.80.13   slurmd

The head is a namespace as well, and the nodes live inside it. So nothing of this machine is changed (no interface, no file
below /etc), labs do not see each other, and killing the head's first process ends everything, whatever became of this one.

By hand: `python -m tests.slurm.lab up|down|run CMD…|power_off NODE|boot NODE|cut NODE|heal NODE|stop_slurmd NODE`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge", "iproute2")
SUBNET = "198.18.80"  # RFC 2544's range for benchmarks: routed nowhere
NODES = ("train0", "train1", "infer0", "infer1")
SMALL_MB = 32
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
DEFAULT = Path("/var/tmp/prl-slurm")

# First processes. They reap what loses its parent, as bash does on its own.
_REST = "echo up; exec >/dev/null; while :; do sleep 1000 & wait $!; done"
_HEAD = f"""set -e
hostname head; mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs /dev/shm; mount -t tmpfs -o mode=755 tmpfs /run; mkdir -m 755 /run/munge
mount -t tmpfs -o mode=755,size={SMALL_MB}m tmpfs "$1"/small
mount --bind "$1"/etc /etc/slurm; mount --bind "$1"/hosts /etc/hosts
ip link set lo up; ip link add br0 type bridge; ip addr add {SUBNET}.1/24 dev br0; ip link set br0 up
{_REST}"""
_NODE = f"""set -e
hostname "$1"; mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
{_REST}"""

# Every time is short beside Slurm's default, so that a test waits seconds: backfill (which alone starts heterogeneous jobs)
# every second, a requeued job after cred_expire + 1 s, a silent node down after 10 s, SIGKILL 5 s after SIGTERM.
_CONF = """ClusterName=lab
SlurmctldHost=head({subnet}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile={root}/spool/%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,bf_hetjob_immediate
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=30
KillWait=5
MinJobAge=600
JobRequeue=1
FirstJobId={first}
DefMemPerNode=400
PropagateResourceLimits=NONE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
"""


class LabError(RuntimeError):
    """The cluster cannot be brought up, or a command in it failed."""


def why_not() -> str:
    """Why this machine cannot run the lab; empty where it can."""
    if os.geteuid() != 0:
        return "the local Slurm cluster needs root"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"this kernel or container forbids namespaces: {tried.stderr.strip()}"
    return ""


def install() -> None:
    """Have Debian's Slurm on this machine; nothing of it is started as a service."""
    if all(shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") for name in ("slurmctld", "slurmd", "munged", "ip")):
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", "-q", *command], env=env, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise LabError(f"apt-get {' '.join(command)} failed:\n{done.stderr[-2000:]}")


def until(what: str, condition: Callable[[], object], timeout_s: float, *, every_s: float = 0.1) -> float:
    """Wait until the condition holds; the seconds it took. LabError names what was waited for."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise LabError(f"{what}: not within {timeout_s:g} s")
        time.sleep(every_s)
    return time.monotonic() - began


def _children(pid: int) -> list[int]:
    return [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]


class Lab:
    """The cluster whose files are below `root`. Partitions: train and infer (two nodes each), all, and scavenge, whose jobs
    others preempt; `nodes` names them, `conf` adds lines to slurm.conf. `small`, of SMALL_MB, is on all nodes.
    """

    def __init__(self, root: Path = DEFAULT, *, nodes: Sequence[str] = NODES, cpus: int = 8, conf: Sequence[str] = ()):
        self.root, self.nodes, self.cpus, self.conf = root, tuple(nodes), cpus, tuple(conf)
        self._pids: dict[str, int] = {}  # of first processes, as this machine counts
        state = root / "lab.json"
        if state.exists():
            known = json.loads(state.read_text())
            self._pids = {name: pid for name, pid in known.items() if self._alive(pid)}

    def address(self, node: str) -> str:
        return f"{SUBNET}.{10 + self.nodes.index(node)}"

    # -- the whole -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Lab:
        try:
            return self.up()
        except BaseException:
            self.down()
            raise

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> Lab:
        """A new cluster, all of whose nodes are idle."""
        self.down()
        install()
        for name in ("etc", "log", "state", "spool", "small"):
            shutil.rmtree(self.root / name, ignore_errors=True)
            (self.root / name).mkdir(parents=True, mode=0o755)
        Path("/etc/slurm").mkdir(exist_ok=True)  # where the head mounts its own
        self._configure()
        self._first("head", ["unshare"], _HEAD, str(self.root))
        self._daemon("munged", ["munged", "-F", "--force", f"--key-file={self.root}/munge.key", "--num-threads=4"])
        until("munge", lambda: not self.run("munge", "-n", check=False).returncode, 10)
        self.start_slurmctld()
        for node in self.nodes:
            self.boot(node)
        until(f"idle nodes (see {self.root}/log)", lambda: all(s == "idle" for s in self.states().values()), 20)
        return self

    def down(self) -> None:
        """End every process of the cluster. The logs stay."""
        if (pid := self._pids.get("head")) is not None and self._alive(pid):
            os.kill(pid, signal.SIGKILL)  # the kernel kills all processes in it before this one is gone
            until("the end of the head", lambda: not self._alive(pid), 20)
        self._pids.clear()
        (self.root / "lab.json").unlink(missing_ok=True)

    def _configure(self) -> None:
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        hosts = ["127.0.0.1 localhost", f"{SUBNET}.1 head", *(f"{self.address(n)} {n}" for n in self.nodes)]
        (self.root / "hosts").write_text("\n".join(hosts) + "\n")
        # A new cluster that counted from 1 again could be taken for an old one's jobs.
        lines = [_CONF.format(subnet=SUBNET, root=self.root, first=random.randrange(1, 60_000) * 1000), *self.conf]
        for node in self.nodes:
            where = f"NodeHostname={node} NodeAddr={self.address(node)}"
            lines.append(f"NodeName={node} {where} CPUs={self.cpus} RealMemory=4000 State=UNKNOWN")
        every, usual = ",".join(self.nodes), "PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE DefaultTime=60"
        for name in ("train", "infer"):
            lines.append(f"PartitionName={name} Nodes={','.join(n for n in self.nodes if n.startswith(name))} {usual}")
        lines.append(f"PartitionName=all Nodes={every} Default=YES {usual}")
        lines.append(f"PartitionName=scavenge Nodes={every} PriorityTier=1 PreemptMode=REQUEUE GraceTime=10 DefaultTime=60")
        (self.root / "etc" / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.root / "etc" / "cgroup.conf").write_text("CgroupAutomount=no\n")

    # -- commands ------------------------------------------------------------------------------------------------------

    def command(self, *words: str, node: str = "head", cwd: Path | str = "/") -> list[str]:
        """The words as a command that runs inside a node; on the head, which is the cluster's login node."""
        return ["nsenter", "-t", str(self._pids[node]), *NAMESPACES, f"--wdns={cwd}", "--", *words]

    def run(
        self,
        *words: str,
        node: str = "head",
        cwd: Path | str = "/",
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a node to its end. LabError with what it wrote where it fails and `check`."""
        done = subprocess.run(
            self.command(*words, node=node, cwd=cwd),
            env=clean() if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise LabError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def states(self) -> dict[str, str]:
        """Node to its state as sinfo says it (idle, mixed, allocated, down*, …)."""
        out = self.run("sinfo", "-h", "-N", "-p", "all", "-o", "%N %T", check=False).stdout
        return dict(line.split() for line in out.splitlines())

    def processes(self, node: str, words: str) -> list[int]:
        """This machine's ids of the node's living processes with `words` in their command line."""
        if node not in self._pids:
            return []
        space, found = os.readlink(f"/proc/{self._pids[node]}/ns/pid"), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns/pid") == space and words.encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def seen(self, path: Path) -> Path:
        """A path of the nodes' filesystem, as this machine reaches it."""
        return Path(f"/proc/{self._pids['head']}/root{path}")

    # -- faults --------------------------------------------------------------------------------------------------------

    def boot(self, node: str) -> None:
        """Power on: a new node and its slurmd."""
        link = f"v-{node}"
        self.run("ip", "link", "del", link, check=False)  # the kernel takes a while to delete that of a dead node
        head = ["nsenter", "-t", str(self._pids["head"]), *NAMESPACES, "--", "unshare"]
        self._first(node, head, _NODE, node)
        status = Path(f"/proc/{self._pids[node]}/status").read_text()
        inside = next(line.split()[2] for line in status.splitlines() if line.startswith("NSpid"))  # as the head counts
        self.run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", inside)
        self.run("ip", "link", "set", link, "master", "br0", "up")
        self.run("ip", "addr", "add", f"{self.address(node)}/24", "dev", "eth0", node=node)
        self.run("ip", "link", "set", "eth0", "up", node=node)
        self.start_slurmd(node)

    def power_off(self, node: str) -> None:
        """Every process of the node is gone at once."""
        pid = self._pids.pop(node)
        self._save()
        os.kill(pid, signal.SIGKILL)
        until(f"the end of {node}", lambda: not self._alive(pid), 20)

    def cut(self, node: str) -> None:
        """Unplug the node's cable; its processes go on."""
        self.run("ip", "link", "set", f"v-{node}", "down")

    def heal(self, node: str) -> None:
        self.run("ip", "link", "set", f"v-{node}", "up")

    def mend(self) -> None:
        """Undo what is left of cuts and power-offs."""
        for node in self.nodes:
            if node in self._pids:
                self.heal(node)
            else:
                self.boot(node)

    def start_slurmd(self, node: str) -> None:
        (self.root / "spool" / node).mkdir(exist_ok=True)
        self._daemon(node, ["slurmd", "-D", "-N", node], node)

    def stop_slurmd(self, node: str) -> None:
        """Kill the node's slurmd alone; its jobs go on."""
        for pid in self.processes(node, "slurmd\0-D"):
            os.kill(pid, signal.SIGKILL)
        until(f"the end of {node}'s slurmd", lambda: not self.processes(node, "slurmd\0-D"), 20)

    def start_slurmctld(self) -> None:
        self._daemon("slurmctld", ["slurmctld", "-D"])
        until("slurmctld", lambda: "is UP" in self.run("scontrol", "ping", check=False).stdout, 20)

    def stop_slurmctld(self) -> None:
        """As an administrator does. (Killed, it forgets what became of jobs in the last seconds, and kills those it forgot.)"""
        for pid in self.processes("head", "slurmctld\0-D"):
            os.kill(pid, signal.SIGTERM)
        until("the end of slurmctld", lambda: not self.processes("head", "slurmctld\0-D"), 20)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _first(self, name: str, before: Sequence[str], script: str, *arguments: str) -> None:
        """Start the first process of new namespaces and wait until they are set up."""
        unshared = [*before, *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-c", script, name, *arguments]
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            parent = subprocess.Popen(
                unshared, env=clean(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert parent.stdout is not None
        if parent.stdout.readline() != b"up\n":
            raise LabError(f"{name} did not come up: {(self.root / 'log' / f'{name}.out').read_text()}")
        parent.stdout.close()
        pid = parent.pid
        while Path(f"/proc/{pid}/comm").read_text() != "bash\n":  # nsenter forks, and unshare
            (pid,) = _children(pid)
        self._pids[name] = pid
        self._save()

    def _daemon(self, name: str, words: Sequence[str], node: str = "head") -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            subprocess.Popen(
                self.command(f"/usr/sbin/{words[0]}", *words[1:], node=node),
                env=clean(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _save(self) -> None:
        (self.root / "lab.json").write_text(json.dumps(self._pids))

    def _alive(self, pid: int) -> bool:
        """Whether the first process of one of our namespaces has this id."""
        try:
            inside = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()
            return len(inside) > 1 and inside[-1] == "1" and b"sleep 1000" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False


def clean() -> dict[str, str]:
    """An environment without anything of this session's."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}


def main(what: str, *words: str) -> None:
    lab = Lab()
    match what:
        case "up":
            print(lab.up().run("sinfo").stdout, end="")
        case "run":
            os.execvpe("nsenter", lab.command(*words, cwd=os.getcwd()), os.environ)
        case "down":
            lab.down()
        case "power_off" | "boot" | "cut" | "heal" | "stop_slurmd" | "start_slurmd":
            getattr(lab, what)(*words)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    if reason := why_not():
        raise SystemExit(reason)
    main(*sys.argv[1:])
