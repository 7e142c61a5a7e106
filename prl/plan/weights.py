"""The tensors of a model by name, and how the trainer holds each: shape, bytes of its type, who shards it. Free of torch.

They mirror `prl.models`; a test compares them with the models themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from prl.config.mesh import MeshShape
from prl.config.schema import RunConfig
from prl.models.spec import ModelSpec

Shape = tuple[int, ...]
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
FLOAT32 = {
    "glm_moe_dsa": ("mlp.gate.e_score_correction_bias", "self_attn.indexer.weights_proj.weight"),
    "glm4_moe": ("mlp.gate.e_score_correction_bias",),
}
"""Ends of the names of tensors that are float32 or wider whatever the model's type, by architecture."""
BUFFERS = (".e_score_correction_bias",)
BLOCK = 128
"""Rows and columns of a block that shares an FP8 scale."""


def shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name → shape of every tensor in the model's own names, buffers too."""
    out: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    for i in range(spec.n_layers):
        out |= {f"model.layers.{i}.{name}": shape for name, shape in _block(spec, i)}
    out["model.norm.weight"] = (spec.hidden_size,)
    if not spec.tied:
        out["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return out


def can_be_fp8(name: str, shape: Sequence[int], patterns: Sequence[str]) -> bool:
    """Whether the layer of this weight computes in FP8 where `patterns` choose, as `prl.models.precision.chosen`."""
    layer = name.rpartition(".")[0]
    linear = len(shape) > 1 and name.startswith("model.layers.") and ".indexer." not in name
    if not linear or layer.endswith((".mlp.gate", ".kv_b_proj")) or any(n % BLOCK for n in shape[-2:]):
        return False
    return any(re.fullmatch(p, layer) for p in patterns)


def engine_patterns(config: RunConfig) -> Sequence[str]:
    """Of the layers that an engine computes in FP8; empty where it has none."""
    if config.inference.precision != "fp8":
        return ()
    found = config.inference.fp8_layers
    return config.trainer.fp8_layers if found is None else found


def engine_bytes(spec: ModelSpec, config: RunConfig) -> dict[str, int]:
    """Of each tensor as an engine holds it, codes with their scales."""
    a, patterns = BYTES[config.inference.dtype], engine_patterns(config)
    out = {}
    for name, shape in shapes(spec).items():
        n = math.prod(shape)
        wide = max(a, 4) if name.endswith(("e_score_correction_bias", "weights_proj.weight")) else a
        out[name] = n + n // BLOCK**2 * 4 if can_be_fp8(name, shape, patterns) else n * wide
    return out


def _block(spec: ModelSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    raw, d = spec.raw, spec.hidden_size
    yield from (("self_attn." + name, shape) for name, shape in _attention(spec, layer))
    if layer in spec.moe_layers:
        e, i = spec.n_experts, raw["moe_intermediate_size"]
        yield "mlp.gate.weight", (e, d)
        if spec.architecture in FLOAT32:
            yield "mlp.gate.e_score_correction_bias", (e,)
        yield "mlp.experts.gate_up_proj", (e, 2 * i, d)
        yield "mlp.experts.down_proj", (e, d, i)
        if shared := i * raw.get("n_shared_experts", 0):
            yield from _mlp("mlp.shared_experts.", d, shared)
    else:
        yield from _mlp("mlp.", d, raw["intermediate_size"])
    yield "input_layernorm.weight", (d,)
    yield "post_attention_layernorm.weight", (d,)


def _mlp(prefix: str, d: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate_proj.weight", (width, d)
    yield prefix + "up_proj.weight", (width, d)
    yield prefix + "down_proj.weight", (d, width)


def _linear(name: str, out: int, width: int, bias: bool = False) -> Iterator[tuple[str, Shape]]:
    yield name + ".weight", (out, width)
    if bias:
        yield name + ".bias", (out,)


def _attention(spec: ModelSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    raw, d, heads, bias = spec.raw, spec.hidden_size, spec.raw["num_attention_heads"], spec.raw["attention_bias"]
    if spec.architecture == "glm_moe_dsa":
        q, c, nope, rope, v = (
            raw[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        yield from _linear("q_a_proj", q, d, bias)
        yield "q_a_layernorm.weight", (q,)
        yield from _linear("q_b_proj", heads * (nope + rope), q)
        yield from _linear("kv_a_proj_with_mqa", c + rope, d, bias)
        yield "kv_a_layernorm.weight", (c,)
        yield from _linear("kv_b_proj", heads * (nope + v), c)
        yield from _linear("o_proj", d, heads * v, bias)
        if layer in spec.indexed_layers:
            n, w = raw["index_n_heads"], raw["index_head_dim"]
            yield "indexer.wq_b.weight", (n * w, q)
            yield "indexer.wk.weight", (w, d)
            yield "indexer.k_norm.weight", (w,)
            yield "indexer.k_norm.bias", (w,)
            yield "indexer.weights_proj.weight", (n, d)
        return
    width, key_heads = raw["head_dim"], raw["num_key_value_heads"]
    yield from _linear("q_proj", heads * width, d, bias)
    yield from _linear("k_proj", key_heads * width, d, bias)
    yield from _linear("v_proj", key_heads * width, d, bias)
    yield from _linear("o_proj", d, heads * width, bias and spec.architecture != "glm4_moe")
    if spec.architecture in ("qwen3", "qwen3_moe") or raw.get("use_qk_norm"):
        yield "q_norm.weight", (width,)
        yield "k_norm.weight", (width,)


@dataclass(frozen=True)
class Weight:
    """One tensor as a rank of the trainer holds it."""

    name: str
    shape: Shape
    """On the ranks that share it: of experts those of one expert rank."""
    element: int
    """Bytes of an element as the forward sees it; FP8 experts: of the masters."""
    master: int
    trained: bool
    buffer: bool
    expert: bool
    fp8: bool
    """Of experts: whether they are gathered, and kept, as FP8 codes."""
    coded: bool
    """Whether their layer computes in FP8."""
    shards: int
    """Ranks that FSDP cuts it over."""

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def layer(self) -> int | None:
        return int(self.name.split(".")[2]) if self.name.startswith("model.layers.") else None

    @cached_property
    def shard(self) -> int:
        """Elements of a rank's part, the largest, which FSDP gives to all: along the first dimension, or the second of
        stacks where only that divides."""
        if self.shards == 1 or not self.shape:
            return self.numel
        first, *rest = self.shape
        if len(self.shape) > 2 and first % self.shards and not rest[0] % self.shards:
            return self.numel // self.shards
        return -(-first // self.shards) * math.prod(rest)

    @cached_property
    def fp8_bytes(self) -> int:
        """Codes and scales of the whole [E, N, K], once."""
        e, n, k = self.shape
        return self.numel + 4 * e * (n // BLOCK) * (k // BLOCK)


def weights(spec: ModelSpec, config: RunConfig, shape: MeshShape) -> list[Weight]:
    """Every tensor of the trainer, adapters too, in the model's order."""
    element, trainer = BYTES[config.model.dtype], config.trainer
    master = max(element, 4)
    float32 = FLOAT32.get(spec.architecture, ())
    out = []
    for name, whole in shapes(spec).items():
        expert = ".mlp.experts." in name
        coded = trainer.precision == "fp8" and can_be_fp8(name, whole, trainer.fp8_layers)
        fp8 = expert and coded
        held = (whole[0] // shape.expert, *whole[1:]) if expert else whole
        buffer = name.endswith(BUFFERS)
        trained = not buffer and not any(re.fullmatch(p, name) for p in config.model.frozen)
        shards = 1 if buffer else shape.expert_fsdp if expert else shape.fsdp
        wide = fp8 or name.endswith(float32)
        out.append(Weight(name, held, master if wide else element, master, trained, buffer, expert, fp8, coded, shards))
    return out if trainer.lora is None else list(_with_adapters(out, trainer.lora.rank, trainer.lora.targets))


def _with_adapters(found: list[Weight], rank: int, targets: list[str]) -> Iterator[Weight]:
    for w in found:
        place = w.name.removesuffix(".weight")
        linear = len(w.shape) > 1 and w.name not in ("model.embed_tokens.weight",) and not w.name.endswith(".mlp.gate.weight")
        chosen = linear and w.trained and any(re.fullmatch(p, place) for p in targets)
        yield replace(w, trained=False)
        if chosen:
            *stack, n, k = w.shape
            yield replace(w, name=f"{w.name}_lora_A", shape=(*stack, rank, k), fp8=False, coded=False)
            yield replace(w, name=f"{w.name}_lora_B", shape=(*stack, n, rank), fp8=False, coded=False)
