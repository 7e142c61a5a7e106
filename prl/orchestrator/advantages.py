"""Advantages: pure functions of one group, each with its formula and paper.

A group is the rollouts of one task. R [G] their rewards, mean(R) and std(R) (population) over the group; every trainable
token of rollout g gets A[g].

**Failed members.** A member that never came to a reward (timed_out, environment_error, bad_reward, engine_error, cancelled,
stale) has no place in R: the survivors alone form the baseline and train. Is more than `orchestrator.max_failed_fraction` of
the group failed, the whole group is dropped. The scheduler applies the rule; the functions here see survivors only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prl.config.named import named
from prl.config.schema import Advantage
from prl.samples import Rollout


@dataclass(frozen=True)
class Group:
    """rewards float64 [G]; lengths int64 [G], trainable tokens; the rollouts themselves for a user's own function."""

    rewards: np.ndarray
    lengths: np.ndarray
    rollouts: Sequence[Rollout] = ()


AdvantageFunction = Callable[[Group], np.ndarray]


def grpo(group: Group) -> np.ndarray:
    """A = R - mean(R). GRPO (arXiv 2402.03300) without its division by the deviation."""
    return group.rewards - group.rewards.mean()


def grpo_std(group: Group) -> np.ndarray:
    """A = (R - mean(R)) / (std(R) + 1e-6). GRPO (arXiv 2402.03300)."""
    return grpo(group) / (group.rewards.std() + 1e-6)


def rloo(group: Group) -> np.ndarray:
    """A[g] = R[g] - mean of the others' R = G / (G - 1) (R[g] - mean(R)); 0 where there are no others. arXiv 2402.14740."""
    n = len(group.rewards)
    return grpo(group) * (n / (n - 1)) if n > 1 else np.zeros(n)


def dr_grpo(group: Group) -> np.ndarray:
    """A = R - mean(R). Dr. GRPO (arXiv 2503.20783), whose other half is `trainer.loss.normalise: constant`."""
    return grpo(group)


def max_rl(group: Group) -> np.ndarray:
    """A = (R - mean(R)) / mean(R), 0 where no rollout has a reward: ascends log of the solve rate. arXiv 2602.02710.

    ValueError for rewards whose mean is negative, or 0 while they differ.
    """
    mean = group.rewards.mean()
    if mean <= 0 and group.rewards.any():
        rewards = group.rewards.tolist()
        raise ValueError(f"advantage max_rl: rewards {rewards}, expected a mean above 0; use grpo for signed rewards")
    return grpo(group) / mean if mean > 0 else np.zeros(len(group.rewards))


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "grpo_std": grpo_std,
    "rloo": rloo,
    "dr_grpo": dr_grpo,
    "max_rl": max_rl,
}


def with_length_penalty(group: Group, coefficient: float) -> Group:
    """R[g] - coefficient * mean(R) * length[g] / (longest length): tasks solved often are pressed to be short.

    Scaled by the mean, so that a task that is rarely solved is not.
    """
    longest = group.lengths.max(initial=1)
    return replace(group, rewards=group.rewards - coefficient * group.rewards.mean() * group.lengths / longest)


def resolve(config: Advantage) -> Callable[[Sequence[Rollout]], np.ndarray]:
    """From a group's surviving rollouts to A float64 [G].

    `config.kind` is in `ADVANTAGES` or a user's `package.module:function(group: Group) -> array [G]`; the length penalty
    comes before either. ValueError names an unknown kind, and a result of the wrong shape.
    """
    function = named(config.kind, ADVANTAGES, "orchestrator.advantage.kind")

    def advantages(rollouts: Sequence[Rollout]) -> np.ndarray:
        group = Group(
            rewards=np.array([r.reward for r in rollouts], np.float64),
            lengths=np.array([r.n_trainable for r in rollouts], np.int64),
            rollouts=rollouts,
        )
        if config.length_penalty:
            group = with_length_penalty(group, config.length_penalty)
        result = np.asarray(function(group), np.float64)
        if result.shape != group.rewards.shape:
            raise ValueError(f"advantage {config.kind}: shape {result.shape} for {len(rollouts)} rollouts, expected one each")
        return result

    return advantages
