"""run.bitwise: the trainer's logprobs on any mesh without expert parallelism are the embedded engine's, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prl.config.mesh import MeshShape, resolve
from prl.config.schema import RunConfig
from prl.distributed.mesh import Mesh, lay_out
from prl.inference.engine import Engine
from prl.kernels import registry
from prl.models import precision as precisions
from prl.models.registry import build
from prl.samples import Rollout, Sample, pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper
from tests.distributed.ranks import Ranks
from tests.trainer.invariance import ARCHITECTURES, EXPERTS

pytestmark = pytest.mark.skipif(registry.unavailable("cpu") is not None, reason=str(registry.unavailable("cpu")))

TEMPERATURE = 0.8
LENGTHS = (3, 27, 9, 28, 14, 20, 25, 6)
CPU = torch.device("cpu")


WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def config(architecture: str, dtype: str, ranks: int = 1, precision: str = "bf16", **mesh: int) -> RunConfig:
    """Three heads are for cp = 2, which without the mode takes the ring."""
    train = {"pack_tokens": 64, "recompute": "full", "router_replay": False, "precision": precision}
    return RunConfig.model_validate(
        {
            "run": {"bitwise": True},
            "model": {"architecture": ARCHITECTURES[architecture] | (WIDE if precision == "fp8" else {}), "dtype": dtype},
            "inference": {"dtype": dtype, "precision": precision},
            "tokenizer": {"characters": "abcdefghij", "vocab_size": 48},
            "trainer": {"ranks": ranks, "mesh": mesh, **train},
        }
    )


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 48, n, dtype=np.int32) for n in LENGTHS]


def rollouts(logprobs: list[np.ndarray]) -> list[Rollout]:
    """Everything but the first token was sampled by version 0."""
    out = []
    for i, (tokens, own) in enumerate(zip(documents(), logprobs, strict=True)):
        n = len(tokens)
        sampled = np.arange(n) > 0
        sample = Sample(
            tokens=tokens,
            turn=np.zeros(n, np.int16),
            trainable=sampled,
            logprobs=own,
            versions=np.where(sampled, 0, -1).astype(np.int32),
            temperature=np.full(n, TEMPERATURE, np.float32),
            routed=np.zeros(n, np.bool_),
            advantages=np.where(sampled, 1 - 2 * (i % 2), 0).astype(np.float32),
            loss_stream=np.zeros(n, np.uint8),
        )
        out.append(Rollout(id=str(i), env="e", task=str(i), ordinal=i, index=0, samples=[sample]))
    return out


def engine_logprobs(rank: int, c: RunConfig) -> list[np.ndarray]:
    """Token by token, of the trainer's own first weights as it publishes them."""
    state = TrainState(c, c.trainer.optim, Mesh(0, 1, CPU, MeshShape()))
    model = build(state.spec, dtype=getattr(torch, c.inference.dtype))
    precisions.hold_codes(model, precisions.engine_layers(c, model))
    engine = Engine(model, model.spec, kv_tokens=1024, max_batch=5, bitwise=True)
    engine.load_weights(0, dict(state.transfer()))
    return [s.logprobs for s in engine.score(documents(), temperature=TEMPERATURE, chunk=1)]


def step(rank: int, c: RunConfig, logprobs: list[np.ndarray]) -> dict[str, Any]:
    shape = resolve(c.trainer, EXPERTS)
    mesh = lay_out(shape, rank, CPU) if shape.world > 1 else Mesh(0, 1, CPU, MeshShape())
    stepper = Stepper(TrainState(c, c.trainer.optim, mesh), c.trainer, 1)
    batch = pack(rollouts(logprobs), step=1, budget=c.trainer.pack_tokens, ranks=shape.data)[mesh.stream]
    return stepper(batch).metrics


@pytest.mark.parametrize("dtype, precision", [("bfloat16", "bf16"), ("float32", "bf16"), ("bfloat16", "fp8")])
@pytest.mark.parametrize("architecture", ["glm_5", "qwen3, three heads"])
def test_the_mismatch_is_exactly_zero_on_ranks_that_share_weights_and_rows(
    architecture: str, dtype: str, precision: str, ranks: Ranks
) -> None:
    """In FP8 the engine has the trainer's codes, though experts are quantised from float32 masters."""
    (logprobs,) = ranks.run(1, engine_logprobs, config(architecture, dtype, precision=precision))
    for world, mesh in ((1, {}), (2, {"cp": 1, "ep": 1}), (2, {"cp": 2, "ep": 1})):
        for metrics in ranks.run(world, step, config(architecture, dtype, world, precision, **mesh), logprobs):
            assert metrics["own_tokens"] == sum(LENGTHS) - len(LENGTHS)
            assert metrics["mismatch_kl_own"] == 0.0 == metrics["mismatch"]["max"], (world, mesh)
