"""Multi-turn: reasoning-gym tasks with a calculator. The policy writes `[1+2]`, reads `=3`, and goes on.

A turn that ends with an expression in square brackets is a call; any other turn is the answer, scored as in
`prl.envs.reasoning_gym`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from prl.config.schema import Env as EnvConfig
from prl.envs.base import Task, TaskError, Turn
from prl.envs.reasoning_gym import Options, ReasoningGym

MAX_CHARACTERS, MAX_BITS = 200, 256
CALL = re.compile(r"\[([^\[\]]*)\]$")
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(expression: str) -> int | float:
    """Numbers, + - * / // % ** and parentheses; nothing else is looked at, so nothing else can run.

    ValueError for anything else, for over `MAX_CHARACTERS`, for integers over `MAX_BITS` bits, and for what arithmetic
    forbids.
    """

    def value(node: ast.expr) -> int | float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                result = number
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                result = _UNARY[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                a, b = value(left), value(right)
                if isinstance(op, ast.Pow) and isinstance(a, int) and isinstance(b, int) and a.bit_length() * b > MAX_BITS:
                    raise ValueError("power too large")
                result = _BINARY[type(op)](a, b)
            case _:
                raise ValueError(f"{type(node).__name__} is not arithmetic")
        if isinstance(result, complex) or (isinstance(result, int) and result.bit_length() > MAX_BITS):
            raise ValueError("result too large or not real")
        return result

    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"{len(expression)} characters, at most {MAX_CHARACTERS}")
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class CalculatorOptions(Options):
    worked_call: str = ""
    """Template of a call that worked answers make before they answer, such as [{expression}]; empty: they answer at once."""


class Calculator(ReasoningGym):
    inline = True
    stop = ("]",)
    options: CalculatorOptions

    def __init__(self, config: EnvConfig, *, seed: int):
        super().__init__(config, seed=seed, options=CalculatorOptions)

    def worked_turns(self, task: Task) -> Sequence[str]:
        if not self.options.worked_call:
            return super().worked_turns(task)
        call = self._filled(self.options.worked_call, self.dataset[task.data["item"]])
        turn = self.step(task, call)
        if turn.done or turn.metrics:
            raise TaskError(f"env {self.name}: worked_call {call!r} is no call; expected arithmetic in square brackets")
        return call, turn.text, self.worked_answer(task)

    def step(self, state: Any, completion: str) -> Turn:
        if (call := CALL.search(completion)) is None:
            return Turn(reward=self.score(state, completion))
        try:
            result = evaluate(call[1])
        except ValueError:
            return Turn(done=False, text="=error", metrics={"call_errors": 1})
        return Turn(done=False, text=f"={result:g}" if isinstance(result, float) else f"={result}")
