"""The whole trainer against the real batch server: versions, ledger, resume after a kill, two ranks, stop."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from prl.config.load import dump
from prl.config.schema import Checkpoint, RunConfig
from prl.models.hf import load_hf
from prl.samples import Rollout, pack
from prl.trainer import checkpoint, ledger
from prl.trainer.train import main
from prl.transport.batches import BatchServer, Trained
from prl.transport.run_dir import RunDir
from prl.transport.versions import VersionLog
from prl.transport.weights import WeightStore
from tests.trainer.helpers import config, rollouts, run_dir

Change = Callable[[int, list[Rollout]], list[Rollout]]


async def orchestrate(
    run: RunDir,
    c: RunConfig,
    steps: range,
    *,
    code: int | None = 0,
    on_trained: Callable[[Trained], None] = lambda t: None,
    change: Change = lambda step, rs: rs,
) -> list[Trained]:
    """Offer the steps' batches one after the other, then finish with `code`. Batch n follows from n alone."""
    server = BatchServer(run, run.secret, ranks=c.trainer.ranks, first_step=steps.start)
    done: list[Trained] = []
    try:
        source = server.trained()
        for step in steps:
            batches = pack(change(step, rollouts(step)), step=step, budget=40, ranks=c.trainer.ranks, checksum=f"sum{step}")
            server.offer(step, batches, state=b"state %d" % step)
            done.append(await asyncio.wait_for(anext(source), 60))
            on_trained(done[-1])
        if code is not None:
            server.finish(code)
            await server.wait_finished(30)
    finally:
        server.close()
    return done


def start(run: RunDir, c: RunConfig, stop: threading.Event | None = None) -> asyncio.Task[int]:
    return asyncio.create_task(asyncio.to_thread(main, run, c, 0, stop or threading.Event()))


