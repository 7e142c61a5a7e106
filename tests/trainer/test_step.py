"""One optimizer step: alignment, normalisation, invariance, measures, and what is skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from prl.layers.layout import PackedLayout
from prl.models.base import ForwardInput
from prl.samples import Batch, Rollout, Sample, concatenate, pack, truncate
from prl.trainer import losses, nonfinite
from prl.trainer.drift import mismatch
from prl.trainer.step import Stepper, inputs, loss_share, route_counts, why_skip
from tests.trainer.helpers import ALONE, LAYERS, bits, config, rollouts, sample, state_of, stepper_of

DPPO = config().trainer.loss


def whole(rs: list[Rollout], *, budget: int = 64, step: int = 1) -> Batch:
    return pack(rs, step=step, budget=budget, ranks=1)[0]


def gradients(batches: list[Batch], **trainer: object) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients summed over the parts of one batch."""
    c = config(**trainer)
    state = state_of(c)
    function = losses.resolve(c.trainer.loss.kind)
    total = 0.0
    for mb in (mb for b in batches for mb in b.micro_batches):
        x = inputs(mb, ALONE.device, replay=True, replay_selections=False)
        logprobs, entropy, _ = state.policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)
        loss, _ = loss_share(x, logprobs, entropy, batches[0].counts, c.trainer.loss, function)
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in state.params.items() if p.grad is not None}


def test_a_token_is_scored_by_the_logits_before_it_at_its_own_temperature() -> None:
    rng = np.random.default_rng(0)
    s = sample(rng, 2, 3)
    s.temperature = np.array([9, 9, 0.5, 1.0, 2.0], np.float32)
    state = state_of(config())
    other = sample(rng, 3, 2)
    batch = whole([Rollout("a", "e", "t", 0, 0, samples=[other]), Rollout("b", "e", "t", 0, 1, samples=[s])])
    (mb,) = batch.micro_batches
    x = inputs(mb, ALONE.device, replay=False, replay_selections=False)
    at = int(mb.lengths[: list(mb.rollout).index(1)].sum())
    mine = (x.rows_M >= at) & (x.rows_M < at + 5)
    assert (x.rows_M[mine] - at).tolist() == [1, 2, 3]
    assert x.labels_M[mine].tolist() == s.tokens[2:5].tolist()
    got = state.policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)[0][mine]

    tokens = torch.from_numpy(s.tokens.astype(np.int64))
    hidden = state.model(ForwardInput(tokens, torch.arange(5), PackedLayout([5]))).hidden_TD
    logits = hidden @ state.model.lm_head_weight.T / torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0])[:, None]
    expected = logits.log_softmax(-1)[1:4].gather(1, tokens[2:5, None])[:, 0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_trainable_first_token_is_refused() -> None:
    (mb,) = whole(rollouts(0, 3)).micro_batches
    mb.sample.trainable[mb.lengths[0]] = True
    with pytest.raises(ValueError, match="first token of a document"):
        inputs(mb, ALONE.device, replay=False, replay_selections=False)


@pytest.mark.parametrize("kind", ["dppo", "gspo"])
@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_loss_and_gradient_do_not_depend_on_the_split(kind: str, normalise: str) -> None:
    rs = rollouts(1, ce=True)
    splits: dict[str, list[Batch]] = {
        "one row": pack(rs, step=1, budget=10_000, ranks=1),
        "small rows": pack(rs, step=1, budget=24, ranks=1),
        "one document a row": pack(rs, step=1, budget=1, ranks=1),
        "three ranks": pack(rs, step=1, budget=24, ranks=3),
        "more ranks than rows": pack(rs, step=1, budget=10_000, ranks=4),
    }
    loss, grads = gradients(splits.pop("one row"), loss={"kind": kind, "normalise": normalise})
    assert loss != 0 and len(grads) > 20
    for name, batches in splits.items():
        other, others = gradients(batches, loss={"kind": kind, "normalise": normalise})
        assert abs(other - loss) < 1e-12, name
        for parameter, g in grads.items():
            torch.testing.assert_close(others[parameter], g, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("normalise", "expected"), [("token", (10 * 1 + 2 * 5) / 12), ("sequence", (1 + 5) / 2)])
def test_normalisation_uses_the_whole_batch(normalise: str, expected: float) -> None:
    """Ten tokens of loss 1 and two of loss 5 on two ranks: a mean of ranks' means would give 3 for both."""
    rng = np.random.default_rng(0)
    rs = [Rollout(str(i), "e", "t", i, 0, samples=[sample(rng, 1, n)]) for i, n in enumerate((10, 2))]
    total = 0.0
    for batch in pack(rs, step=1, budget=12, ranks=2):
        (mb,) = batch.micro_batches
        x = inputs(mb, ALONE.device, replay=False, replay_selections=False)
        value = 1.0 if len(x.rows_M) == 10 else 5.0

        def constant(given: losses.LossInputs, value: float = value) -> losses.LossOutput:
            return losses.LossOutput(torch.full_like(given.logprobs, value))

        config_ = DPPO.model_copy(update={"normalise": normalise, "options": {}})
        zeros = torch.zeros(len(x.rows_M), dtype=torch.float64)
        total += float(loss_share(x, zeros, zeros, batch.counts, config_, constant)[0])
    assert total == pytest.approx(expected, abs=1e-12)


def test_ce_tokens_get_cross_entropy_and_rl_tokens_do_not() -> None:
    batch = whole(rollouts(2, ce=True), budget=10_000)
    (mb,) = batch.micro_batches
    x = inputs(mb, ALONE.device, replay=True, replay_selections=False)
    logprobs, entropy, _ = state_of(config()).policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)

    def one(given: losses.LossInputs) -> losses.LossOutput:
        return losses.LossOutput(torch.ones_like(given.logprobs))

    loss, _ = loss_share(x, logprobs, entropy, batch.counts, DPPO.model_copy(update={"options": {}}), one)
    assert 0 < batch.counts.ce_tokens < len(x.rows_M)
    assert loss.item() == pytest.approx(1 - logprobs[x.ce_N].sum().item() / batch.counts.ce_tokens, abs=1e-12)


