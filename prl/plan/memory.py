"""Bytes that a rank of the trainer, or an engine, needs, by category: explicit formulas of the model, the configuration and the
mesh. Free of torch.

A step is a sequence of phases (each block's forward, the LM head, each block's backward, the update); what is needed is that of
the phase that needs most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prl.config.mesh import MeshShape
from prl.config.schema import RunConfig
from prl.models.spec import ModelSpec
from prl.plan.activations import Op, block, sizes
from prl.plan.weights import BYTES, Weight, shapes, weights

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
    """What is offloaded, of one rank, by the same categories. On a CPU it is on the same memory: add it."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """What the categories are made of: `category: part`."""
    phase: str = ""
    """When that is."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """Total of every phase."""

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
    """Of a rank of the trainer. `lengths`: documents of a micro-batch, default `documents(config)`; `scored`: of its tokens
    those that the LM head scores, default all; with more than one micro-batch gradients are there from the start."""
    trainer, lengths = config.trainer, list(lengths or documents(config))
    held = weights(spec, config, shape)
    fsdp, on_host = shape.world > 1, trainer.offload == "parameters"
    a = BYTES[config.model.dtype]
    w = max(a, 4)
    s = sizes(spec, config, a, lengths, shape.context, shape.expert)
    base, host = Counter[str](), Counter[str]()
    (host if on_host else base)["parameters: masters"] += sum(x.shard * x.master for x in held)
    state = host if trainer.offload != "none" else base
    state["optimizer: state"] += optimizer_bytes(config, held)
    if not fsdp:
        base["parameters: forward copies"] += sum(x.numel * x.element for x in held if on_host or x.element != x.master)
    if trainer.precision == "fp8":
        base["parameters: FP8 copies"] += sum((x.fp8_bytes // x.shards) * (1 if fsdp else 2) for x in held if x.fp8)
    layers: list[list[Weight]] = [[x for x in held if x.layer == i] for i in range(spec.n_layers)]
    rest = [x for x in held if x.layer is None]
    base["activations: inputs"] += s.t * (8 * 10 + spec.rope.dim * w)
    if fsdp:
        base["parameters: gathered"] += sum(x.numel * x.element for x in rest)

    def gathered(i: int, *, ahead: int) -> int:
        ring = [j for j in (i, ahead) if 0 <= j < spec.n_layers]
        return sum(x.fp8_bytes if x.fp8 else x.numel * x.element for j in ring for x in layers[j]) if fsdp else 0

    def grads(found: Sequence[Weight]) -> int:
        return sum(x.shard * x.master for x in found if x.trained)

    ops = [block(s, i) for i in range(spec.n_layers)]
    kept = [_kept(config, s.t * spec.hidden_size * a, o) for o in ops]
    moved = min(trainer.offload_activations, spec.n_layers)
    whole, phases = grads(held), dict[str, Counter[str]]()
    scored = s.t if scored is None else scored
    done = 0
    on_device = _window(kept, moved)
    started = whole if micro_batches > 1 else 0
    gradient_home = host if on_host else base

    def phase(name: str, **found: int) -> None:
        phases[name] = base + Counter({k.replace("__", ": ").replace("_", " "): v for k, v in found.items()})

    for i in range(spec.n_layers):
        working = max((sum(o.kept for o in ops[i][: j + 1]) + op.forward for j, op in enumerate(ops[i])), default=0)
        phase(
            f"forward of layer {i}",
            gradients__sums=0 if on_host else started,
            activations__kept=on_device(i),
            activations__working=working,
            parameters__gathered_blocks=gathered(i, ahead=i + 1 if shape.expert > 1 else -1),
        )
    final = s.t * spec.hidden_size * (w + 2 * a) + scored * spec.hidden_size * a
    head = next(x for x in held if x.name == ("model.embed_tokens.weight" if spec.tied else "lm_head.weight"))
    chunk = min(trainer.lm_head_chunk, scored)
    phase(
        "LM head",
        gradients__sums=0 if on_host else started,
        gradients__new=head.numel * w if head.trained else 0,
        activations__kept=on_device(spec.n_layers) + final,
        activations__working=scored * spec.hidden_size * w,
        activations__logits=chunk * spec.vocab_size * 4 if hardware.kind == "cuda" else 0,
    )
    done = 0 if started else grads(rest) - (0 if spec.tied else grads([x for x in rest if "embed" in x.name]))
    for i in reversed(range(spec.n_layers)):
        again = sum(o.kept for o in ops[i]) if trainer.recompute == "full" else 0
        working = max(sum(o.kept for o in ops[i][: j + 1]) + op.backward for j, op in enumerate(ops[i]))
        working = working if again else working - sum(o.kept for o in ops[i]) + kept[i]
        done += 0 if started else grads(layers[i])
        phase(
            f"backward of layer {i}",
            gradients__sums=0 if on_host else started or done,
            activations__kept=on_device(i),
            activations__working=max(working, 0),
            parameters__gathered_blocks=gathered(i, ahead=i - 1),
            buffers__reduction=sum(x.numel * x.master for x in layers[i] if x.trained) if fsdp else 0,
        )
    phase("update", gradients__sums=0 if on_host else whole, optimizer__update=_update(config, held))
    gradient_home["gradients: sums"] += 0
    if on_host:
        host["gradients: sums"] = whole
    if moved:
        host["activations: offloaded"] = sum(kept)
    totals = {name: sum(c.values()) for name, c in phases.items()}
    peak = max(totals, key=totals.__getitem__)
    return Memory(_by_category(phases[peak]), _by_category(host) if host else {}, dict(phases[peak]), peak, totals)


def _window(kept: Sequence[int], moved: int):  # type: ignore[no-untyped-def]
    """Kept of the blocks before the i-th that are on the device."""
    return lambda i: sum(kept[max(i - moved, 0) if moved else 0 : i])


def _kept(config: RunConfig, given: int, ops: Sequence[Op]) -> int:
    """What autograd keeps of a block from forward to backward; `given`: bytes of the block's input."""
    trainer = config.trainer
    if trainer.recompute == "none":
        return sum(o.kept for o in ops)
    if trainer.recompute == "full":
        return given
    return sum(o.kept for o in ops if o.part not in trainer.recompute_targets)


