"""`python -m prl.bench`: what it prints, its exit codes, and the whole way through the real main job."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prl.bench import main, ops
from prl.bench.rows import NOT_JUDGED
from prl.bench.runs import BenchError, run_job


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in ("gpu", "pipeline", "peers", "seeds"))


@pytest.mark.parametrize(
    "args",
    [
        ["pipelines"],
        ["pipeline", "--repeats", "0"],
        ["pipeline", "no-such.yaml"],
        ["pipeline", "trainer.stepz=3"],
        ["pipeline", "--steps", "6"],
        ["seeds", "no-such.yaml", "run.seed=1"],
        ["peers", "--python", "/no"],
        ["--status", "--json", "x.json"],
        ["--only", "route", "pipeline"],
        ["--json", "x.json", "gpu"],
    ],
)
def test_wrong_usage_is_2(args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert capfd.readouterr().err


@pytest.mark.parametrize("command", [[], ["pipeline"], ["seeds"]])
def test_json_that_cannot_be_written_is_told_before_anything_runs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "measure", lambda only: pytest.fail("measured"))
    (tmp_path / "file").touch()
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.json", "cannot be written ([Errno 17] File exists: ")):
        assert main([*command, "--json", str(path)]) == 2
        assert f"--json: {path} {why}" in capfd.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_measurement_of_memory_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "MEMORY", "raise OSError('no /proc here')")
    with pytest.raises(BenchError, match="logprobs: peak memory.*: OSError: no /proc here"):
        ops.lm_head_memory()


def few() -> Iterator[ops.Case]:
    yield ops.Case("combine", "one", lambda: None, {"plain": lambda: None}, bytes=1)
    yield ops.Case("route", "two", lambda: None, {"plain": lambda: None}, bytes=1)


def test_kernels_are_chosen_by_name_and_named_as_they_are_measured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "cases", few)
    monkeypatch.setattr(ops, "peaks", lambda: (1.0, 1.0))
    assert main(["--only", "combine", "--json", "-"]) in (0, NOT_JUDGED)
    out, err = capfd.readouterr()
    assert [row["name"] for row in json.loads(out)["rows"]] == ["combine [one]"]
    assert " s  combine [one]\n" in err and "route" not in err
    assert main(["--only", "nonsense"]) == 2
    assert re.search(
        r"--only: expected .* got 'nonsense'; there are:\n[^$]*combine \[one\]\n *route \[two\]", capfd.readouterr().err
    )


def test_a_demand_that_cannot_be_met_is_2(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ops, "cases", few)
    monkeypatch.setenv("PRL_KERNELS", "gpu")
    for args in (["--status"], ["--only", "combine"]):
        assert main(args) == 2
        assert "no backend gpu (PRL_KERNELS); there are cuda, triton, cpu, reference" in capfd.readouterr().err


def test_status_names_what_runs_and_why_not_another(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--status"]) == 0
    out = capfd.readouterr().out
    assert "grouped_gemm_fp8" in out and "chosen" in out and "– there is no such kernel" in out


def test_what_cannot_be_measured_is_1_with_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny-seed-0").mkdir()
    assert main(["seeds", "configs/tiny.yaml", f"run.dir={tmp_path}"]) == 1
    assert "tiny-seed-0: there already" in capfd.readouterr().err


def test_a_run_of_the_main_job_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"warm: .*exit code 2\n[^$]*trainer.stepz"):
        run_job(tmp_path, "warm", Path("configs/tiny.yaml"), ["trainer.stepz=3"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_pipeline_end_to_end(tmp_path: Path) -> None:
    """Every variant of the real job; a load put on the machine on purpose keeps the goal from being judged."""
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "prl.bench", "pipeline", "configs/tiny.yaml", "sft.steps=2", "--json", "-"]
            + ["--steps", "7", "--warmup", "2", "--repeats", "1"],
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert done.returncode == NOT_JUDGED, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["loaded"] and "machine loaded" in done.stderr
    rows = {(r["name"], r["against"]): r for r in result["rows"]}
    goal = rows["asynchronous: steps", "synchronous"]
    assert goal["value"] > 0 and goal["verdict"] == "not judged" and goal["met"] is None
    roles = {name.rpartition(" ")[2] for name, _ in rows if "peak memory" in name}
    assert roles == {"trainer", "orchestrator", "inference-0"}
    assert rows["engine in bfloat16, routes replayed: mismatch KL", None]["value"] > 0
    assert list((tmp_path / "tmp").iterdir()) == []
