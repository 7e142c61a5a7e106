"""The task of `bench peers`: spelling backward with a reward that has spread in nearly every group from the first step on."""

from __future__ import annotations

from prl.envs.base import Task
from prl.envs.reasoning_gym import ReasoningGym


def reward(completion: str, answer: str) -> float:
    """1 for the answer, else half the share of the completion's characters that the answer has.

    Under a reward of exact answers alone every group of an untrained model would be filtered as one without signal, which one
    trainer does and another does not: the two would do different work.
    """
    if completion == answer:
        return 1.0
    return 0.5 * sum(c in answer for c in completion) / len(completion) if completion else 0.0


class Spelling(ReasoningGym):
    def score(self, task: Task, completion: str) -> float:
        return reward(completion, task.data["answer"])