def optimizer_bytes(config: RunConfig, held: Sequence[Weight]) -> int:
    """Moments and momentum of a rank's parts, at rest."""
    o = config.trainer.optim
    states = {"sgd": 0, "adamw": 2, "muon": 1}
    total = 0
    for x in held:
        if x.trained:
            element = 2 if o.state_dtype == "bfloat16" else x.master
            total += x.shard * element * states["adamw" if o.kind == "muon" and not is_matrix(x.name, x.shape) else o.kind]
    return total


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon takes it: `prl.trainer.muon.matrices`."""
    excluded = ("model.embed_tokens.weight", "lm_head.weight")
    return len(shape) > 1 and name not in excluded and not name.endswith(".mlp.gate.weight")


def _update(config: RunConfig, held: Sequence[Weight]) -> int:
    """What the update needs beside parameters, gradients and state: of CHUNK elements, or of the largest tensor."""
    o = config.trainer.optim
    largest = max((x.shard for x in held if x.trained), default=0)
    each = min(sum(x.shard for x in held if x.trained), max(CHUNK, largest))
    if o.kind == "muon":
        return each * 4 * 4
    return each * 4 * 2 if o.kind == "adamw" and o.state_dtype == "bfloat16" else 0


def inference_memory(spec: ModelSpec, config: RunConfig, gpus: int, hardware: Hardware) -> Memory:
    """Of one GPU of an engine of `gpus`, over which weights are cut evenly; the embedded engine has one. `inference.kv_tokens`
    is the whole engine's; MLA's cache is the same on all its GPUs, of other models key heads are cut."""
    i = config.inference
    a, fp8 = BYTES[i.dtype], i.precision == "fp8"
    total = 0
    for name, shape in shapes(spec).items():
        n = 1
        for side in shape:
            n *= side
        wide = max(a, 4) if name.endswith("e_score_correction_bias") or name.endswith("weights_proj.weight") else a
        total += n + n // (128 * 128) * 4 if fp8 and ".mlp.experts." in name else n * wide
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
