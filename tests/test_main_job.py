"""The main job end to end, small: `python -m prl.rl` with all its real roles, killed and resumed in every way."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from prl.launch import guard
from prl.launch.local import RunLock
from prl.orchestrator.audit import audit
from prl.trainer import ledger
from prl.transport.run_dir import RunDir
from prl.transport.versions import VersionLog

JOB = Path(__file__).with_name("main_job")
ROOT = JOB.parents[1]
CONFIG = str(JOB / "tiny.yaml")
DETERMINISTIC = ("run.deterministic=true", "orchestrator.synchronous=true", "inference.prefix_cache=false")
ROLES = ("trainer", "orchestrator", "inference-0")

pytestmark = pytest.mark.timeout(300)


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


class Job:
    """A run and its lives."""

    def __init__(self, folder: Path, *overrides: str, config: str = CONFIG):
        self.run = RunDir(folder / "job")
        self.first = (config, f"run.dir={folder}", "run.name=job", "monitor.console=off", *overrides)
        self.process: subprocess.Popen[str] | None = None
        self.swept = True
        """Whether somebody is left to clean up after this life: all but `kill -9` of everything, or before there is a guard."""

    def start(self) -> Job:
        """The first life, or a resume."""
        self.swept = True
        resume = self.run.config_path.exists()
        arguments: Sequence[str] = ("--resume", str(self.run.root)) if resume else self.first
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{JOB}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prl.rl", *arguments],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        return self

    def end(self, expected: int, within_s: float = 90) -> str:
        """Wait for the end of this life; what it said."""
        assert self.process is not None
        out, errors = self.process.communicate(timeout=within_s)
        assert self.process.returncode == expected, errors + out
        self.assert_nothing_left()
        return out + errors

    def at_step(self, step: int) -> None:
        """Wait until the trainer has finished `step` in this life."""
        before = len(self.entries())
        self.until(lambda: any(e["kind"] == "step" and e["step"] >= step for e in self.entries()[before:]))

    def until(self, condition: Callable[[], bool]) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)

    def entries(self) -> list[dict]:
        path = self.run / "ledger.jsonl"
        return ledger.read(path) if path.exists() else []

    def losses(self) -> dict[int, float]:
        return {e["step"]: e["loss"] for e in ledger.surviving(self.entries())}

    def steps(self) -> list[dict[str, Any]]:
        """The trainer's step records, in order."""
        records = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [r for r in records if r["kind"] == "step" and r["role"] == "trainer"]

    def pid(self, role: str) -> int:
        status = self.run.read_status(role)
        assert status is not None
        return status["pid"]

    def kill(self, who: str) -> None:
        """kill -9 of a role, of the supervisor, or of everything at once."""
        assert self.process is not None
        guards = [p for p in guard.strays(self.run.mark) if b"guard.py" in Path(f"/proc/{p}/cmdline").read_bytes()]
        self.swept = who != "everything" and bool(guards)
        if who == "everything":
            for pid in [self.process.pid, *guard.strays(self.run.mark)]:
                os.kill(pid, signal.SIGKILL)
        else:
            os.kill(self.process.pid if who == "supervisor" else self.pid(who), signal.SIGKILL)

    def assert_nothing_left(self) -> None:
        RunLock(self.run, wait_s=5).release()  # a guard that cleans up holds it
        assert not self.swept or not self.run.weights_path("shared_memory").exists()
        ports = [json.loads(path.read_text())["port"] for path in (self.run / "rendezvous").iterdir()]
        deadline = time.monotonic() + (0 if self.swept else 5)  # with the guard killed too, nobody waits for the last to die
        while left := [*guard.strays(self.run.mark), *(port for port in ports if listens(port))]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def assert_complete(self, steps: int) -> None:
        report = audit(self.run)
        assert report.ok, str(report)
        assert sorted(self.losses()) == list(range(1, steps + 1))
        assert all(not e.get("skipped") for e in self.entries())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs in folders below `tmp_path`; whatever a failed test left running ends here."""
    made: list[Job] = []

    def make(*overrides: str, name: str = "a", config: str = CONFIG) -> Job:
        made.append(Job(tmp_path / name, *overrides, config=config))
        return made[-1]

    yield make
    for j in made:
        if j.process is not None and j.process.poll() is None:
            j.process.kill()
            j.process.communicate()
            RunLock(j.run, wait_s=10).release()


def test_undisturbed(job: Callable[..., Job]) -> None:
    one = job("inference.record_selections=true").start()
    said = one.end(0)
    one.assert_complete(8)
    flips = [s["selection_flip_fraction"] for s in one.steps()]
    assert len(flips) == 8 and flips[0] < 0.01 and max(flips) < 0.2
    summary = json.loads((one.run / "summary.json").read_text())
    assert 0 < summary["selection_flip_fraction"] < summary["selection_flip_fraction_max"] == max(flips)
    assert summary["steps"] == 8 and summary["rollouts_trained"] == 128
    assert summary["unrouted_fraction"] == 0 and summary["mismatch_kl_own"] < 1e-3 and summary["staleness_max"] <= 2
    assert summary["held_out_sft"] is not None and summary["held_out_final"] is not None
    assert "report.html" in said and "<html" in (one.run / "report.html").read_text()[:200].lower()
    assert (one.run / "model" / "config.json").exists()
    assert VersionLog(one.run / "versions.jsonl").current() == 8
    audited = subprocess.run([sys.executable, "-m", "prl.report", str(one.run.root), "--audit"], cwd=ROOT, timeout=60)
    assert audited.returncode == 0


def test_engine_and_trainer_agree_over_turns_ranks_and_replicas(job: Callable[..., Job]) -> None:
    """In float32 with everything replayed: a turn's boundary rows, and the joined work of two replicas and two ranks."""
    one = job(
        "envs=[{name: turns, kind: 'letters:Turns'}]", "sampling.max_turns=3", "trainer.steps=3",
        "trainer.ranks=2", "inference.replicas=2", "inference.record_selections=true", "trainer.replay_selections=true",
    ).start()  # fmt: skip
    one.end(0)
    one.assert_complete(3)
    steps = one.steps()
    first = steps[0]
    assert first["mismatch"]["max"] < 1e-4
    assert 1 - 1e-4 < first["ratio_min"] <= 1 <= first["ratio_max"] < 1 + 1e-4
    assert first["own_tokens"] == first["trainable_tokens"], "step 1 trains what the first weights wrote"
    assert all(s["recaptured_fraction"] > 0 and s["unrouted_fraction"] == 0 and s["replayed_fraction"] == 1 for s in steps)
    assert all("selection_flip_fraction" not in s for s in steps), "what is replayed cannot flip"
    records = [json.loads(line) for line in (one.run / "metrics.jsonl").read_text().splitlines()]
    generated = {r["role"] for r in records if r["kind"] == "engine" and r["generated"] > 0}
    assert generated == {"inference-0", "inference-1"}


