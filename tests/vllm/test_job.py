"""The main job on real vLLM: all roles as processes, a replica killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from prl.orchestrator.audit import audit
from prl.transport.run_dir import RunDir
from tests.vllm.rig import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
CONFIG = Path(__file__).with_name("job.yaml")


def steps(run: RunDir) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    records = map(orjson.loads, path.read_bytes().splitlines()) if path.exists() else iter(())
    return [r for r in records if r["kind"] == "step" and r["role"] == "trainer"]


def test_the_main_job_runs_on_vllm(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'main_job'}:{os.environ.get('PYTHONPATH', '')}"}
    arguments = [str(CONFIG), f"run.dir={tmp_path}", "run.name=job", "inference.replicas=2", "monitor.console=off"]
    process = subprocess.Popen(
        [sys.executable, "-m", "prl.rl", *arguments],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 180
        while len(steps(run)) < 2:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        role = psutil.Process(int((run.read_status("inference-0") or {})["pid"]))
        server = role.children()[0]
        next(p for p in server.children() if "resource_tracker" not in str(p.cmdline())).send_signal(signal.SIGKILL)
        said, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, said
    done = steps(run)
    assert [s["step"] for s in done] == [1, 2, 3, 4, 5, 6]
    assert all(s["unrouted_fraction"] == 0 for s in done), "every trained token has the engine's routes"
    assert all(abs(s["mismatch_kl_own"] or 0) < 1e-9 for s in done), [s["mismatch_kl_own"] for s in done]
    assert not audit(run).problems
    assert (run / "report.html").exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(run.root) in " ".join(p.info["cmdline"] or ())]
