"""Fake roles under the real command, supervisor and executor.

`python fakes.py CONFIG …` is `python -m prl.rl CONFIG …` whose processes run this file in place of `prl.launch.role`; what each
does is in the environment: PRL_FAKE_<ROLE>, by default "serve" for inference and "work" for the others.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prl.launch.role import die_with_parent
from prl.transport.run_dir import RunDir


def take(listener: socket.socket) -> None:
    while True:
        listener.accept()[0].close()


def behave(name: str, what: str, run: RunDir) -> int:
    stop = threading.Event()
    if what != "deaf":
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "silent":
        time.sleep(100)
    status = run.status(name)
    host = os.environ.get("PRL_HOST", "127.0.0.1")
    listener = socket.create_server((host, 0))
    threading.Thread(target=take, args=(listener,), daemon=True).start()
    run.announce(name, host=host, port=listener.getsockname()[1])
    if what == "unready":
        while True:
            status.set(phase="starting")
            time.sleep(0.05)
    status.set(phase="running")
    if what in ("victim", "crash", "killed"):  # not before the others are there
        for other in ("trainer", "orchestrator", "inference-0"):
            run.find(other, 20, on_wait=status.beat)
    t0 = time.monotonic()
    marker = os.environ.get("PRL_FAKE_MARKER", "0")
    Path(os.environ["TMPDIR"], f"left-by-{name}").write_text("x")
    if what == "family":
        # One in the group, one in a session of its own, one orphan in its own session without the run's environment.
        subprocess.Popen(["sleep", f"1000.{marker}"])
        subprocess.Popen(["sleep", f"1001.{marker}"], start_new_session=True)
        subprocess.run(["sh", "-c", f"setsid env -i sleep 1002.{marker} & true"])
    while not stop.is_set():
        if what != "hang":
            status.set(phase="running")
        after = time.monotonic() - t0
        if what == "finish" and after > 0.4:
            return 0
        if what == "save" and after > 0.4:
            return 75
        if what == "misconfigured":
            print("model.path: no such file", file=sys.stderr)
            return 2
        if what in ("crash", "family") and after > 0.4:
            print("some line\nthe reason of the crash", file=sys.stderr)
            return 3
        if what == "victim" and run.address("inference-0") is None:
            print("lost the engine", file=sys.stderr)
            return 1
        if what == "crash-first" and after > 0.4:
            (run / "rendezvous" / "inference-0.json").unlink()
            time.sleep(0.2)  # the others notice, and end, before this one has
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stopped" and after > 0.4:
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "fail-slowly" and after > 0.4:
            status.set(failed=time.time())
            time.sleep(1.5)  # the ranks that lose it end before this one has
            print("the reason of the crash", file=sys.stderr)
            return 1
        if what == "lost-a-rank" and "failed" in (run.read_status("trainer-1") or {}):
            status.set(failed=time.time())
            print("Connection closed by peer", file=sys.stderr)
            return 1
        if what == "killed" and after > 0.4:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    if what == "serve":
        return 0
    if what == "slow-save":
        time.sleep(30)
    (run / f"saved-{name}").write_text("x")
    return 75


def specs(run: RunDir, config: object, stage: object, cores: int) -> Sequence[object]:
    from prl.launch import roles

    out = []
    for spec in roles.role_specs(run, config, stage, cores):  # type: ignore[arg-type]
        what = os.environ.get("PRL_FAKE_" + spec.name.upper().replace("-", "_"), "")
        what = what or ("serve" if spec.name.startswith("inference") else "work")
        out.append(replace(spec, command=(sys.executable, __file__, "--role", spec.name, what, str(run.root.resolve()))))
    return out


if __name__ == "__main__":
    if sys.argv[1] == "--role":
        if "PRL_FAKE_NO_PDEATHSIG" not in os.environ:
            die_with_parent(int(os.environ["PRL_SUPERVISOR"]))
        sys.exit(behave(sys.argv[2], sys.argv[3], RunDir(sys.argv[4])))
    import prl.rl

    prl.rl.role_specs = specs  # type: ignore[assignment]
    sys.exit(prl.rl.main(sys.argv[1:]))