@pytest.mark.parametrize("name", [pytest.param("ranks"), *(pytest.param(n, marks=pytest.mark.long) for n in ("rows", "alone"))])
def test_in_the_bitwise_mode_the_mismatch_is_exactly_zero(job: Callable[..., Job], name: str) -> None:
    """Weights on two ranks, rows on two ranks, and one rank with requests in flight while weights change."""
    mesh = {
        "ranks": ("trainer.ranks=2", "trainer.mesh.ep=1", "trainer.mesh.cp=1", "orchestrator.synchronous=true"),
        "rows": ("trainer.ranks=2", "trainer.mesh.ep=1", "trainer.mesh.cp=2", "orchestrator.synchronous=true"),
        "alone": (),
    }[name]
    one = job(
        "run.bitwise=true", "model.dtype=bfloat16", "inference.dtype=bfloat16", "sampling.temperature=0.9",
        "inference.replicas=2", "trainer.steps=4", *mesh,
    ).start()  # fmt: skip
    one.end(0)
    one.assert_complete(4)
    own = [s["mismatch_kl_own"] for s in one.steps() if s["own_tokens"]]
    assert own == [0.0] * len(own) and len(own) >= (4 if mesh else 1)


@pytest.mark.long
def test_two_ranks_train_the_run_of_one(job: Callable[..., Job]) -> None:
    """The whole job, from its first rollout to its last step: sharded to the last bit, with experts apart to rounding."""
    losses = {}
    for name, mesh in (("one", "ranks=1"), ("sharded", "mesh.ep=1"), ("experts", "mesh.ep=2")):
        ranks = () if name == "one" else ("trainer.ranks=2",)
        one = job(*DETERMINISTIC, "trainer.steps=6", *ranks, f"trainer.{mesh}", name=name).start()
        one.end(0)
        losses[name] = one.losses()
    assert losses["sharded"] == losses["one"]
    assert losses["experts"] == pytest.approx(losses["one"], abs=1e-6)


@pytest.mark.long
def test_a_warm_started_policy_calls_the_calculator(job: Callable[..., Job]) -> None:
    """The configuration with several turns, with a small model and two numbers a sum."""
    one = job(
        "model.architecture={hidden_size: 64, intermediate_size: 128, moe_intermediate_size: 32, num_hidden_layers: 2, "
        "n_routed_experts: 8, num_experts_per_tok: 2, num_attention_heads: 4, index_n_heads: 4}",
        "envs.0.options.dataset_options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}",
        "sft={steps: 150, batch_size: 64, examples: 2048, stop_at: null, optim: {lr: 3.0e-3}}",
        "trainer.steps=3", "orchestrator={batch_size: 32, max_in_flight: 64, max_refills: 200}", "evaluation.tasks=32",
        config="configs/multi_turn.yaml",
    ).start()  # fmt: skip
    one.end(0, within_s=240)
    one.assert_complete(3)
    summary = json.loads((one.run / "summary.json").read_text())
    assert summary["recaptured_fraction"] > 0 and summary["unrouted_fraction"] == 0


