"""What a user is told about a run, and what a stop does, by what stands in the folder and what Slurm says."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from prl.config.load import dump, load
from prl.launch.slurm import status, stop
from prl.launch.slurm.again import Failure
from prl.launch.slurm.status import RESULT, STOP, describe
from prl.launch.supervisor import Limits, Stage, State
from prl.trainer.ledger import Ledger
from prl.transport.run_dir import RunDir

NOW = 2_000_000_000.0
RUNNING = {"7+0": ("RUNNING", "None"), "7+1": ("RUNNING", "None")}
PENDING = {"7+0": ("PENDING", "Resources"), "7+1": ("PENDING", "Resources")}
OVER = {"7+0": ("CANCELLED", "None"), "7+1": ("CANCELLED", "None")}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Submitted as job 7."""
    run = RunDir(tmp_path / "run").create()
    run.config_path.write_text(dump(load("configs/slurm_tiny.yaml", site="configs/site/lab.yaml")))
    (run / "job.json").write_bytes(orjson.dumps({"job": "7"}))
    return run


def supervisor(run: RunDir, **more: object) -> None:
    state = {"t": NOW - 1, "host": "train0", "stage": "rl", "phase": "running", "since": NOW - 125, "waits_for": ""}
    run.record_supervisor(**(state | {"roles": ["inference-0", "trainer"], "code": 0, "cause": "", "lost": []} | more))


def told(run: RunDir, jobs: dict[str, tuple[str, str]] | None) -> str:
    return "\n".join(describe(run, jobs, NOW))


def test_before_it_begins(run: RunDir) -> None:
    text = told(run, PENDING)
    assert "job    7+0 pending (Resources), 7+1 pending (Resources)" in text
    assert "phase  not begun" in text and "step   none of 10 yet" in text


def test_while_it_runs(run: RunDir) -> None:
    supervisor(run, waits_for="inference-1 to start (at most 120 s)", roles=["inference-0", "inference-1", "trainer"])
    row = {"t": NOW - 2, "host": "train0", "phase": "training", "step": 3, "waits_for": "batch of step 4"}
    (run / "status" / "trainer.json").write_bytes(orjson.dumps(row))
    row = {"t": NOW - 90, "host": "infer0", "phase": "serving", "step": 0, "waits_for": ""}
    (run / "status" / "inference-4.json").write_bytes(orjson.dumps(row))
    Ledger(run / "ledger.jsonl").step(step=3, version=3, lineage=0, rollouts=[], checksum="", loss=1.0)
    lines = told(run, RUNNING).splitlines()
    assert "phase  rl running for 2 min 5 s; the supervisor on train0: alive" in lines
    assert "waits  for inference-1 to start (at most 120 s)" in lines
    assert any(line.startswith("step   3 of 10, ") for line in lines)
    (trainer,) = (line.split("  ") for line in lines if line.startswith("trainer "))
    assert [word.strip() for word in trainer if word.strip()] == [
        "trainer",
        "train0",
        "training",
        "3",
        "2 s ago",
        "batch of step 4",
    ]
    assert any(line.split()[:2] == ["inference-1", "not"] for line in lines)
    assert any(line.startswith("inference-4") and "ended" in line for line in lines), "a guest that is silent is none any more"


def test_what_failed_is_shown_with_its_last_lines(run: RunDir) -> None:
    lost = [{"t": NOW - 60, "role": "inference-0", "why": "was killed by SIGKILL", "lines": ["CUDA out of memory"]}]
    supervisor(run, lost=lost)
    (run / "failures.json").write_bytes(orjson.dumps([{"step": 2, "cause": "stage rl: trainer-1 hangs"}]))
    assert Failure(2, "stage rl: trainer-1 hangs") in status.remembered(run / "failures.json")
    lines = told(run, RUNNING).splitlines()
    assert "life 1 ended after step 2: stage rl: trainer-1 hangs" in lines
    at = lines.index("lost   inference-0 1 min 0 s ago: was killed by SIGKILL; its last lines:")
    assert lines[at + 1] == "  CUDA out of memory"


