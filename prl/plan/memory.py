"""Bytes that a rank of the trainer, or an engine, needs, by category: explicit formulas of the model, the configuration and the
mesh. Free of torch.

A step is a sequence of phases (each block's forward, the LM head, each block's backward, the update), and in each a sequence of
ops (`prl.plan.activations`); what is needed is that of the phase that needs most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

from prl.config.mesh import MeshShape
from prl.config.schema import RunConfig
from prl.models.spec import ModelSpec
from prl.plan.activations import Op, attended, block, norm, sizes
from prl.plan.weights import BYTES, Weight, engine_bytes, weights

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "kv")
CHUNK = 1 << 26
"""prl.trainer.optim.CHUNK."""
AHEAD = 2
"""prl.trainer.offload.AHEAD."""


class Hardware(Protocol):
    """What the formulas ask of a machine."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """On a CPU device and host memory are one."""
        ...


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU (one process on a CPU) and on the host beside it, when it needs most."""

    device: Mapping[str, int]
    """By the categories of `CATEGORIES`, all of them."""
    host: Mapping[str, int] = field(default_factory=dict)
    """What is offloaded, of one rank, by the same categories. On a CPU that is the same memory."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """What the device's are made of: `category: part`."""
    phase: str = ""
    """When that is."""
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Parts in every phase, at its own peak."""

    @property
    def total(self) -> int:
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())


def documents(config: RunConfig, length: int | None = None) -> list[int]:
    """A full micro-batch: documents of `length`, default the longest sample, and the rest of the row."""
    budget = config.trainer.pack_tokens
    n = min(length or config.sampling.max_length, budget)
    return [n] * (budget // n) + ([budget % n] if budget % n else [])


def trainer_memory(
    spec: ModelSpec,
    config: RunConfig,
    shape: MeshShape,
    hardware: Hardware,
    *,
    lengths: Sequence[int] | None = None,
    scored: int | None = None,
    micro_batches: int = 2,
) -> Memory:
    """Of a rank of the trainer. `lengths`: documents of a micro-batch, default `documents(config)`; `scored`: of a rank's
    tokens     those that the LM head scores, default all; with more than one micro-batch gradients are there from the start."""
    found = lengths or documents(config)
    # A row is cut as a zigzag: of the first rank the second piece sees most keys, of the last one both pieces see many.
    ranks = {0, shape.context - 1}
    each = [_Trainer(spec, config, shape, hardware, found, scored, micro_batches, r).memory() for r in sorted(ranks)]
    return max(each, key=lambda m: m.total + m.host_total)


class Peak(NamedTuple):
    """The most of a walk through ops: what autograd holds, what is there beside, and gradients made on the way."""

    kept: int
    beside: int
    new: int

    @property
    def total(self) -> int:
        return self.kept + self.beside + self.new


class _Trainer:
    def __init__(
        self,
        spec: ModelSpec,
        config: RunConfig,
        shape: MeshShape,
        hardware: Hardware,
        lengths: Sequence[int],
        scored: int | None,
        micro_batches: int,
        context_rank: int,
    ):
        self.spec, self.config, self.shape, self.hardware = spec, config, shape, hardware
        self.trainer, self.a = config.trainer, BYTES[config.model.dtype]
        self.fsdp = shape.world > 1
        self.s = sizes(
            spec,
            self.a,
            lengths,
            shared=shape.context,
            fp8=self.trainer.precision == "fp8",
            expert_ranks=shape.expert,
            fp8_dispatch=self.trainer.mesh.fp8_dispatch,
            context_rank=context_rank,
        )
        self.scored = self.s.t if scored is None else scored
        self.again = micro_batches > 1
        self.weights = weights(spec, config, shape)
        self.layers = [[x for x in self.weights if x.layer == i] for i in range(spec.n_layers)]
        self.rest = [x for x in self.weights if x.layer is None]
        kinds: dict[Any, list[Op]] = {}  # blocks of one kind have the same ops
        self.ops = []
        for i, layer in enumerate(self.layers):
            coded = frozenset(x.name.removeprefix(f"model.layers.{i}.").removesuffix(".weight") for x in layer if x.coded)
            kind = i in spec.moe_layers, i in spec.indexed_layers, coded
            if kind not in kinds:
                kinds[kind] = block(replace(self.s, coded=coded, fp8="mlp.experts.down_proj" in coded), i)
            self.ops.append(kinds[kind])
        self.fp8_sizes = [sum(x.fp8_bytes // x.shards for x in layer if x.fp8) for layer in self.layers]
        self.head = self._head()

    def _head(self) -> list[Op]:
        s, n, d = self.s, self.scored, self.spec.hidden_size
        name = "model.embed_tokens.weight" if self.spec.tied else "lm_head.weight"
        logits = min(self.trainer.lm_head_chunk, n) * self.spec.vocab_size * 4 if self.hardware.kind == "cuda" else 0
        return [
            *norm("model.norm", s.t, d, s, self.output(), self.output(), saved=False),
            Op("select", n * d * s.a, forward=self.output(), backward=n * d * s.a + s.stream + self.output()),
            Op(
                "logprobs",
                3 * n * s.w,
                forward=self.output() + logits,
                backward=n * d * s.a + self.output() + logits,
                weights=(name,),
                wide=True,
            ),
        ]

    # -- parameters ----------------------------------------------------------------------------------------------------

    def base(self) -> tuple[Counter[str], Counter[str]]:
        """What is there all along, (on the device, on the host)."""
        device, host, t = Counter[str](), Counter[str](), self.trainer
        on_host = t.offload == "parameters"
        (host if on_host else device)["parameters: masters"] = sum(x.shard * x.master for x in self.weights)
        (device if t.offload == "none" else host)["optimizer: state"] = optimizer_bytes(self.config, self.weights)
        if not self.fsdp:
            copied = [x for x in self.weights if not x.buffer and (on_host or x.element != x.master)]
            device["parameters: copies"] = sum(x.numel * x.element for x in copied)
        device["activations: inputs"] = self._inputs()
        return device, host

    def _inputs(self) -> int:
        """Tokens, positions, the layout's indices of rows and keys, cosines and sines; and of the N scored."""
        s = self.s
        single = all(b.single for b in s.buckets)
        return s.t * (8 * (7 if single else 9) + self.spec.rope.dim * s.w) + self.scored * 45

    # -- phases --------------------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        device, host = self.base()
        on_host = self.trainer.offload == "parameters"
        n = self.spec.n_layers
        kept = [self.kept(i) for i in range(n)]
        whole = sum(x.shard * x.master for x in self.weights if x.trained)
        phases: dict[str, Counter[str]] = {}

        def phase(name: str, gradients: int, **found: int) -> None:
            more = {k.replace("_", ": ", 1).replace("_", " "): v for k, v in found.items()}
            there = Counter(device) + Counter(more)
            # On a CPU host and device are one memory: there they are counted when they are there.
            (host if on_host and self.hardware.kind == "cuda" else there)["gradients: sums"] = gradients
            there["parameters: FP8"] = self.fp8(name)
            if self.fsdp and name != "update":  # embedding, last norm and LM head are one unit, whole all along
                there["parameters: gathered"] += sum(x.numel * x.element for x in self.rest)
            phases[name] = there

        moved = self.trainer.offload_activations
        first = whole if self.again else 0

        def held(i: int) -> int:
            """Kept of the blocks before the i-th that is on the device."""
            low = max(i - moved, 0) if moved else 0
            return sum(fixed for _, fixed in kept[:low]) + sum(k for k, _ in kept[low:i])

        for i in range(n):
            at = self.forward(self.ops[i])
            phase(
                f"forward of layer {i}",
                first,
                activations_kept=held(i) + at.kept,
                activations_working=at.beside,
                parameters_gathered_blocks=self.gathered(i),
                buffers_gather=self.gather(i) + self.gather(i + 1),
            )
        at = max(self.forward(self.head), self.backward(self.head, self.rest), key=lambda p: p.total)
        phase(
            "LM head",
            first,
            gradients_new=at.new,
            activations_kept=held(n) + at.kept,
            activations_working=at.beside,
            buffers_gather=self.gather(n - 1),
        )
        hidden = self.output()
        done = self.gradient_bytes([x for x in self.rest if x.name != "model.embed_tokens.weight" or self.spec.tied])
        for i in reversed(range(n)):
            at = self.backward(self.ops[i], self.layers[i], i)
            phase(
                f"backward of layer {i}",
                first,
                gradients_new=done + at.new,
                activations_kept=held(i) + at.kept,
                activations_working=at.beside + hidden,
                parameters_gathered_blocks=self.gathered(i),
                buffers_gather=self.gather(i - 1),  # under way
                buffers_reduction=self.reduction(i + 1),  # its input is held until the next one's
            )
            done += self.gradient_bytes(self.layers[i])
        if not self.fsdp and self.a != max(self.a, 4):
            largest = max((x.numel * x.master for x in self.weights if x.trained), default=0)
            phase("gradients' casts", first, gradients_new=max(done + largest, whole), activations_working=hidden)
        phase("update", whole, optimizer_update=self.update(), activations_working=hidden)
        del phases["update"]["parameters: copies"]
        if moved:
            host["activations: offloaded"] = sum(k - fixed for k, fixed in kept)
        totals = {name: sum(c.values()) for name, c in phases.items()}
        peak = max(totals, key=totals.__getitem__)
        return Memory(_by_category(phases[peak]), _by_category(host) if host else {}, phases[peak], peak, phases)

    def output(self) -> int:
        """The model's: hidden states and routes; held until the next micro-batch has one."""
        return self.s.stream + self.s.t * self.spec.top_k * 8 * len(self.spec.moe_layers)

    def fp8(self, phase: str) -> int:
        """FP8 copies of weights: made on first use after an update, those of the transposed weights in the first backward; the
        old ones go where new ones take their place. With FSDP each rank's own, once."""
        sizes = self.fp8_sizes
        if self.fsdp:
            return sum(sizes)
        kind, _, layer = phase.partition(" of layer ")
        twice = {"forward": sizes[int(layer) + 1 :], "backward": sizes[int(layer) :]}.get(kind) if layer else None
        if self.again or kind in ("update", "gradients' casts"):
            twice = sizes
        return sum(sizes) + sum(twice or [])

    def gathered(self, layer: int) -> int:
        """What FSDP makes whole of a block."""
        if not self.fsdp or not 0 <= layer < self.spec.n_layers:
            return 0
        return sum(x.fp8_bytes if x.fp8 else x.numel * x.element for x in self.layers[layer] if not x.buffer)

    def gather(self, layer: int) -> int:
        """What a gather of a block's parts goes into, before it is copied into place; nothing where one rank has it all."""
        if not self.fsdp or not 0 <= layer < self.spec.n_layers:
            return 0
        found = [x for x in self.layers[layer] if not x.buffer and x.shards > 1]
        return sum(x.fp8_bytes if x.fp8 else x.shard * x.shards * x.element for x in found)

    def reduction(self, layer: int) -> int:
        if not self.fsdp or layer == self.spec.n_layers:
            return 0
        return sum(x.shard * x.shards * x.master for x in self.layers[layer] if x.trained and not x.expert)

    def gradient_bytes(self, found: Sequence[Weight]) -> int:
        """Of these once their backward is done: sums that were not there before, or casts that wait for the end."""
        trained = [x for x in found if x.trained]
        if self.fsdp:  # what is no block's is reduced at the end
            whole = sum(x.numel * x.element for x in trained if x.layer is None)
            return whole + (0 if self.again else sum(x.shard * x.master for x in trained if x.layer is not None))
        return sum(x.numel * x.element for x in trained if not self.again or x.element != x.master)

    # -- activations ---------------------------------------------------------------------------------------------------

    def part(self, op: Op) -> str:
        """Of what `op` is computed again as a part; empty: nothing."""
        if self.trainer.recompute == "full":
            return "block"
        if self.trainer.recompute == "none":
            return ""
        return next((p for p in op.parts if p in self.trainer.recompute_targets), "")

    def groups(self, ops: Sequence[Op]) -> Iterator[tuple[str, list[Op]]]:
        """What is computed again together."""
        whole = ops is self.head
        for part, group in groupby(ops, lambda op: "" if whole else self.part(op)):
            yield part, list(group)

    def retained(self, part: str, ops: Sequence[Op]) -> int:
        if part == "block":
            return self.s.stream
        return sum(op.stays if part else op.kept for op in ops)

    def kept(self, layer: int) -> tuple[int, int]:
        """What autograd keeps of a block from forward to backward, and what of that never moves."""
        groups = list(self.groups(self.ops[layer]))
        total = sum(self.retained(*g) for g in groups)
        fixed = sum(op.fixed for part, ops in groups if not part for op in ops)
        if self.trainer.recompute == "full":
            fixed = self.s.t * self.spec.top_k * 8 if layer in self.spec.moe_layers else 0
            selection = self.selection(layer)
            return total + fixed + selection, fixed + selection
        return total, fixed

    def selection(self, layer: int) -> int:
        """Of the indexer's choice what recomputing this layer needs, and no layer before it holds."""
        indexed = self.spec.indexed_layers
        if not indexed or layer in indexed or layer - 1 not in indexed:
            return 0
        return sum(attended(self.s))

    def forward(self, ops: Sequence[Op]) -> Peak:
        best, held, before = Peak(0, 0, 0), 0, 0
        for part, group in self.groups(ops):
            if part == "block":
                held = self.s.stream
            for op in group:
                now = Peak(held, op.forward + op.kept + before, 0)
                best = max(best, now, key=lambda p: p.total)
                stays = 0 if part == "block" else op.stays if part else op.kept
                held, before = held + stays, op.kept - stays
        return best

    def backward(self, ops: Sequence[Op], found: Sequence[Weight], layer: int = -1) -> Peak:
        groups = list(self.groups(ops))
        best, done = Peak(0, 0, 0), 0
        for at in reversed(range(len(groups))):
            part, group = groups[at]
            held = sum(self.retained(*g) for g in groups[:at])
            if part == "block" and self.s.a < self.s.w:
                held += self.s.stream
            if part:
                work = max(op.forward + sum(o.kept for o in group[: j + 1]) for j, op in enumerate(group))
                best = max(best, Peak(held, work + self.s.stream, done), key=lambda p: p.total)
            for j in reversed(range(len(group))):
                op = group[j]
                inside = sum(o.kept for o in group[: j + 1])
                mine = [x for x in found if x.trained and x.name.endswith(op.weights)] if op.weights else []
                new = sum(x.numel * x.element for x in mine)
                cast = sum(x.numel * self.s.w for x in mine if op.wide and x.element < self.s.w)
                best = max(best, Peak(held + inside, op.backward, done + new + cast), key=lambda p: p.total)
                done += self.gradient_bytes(mine) if not self.fsdp else new
        return best

    # -- the update ----------------------------------------------------------------------------------------------------

    def update(self) -> int:
        """What the update needs beside parameters, gradients and state: of the chunk that needs most."""
        o = self.trainer.optim
        trained = [x for x in self.weights if x.trained]
        most = 0
        for kind in ("sgd", "muon", "adamw"):
            chosen = [x for x in trained if self.kind(x) == kind]
            for chunk in _chunks(chosen):
                n = sum(x.shard * x.master for x in chunk)
                wide = n if o.state_dtype == "bfloat16" else 0
                if kind == "adamw":
                    most = max(most, 2 * wide)
                elif kind == "muon":
                    most = max(most, wide + 2 * n + max(_newton_schulz(x) for x in chunk))
        return most

    def kind(self, x: Weight) -> str:
        kind = self.trainer.optim.kind
        return "adamw" if kind == "muon" and not is_matrix(x) else kind


