"""Runs a Python snippet that nobody has read, apart from everything.

Three processes: a *keeper* on the host's side (this file, run as a script), a *first process* of new user, mount, pid,
network, ipc and uts namespaces, and the *snippet* below it, under limits and without privileges.

The snippet sees a read-only /usr and Python, /dev/null and random numbers, and a private /tmp of its own; no home, no /proc,
no network, no other process, no environment variable of the run. The root is left with pivot_root and then chroot, which also
keeps the snippet from making user namespaces of its own (user_namespaces(7)). When the first process ends, at the deadline
or because its parent died, the kernel kills everything in its pid namespace, and the private mounts are gone with it.
Residual risks: the kernel itself, and processor time and memory up to the limits.

`Limits.processes` is enforced by RLIMIT_NPROC, which does not bind root: run by root, the snippet gets the user 65534. It
counts per user namespace from Linux 5.14 on; before that, the limit is shared with the user's other processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Mode = Literal["namespaces", "none"]


class SandboxUnavailable(RuntimeError):
    """The kernel does not let this user make namespaces; names the refused call and the mend."""


@dataclass(frozen=True)
class Limits:
    time_s: float = 5.0
    """Wall time of the whole snippet, its children included; also its processor time."""
    memory_bytes: int = 512 << 20
    """Address space of each process; also the size of /tmp, which is memory."""
    processes: int = 16
    """Processes and threads at once."""
    file_bytes: int = 16 << 20
    """Size of one file."""
    output_bytes: int = 64 << 10
    """What is kept of stdout and stderr together; the rest is cut."""


@dataclass(frozen=True)
class Result:
    output: str
    """stdout and stderr as they came."""
    exit_code: int | None
    """None when the deadline ended it; minus the signal's number when a signal did."""
    timed_out: bool
    wall_s: float


def run(code: str, limits: Limits, mode: Mode = "namespaces") -> Result:
    """Run `code` with the interpreter of this process, its standard library only. Blocks for at most about `time_s` + 2 s.

    mode `none`: as an ordinary child, with the limits, a clean environment and a temporary working folder, but free to read
    and write what this user may, and to use the network. Raises SandboxUnavailable.
    """
    start = time.monotonic()
    if mode == "none":
        return _plain(code, limits, start)
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment("/tmp"),
        start_new_session=True,
    )
    request = {"code": code, "python": os.path.realpath(sys.executable), "prefix": sys.base_prefix, **asdict(limits)}
    try:
        answer, _ = keeper.communicate(json.dumps(request).encode(), timeout=limits.time_s + 2)
    except subprocess.TimeoutExpired:
        return Result("", None, True, time.monotonic() - start)
    finally:
        if keeper.poll() is None:
            os.killpg(keeper.pid, signal.SIGKILL)
            keeper.communicate()
    if not answer:
        raise RuntimeError(f"sandbox: its keeper ended with code {keeper.returncode} and no answer; its stderr has the reason")
    said = json.loads(answer)
    if "refused" in said:
        raise SandboxUnavailable(
            f"sandbox: {said['refused']}. Allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp "
            "profile that permits unshare), or set the environment's `sandbox: none`, which trusts what the model writes"
        )
    return Result(said["output"], said["exit_code"], said["exit_code"] is None, time.monotonic() - start)


def require(mode: Mode) -> None:
    """Raise SandboxUnavailable now rather than at the first snippet."""
    if (result := run("print('ready')", Limits(), mode)).output != "ready\n":
        raise SandboxUnavailable(f"sandbox: a trial snippet printed {result.output!r}, exit code {result.exit_code}")


def _environment(home: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


def _limit(limits: dict[str, Any]) -> None:
    """Set the resource limits of this process and its children to come."""
    for what, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_CPU, int(limits["time_s"]) + 1),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
    ):
        resource.setrlimit(what, (value, value))


def _plain(code: str, limits: Limits, start: float) -> Result:
    folder = tempfile.mkdtemp(prefix="prl-snippet-")
    try:
        (Path(folder) / "snippet.py").write_text(code)
        with open(Path(folder) / "output", "a+b") as output:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, json.dumps(asdict(limits))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,
            )
            # The group is killed before its leader is reaped, so that its number cannot be another's.
            ended = select.select([pidfd := os.pidfd_open(child.pid)], [], [], limits.time_s)[0]
            os.close(pidfd)
            os.killpg(child.pid, signal.SIGKILL)
            code_or_signal = child.wait()
            exit_code = code_or_signal if ended else None
            output.seek(0)
            text = output.read(limits.output_bytes).decode(errors="replace")
        return Result(text, exit_code, exit_code is None, time.monotonic() - start)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# From here on: the keeper and its children. Standard library only; nothing of prl is imported.

_libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 0x1000, 0x4000, 0x40000
MNT_DETACH, PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 2, 1, 38
SYS_MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD = 442, 0x8000, -100
NOBODY = 65534
NEW_ROOT = "/sys"
"""Where the new root is put together: there on every Linux, and nothing that the snippet needs lies below it."""


def _call(name: str, *args: Any) -> None:
    """A libc call that raises OSError with its name."""
    values = [a.encode() if isinstance(a, str) else a for a in args]
    if getattr(_libc, name)(*values) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{tuple(a for a in args if isinstance(a, str))}: {os.strerror(number)}")


