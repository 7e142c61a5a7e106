"""The calculator and Python as tools, through the runner, with the real sandbox."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.config.schema import Env as EnvConfig
from prl.config.schema import Sampling
from prl.envs.base import Env, TaskError
from prl.envs.calculator import MAX_BITS, evaluate
from prl.envs.registry import make
from prl.envs.runner import run_rollout
from prl.samples import Rollout
from prl.tokenizer import characters
from tests.envs.engine import Engine

TOKENIZER = characters("".join(map(chr, range(32, 127))) + "\n")


def env_of(kind: str, sandbox: str = "namespaces", **options: Any) -> Env:
    options = {"dataset": "chain_sum", "prompt": "{question}"} | options
    return make(EnvConfig.model_validate({"name": "tool", "kind": kind, "sandbox": sandbox, "options": options}))


async def play(env: Env, *texts: str) -> Rollout:
    """A rollout in which the policy writes `texts`; ANSWER stands for the task's answer, $ for the end-of-text token."""
    task = env.task(0, "train")
    engine = Engine(*(t.replace("ANSWER", env.worked_answer(task)) for t in texts), tokenizer=TOKENIZER)
    sampling = Sampling(max_tokens=200, max_turns=4, max_length=2000)
    done = await run_rollout(env, task, engine, TOKENIZER, sampling, rollout_id="r", ordinal=0)
    if env.stop:
        assert all(TOKENIZER.token_id("]") in r.stop_token_ids for r in engine.requests)
    return done


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.sampled_from(["+", "-", "*", "//", "%"]))
def test_arithmetic(a: int, b: int, sign: str) -> None:
    if b or sign not in ("//", "%"):
        assert evaluate(f"({a}) {sign} ({b})") == eval(f"({a}) {sign} ({b})")


def test_more_arithmetic() -> None:
    assert [evaluate(e) for e in ("7 / 2", "2 ** 10", "-(1 + 2) * 3", " +4", "2 ** -1", "1e3")] == [
        3.5,
        1024,
        -9,
        4,
        0.5,
        1000.0,
    ]


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "(1).real", "[1]", "x", "f(1)", "'a' * 3", "True + 1", "1 if 1 else 2", "lambda: 1",
        "", "1 +", "1 / 0", "5 % 0", "9 ** 9 ** 9", "2 ** 10 ** 10", "10.0 ** 400", "(-8) ** 0.5", "1j", "1\0", "9" * 150,
        "(" * 150 + "1", "1+" * 150 + "1",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_large_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression)


@given(st.text("0123456789+-*/%(). e", max_size=40))
def test_any_text_gives_a_number_of_bounded_size_or_a_value_error(expression: str) -> None:
    try:
        result = evaluate(expression)
    except ValueError:
        return
    assert isinstance(result, int) and result.bit_length() <= MAX_BITS or isinstance(result, float)


async def test_the_calculator_answers_calls_until_the_policy_answers() -> None:
    env = env_of("calculator")
    done = await play(env, "[1+2]", "[7/2]", "[2*]", "ANSWER$")
    assert (done.outcome, done.reward) == ("finished", 1.0)
    assert done.text["completion"].startswith("[1+2]=3[7/2]=3.5[2*]=error")
    assert done.metrics["turns"] == 4 and done.metrics["env/call_errors"] == 1
    (sample,) = done.samples
    assert TOKENIZER.decode(sample.tokens[~sample.trainable]).endswith("=3=3.5=error")
    assert (await play(env, "[1+2]", "wrong$")).reward == 0.0
    assert (await play(env, "[1]", "[2]", "[3]", "[4]")).outcome == "truncated"


async def test_worked_turns_are_those_of_a_rollout_that_solves_the_task() -> None:
    env = env_of("calculator", worked_call="[{expression}]")
    task = env.task(0, "train")
    call, reply, answer = env.worked_turns(task)
    done = await play(env, call, f"{answer}$")
    assert (done.outcome, done.reward) == ("finished", 1.0)
    assert done.text["completion"].startswith(f"{call}{reply}{answer}") and reply == f"={answer}"
    assert list(env_of("calculator").worked_turns(task)) == [answer], "without a call they answer at once"
    with pytest.raises(TaskError, match="worked_call 'sum' is no call"):
        env_of("calculator", worked_call="sum").worked_turns(task)
    with pytest.raises(TaskError, match=r"worked_call '\[sum\]' is no call"):
        env_of("calculator", worked_call="[sum]").worked_turns(task)


async def test_python_runs_blocks_and_gives_back_what_they_print() -> None:
    env = env_of("python", time_s=2.0, output_characters=50)
    code = "```python\nprint(sum(range(10)))\n```$"
    done = await play(env, code, "```python\n1 / 0\n```$", "```python\nprint('x' * 99)\n```$", "ANSWER$")
    assert (done.outcome, done.reward) == ("finished", 1.0)
    text = done.text["completion"]
    assert "```output\n45\n```" in text and "Traceback" in text and f"\n{'x' * 50}\n```" in text
    assert done.metrics["env/call_errors"] == 1


async def test_a_block_that_hangs_is_told_so_and_the_rollout_goes_on() -> None:
    done = await play(env_of("python", time_s=0.3), "```python\nwhile True: pass\n```$", "ANSWER$")
    assert (done.outcome, done.reward) == ("finished", 1.0)
    assert "stopped after 0.3 s" in done.text["completion"]


async def test_many_rollouts_share_few_slots() -> None:
    import asyncio

    env = env_of("python", at_once=2)
    code = "```python\nimport time; time.sleep(0.1); print('slept')\n```$"
    done = await asyncio.gather(*(play(env, code, "ANSWER$") for _ in range(6)))
    assert all(d.reward == 1.0 and "slept" in d.text["completion"] for d in done)


def test_python_refuses_to_start_without_namespaces_unless_told() -> None:
    code = """
open("/proc/sys/user/max_user_namespaces", "w").write("0")
from tests.envs.test_tools import env_of
from prl.config.named import SetupError
env_of("python", sandbox="none")
try:
    env_of("python")
except SetupError as error:
    print("refused:", error)
"""
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.startswith("refused: env tool: sandbox: unshare()"), done.stderr