def _newton_schulz(x: Weight) -> int:
    """The normalised matrices, two Gram matrices, and the next iterate."""
    *stack, n, k = x.shape
    on_top = 2 if x.name.endswith("gate_up_proj") else 1
    gram = x.shard // (n // on_top * k) * min(n // on_top, k) ** 2
    return (x.shard + 2 * gram) * x.master


def _chunks(found: Sequence[Weight]) -> Iterator[list[Weight]]:
    """As `prl.trainer.optim._chunks`."""
    chunk: list[Weight] = []
    size = 0
    for x in found:
        share = x.numel // x.shards
        if chunk and size + share > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(x)
        size += share
    if chunk:
        yield chunk


def optimizer_bytes(config: RunConfig, held: Sequence[Weight]) -> int:
    """Moments and momentum of a rank's parts, at rest, and AdamW's counts."""
    o = config.trainer.optim
    total = 0
    for x in held:
        if x.trained:
            kind = "adamw" if o.kind == "muon" and not is_matrix(x) else o.kind
            element = 2 if o.state_dtype == "bfloat16" else x.master
            total += x.shard * element * {"sgd": 0, "adamw": 2, "muon": 1}[kind] + (4 if kind == "adamw" else 0)
    return total


def is_matrix(x: Weight) -> bool:
    """Whether Muon takes it: `prl.trainer.muon.matrices`."""
    excluded = x.name in ("model.embed_tokens.weight", "lm_head.weight") or x.name.endswith(".mlp.gate.weight")
    return len(x.shape) > 1 and not excluded


