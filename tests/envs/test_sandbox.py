"""The sandbox on the real kernel: what a snippet can reach, what it can use up, and what is left of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from prl.envs import sandbox
from prl.envs.sandbox import Limits, Result, SandboxUnavailable, run

LIMITS = Limits(time_s=3.0, memory_bytes=256 << 20, processes=8, file_bytes=1 << 20, output_bytes=2000)


def snippet(code: str, limits: Limits = LIMITS, mode: sandbox.Mode = "namespaces") -> Result:
    return run(textwrap.dedent(code), limits, mode)


def processes() -> set[str]:
    """The command lines of every process of the machine that has to do with a snippet."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "-I /tmp/snippet.py" in line or "-I snippet.py" in line or "prl/envs/sandbox.py" in line:
            found.add(f"{folder.name} {line}")
    return found


def left_behind() -> set[str]:
    """What is there now and stays; sandboxes of other runs on this machine come and go."""
    found, deadline = processes(), time.monotonic() + 8
    while (still := found & processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return still


@pytest.mark.parametrize("mode", ["namespaces", "none"])
def test_output_exit_code_and_error(mode: sandbox.Mode) -> None:
    result = snippet("import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)", mode=mode)
    assert (result.output, result.exit_code, result.timed_out) == ("out\nerr\n", 3, False)
    assert "ZeroDivisionError" in snippet("1 / 0", mode=mode).output


def test_a_snippet_runs_whatever_the_umask() -> None:
    before = os.umask(0o077)  # as in every process of a run
    try:
        assert snippet("import json; open('x', 'w').write(json.dumps(1)); print(open('x').read())").output == "1\n"
    finally:
        os.umask(before)


def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
            import socket
            for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
                try:
                    socket.create_connection(address, timeout=1)
                    print("connected")
                except OSError as error:
                    print(error.errno)
        """
        assert snippet(code).output.split() == ["101", "101"]  # ENETUNREACH
        assert snippet(code, mode="none").output.split()[0] == "connected"


def test_processes_of_the_host_are_out_of_sight() -> None:
    code = f"""
        import os
        print(os.getpid() < 10, os.path.exists("/proc"))
        try:
            os.kill({os.getpid()}, 0)
            print("seen")
        except ProcessLookupError:
            print("none")
        try:
            os.kill(1, 9)
            print("sent")
        except PermissionError:
            print("sent")
        print("alive")
    """
    assert snippet(code).output.split() == ["True", "False", "none", "sent", "alive"]


def test_files_of_the_host_are_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    probe = Path("/tmp/prl-sandbox-probe")
    probe.unlink(missing_ok=True)
    code = f"""
        import os
        for path in ({str(tmp_path / "secret")!r}, {__file__!r}, "/etc/passwd", os.path.expanduser("~root/.bashrc")):
            print(os.path.exists(path))
        here = ("/x", "/usr/x", "/bin/x", "/dev/x", "/etc/x", "/dev/shm/x")
        for path in (*here, {str(tmp_path / "x")!r}, {sys.base_prefix + "/x"!r}):
            try:
                open(path, "w")
                print("wrote", path)
            except OSError as error:
                print(error.errno)
        open("{probe}", "w").write("mine")
        print(open("{probe}").read())
    """
    # read-only, whoever owns them; without the folder at all for this test's own
    assert snippet(code).output.split() == ["False"] * 4 + ["30", "30", "30", "30", "30", "2", "2", "30", "mine"]
    assert not probe.exists()


def test_nothing_of_the_environment_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    for mode in ("namespaces", "none"):
        assert "hunter2" not in snippet("import os; print(dict(os.environ))", mode=mode).output  # type: ignore[arg-type]


def test_no_privileges_and_no_way_to_new_ones() -> None:
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(os.getuid())
        print(libc.unshare(0x10000000), libc.ptrace(16, 1, 0, 0), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
        print(libc.prctl(39, 0, 0, 0, 0))  # no_new_privs
        try:
            os.chroot("/tmp")
        except PermissionError:
            print("refused")
    """
    assert snippet(code).output.split() == ["65534", "-1", "-1", "-1", "1", "refused"]


@pytest.mark.parametrize("mode", ["namespaces", "none"])
def test_time_is_limited(mode: sandbox.Mode) -> None:
    start = time.monotonic()
    limits = Limits(time_s=0.5)
    result = snippet("print('before', flush=True)\nwhile True: pass", limits, mode)
    assert (result.output, result.exit_code, result.timed_out) == ("before\n", None, True)
    assert time.monotonic() - start < 2.5
    assert left_behind() == set()


@pytest.mark.parametrize("mode", ["namespaces", "none"])
def test_memory_and_file_size_and_output_are_limited(mode: sandbox.Mode) -> None:
    assert "MemoryError" in snippet("x = bytearray(1 << 30)", mode=mode).output
    # Python ignores SIGXFSZ and gets the error
    assert "File too large" in snippet("open('big', 'wb').write(b'x' * (2 << 20))", mode=mode).output
    assert len(snippet("print('x' * 100_000)", mode=mode).output) == LIMITS.output_bytes


def test_the_private_tmp_is_limited_too() -> None:
    small = Limits(time_s=5.0, memory_bytes=64 << 20, file_bytes=30 << 20)
    code = "for i in range(4): open(f'/tmp/{i}', 'wb').write(bytes(20 << 20))"
    assert "No space left on device" in snippet(code, small).output


def test_a_fork_bomb_is_contained() -> None:
    count = """
        import os, time
        children = 0
        while True:
            try:
                if os.fork() == 0:
                    time.sleep(60)
                children += 1
            except BlockingIOError:
                break
        print(children)
    """
    result = snippet(count)
    assert int(result.output) == LIMITS.processes - 1
    assert left_behind() == set()
    bomb = """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """
    start = time.monotonic()
    assert snippet(bomb, Limits(time_s=1.0, processes=8)).timed_out
    assert time.monotonic() - start < 4
    assert left_behind() == set()


def test_daemons_end_with_the_snippet() -> None:
    """A child in a session of its own that ignores signals, its parent gone."""
    code = """
        import os, signal, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(60)
            os._exit(0)
        print("done")
    """
    assert snippet(code).output == "done\n"
    assert left_behind() == set()


def test_many_short_lived_orphans_are_reaped() -> None:
    code = """
        import os
        for _ in range(20):
            if os.fork() == 0:
                os.fork()
                os._exit(0)
            os.wait()
        print("done")
    """
    roomy = Limits(time_s=5.0, processes=32)
    assert snippet(code, roomy).output == "done\n"


def test_it_leaves_no_mount_and_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mounts = Path("/proc/self/mounts").read_text()
    for mode in ("namespaces", "none"):
        snippet("open('file', 'w').write('x')", mode=mode)  # type: ignore[arg-type]
    assert Path("/proc/self/mounts").read_text() == mounts
    assert list(tmp_path.iterdir()) == []


def test_it_dies_with_the_process_that_asked(tmp_path: Path) -> None:
    code = (
        "from prl.envs.sandbox import Limits, run\n"
        "print('up', flush=True)\n"
        "run('import time; time.sleep(60)', Limits(time_s=60))"
    )
    asker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert asker.stdout is not None
    asker.stdout.readline()
    deadline = time.monotonic() + 10
    while not any("snippet.py" in line for line in processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert any("snippet.py" in line for line in processes())
    asker.send_signal(signal.SIGKILL)
    asker.wait()
    asker.stdout.close()
    assert left_behind() == set()


def test_refused_by_the_kernel_it_says_so_and_names_the_way_out() -> None:
    """In a user namespace of its own that allows no further ones, as a hardened machine does."""
    code = """
        import sys
        open("/proc/sys/user/max_user_namespaces", "w").write("0")
        from prl.envs.sandbox import *
        print(run("print('still')", Limits(), "none").output)
        try:
            require("namespaces")
        except SandboxUnavailable as error:
            print(error)
    """
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.startswith("still\n"), done.stderr
    assert "unshare()" in done.stdout and "`sandbox: none`" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="needs root and a system Python")
def test_it_works_for_an_ordinary_user_too() -> None:
    """Where everything else here runs as root, this runs as nobody."""
    code = """
        import sys, importlib.util
        spec = importlib.util.spec_from_file_location("sandbox", sys.argv[1])
        module = importlib.util.module_from_spec(spec)
        sys.modules["sandbox"] = module
        spec.loader.exec_module(module)
        print(module.run(sys.argv[2], module.Limits(processes=4)).output)
    """
    inner = """
        import ctypes, os
        print(os.getuid(), ctypes.CDLL(None).ptrace(16, 1, 0, 0))
        children = 0
        while True:
            try:
                if os.fork() == 0:
                    import time; time.sleep(60)
                children += 1
            except BlockingIOError:
                break
        os.kill(1, 9)
        print(children, os.listdir("/tmp"))
    """
    source = Path(sandbox.__file__).read_text()
    folder = Path("/var/tmp/prl-sandbox-test")
    folder.mkdir(mode=0o755, exist_ok=True)
    (folder / "sandbox.py").write_text(source)
    try:
        done = subprocess.run(
            ["/usr/bin/python3", "-c", textwrap.dedent(code), str(folder / "sandbox.py"), textwrap.dedent(inner)],
            capture_output=True,
            text=True,
            user=65534,
            group=65534,
            extra_groups=[],
            timeout=30,
        )
    finally:
        (folder / "sandbox.py").unlink()
        folder.rmdir()
    assert done.stdout.split("\n")[:2] == ["65534 -1", "3 ['snippet.py']"], done.stderr


def test_a_failure_inside_is_not_taken_for_the_snippets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "base_prefix", "/nowhere/at/all")
    with pytest.raises(SandboxUnavailable, match="mount"):
        snippet("print(1)")