def test_measures_against_plain_numpy() -> None:
    c = config()
    stepper = stepper_of(c)
    stepper.state.version = 1
    rs = rollouts(3)
    for s in (s for r in rs[:2] for s in r.samples):  # an update in flight, to the version that this step starts from
        s.versions[s.trainable] = np.arange(s.trainable.sum()) > 0
    newest = sum((s.versions == 1).sum() for r in rs for s in r.samples)
    batch = whole(rs, budget=40)
    parts = []
    for mb in batch.micro_batches:
        x = inputs(mb, ALONE.device, replay=True, replay_selections=False)
        with torch.no_grad():
            logprobs, entropy, counts = stepper.state.policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)
        sampled = np.split(mb.sample.versions, np.cumsum(mb.lengths)[:-1])
        alone = np.array([set(versions.tolist()) <= {-1, 1} for versions in sampled])
        parts.append((logprobs.numpy(), entropy.numpy(), x.old_logprobs_N.numpy(), alone[x.documents_N.numpy()]))
    new, entropy, old, own = (np.concatenate(p).astype(np.float64) for p in zip(*parts, strict=True))
    d = new - old
    kl = np.exp(d) - 1 - d
    m = stepper(batch).metrics
    assert m["mismatch_kl"] == pytest.approx(kl.mean(), rel=1e-9)
    assert m["mismatch_kl_own"] == pytest.approx(kl[own == 1].mean(), rel=1e-9)
    assert m["own_tokens"] == own.sum() and 0 < m["own_tokens"] < newest < len(d)
    assert m["mismatch"]["p90"] == pytest.approx(np.quantile(abs(d), 0.9), rel=1e-9)
    assert m["mismatch"]["max"] == pytest.approx(abs(d).max(), rel=1e-9)
    assert m["ratio_min"] == pytest.approx(np.exp(d.min()), rel=1e-9)
    assert m["ratio_max"] == pytest.approx(np.exp(d.max()), rel=1e-9)
    assert m["entropy"] == pytest.approx(entropy.mean(), rel=1e-9)
    assert m["tokens"] == sum(r.n_tokens for r in rs) and m["trainable_tokens"] == sum(r.n_trainable for r in rs)
    assert np.sum(m["expert_counts"]) == m["tokens"] * LAYERS * 2
    assert (m["unrouted_fraction"], m["replayed_fraction"], m["recaptured_fraction"]) == (0, 1, 0)


def test_mismatch_is_neither_clamped_nor_cancelled() -> None:
    d = torch.tensor([1e-9, 30.0, -60.0])
    assert mismatch(d).tolist() == pytest.approx([5e-19, np.exp(30.0) - 31, 59.0], rel=1e-6)


def test_rows_without_the_engines_route_are_counted_last_tokens_aside() -> None:
    rng = np.random.default_rng(0)
    first, tool, second = sample(rng, 2, 3), Sample.of_prompt([1, 2]), sample(rng, 1, 2)
    first.routed[:] = True  # the turn's last token got its row from the next turn
    s = concatenate([first, tool, second])
    s.routed[5:7] = False  # tool output without routes
    s.routed[-1] = False
    (mb,) = whole([Rollout("a", "e", "t", 0, 0, samples=[s])]).micro_batches
    got = route_counts(mb, replayed=True)
    assert got == {"tokens": 10, "rows": 9, "unrouted": 2, "replayed": 7, "recaptured": 1}
    assert route_counts(mb, replayed=False)["replayed"] == 0


