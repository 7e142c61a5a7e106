"""Advantages against numbers worked out by hand, and what they may not depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.config.schema import Advantage
from prl.orchestrator.advantages import ADVANTAGES, Group, resolve
from prl.samples import Rollout, Sample


def rollouts_of(rewards: Sequence[float], lengths: Sequence[int] | None = None) -> list[Rollout]:
    out = []
    for k, reward in enumerate(rewards):
        sample = Sample.of_prompt(np.arange(1 + (lengths[k] if lengths else 3)))
        sample.trainable[1:] = True
        out.append(Rollout(f"r{k}", "env", "task", 0, k, reward=reward, samples=[sample]))
    return out


def of(kind: str, rewards: Sequence[float], lengths: Sequence[int] | None = None, penalty: float = 0.0) -> list[float]:
    return resolve(Advantage(kind=kind, length_penalty=penalty))(rollouts_of(rewards, lengths)).tolist()


def test_golden_numbers() -> None:
    """Rewards 1, 0, 0, 1, 0.5: mean 0.5, population variance 0.2."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    assert of("grpo", rewards) == pytest.approx([0.5, -0.5, -0.5, 0.5, 0.0])
    assert of("dr_grpo", rewards) == pytest.approx([0.5, -0.5, -0.5, 0.5, 0.0])
    assert of("grpo_std", rewards) == pytest.approx([1.1180339887, -1.1180339887, -1.1180339887, 1.1180339887, 0.0], rel=1e-5)
    # the mean of the four others: 0.375, 0.625, 0.625, 0.375, 0.5
    assert of("rloo", rewards) == pytest.approx([0.625, -0.625, -0.625, 0.625, 0.0])
    assert of("max_rl", rewards) == pytest.approx([1.0, -1.0, -1.0, 1.0, 0.0])
    # one of four solved: weight 1 / 0.25 on the success
    assert of("max_rl", [0, 0, 1, 0]) == pytest.approx([-1, -1, 3, -1])


def test_length_penalty() -> None:
    """Mean 0.5, coefficient 0.4, lengths 10, 5, 10, 5 of 10: R' = 0.8, 0.9, -0.2, -0.1, whose mean is 0.35."""
    got = of("grpo", [1, 1, 0, 0], [10, 5, 10, 5], penalty=0.4)
    assert got == pytest.approx([0.45, 0.55, -0.55, -0.45])
    assert of("grpo", [0, 0, 0], [10, 5, 2], penalty=0.4) == pytest.approx([0, 0, 0])


def test_survivors_alone_form_the_baseline() -> None:
    """The scheduler hands over survivors: a failed member shifts no baseline, however many there were."""
    assert of("grpo", [1.0, 0.0]) == pytest.approx([0.5, -0.5])
    assert of("rloo", [1.0]) == of("grpo", [1.0]) == [0.0]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=8), st.randoms())
def test_advantages_follow_their_rollouts_in_any_order(rewards: list[float], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    lengths = [3 + 2 * k for k in range(len(rewards))]
    for kind in ADVANTAGES:
        straight = of(kind, rewards, lengths, penalty=0.2)
        shuffled = of(kind, [rewards[k] for k in order], [lengths[k] for k in order], penalty=0.2)
        assert shuffled == pytest.approx([straight[k] for k in order], abs=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(-5, 5))
def test_a_constant_added_to_every_reward_changes_nothing(rewards: list[float], constant: float) -> None:
    for kind in ("grpo", "rloo", "dr_grpo"):
        assert of(kind, [r + constant for r in rewards]) == pytest.approx(of(kind, rewards), abs=1e-9)
        assert sum(of(kind, rewards)) == pytest.approx(0, abs=1e-9)


def test_max_rl_has_no_meaning_for_signed_rewards() -> None:
    assert of("max_rl", [0.0, 0.0]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="expected a mean above 0"):
        of("max_rl", [1.0, -1.0])


def twice(group: Group) -> np.ndarray:
    assert len(group.rollouts) == len(group.rewards)
    return 2 * group.rewards


def wrong_shape(group: Group) -> np.ndarray:
    return np.zeros(1)


def test_a_users_own_by_import_path() -> None:
    assert of(f"{__name__}:twice", [1.0, 0.5]) == [2.0, 1.0]
    with pytest.raises(ValueError, match=r"shape \(1,\) for 2 rollouts"):
        of(f"{__name__}:wrong_shape", [1.0, 0.5])
    with pytest.raises(ValueError, match=r"orchestrator.advantage.kind 'grpo_st'.*did you mean 'grpo_std'"):
        of("grpo_st", [1.0])


def test_what_is_not_finite_stays_visible() -> None:
    for kind in ("grpo", "grpo_std", "rloo"):
        assert any(math.isnan(a) for a in of(kind, [1.0, math.nan, 0.0]))
