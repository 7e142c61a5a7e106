"""Adapters: what they compute, what moves, and that engines and files get what the forward uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prl.config.mesh import MeshShape
from prl.config.named import SetupError
from prl.config.schema import RunConfig
from prl.distributed.mesh import lay_out
from prl.layers.moe import Experts
from prl.models.hf import load_hf, save_hf
from prl.models.lora import A, B
from prl.samples import pack
from prl.trainer.checkpoint import CheckpointError
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper
from prl.trainer.store import open_state
from prl.transport.run_dir import RunDir
from tests.distributed.ranks import Ranks
from tests.trainer import invariance
from tests.trainer.helpers import ALONE, bits, config, rollouts, save, state_of, stepper_of
from tests.trainer.test_fp8 import fp8_config, reversed_words

EVERYTHING = {"rank": 3, "alpha": 6.0, "targets": [r"model\.layers\..*", "lm_head"]}


def filled(state: TrainState) -> TrainState:
    """B drawn too, so that the adapters add something."""
    generator = torch.Generator().manual_seed(0)
    for name, p in state.params.items():
        if name.endswith(B):
            p.data.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return state


def test_gradients_of_the_adapters_follow_from_the_weights() -> None:
    """dA = s · Bᵀ · G and dB = s · G · Aᵀ, G the gradient of a plain model that holds the merged weights."""
    case = invariance.Case(lora=EVERYTHING)
    adapted = filled(TrainState(case.config(), case.config().trainer.optim, ALONE))
    plain_config = invariance.Case().config()
    plain = TrainState(plain_config, plain_config.trainer.optim, ALONE)
    for name, t in adapted.tensors():
        plain.weights()[name].copy_(t)
    gradients: list[dict[str, Tensor]] = []
    for state, c in ((adapted, case.config()), (plain, plain_config)):
        grads: dict[str, Tensor] = {}
        state.optimizer.register_step_pre_hook(
            lambda *_, s=state, g=grads: g.update({n: p.grad.clone() for n, p in s.params.items() if p.grad is not None})
        )
        batch = pack(invariance.rollouts(1, 6, "random"), step=1, budget=64, ranks=1)[0]
        Stepper(state, c.trainer, 3)(batch)
        gradients.append(grads)
    found, g = gradients
    assert len(adapted.adapted) == 29 and found.keys() == {n + x for n in adapted.adapted for x in (A, B)}
    assert any("kv_b_proj" in n for n in found) and any("experts.down_proj" in n for n in found)
    start = filled(TrainState(case.config(), case.config().trainer.optim, ALONE)).weights()
    for n in adapted.adapted:
        torch.testing.assert_close(found[n + A], 2 * start[n + B].mT @ g[n], rtol=0, atol=1e-12)
        torch.testing.assert_close(found[n + B], 2 * g[n] @ start[n + A].mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_only_adapters_move_and_the_first_step_is_the_base_models(kind: Any) -> None:
    optim = {"kind": kind, "lr": 1e-2}
    plain, adapted = (stepper_of(config("bfloat16", optim=optim, lora=x)) for x in (None, EVERYTHING))
    state = adapted.state
    assert all(torch.equal(t, dict(plain.state.tensors())[n]) for n, t in state.tensors())
    before = {n: t.clone() for n, t in state.weights().items()}
    assert before.keys() - state.params.keys() == plain.state.weights().keys()
    batches = [pack(rollouts(step), step=step, budget=64, ranks=1)[0] for step in (1, 2)]
    first, second = plain(batches[0]), adapted(batches[0])
    assert second.loss == first.loss and second.metrics["mismatch_kl"] == first.metrics["mismatch_kl"]
    adapted(batches[1])
    moved = {n for n, t in state.weights().items() if not torch.equal(t, before[n])}
    assert moved == state.params.keys() == {n + x for n in state.adapted for x in (A, B)}
    assert {p for group in state.optimizer.param_groups for p in group["params"]} == set(state.params.values())


def used(rank: int, shape: MeshShape, c: RunConfig) -> bool:
    """Whether the weights in a forward are those published, bit for bit, after two steps; of experts this rank's."""
    mesh = ALONE if shape.world == 1 else lay_out(shape, rank, torch.device("cpu"))
    stepper = Stepper(TrainState(c, c.trainer.optim, mesh), c.trainer, 4)
    rng = np.random.default_rng(0)
    make = (lambda i: reversed_words(rng, 8)) if c.trainer.precision == "fp8" else rollouts
    batches = [pack(make(i), step=i, budget=c.trainer.pack_tokens, ranks=shape.data)[mesh.stream] for i in (1, 2, 3)]
    for batch in batches[:2]:
        assert np.isfinite(stepper(batch).loss)
    state = stepper.state
    published = dict(state.tensors())
    same = []

    def look(name: str, module: nn.Module) -> None:
        for weight in (f"{name}.{p}" for p in module._parameters):
            if weight in state.adapted:
                value = getattr(module, weight.rpartition(".")[2]).detach()
                expected = published[weight]
                if isinstance(module, Experts):
                    expected = expected.unflatten(0, (shape.expert, -1))[rank % shape.expert]
                same.append(torch.equal(value.to(expected.dtype), expected))

    for name, module in state.model.named_modules():
        if isinstance(module, nn.Linear | Experts):
            module.register_forward_pre_hook(lambda m, *_, n=name: look(n, m))
    stepper(batches[2])
    return len(same) >= 9 and all(same)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_published_is_what_the_forward_uses(precision: str, ranks: Ranks) -> None:
    lora = EVERYTHING | {"targets": [r".*(o|gate_up|down)_proj"]}  # of the others only the weight is read, no forward runs
    c = config("bfloat16", lora=lora) if precision == "bf16" else fp8_config("fp8", lora=lora)
    assert used(0, MeshShape(), c)
    assert all(ranks.run(2, used, MeshShape(shard=2), c))
    assert all(ranks.run(4, used, MeshShape(shard=4, expert=2), c))


