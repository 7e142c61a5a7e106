"""Noise by position, and that tokens follow the distribution whose logprob is returned."""

import numpy as np
import pytest
import torch

from prl.inference.sampling import log_probabilities, noise, sample, truncate


def draw(logits: torch.Tensor, u: np.ndarray, t: float = 1.0, p: float = 1.0, k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    n = len(u)
    token, logprob = sample(
        logits.expand(n, -1),
        torch.full((n,), t),
        torch.full((n,), p),
        torch.full((n,), k),
        torch.from_numpy(u),
        plain=t > 0 and p == 1 and k == 0,
    )
    return token.numpy(), logprob.numpy()


def test_noise_follows_from_seed_and_position_alone() -> None:
    whole = noise(7, 0, 50)
    for start in range(9):
        assert (noise(7, start, 20) == whole[start : start + 20]).all()
    assert (whole >= 0).all() and (whole < 1).all()
    assert not np.intersect1d(whole, noise(8, 0, 50)).size
    assert (noise(-1, 0, 3) != noise(1, 0, 3)).all() and noise(2**64 - 1, 5, 3).shape == (3,)


@pytest.mark.parametrize(("t", "p", "k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.7, 0.8, 0), (1.0, 1.0, 3), (1.0, 0.7, 5)])
def test_frequencies_follow_the_logprobs(t: float, p: float, k: int) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -1.0, 3.0]])
    n = 20000
    tokens, logprobs = draw(logits, noise(3, 0, n), t, p, k)
    seen = np.unique(tokens)
    assert np.isclose(np.exp([logprobs[tokens == i][0] for i in seen]).sum(), 1, atol=1e-6)
    for i in seen:
        q = float(np.exp(logprobs[tokens == i][0]))
        assert abs((tokens == i).mean() - q) < 5 * np.sqrt(q * (1 - q) / n)
    if k:
        assert len(seen) <= k


def test_temperature_divides_before_the_softmax() -> None:
    """Logits [2, 0] at 0.6: −0.035, not −0.127 (raw) nor −0.212 (raw / T)."""
    assert np.isclose(log_probabilities(torch.tensor([[2.0, 0.0]]), torch.tensor([0.6]))[0, 0], -0.0351, atol=1e-4)


def test_truncation_keeps_the_fewest_and_renormalises() -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    one = torch.ones(1)
    kept = truncate(logprobs, 0.8 * one - 1e-3, torch.tensor([0])).exp()
    assert torch.allclose(kept, torch.tensor([[0.625, 0.375, 0, 0]]), atol=1e-6)
    assert torch.allclose(truncate(logprobs, one, torch.tensor([3])).exp()[0, 3], torch.zeros(()))
    assert torch.allclose(truncate(logprobs, 1e-6 * one, torch.tensor([0])).exp(), torch.tensor([[1.0, 0, 0, 0]]))
    tied = truncate(torch.zeros(1, 4), one, torch.tensor([2])).exp()
    assert torch.allclose(tied, torch.tensor([[0.5, 0.5, 0, 0]])), "ties go to the lowest index"


def test_greedy_is_certain_and_takes_the_lowest_of_equals() -> None:
    tokens, logprobs = draw(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), noise(0, 0, 8), t=0.0)
    assert (tokens == 1).all() and (logprobs == 0).all()


def test_the_ends_of_the_interval_never_give_an_impossible_token() -> None:
    logits = torch.tensor([[-np.inf, 0.0, 1.0, -np.inf]])
    tokens, logprobs = draw(logits, np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert tokens.tolist() == [1, 2] and np.isfinite(logprobs).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("t", [1.0, 0.0])
def test_logits_that_are_not_finite_show(bad: float, t: float) -> None:
    _, logprobs = draw(torch.tensor([[0.0, bad, 1.0]]), noise(0, 0, 4), t=t)
    assert np.isnan(logprobs).all()


def test_float64_logits_stay_float64() -> None:
    assert log_probabilities(torch.zeros(1, 2, dtype=torch.float64), torch.ones(1)).dtype == torch.float64
    assert log_probabilities(torch.zeros(1, 2, dtype=torch.bfloat16), torch.ones(1)).dtype == torch.float32
