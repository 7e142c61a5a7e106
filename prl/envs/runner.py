"""One rollout: turns between the policy and an environment, token in and token out.

Tokens of earlier turns are reused exactly, never encoded again. Whatever an environment does wrong, raising, hanging or
answering nonsense, becomes an outcome of the rollout (`prl.samples.OUTCOMES`), never a zero reward and never a stuck run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import xxhash

from prl.config.schema import Sampling
from prl.envs.base import Env, Fork, Task, Turn
from prl.inference.api import EngineError, GenerateRequest, Generation
from prl.samples import Rollout, Sample, concatenate
from prl.tokenizer import Tokenizer, TokenizerError

Generate = Callable[[GenerateRequest], Awaitable[Generation]]
TOLD = 2000
"""Characters kept of the text of what an environment raised."""
MAX_STUCK, STUCK_S = 64, 10.0
"""Threads that may still run this long after their call was given up; Python cannot end a thread, so more end the run."""


class EnvironmentStuck(RuntimeError):
    """Too many calls of an environment hang; the run cannot go on."""


class _Failed(Exception):
    """The rollout ends here with `outcome`."""

    def __init__(self, outcome: str, error: str):
        super().__init__(error)
        self.outcome = outcome


def untrainable(sampling: Sampling) -> str | None:
    """Why rollouts sampled like this cannot be trained on; None if they can."""
    wrong = [
        f"{name} {value:g} (expected {expected})"
        for name, value, expected, bad in (
            ("temperature", sampling.temperature, "above 0", sampling.temperature == 0),
            ("top_p", sampling.top_p, "1", sampling.top_p < 1),
            ("top_k", sampling.top_k, "0", sampling.top_k > 0),
        )
        if bad
    ]
    if not wrong:
        return None
    return f"sampling: {', '.join(wrong)}: the trainer cannot reproduce a truncated distribution; only evaluation may use one"


def noise_seed(seed: int, ordinal: int, index: int, attempt: int, branch: int) -> int:
    """The key of a branch's sampling noise, 63 bits; the engine adds the token's position. Never the rollout's id."""
    return xxhash.xxh3_64_intdigest(struct.pack("<5q", seed, ordinal, index, attempt, branch)) >> 1


class Branch:
    """One sample in the making: pieces of tokens, and the route rows known so far without a gap from row 0 on."""

    def __init__(self, pieces: list[Sample], routes: list[np.ndarray], selections: list[np.ndarray], number: int):
        self.pieces, self.routes, self.selections, self.number = pieces, routes, selections, number
        self.length = sum(map(len, pieces))
        self.covered = sum(map(len, routes))
        self.open_row = False
        """The row at `covered` is a sampled token's, which no forward pass had followed when its turn ended."""
        self.recaptured = 0
        self.generations = 0

    def tokens(self) -> np.ndarray:
        return np.concatenate([p.tokens for p in self.pieces])

    def append_text(self, tokens: np.ndarray, *, turn: int, temperature: float) -> None:
        self.pieces.append(Sample.of_prompt(tokens, turn=turn, temperature=temperature))
        self.length += len(tokens)

    def append(self, generation: Generation, *, turn: int, temperature: float) -> None:
        """Raises EngineError where the arrays do not fit each other or the tokens so far."""
        piece = Sample.of_prompt(generation.tokens, turn=turn, temperature=temperature)
        n = len(piece)
        rows = self.length + n - 1 - self.covered
        for name, array, expected in (
            ("logprobs", generation.logprobs, n),
            ("versions", generation.versions, n),
            ("routes", generation.routes, rows),
            ("selections", generation.selections, rows),
        ):
            if array is not None and len(array) != expected:
                raise EngineError(
                    f"{generation.replica}: {len(array)} {name} for {n} tokens after {self.length}, "
                    f"rows from {self.covered}; expected {expected}"
                )
        if n == 0 or not np.isfinite(generation.logprobs).all():
            raise EngineError(f"{generation.replica}: {n} tokens, expected at least one, and a finite logprob for each")
        piece.trainable[:] = True
        piece.logprobs[:] = generation.logprobs
        piece.versions[:] = generation.versions
        self.pieces.append(piece)
        self.length += n
        if generation.routes is not None:
            self.recaptured += self.open_row
            self.open_row = True
            self.routes.append(generation.routes)
            self.covered += rows
        if generation.selections is not None:
            self.selections.append(generation.selections)
        self.generations += 1

    def fork(self, keep: int) -> Branch:
        """A new branch that starts with this one's first `keep` pieces, trainable only here."""
        pieces = [replace(p, trainable=np.zeros(len(p), np.bool_)) for p in self.pieces[:keep]]
        length = sum(map(len, pieces))

        def rows(parts: list[np.ndarray]) -> list[np.ndarray]:
            return [np.concatenate(parts)[:length]] if parts and length else []

        branch = Branch(pieces, rows(self.routes), rows(self.selections), self.number + 1)
        branch.open_row = self.open_row and branch.covered < length
        return branch

    def sample(self) -> Sample:
        """The finished sample. Rows without a forward pass of the engine are zeros (selections: -1) and not `routed`."""
        sample = concatenate(self.pieces)
        sample.branch = self.number
        if self.routes:
            sample.routes = _padded(self.routes, self.length, 0)
            sample.routed = np.arange(self.length) < self.covered
        if self.selections:
            sample.selections = _padded(self.selections, self.length, -1)
        try:
            return sample.check()
        except ValueError as error:
            raise EngineError(f"the engine's tokens do not make a sample: {error}") from error


