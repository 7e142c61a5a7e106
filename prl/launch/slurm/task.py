"""One task of a step: runs one process of the run and answers to the supervisor through its step's srun.

`python -I -S task.py STEP.json`, with the standard library only. Standard input brings `NUMBER NAME` (send that signal to that
process; srun gives every line to every task); its end, whatever ended the supervisor, kills the process. Standard output takes
`began|stopped|continued NAME`, every few seconds `alive NAME`, and `ended NAME CODE`; the code also stands in ended/STEP.NAME
beside the step's file, whole before it is said, since a node that dies takes its last lines with it.

A batch host that dies closes nothing, and Slurm keeps its job (`--no-kill`). So a task whose supervisor has not renewed the
file `alive` for long kills its process, and the first task has the job run again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
ALIVE_S = 3.0
"""How often a task says that it can be heard: its node has power and a network."""


def interface_of(address: str) -> str:
    """The network interface that has the address. OSError where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # has no address
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    raise OSError(f"{socket.gethostname()} has no interface with the address {address} that Slurm knows it by")


def listen(role: subprocess.Popen[bytes], name: str, lock: threading.Lock) -> None:
    """Obey standard input to its end."""
    for line in sys.stdin:
        number, _, whom = line.strip().partition(" ")
        if whom == name:
            kill(role, int(number), lock)
    kill(role, signal.SIGKILL, lock, group=True)


def kill(role: subprocess.Popen[bytes], number: int, lock: threading.Lock, *, group: bool = False) -> None:
    with lock:
        if role.returncode is None:  # not reaped: its id is nobody else's
            (os.killpg if group else os.kill)(role.pid, number)


def watch(role: subprocess.Popen[bytes], alive: Path, lost_s: float, job: str, lock: threading.Lock) -> None:
    """Return only by ending this process, once `alive` says the same for `lost_s`."""
    seen, since = b"", time.monotonic()
    while time.monotonic() < since + lost_s:
        time.sleep(min(1.0, lost_s / 10))
        with suppress(OSError):
            if (now := alive.read_bytes()) != seen:
                seen, since = now, time.monotonic()
    kill(role, signal.SIGKILL, lock, group=True)
    with suppress(FileExistsError):
        os.close(os.open(alive.with_name("requeued"), os.O_CREAT | os.O_EXCL))
        print(f"the supervisor has been silent for {lost_s:g} s: job {job} is run again", file=sys.stderr, flush=True)
        while subprocess.run(["scontrol", "requeue", job], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode:
            time.sleep(5)  # until slurmctld takes it, or ends the job and so this process
    os._exit(1)


def say(*words: object) -> None:
    with suppress(OSError):  # nobody listens any more
        os.write(1, (" ".join(map(str, words)) + "\n").encode())


def be_heard(name: str) -> None:
    while True:
        time.sleep(ALIVE_S)
        say("alive", name)


def record(path: Path, code: int) -> None:
    """Durably; on a full disk the line on standard output must do."""
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        temporary = path.with_name(f"{path.name}.tmp")
        with temporary.open("w") as f:
            f.write(str(code))
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        print(f"{path}: {e}", file=sys.stderr)


def main(path: str) -> int:
    step = json.loads(Path(path).read_text())
    task = step["tasks"][int(os.environ["SLURM_PROCID"])]
    name, address = task["name"], step["addresses"][os.environ["SLURMD_NODENAME"]]
    # Slurm sends its own signals (time limit, preemption, scancel) to every process of a step: this one waits for the role's
    # end. A handler and not SIG_IGN, which the role would inherit.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    begin = f"prl-{step['mark']}-{name}."  # short: paths of sockets have 108 bytes; the dot: trainer is not trainer-1
    for left in Path(tempfile.gettempdir()).glob(f"{begin}*"):  # of a life that this node's power ended
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=begin))
    interface = interface_of(address)
    env = {**os.environ, **task["env"], "TMPDIR": str(scratch), "PRL_SUPERVISOR": str(os.getpid()), "PRL_HOST": address}
    env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    with open(task["log"], "ab") as log:
        role = subprocess.Popen(
            task["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
    say("began", name)
    threading.Thread(target=be_heard, args=(name,), daemon=True).start()
    lock = threading.Lock()
    threading.Thread(target=listen, args=(role, name, lock), daemon=True).start()
    watched = (role, Path(step["alive"]), step["lost_s"], step["job"], lock)
    threading.Thread(target=watch, args=watched, daemon=True).start()
    while (seen := os.waitid(os.P_PID, role.pid, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOWAIT)) is not None:
        if seen.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            break
        os.waitid(os.P_PID, role.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        say("continued" if seen.si_code == os.CLD_CONTINUED else "stopped", name)
    kill(role, signal.SIGKILL, lock, group=True)  # its children; what left the group ends with the step
    with lock:
        code = role.wait()
    shutil.rmtree(scratch, ignore_errors=True)
    record(Path(path).parent / "ended" / f"{Path(path).stem}.{name}", code)
    say("ended", name, code)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # the listening thread holds standard input's lock, which the interpreter's own end would wait for