@pytest.mark.long
def test_neither_lr_0_nor_shuffled_rewards_gain_anything(job: Callable[..., Job]) -> None:
    """From one warm start, by the sampled solve rate on 512 held-out tasks, the same noise in every evaluation."""
    settings = (
        *DETERMINISTIC, "envs=[{name: first, kind: 'letters:First'}]", "sampling.max_tokens=2", "trainer.steps=16",
        "orchestrator.batch_size=64", "orchestrator.max_in_flight=64", "evaluation.tasks=512", "evaluation.every=1000",
        "orchestrator.max_refills=200",
    )  # fmt: skip
    sft = "sft={steps: 60, batch_size: 26, examples: 520, optim: {lr: 3.0e-3}}"
    gains: dict[str, float] = {}
    warm = ""
    for name, change in (("rl", sft), ("lr 0", "trainer.optim.lr=0"), ("shuffled", "orchestrator.shuffle_rewards=true")):
        one = job(
            *settings, change, *(["model.architecture=null", f"model.path={warm}"] if warm else []), name=name.replace(" ", "-")
        ).start()
        one.end(0)
        one.assert_complete(16)
        summary = json.loads((one.run / "summary.json").read_text())
        assert summary["held_out_tasks"] == 512 and 0.35 < summary["held_out_sft"] < 0.65
        gains[name] = summary["held_out_final"] - summary["held_out_sft"]
        warm = warm or str(one.run / "sft" / "model")
    assert gains["rl"] > 0.2 and gains["lr 0"] < 0.05 and gains["shuffled"] < 0.05, gains


def test_what_only_a_role_can_find_wrong_with_a_configuration_ends_with_2(job: Callable[..., Job]) -> None:
    one = job("envs=[{name: letters, kind: 'letters:Latters'}]").start()
    said = one.end(2)
    assert "env letters: kind 'letters:Latters': cannot be imported" in said and "Traceback" not in said
    assert "mend it with: " in said and f" -m prl.rl --resume {one.run.root} KEY=VALUE" in said
    said = job("envs=[{name: words, kind: reasoning_gym, options: {dataset: spel_backward}}]", name="b").start().end(2)
    assert "did you mean 'spell_backward'" in said and "Traceback" not in said


def test_kill_9_of_each_process_then_resume(job: Callable[..., Job]) -> None:
    """One run, five lives that end by force, and a sixth."""
    one = job("trainer.steps=24")
    for step, who in ((3, "trainer"), (6, "inference-0"), (9, "orchestrator"), (12, "supervisor"), (15, "everything")):
        one.start().at_step(step)
        one.kill(who)
        said = one.end(-signal.SIGKILL if who in ("supervisor", "everything") else 1)
        if who in ROLES:
            assert f"{who} was killed by SIGKILL" in said
    one.start().end(0)
    one.assert_complete(24)
    resumes = [e for e in one.entries() if e["kind"] == "resume"]
    assert len(resumes) == 5 and resumes[-1]["step"] >= 10


def test_a_stop_request_saves_the_last_step(job: Callable[..., Job]) -> None:
    one = job("trainer.steps=24", "checkpoint.every=1000").start()
    one.at_step(5)
    assert one.process is not None
    t0 = time.monotonic()
    one.process.send_signal(signal.SIGINT)
    said = one.end(75)
    assert time.monotonic() - t0 < 10
    assert f"--resume {one.run.root}" in said
    last = max(one.losses())
    one.start().end(0)
    one.assert_complete(24)
    (resume,) = [e for e in one.entries() if e["kind"] == "resume"]
    assert resume["step"] == last >= 5  # nothing was lost


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_deterministic_losses_do_not_depend_on_kills(job: Callable[..., Job], kills: int) -> None:
    """In lock step, a run killed at random moments has the losses of an undisturbed one, bit for bit."""
    steps = 4 * kills
    overrides = (*DETERMINISTIC, f"trainer.steps={steps}", "evaluation.every=1000", "checkpoint.every=1")
    undisturbed = job(*overrides).start()
    undisturbed.end(0)
    undisturbed.assert_complete(steps)
    one, moments = job(*overrides, name="b"), random.Random(kills)
    for life in range(kills):
        one.start()
        if moments.random() < 0.3:  # while it starts
            one.until(one.run.config_path.exists)
            time.sleep(moments.uniform(0, 4))
            who = moments.choice(["supervisor", "everything"])
        else:
            one.at_step(1 + 3 * life)
            time.sleep(moments.uniform(0, 0.3))
            who = moments.choice([*ROLES, "supervisor", "everything"])
        one.kill(who)
        one.end(-signal.SIGKILL if who in ("supervisor", "everything") else 1)
    one.start().end(0)
    one.assert_complete(steps)
    assert any(e["kind"] == "resume" for e in one.entries())
    assert one.losses() == undisturbed.losses()
