"""Training with the experts in FP8: it runs on the masters, ranks agree, and learning follows that of bf16."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prl.config.mesh import resolve
from prl.config.named import SetupError
from prl.config.schema import RunConfig
from prl.distributed.mesh import lay_out
from prl.inference.engine import Engine
from prl.inference.server import check_layers, engine_of
from prl.kernels.quantise import quantise_blocks
from prl.models import precision
from prl.models.registry import build
from prl.samples import CE, Rollout, Sample, pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper
from prl.transport.run_dir import RunDir
from prl.transport.weights import WeightStore
from tests.distributed import deep_ep
from tests.distributed.ranks import Ranks
from tests.trainer import invariance
from tests.trainer.helpers import ARCHITECTURE, EXPERTS, config, state_of

WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
LETTERS = np.arange(10, 20)


def fp8_config(precision: str, **trainer: Any) -> RunConfig:
    tree = config("bfloat16", precision=precision, pack_tokens=4096, **trainer).model_dump()
    tree["model"]["architecture"] = ARCHITECTURE | WIDE
    return RunConfig.model_validate(tree)


def with_engine(c: RunConfig, engine: str, layers: list[str] | None = None) -> RunConfig:
    tree = c.model_dump()
    tree["inference"] |= {"precision": engine, "dtype": "bfloat16", "fp8_layers": layers}
    return RunConfig.model_validate(tree)


def reversed_words(rng: np.random.Generator, count: int) -> list[Rollout]:
    """Worked answers: four letters, then the same backward, a third of them wrong: what cannot be learned keeps the loss up."""
    out = []
    for i in range(count):
        word = rng.choice(LETTERS, 4)
        answer = np.where(rng.random(4) < 1 / 3, rng.choice(LETTERS, 4), word[::-1])
        tokens = np.concatenate((word, [1], answer)).astype(np.int32)
        trainable = np.arange(len(tokens)) > 4
        sample = Sample(
            tokens=tokens,
            turn=np.zeros(len(tokens), np.int16),
            trainable=trainable,
            logprobs=np.zeros(len(tokens), np.float32),
            versions=np.where(trainable, 0, -1).astype(np.int32),
            temperature=np.ones(len(tokens), np.float32),
            routed=np.zeros(len(tokens), bool),
            advantages=np.zeros(len(tokens), np.float32),
            loss_stream=np.full(len(tokens), CE, np.uint8),
        )
        out.append(Rollout(f"r{i}", "letters", f"t{i}", i, 0, samples=[sample]))
    return out


def losses(precision: str, steps: int) -> list[float]:
    c = fp8_config(precision, optim={"lr": 3e-3})
    stepper = Stepper(state_of(c), c.trainer, steps)
    rng = np.random.default_rng(0)
    return [stepper(pack(reversed_words(rng, 32), step=i, budget=4096, ranks=1)[0]).loss for i in range(1, steps + 1)]


def test_masters_are_quantised_as_they_are_and_get_float32_gradients() -> None:
    c = fp8_config("fp8")
    state = state_of(c)
    seen = {}
    (experts,) = [m for n, m in state.model.named_modules() if n.endswith("layers.1.mlp.experts")]
    experts.register_forward_hook(lambda m, *_: seen.update(weight=m.gate_up_proj.dtype))
    Stepper(state, c.trainer, 4)(pack(reversed_words(np.random.default_rng(0), 8), step=1, budget=4096, ranks=1)[0])
    assert seen["weight"] == torch.float32, "not through bfloat16"
    assert experts.gate_up_proj.grad is None or experts.gate_up_proj.grad.dtype == torch.float32
    published = dict(state.tensors())
    assert published["model.layers.1.mlp.experts.gate_up_proj"].dtype == torch.bfloat16, "what an engine gets"


def engine_for(c: RunConfig, state: TrainState) -> Engine:
    return engine_of(build(state.spec, dtype=torch.bfloat16), c, "engine")


@pytest.mark.parametrize("trainer", ["fp8", "bf16"])
def test_an_engine_has_the_trainer_s_own_codes(trainer: str, tmp_path: Path) -> None:
    """Through the store: what both compute with is the same, byte for byte; experts are quantised from float32 masters."""
    c = with_engine(fp8_config(trainer), "fp8")
    state = state_of(c)
    Stepper(state, c.trainer, 4)(pack(reversed_words(np.random.default_rng(0), 8), step=1, budget=4096, ranks=1)[0])
    store = WeightStore(RunDir(tmp_path / "run").create(), c.transport)
    store.publish(1, 1, state.transfer(), fp8=state.fp8)
    manifest, tensors = store.load_latest() or pytest.fail("nothing published")
    assert manifest.fp8 == state.fp8 and bool(state.fp8) == (trainer == "fp8")
    engine = engine_for(c, state)
    engine.load_weights(1, tensors)
    layers = precision.candidates(state.model)
    assert engine.fp8 == sorted(layers) and any("o_proj" in n for n in layers) and any(n.endswith(".experts") for n in layers)
    weights = state.weights()
    for name in precision.weights_of(state.model, layers):
        own = weights[name].to(state.dtypes[name])
        assert own.dtype == (torch.float32 if trainer == "fp8" and ".experts." in name else torch.bfloat16), name
        codes, scales = quantise_blocks(own if own.dim() == 3 else own[None])
        held = engine.model.get_parameter(name).quantised.plain  # type: ignore[attr-defined]
        assert torch.equal(held[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(held[1], scales), name


def test_layers_that_are_fp8_on_one_side_alone_stop_the_run() -> None:
    c = with_engine(fp8_config("fp8"), "fp8")
    state = state_of(c)
    some = with_engine(fp8_config("fp8"), "fp8", [r".*\.mlp\.experts"])
    engine = engine_for(some, state)
    with pytest.raises(SetupError, match=r"layers in FP8: .*o_proj.* in the trainer alone; let inference.fp8_layers"):
        check_layers(engine.fp8, state.fp8)
    check_layers([], state.fp8)
    check_layers(engine.fp8, [])
    before = {n: t.clone() for n, t in precision.held(engine.model).items()}
    with pytest.raises(ValueError, match=r"weights of version 1: layers in FP8: .*o_proj.* in the weights alone"):
        engine.load_weights(1, dict(state.transfer()))
    assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in precision.held(engine.model).items())


def sent_by_rank(rank: int, mesh: dict[str, Any]) -> dict[str, torch.Tensor]:
    c = with_engine(fp8_config("fp8", ranks=4, mesh=mesh), "fp8")
    return dict(state_of(c, lay_out(resolve(c.trainer, EXPERTS), rank, torch.device("cpu"))).transfer())


def test_ranks_send_what_one_process_sends(ranks: Ranks) -> None:
    alone = dict(state_of(with_engine(fp8_config("fp8"), "fp8")).transfer())
    first, *_ = ranks.run(4, sent_by_rank, {"ep": 2})
    assert first.keys() == alone.keys() and any(t.dtype == torch.float8_e4m3fn for t in alone.values())
    for name, t in alone.items():
        assert t.dtype == first[name].dtype and torch.equal(t.view(torch.uint8), first[name].view(torch.uint8)), name


alone_in_fp8 = functools.cache(functools.partial(losses, "fp8"))


def losses_on_rank(rank: int, mesh: dict[str, Any], steps: int) -> tuple[list[float], list[str]]:
    """Losses of the batch, and what the experts' shards are."""
    if mesh.get("dispatcher") == "deepep":
        deep_ep.install()
    c = fp8_config("fp8", ranks=4, mesh=mesh, optim={"lr": 3e-3})
    state = state_of(c, lay_out(resolve(c.trainer, EXPERTS), rank, torch.device("cpu")))
    stepper, rng = Stepper(state, c.trainer, steps), np.random.default_rng(0)
    found = [stepper(pack(reversed_words(rng, 32), step=i, budget=4096, ranks=4)[rank]).loss for i in range(1, steps + 1)]
    kinds = {type(p._local_tensor).__name__ for n, p in state.params.items() if ".experts." in n}
    return found, sorted(kinds)


