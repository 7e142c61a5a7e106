"""Three optimizer steps of a small GLM-5 on any mesh, always from the same weights and rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prl.config.mesh import MeshShape, resolve
from prl.config.schema import RunConfig
from prl.distributed.mesh import Mesh, lay_out
from prl.distributed.sharded import full
from prl.models.parallelize import whole
from prl.samples import Rollout, Sample, pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper
from tests.distributed import deep_ep

EXPERTS, TOP_K, MOE_LAYERS, INDEXED, KEPT, STEPS = 8, 2, 2, 2, 8, 3
GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": MOE_LAYERS + 1,
    "first_k_dense_replace": 1,
    "indexer_types": ["full", "full", "shared"],
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": KEPT,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
GROUPED: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": MOE_LAYERS,
    "num_experts_per_tok": TOP_K,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "glm_5": GLM_5,
    "glm_5, wide": GLM_5
    | {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128}
    | {"qk_nope_head_dim": 24, "v_head_dim": 32, "index_head_dim": 32},
    "glm_4.5": GROUPED
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_hidden_layers": MOE_LAYERS + 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "attention_bias": False,  # a key's has next to no gradient: what is left of it is rounding
        "partial_rotary_factor": 0.5,
    },
    "qwen3, three heads": GROUPED
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "norm_topk_prob": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
}


@dataclass(frozen=True)
class Case:
    """One training. `ranks` and `mesh` are what must not matter; the rest is also the single process's."""

    ranks: int = 1
    mesh: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    """More of the section trainer that must not matter (dispatcher, recomputation, …)."""
    dtype: str = "float64"
    optim: dict[str, Any] = field(default_factory=lambda: {"kind": "adamw", "eps": 1e-6})
    lora: dict[str, Any] | None = None
    clip: float = 1e9
    pack_tokens: int = 64
    """28, the longest document: one document a row."""
    rollouts: int = 12
    routes: str = "random"
    """random, crowd (every token goes to expert 0), shun (none goes to expert 7), pair (each to 0 and 1, none elsewhere)."""
    architecture: str = "glm_5"
    loss: dict[str, Any] = field(default_factory=dict)

    def alone(self) -> Case:
        """The same on one process."""
        return replace(self, ranks=1, mesh={}, trainer={}, pack_tokens=Case.pack_tokens)

    def config(self) -> RunConfig:
        optim = {"lr": 1e-3, "clip": self.clip, **self.optim}
        trainer = {"ranks": self.ranks, "mesh": self.mesh, "pack_tokens": self.pack_tokens, "lora": self.lora}
        trainer |= {"replay_selections": True}
        return RunConfig.model_validate(
            {
                "model": {"architecture": ARCHITECTURES[self.architecture], "dtype": self.dtype},
                "tokenizer": {"characters": "abcdefghij", "vocab_size": 48},
                "trainer": trainer | self.trainer | {"optim": optim, "loss": self.loss},
            }
        )


def sample(rng: np.random.Generator, n: int, routes: str) -> Sample:
    sampled = np.arange(n) >= n // 3
    ids = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (n, MOE_LAYERS, 1)), axis=-1)
    if routes == "crowd":
        ids = np.concatenate([np.zeros_like(ids[..., :1]), ids[ids > 0].reshape(n, MOE_LAYERS, -1)], -1)
    elif routes == "shun":
        ids = ids[ids < EXPERTS - 1].reshape(n, MOE_LAYERS, -1)
    elif routes == "pair":
        ids = ids[ids < TOP_K].reshape(n, MOE_LAYERS, -1)
    selections = np.full((n, INDEXED, KEPT), -1, np.int32)
    for t in range(n - 1):
        for layer in range(INDEXED):
            kept = np.sort(rng.choice(t + 1, min(t + 1, KEPT), replace=False))
            selections[t, layer, : len(kept)] = kept
    return Sample(
        tokens=rng.integers(0, 48, n).astype(np.int32),
        turn=np.zeros(n, np.int16),
        trainable=sampled,
        logprobs=np.where(sampled, -3.9 + 0.3 * rng.normal(size=n), 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        temperature=np.full(n, rng.choice([0.7, 1.0]), np.float32),
        routed=np.arange(n) < n - 1,
        advantages=np.where(sampled, rng.normal(), 0).astype(np.float32),
        loss_stream=np.zeros(n, np.uint8),
        routes=np.ascontiguousarray(ids[:, :, :TOP_K]),
        selections=selections,
    )


def rollouts(seed: int, n: int, routes: str) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    return [
        Rollout(
            id=f"{seed}-{i}", env="e", task=str(i), ordinal=i, index=0, samples=[sample(rng, int(rng.integers(4, 29)), routes)]
        )
        for i in range(n)
    ]


def train(rank: int, case: Case) -> dict[str, np.ndarray]:
    """Losses, gradients as the optimizer gets them and parameters of every step; of rank 0 alone."""
    config = case.config()
    if config.trainer.mesh.dispatcher == "deepep":
        deep_ep.install()
    shape = resolve(config.trainer, EXPERTS)
    device = torch.device("cpu")
    mesh = lay_out(shape, rank, device) if case.ranks > 1 else Mesh(0, 1, device, MeshShape())
    state = TrainState(config, config.trainer.optim, mesh)
    for bias in state.biases:  # last tokens have no recorded route: their own choice is to be the same
        bias[: {"crowd": 1, "pair": TOP_K}.get(case.routes, 0)] = 10
        bias[EXPERTS - (case.routes == "shun") :] = -10
    stepper = Stepper(state, config.trainer, STEPS)
    out: dict[str, np.ndarray] = {}

    def keep(kind: str, name: str, x: Tensor) -> None:
        value = full(whole(state.model, mesh, name, x.detach()))
        if mesh.main:
            out[f"{kind} {name} {state.step}"] = value.numpy().copy()

    def gradients(*_: Any) -> None:
        for name, p in state.params.items():
            if p.grad is not None:
                keep("gradient", name, p.grad)

    state.optimizer.register_step_pre_hook(gradients)
    for step in range(1, STEPS + 1):
        batches = pack(rollouts(step, case.rollouts, case.routes), step=step, budget=case.pack_tokens, ranks=shape.data)
        report = stepper(batches[mesh.stream])
        assert not report.skipped, report.skipped
        counts, tokens = np.array(report.metrics["expert_counts"]), report.metrics["tokens"]
        assert {
            "random": (counts > 0).all() or case.rollouts < 9,
            "crowd": (counts[:, 0] == tokens).all(),
            "shun": (counts[:, -1] == 0).all(),
            "pair": (counts[:, :TOP_K] == tokens).all(),
        }[case.routes], counts
        for name, p in state.params.items():
            keep("parameter", name, p)
        if mesh.main:
            out[f"loss {step}"] = np.array(report.loss)
            out[f"norm {step}"] = np.array(report.grad_norm)
    return out


def worst(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest difference as a part of its tensor's maximum, and of which tensor."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    found = (0.0, "")
    for name, e in expected.items():
        assert e.shape == got[name].shape, name
        assert np.isfinite(got[name]).all(), name
        found = max(found, (float(np.abs(got[name] - e).max() / max(np.abs(e).max(), 1e-30)), name))
    return found
