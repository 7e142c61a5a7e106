"""Which task comes next in the data order. Pure: a draw follows from the seed, the ordinal and what was observed.

An environment's tasks are walked in a seeded order without a table of them: epoch e visits `(stride · position + offset) mod
size`, stride coprime to size, both drawn from (seed, environment, epoch), so a source of 2³¹ generated tasks costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Literal, Protocol

import numpy as np

Place = tuple[int, int]
"""(environment by its place in the configuration, task by its place in the environment)."""
State = dict[str, list[int] | list[list[int]]]

FRESH, HARD, NORMAL, EASY = range(4)
POOL_WEIGHTS = {FRESH: 1.0, HARD: 0.2, NORMAL: 1.0, EASY: 0.2}
"""How often a draw goes to tasks not seen yet, or seen with mean reward up to 0.25, up to 0.75, or above."""
POOL_LIMIT = 65_536
"""Tasks remembered per pool; beyond it the one seen longest ago is forgotten."""


def walk(seed: int, env: int, size: int, position: int) -> int:
    """The task at `position` of environment `env`'s order; every epoch of `size` positions visits each task once."""
    epoch, place = divmod(position, size)
    rng = np.random.default_rng([seed, env, epoch, 0xDA7A])
    stride, offset = int(rng.integers(1, size + 1)), int(rng.integers(size))
    while gcd(stride, size) != 1:
        stride += 1
    return (stride * place + offset) % size


class Curriculum(Protocol):
    def draw(self, ordinal: int) -> Place:
        """The task of the next ordinal. Ordinals are drawn in order, each once."""

    def observe(self, place: Place, mean_reward: float) -> None:
        """A group of this task was judged."""

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...


class Uniform:
    """Environments by weight, an environment's tasks each once an epoch."""

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float]):
        if not sizes or min(sizes) < 1:
            raise ValueError(f"curriculum: environments of {list(sizes)} tasks, expected at least one task in each of `envs`")
        self.seed, self.sizes = seed, list(sizes)
        self.shares = np.asarray(weights, np.float64) / sum(weights)
        self.positions = [0] * len(sizes)

    def draw(self, ordinal: int) -> Place:
        rng = np.random.default_rng([self.seed, ordinal, 0xE27])
        env = int(rng.choice(len(self.sizes), p=self.shares)) if len(self.sizes) > 1 else 0
        return env, self._fresh(env)

    def _fresh(self, env: int) -> int:
        self.positions[env] += 1
        return walk(self.seed, env, self.sizes[env], self.positions[env] - 1)

    def observe(self, place: Place, mean_reward: float) -> None:
        pass

    def state(self) -> State:
        return {"positions": list(self.positions)}

    def load(self, state: State) -> None:
        if len(state["positions"]) != len(self.sizes):
            raise ValueError(
                f"curriculum: state of {len(state['positions'])} environments, the configuration has {len(self.sizes)}"
            )
        self.positions = [int(p) for p in state["positions"]]  # type: ignore[arg-type]


class Difficulty(Uniform):
    """Mixes tasks not seen yet with seen ones, pooled by the mean reward of their last group; the middle pool comes most often.

    A task drawn from a pool leaves it until its group is judged, so that no two groups of one task are open at once.
    """

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float]):
        super().__init__(seed, sizes, weights)
        self.pools: dict[int, list[Place]] = {HARD: [], NORMAL: [], EASY: []}

    def draw(self, ordinal: int) -> Place:
        rng = np.random.default_rng([self.seed, ordinal, 0xD1F])
        env = int(rng.choice(len(self.sizes), p=self.shares))
        kinds = [k for k, pool in self.pools.items() if pool]
        if self.positions[env] < self.sizes[env] or not kinds:
            kinds.append(FRESH)
        weights = np.array([POOL_WEIGHTS[k] for k in kinds])
        kind = kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))]
        if kind == FRESH:
            return env, self._fresh(env)
        pool = self.pools[kind]
        return pool.pop(int(rng.integers(len(pool))))

    def observe(self, place: Place, mean_reward: float) -> None:
        pool = self.pools[HARD if mean_reward <= 0.25 else NORMAL if mean_reward <= 0.75 else EASY]
        pool.append(place)
        del pool[:-POOL_LIMIT]

    def state(self) -> State:
        return {**super().state(), **{str(k): [list(p) for p in pool] for k, pool in self.pools.items()}}

    def load(self, state: State) -> None:
        super().load(state)
        self.pools = {k: [(int(e), int(t)) for e, t in state[str(k)]] for k in self.pools}  # type: ignore[misc]


def make(kind: Literal["uniform", "difficulty"], seed: int, sizes: Sequence[int], weights: Sequence[float]) -> Curriculum:
    return {"uniform": Uniform, "difficulty": Difficulty}[kind](seed, sizes, weights)
