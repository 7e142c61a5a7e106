"""What backward computes again: the same bits, the same experts, nothing counted or sent twice, and less memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from prl.config.mesh import resolve
from prl.distributed.expert import AllToAll
from prl.distributed.mesh import lay_out
from prl.layers import router
from prl.layers.dsa import Indexer
from prl.layers.moe import Experts
from prl.models.recompute import TARGETS
from prl.samples import pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper, inputs
from tests.distributed.ranks import Ranks
from tests.trainer import helpers, invariance
from tests.trainer.helpers import bits, rollouts
from tests.trainer.invariance import Case

KINDS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "all parts": {"recompute": "selective", "recompute_targets": list(TARGETS)},
    **{t: {"recompute": "selective", "recompute_targets": [t]} for t in TARGETS},
}

ADAPTED = {"rank": 3, "alpha": 6.0, "targets": [r"model\.layers\..*"]}


def glm_5(dtype: str, **trainer: Any) -> Stepper:
    c = Case(dtype=dtype, trainer=trainer).config()
    return Stepper(TrainState(c, c.trainer.optim, helpers.ALONE), c.trainer, 3)


def glm_45(dtype: str, **trainer: Any) -> Stepper:
    return helpers.stepper_of(helpers.config(dtype, **trainer))


def trained(stepper: Stepper, replay: bool) -> tuple[dict[str, bytes], list[Any]]:
    """The state after two steps and what the steps said, seconds and memory aside."""
    said = []
    stepper.config = stepper.config.model_copy(update={"router_replay": replay, "replay_selections": replay})
    glm_5 = stepper.state.spec.architecture == "glm_moe_dsa"
    for step in (1, 2):
        rs = invariance.rollouts(step, 8, "random") if glm_5 else rollouts(step, 8)
        report = stepper(pack(rs, step=step, budget=48, ranks=1)[0])
        said.append({k: v for k, v in report.metrics.items() if k not in ("time", "tokens_per_s", "rss_mb")})
    return bits(stepper.state), said


def test_adapters_train_the_same_bits_too() -> None:
    expected = trained(glm_45("bfloat16", lora=ADAPTED), True)
    for kind in ("full", "all parts"):
        assert trained(glm_45("bfloat16", lora=ADAPTED, **KINDS[kind]), True) == expected, kind


@pytest.mark.parametrize("make", [glm_5, glm_45])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_every_bit_and_every_count_stays(make: Any, dtype: str) -> None:
    expected = trained(make(dtype), True)
    for kind in KINDS.values():
        assert trained(make(dtype, **kind), True) == expected, kind


@pytest.mark.parametrize("kind", KINDS)
def test_less_is_kept(kind: str) -> None:
    """Bytes that autograd keeps over a forward."""

    def kept(**trainer: Any) -> int:
        stepper = glm_5("float32", **trainer)
        batch = pack(invariance.rollouts(1, 8, "random"), step=1, budget=256, ranks=1)[0]
        found: dict[int, int] = {}

        def pack_(t: Tensor) -> Tensor:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = inputs(batch.micro_batches[0], torch.device("cpu"), replay=True, replay_selections=True)
        with torch.autograd.graph.saved_tensors_hooks(pack_, lambda t: t):
            out = stepper.state.policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)
        del out
        return sum(found.values())

    saved = 1 - kept(**KINDS[kind]) / kept()
    print(f"{kind}: {saved:.0%} less")
    assert saved > 0


def test_the_indexers_choice_is_kept_for_layers_that_read_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers 0 and 1 choose, layer 2 reads what layer 1 chose; those that choose do so again."""
    stepper = glm_5("float32", recompute="full")
    chosen: list[list[weakref.ref[Tensor]]] = []
    choose = Indexer.forward

    def spy(*args: Any) -> Any:
        selection = choose(*args)
        chosen.append([weakref.ref(t) for t in selection.kept if t.shape[-1] > stepper.state.spec.index_topk])
        return selection

    monkeypatch.setattr(Indexer, "forward", spy)
    batch = pack(invariance.rollouts(1, 8, "random"), step=1, budget=256, ranks=1)[0]
    x = inputs(batch.micro_batches[0], torch.device("cpu"), replay=True, replay_selections=False)
    out = stepper.state.policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)
    first, second = chosen
    assert first and second and [r() for r in first] == [None] * len(first) and None not in [r() for r in second]
    del out


