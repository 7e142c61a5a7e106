"""How long the engines take for a batch of rollouts. Free of torch.

An engine decodes `sequences` at once; a step of it reads the weights that they touch and their caches, and computes; prompts
(of every turn: what the environment says) are computed once, with a prefix cache. Rollouts are as long as one another here;
where they are not, the long ones set a batch's end, and a run's asynchrony is what hides that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prl.config.schema import RunConfig
from prl.models.spec import ModelSpec
from prl.plan import flops
from prl.plan.hardware import Hardware
from prl.plan.memory import kv_token_bytes
from prl.plan.weights import BYTES, engine_bytes, engine_patterns
from prl.plan.work import Batch, shares


@dataclass(frozen=True)
class Rollouts:
    sequences: int
    """That an engine decodes at once."""
    step_s: float
    """Of one token of each of them."""
    seconds: float
    """Of a batch over all engines."""
    bound: str


def rollouts(spec: ModelSpec, config: RunConfig, gpus: int, hardware: Hardware, batch: Batch, sampled: float) -> Rollouts:
    """`gpus`: of one engine; `sampled`: share of a rollout's tokens that the model wrote."""
    i, s = config.inference, hardware.achieved
    a, coded = BYTES[i.dtype], shares(spec, engine_patterns(config))
    room = max(2 * i.kv_tokens // batch.length, 1)  # half of it is there on average
    n = max(min(i.max_batch, room, math.ceil(config.orchestrator.max_in_flight / i.replicas)), 1)
    read = 0.0
    for name, size in engine_bytes(spec, config).items():
        if ".mlp.experts." in name:
            read += size * (1 - (1 - spec.top_k / spec.n_experts) ** n)
        elif name != "model.embed_tokens.weight" or spec.tied:
            read += size
    context = batch.length / 2
    kept = min(context, spec.index_topk) if spec.index_topk else context
    cache = n * kept * kv_token_bytes(spec, a)
    parts = flops.forward(spec, [batch.length], batch.length)
    per_token = {k: v / batch.length for k, v in parts.items()}

    def computed(tokens: float, head: bool) -> float:
        fast = sum(per_token[part] * share for part, share in coded.items())
        slow = sum(per_token.values()) - fast - per_token["attention"] - (0 if head else per_token["head"])
        slow /= hardware.flops.bf16 * s.bf16
        seconds = fast / (hardware.flops.fp8 * s.fp8) + slow + per_token["attention"] / (hardware.flops.bf16 * s.attention)
        return tokens * seconds / gpus

    memory = (read + cache) / gpus / (hardware.memory_bytes_per_s * s.memory)
    compute, latency = computed(n, True), len(spec.moe_layers) * hardware.latency_s if gpus > 1 else 0.0
    step = max(memory, compute) + latency
    written = batch.tokens * sampled / i.replicas
    prefill = computed(batch.tokens * (1 - sampled) / i.replicas, False)
    decode = written / n * step
    parts_s = {"prefill": prefill, "latency of decoding": written / n * latency, "memory of decoding": written / n * memory}
    parts_s["compute of decoding"] = written / n * compute
    return Rollouts(n, step, prefill + decode, max(parts_s, key=parts_s.__getitem__))
