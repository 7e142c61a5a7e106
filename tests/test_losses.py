"""Losses against values and gradients worked out from the formulas in plain Python floats (float64), token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from prl.trainer.losses import LOSSES, MAX_LOG_RATIO, LossInputs, LossOutput, ratio, resolve, total, weights

# (t, i, A): on-policy, ratio up and down with either sign, over every clip bound, small probabilities, zero advantage
TOKENS = [
    (-1.0, -1.0, 1.0),
    (-0.3, -1.0, 0.7),
    (-0.3, -1.0, -0.7),
    (-2.5, -1.0, 0.9),
    (-2.5, -1.0, -0.9),
    (-0.05, -0.5, 1.3),
    (-3.0, -6.0, -0.4),
    (-9.0, -13.0, 0.5),
    (-13.0, -9.0, -0.5),
    (-0.9, -1.0, 0.0),
    (-0.4999, -0.5, 2.0),
]


def inputs_of(
    tokens: list[tuple[float, float, float]],
    *,
    documents: list[int] | None = None,
    mask: list[bool] | None = None,
    w: list[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    t, i, a = (torch.tensor([x[k] for x in tokens], dtype=dtype) for k in range(3))
    n = len(tokens)
    m = torch.tensor(mask if mask is not None else [True] * n)
    return LossInputs(
        logprobs=t.requires_grad_(),
        old_logprobs=i,
        advantages=a,
        mask=m,
        documents=torch.tensor(documents if documents is not None else [0] * n),
        weights=torch.where(m, torch.tensor(w if w is not None else [1.0] * n, dtype=dtype), 0.0),
        entropy=torch.full((n,), 0.5, dtype=dtype),
    )


def test_inputs_are_zero_where_masked_out() -> None:
    t = torch.tensor([-1.0, -math.inf], requires_grad=True)
    nan, mask = torch.full((2,), math.nan), torch.tensor([True, False])
    inputs = LossInputs(t, nan, nan, mask, torch.tensor([0, 0]), nan, nan)
    for values in (inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.weights, inputs.entropy):
        assert values[1] == 0
    (grad,) = torch.autograd.grad(inputs.logprobs.square().sum(), t)
    assert grad.tolist() == [-2.0, 0.0]


def value_and_grad(inputs: LossInputs, loss: Callable[..., LossOutput], **options: float) -> tuple[float, list[float]]:
    value = total(inputs, loss(inputs, **options))
    (grad,) = torch.autograd.grad(value, inputs.logprobs)
    return value.item(), grad.tolist()


# By hand, per token: (loss, d loss / d t).


def dppo(t: float, i: float, a: float) -> tuple[float, float]:
    r, dp, d = math.exp(t - i), math.exp(t) - math.exp(i), t - i
    if (a > 0 and dp > 0.2) or (a <= 0 and dp < -0.2):
        return 1e-3 * d * d, 2e-3 * d
    return -a * r + 1e-3 * d * d, -a * r + 2e-3 * d


def grpo(t: float, i: float, a: float) -> tuple[float, float]:
    r = math.exp(t - i)
    if a >= 0:
        return (-a * r, -a * r) if r <= 1.28 else (-a * 1.28, 0.0)
    if r < 0.8:
        return -a * 0.8, 0.0
    return (-a * r, -a * r) if r < 3 else (-3 * a, 0.0)


def cispo(t: float, i: float, a: float) -> tuple[float, float]:
    c = min(math.exp(t - i), 5.0)
    return -c * a * t, -c * a


def tis(t: float, i: float, a: float) -> tuple[float, float]:
    c = min(math.exp(t - i), 2.0)
    return -c * a * t, -c * a


def icepop(t: float, i: float, a: float) -> tuple[float, float]:
    r = math.exp(t - i)
    return (-a * r, -a * r) if 0.5 <= r <= 5 else (0.0, 0.0)


def ce(t: float, i: float, a: float) -> tuple[float, float]:
    return -t, -1.0


GOLDEN = {"dppo": dppo, "grpo": grpo, "cispo": cispo, "tis": tis, "icepop": icepop, "ce": ce}


@pytest.mark.parametrize("kind", GOLDEN)
@pytest.mark.parametrize("token", TOKENS)
def test_token_losses_equal_the_formulas(kind: str, token: tuple[float, float, float]) -> None:
    value, grad = value_and_grad(inputs_of([token]), resolve(kind))
    want, want_grad = GOLDEN[kind](*token)
    assert value == pytest.approx(want, rel=1e-12, abs=1e-15)
    assert grad == pytest.approx([want_grad], rel=1e-12, abs=1e-15)


def test_the_cases_reach_both_sides_of_every_branch() -> None:
    for kind, names in {
        "dppo": ("dropped_high", "dropped_low"),
        "grpo": ("clipped", "dual_clipped"),
        "cispo": ("clipped",),
        "icepop": ("dropped_low", "dropped_high"),
    }.items():
        metrics = resolve(kind)(inputs_of(TOKENS)).metrics
        for name in names:
            assert 0 < int(metrics[name]) < len(TOKENS), (kind, name)


def test_literal_numbers() -> None:
    """exp(0.7) = 2.013752707470477 and so on, by pocket calculator."""
    up = inputs_of([(-0.3, -1.0, -0.7)])
    assert total(up, resolve("dppo")(up)).item() == pytest.approx(0.7 * 2.013752707470477 + 0.00049, abs=1e-12)
    small = inputs_of([(math.log(1e-2), math.log(1e-6), 1.0)])  # ratio 1e4, but probability moved by less than 0.2: kept
    assert total(small, resolve("dppo")(small)).item() == pytest.approx(-1e4 + 1e-3 * math.log(1e4) ** 2, rel=1e-9)
    clipped = inputs_of([(-0.3, -1.0, 1.0)])
    assert total(clipped, resolve("grpo")(clipped)).item() == pytest.approx(-1.28)
    assert total(clipped, resolve("grpo")(clipped, clip_high=2.0)).item() == pytest.approx(-2.013752707470477)
    dual = inputs_of([(0.0, -2.0, -1.0)])
    assert total(dual, resolve("grpo")(dual)).item() == pytest.approx(3.0)
    assert total(dual, resolve("grpo")(dual, dual_clip=0)).item() == pytest.approx(math.exp(2))


def test_gspo_uses_the_mean_ratio_of_each_document() -> None:
    tokens = [(-1.0, -1.2, 1.0), (-0.5, -0.4, 1.0), (-2.0, -1.0, -0.5), (-1.0, -1.0, -0.5), (-3.0, -4.0, -0.5)]
    documents, w = [0, 0, 1, 1, 1], [0.25, 0.25, 1 / 6, 1 / 6, 1 / 6]  # sequence-mean over two rollouts
    s0, s1 = math.exp((0.2 - 0.1) / 2), math.exp((-1.0 + 0.0 + 1.0) / 3)
    inside = {"clip_low": 0.2, "clip_high": 0.2}
    value, grad = value_and_grad(inputs_of(tokens, documents=documents, w=w), resolve("gspo"), **inside)
    assert value == pytest.approx(-0.5 * (s0 * 1.0 + s1 * -0.5), rel=1e-12)
    # d/dt_j of -(1/2) s A = -(1/2) s A / |y|
    assert grad == pytest.approx([-0.25 * s0] * 2 + [0.5 * s1 * 0.5 / 3] * 3, rel=1e-12)
    tight = {"clip_low": 0.01, "clip_high": 0.01}
    value, grad = value_and_grad(inputs_of(tokens, documents=documents, w=w), resolve("gspo"), **tight)
    assert value == pytest.approx(-0.5 * (1.01 * 1.0 + s1 * -0.5), rel=1e-12)
    assert grad == pytest.approx([0.0] * 2 + [0.5 * s1 * 0.5 / 3] * 3, rel=1e-12)


def test_document_masks_drop_whole_documents_by_sum_and_by_mean() -> None:
    tokens = [(-1.0, -1.3, 1.0)] * 4 + [(-1.0, -2.0, 1.0)]  # document 0: sum 1.2, mean 0.3; document 1: sum and mean 1.0
    documents = [0, 0, 0, 0, 1]

    def kept(**bounds: float) -> list[bool]:
        _, grad = value_and_grad(inputs_of(tokens, documents=documents), resolve("tis"), **bounds)
        return [grad[0] != 0, grad[4] != 0]

    assert kept() == [True, True]
    assert kept(sequence_high=math.exp(1.1)) == [False, True]
    assert kept(geometric_high=math.exp(0.5)) == [True, False]
    assert kept(geometric_low=math.exp(0.5)) == [False, True]
    assert kept(sequence_high=math.exp(1.1), geometric_high=math.exp(0.5)) == [False, False]
    out = resolve("tis")(inputs_of(tokens, documents=documents), sequence_high=math.exp(1.1))
    assert int(out.metrics["masked_sequence"]) == 4
    # the pull back to the sampler stays: 2 kl_tau d
    _, grad = value_and_grad(inputs_of(tokens, documents=documents), resolve("dppo"), geometric_high=0.5)
    assert grad == pytest.approx([2e-3 * 0.3] * 4 + [2e-3 * 1.0])


def test_documents_without_a_token_that_the_loss_reads_may_be_absent() -> None:
    """The rows of a micro-batch are those that a loss reads; document 7 may be alone among them."""
    want, grad = value_and_grad(inputs_of([TOKENS[1]]), resolve("gspo"), sequence_high=9.0)
    assert value_and_grad(inputs_of([TOKENS[1]], documents=[7]), resolve("gspo"), sequence_high=9.0) == (want, grad)


def test_entropy_bonus() -> None:
    inputs = inputs_of([(-1.0, -1.0, 0.0)])
    assert total(inputs, resolve("ce")(inputs, entropy_tau=0.1)).item() == pytest.approx(1.0 - 0.05)


@pytest.mark.parametrize("kind", LOSSES)
def test_ratios_never_overflow(kind: str) -> None:
    extreme = [(-1e-3, -300.0, 1.0), (-1e-3, -300.0, -1.0), (-300.0, -1e-3, 1.0), (-300.0, -1e-3, -1.0)]
    inputs = inputs_of(extreme, dtype=torch.float32)
    value, grad = value_and_grad(inputs, resolve(kind))
    assert math.isfinite(value) and all(map(math.isfinite, grad))
    bounds = [math.exp(x) for x in (MAX_LOG_RATIO, MAX_LOG_RATIO, -MAX_LOG_RATIO, -MAX_LOG_RATIO)]
    assert ratio(inputs.log_ratio.detach()).tolist() == pytest.approx(bounds)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_masked_out_reaches_neither_value_nor_gradient(kind: str, bad: float) -> None:
    good, poison = TOKENS[:3], (bad, bad, bad)
    options = {"geometric_high": 1e6, "entropy_tau": 0.1}
    want, want_grad = value_and_grad(inputs_of(good), resolve(kind), **options)
    inputs = inputs_of([good[0], poison, *good[1:]], mask=[True, False, True, True], w=[1.0, bad, 1.0, 1.0])
    value, grad = value_and_grad(inputs, resolve(kind), **options)
    assert value == pytest.approx(want, rel=1e-12)
    assert grad == pytest.approx([want_grad[0], 0.0, *want_grad[1:]], rel=1e-12)


@pytest.mark.parametrize(("kind", "place"), [(k, p) for k in LOSSES for p in range(3) if k != "ce" or p == 0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_hides_what_is_not_finite(kind: str, place: int, bad: float) -> None:
    """Also where a bound would drop the token: every kind has one of these four tokens outside its bounds."""
    for token in (TOKENS[0], TOKENS[4], TOKENS[6], TOKENS[7]):
        poisoned = list(token)
        poisoned[place] = bad
        inputs = inputs_of([(-1.0, -1.0, 1.0), (poisoned[0], poisoned[1], poisoned[2])])
        out = resolve(kind)(inputs, sequence_low=0.9, sequence_high=1.1)
        assert not total(inputs, out).isfinite()


def batch() -> tuple[list[tuple[float, float, float]], list[int], list[bool], list[int]]:
    """Three rollouts of 5, 3 + 4 (two documents) and 2 tokens; some untrainable. Returns tokens, document, mask, rollout."""
    generator = torch.Generator().manual_seed(5)
    lengths, rollout_of = [5, 3, 4, 2], [0, 1, 1, 2]
    tokens, documents, mask, rollouts = [], [], [], []
    for k, (n, r) in enumerate(zip(lengths, rollout_of, strict=True)):
        for j in range(n):
            t, i = (-3 * torch.rand(2, generator=generator, dtype=torch.float64)).tolist()
            tokens.append((t, i, [0.8, -0.6, 0.3][r]))
            documents.append(k)
            mask.append(j > 0)
            rollouts.append(r)
    return tokens, documents, mask, rollouts


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradient_depend_on_the_batch_alone(kind: str, normalise: str) -> None:
    """Every split of the documents into micro-batches, in any order, gives the same loss and gradient."""
    tokens, documents, mask, rollouts = batch()
    trainable = [sum(m and r == k for m, r in zip(mask, rollouts, strict=True)) for k in range(3)]
    n_tokens = sum(mask)

    def run(split: list[list[int]]) -> tuple[float, list[float]]:
        value, grads = 0.0, [0.0] * len(tokens)
        for docs in split:
            rows = [j for d in docs for j, k in enumerate(documents) if k == d]
            local = [docs.index(documents[j]) for j in rows]
            part = inputs_of([tokens[j] for j in rows], documents=local, mask=[mask[j] for j in rows])
            w = weights(
                part.mask,
                part.documents,
                torch.tensor([trainable[[0, 1, 1, 2][d]] for d in docs]),
                normalise=normalise,  # type: ignore[arg-type]
                n_tokens=n_tokens,
                n_rollouts=3,
                constant_tokens=16,
                dtype=torch.float64,
            )
            part = LossInputs(part.logprobs, part.old_logprobs, part.advantages, part.mask, part.documents, w, part.entropy)
            v, g = value_and_grad(part, resolve(kind), sequence_low=0.05, sequence_high=20.0)
            value += v
            for j, x in zip(rows, g, strict=True):
                grads[j] = x
        return value, grads

    want, want_grads = run([[0, 1, 2, 3]])
    assert any(want_grads)
    for split in ([[0], [1], [2], [3]], [[3, 1], [2, 0]], [[2, 3, 0, 1]], [[1], [3, 2, 0]]):
        value, grads = run(split)
        assert value == pytest.approx(want, rel=1e-12)
        assert grads == pytest.approx(want_grads, rel=1e-12, abs=1e-18)


def test_global_counts_not_means_of_means() -> None:
    """Two ranks, 10 tokens of loss 1 and 2 tokens of loss 5: 20 / 12, not 3; sequence-mean: 3."""

    def rank(n: int, loss: float, normalise: str) -> float:
        mask = torch.ones(n, dtype=torch.bool)
        docs = torch.zeros(n, dtype=torch.int64)
        w = weights(mask, docs, torch.tensor([n]), normalise=normalise, n_tokens=12, n_rollouts=2, dtype=torch.float64)  # type: ignore[arg-type]
        part = inputs_of([(-loss, -loss, 0.0)] * n)
        part = LossInputs(part.logprobs, part.old_logprobs, part.advantages, mask, docs, w, part.entropy)
        return total(part, resolve("ce")(part)).item()

    assert rank(10, 1.0, "token") + rank(2, 5.0, "token") == pytest.approx(20 / 12)
    assert rank(10, 1.0, "sequence") + rank(2, 5.0, "sequence") == pytest.approx(3.0)


def test_sequence_weights_are_per_rollout_over_its_documents() -> None:
    mask = torch.tensor([True, True, False, True, True, True])
    documents = torch.tensor([0, 0, 0, 1, 2, 2])  # documents 0 and 1 are one rollout of 3 trainable tokens
    w = weights(mask, documents, torch.tensor([3, 3, 2]), normalise="sequence", n_tokens=5, n_rollouts=2)
    assert w.tolist() == pytest.approx([1 / 6, 1 / 6, 0, 1 / 6, 1 / 4, 1 / 4])


def my_loss(inputs: LossInputs, scale: float = 1.0) -> LossOutput:
    return LossOutput(scale * inputs.log_ratio)


def careless_loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(inputs.logprobs * inputs.advantages / inputs.mask)


def test_a_users_own_loss_may_give_anything_where_masked_out() -> None:
    inputs = inputs_of([(-1.0, -1.0, 2.0), (-math.inf, 0.0, math.nan)], mask=[True, False])
    assert total(inputs, resolve(f"{__name__}:careless_loss")(inputs)).item() == -2.0


def test_a_users_own_loss_by_import_path() -> None:
    inputs = inputs_of([(-1.0, -1.5, 1.0)])
    assert total(inputs, resolve(f"{__name__}:my_loss")(inputs, scale=2.0)).item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"trainer.loss.kind 'dpo'.*did you mean 'dppo'"):
        resolve("dpo")
    with pytest.raises(ValueError, match=r"trainer.loss.kind 'nowhere:f': cannot be imported"):
        resolve("nowhere:f")
