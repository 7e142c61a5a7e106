"""The command, supervisor and executor with real processes: however a run ends, it ends soon, says why, and leaves nothing."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import prl.rl
from prl.cli import COMMANDS
from prl.launch import guard
from prl.launch.local import LocalExecutor, RunBusy, RunLock, role_environment
from prl.transport.run_dir import RunDir

FAKES = Path(__file__).with_name("fakes.py")
ROOT = FAKES.parents[2]
CONFIG = ROOT / "tests" / "main_job" / "tiny.yaml"
SHORT = ("monitor.console=off", "launch.stop_timeout_s=4", "launch.heartbeat_timeout_s=20")


def processes(words: str) -> list[int]:
    """Living processes with `words` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if words.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


class Started:
    """`prl.rl` with fake roles as a process of its own."""

    def __init__(self, folder: Path, *arguments: str, roles: dict[str, str]):
        self.run = RunDir(folder / "run")
        self.marker = f"{os.getpid()}{time.monotonic_ns()}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PRL_FAKE_MARKER": self.marker, "HF_TOKEN": "hf_secret"}
        env |= {f"PRL_FAKE_{role.upper()}": what for role, what in roles.items()}
        given = arguments or (str(CONFIG), f"run.dir={folder}", "run.name=run", *SHORT)
        self.process = subprocess.Popen(
            [sys.executable, str(FAKES), *given], env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.errors = ""

    def running(self) -> None:
        """Wait until every role of the RL stage has said that it runs."""
        for role in ("trainer", "orchestrator", "inference-0"):
            self.until(lambda role=role: (s := self.run.read_status(role)) is not None and s["phase"] == "running")

    def until(self, condition: object) -> None:
        deadline = time.monotonic() + 60
        while not condition():  # type: ignore[operator]
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()
            time.sleep(0.02)

    def end(self) -> int:
        _, self.errors = self.process.communicate(timeout=60)
        return self.process.returncode

    def guards(self) -> list[int]:
        return processes(f"{guard.__file__}\0{self.run.mark}")

    def sleepers(self) -> list[int]:
        return processes(f".{self.marker}")

    def assert_nothing_left(self) -> None:
        assert guard.strays(self.run.mark) == []
        assert self.sleepers() == []
        assert not self.run.weights_path("shared_memory").exists()
        assert not (Path(os.environ.get("TMPDIR", "/tmp")) / f"prl-{self.run.mark}").exists()
        for path in (self.run / "rendezvous").iterdir():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", json.loads(path.read_text())["port"]))
        RunLock(self.run, wait_s=0).release()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    started: list[Started] = []

    def go(*arguments: str, **roles: str) -> Started:
        started.append(Started(tmp_path, *arguments, roles=roles))
        return started[-1]

    yield go
    for s in started:
        if s.process.poll() is None:
            s.process.kill()
            s.process.communicate()
            RunLock(s.run, wait_s=10).release()


def spent(since: float) -> float:
    return time.monotonic() - since


def test_a_finished_stage_ends_its_services_and_is_not_run_again(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    s = start(trainer="finish", orchestrator="finish")
    assert s.end() == 0, s.errors
    s.assert_nothing_left()
    assert s.run.stages()["rl"]["done"] and s.run.stages()["rl"]["wall_s"] > 0.4
    assert (s.run / "summary.json").exists() and (s.run / "report.html").exists()
    stored = s.run.config_path.stat()
    again = start("--resume", str(s.run.root), trainer="crash")
    assert again.end() == 0  # nothing is left to run
    assert s.run.config_path.stat().st_ino == stored.st_ino, "written only when it has changed"
    more = start("--resume", str(s.run.root), "trainer.steps=500", trainer="crash")
    assert more.end() == 1  # with more steps there is
    assert "steps: 500" in s.run.config_path.read_text() and s.run.config_path.stat().st_ino != stored.st_ino


@pytest.mark.parametrize("role", ["trainer", "orchestrator", "inference_0"])
@pytest.mark.parametrize("how", ["crash", "killed"])
def test_a_crashed_role_ends_the_run_at_once_with_its_last_lines(start, role: str, how: str) -> None:  # type: ignore[no-untyped-def]
    s = start(**{role: how})
    s.running()
    t0 = time.monotonic()
    assert s.end() == 1
    assert spent(t0) < 10
    name = role.replace("_", "-")
    if how == "crash":
        assert f"{name} ended with exit code 3" in s.errors and "  the reason of the crash" in s.errors
    else:
        assert f"{name} was killed by SIGKILL" in s.errors
    assert f"--resume {s.run.root}" in s.errors
    s.assert_nothing_left()


def test_only_lines_of_the_last_life_are_shown(start) -> None:  # type: ignore[no-untyped-def]
    s = start(trainer="crash")
    assert s.end() == 1 and "the reason of the crash" in s.errors
    again = start("--resume", str(s.run.root), trainer="killed")
    assert again.end() == 1 and "the reason of the crash" not in again.errors
    assert "the reason of the crash" in (s.run / "logs" / "trainer.log").read_text()


def test_the_first_cause_is_named_although_its_victims_end_first(start) -> None:  # type: ignore[no-untyped-def]
    s = start(inference_0="crash-first", orchestrator="victim")
    assert s.end() == 1
    assert "failed: stage rl: inference-0 was killed by SIGKILL" in s.errors


def test_of_ranks_the_one_that_failed_first_is_named_although_it_ends_last(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = (str(CONFIG), f"run.dir={tmp_path}", "run.name=run", *SHORT, "trainer.ranks=2")
    s = start(*options, trainer="lost-a-rank", trainer_1="fail-slowly")
    assert s.end() == 1
    assert "failed: stage rl: trainer-1 ended with exit code 1" in s.errors and "  the reason of the crash" in s.errors


def test_a_stopped_rank_is_named_and_not_the_one_that_waits_for_it(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = (str(CONFIG), f"run.dir={tmp_path}", "run.name=run", *SHORT, "trainer.ranks=2", "launch.heartbeat_timeout_s=3")
    s = start(*options, trainer="hang", trainer_1="stopped")
    assert s.end() == 1
    assert "failed: stage rl: trainer-1 hangs: a signal has stopped it" in s.errors
    s.assert_nothing_left()


def test_a_resume_says_what_it_goes_on_from_and_takes_nothing_older_in_silence(start) -> None:  # type: ignore[no-untyped-def]
    s = start(trainer="crash")
    assert s.end() == 1 and "RL goes on" not in s.errors
    manifest = s.run / "checkpoints" / "step_4" / "manifest.json"
    for step in (2, 4):
        (s.run / "checkpoints" / f"step_{step}").mkdir()
        (s.run / "checkpoints" / f"step_{step}" / "manifest.json").touch()
    manifest.unlink()
    again = start("--resume", str(s.run.root), trainer="crash")
    assert again.end() == 1
    assert (
        f"{manifest}: missing; restore {manifest.parent}, or remove it" in again.errors and "continue with" not in again.errors
    )
    manifest.parent.rmdir()
    again = start("--resume", str(s.run.root), trainer="crash")
    assert again.end() == 1 and f"RL goes on from {s.run / 'checkpoints' / 'step_2'}\n" in again.errors
    shutil.rmtree(s.run / "checkpoints" / "step_2")
    (s.run / "ledger.jsonl").write_text("{}\n")
    again = start("--resume", str(s.run.root), trainer="crash")
    assert again.end() == 1 and "RL begins anew: none of its checkpoints is left\n" in again.errors


def test_a_configuration_error_of_a_role_is_one_of_the_run(start) -> None:  # type: ignore[no-untyped-def]
    s = start(trainer="misconfigured")
    assert s.end() == 2
    assert "model.path: no such file" in s.errors


def test_a_primary_that_saves_ends_the_run_as_saved(start) -> None:  # type: ignore[no-untyped-def]
    s = start(orchestrator="save")
    assert s.end() == 75
    assert (s.run / "saved-trainer").exists()  # the other one was asked to save too
    assert not s.run.stages()["rl"]["done"]
    s.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_a_stop_request_saves_and_can_be_resumed(start, number: int) -> None:  # type: ignore[no-untyped-def]
    s = start()
    s.running()
    t0 = time.monotonic()
    s.process.send_signal(number)
    assert s.end() == 75
    assert spent(t0) < 10
    assert (s.run / "saved-trainer").exists() and (s.run / "saved-orchestrator").exists()
    assert f"--resume {s.run.root}" in s.errors and "exit code 75: it can go on" in s.errors
    s.assert_nothing_left()
    assert start("--resume", str(s.run.root), trainer="finish", orchestrator="finish").end() == 0


def test_a_role_that_does_not_save_in_time_is_killed(start) -> None:  # type: ignore[no-untyped-def]
    s = start(trainer="slow-save", inference_0="deaf")
    s.running()
    t0 = time.monotonic()
    s.process.send_signal(signal.SIGINT)
    assert s.end() == 75
    assert 3.5 < spent(t0) < 10
    assert "trainer did not save within 4 s" in s.errors
    s.assert_nothing_left()


def test_a_second_request_kills_at_once(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = (str(CONFIG), f"run.dir={tmp_path}", "run.name=run", *SHORT, "launch.stop_timeout_s=25")
    s = start(*options, trainer="slow-save", orchestrator="deaf")
    s.running()
    s.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    t0 = time.monotonic()
    s.process.send_signal(signal.SIGINT)
    assert s.end() == 75
    assert spent(t0) < 10
    s.assert_nothing_left()


def test_a_request_that_comes_twice_at_once_is_one(start) -> None:  # type: ignore[no-untyped-def]
    s = start()
    s.running()
    for number in (signal.SIGTERM, signal.SIGHUP):
        s.process.send_signal(number)
    assert s.end() == 75
    assert "second request" not in s.errors
    s.assert_nothing_left()


def test_the_sigterm_after_slurms_warning_is_part_of_it(start) -> None:  # type: ignore[no-untyped-def]
    s = start(trainer="slow-save")
    s.running()
    for number in (signal.SIGUSR2, signal.SIGTERM):
        s.process.send_signal(number)
        time.sleep(0.4)
    assert s.end() == 75
    assert "trainer did not save within 4 s" in s.errors and "second request" not in s.errors
    s.assert_nothing_left()


def test_a_service_that_was_asked_to_end_before_the_supervisor_was_is_no_failure(start) -> None:  # type: ignore[no-untyped-def]
    """Slurm ends a job by SIGTERM to all of its processes, in no order."""
    s = start()
    s.running()
    words = f"--role\0inference-0\0serve\0{s.run.root}"
    (service,) = processes(words)
    os.kill(service, signal.SIGTERM)
    s.until(lambda: not processes(words))
    time.sleep(0.15)
    s.process.send_signal(signal.SIGTERM)
    assert s.end() == 75
    assert (s.run / "saved-trainer").exists()
    s.assert_nothing_left()


def test_a_stop_during_the_start_ends_too(start) -> None:  # type: ignore[no-untyped-def]
    s = start(trainer="silent")
    s.until(lambda: s.run.root.exists() and (s.run / "logs" / "trainer.log").exists())
    s.process.send_signal(signal.SIGTERM)
    assert s.end() == 75
    s.assert_nothing_left()


def test_a_hung_role_is_named(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = (str(CONFIG), f"run.dir={tmp_path}", "run.name=run", *SHORT, "launch.heartbeat_timeout_s=1.5")
    s = start(*options, orchestrator="hang")
    assert s.end() == 1
    assert "orchestrator hangs: no sign of life for" in s.errors
    s.assert_nothing_left()


@pytest.mark.parametrize("what", ["silent", "unready"])
def test_a_role_that_never_gets_ready_is_named(start, tmp_path: Path, what: str) -> None:  # type: ignore[no-untyped-def]
    s = start(str(CONFIG), f"run.dir={tmp_path}", "run.name=run", *SHORT, "launch.start_timeout_s=2.5", inference_0=what)
    assert s.end() == 1
    assert "inference-0 did not start within 2.5 s" in s.errors
    s.assert_nothing_left()


def test_descendants_in_sessions_of_their_own_go_too(start) -> None:  # type: ignore[no-untyped-def]
    s = start(trainer="family")
    s.until(lambda: len(s.sleepers()) == 3)
    assert s.end() == 1
    s.assert_nothing_left()


def test_kill_9_of_the_supervisor_takes_everything_with_it(start, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The guard cleans up, here after roles that did not ask for the kernel's parent death signal."""
    monkeypatch.setenv("PRL_FAKE_NO_PDEATHSIG", "1")
    s = start(inference_0="deaf")
    s.running()
    shared = s.run.weights_path("shared_memory")
    shared.mkdir()
    s.until(lambda: s.run.stages().get("rl", {}).get("wall_s", 0) > 3)
    s.process.kill()
    s.process.communicate()
    spent_before = s.run.stages()["rl"]
    assert not spent_before["done"]
    RunLock(s.run, wait_s=5).release()  # the guard is done
    s.assert_nothing_left()
    resumed = start("--resume", str(s.run.root), trainer="finish", orchestrator="finish")
    assert resumed.end() == 0, resumed.errors
    assert resumed.run.stages()["rl"]["wall_s"] > spent_before["wall_s"] + 0.4


def test_kill_9_of_supervisor_and_guard_takes_the_roles_with_it(start) -> None:  # type: ignore[no-untyped-def]
    """The kernel's parent death signal does; files go at the resume."""
    s = start(inference_0="deaf")
    s.running()
    s.run.weights_path("shared_memory").mkdir()
    (guarding,) = s.guards()
    os.kill(guarding, signal.SIGKILL)
    s.process.kill()
    s.process.communicate()
    RunLock(s.run, wait_s=5).release()
    deadline = time.monotonic() + 5
    while guard.strays(s.run.mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert guard.strays(s.run.mark) == []
    resumed = start("--resume", str(s.run.root), trainer="finish", orchestrator="finish")
    assert resumed.end() == 0, resumed.errors
    resumed.assert_nothing_left()


def test_a_resume_right_after_a_kill_waits_for_the_clean_up(start) -> None:  # type: ignore[no-untyped-def]
    """The guard of the dead supervisor must not take the new one's roles for the old one's."""
    s = start(inference_0="deaf")
    s.running()
    s.process.kill()
    resumed = start("--resume", str(s.run.root), trainer="finish", orchestrator="finish")
    assert resumed.end() == 0, resumed.errors
    s.process.communicate()
    resumed.assert_nothing_left()


def test_a_run_is_locked_until_the_guard_has_cleaned_up(start) -> None:  # type: ignore[no-untyped-def]
    s = start()
    s.running()
    (guarding,) = s.guards()
    os.kill(guarding, signal.SIGSTOP)
    try:
        s.process.kill()
        s.process.communicate()
        with pytest.raises(RunBusy):
            RunLock(s.run, wait_s=0.5)
    finally:
        os.kill(guarding, signal.SIGCONT)
    RunLock(s.run, wait_s=5).release()
    s.assert_nothing_left()


def test_a_killed_guard_ends_the_run(start) -> None:  # type: ignore[no-untyped-def]
    s = start()
    s.running()
    (guarding,) = s.guards()
    os.kill(guarding, signal.SIGKILL)
    assert s.end() == 1
    assert "guard was killed by SIGKILL" in s.errors
    s.assert_nothing_left()


def test_two_supervisors_cannot_run_one_run(start) -> None:  # type: ignore[no-untyped-def]
    s = start()
    s.running()
    second = start("--resume", str(s.run.root))
    assert second.end() == 1
    assert f"process {s.process.pid} runs this run" in second.errors
    assert s.process.poll() is None
    assert '"resume"' not in (s.run / "metrics.jsonl").read_text(), "it leaves no trace in the run that it may not touch"
    s.process.send_signal(signal.SIGTERM)
    assert s.end() == 75


def test_a_copy_of_a_run_that_runs_is_refused_and_ends_nothing_of_it(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    s = start()
    s.running()
    copy = tmp_path / "copy"
    shutil.copytree(s.run.root, copy)
    second = start("--resume", str(copy))
    assert second.end() == 1
    assert f"{copy}: a folder that this one is a copy of" in second.errors and "end that run first" in second.errors
    assert s.process.poll() is None and len(s.guards()) == 1
    s.process.send_signal(signal.SIGTERM)
    assert s.end() == 75
    s.assert_nothing_left()
    LocalExecutor(RunDir(copy), lock := RunLock(RunDir(copy), wait_s=0)).close()
    lock.release()


def test_a_lock_is_never_stale(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    (run / "lock").write_text("99999")
    lock = RunLock(run, wait_s=0)
    with pytest.raises(RunBusy, match=f"process {os.getpid()} runs this run"):
        RunLock(run, wait_s=0.1)
    lock.release()
    RunLock(run, wait_s=0).release()


def test_roles_get_no_tokens_and_the_threads_they_are_given() -> None:
    secret = ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "NVIDIA_API_KEY", "PRL_password", "XDG_AUTH", "MINE_TOKEN"]
    kept = {"PATH": "/bin", "LC_ALL": "C", "MINE": "1", "MINE_KEY": "2", "CUDA_VISIBLE_DEVICES": "0", "TORCH_NCCL_AUTHOR": "x"}
    env = role_environment(kept | dict.fromkeys(secret, "x") | {"OMP_NUM_THREADS": "64"}, ["MINE", "MINE_KEY"], 3)
    assert kept.items() <= env.items() and env["OMP_NUM_THREADS"] == "3"
    assert not set(secret) & env.keys()


def test_on_a_full_disk_the_command_says_so_and_leaves_no_half_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))  # python ignores SIGXFSZ: a write fails, as on a full disk
        code = prl.rl.main([str(CONFIG), f"run.dir={tmp_path}", "run.name=run", *SHORT])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and f"failed: {tmp_path / 'run'}: " in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    script = f"mount -t tmpfs -o ro none {tmp_path} && exec {sys.executable} -m prl.rl {CONFIG} run.dir={tmp_path} run.name=run"
    if (probe := subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"no mount namespaces here: {probe.stderr.strip()}")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "run.dir: cannot be written" in done.stderr and "Read-only" in done.stderr, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"prl.{command}.command" if command in ("bench", "plan") else f"prl.{command}")
    assert module.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage:" in text and f"python -m prl.{command} " in text.split("Example", 1)[1]
    assert module.HELP.partition("Examples:")[2].strip() in text.replace("\n  ", "\n"), (
        "an example that is wrapped cannot be copied"
    )


def test_a_command_to_continue_with_names_the_python_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", "/nowhere")
    assert prl.rl.interpreter() == str(python)
    monkeypatch.chdir(tmp_path)
    assert prl.rl.interpreter() == "env/bin/python"
    monkeypatch.setenv("PATH", str(python.parent))
    assert prl.rl.interpreter() == "python"


def test_the_command_line(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT)

    dry = command("prl.rl", str(CONFIG), f"run.dir={tmp_path}", "trainer.steps=7", "--dry-run")
    assert dry.returncode == 0 and "steps: 7" in dry.stdout and not list(tmp_path.iterdir())
    none = command("prl.cli", "rl")  # the console command hands on arguments and exit code
    assert none.returncode == 2 and "name a YAML file" in none.stderr
    assert "Commands:" in command("prl.cli", "--help").stdout
    for arguments, words in (
        ([str(CONFIG), "trainer.stepz=7"], "did you mean trainer.steps"),
        ([str(CONFIG), "inference.engine=vllm", "inference.dtype=float64"], "inference.dtype: vllm computes in"),
        (["nowhere.yaml"], "no such file"),
        (["trainer.steps=7"], "name a YAML file before the override trainer.steps=7"),
        (["--resume", str(tmp_path)], "no config.yaml in it"),
        ([str(CONFIG), "run.dir=/proc/none"], "cannot be written"),
    ):
        s = start(*arguments)
        assert s.end() == 2 and words in s.errors, (arguments, s.errors)
    taken = tmp_path / "run"
    taken.mkdir()
    (taken / "file").touch()
    s = start()
    assert s.end() == 2 and f"--resume {taken}" in s.errors
