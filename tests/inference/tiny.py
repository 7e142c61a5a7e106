"""Tiny models with spread-out logits, and what a full forward without any cache says of a sequence."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from prl.inference.api import GenerateRequest, Generation
from prl.inference.engine import Engine
from prl.layers.layout import PackedLayout
from prl.models.base import ForwardInput, Model
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec

torch.set_num_threads(1)

VOCABULARY = 48
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _COMMON | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "head_dim": 8},
    "glm_moe_dsa": _COMMON
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "llama": _COMMON | {"architectures": ["LlamaForCausalLM"], "head_dim": 8},
}


def make_model(name: str = "qwen3_moe", seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    model = build(read_spec(CONFIGS[name]), dtype=dtype)
    init_weights(model, seed)
    return model.eval()


@dataclass
class Full:
    """Of one sequence by one forward: log-softmax [T, V] at the temperature, routes [T, L, K], selections [T, A, k]."""

    logprobs: np.ndarray
    routes: np.ndarray | None
    selections: np.ndarray | None

    def of(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Logprobs of tokens[start:]."""
        at = np.arange(start, len(tokens))
        return self.logprobs[at - 1, tokens[at]]


def full_forward(model: Model, tokens: np.ndarray, temperature: float = 1.0) -> Full:
    with torch.no_grad():
        t = torch.from_numpy(np.asarray(tokens, np.int64))
        dsa = model.spec.index_topk > 0
        out = model(ForwardInput(t, torch.arange(len(t)), PackedLayout([len(t)]), record_selections=dsa))
        logits = linear(out.hidden_TD, model.lm_head_weight.to(out.hidden_TD.dtype))
        logprobs = torch.log_softmax(logits.double() / temperature, -1).numpy()
    return Full(
        logprobs,
        None if out.routes_TLK is None else out.routes_TLK.numpy(),
        None if out.selections_TAS is None else out.selections_TAS.numpy(),
    )


def run(engine: Engine) -> dict[str, Generation]:
    """Step to the end; parts of streamed requests are joined."""
    done: dict[str, Generation] = {}
    parts: dict[str, list[Generation]] = {}
    while engine.ready:
        for event in engine.step():
            assert not event.error, event.error
            g = event.generation
            parts.setdefault(event.request_id, []).append(g)
            if g.finish_reason:
                ps = parts[event.request_id]
                g.tokens = np.concatenate([p.tokens for p in ps])
                g.logprobs = np.concatenate([p.logprobs for p in ps])
                done[event.request_id] = g
    return done


def requests(rng: np.random.Generator, count: int, *, longest: int = 40, **kwargs: Any) -> list[GenerateRequest]:
    """Of many sizes."""
    return [
        GenerateRequest(
            tokens=rng.integers(0, VOCABULARY, int(rng.integers(1, longest)), dtype=np.int32),
            max_tokens=int(rng.integers(1, 24)),
            seed=1000 + i,
            request_id=f"r{i}",
            **kwargs,
        )
        for i in range(count)
    ]
