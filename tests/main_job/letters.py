"""Environments with a signal from the first step: the share of letters that are in the alphabet's first half."""

from dataclasses import dataclass

from prl.envs.base import SingleTurn, Split, Task, Turn


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


@dataclass
class Said:
    task: Task
    completions: list[str]


class Turns(Letters):
    """The same over three turns. Any letter of the second half ends a turn, so an untrained model gets to the next one."""

    stop = tuple("nopqrstuvwxyz")

    def start(self, task: Task) -> Said:
        return Said(task, [])

    def step(self, state: Said, completion: str) -> Turn:
        state.completions.append(completion)
        return Turn(self.score(state.task, "".join(state.completions)), done=len(state.completions) == 3, text=">>")


class First(Letters):
    """Solved by a first letter of the first half; the worked answers begin with any letter, so a warm start solves half."""

    def score(self, task: Task, completion: str) -> float:
        return float("a" <= completion[:1] < "n")

    def worked_answer(self, task: Task) -> str:
        return "abcdefghijklmnopqrstuvwxyz"[task.ordinal % 26]