def _padded(parts: list[np.ndarray], length: int, fill: int) -> np.ndarray:
    like = parts[0]
    missing = length - sum(map(len, parts))
    return np.concatenate([*parts, np.full((missing, *like.shape[1:]), fill, like.dtype)])


class _EnvCalls:
    """Calls an environment for one rollout, within what is left of its deadline in total."""

    def __init__(self, env: Env, deadline_s: float):
        self.env, self.left, self.used = env, deadline_s, 0.0

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        async with self.env.slots or contextlib.nullcontext():
            start = time.monotonic()
            try:
                async with asyncio.timeout(self.left - self.used) as limit:
                    if not self.env.inline:
                        return await _in_thread(self.env.name, function, *args)
                    result = function(*args)
                    return await result if inspect.isawaitable(result) else result
            except EnvironmentStuck:
                raise
            except Exception as error:
                if limit.expired():
                    raise _Failed("timed_out", f"{function.__qualname__} within {self.left:g} s of environment time") from error
                raise _Failed("environment_error", f"{function.__qualname__}: {_told(error)}") from error
            finally:
                self.used += time.monotonic() - start


_abandoned: dict[threading.Thread, float] = {}
"""Threads whose call was given up, and when."""


async def _in_thread(env: str, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a plain or async function in a thread of its own, so that neither can block the caller's event loop."""
    for ended in [t for t in _abandoned if not t.is_alive()]:
        del _abandoned[ended]
    stuck = sum(time.monotonic() - since > STUCK_S for since in _abandoned.values())
    if stuck > MAX_STUCK:
        raise EnvironmentStuck(f"env {env}: {stuck} calls hang past their deadline and cannot be ended; mend its step")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def awaited(result: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await result

    def deliver(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((result, error))

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args)
            if inspect.isawaitable(result):
                result = asyncio.run(awaited(result))
        except BaseException as e:
            error = e
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            loop.call_soon_threadsafe(deliver, result, error)

    thread = threading.Thread(target=run, name=f"env {env}", daemon=True)
    thread.start()
    try:
        result, error = await future
    except asyncio.CancelledError:
        for inner, task in running:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                inner.call_soon_threadsafe(task.cancel)
        _abandoned[thread] = time.monotonic()
        raise
    if error is None:
        return result
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        raise error
    raise RuntimeError(_told(error)) from error  # what no coroutine may raise


def _told(error: BaseException) -> str:
    """Type and text of what an environment raised, whose text may be long or raise itself."""
    try:
        text = str(error)
    except Exception as another:
        text = f"its text cannot be had ({type(another).__name__})"
    return f"{type(error).__name__}: {text[:TOLD]}"


def _checked(turn: Any) -> Turn:
    if not isinstance(turn, Turn) or not isinstance(turn.text, str):
        raise _Failed("environment_error", f"step returned {turn!r:.200}, expected a Turn with a text")
    if not isinstance(turn.metrics, dict) or not isinstance(turn.fork, Fork | None):
        raise _Failed("environment_error", f"step returned {turn!r:.200}, expected metrics in a dict, and a Fork or None")
    if not _finite(turn.reward):
        raise _Failed("bad_reward", f"reward {_shown(turn.reward)}, expected a finite number")
    for name, value in turn.metrics.items():
        if not _finite(value):
            raise _Failed("environment_error", f"metric {name!r:.100} {_shown(value)}, expected a finite number")
    return turn


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _shown(value: Any) -> str:
    return f"{value!r:.200} of type {type(value).__name__}"


async def run_rollout(
    env: Env,
    task: Task,
    generate: Generate,
    tokenizer: Tokenizer,
    sampling: Sampling,
    *,
    rollout_id: str,
    ordinal: int,
    index: int = 0,
    attempt: int = 0,
    seed: int = 0,
    salt: str = "",
    priority: int = 0,
    training: bool = True,
) -> Rollout:
    """One attempt at `task`, which is number `ordinal` of the run's data order.

    outcome: finished; truncated (a completion cut by its length, no turns left, or a context that fills `max_length`; the
    reward is the last turn's); timed_out (the environment's time used up), environment_error, bad_reward, engine_error,
    cancelled (the engine aborted): `error` says what, and there are no samples. A new `attempt` rekeys the noise.
    metrics: turns, completion_tokens, recaptured (rows of a turn's last token, known from the next turn on), cut_tokens
    (environment tokens that did not fit), and what the environment adds. timings: generate, environment, total, in seconds.

    Raises ValueError for `training` with a truncated distribution, EnvironmentStuck; whatever else `generate` raises but
    EngineError passes through.
    """
    if training and (why := untrainable(sampling)):
        raise ValueError(why)
    start = time.monotonic()
    rollout = Rollout(rollout_id, env.name, task.id, ordinal, index, attempt, salt=salt)
    rollout.metrics = {"turns": 0, "completion_tokens": 0, "recaptured": 0, "cut_tokens": 0}
    rollout.timings = {"generate": 0.0}
    calls = _EnvCalls(env, env.config.timeout_s)
    try:
        branches = await _converse(env, task, generate, tokenizer, sampling, rollout, calls, seed, priority)
        rollout.samples = [b.sample() for b in branches if b.generations]
    except _Failed as failure:
        text = f"env {env.name}, task {task.id}: {failure}"
        # A lone surrogate cannot be written down.
        rollout.outcome, rollout.error = failure.outcome, text.encode(errors="backslashreplace").decode()
    except EngineError as error:
        rollout.outcome, rollout.error = "engine_error", str(error)
    rollout.timings |= {"environment": calls.used, "total": time.monotonic() - start}
    return rollout


async def _converse(
    env: Env,
    task: Task,
    generate: Generate,
    tokenizer: Tokenizer,
    sampling: Sampling,
    rollout: Rollout,
    calls: _EnvCalls,
    seed: int,
    priority: int,
) -> list[Branch]:
    def encode(text: str) -> np.ndarray:
        try:
            return tokenizer.encode(text)
        except TokenizerError as error:
            raise _Failed("environment_error", str(error)) from error

    def say(role: str, text: str) -> None:
        key = f"{role}_{branch.number}" if branch.number else role
        rollout.text[key] = rollout.text.get(key, "") + text

    stop = (tokenizer.eos_id, *map(tokenizer.token_id, env.stop))
    temperature, metrics = sampling.temperature, rollout.metrics
    branch = Branch([], [], [], 0)
    branches = [branch]
    prompt = encode(task.prompt)
    if not 0 < len(prompt) < sampling.max_length:
        expected = f"expected 1 to {sampling.max_length - 1}, one less than sampling.max_length"
        raise _Failed("environment_error", f"prompt of {len(prompt)} tokens, {expected}")
    branch.append_text(prompt, turn=0, temperature=temperature)
    say("prompt", task.prompt)
    state = await calls(env.start, task)

    for turn in range(sampling.max_turns):
        request = GenerateRequest(
            tokens=branch.tokens(),
            max_tokens=min(sampling.max_tokens, sampling.max_length - branch.length),
            temperature=temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=noise_seed(seed, rollout.ordinal, rollout.index, rollout.attempt, branch.number),
            stop_token_ids=stop,
            cache_salt=rollout.salt,
            priority=priority,
            routes_from=branch.covered,
            request_id=f"{rollout.id}.{branch.number}.{turn}",
            session=rollout.id,
        )
        before = time.monotonic()
        generation = await generate(request)
        rollout.timings["generate"] += time.monotonic() - before
        if generation.finish_reason == "abort":
            raise _Failed("cancelled", f"{generation.replica} aborted the request")
        recaptured = branch.recaptured
        branch.append(generation, turn=turn, temperature=temperature)
        metrics["turns"] += 1
        metrics["completion_tokens"] += len(generation.tokens)
        metrics["recaptured"] += branch.recaptured - recaptured
        ids = generation.tokens
        completion = tokenizer.decode(ids[:-1] if ids[-1] == tokenizer.eos_id else ids)
        say("completion", completion)

        answer = _checked(await calls(env.step, state, completion))
        rollout.reward = float(answer.reward)
        for name, value in answer.metrics.items():
            metrics[f"env/{name}"] = metrics.get(f"env/{name}", 0.0) + float(value)
        if generation.finish_reason == "length":
            rollout.outcome = "truncated"
            return branches
        if answer.done:
            return branches
        text = encode(answer.text)
        if answer.fork is not None:
            if not 0 <= answer.fork.keep <= len(branch.pieces) or answer.fork.keep + len(text) == 0:
                there = f"the branch has {len(branch.pieces)} pieces, the turn a text of {len(text)} tokens"
                raise _Failed("environment_error", f"step returned {answer.fork}, which leaves nothing to go on from: {there}")
            branch = branch.fork(answer.fork.keep)
            branches.append(branch)
        if turn + 1 == sampling.max_turns or branch.length + len(text) >= sampling.max_length:
            metrics["cut_tokens"] += len(text)
            break
        branch.append_text(text, turn=turn + 1, temperature=temperature)
        say("completion" if answer.fork is None else "prompt", answer.text)
    rollout.outcome = "truncated"
    return branches
