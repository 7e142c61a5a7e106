"""How long a training step takes at least, and what bounds it: operations, bytes of memory, bytes between ranks. Free of torch.

All figures are of one rank. A step is `micro_batches` rounds (forward, backward, what is computed again) and one update.
The formulas count what `prl.models` and `prl.distributed` do: dense weights are gathered twice a round and their gradients
reduced once, experts the same among the ranks that hold the same ones; tokens go to their experts and back, forward and
backward; ranks that share a row exchange keys, or heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from prl.config.mesh import MeshShape
from prl.config.schema import RunConfig
from prl.models.spec import ModelSpec
from prl.plan import flops
from prl.plan.activations import KEEP, LATENT, buckets, is_sparse
from prl.plan.hardware import PEAK, Achieved, Hardware
from prl.plan.weights import BYTES, Weight, can_be_fp8, shapes, weights

SPARE = 8
"""Elementwise bytes of a forward, in units of a block's stream [tokens, hidden]: norms read and written, sums, rotation and the
like."""


@dataclass(frozen=True)
class Batch:
    """What a step trains on."""

    rollouts: int
    length: int
    """Tokens of each."""
    scored: float = 1.0
    """Share of them that the LM head scores."""

    @property
    def tokens(self) -> int:
        return self.rollouts * self.length


@dataclass(frozen=True)
class Work:
    """Of one rank and one step."""

    flops: dict[str, float] = field(default_factory=dict)
    """By what computes them: float32, bf16, fp8, attention; recomputation is in it."""
    memory: float = 0.0
    """Bytes of device memory read and written."""
    link: float = 0.0
    """Bytes to ranks of the same node."""
    network: float = 0.0
    """Bytes to ranks of others."""
    pcie: float = 0.0
    host: float = 0.0
    """Bytes of host memory that the update reads and writes, which nothing hides."""
    micro_batches: int = 1
    useful: float = 0.0
    """FLOPs that published figures count: nothing twice, whatever computes it."""


@dataclass(frozen=True)
class Times:
    """Seconds of a step."""

    compute: float
    memory: float
    network: float
    update: float
    """On the host, where it runs there."""
    hides: bool = True
    """Whether a machine does one thing behind another; a thread of a CPU does not."""

    @property
    def floor(self) -> float:
        """Everything that can hide behind something else does."""
        return max(self.compute, self.memory, self.network) + self.update if self.hides else self.serial

    @property
    def serial(self) -> float:
        """Nothing does, but for memory behind compute."""
        local = max(self.compute, self.memory) if self.hides else self.compute + self.memory
        return local + self.network + self.update

    @property
    def bound(self) -> str:
        parts = {"compute": self.compute, "memory": self.memory, "network": self.network}
        worst = max(parts, key=parts.__getitem__)
        return "host update" if self.update > parts[worst] else worst


def micro_batches(config: RunConfig, shape: MeshShape, batch: Batch) -> int:
    """Of each stream, rows as full as whole documents make them; all streams take as many."""
    per_row = max(config.trainer.pack_tokens // batch.length, 1)
    return max(math.ceil(batch.rollouts / per_row / shape.data), 1)


def training(
    spec: ModelSpec,
    config: RunConfig,
    shape: MeshShape,
    hardware: Hardware,
    batch: Batch,
    held: Sequence[Weight] | None = None,
) -> Work:
    """Of a rank in a step. `held`: `weights` of the three, where they are at hand."""
    trainer, a = config.trainer, BYTES[config.model.dtype]
    rounds = micro_batches(config, shape, batch)
    mean = batch.tokens / shape.data / shape.context  # tokens of a rank in the step
    each = batch.rollouts / shape.data / shape.context
    scored = round(batch.length * batch.scored)
    parts = {k: v * each for k, v in flops.forward(spec, [batch.length], scored).items()}
    again = _again(config)
    coded = shares(spec, trainer.fp8_layers) if trainer.precision == "fp8" else {}
    own = "bf16" if a == 2 else "float32"
    by: dict[str, float] = {"float32": 0.0, "bf16": 0.0, "fp8": 0.0, "attention": 0.0}
    documents = max(trainer.pack_tokens // batch.length, 1)
    once, inside = _attention(spec, (batch.length,) * documents)
    by["attention"] = (once * (3 + again["attention"]) + inside) * each / documents
    for part, n in parts.items():
        if part == "head":
            by[own] += n * 4  # the chunked LM head computes its logits again
        elif part == "indexer":
            by[own] += n * (1 + again["attention"])
        elif part != "attention":
            done = n * (3 + again.get(part, 0.0))
            by["fp8"] += done * coded.get(part, 0.0)
            by[own] += done * (1 - coded.get(part, 0.0))
    useful = 3 * sum(parts.values()) - 2 * parts["indexer"]

    held = weights(spec, config, shape) if held is None else held
    node = hardware.gpus_per_node
    memory = link = network = pcie = 0.0
    across = shape.world > node
    for w in held:
        whole = w.fp8_bytes if w.fp8 else w.numel * a
        n = w.shards
        copies = 2 + bool(again["projections"])
        memory += rounds * whole * copies
        if w.trained:
            memory += rounds * w.numel * w.master
        if n == 1:
            continue
        move = (2 * whole + (w.numel * w.master if w.trained else 0)) * (n - 1) / n
        if w.expert and shape.expert * n > node:
            # The ranks that hold the same experts are `expert` apart: of those of a node each has its own adapter.
            inside = max(node // shape.expert, 1)
            network += rounds * move / inside
            link += rounds * move * (1 - 1 / inside)
        elif across and not w.expert:
            # Rings over all adapters of a node: each carries its share of what the node takes in.
            network += rounds * move / min(node, n)
            link += rounds * move
        else:
            link += rounds * move
    if shape.replicate > 1:
        network += sum(w.shard * w.master for w in held if w.trained) * 2 * (shape.replicate - 1) / shape.replicate
    to_link, to_network = _dispatched(spec, config, shape, node, again["experts"])
    link += mean * len(spec.moe_layers) * to_link
    network += mean * len(spec.moe_layers) * to_network
    shared = _shared(spec, shape, a) * mean * spec.n_layers * (2 + again["attention"])
    if shape.context > node:
        network += shared
    else:
        link += shared
    memory += mean * spec.n_layers * _elementwise(spec, a) * (2 + again["projections"])
    owned = sum(w.shard for w in held if w.trained)
    state = {"sgd": 0, "adamw": 2, "muon": 1}[trainer.optim.kind]
    element = 2 if trainer.optim.state_dtype == "bfloat16" else 4
    update = owned * (4 + 2 * 4 + 2 * state * element)
    host = 0.0
    if trainer.offload == "none":
        memory += update
    else:
        host = update * min(node, shape.world)
        pcie += owned * 4 * (2 if trainer.offload == "optimizer" else 1)
    if trainer.offload == "parameters":
        pcie += rounds * owned * (2 * a + 2 * 4)
    if trainer.offload_activations:
        pcie += 2 * mean * spec.hidden_size * a * spec.n_layers
    return Work(by, memory, link, network, pcie, host, rounds, useful)


def _attention(spec: ModelSpec, lengths: tuple[int, ...]) -> tuple[float, float]:
    """FLOPs of a row's attention, (forward, what its own backward computes again): of all pairs of a bucket, masked ones too,
    of latent keys in their absorbed form, of sparse attention the keys that are kept."""
    raw, once, inside = spec.raw, 0, 0
    heads = raw["num_attention_heads"]
    for b in buckets(lengths):
        if spec.architecture == "glm_moe_dsa":
            c, k = raw["kv_lora_rank"], spec.index_topk
            x = c + raw["qk_rope_head_dim"]
            thin = is_sparse(b, k)
            pairs = b.b * b.q * k if thin else b.pairs
            once += pairs * heads * (x + c)
            inside += pairs * heads * x if thin or pairs * heads > LATENT else 0
        else:
            n = b.pairs * heads * 2 * (raw.get("head_dim") or spec.hidden_size // heads)
            once += n
            inside += n if b.pairs > KEEP else 0
    return 2 * spec.n_layers * once, 2 * spec.n_layers * inside


def shares(spec: ModelSpec, patterns: Sequence[str]) -> dict[str, float]:
    """Of the weights of projections, feed-forwards and experts the share whose layer computes in FP8."""
    every: Counter[str] = Counter()
    fp8: Counter[str] = Counter()
    for name, shape in shapes(spec).items():
        if len(shape) < 2 or not name.startswith("model.layers.") or ".indexer." in name or name.endswith(".mlp.gate.weight"):
            continue
        part = "experts" if ".mlp.experts." in name else "projections" if ".self_attn." in name else "feed-forwards"
        size = math.prod(shape)
        every[part] += size
        if can_be_fp8(name, shape, patterns):
            fp8[part] += size
    return {part: fp8[part] / n for part, n in every.items()}


def _again(config: RunConfig) -> dict[str, float]:
    """Shares of a forward's parts that backward computes again."""
    trainer = config.trainer
    if trainer.recompute == "none":
        return {"projections": 0.0, "attention": 0.0, "experts": 0.0, "feed-forwards": 0.0}
    if trainer.recompute == "full":
        return {"projections": 1.0, "attention": 1.0, "experts": 1.0, "feed-forwards": 1.0, "router": 1.0}
    targets = trainer.recompute_targets
    return {
        "projections": float("attn_proj" in targets),
        "attention": 0.0,
        "experts": float("routed_experts" in targets),
        "feed-forwards": float("mlp" in targets),
    }


