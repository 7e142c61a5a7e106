"""A tiny MoE and random rollouts for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prl.config.schema import RunConfig
from prl.distributed.mesh import Mesh
from prl.distributed.sharded import local
from prl.samples import CE, RL, Rollout, Sample
from prl.trainer import checkpoint
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper
from prl.trainer.store import Saver
from prl.transport.run_dir import RunDir

VOCABULARY, EXPERTS, TOP_K, LAYERS = 32, 8, 2, 2
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS + 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": TOP_K,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.1,
}
ALONE = Mesh(0, 1, torch.device("cpu"))


def config(dtype: str = "float64", **trainer: Any) -> RunConfig:
    trainer = {"pack_tokens": 64, "steps": 100, "optim": {"lr": 1e-2}, **trainer}
    return RunConfig.model_validate(
        {
            "model": {"architecture": ARCHITECTURE, "dtype": dtype},
            "tokenizer": {"characters": "abcdefghij", "vocab_size": VOCABULARY},
            "trainer": trainer,
            "checkpoint": {"every": 2},
            "transport": {"weights": "filesystem"},
            "launch": {"wait_timeout_s": 30, "start_timeout_s": 60},
        }
    )


def state_of(c: RunConfig, mesh: Mesh = ALONE) -> TrainState:
    return TrainState(c, c.trainer.optim, mesh)


def stepper_of(c: RunConfig, mesh: Mesh = ALONE) -> Stepper:
    return Stepper(state_of(c, mesh), c.trainer, c.trainer.steps)


def sample(rng: np.random.Generator, prompt: int, answer: int, *, version: int = 0, stream: int = RL) -> Sample:
    n = prompt + answer
    sampled = np.arange(n) >= prompt
    routes = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (n, LAYERS, 1)), axis=-1)[:, :, :TOP_K]
    return Sample(
        tokens=rng.integers(0, VOCABULARY, n).astype(np.int32),
        turn=np.zeros(n, np.int16),
        trainable=sampled,
        logprobs=np.where(sampled, -3.4 + 0.3 * rng.normal(size=n), 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        temperature=np.full(n, rng.choice([0.7, 1.0]), np.float32),
        routed=np.arange(n) < n - 1,
        advantages=np.where(sampled, rng.normal(), 0).astype(np.float32),
        loss_stream=np.full(n, stream, np.uint8),
        routes=np.ascontiguousarray(routes),
    )


def rollouts(seed: int, n: int = 9, *, ce: bool = False) -> list[Rollout]:
    """Rollouts of one or two branches and of different lengths, a third of them read by cross-entropy if `ce`."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        stream = CE if ce and i % 3 == 0 else RL
        lengths = [(int(rng.integers(1, 5)), int(rng.integers(1, 9))) for _ in range(1 + (i % 4 == 1))]
        samples = [sample(rng, p, a, version=int(rng.integers(0, 2)), stream=stream) for p, a in lengths]
        out.append(Rollout(id=f"r{seed}-{i}", env="e", task=str(i), ordinal=i, index=0, samples=samples))
    return out


def bits(state: TrainState) -> dict[str, bytes]:
    """Every stored tensor of the state, of sharded ones this rank's part, bit for bit."""
    return {name: local(t).contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in state.saved().items()}


def run_dir(root: Path) -> RunDir:
    return RunDir(root).create()


def write_checkpoint(
    run: RunDir,
    manifest: checkpoint.Manifest,
    trainer: Callable[[Path], None],
    orchestrator: bytes | None = None,
    *,
    keep: int = 2,
    keep_every: int = 0,
) -> Path:
    """A checkpoint whose trainer/ is whatever `trainer` puts there."""
    folder = checkpoint.begin(run, manifest.step)
    trainer(folder)
    files = checkpoint.checksums(folder, sorted(p.name for p in folder.iterdir()))
    return checkpoint.commit(run, manifest, files, orchestrator, keep=keep, keep_every=keep_every)


def saver_of(run: RunDir, c: RunConfig, mesh: Mesh = ALONE) -> Saver:
    """A collective."""
    if mesh.main:
        run.create()
    mesh.barrier()
    metrics = run.metrics(f"trainer-{mesh.rank}")
    return Saver(run, c, mesh, metrics, run.status(f"trainer-{mesh.rank}", metrics))


def save(state: TrainState, c: RunConfig, root: Path) -> Path:
    """The trainer/ of a checkpoint below `root`; a collective."""
    run = RunDir(root)
    saver = saver_of(run, c, state.mesh)
    saver.start(state)
    saver.wait()
    return run / "checkpoints" / f"step_{state.step}" / checkpoint.TRAINER
