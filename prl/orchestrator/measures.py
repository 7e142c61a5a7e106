"""What a batch and its making look like in numbers. Pure functions over rollouts, and one small tally."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from prl.orchestrator.scheduler import JUDGED, Cut, give_advantage
from prl.samples import Rollout

CONTENT = ("tokens", "trainable", "logprobs", "temperature", "advantages", "routes", "routed")
"""What the loss reads; ids and versions differ between a run and its repetition and are left out."""


def checksum(rollouts: Sequence[Rollout]) -> str:
    """xxh3-64 of what a batch will teach: equal for a batch that was generated anew with equal bits."""
    h = xxhash.xxh3_64()
    for rollout in rollouts:
        for sample in rollout.samples:
            for name in CONTENT:
                if (a := getattr(sample, name)) is not None:
                    h.update(f"{name}{a.dtype.str}{a.shape}".encode())
                    h.update(np.ascontiguousarray(a).data)
    return h.hexdigest()


@dataclass(slots=True)
class Tally:
    """Rollouts finished since the last batch, whatever became of them: the batch alone is biased by the filters."""

    rewards: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    recaptured: int = 0

    def add(self, rollout: Rollout) -> None:
        self.outcomes[rollout.outcome] += 1
        if rollout.outcome in JUDGED:
            self.rewards.append(rollout.reward)
            self.lengths.append(rollout.metrics.get("completion_tokens", rollout.n_trainable))
            self.turns.append(rollout.metrics.get("turns", 1))
            self.recaptured += int(rollout.metrics.get("recaptured", 0))

    def take(self) -> dict[str, Any]:
        """The step record's part, and a fresh start."""
        rewards = np.array(self.rewards or [0.0])
        record = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "solve_rate": float((rewards >= 1).mean()),
            "response_length": float(np.mean(self.lengths or [0.0])),
            "turns": float(np.mean(self.turns or [0.0])),
            "finished": len(self.rewards),
            "outcomes": dict(self.outcomes),
            "recaptured": self.recaptured,
        }
        self.rewards, self.lengths, self.turns, self.outcomes, self.recaptured = [], [], [], Counter(), 0
        return record


def of_batch(cut: Cut) -> dict[str, Any]:
    rewards = np.array([r.reward for r in cut.rollouts])
    return {
        "batch_reward": float(rewards.mean()),
        "batch_tokens": sum(r.n_tokens for r in cut.rollouts),
        "batch_trainable": sum(r.n_trainable for r in cut.rollouts),
        "groups": len({r.ordinal for r in cut.rollouts}),
        "staleness": {str(s): n for s, n in sorted(Counter(cut.staleness).items())},
        "staleness_max": max(cut.staleness),
    }


def shown(rollouts: Sequence[Rollout], count: int) -> list[dict[str, Any]]:
    """A few rollouts of a batch as text, spread over its groups."""
    chosen = [rollouts[i] for i in np.linspace(0, len(rollouts) - 1, min(count, len(rollouts))).round().astype(int)]
    return [
        {
            "ordinal": r.ordinal,
            "index": r.index,
            "env": r.env,
            "task": r.task,
            "reward": r.reward,
            "outcome": r.outcome,
            **r.text,
        }
        for r in chosen
    ]


def shuffle_rewards(
    rollouts: Sequence[Rollout], advantages: Callable[[Sequence[Rollout]], np.ndarray], *, seed: int, step: int
) -> None:
    """The control that must teach nothing: permute the rewards over the batch, then give each group its advantages anew."""
    order = np.random.default_rng([seed, step, 0x5EED]).permutation(len(rollouts))
    rewards = [rollouts[i].reward for i in order]
    groups: dict[int, list[Rollout]] = {}
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout.reward = reward
        groups.setdefault(rollout.ordinal, []).append(rollout)
    for group in groups.values():
        for rollout, advantage in zip(group, advantages(group), strict=True):
            give_advantage(rollout, float(advantage))
