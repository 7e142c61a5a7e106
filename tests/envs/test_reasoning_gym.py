"""Tasks of the library: splits that never meet, determinism, templates, scores, registry."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.config.named import SetupError
from prl.config.schema import Env as EnvConfig
from prl.envs.base import UNBOUNDED, Env, TaskError
from prl.envs.reasoning_gym import ReasoningGym
from prl.envs.registry import make
from prl.tokenizer import characters

SPELL = {
    "dataset": "spell_backward",
    "dataset_options": {"min_word_len": 4, "max_word_len": 8},
    "prompt": "{word}>",
    "lowercase": True,
}


def env_of(seed: int = 0, **options: Any) -> ReasoningGym:
    env = make(EnvConfig(name="words", kind="reasoning_gym", options=SPELL | options), seed=seed)
    assert isinstance(env, ReasoningGym)
    return env


def test_prompt_answer_and_score() -> None:
    env = env_of()
    task = env.task(0, "train")
    assert task.prompt.endswith(">") and task.prompt == task.prompt.lower()
    answer = env.worked_answer(task)
    assert answer == task.prompt[:-1][::-1]
    assert [env.score(task, c) for c in (answer, answer + "x", "", answer[:-1])] == [1.0, 0.0, 0.0, 0.0]
    characters("abcdefghijklmnopqrstuvwxyz>").encode(task.prompt)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), ordinals=st.lists(st.integers(0, UNBOUNDED - 1), min_size=1, max_size=40))
def test_no_train_task_is_ever_a_held_out_or_worked_one(seed: int, ordinals: list[int]) -> None:
    """The words are few (3 letters), so that the splits would meet if anything but the content decided."""
    few = {"dataset_options": {"min_word_len": 3, "max_word_len": 3}}
    env, other = env_of(seed, **few), env_of(seed + 1, **few)
    held_out = {env.task(i, "held_out").prompt for i in range(40)} | {other.task(i, "held_out").prompt for i in range(40)}
    worked = {env.task(i, "worked").prompt for i in range(40)} | {other.task(i, "worked").prompt for i in range(40)}
    train = {env.task(i, "train").prompt for i in ordinals}
    assert not train & held_out and not train & worked and not held_out & worked


def test_tasks_follow_from_seed_split_and_ordinal_alone() -> None:
    one, two = env_of(3), env_of(3)
    forward = [one.task(i, "held_out") for i in range(20)] + [one.task(i, "train") for i in range(20)]
    two.task(50, "worked")
    backward = [two.task(i, "train") for i in reversed(range(20))] + [two.task(i, "held_out") for i in reversed(range(20))]
    assert forward == backward[::-1][:20] + backward[:20][::-1]
    assert [t.ordinal for t in forward] == [*range(20), *range(20)]
    assert [env_of(4).task(i, "train").prompt for i in range(20)] != [t.prompt for t in forward[20:]]


def test_held_out_tasks_are_distinct_and_train_tasks_do_not_run_out() -> None:
    env = env_of()
    held_out = [env.task(i, "held_out") for i in range(512)]
    assert len({t.prompt for t in held_out}) == len({t.id for t in held_out}) == 512
    assert env.size("train") == UNBOUNDED
    assert env.task(UNBOUNDED - 1, "train").prompt
    assert len({env.task(i, "train").id for i in range(500)}) > 480


def test_a_split_with_too_few_tasks_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prl.envs.reasoning_gym.MAX_DRAWS", 500)
    env = env_of(dataset="coin_flip", dataset_options={"min_trials": 3, "max_trials": 3}, prompt="{num_trials}>")
    with pytest.raises(TaskError, match=r"coin_flip has about \d+ distinct held_out tasks, task 50 was asked for"):
        env.task(50, "held_out")


def test_a_dataset_of_a_fixed_size() -> None:
    env = env_of(dataset="word_ladder", dataset_options={"size": 50}, prompt="{question}", lowercase=False, worked=0.0)
    assert {env.task(i, "train").data["item"] for i in range(200)} <= set(range(50))


def test_the_datasets_own_score() -> None:
    env = env_of(dataset="chain_sum", dataset_options={}, prompt="{question}", reward="dataset")
    task = env.task(5, "train")
    assert env.score(task, env.worked_answer(task)) == 1.0
    assert 0 <= env.score(task, "nonsense") < 1
    assert not env.inline and env_of().inline


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "spell_backwards"}, "no dataset 'spell_backwards'; did you mean 'spell_backward'"),
        ({"dataset": "qqq"}, "no dataset 'qqq'; one of .*, zebra_puzzles"),
        ({"dataset_options": {"min_word_len": 9, "max_word_len": 4}}, "reasoning-gym dataset 'spell_backward'"),
        ({"prompt": "{wrod}>"}, r"template needs 'wrod'; spell_backward offers answer, .*word"),
        ({"promt": "x"}, "env words: options: promt: Extra inputs"),
        ({"dataset": 3}, "env words: options: dataset"),
        ({"dataset": "acre", "dataset_options": {}}, r"acre makes all its items at once; set dataset_options\.size"),
        ({"held_out": 0.5, "worked": 0.5}, "leave nothing to train on"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        env_of(**options).task(0, "train")


class Own(ReasoningGym):
    pass


def test_a_users_own_environment_by_import_path() -> None:
    assert isinstance(make(EnvConfig(name="own", kind=f"{__name__}:Own", options=SPELL)), Env)
    with pytest.raises(ValueError, match="env own: kind 'json:dumps' is .*expected a subclass"):
        make(EnvConfig(name="own", kind="json:dumps"))
    with pytest.raises(ValueError, match="env own: kind 'reasoning_gim'.*did you mean 'reasoning_gym'"):
        make(EnvConfig(name="own", kind="reasoning_gim"))


def test_environments_do_not_load_torch() -> None:
    code = (
        "import sys, prl.envs.runner, prl.envs.python, prl.envs.calculator, prl.tokenizer, prl.orchestrator.advantages;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
