"""Small environments for the orchestrator's tests. Free of torch."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prl.envs.base import SingleTurn, Split, Task, Turn

ALPHABET = "abcdefgh"


class Letters(SingleTurn):
    """Solved when the completion has the prompt's letter in it: a fresh model does so now and then."""

    inline = True

    def size(self, split: Split) -> int:
        return 64

    def task(self, ordinal: int, split: Split) -> Task:
        letter = ALPHABET[ordinal % len(ALPHABET)]
        return Task(ordinal, f"{split}-{ordinal}", f"{letter}{ALPHABET[ordinal // 8 % 8]}", {"letter": letter})

    def score(self, task: Task, completion: str) -> float:
        return float(task.data["letter"] in completion)

    async def step(self, state: Any, completion: str) -> Turn:
        return Turn(self.score(state, completion))


class Faulty(Letters):
    """Raises, hangs or answers nonsense, by the task and the letters sampled."""

    inline = False

    def step(self, state: Any, completion: str) -> Turn:  # type: ignore[override]
        match (state.ordinal + len(completion)) % 8:
            case 0:
                raise RuntimeError("broken on purpose")
            case 1:
                time.sleep(1.0)
            case 2:
                return Turn(float("nan"))
        return Turn(self.score(state, completion))


class Twice(Letters):
    """Two turns: asks once more, then scores the second answer."""

    async def start(self, task: Task) -> Any:
        return [task]

    async def step(self, state: Any, completion: str) -> Turn:
        state.append(completion)
        return Turn(done=False, text="h") if len(state) == 2 else Turn(self.score(state[0], completion))


class Slow(Letters):
    """Takes its time over held-out tasks."""

    async def step(self, state: Any, completion: str) -> Turn:
        await asyncio.sleep(0.25 if state.id.startswith("held_out") else 0)
        return Turn(self.score(state, completion))


class Signed(Letters):
    """Rewards below zero, which not every advantage takes."""

    def score(self, task: Task, completion: str) -> float:
        return float(task.data["letter"] in completion) - 2


class Untold(Letters):
    """Some held-out tasks cannot be made."""

    def task(self, ordinal: int, split: Split) -> Task:
        if split == "held_out" and ordinal % 4 == 0:
            raise KeyError("no such task")
        return super().task(ordinal, split)


class Never(Letters):
    def score(self, task: Task, completion: str) -> float:
        return 0.0


class Always(Letters):
    def score(self, task: Task, completion: str) -> float:
        return 1.0
