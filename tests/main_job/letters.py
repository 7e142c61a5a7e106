"""An environment with a signal from the first step: the share of a completion that is in the alphabet's first half."""

from prl.envs.base import SingleTurn, Split, Task


class Letters(SingleTurn):
    inline = True

    def size(self, split: Split) -> int:
        return 1 << 16

    def task(self, ordinal: int, split: Split) -> Task:
        text = "".join("abcdefghijklmnop"[ordinal >> shift & 15] for shift in (12, 8, 4, 0))
        return Task(ordinal, f"{split}-{ordinal}", f"{text}>")

    def score(self, task: Task, completion: str) -> float:
        return sum(c < "n" for c in completion) / max(len(completion), 1)

    def worked_answer(self, task: Task) -> str:
        return "abc"
