"""Rollouts turn by turn: tokens, routes, versions, outcomes. The engine is a function with answers that follow from tokens."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest

from prl.config.schema import Env as EnvConfig
from prl.config.schema import Sampling
from prl.envs import runner
from prl.envs.base import Env, Fork, SingleTurn, Split, Task, Turn
from prl.envs.runner import EnvironmentStuck, noise_seed, run_rollout, untrainable
from prl.inference.api import EngineError, GenerateRequest, Generation
from prl.samples import OUTCOMES, Rollout
from tests.envs.engine import TOKENIZER, Engine, route_rows

TASK = Task(7, "t7", "abc>")


class Scripted(Env):
    """Answers with the given turns, one after the other; an exception among them is raised, a function called."""

    inline = True

    def __init__(self, *turns: Any, timeout_s: float = 5.0):
        super().__init__(EnvConfig(name="scripted", kind="scripted", timeout_s=timeout_s), seed=0)
        self.turns = list(turns)
        self.heard: list[str] = []

    def size(self, split: Split) -> int:
        return 1

    def task(self, ordinal: int, split: Split) -> Task:
        return TASK

    def step(self, state: Any, completion: str) -> Any:
        self.heard.append(completion)
        turn = self.turns[len(self.heard) - 1]
        if isinstance(turn, BaseException):
            raise turn
        return turn() if callable(turn) else turn


async def rollout(env: Env, engine: Engine, sampling: Sampling | None = None, **options: Any) -> Rollout:
    options = {"rollout_id": "r", "ordinal": 7} | options
    return await run_rollout(env, TASK, engine, TOKENIZER, sampling or Sampling(max_tokens=16, max_turns=4), **options)


async def test_a_single_turn() -> None:
    engine = Engine("cba$")
    done = await rollout(Scripted(Turn(reward=1.0)), engine, index=3, attempt=1, seed=5, salt="v9", priority=2)
    (sample,) = done.samples
    assert (done.outcome, done.reward, done.error) == ("finished", 1.0, "")
    assert (done.env, done.task, done.ordinal, done.index, done.attempt, done.salt) == ("scripted", "t7", 7, 3, 1, "v9")
    assert done.text == {"prompt": "abc>", "completion": "cba"}
    assert sample.tokens.tolist() == [*TOKENIZER.encode("abc>cba"), TOKENIZER.eos_id]
    assert sample.trainable.tolist() == [False] * 4 + [True] * 4
    assert sample.logprobs.tolist() == [0, 0, 0, 0, -0.25, -0.5, -0.75, -1.0]
    assert sample.versions.tolist() == [-1] * 4 + [10] * 4
    assert (sample.temperature == 1).all() and (sample.turn == 0).all()
    assert sample.routed.tolist() == [True] * 7 + [False]
    request = engine.requests[0]
    assert (request.max_tokens, request.routes_from, request.cache_salt, request.priority) == (16, 0, "v9", 2)
    assert request.stop_token_ids == (TOKENIZER.eos_id,) and request.session == "r"
    assert request.seed == noise_seed(5, 7, 3, 1, 0)
    assert done.metrics["turns"] == 1 and done.metrics["completion_tokens"] == 4 and done.timings["total"] > 0


async def test_turns_reuse_tokens_exactly_and_their_routes_meet_without_gap_or_overlap() -> None:
    engine = Engine("so [1+2]", "and [3+4]", "seven$", selections=True)
    env = Scripted(Turn(done=False, text="=3 "), Turn(done=False, text="=7 "), Turn(reward=0.5))
    done = await rollout(env, engine)
    (sample,) = done.samples
    assert env.heard == ["so [1+2]", "and [3+4]", "seven"]
    assert done.text["completion"] == "so [1+2]=3 and [3+4]=7 seven"
    assert TOKENIZER.decode(sample.tokens) == "abc>so [1+2]=3 and [3+4]=7 seven<eos>"
    for earlier, later in zip(engine.requests, engine.requests[1:], strict=False):
        assert later.tokens[: len(earlier.tokens)].tolist() == earlier.tokens.tolist()
        assert later.seed == earlier.seed
    # the first turn's tokens: 4 of the prompt and 8; its last token's row is asked for again, and so on
    assert [r.routes_from for r in engine.requests] == [0, 11, 23]
    want = route_rows(sample.tokens, 0, len(sample))
    assert sample.routes is not None and sample.selections is not None
    assert (sample.routes[:-1] == want[:-1]).all() and (sample.selections[:-1] == want[:-1]).all()
    assert sample.routed.tolist() == [True] * (len(sample) - 1) + [False]
    assert (sample.routes[-1] == 0).all() and (sample.selections[-1] == -1).all()
    assert done.metrics["recaptured"] == 2
    trained = "".join(TOKENIZER.decode([t]) for t, m in zip(sample.tokens, sample.trainable, strict=True) if m)
    assert trained == "so [1+2]and [3+4]seven<eos>"
    assert sample.turn.tolist() == [0] * 12 + [1] * 12 + [2] * 9
    turns, versions = sample.turn[sample.trainable].tolist(), sample.versions[sample.trainable].tolist()
    assert sorted(set(zip(turns, versions, strict=True))) == [(0, 10), (1, 11), (2, 12)]


@pytest.mark.parametrize("shift", [-1, 1])
async def test_a_payload_of_routes_off_by_one_is_refused(shift: int) -> None:
    def spoil(generation: Generation) -> None:
        assert generation.routes is not None
        generation.routes = generation.routes[1:] if shift < 0 else np.concatenate([generation.routes[:1], generation.routes])

    done = await rollout(Scripted(Turn()), Engine("a$", spoil=spoil))
    assert done.outcome == "engine_error" and "routes" in done.error and "expected 5" in done.error
    assert done.samples == []


async def test_without_recorded_routes() -> None:
    (sample,) = (await rollout(Scripted(Turn()), Engine("a$", routes=False))).samples
    assert sample.routes is None and not sample.routed.any()


async def test_a_completion_cut_by_its_length_is_truncated_but_scored() -> None:
    env = Scripted(Turn(reward=0.25))
    done = await rollout(env, Engine("abcdefgh$"), Sampling(max_tokens=4))
    assert (done.outcome, done.reward, env.heard) == ("truncated", 0.25, ["abcd"])
    assert len(done.samples[0]) == 8


async def test_no_turns_left_is_truncated() -> None:
    env = Scripted(Turn(done=False, text="go on ", reward=0.1), Turn(done=False, text="go on ", reward=0.2))
    done = await rollout(env, Engine("a$", "b$"), Sampling(max_turns=2))
    assert (done.outcome, done.reward) == ("truncated", 0.2)
    assert TOKENIZER.decode(done.samples[0].tokens) == "abc>a<eos>go on b<eos>"
    assert done.metrics["cut_tokens"] == 6


async def test_a_sample_never_grows_over_max_length() -> None:
    engine = Engine("a$", "bcdefghijk$")
    done = await rollout(Scripted(Turn(done=False, text="go"), Turn()), engine, Sampling(max_turns=3, max_length=12))
    assert done.outcome == "truncated" and engine.requests[1].max_tokens == 4
    assert len(done.samples[0]) == 12
    done = await rollout(Scripted(Turn(done=False, text="123456")), Engine("a$"), Sampling(max_turns=3, max_length=12))
    assert (done.outcome, done.metrics["cut_tokens"], len(done.samples[0])) == ("truncated", 6, 6)
    done = await rollout(Scripted(), Engine(), Sampling(max_length=4))
    assert done.outcome == "environment_error" and "prompt of 4 tokens" in done.error


async def test_a_fork_starts_a_sample_and_each_token_is_trainable_in_one_only() -> None:
    """Turn 1 forks off after the prompt and the first completion; turn 2 rewrites the whole context."""
    engine = Engine("first$", "second$", "third$", "fourth$")
    env = Scripted(
        Turn(done=False, text="x"),
        Turn(done=False, text="y", fork=Fork(keep=2)),
        Turn(done=False, text="summary ", fork=Fork()),
        Turn(reward=1.0),
    )
    done = await rollout(env, engine)
    texts = [TOKENIZER.decode(s.tokens) for s in done.samples]
    assert texts == ["abc>first<eos>xsecond<eos>", "abc>first<eos>ythird<eos>", "summary fourth<eos>"]
    trained = [TOKENIZER.decode(s.tokens[s.trainable]) for s in done.samples]
    assert trained == ["first<eos>second<eos>", "third<eos>", "fourth<eos>"]
    assert [s.branch for s in done.samples] == [0, 1, 2]
    # of the kept tokens, every row is known already: the last one was recaptured by turn 1
    assert [r.routes_from for r in engine.requests] == [0, 9, 10, 0]
    for sample in done.samples:
        assert sample.routes is not None
        assert (sample.routes[:-1] == route_rows(sample.tokens, 0, len(sample) - 1)).all()
        assert sample.routed.sum() == len(sample) - 1
    assert done.metrics["recaptured"] == 1
    assert len({r.seed for r in engine.requests}) == 3
    bad = await rollout(Scripted(Turn(done=False, fork=Fork(keep=9))), Engine("a$"))
    assert bad.outcome == "environment_error" and "keep=9" in bad.error


async def test_a_fork_that_keeps_an_open_row_recaptures_it() -> None:
    engine = Engine("first$", "second$")
    done = await rollout(Scripted(Turn(done=False, text="y", fork=Fork(keep=2)), Turn()), engine)
    assert [r.routes_from for r in engine.requests] == [0, 9] and done.metrics["recaptured"] == 1
    assert done.samples[1].routes is not None
    assert (done.samples[1].routes[:-1] == route_rows(done.samples[1].tokens, 0, len(done.samples[1]) - 1)).all()


@pytest.mark.parametrize("reward", [math.nan, math.inf, 10**400, None, "1", [1.0], 1j, np.array([1.0])])
async def test_a_reward_that_is_no_finite_number_is_named_and_never_a_zero(reward: Any) -> None:
    done = await rollout(Scripted(Turn(reward=reward)), Engine("a$"))
    assert done.outcome == "bad_reward" and done.samples == []
    assert "env scripted, task t7: reward" in done.error
    masked = await rollout(Scripted(Turn(reward=reward, metrics={"reward": 1.0})), Engine("a$"))
    assert masked.outcome == "bad_reward", "a metric of that name does not vouch for it"


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1)])
async def test_numbers_of_other_types_are_rewards(reward: Any) -> None:
    done = await rollout(Scripted(Turn(reward=reward)), Engine("a$"))
    assert (done.outcome, done.reward) == ("finished", 1.0) and type(done.reward) is float


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    "turn",
    [
        RuntimeError("boom"),
        StopIteration("boom"),
        TimeoutError("boom"),
        None,
        "boom",
        Turn(text=b"boom"),
        Turn(metrics={"boom": None}),
        Turn(metrics=["boom"]),
        Turn(text="a", done=False, fork="boom"),
        Turn(metrics={"boom": 10**400}),
        ValueError("boom \ud800"),
    ],
)  # type: ignore[arg-type]
async def test_an_environment_that_raises_or_answers_nonsense(turn: Any, inline: bool) -> None:
    env = Scripted(turn)
    env.inline = inline
    done = await rollout(env, Engine("a$"))
    assert done.outcome == "environment_error" and done.samples == []
    assert ("boom" in done.error) == (turn is not None)
    done.error.encode()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("inline", [True, False])
async def test_an_error_whose_text_is_long_or_missing_is_named_shortly(inline: bool) -> None:
    for error in (Mute(), ValueError("x" * 10_000_000)):
        env = Scripted(error)
        env.inline = inline
        done = await rollout(env, Engine("a$"))
        assert done.outcome == "environment_error" and type(error).__name__ in done.error and len(done.error) < 5000


@pytest.mark.parametrize("leave", [SystemExit("boom"), KeyboardInterrupt("boom")])
async def test_an_environment_cannot_end_the_process(leave: BaseException) -> None:
    env = Scripted(leave)
    env.inline = False
    assert (await rollout(env, Engine("a$"))).outcome == "environment_error"


async def hang() -> Turn:
    await asyncio.sleep(60)
    return Turn()


def block() -> Turn:
    time.sleep(3)
    return Turn()


@pytest.mark.parametrize(("inline", "step"), [(True, hang), (False, hang), (False, block)])
async def test_an_environment_that_hangs_is_timed_out_and_holds_nobody_up(inline: bool, step: Any) -> None:
    env = Scripted(step, timeout_s=0.2)
    env.inline = inline
    start = time.monotonic()
    done, other = await asyncio.gather(rollout(env, Engine("a$")), rollout(Scripted(Turn(reward=1.0)), Engine("a$")))
    assert time.monotonic() - start < 2
    assert (done.outcome, other.outcome) == ("timed_out", "finished")
    assert "0.2 s" in done.error and done.timings["environment"] == pytest.approx(0.2, abs=0.15)


async def test_the_deadline_is_of_the_whole_rollout_and_leaves_generation_out() -> None:
    async def slow() -> Turn:
        await asyncio.sleep(0.2)
        return Turn(done=False, text="x")

    class SlowEngine(Engine):
        async def __call__(self, request: GenerateRequest) -> Generation:
            await asyncio.sleep(0.5)
            return await super().__call__(request)

    assert (await rollout(Scripted(Turn(), timeout_s=0.3), SlowEngine("a$"))).outcome == "finished"
    env = Scripted(slow, slow, slow, timeout_s=0.5)
    done = await rollout(env, Engine("a$", "b$", "c$"))
    assert done.outcome == "timed_out" and len(env.heard) == 3


async def test_too_many_calls_that_cannot_be_ended_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_STUCK", 1)
    monkeypatch.setattr(runner, "STUCK_S", 0.0)
    monkeypatch.setattr(runner, "_abandoned", {})
    env = Scripted(block, block, block, timeout_s=0.05)
    env.inline = False
    for _ in range(2):
        assert (await rollout(env, Engine("a$"))).outcome == "timed_out"
    with pytest.raises(EnvironmentStuck, match="env scripted: 2 calls hang"):
        await rollout(env, Engine("a$"))


async def test_waiting_for_a_slot_does_not_count_against_the_deadline() -> None:
    async def slow() -> Turn:
        await asyncio.sleep(0.15)
        return Turn(reward=1.0)

    env = Scripted(*[slow] * 4, timeout_s=0.4)
    env.slots = asyncio.Semaphore(1)
    done = await asyncio.gather(*(rollout(env, Engine("a$")) for _ in range(4)))
    assert [d.outcome for d in done] == ["finished"] * 4


async def test_what_the_engine_does_wrong() -> None:
    async def fails(request: GenerateRequest) -> Generation:
        raise EngineError("replica r0, /inference/v1/generate: connection refused")

    async def aborts(request: GenerateRequest) -> Generation:
        generation = await Engine("a")(request)
        generation.finish_reason = "abort"
        return generation

    def not_finite(generation: Generation) -> None:
        generation.logprobs[0] = np.nan

    def no_version(generation: Generation) -> None:
        generation.versions[0] = -1

    def short(generation: Generation) -> None:
        generation.logprobs = generation.logprobs[:-1]

    assert (await rollout(Scripted(Turn()), fails)).outcome == "engine_error"  # type: ignore[arg-type]
    assert (await rollout(Scripted(Turn()), aborts)).outcome == "cancelled"  # type: ignore[arg-type]
    for spoil in (not_finite, no_version, short):
        done = await rollout(Scripted(Turn()), Engine("ab$", spoil=spoil))
        assert done.outcome == "engine_error" and done.samples == [], spoil
    assert {"engine_error", "cancelled", "timed_out", "environment_error", "bad_reward", "truncated", "finished"} == set(
        OUTCOMES
    )


async def test_cancelling_a_rollout_cancels_it() -> None:
    task = asyncio.create_task(rollout(Scripted(hang), Engine("a$")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_text_that_the_tokenizer_lacks_is_named() -> None:
    done = await rollout(Scripted(Turn(done=False, text="ABC")), Engine("a$"))
    assert done.outcome == "environment_error" and "'ABC'" in done.error


class Graded(SingleTurn):
    def __init__(self) -> None:
        super().__init__(EnvConfig(name="graded", kind="graded"), seed=0)

    def size(self, split: Split) -> int:
        return 1

    def task(self, ordinal: int, split: Split) -> Task:
        return TASK

    def score(self, task: Task, completion: str) -> float:
        return len(completion) / 10


async def test_an_environment_of_one_turn_needs_a_score_alone() -> None:
    assert (await rollout(Graded(), Engine("abc$"))).reward == 0.3


@pytest.mark.parametrize("broken", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}])
async def test_training_refuses_a_distribution_that_the_trainer_cannot_reproduce(broken: dict[str, float]) -> None:
    sampling = Sampling.model_validate(broken)
    with pytest.raises(ValueError, match=f"{next(iter(broken))} .*cannot reproduce"):
        await rollout(Scripted(Turn()), Engine("a$"), sampling)
    assert (await rollout(Scripted(Turn()), Engine("a$"), sampling, training=False)).outcome == "finished"
    assert untrainable(Sampling()) is None


def test_noise_is_keyed_by_every_part_and_by_nothing_else() -> None:
    keys = {noise_seed(*(int(i == k) for i in range(5))) for k in range(6)}
    assert len(keys) == 6 and all(0 <= k < 2**63 for k in keys)
    assert noise_seed(1, 2, 3, 4, 5) == 6092321405904571095