@pytest.mark.parametrize("tied", [False, True])
def test_experts_are_chosen_once(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own choice; scores that come out a little different each time, as of kernels that add in any order."""
    stepper = glm_45("float64", router_replay=False, recompute="full", pack_tokens=10_000)
    noise = torch.Generator().manual_seed(0)
    chosen: list[Tensor] = []
    logits, route = router.router_logits, router.route

    def noisy(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        exact = logits(x_TD, weight_ED)
        return exact + 0.1 * torch.randn(exact.shape, generator=noise, dtype=exact.dtype)

    def spy(*args: Any, **kwargs: Any) -> Any:
        chosen.append((out := route(*args, **kwargs)).ids_TK)
        return out

    if tied:
        for name, p in stepper.state.params.items():
            if ".gate." in name:
                p.data.zero_()
    else:
        monkeypatch.setattr(router, "router_logits", noisy)
    monkeypatch.setattr(router, "route", spy)
    report = stepper(pack(rollouts(1, 12), step=1, budget=10_000, ranks=1)[0])
    first, again = chosen[: helpers.LAYERS], chosen[helpers.LAYERS :]
    assert len(again) == helpers.LAYERS
    for a, b in zip(first, reversed(again), strict=True):
        assert torch.equal(a, b)
    assert sum(map(sum, report.metrics["expert_counts"])) == report.metrics["tokens"] * helpers.TOP_K * helpers.LAYERS


@pytest.mark.parametrize(("kind", "times"), [("full", 2), ("all parts", 1)])
def test_parts_route_and_send_once(kind: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    dispatch = Experts.forward

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return dispatch(*args)

    monkeypatch.setattr(Experts, "forward", counted)
    glm_45("float64", pack_tokens=10_000, **KINDS[kind])(pack(rollouts(1, 12), step=1, budget=10_000, ranks=1)[0])
    assert calls == times * helpers.LAYERS


QWEN = helpers.ARCHITECTURE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}


def on_ranks(rank: int) -> dict[str, tuple[dict[str, bytes], int]]:
    """Bits of this rank's state after two steps, and exchanges sent, of a model whose blocks end with the experts."""
    out = {}
    for name in ("none", "full", "all parts"):
        c = helpers.config("float32", ranks=4, mesh={"ep": 2}, **KINDS.get(name, {}))
        c = c.model_copy(update={"model": c.model.model_copy(update={"architecture": QWEN})})
        mesh = lay_out(resolve(c.trainer, helpers.EXPERTS), rank, torch.device("cpu"))
        stepper = Stepper(TrainState(c, c.trainer.optim, mesh), c.trainer, 3)
        sent = 0
        dispatch = AllToAll.__call__

        def counted(*args: Any, dispatch: Any = dispatch) -> Any:
            nonlocal sent
            sent += 1
            return dispatch(*args)

        AllToAll.__call__ = counted  # type: ignore[method-assign]
        try:
            for step in (1, 2):
                stepper(pack(rollouts(step, 6), step=step, budget=48, ranks=4)[rank])
        finally:
            AllToAll.__call__ = dispatch  # type: ignore[method-assign]
        state = {n: p.to_local().detach().numpy().tobytes() for n, p in stepper.state.params.items()}
        out[name] = state, sent
    return out


def test_ranks_with_experts_between_them_keep_every_bit(ranks: Ranks) -> None:
    for found in ranks.run(4, on_ranks):
        bits_of, sent = found["none"]
        assert found["full"] == (bits_of, 2 * sent)
        assert found["all parts"] == (bits_of, sent)
