"""`bench peers`: that both sides get the same work, and how their figures are read."""

import json
from pathlib import Path

import numpy as np
import pytest

from prl.bench.peers import COMMON, Peer, of_trl, rows_of, trl_spec, write_model
from prl.bench.task import Spelling, reward
from prl.config.load import load
from prl.envs.registry import make

CONFIG = "bench/peers.yaml"


def test_the_reward_gives_part_marks_and_one_for_the_answer() -> None:
    assert reward("nus", "nus") == 1.0
    assert reward("nusxxx", "nus") == pytest.approx(0.25)
    assert reward("xyz", "nus") == 0.0
    assert reward("", "nus") == 0.0
    assert reward("nu", "nus") == 0.5


def test_random_completions_give_nearly_every_group_spread() -> None:
    rng, letters = np.random.default_rng(0), list("abcdefghijklmnopqrstuvwxyz0123456789>=+-., ")
    groups = [[reward("".join(rng.choice(letters, 10)), "drawkc") for _ in range(8)] for _ in range(200)]
    assert sum(len(set(g)) > 1 for g in groups) >= 198


def test_the_peer_gets_the_tasks_that_the_main_job_draws_in_their_order(tmp_path: Path) -> None:
    config = load(CONFIG, [*COMMON, "trainer.steps=3"])
    spec = trl_spec(config, tmp_path, steps=3, warmup=1, experts="")
    env = make(config.envs[0], seed=config.run.seed)
    assert isinstance(env, Spelling)
    assert len(spec["tasks"]) >= 3 * config.orchestrator.batch_size // config.orchestrator.group_size
    for i, task in enumerate(spec["tasks"]):
        drawn = env.task(i, "train")
        assert (task["prompt"], task["answer"]) == (drawn.prompt, drawn.data["answer"])
        assert env.score(drawn, "abc") == reward("abc", task["answer"])
    assert spec["max_tokens"] == config.sampling.max_tokens
    assert spec["lr"] == config.trainer.optim.lr
    json.dumps(spec)


@pytest.mark.parametrize("config, millions", [(CONFIG, 3.42), ("bench/peers-llama.yaml", 1.06)])
def test_the_model_is_of_the_size_said_and_transformers_reads_the_folder(tmp_path: Path, config: str, millions: float) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert write_model(load(config, COMMON), tmp_path) == pytest.approx(1e6 * millions, rel=0.01)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6 * millions, rel=0.01)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("sun>")["input_ids"]) == "sun>"
    assert tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0


def trl_line(rollouts: int, step_s: list[float]) -> str:
    facts = {"experts": "eager", "threads": 2, "parameters": 1, "versions": {"trl": "1.16.0"}}
    numbers = {"rollouts": rollouts, "tokens": 9 * rollouts, "generating_s": 1.0, "peak_mb": 700.0, "step_s": step_s}
    return f"a warning\nanother\n{json.dumps(facts | numbers)}\n"


def test_figures_of_the_peer_are_read_from_its_last_line() -> None:
    peer = of_trl(trl_line(512, [0.5, 0.5, 0.25, 0.75]), others=0.01)
    assert peer.rollouts_per_s == 256
    assert peer.tokens_per_rollout == 9
    assert peer.memory_mb == 700
    assert peer.details["generating_share"] == 0.5


def test_the_goal_is_at_least_the_peers_rollouts_per_second() -> None:
    def ours(rate: float) -> Peer:
        return Peer(rate, (0.5, 0.5), 9.0, 900.0, 0.0, {"generated_per_s": 1.02 * rate})

    theirs = [of_trl(trl_line(512, [x]), 0.0) for x in (1.0, 1.28, 2.0)]  # 512, 400, 256 rollouts/s
    judged = {rate: rows_of([ours(rate)] * 3, theirs)[0] for rate in (401.0, 399.0)}
    assert [judged[rate].met for rate in (401.0, 399.0)] == [True, False]
    assert judged[401.0].ratio == pytest.approx(401 / 400)
    assert len([r for r in rows_of([ours(1.0)], theirs) if r.goal is not None]) == 1