def test_a_resume_has_base_and_adapters_and_goes_on_the_same(tmp_path: Path) -> None:
    c = config("bfloat16", lora=EVERYTHING)
    batches = [pack(rollouts(step), step=step, budget=64, ranks=1)[0] for step in (1, 2)]
    stepper, resumed = stepper_of(c), stepper_of(c)
    stepper(batches[0])
    resumed.state.load(save(stepper.state, c, tmp_path))
    for s in (stepper, resumed):
        s(batches[1])
    assert bits(stepper.state) == bits(resumed.state)
    louder = config("bfloat16", lora=EVERYTHING | {"alpha": 99.0})
    with pytest.raises(CheckpointError, match=r"computes otherwise; .*\n  lora: .* in the checkpoint"):
        open_state(RunDir(tmp_path), louder, louder.trainer.optim, ALONE, None)


def test_the_written_folder_is_a_plain_merged_model(tmp_path: Path) -> None:
    state = filled(state_of(config("bfloat16", lora=EVERYTHING)))
    model = load_hf(save_hf(tmp_path / "model", state.spec, state.tensors()), dtype=torch.bfloat16)
    expected, base = dict(state.tensors()), state.weights()
    assert model.state_dict().keys() == expected.keys()
    for name, t in model.state_dict().items():
        assert torch.equal(t, expected[name])
        assert torch.equal(t, base[name].to(t.dtype)) == (name not in state.adapted)


def test_a_target_without_a_match_is_named_with_the_nearest() -> None:
    with pytest.raises(SetupError, match=r"'.*q_prj' matches no linear .* model\.layers\.\d\.self_attn\.q_proj"):
        state_of(config(lora={"targets": [r".*\.o_proj", r".*q_prj"]}))
    with pytest.raises(SetupError, match="may be trained; nearest"):
        invariance.train(0, invariance.Case(lora={"targets": [r".*\.indexer\.wq_b"]}))
    c = config(lora={"targets": [r".*"]})
    with pytest.raises(SetupError, match="freezes all"):
        state_of(c.model_copy(update={"model": c.model.model_copy(update={"frozen": [r".*(proj|experts|lm_head)\..*"]})}))
