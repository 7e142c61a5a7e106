"""Supervised fine-tuning: its data order, where it stops, and that it can be killed and go on."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from prl.config.named import SetupError
from prl.config.schema import RunConfig
from prl.envs.base import Task
from prl.models.base import Model
from prl.models.hf import load_hf
from prl.orchestrator import sft as roles
from prl.samples import CE, Sample
from prl.tokenizer import of_run
from prl.trainer import checkpoint
from prl.trainer.sft import Held, Mixture, Plan, Solved, example, fine_tune
from prl.transport.run_dir import RunDir
from tests.trainer.envs import Next
from tests.trainer.helpers import config, run_dir, state_of


def sft_config(**sft: Any) -> RunConfig:
    c = config("float32").model_dump()
    c["envs"] = [{"name": "next", "kind": "tests.trainer.envs:Next"}]
    c["sampling"] = {"max_tokens": 4, "max_length": 16}
    c["sft"] = {"steps": 6, "batch_size": 4, "examples": 8, "optim": {"lr": 1e-2}, "dev_tasks": 8, "dev_every": 2, **sft}
    return RunConfig.model_validate(c)


def examples(c: RunConfig) -> list[Sample]:
    return roles.worked_examples(c, 8, [Next(c.envs[0], seed=0)], of_run(c))


def plan(c: RunConfig, **fields: Any) -> Plan:
    assert c.sft is not None
    given = {"role": "sft", "start": None, "optim": c.sft.optim, "batch_size": 4, "seed": 0, "steps": c.sft.steps}
    return Plan(**(given | fields))


def steps(run: RunDir, role: str = "sft") -> list[dict[str, Any]]:
    records = map(orjson.loads, (run / "metrics.jsonl").read_bytes().splitlines())
    return [r for r in records if r["kind"] == "step" and r["role"] == role]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_hf(folder).state_dict()


def test_kernels_that_cannot_run_as_demanded_are_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, run = sft_config(), run_dir(tmp_path)
    given = examples(c)
    monkeypatch.setenv("PRL_KERNELS", "gpu")
    with pytest.raises(SetupError, match="no backend gpu"):
        fine_tune(run, c, plan(c), 0, given, threading.Event())
    assert (run.read_status("sft") or {})["phase"] == "loading"


def test_order_visits_each_example_once_an_epoch_anew() -> None:
    def order(seed: int, n: int, batch_size: int, step: int) -> list[int]:
        return [i for _, i in Mixture(seed, [n], [1.0]).batch(step, batch_size)]

    seen = [i for step in range(1, 6) for i in order(7, 10, 4, step)]
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert order(7, 10, 4, 3) == order(7, 10, 4, 3)
    assert order(8, 10, 10, 1) != order(7, 10, 10, 1)
    assert len(set(order(0, 3, 8, 1))) == 3, "a batch may hold several epochs"


def test_sources_are_mixed_by_weight_each_in_whole_epochs_from_any_step_on() -> None:
    sizes, n = [30, 70], 10_000  # beyond a block of draws
    whole = Mixture(5, sizes, [3.0, 1.0]).batch(1, n)
    assert np.mean([source == 0 for source, _ in whole]) == pytest.approx(0.75, abs=0.02)
    for source, size in enumerate(sizes):
        drawn = [i for s, i in whole if s == source]
        for first in range(0, len(drawn) - size, size):
            assert sorted(drawn[first : first + size]) == list(range(size))
    late = Mixture(5, sizes, [3.0, 1.0])
    assert [late.batch(step, 100) for step in (99, 2)] == [whole[9800:9900], whole[100:200]], "a resume knows its place"


def test_an_example_trains_on_its_answer_alone() -> None:
    s = example(np.array([5, 6], np.int32), np.array([7, 1], np.int32))
    assert s.tokens.tolist() == [5, 6, 7, 1] and s.trainable.tolist() == [False, False, True, True]
    assert (s.loss_stream == CE).all()
    turns = example(*(np.array(piece, np.int32) for piece in ([5, 6], [7], [8, 9], [2, 1])))
    assert turns.tokens.tolist() == [5, 6, 7, 8, 9, 2, 1]
    assert turns.trainable.tolist() == [False, False, True, False, False, True, True], "what a tool said is not trained"


def test_worked_answers_end_with_the_end_of_text_and_long_ones_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    c = sft_config()
    tokenizer = of_run(c)
    made = examples(c)
    assert sorted(tokenizer.decode(s.tokens[:-1]) for s in made) == ["ab", "bc", "cd", "de", "ef", "fg", "gh", "ha"]
    assert all(s.tokens[-1] == tokenizer.eos_id for s in made)
    short = c.model_copy(update={"sampling": c.sampling.model_copy(update={"max_length": 2})})
    with pytest.raises(ValueError, match="max_length: 2 is too short"):
        examples(short)


def test_the_warm_start_learns_stops_at_the_solve_rate_and_the_control_goes_on(tmp_path: Path) -> None:
    run, c = run_dir(tmp_path), sft_config(steps=400, stop_at=0.6)
    assert roles.main(run, c, 0, threading.Event()) == 0
    done = steps(run)
    evals = [r for r in map(orjson.loads, (run / "metrics.jsonl").read_bytes().splitlines()) if r["kind"] == "eval"]
    assert [e["step"] for e in evals] == list(range(2, len(done) + 1, 2)) and len(done) < 400
    assert evals[-1]["greedy"] >= 0.6 > evals[0]["greedy"]
    solve_rate = roles.greedy_solve_rate(c, 8, [Next(c.envs[0], seed=0)], of_run(c))
    assert solve_rate(load_hf(run / "sft" / "model"), lambda: None) == (evals[-1]["greedy"], evals[-1]["failed"])
    assert sorted(p.name for p in (run / "sft").iterdir()) == ["model"], "checkpoints go once the model is there"

    run.record_stage("rl", 0.3, done=True)
    assert roles.control(run, c, 0, threading.Event()) == 0
    more = steps(run, "control")
    assert len(more) >= 1 and more[0]["loss"] < done[0]["loss"] / 2, "it starts from the warm start"
    assert sum(sum(r["time"].values()) for r in more) < 3
    assert (run / "control" / "model" / "tokenizer.json").is_file()
    assert roles.main(run, c, 0, threading.Event()) == 0 and len(steps(run)) == len(done), "done is done"


class Gone(Held):
    def __getitem__(self, i: int) -> Sequence[Sample]:
        raise OSError("gone")


def test_a_failure_is_on_record_with_its_time(tmp_path: Path) -> None:
    """Before anything is cleaned up: the other ranks fail for it, and it is told from theirs by its time."""
    c, run, before = sft_config(), run_dir(tmp_path), time.time()
    assert fine_tune(run, c, plan(c), 0, [Gone(examples(c))], threading.Event()) == 1
    assert before < (run.read_status("sft") or {})["failed"] < time.time()


class Unjudged(Next):
    """Cannot judge half of its tasks; solves the others."""

    def score(self, task: Task, completion: str) -> float:
        if task.ordinal % 2:
            raise OSError("judge not there")
        return 1.0


class StopAfter(threading.Event):
    """Is set after it was asked `n` times."""

    def __init__(self, n: int):
        super().__init__()
        self.left = n

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("end", ["stop", "death"])
def test_interrupted_it_goes_on_bit_for_bit(tmp_path: Path, end: str) -> None:
    c = sft_config()
    whole, broken = run_dir(tmp_path / "whole"), run_dir(tmp_path / "broken")
    assert fine_tune(whole, c, plan(c), 0, [Held(examples(c))], threading.Event()) == 0
    if end == "stop":
        assert fine_tune(broken, c, plan(c), 0, [Held(examples(c))], StopAfter(3)) == 75
    else:

        def die(model: Model, alive: Callable[[], None]) -> Solved:
            raise MemoryError

        measured = plan(c, measure_every=3)
        with pytest.raises(MemoryError):
            fine_tune(broken, c, measured, 0, [Held(examples(c))], threading.Event(), solve_rate=die)
    latest = checkpoint.latest_complete(RunDir(broken / "sft"))
    assert latest is not None and latest.name == ("step_3" if end == "stop" else "step_2")
    assert not (broken / "sft" / "model").exists()
    assert fine_tune(broken, c, plan(c), 0, [Held(examples(c))], threading.Event()) == 0
    a, b = weights(whole / "sft" / "model"), weights(broken / "sft" / "model")
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_stop_right_after_a_checkpoint_does_not_write_it_again(tmp_path: Path) -> None:
    """Written again, it would take the place of the one that is complete."""
    c, run = sft_config(), run_dir(tmp_path)
    for stop in (StopAfter(2), StopAfter(0)):  # the second life has done nothing yet
        assert fine_tune(run, c, plan(c), 0, [Held(examples(c))], stop) == 75
    events = [r for r in map(orjson.loads, (run / "metrics.jsonl").read_bytes().splitlines()) if r["kind"] == "event"]
    assert [e["step"] for e in events if e["name"] == "checkpoint"] == [2]


def test_what_killed_lives_left_goes(tmp_path: Path) -> None:
    """Half a model, and checkpoints beside a whole one."""
    c, run = sft_config(), run_dir(tmp_path)
    half, old = run / "sft" / "model.tmp-dead", run / "sft" / "checkpoints" / "step_2"
    half.mkdir(parents=True)
    (half / "x").touch()
    assert fine_tune(run, c, plan(c, steps=1), 0, [Held(examples(c))], threading.Event()) == 0
    assert [p.name for p in (run / "sft").iterdir()] == ["model"]
    old.mkdir(parents=True)
    assert fine_tune(run, c, plan(c, steps=1), 0, [Held(examples(c))], threading.Event()) == 0
    assert [p.name for p in (run / "sft").iterdir()] == ["model"]


def test_with_everything_frozen_there_is_nothing_to_train() -> None:
    c = sft_config()
    frozen = c.model_copy(update={"model": c.model.model_copy(update={"frozen": [r"model\..*", "lm_head.*"]})})
    with pytest.raises(SetupError, match=r"model\.frozen: .*lm_head\.\* freezes every parameter; nothing is left to train"):
        state_of(frozen)
    typo = c.model_copy(update={"model": c.model.model_copy(update={"frozen": [r".*\.embd_tokens\..*"]})})
    with pytest.raises(SetupError, match=r"model\.frozen: '.*embd_tokens.*' matches no parameter"):
        state_of(typo)


def test_the_solve_rate_sees_wrong_answers_and_errors() -> None:
    c = sft_config()
    env = Next(c.envs[0], seed=0)
    model, signs = state_of(c).model, []
    with torch.no_grad():
        model.lm_head_weight.zero_()
        measure = roles.greedy_solve_rate(c, 8, [env], of_run(c))
        assert measure(model, lambda: signs.append(1)) == (0, 0)
        assert len(signs) >= c.sampling.max_tokens, "one a step of the engine"
        assert roles.greedy_solve_rate(c, 8, [Unjudged(c.envs[0], seed=0)], of_run(c))(model, lambda: None) == (1, 4)
        model.lm_head_weight.fill_(float("nan"))
    assert measure(model, lambda: None) == (None, 8)


def slow(model: Model, alive: Callable[[], None]) -> Solved:
    for _ in range(30):
        time.sleep(0.1)
        alive()
    return Solved(1.0, 0)


def rank_of_two(root: Path, index: int) -> None:
    c = sft_config()
    c = c.model_copy(update={"trainer": c.trainer.model_copy(update={"ranks": 2})})
    one = plan(c, steps=5, measure_every=1)
    sys.exit(fine_tune(RunDir(root), c, one, index, [Held(examples(c))], threading.Event(), solve_rate=slow))


def test_a_long_measurement_shows_life_on_every_rank_and_ends_both(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_of_two, args=(run.root, i)) for i in range(2)]
    for process in ranks:
        process.start()
    signs: dict[str, set[float]] = {"sft": set(), "sft-1": set()}
    while any(process.is_alive() for process in ranks):
        for role, seen in signs.items():
            status = run.read_status(role)
            if status is not None and status["phase"] == "evaluating":
                seen.add(status["t"])
        time.sleep(0.02)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert len(steps(run)) == 1, "the solve rate was reached at the first step"
    assert all(len(seen) >= 2 for seen in signs.values()), signs