def inference_memory(spec: ModelSpec, config: RunConfig, gpus: int, hardware: Hardware) -> Memory:
    """Of one GPU of an engine of `gpus`, over which weights are cut evenly; the embedded engine has one. `inference.kv_tokens`
    is the whole engine's; MLA's cache is the same on all its GPUs, of other models key heads are cut."""
    i = config.inference
    a, total = BYTES[i.dtype], sum(engine_bytes(spec, config).values())
    kv = i.kv_tokens * kv_token_bytes(spec, a)
    if spec.architecture != "glm_moe_dsa":
        kv //= min(gpus, spec.raw["num_key_value_heads"])
    t = i.max_prefill_tokens + i.max_batch
    working = t * spec.hidden_size * a * 4 + i.max_batch * spec.vocab_size * 4 * 2
    found = {"parameters": -(-total // gpus), "kv": kv, "activations": working}
    return Memory({c: found.get(c, 0) for c in CATEGORIES}, phase="prefill")


def kv_token_bytes(spec: ModelSpec, element: int) -> int:
    """Of one token, all layers."""
    raw = spec.raw
    if spec.architecture == "glm_moe_dsa":
        latent = spec.n_layers * (raw["kv_lora_rank"] + raw["qk_rope_head_dim"])
        return (latent + len(spec.indexed_layers) * raw["index_head_dim"]) * element
    return spec.n_layers * 2 * raw["num_key_value_heads"] * raw["head_dim"] * element


def _by_category(found: Mapping[str, int]) -> dict[str, int]:
    out = dict.fromkeys(CATEGORIES, 0)
    for name, n in found.items():
        out[name.partition(":")[0]] += n
    return out
