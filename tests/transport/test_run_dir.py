"""The run's folder: private, a secret that is kept, addresses and stage times."""

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from prl.transport.run_dir import RunDir

ROOT = Path(__file__).parents[2]


def test_the_folder_is_private_and_keeps_its_secret(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir(mode=0o755)
    run = RunDir(root).create()
    assert root.stat().st_mode & 0o777 == 0o700 and run.secret_path.stat().st_mode & 0o777 == 0o600
    secret, run_id = run.secret, run.id
    assert len(secret) == 64 and run_id not in secret and secret not in str(run.weights_path("shared_memory"))
    assert RunDir(root).create().secret == secret and RunDir(root).id == run_id
    assert RunDir(tmp_path / "other").create().id != run_id
    run.secret_path.chmod(0o640)
    with pytest.raises(PermissionError, match="mode 640; expected owner .* and mode 700 at most: .*remove it to get a new one"):
        _ = run.secret


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path).create()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match=f"secret: owner {os.getuid()}, mode 600; expected owner {os.getuid() + 1}"):
        _ = run.secret
    with pytest.raises(PermissionError, match=f"{tmp_path}: belongs to user {os.getuid()}, expected {os.getuid() + 1}; choose"):
        run.create()


def test_a_private_process_writes_for_its_user_alone_and_dumps_nothing(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, resource, subprocess; from prl.transport.run_dir import keep_private; os.umask(0o022);"
        "keep_private(); pathlib.Path('a').touch(); subprocess.run(['mkdir', 'b']);"
        "assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o600, 0o700]


@pytest.mark.parametrize("left", ["", "abcdef"])
def test_a_secret_cut_short_is_refused(tmp_path: Path, left: str) -> None:
    run = RunDir(tmp_path).create()
    run.secret_path.write_text(left)
    with pytest.raises(OSError, match=f"secret: {len(left)} characters, expected 64; remove it"):
        _ = run.create().secret


@pytest.mark.parametrize("text", ["", '{"rl', "[1]", '{"rl": 5}', '{"rl": {}}'])
def test_damaged_stage_times_are_named(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path).create()
    (tmp_path / "stages.json").write_text(text)
    with pytest.raises(OSError, match="stages.json: damaged: .*; remove it"):
        run.stages()


def test_roles_find_each_other(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    waits: list[float] = []
    with pytest.raises(TimeoutError, match="trainer did not announce itself in .*rendezvous within 0.1 s"):
        run.find("trainer", 0.1, on_wait=lambda: waits.append(time.monotonic()))
    assert len(waits) > 1
    threading.Timer(0.1, lambda: run.announce("trainer", host="h", port=1)).start()
    assert run.find("trainer", 5)["port"] == 1
    assert run.address("trainer")["pid"] == os.getpid()  # type: ignore[index]
    run.status("trainer").set(phase="x")
    assert run.read_status("trainer")["phase"] == "x"  # type: ignore[index]
    run.forget_roles()
    assert run.address("trainer") is None and run.read_status("trainer") is None


def test_stage_times_add_up(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    assert run.stages() == {}
    run.record_stage("rl", 2.0, done=False)
    run.record_stage("rl", 3.0, done=True)
    run.record_stage("control", 1.0, done=False)
    assert RunDir(tmp_path).stages() == {"rl": {"wall_s": 5.0, "done": True}, "control": {"wall_s": 1.0, "done": False}}


def test_on_a_full_disk_the_times_of_the_stages_stay_and_nothing_is_left(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    run.record_stage("sft", 5.0, done=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # python ignores SIGXFSZ: a write fails, as on a full disk
        with pytest.raises(OSError, match="File too large"):
            run.record_stage("rl", 1.0, done=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.stages() == {"sft": {"wall_s": 5.0, "done": True}} and not list(tmp_path.rglob("*.tmp"))
