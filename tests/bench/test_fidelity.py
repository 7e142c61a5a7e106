"""Bands and alarm on the real engine and step: a fresh seed stays in, every planted fault gets out and is named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prl.bench import fidelity
from prl.bench.fidelity import Rig
from prl.inference import engine as engine_module
from prl.inference import sampling
from prl.inference.engine import Engine
from prl.kernels import weights as weights_module
from prl.monitor.bands import RAISE, Pair, Verdict, Watch, judge

FP8, MIXED = Pair("float32", "fp8", "float32", "fp8", True), Pair("bfloat16", "bf16", "bfloat16", "fp8", True)
PLAIN = Pair("bfloat16", "bf16", "bfloat16", "bf16", True)
Plant = Callable[[Rig, pytest.MonkeyPatch], None]
MODEL, FRESH = "glm4_moe", 17


@functools.cache
def warm() -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return fidelity.warm_start(MODEL, FRESH)


def rig_of(pair: Pair, **more: Any) -> Rig:
    return Rig(MODEL, pair, warm(), seed=FRESH, **more)


def verdicts(rig: Rig, rounds: int) -> list[Verdict]:
    out, watch = [], Watch()
    for _ in range(rounds):
        verdict, watch = judge(rig.round(), Pair.of(rig.config), watch)
        out.append(verdict)
    return out


def shifted_layers(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    of = Engine._rows_of

    def rows_of(self: Engine, store: np.ndarray | None, row: int, first: int, end: int) -> np.ndarray | None:
        rows = of(self, store, row, first, end)
        return rows if rows is None or store is not self._routes else np.roll(rows, 1, axis=1)

    patch.setattr(Engine, "_rows_of", rows_of)


def off_by_one(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    of = fidelity.sample_of

    def sample_of(prompt: np.ndarray, g: Any, temperature: float) -> Any:
        g.logprobs = np.append(g.logprobs[1:], g.logprobs[-1:])
        return of(prompt, g, temperature)

    patch.setattr(fidelity, "sample_of", sample_of)


def raw_logprobs(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    def sample(logits_BV: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        token_B, _ = sampling.sample(logits_BV, *given, **options)
        return token_B, torch.log_softmax(logits_BV.float(), -1).gather(1, token_B[:, None]).squeeze(1)

    patch.setattr(engine_module, "sample", sample)


def stale_copies(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The trainer goes on with the FP8 codes, plain and transposed, of the first step."""
    kept: dict[int, Any] = {}
    of = weights_module.quantised
    mine = {p.data_ptr() for p in rig.state.model.parameters()}

    def quantised(weight: Tensor, parameter: Tensor | None = None) -> Any:
        if weight.data_ptr() not in mine:
            return of(weight, parameter)
        return kept.setdefault(weight.data_ptr(), of(weight, parameter))

    from prl.kernels import experts

    patch.setattr(experts, "quantised", quantised)


def layer_in_bf16(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    rig.state.model.get_submodule("model.layers.2.mlp.experts").precision = "bf16"  # type: ignore[assignment]


def permuted_expert(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    load = rig.engine.load_weights

    def load_weights(version: int, tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.down_proj"
        order = torch.arange(16)
        order[[2, 3]] = order[[3, 2]]
        load(version, {**tensors, name: tensors[name][order]})

    patch.setattr(rig.engine, "load_weights", load_weights)
    rig.publish()


FAULTS: dict[str, tuple[Plant, Pair, str, dict[str, Any]]] = {
    "a shifted layer in the routes": (shifted_layers, PLAIN, "routes", {}),
    "logprobs off by one": (off_by_one, PLAIN, "shift", {}),
    "raw logprobs": (raw_logprobs, PLAIN, "distribution", {}),
    "stale quantised weights": (stale_copies, FP8, "stale", {"lr": 1e-3}),
    "a layer in bf16": (layer_in_bf16, FP8, "precision", {}),
    "a permuted expert": (permuted_expert, PLAIN, "expert", {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_raises_the_alarm_and_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, pair, cause, options = FAULTS[name]
    rig = rig_of(pair, **options)
    plant(rig, monkeypatch)
    found = verdicts(rig, RAISE + 2)
    (raised,) = [v for v in found if v.raised]
    assert cause in raised.causes[:2], (raised.text, raised.causes)


@pytest.mark.parametrize("pair", [PLAIN, FP8, MIXED], ids=lambda p: p.key)
def test_a_fresh_seed_stays_within_its_band(pair: Pair) -> None:
    found = verdicts(rig_of(pair), 4)
    assert [v.state for v in found] == ["within"] * 4, [v.text for v in found]
