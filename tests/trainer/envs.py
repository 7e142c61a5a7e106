"""An environment that a tiny model learns in seconds."""

from __future__ import annotations

from prl.envs.base import SingleTurn, Split, Task

LETTERS = "abcdefgh"


class Next(SingleTurn):
    """The letter after the given one."""

    inline = True

    def size(self, split: Split) -> int:
        return len(LETTERS)

    def task(self, ordinal: int, split: Split) -> Task:
        letter = LETTERS[ordinal]
        return Task(ordinal, letter, letter, {"answer": LETTERS[(ordinal + 1) % len(LETTERS)]})

    def worked_answer(self, task: Task) -> str:
        return str(task.data["answer"])

    def score(self, task: Task, completion: str) -> float:
        return float(completion == task.data["answer"])
