"""Evaluation and deterministic rounds against the real engine, behind the real server and client where it matters."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from prl.config.load import dump
from prl.config.schema import Env as EnvConfig
from prl.config.schema import RunConfig, Sampling
from prl.envs.base import Env
from prl.evaluate import control, main
from prl.inference.api import EngineError, GenerateRequest, Generation
from prl.inference.client import Client, Replica
from prl.inference.engine import Engine
from prl.inference.server import Server
from prl.models.hf import save_hf
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec
from prl.orchestrator.evaluation import Evaluation, Generate, evaluate, held_out
from prl.orchestrator.rounds import RoundClient
from prl.orchestrator.sft import Local
from prl.tokenizer import of_run
from prl.transport.run_dir import RunDir
from tests.orchestrator.letters import Faulty, Letters, Untold
from tests.orchestrator.rig import ARCHITECTURE, config

SAMPLING = Sampling(max_tokens=6, max_length=24, temperature=0.7)


def engine(**options: Any) -> Engine:
    torch.set_num_threads(1)
    model = build(read_spec(ARCHITECTURE), dtype=torch.float32)
    init_weights(model, 0)
    return Engine(model, model.spec, kv_tokens=4096, **options)


def env(kind: type[Env] = Letters, **options: Any) -> Env:
    return kind(EnvConfig(name=kind.__name__, kind="-", timeout_s=0.2, **options), seed=0)


async def evaluated(envs: list[Env], generate: Generate, config: RunConfig, *, count: int = 24, **options: Any) -> Evaluation:
    options = {"version": 0, "seed": 1, "greedy": True, "timeout_s": 20.0, "max_in_flight": 16} | options
    return await evaluate(held_out(envs, count), envs, generate, of_run(config), SAMPLING, **options)


def test_an_evaluation_is_the_same_twice_and_its_modes_differ(tmp_path: Path) -> None:
    requests: list[GenerateRequest] = []

    def run(seed: int) -> Evaluation:
        local = Local(engine())

        async def generate(request: GenerateRequest) -> Generation:
            requests.append(request)
            return await local.generate(request)

        (result,) = asyncio.run(local.run([evaluated([env()], generate, config(tmp_path), seed=seed)]))
        return result

    first, again, other = run(1), run(1), run(2)
    assert first.complete and (first.sampled, first.reward, first.greedy) == (again.sampled, again.reward, again.greedy)
    assert first.greedy == other.greedy and {r.temperature for r in requests} == {0.0, 1.0}, "temperature 1, whatever trains"
    assert len({r.seed for r in requests if r.temperature == 1}) == 48, "24 tasks under two seeds"
    assert first.outcomes == again.outcomes and sum(first.outcomes.values()) == 48


def test_top_k_1_samples_what_greedy_answers(tmp_path: Path) -> None:
    asked: dict[tuple[str, bool], tuple[GenerateRequest, Generation]] = {}
    local = Local(engine())

    async def generate(request: GenerateRequest) -> Generation:
        got = await local.generate(request)
        mode, number, _ = request.request_id.removeprefix("eval-v0-").split("-", 2)
        asked[number, mode == "sampled"] = request, got
        return got

    def same() -> int:
        return sum(asked[n, True][1].tokens.tolist() == asked[n, False][1].tokens.tolist() for n, sampled in asked if sampled)

    (result,) = asyncio.run(local.run([evaluated([env()], generate, config(tmp_path))]))
    assert result.complete and same() < 24
    (result,) = asyncio.run(local.run([evaluated([env()], generate, config(tmp_path), top_p=0.5, top_k=1)]))
    assert result.complete and same() == 24 and {(r.top_p, r.top_k) for r, _ in asked.values()} == {(0.5, 1)}


def test_held_out_tasks_are_shared_out_by_weight() -> None:
    envs = [env(weight=1.0), env(weight=2.0), env(weight=1.0)]
    places = held_out(envs, 10)
    assert len(places) == 10 == len(set(places))
    assert [sum(e == i for e, _ in places) for i in range(3)] == [3, 5, 2]
    assert len(held_out([env()], 1000)) == 64, "as many as there are"


def test_other_weights_in_between_make_an_evaluation_incomplete(tmp_path: Path) -> None:
    e = engine()
    local = Local(e)

    async def generate(request: GenerateRequest) -> Generation:
        if request.request_id.startswith("eval-v0-sampled-20-"):
            e.version = 7
        return await local.generate(request)

    (result,) = asyncio.run(local.run([evaluated([env()], generate, config(tmp_path))]))
    assert not result.complete and result.sampled is None and result.greedy is None
    assert "[7] answered beside 0" in result.reason


def test_a_deadline_cuts_an_evaluation(tmp_path: Path) -> None:
    local = Local(engine())

    async def generate(request: GenerateRequest) -> Generation:
        if request.request_id.startswith("eval-v0-greedy-5-"):
            await asyncio.sleep(60)
        return await local.generate(request)

    (result,) = asyncio.run(local.run([evaluated([env()], generate, config(tmp_path), timeout_s=1.0)]))
    assert not result.complete and result.sampled is None and "cut at its deadline of 1 s" in result.reason


def test_failed_rollouts_are_neither_zeros_nor_silent(tmp_path: Path) -> None:
    local = Local(engine())
    (result,) = asyncio.run(local.run([evaluated([env(Faulty, retries=0)], local.generate, config(tmp_path), greedy=False)]))
    judged = result.outcomes["finished"] + result.outcomes.get("truncated", 0)
    assert result.complete and result.failed == 24 - judged > 0 and result.sampled is not None
    assert result.sampled * judged == pytest.approx(round(result.sampled * judged)), "a share of the judged ones"


def test_a_task_that_cannot_be_made_is_a_failed_rollout(tmp_path: Path) -> None:
    local = Local(engine())
    (result,) = asyncio.run(local.run([evaluated([env(Untold)], local.generate, config(tmp_path))]))
    assert result.complete and result.failed == result.outcomes["environment_error"] == 12, "a quarter of 24, in both modes"


def test_the_command_and_the_control_write_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = config(tmp_path)
    run = RunDir(tmp_path / "run").create()
    run.config_path.write_text(dump(c))
    model = build(read_spec(ARCHITECTURE), dtype=torch.float32)
    init_weights(model, 0)
    save_hf(run / "control" / "model", model.spec, model.state_dict().items(), tokenizer_from=None)
    assert main([str(run.root)]) == 2 and "--model" in capsys.readouterr().err
    assert main([str(run.root), "--model", str(run / "control" / "model"), "--json", "-", "evaluation.tasks=12"]) == 0
    shown = orjson.loads(capsys.readouterr().out)
    assert shown["tasks"] == 12 and shown["complete"] and 0 <= shown["sampled"] <= 1
    both = [str(run.root), "--model", str(run / "control" / "model"), "--json", "-", "evaluation.tasks=48"]
    lengths = []
    for override in ("evaluation.top_k=0", "evaluation.top_k=1"):
        assert main([*both, override]) == 0
        lengths.append(orjson.loads(capsys.readouterr().out)["response_length"])
    assert lengths[0] != lengths[1]
    for path, code, words in ((tmp_path / "no" / "x", 2, "no folder"), (tmp_path, 1, "cannot be written: Is a directory")):
        assert main([*both[:3], "--json", str(path), "evaluation.tasks=1"]) == code and words in capsys.readouterr().err
    monkeypatch.setenv("PRL_KERNELS", "reference")
    assert main([*both, "launch.kernels=cpu"]) == 2
    assert "launch.kernels is cpu, PRL_KERNELS is reference" in capsys.readouterr().err
    assert control(run, c, 0, threading.Event()) == 0
    assert orjson.loads((run / "control" / "eval.json").read_bytes())["tasks"] == 16


# -- rounds ------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(n: int) -> AsyncIterator[tuple[Client, list[Replica]]]:
    servers = [Server(engine(max_batch=8, prefix_cache=False, name=f"inference-{i}"), "secret") for i in range(n)]
    replicas = [Replica(f"inference-{i}", "127.0.0.1", await s.start()) for i, s in enumerate(servers)]
    try:
        async with Client(lambda: replicas, "secret", moe_layers=(0, 1), timeout_s=20) as client:
            await client.versions()
            yield client, replicas
    finally:
        for server in servers:
            await server.close()


async def two_rounds(order: list[int], *, replicas: int) -> dict[tuple[int, int], bytes]:
    """12 rollouts that arrive in `order`; those with an odd index ask a second time. Everything they were answered."""
    async with served(replicas) as (client, there):
        rounds = RoundClient(client, lambda: there, timeout_s=10)
        answers: dict[tuple[int, int], bytes] = {}

        async def rollout(n: int) -> None:
            key = divmod(n, 4)
            rng = np.random.default_rng(n)
            await asyncio.sleep(0.002 * order.index(n))
            for turn in range(1 + n % 2):
                prompt = rng.integers(2, 10, 3 + n % 5).astype(np.int32)
                request = GenerateRequest(prompt, 4 + n % 3, seed=n, session=f"s{n}", request_id=f"{n}-{turn}-{order[0]}")
                g = await rounds.generate(key, request)
                answers[key] = answers.get(key, b"") + g.tokens.tobytes() + g.logprobs.tobytes() + g.replica.encode()
            rounds.leave(f"s{n}")

        for n in order:
            rounds.join(f"s{n}")
        await asyncio.gather(*(rollout(n) for n in order))
        assert rounds.rounds == 2
        return answers


@pytest.mark.parametrize("replicas", [1, 2])
async def test_answers_of_a_round_do_not_depend_on_the_order_of_arrival(replicas: int) -> None:
    forward = list(range(12))
    shuffled = [int(i) for i in np.random.default_rng(3).permutation(12)]
    assert await two_rounds(forward, replicas=replicas) == await two_rounds(shuffled, replicas=replicas)


async def test_a_refused_request_of_a_round_fails_alone_and_the_engine_goes_on() -> None:
    async with served(1) as (client, there):
        rounds = RoundClient(client, lambda: there, timeout_s=10)
        for n in range(3):
            rounds.join(f"s{n}")
        requests = [GenerateRequest(np.array([2, 3 if n else 99], np.int32), 4, seed=n, request_id=f"{n}") for n in range(3)]
        answers = await asyncio.gather(*(rounds.generate((n, 0), r) for n, r in enumerate(requests)), return_exceptions=True)
        assert "token 99" in str(answers[0]) and all(isinstance(a, Generation) for a in answers[1:])
        requests[1].request_id = "alone"
        assert len((await client.generate(requests[1])).tokens) == 4, "the replica is not left paused"


async def test_a_round_that_cannot_be_queued_fails_and_leaves_no_replica_paused() -> None:
    async with served(1) as (client, there):
        rounds = RoundClient(client, lambda: there, timeout_s=0.3)
        rounds.join("s0")
        request = GenerateRequest(np.array([2, 3], np.int32), 4, request_id="0")
        metrics = client.metrics
        client.metrics = lambda replica: asyncio.sleep(0, {"waiting": 0})  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineError, match="0 of 1 requests of a round are queued after 0.3 s"):
            await rounds.generate((0, 0), request)
        client.metrics = metrics  # type: ignore[method-assign]
        assert len((await client.generate(GenerateRequest(request.tokens, 4, request_id="1"))).tokens) == 4
