"""The fused LM head against plain torch."""

import pytest
import torch

from prl.kernels import lm_head
from prl.kernels.lm_head import logprobs

T, D, V = 23, 6, 11


def inputs(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, dtype=dtype, generator=g, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, generator=g, requires_grad=True)
    labels = torch.randint(0, V, (T,), generator=g)
    labels[[3, 9, 22]] = -100
    return hidden, weight, labels, torch.rand(T, generator=g) + 0.5


def plain(hidden, weight, labels, temperature):
    log_p = ((hidden @ weight.T) / temperature[:, None]).log_softmax(-1)
    kept = labels != -100
    logprob = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(kept, logprob, 0), torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0)


@pytest.mark.parametrize("chunk", [1, 4, 20, 4096])
@pytest.mark.parametrize("of", ["logprob", "entropy", "both"])
def test_values_and_gradients_equal_plain_torch_for_every_chunk(chunk, of):
    hidden, weight, labels, temperature = inputs()
    g_logprob, g_entropy = torch.randn(2, T, dtype=torch.float64)
    results = []
    for f in (lambda *a: logprobs(*a, chunk=chunk), plain):
        logprob, entropy = f(hidden, weight, labels, temperature)
        loss = (logprob * g_logprob).sum() * (of != "entropy") + (entropy * g_entropy).sum() * (of != "logprob")
        results.append([logprob, entropy, *torch.autograd.grad(loss, (hidden, weight))])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    hidden, weight, labels, temperature = inputs()
    assert torch.autograd.gradcheck(lambda h, w: logprobs(h, w, labels, temperature, chunk=5), (hidden, weight))


def test_ignored_rows_give_zero_and_no_gradient_even_where_they_are_not_finite():
    hidden, weight, labels, temperature = inputs()
    with torch.no_grad():
        hidden[9] = torch.nan
    logprob, entropy = logprobs(hidden, weight, labels, temperature, chunk=4)
    (logprob.sum() + entropy.sum()).backward()
    assert logprob[[3, 9, 22]].eq(0).all() and entropy[[3, 9, 22]].eq(0).all()
    assert hidden.grad[[3, 9, 22]].eq(0).all() and hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_nothing_to_score():
    hidden, weight, labels, temperature = inputs()
    logprob, entropy = logprobs(hidden, weight, torch.full_like(labels, -100), temperature, chunk=4)
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad.eq(0).all() and weight.grad.eq(0).all()


def test_not_finite_is_not_hidden():
    hidden, weight, labels, temperature = inputs()
    with torch.no_grad():
        hidden[5, 2] = torch.nan
    logprob, entropy = logprobs(hidden, weight, labels, temperature, chunk=4)
    assert logprob[5].isnan() and entropy[5].isnan()


def test_probabilities_that_underflow():
    hidden = torch.tensor([[1e4, 0.0]], requires_grad=True)
    weight = torch.eye(2, requires_grad=True)
    logprob, entropy = logprobs(hidden, weight, torch.tensor([0]), 1.0, chunk=4)
    assert logprob.item() == 0 and entropy.item() == 0
    (logprob + entropy).sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_results_are_float32_or_wider(dtype, wide):
    hidden, weight, labels, temperature = inputs(dtype)
    logprob, entropy = logprobs(hidden, weight, labels, temperature, chunk=8)
    assert logprob.dtype == entropy.dtype == wide
    expected = plain(hidden.to(wide), weight.to(wide), labels, temperature.to(wide))
    torch.testing.assert_close((logprob, entropy), expected, rtol=1e-5, atol=1e-6)
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype


def test_all_logits_never_exist(monkeypatch):
    sizes, compute = [], lm_head._logits_reference

    def spy(hidden, weight):
        sizes.append(len(hidden) * len(weight))
        return compute(hidden, weight)

    monkeypatch.setattr(lm_head, "_logits_reference", spy)
    monkeypatch.setenv("PRL_KERNELS", "reference")
    hidden = torch.randn(400, 4, requires_grad=True)
    weight = torch.randn(300, 4, requires_grad=True)
    logprob, entropy = logprobs(hidden, weight, torch.zeros(400, dtype=torch.long), 1.0, chunk=16)
    (logprob.sum() + entropy.sum()).backward()
    assert sizes == [16 * 300] * 50