def test_selections_are_replayed_or_their_flips_are_counted() -> None:
    """On a tiny model of DSA: what its own forward selected does not flip; other keys do, and are obeyed when replayed."""
    architecture = yaml.safe_load((Path(__file__).parents[1] / "main_job" / "tiny.yaml").read_text())["model"]["architecture"]
    c = config()
    c = c.model_copy(update={"model": c.model.model_copy(update={"architecture": architecture})})
    stepper = stepper_of(c)
    rs = rollouts(3)
    for s in (s for r in rs for s in r.samples):
        s.routes, s.routed = None, np.zeros(len(s), np.bool_)
        s.selections = np.full((len(s), 2, 8), -1, np.int32)
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        own = ForwardInput(tokens, torch.arange(len(s)), PackedLayout([len(s)]), record_selections=True)
        with torch.no_grad():
            recorded = stepper.state.model(own).selections_TAS
        assert recorded is not None
        s.selections[:-1] = recorded.numpy()[:-1]  # the engine has no row of the last token
    batch = whole(rs, budget=40)

    def scores(replay: bool) -> Tensor:
        x = inputs(batch.micro_batches[0], ALONE.device, replay=False, replay_selections=replay)
        with torch.no_grad():
            return stepper.state.policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)[0]

    assert torch.equal(scores(True), scores(False))
    s = batch.micro_batches[0].sample
    assert s.selections is not None
    row = int(np.flatnonzero(batch.micro_batches[0].positions == 3)[0])
    s.selections[row, 1] = -1
    s.selections[row, 1, 0] = 0  # of four keys, the first alone
    assert (scores(True) - scores(False)).abs().max() > 1e-9
    total = sum(
        int((mb.sample.selections >= 0).any(-1).sum()) for mb in batch.micro_batches if mb.sample.selections is not None
    )
    replaying = Stepper(state_of(c), c.trainer.model_copy(update={"replay_selections": True}), 1)
    assert "selection_flip_fraction" not in replaying(batch).metrics
    metrics = stepper(batch).metrics
    assert metrics["selection_flip_fraction"] == 1 / total and total == 2 * metrics["rows"]


def test_replay_changes_the_forward_and_can_be_turned_off() -> None:
    batch = whole(rollouts(4))
    on = stepper_of(config())(batch)
    off = stepper_of(config(router_replay=False))(batch)
    assert on.loss != off.loss and off.metrics["replayed_fraction"] == 0


def test_a_filler_row_trains_and_counts_nothing() -> None:
    batches = pack(rollouts(5, 2), step=1, budget=10_000, ranks=2)
    filler = next(b for b in batches if b.micro_batches[0].n_tokens == 1)
    stepper = stepper_of(config())
    before = bits(stepper.state)
    report = stepper(filler)
    assert report.loss == 0 and report.grad_norm == 0 and report.metrics["tokens"] == 0
    assert np.sum(report.metrics["expert_counts"]) == 0 and not report.skipped
    moved = {n for n, b in bits(stepper.state).items() if b != before[n]}
    assert all(n.endswith(".step") or n == "counters" for n in moved)


def poison(batch: Batch, field: str, value: float) -> Batch:
    mb = batch.micro_batches[-1]
    a = getattr(mb.sample, field).copy()
    a[np.flatnonzero(mb.sample.trainable)[-1]] = value
    return replace(batch, micro_batches=[*batch.micro_batches[:-1], replace(mb, sample=replace(mb.sample, **{field: a}))])