def _dispatched(spec: ModelSpec, config: RunConfig, shape: MeshShape, node: int, again: float) -> tuple[float, float]:
    """Bytes (in the node, to others) of a token and layer, there and back, forward, backward and again. A token goes to a rank
    once, however many of its experts are there, and crosses to another node once."""
    ep, k, d = shape.expert, spec.top_k, spec.hidden_size
    if ep == 1:
        return 0.0, 0.0
    nodes, inside = max(ep // node, 1), min(ep, node)
    back = d * float(BYTES[config.model.dtype])
    out = d * 1.03 if config.trainer.mesh.fp8_dispatch else back  # codes with a float32 scale for each 128
    moved = (1 + again) * (out + back) + (out + back)
    ranks = ep * (1 - (1 - 1 / ep) ** k)
    others = nodes * (1 - (1 - 1 / nodes) ** k) * (nodes - 1) / nodes
    return moved * ranks * (inside - 1) / inside, moved * others


def _shared(spec: ModelSpec, shape: MeshShape, a: int) -> float:
    """Bytes of a rank's token and layer, one way, where ranks share rows: compressed keys of the others, or heads there and
    back."""
    c, raw = shape.context, spec.raw
    if c == 1:
        return 0.0
    if spec.architecture == "glm_moe_dsa":
        return (c - 1) * (raw["kv_lora_rank"] + raw["qk_rope_head_dim"] + raw["index_head_dim"]) * a
    return (2 * raw["num_attention_heads"] + 2 * raw["num_key_value_heads"]) * raw["head_dim"] * a * (c - 1) / c


def _elementwise(spec: ModelSpec, a: int) -> float:
    """Bytes of a token and layer in a forward beside weights: streams, and the rows of experts (sent, activated, summed)."""
    raw, d = spec.raw, spec.hidden_size
    rows = spec.top_k * (3 * d + 6 * raw["moe_intermediate_size"]) if spec.moe_layers else 6 * raw["intermediate_size"]
    return (SPARE * d + rows) * a


def times(work: Work, hardware: Hardware, achieved: Achieved | None = None) -> Times:
    """At the shares that `achieved` says, default the machine's own; `PEAK` for a floor that nothing can beat."""
    s = achieved or hardware.achieved
    f = work.flops
    compute = f["bf16"] / (hardware.flops.bf16 * s.bf16) + f["fp8"] / (hardware.flops.fp8 * s.fp8)
    compute += f["float32"] / (hardware.flops.float32 * s.float32)
    compute += f["attention"] / (hardware.flops.bf16 * s.attention)
    moved = max(
        work.link / (hardware.link_bytes_per_s * s.link),
        work.network / (hardware.network_bytes_per_s * s.network),
        work.pcie / (hardware.pcie_bytes_per_s * s.pcie),
    )
    return Times(
        compute,
        work.memory / (hardware.memory_bytes_per_s * s.memory),
        moved,
        work.host / (hardware.host_bytes_per_s * s.host),
        hides=hardware.kind != "cpu",
    )


def peak(work: Work, hardware: Hardware) -> Times:
    return times(work, hardware, PEAK)