def spawn(run: RunDir, c: RunConfig, index: int = 0) -> subprocess.Popen[bytes]:
    (run / "config.json").write_text(c.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.rank", str(run.root), str(index)], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def losses(run: RunDir) -> list[float]:
    return [r["loss"] for r in ledger.surviving(ledger.read(run / "ledger.jsonl"))]


def records(run: RunDir, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    return [r for r in map(orjson.loads, lines) if r["kind"] == kind and r["role"] == "trainer"]


def newest(run: RunDir, c: RunConfig) -> dict[str, torch.Tensor]:
    got = WeightStore(run, c.transport).load_latest()
    assert got is not None
    return got[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Five steps of one rank, without a break."""
    run = run_dir(tmp_path_factory.mktemp("undisturbed"))
    c = config()

    async def go() -> int:
        task = start(run, c)
        await orchestrate(run, c, range(1, 6))
        return await task

    assert asyncio.run(go()) == 0
    return run


def test_every_step_is_a_version_a_ledger_entry_and_a_record(undisturbed: RunDir) -> None:
    run, c = undisturbed, config()
    entries = ledger.read(run / "ledger.jsonl")
    assert [(e["step"], e["version"], e["lineage"], e["checksum"]) for e in entries] == [
        (n, n, 0, f"sum{n}") for n in range(1, 6)
    ]
    assert entries[0]["rollouts"] == [r.id for r in rollouts(1)]
    log = VersionLog(run / "versions.jsonl")
    assert [log.step_of(v) for v in range(6)] == list(range(6)) and log.current() == 5
    steps = records(run, "step")
    assert [(r["step"], r["trained_version"], r["version"]) for r in steps] == [(n, n - 1, n) for n in range(1, 6)]
    assert [r["loss"] for r in steps] == losses(run)
    assert steps[0]["mismatch_kl_own"] is not None and steps[-1]["mismatch_kl_own"] is None  # versions 0 and 1 sampled all
    assert set(steps[0]["time"]) == {"wait", "forward_backward", "optimizer", "publish"} and steps[0]["backend"]
    assert [p.name for _, p in checkpoint.complete(run)] == ["step_4", "step_5"]
    assert checkpoint.orchestrator_state(run / "checkpoints" / "step_4") == b"state 4"
    weights = newest(run, c)
    model = load_hf(run / "model", dtype=torch.float64)
    assert all(torch.equal(weights[n], t) for n, t in model.state_dict().items())
    assert (run / "model" / "tokenizer.json").is_file()


async def test_killed_between_checkpoints_a_run_resumes_bit_for_bit(tmp_path: Path, undisturbed: RunDir) -> None:
    run, c = run_dir(tmp_path), config()
    process = spawn(run, c)

    def kill(t: Trained) -> None:
        if t.step == 3:
            while checkpoint.latest_complete(run) is None:  # it is written beside the steps
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)

    await orchestrate(run, c, range(1, 4), code=None, on_trained=kill)
    process.wait(10)
    latest = checkpoint.latest_complete(run)
    assert latest is not None and latest.name == "step_2"
    assert checkpoint.orchestrator_state(latest) == b"state 2"

    task = start(run, c)
    done = await orchestrate(run, c, range(3, 6))
    assert await task == 0
    assert losses(run) == losses(undisturbed)
    mine, theirs = newest(run, c), newest(undisturbed, c)
    assert all(torch.equal(mine[n], theirs[n]) for n in theirs)
    # Version 3 of the lost step is abandoned; the resumed weights got an id of their own.
    assert [t.version for t in done] == [5, 6, 7]
    log = VersionLog(run / "versions.jsonl")
    assert [log.is_surviving(v) for v in range(8)] == [True, True, True, False, True, True, True, True]
    assert log.step_of(4) == 2
    entries = ledger.read(run / "ledger.jsonl")
    assert [(e["kind"], e["step"]) for e in entries[2:5]] == [("step", 3), ("resume", 2), ("step", 3)]
    assert {e["lineage"] for e in ledger.surviving(entries)} == {0, 1}


async def test_a_version_log_that_does_not_know_the_checkpoint_is_refused(tmp_path: Path, undisturbed: RunDir) -> None:
    run = RunDir(shutil.copytree(undisturbed.root, tmp_path / "run"))
    lines = (run / "versions.jsonl").read_bytes().splitlines(keepends=True)
    entries = ledger.read(run / "ledger.jsonl")
    for kept in (0, 3):  # its ids would be given out again
        (run / "versions.jsonl").write_bytes(b"".join(lines[:kept]))
        assert await start(run, config()) == 1
        assert "versions.jsonl: does not say that version 5 is of step 5" in records(run, "event")[-1]["error"]
    assert ledger.read(run / "ledger.jsonl") == entries


async def test_killed_before_the_first_checkpoint_a_run_starts_over(tmp_path: Path, undisturbed: RunDir) -> None:
    run, c = run_dir(tmp_path), config()
    c = c.model_copy(update={"checkpoint": c.checkpoint.model_copy(update={"every": 100})})
    stop = threading.Event()
    task = start(run, c, stop)
    await orchestrate(run, c, range(1, 2), code=None, on_trained=lambda t: None)
    for saved in (run / "checkpoints").iterdir():  # as if it had died before
        raise AssertionError(saved)
    stop.set()
    assert await task == 75
    latest = checkpoint.latest_complete(run)
    assert latest is not None and latest.name == "step_1", "a stop saves at once"
    checkpoint._discard(latest)
    task = start(run, c)
    await orchestrate(run, c, range(1, 3), code=75)
    assert await task == 75
    assert losses(run) == losses(undisturbed)[:2]


async def test_two_ranks_train_as_one(tmp_path: Path, undisturbed: RunDir) -> None:
    """FSDP2 over two gloo processes, in float64: losses, weights and the ledger are one rank's; one rank can go on."""
    run, c = run_dir(tmp_path), config(ranks=2)
    ranks = [spawn(run, c, i) for i in range(2)]
    await orchestrate(run, c, range(1, 5), code=75)
    assert [r.wait(30) for r in ranks] == [75, 75]
    np.testing.assert_allclose(losses(run), losses(undisturbed)[:4], rtol=0, atol=1e-12)
    ours, theirs = records(run, "step"), records(undisturbed, "step")
    for a, b in zip(ours, theirs[:4], strict=True):
        for name in ("grad_norm", "entropy", "mismatch_kl", "ratio_max", "unrouted_fraction"):
            assert a[name] == pytest.approx(b[name], rel=1e-10), name
        assert a["mismatch"] == pytest.approx(b["mismatch"], rel=1e-9)
        assert a["expert_counts"] == b["expert_counts"] and a["tokens"] == b["tokens"]
    one = config()
    task = start(run, one)
    await orchestrate(run, one, range(5, 6))
    assert await task == 0
    np.testing.assert_allclose(losses(run), losses(undisturbed), rtol=0, atol=1e-12)
    mine, expected = newest(run, one), newest(undisturbed, one)
    for name, t in expected.items():
        torch.testing.assert_close(mine[name], t, rtol=0, atol=1e-12)


async def test_steps_that_are_not_finite_are_recorded_and_end_the_run(tmp_path: Path) -> None:
    def poison(step: int, rs: list[Rollout]) -> list[Rollout]:
        if step > 1:
            s = rs[0].samples[0]
            rs[0].samples[0] = replace(s, advantages=np.where(s.trainable, np.nan, 0).astype(np.float32))
        return rs

    run, c = run_dir(tmp_path), config(max_nonfinite=1)
    task = start(run, c)
    orchestrator = asyncio.create_task(orchestrate(run, c, range(1, 5), change=poison))
    assert await asyncio.wait_for(task, 60) == 1
    orchestrator.cancel()
    entries = ledger.read(run / "ledger.jsonl")
    assert [(e["step"], e.get("skipped", False)) for e in entries] == [(1, False), (2, True), (3, True)]
    # A checkpoint may be complete before the run ends, or not.
    events = [e for e in records(run, "event") if e["name"] != "checkpoint"]
    assert [e["name"] for e in events] == ["nonfinite", "nonfinite", "failed"]
    assert "max_nonfinite allows 1" in events[-1]["error"] and Path(events[0]["dump"]).is_file()


async def test_a_stop_while_waiting_saves_and_ends_at_once(tmp_path: Path) -> None:
    run, c = run_dir(tmp_path), config()
    stop = threading.Event()
    task = start(run, c, stop)
    await orchestrate(run, c, range(1, 2), code=None)
    stop.set()
    assert await asyncio.wait_for(task, 5) == 75
    assert [p.name for _, p in checkpoint.complete(run)] == ["step_1"]


async def test_a_stop_before_there_is_an_orchestrator_ends_at_once(tmp_path: Path) -> None:
    run, stop = run_dir(tmp_path), threading.Event()
    task = start(run, config(), stop)
    while WeightStore(run, config().transport).latest() is None:
        await asyncio.sleep(0.02)
    stop.set()
    assert await asyncio.wait_for(task, 5) == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
async def test_a_signal_saves_at_the_next_safe_point_and_ends_with_75(tmp_path: Path, number: int) -> None:
    run, tree = run_dir(tmp_path), config().model_dump()
    tree["envs"], tree["sampling"] = [{"name": "next", "kind": "tests.trainer.envs:Next"}], {"max_length": 64, "max_tokens": 32}
    tree["inference"]["dtype"], tree["checkpoint"]["every"] = "float64", 100
    c = RunConfig.model_validate(tree)
    run.config_path.write_text(dump(c))
    process = subprocess.Popen([sys.executable, "-m", "prl.launch.role", "trainer", "--run", str(run.root)])
    await orchestrate(run, c, range(1, 3), code=None, on_trained=lambda t: process.send_signal(number) if t.step == 2 else None)
    assert process.wait(60) == 75
    latest = checkpoint.latest_complete(run)
    assert latest is not None and checkpoint.verify(latest).step == 2 and checkpoint.orchestrator_state(latest) == b"state 2"
    assert not list((run / "checkpoints").glob("*.tmp"))


async def test_a_sequence_over_the_budget_is_named(tmp_path: Path) -> None:
    run, c = run_dir(tmp_path), config(pack_tokens=9)
    task = start(run, c)
    orchestrator = asyncio.create_task(orchestrate(run, c, range(1, 2)))
    assert await asyncio.wait_for(task, 60) == 1
    orchestrator.cancel()
    assert re.search(r"a sequence of 1\d tokens, trainer.pack_tokens is 9: raise it", records(run, "event")[-1]["error"])


async def test_a_missing_orchestrator_is_named(tmp_path: Path) -> None:
    run, c = run_dir(tmp_path), config()
    c = c.model_copy(update={"launch": c.launch.model_copy(update={"start_timeout_s": 0.1})})
    assert await start(run, c) == 1
    (event,) = records(run, "event")
    assert "orchestrator did not announce itself" in event["error"]


async def live(run: RunDir, c: RunConfig, last: int, kill: int | None, delay_s: float = 0.0) -> list[int]:
    """One life of two ranks up to step `last`, or until rank `kill` is killed some time after its second step; exit codes."""
    newest = checkpoint.latest_complete(run)
    first = checkpoint.verify(newest).step + 1 if newest else 1
    run.forget_roles()
    ranks, second = [spawn(run, c, i) for i in range(2)], asyncio.Event()
    work = asyncio.create_task(
        orchestrate(run, c, range(first, last + 1), on_trained=lambda t: second.set() if t.step > first else None)
    )
    try:
        if kill is None:
            await work
        else:
            await asyncio.wait_for(second.wait(), 90)
            await asyncio.sleep(delay_s)
            ranks[kill].kill()
        return [await asyncio.to_thread(process.wait, 60) for process in ranks]
    finally:
        work.cancel()
        await asyncio.wait([work])
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_ranks_killed_again_and_again_end_as_if_undisturbed(tmp_path: Path) -> None:
    """At whatever they are at: publishing, saving a checkpoint (one a step), waiting; the other rank ends by itself."""
    c = config("float32", ranks=2, mesh={"ep": 2}).model_copy(update={"checkpoint": Checkpoint(every=1)})
    whole, killed = run_dir(tmp_path / "whole"), run_dir(tmp_path / "killed")
    assert await live(whole, c, 12, None) == [0, 0]
    for i, delay_s in enumerate((0.0, 0.03, 0.1, 0.17, 0.25)):
        codes = await live(killed, c, 40, i % 2, delay_s)
        assert codes[i % 2] == -signal.SIGKILL and codes[1 - i % 2] == 1
    last = len(losses(killed)) + 2
    assert await live(killed, c, max(last, 12), None) == [0, 0]
    assert losses(killed)[:12] == losses(whole)
    assert not list(killed.root.glob("*/*.tmp"))