@pytest.mark.parametrize(("field", "value"), [("advantages", np.nan), ("advantages", np.inf), ("temperature", 0.0)])
def test_a_step_that_is_not_finite_is_skipped_kept_and_limited(tmp_path: Path, field: str, value: float) -> None:
    stepper = stepper_of(config(max_nonfinite=1))
    stepper(whole(rollouts(6)))
    before = bits(stepper.state)
    bad = poison(whole(rollouts(7), step=2), field, value)
    report = stepper(bad)
    assert "not finite" in report.skipped or "the loss is" in report.skipped or "norm" in report.skipped
    moved = {n for n, b in bits(stepper.state).items() if b != before[n]}
    assert moved == {"counters"} and stepper.state.skipped == 1 and stepper.state.step == 2

    guard = nonfinite.Guard(tmp_path / "nonfinite", 1)
    path = guard.dump(bad, 0, report.skipped)
    guard.check(stepper.state.skipped)
    with pytest.raises(nonfinite.NonFiniteError, match="max_nonfinite allows 1"):
        guard.check(2)
    kept, reason = nonfinite.load(path)
    assert reason == report.skipped
    assert stepper(kept).skipped == report.skipped, "the dump replays"
    good = stepper(whole(rollouts(8), step=3))
    assert not good.skipped and np.isfinite(good.grad_norm)


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped() -> None:
    """Both of NaN's ways in must be watched: here the loss and every logprob are finite."""
    stepper = stepper_of(config())
    head = stepper.state.params["lm_head.weight"]
    head.register_hook(lambda grad: torch.full_like(grad, torch.nan))
    before = head.detach().clone()
    report = stepper(whole(rollouts(6)))
    assert report.skipped == "the gradient's norm is nan" and np.isfinite(report.loss)
    assert torch.equal(head, before)


def test_why_skip_names_each_reason() -> None:
    assert why_skip(1.0, 1.0, 0) == ""
    assert why_skip(np.nan, np.inf, 2) == "2 trainer logprobs are not finite; the loss is nan; the gradient's norm is inf"
    assert why_skip(-np.inf, 1.0, 0) == "the loss is -inf"


def test_lr_0_leaves_every_bit_alone() -> None:
    stepper = stepper_of(config(optim={"lr": 0.0, "weight_decay": 0.1}))
    with torch.no_grad():
        next(iter(stepper.state.params.values())).view(-1)[:4] = -0.0
    before = bits(stepper.state)
    report = stepper(whole(rollouts(9)))
    assert report.grad_norm > 0 and report.metrics["lr"] == 0
    assert {n for n, b in bits(stepper.state).items() if b != before[n]} == {"counters"}


def test_frozen_parameters_get_no_gradient_and_stay() -> None:
    c = config()
    c = c.model_copy(update={"model": c.model.model_copy(update={"frozen": [r".*\.gate\..*", r"lm_head\.weight"]})})
    stepper = stepper_of(c)
    before = {n: p.clone() for n, p in stepper.state.model.named_parameters()}
    stepper(whole(rollouts(10)))
    same = {n for n, p in stepper.state.model.named_parameters() if torch.equal(p, before[n])}
    assert same == {n for n in before if ".gate." in n or n == "lm_head.weight"}


def test_correction_bias_follows_true_counts_when_configured() -> None:
    for rate in (0.0, 0.125):
        stepper = stepper_of(config(bias_update=rate))
        counts = np.array(stepper(whole(rollouts(11))).metrics["expert_counts"])
        expected = rate * np.sign(counts.mean(1, keepdims=True) - counts)
        assert np.array_equal(torch.stack(stepper.state.biases).numpy(), expected)


def test_bfloat16_keeps_float32_masters_and_moments() -> None:
    stepper = stepper_of(config("bfloat16", optim={"lr": 1e-5}))
    state = stepper.state
    before = {n: p.clone() for n, p in state.params.items()}
    for k in range(1, 3):
        assert np.isfinite(stepper(whole(rollouts(k), step=k)).loss)
    with state.computing() as policy:
        assert policy.model.lm_head_weight.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in state.params.values())
    assert all(t.dtype == torch.float32 for p in state.params.values() for t in state.optimizer.state[p].values())
    published = dict(state.tensors())
    assert published["lm_head.weight"].dtype == torch.bfloat16
    # Updates under bfloat16's resolution add up in the masters.
    head = state.params["lm_head.weight"]
    assert 0 < (head - before["lm_head.weight"]).abs().max().item() < 1e-4


def test_truncation_keeps_alignment_through_the_step() -> None:
    """A cut sample scores its remaining tokens as before the cut: causality, and no field left behind."""
    rng = np.random.default_rng(3)
    s = sample(rng, 3, 6)
    state = state_of(config())

    def scores(part: Sample) -> Tensor:
        (mb,) = whole([Rollout("a", "e", "t", 0, 0, samples=[part])]).micro_batches
        x = inputs(mb, ALONE.device, replay=True, replay_selections=False)
        return state.policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)[0]

    torch.testing.assert_close(scores(truncate(s, 6)), scores(s)[:3], rtol=0, atol=1e-12)


def test_sums_of_no_rl_tokens_give_no_mismatch() -> None:
    rng = np.random.default_rng(0)
    rs = [Rollout("a", "e", "t", 0, 0, samples=[sample(rng, 2, 3, stream=1)])]
    m = stepper_of(config())(whole(rs)).metrics
    assert "mismatch_kl" not in m and m["entropy"] > 0