def _die_with_parent(parent: int) -> None:
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _keeper() -> None:
    """Make the namespaces through a child, write its user map, pass on what the first process answers."""
    request = json.loads(sys.stdin.buffer.read())
    os.umask(0o022)  # the snippet is another user in there
    _die_with_parent(os.getppid())
    ready, mapped, answer = os.pipe(), os.pipe(), os.pipe()
    keeper = os.getpid()
    if (child := os.fork()) == 0:
        try:
            _die_with_parent(keeper)
            _call("unshare", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
            os.write(ready[1], b"x")
            os.read(mapped[0], 1)
            if (first := os.fork()) == 0:
                _first_process(request, answer[1])
            os.close(answer[1])
            os.waitpid(first, 0)
        except OSError as error:
            _answer(answer[1], {"refused": error.strerror})
        os._exit(0)
    for fd in (ready[1], mapped[0], answer[1]):
        os.close(fd)
    try:
        if os.read(ready[0], 1):
            root = os.geteuid() == 0
            # Root maps a second user for the snippet; another user may map only itself.
            lines = f"0 0 1\n{NOBODY} {NOBODY} 1\n" if root else f"{NOBODY} {os.geteuid()} 1\n"
            groups = lines if root else f"{NOBODY} {os.getegid()} 1\n"
            Path(f"/proc/{child}/setgroups").write_text("allow" if root else "deny")
            Path(f"/proc/{child}/uid_map").write_text(lines)
            Path(f"/proc/{child}/gid_map").write_text(groups)
            os.write(mapped[1], b"x")
    except OSError as error:
        os.kill(child, signal.SIGKILL)
        _answer(1, {"refused": f"user map: {error.strerror}"})
        os._exit(0)
    with open(answer[0], "rb") as pipe:
        sys.stdout.buffer.write(pipe.read())
    sys.stdout.flush()


def _answer(fd: int, value: dict[str, Any]) -> None:
    with open(fd, "wb", closefd=False) as pipe:
        pipe.write(json.dumps(value).encode())


def _first_process(request: dict[str, Any], answer: int) -> None:
    """Pid 1 of the namespace: builds the root, starts the snippet, waits, answers. Its end ends everything in there."""
    try:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _build_root(request)
        output = os.open("/output", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.chroot("/jail")
        os.chdir("/tmp")
        Path("/tmp/snippet.py").write_text(request["code"])
        os.chmod("/tmp/snippet.py", 0o644)
        failed = os.pipe()  # closed by a successful exec
        if (snippet := os.fork()) == 0:
            try:
                _become_the_snippet(request, output)
            except OSError as error:
                os.write(failed[1], str(error.strerror).encode())
            os._exit(127)
        os.close(failed[1])
        exit_code = _wait(snippet, request["time_s"])
        if reason := os.read(failed[0], 1000):
            raise OSError(0, reason.decode())
        text = os.pread(output, request["output_bytes"], 0).decode(errors="replace")
        _answer(answer, {"output": text, "exit_code": exit_code})
    except OSError as error:
        _answer(answer, {"refused": error.strerror})
    os._exit(0)


def _wait(snippet: int, time_s: float) -> int | None:
    """The snippet's exit code, None at the deadline. Reaps what it leaves behind, as pid 1 must."""
    end = time.monotonic() + time_s
    fd = os.pidfd_open(snippet)
    while (left := end - time.monotonic()) > 0:
        select.select([fd], [], [], min(left, 0.05))
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == snippet:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _build_root(request: dict[str, Any]) -> None:
    """A tmpfs root with /jail: read-only binds and a private /tmp. Then leave the old root for it."""
    _call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)

    def tmpfs(path: str, size: int, mode: int) -> None:
        os.makedirs(path, exist_ok=True)
        _call("mount", "tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode={mode:o}")

    jail = f"{NEW_ROOT}/jail"
    tmpfs(NEW_ROOT, request["file_bytes"] + (1 << 20), 0o755)
    tmpfs(jail, 1 << 20, 0o755)
    for path in ("/bin", "/lib", "/lib32", "/lib64", "/sbin"):
        if os.path.islink(path):
            os.symlink(os.readlink(path), jail + path)
        elif os.path.isdir(path):
            _bind(path, jail)
    for path in ("/usr", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        if os.path.exists(path):
            _bind(path, jail)
    if not request["prefix"].startswith("/usr/"):
        _bind(request["prefix"], jail)
    tmpfs(f"{jail}/tmp", request["memory_bytes"], 0o1777)
    os.mkdir(f"{NEW_ROOT}/old")
    _call("pivot_root", NEW_ROOT, f"{NEW_ROOT}/old")
    os.chdir("/")
    _call("umount2", "/old", MNT_DETACH)
    _call("mount", "none", "/jail", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None)


def _bind(path: str, jail: str) -> None:
    """Bind a file or folder at the same path, read-only with all that is mounted below it."""
    target = jail + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _call("mount", path, target, None, MS_BIND | MS_REC, None)
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID, 0, 0, 0)  # struct mount_attr: set, clear, propagation, userns
    size = ctypes.c_size_t(32)
    _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, target, AT_RECURSIVE, attributes, size)


def _become_the_snippet(request: dict[str, Any], output: int) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    processes = request["processes"]
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    else:
        processes += 2  # the keeper's child and the first process are this user's too
    _limit(request)
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    os.execve(request["python"], [request["python"], "-I", "/tmp/snippet.py"], _environment("/tmp"))


if __name__ == "__main__":
    if len(sys.argv) > 1:  # sandbox: none
        _limit(json.loads(sys.argv[1]))
        os.execv(sys.executable, [sys.executable, "-I", "snippet.py"])
    _keeper()