@pytest.mark.parametrize(
    "mesh", [{}, {"fp8_dispatch": True}, {"fp8_dispatch": True, "dispatcher": "deepep", "dispatch_chunks": 2}]
)
def test_experts_between_ranks_train_in_fp8(mesh: dict[str, Any], ranks: Ranks) -> None:
    """Experts over two ranks each of which gathers its own as FP8 from two: losses within 2% of one process's."""
    steps = 6
    alone = np.array(alone_in_fp8(steps))
    for found, kinds in ranks.run(4, losses_on_rank, {"ep": 2} | mesh, steps):
        assert kinds == ["ShardedWeight"], "gathered as FP8"
        assert np.abs(np.array(found) / alone - 1).max() < 0.02
    assert alone[-1] < 0.95 * alone[0], "something is learned"


def step_on_rank(rank: int, cases: list[invariance.Case]) -> list[dict[str, np.ndarray]]:
    return [invariance.train(rank, case) for case in cases]


def test_fp8_on_other_meshes_is_one_process_s_to_its_own_rounding(ranks: Ranks) -> None:
    """Linear layers and experts of GLM-5: the same forward; gradients within 5% in norm, since their blocks hold the tokens of
    other rows (a rounding to e4m3 alone is off by 2.6%)."""
    everything = {"recompute": "full", "offload": "parameters", "offload_activations": 1}
    shared: dict[str, Any] = {"architecture": "glm_5, wide", "dtype": "float32", "optim": {"kind": "sgd"}}
    cases = [
        invariance.Case(ranks=4, mesh=mesh, trainer={"precision": "fp8", **more}, lora=lora, **shared)
        for mesh, more, lora in (
            ({"replicate": 2, "cp": 2, "ep": 1}, {}, None),
            ({"cp": 2, "ep": 2, "fp8_dispatch": True, "dispatch_chunks": 2}, everything, {"rank": 3}),
        )
    ]
    got, *_ = ranks.run(4, step_on_rank, cases, timeout_s=100)
    alone = {adapted: invariance.train(0, replace(cases[i], ranks=1, mesh={})) for i, adapted in enumerate((False, True))}
    for case, found in zip(cases, got, strict=True):
        expected = alone[case.lora is not None]
        assert abs(found["loss 1"] - expected["loss 1"]) < 1e-6, case
        for name, e in expected.items():
            if name.startswith("gradient") and name.endswith(" 0"):
                assert np.linalg.norm(found[name] - e) <= 0.05 * np.linalg.norm(e), (case, name)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_200_steps_of_sft_learn_as_in_bf16() -> None:
    """The mean loss of every 20 steps is within 2% of bf16's."""
    plain, fp8 = (np.array(losses(precision, 200)).reshape(10, 20).mean(1) for precision in ("bf16", "fp8"))
    print(f"bf16 {plain.round(3)}, fp8 / bf16 {(fp8 / plain).round(4)}")
    assert plain[-1] < 0.6 * plain[0], "something is learned"
    assert np.abs(fp8 / plain - 1).max() < 0.02