def test_a_supervisor_that_is_silent_is_said_to_be(run: RunDir) -> None:
    supervisor(run, t=NOW - 40)
    assert "the supervisor on train0: no sign of life for 40 s" in told(run, RUNNING)


@pytest.mark.parametrize("jobs", [OVER, {}])
def test_a_job_that_ended_without_a_result_is_not_taken_for_a_running_one(
    run: RunDir, jobs: dict[str, tuple[str, str]]
) -> None:
    supervisor(run, t=NOW - 1)
    (run / "logs" / "slurm.log").write_text("slurmstepd: error: CANCELLED\n")
    text = told(run, jobs)
    assert "ended  without a result" in text and "phase" not in text.splitlines()[2]
    assert text.endswith("  slurmstepd: error: CANCELLED")


def test_after_its_end(run: RunDir) -> None:
    supervisor(run, phase="done")
    (run / RESULT).write_bytes(orjson.dumps({"job": "7", "restarts": 0, "code": 75, "cause": "stop requested"}))
    assert "ended  exit code 75: stop requested" in told(run, {})
    assert "Slurm does not answer here" in told(run, None)


def test_what_was_never_submitted_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not the folder of a run that was submitted"):
        status.show(RunDir(tmp_path))


def test_what_is_waited_for_is_named() -> None:
    stage = Stage("rl", frozenset(["trainer", "orchestrator"]), frozenset(["inference-0"]))
    state = State((stage,), Limits(60, 50, 8, 30, 20, 15, 1), alive=stage.roles, started=frozenset(["orchestrator"]))
    assert state.waits_for() == "inference-0, trainer to start (at most 60 s)"

    def of(phase: str, *alive: str) -> str:
        return State((stage,), state.limits, phase, 0.0, frozenset(alive), stage.roles).waits_for()  # type: ignore[arg-type]

    assert of("running", *stage.roles) == ""
    assert of("draining", "trainer", "inference-0") == "trainer to end (at most 50 s)"
    assert of("saving", "trainer", "inference-0") == "trainer to save and end (at most 30 s)"
    assert of("closing", "inference-0") == "inference-0 to end (at most 8 s)"


class Slurm:
    """Answers as slurmctld does, and remembers what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, jobs: dict[str, tuple[str, str]], *, stubborn: bool = False):
        self.jobs, self.stubborn, self.asked = jobs, stubborn, list[tuple[str, ...]]()
        monkeypatch.setattr(stop, "states", lambda job: self.jobs)
        monkeypatch.setattr(stop, "ask", self.ask)
        monkeypatch.setattr(stop, "AT_ONCE_S", 0.1)

    def ask(self, *words: str) -> str:
        self.asked.append(words)
        if "--state=PENDING" in words and self.jobs == PENDING:
            self.jobs = OVER
        return ""


def test_a_stop_of_a_running_run_is_a_request_that_stays(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, said = Slurm(monkeypatch, RUNNING), list[str]()
    stop.stop(run, say=said.append)
    assert slurm.asked == [("scancel", "--state=PENDING", "7"), ("scancel", "--batch", "--signal=USR2", "7")]
    assert (run / STOP).exists() and not (run / RESULT).exists() and "save and end" in said[0]
    stop.stop(run, say=said.append)
    assert slurm.asked[3:] == [("scancel", "--batch", "--signal=USR2", "7"), ("scancel", "7")]
    assert said[1:] == ["job 7 was asked to end at once", "job 7 does not end by itself: Slurm ends it"]


def test_a_run_that_has_not_begun_is_cancelled(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch, PENDING)
    stop.stop(run, say=lambda line: None)
    assert slurm.asked == [("scancel", "--state=PENDING", "7")]
    assert orjson.loads((run / RESULT).read_bytes())["code"] == 75


def test_there_is_nothing_to_stop(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    Slurm(monkeypatch, OVER)
    with pytest.raises(OSError, match="has ended already"):
        stop.stop(run, say=lambda line: None)
    monkeypatch.setattr(stop, "states", lambda job: None)
    with pytest.raises(OSError, match="ask for it on a login node"):
        stop.stop(run, say=lambda line: None)
    assert not (run / STOP).exists()
