"""Real replicas of a run: the inference role with real vLLM, weights from the run's own store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from prl.config.load import dump
from prl.config.schema import RunConfig
from prl.inference.client import Client, Replica
from prl.layers.layout import PackedLayout
from prl.models.base import ForwardInput, Model
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec
from prl.transport.run_dir import RunDir
from prl.transport.weights import Manifest, WeightStore

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
VOCABULARY = 128
START_S = 180.0
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "initializer_range": 0.15,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe": _COMMON
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "qwen3_moe": _COMMON | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8},
}


def model_of(architecture: dict[str, Any], seed: int) -> Model:
    model = build(read_spec(architecture))
    init_weights(model, seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.05)
    return model.eval()


def logprobs(model: Model, tokens: np.ndarray, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Of a forward of the trainer's model: logprob [T] of each token given those before (0 for the first), routes [T, L, K]."""
    with torch.no_grad():
        t = torch.from_numpy(np.asarray(tokens, np.int64))
        out = model(ForwardInput(t, torch.arange(len(t)), PackedLayout([len(t)])))
        all_TV = torch.log_softmax(linear(out.hidden_TD, model.lm_head_weight.to(out.hidden_TD.dtype)) / temperature, -1)
        assert out.routes_TLK is not None
        scored = all_TV[:-1].gather(1, t[1:, None])[:, 0].numpy()
        return np.concatenate([[0.0], scored]), out.routes_TLK.numpy()


class Rig:
    """A run's folder with a store, and replicas of it."""

    def __init__(self, folder: Path, architecture: dict[str, Any], **inference: Any):
        self.config = RunConfig.model_validate(
            {
                "run": {"dir": str(folder), "name": "run"},
                "model": {"architecture": architecture},
                "tokenizer": {"characters": "abcdefghijklmnopqrstuvwxyz>"},
                "envs": [{"name": "a", "kind": "reasoning_gym"}],
                "sampling": {"max_length": 512},
                "inference": {
                    "engine": "vllm",
                    "vllm": {"eager": True},
                    "kv_tokens": 8192,
                    "max_batch": 32,
                    "stream_interval": 1,
                }
                | inference,
                "transport": {"weights": "filesystem"},
            }
        )
        self.run = RunDir(folder / "run").create()
        self.run.config_path.write_text(dump(self.config))
        self.store = WeightStore(self.run, self.config.transport)
        self.spec = read_spec(architecture)
        self.models: dict[int, Model] = {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def publish(self, model: Model) -> Manifest:
        version = max(self.models, default=-1) + 1
        self.models[version] = model
        return self.store.publish(version, version, model.state_dict().items())

    def start(self, index: int = 0) -> None:
        log = (self.run / "logs" / f"inference-{index}.log").open("wb")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "prl.launch.role", "inference", "--run", str(self.run.root), "--index", str(index)]
        with log:
            self.processes[index] = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def replica(self, index: int = 0) -> Replica:
        """Started when it is first asked for; it catches up with the store by itself."""
        name = f"inference-{index}"
        if index not in self.processes:
            self.start(index)

        def alive() -> None:
            assert self.processes[index].poll() is None, self.log(index)

        address = self.run.find(name, START_S, on_wait=alive)
        return Replica(name, address["host"], address["port"])

    def log(self, index: int = 0) -> str:
        return (self.run / "logs" / f"inference-{index}.log").read_text()[-6000:]

    def client(self, *indices: int, **kwargs: Any) -> Client:
        there = [self.replica(i) for i in indices or (0,)]
        return Client(lambda: there, self.run.secret, moe_layers=self.spec.moe_layers, **({"timeout_s": 60.0} | kwargs))

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            assert process.wait(20) == 0


@contextmanager
def rig(folder: Path, architecture: dict[str, Any], **inference: Any) -> Iterator[Rig]:
    made = Rig(folder, architecture, **inference)
    made.publish(model_of(architecture, 0))
    try:
        yield made
    finally:
        made.stop()
