"""What autograd keeps of a block, and what a block needs beside it while it is computed: bytes, op by op. Free of torch.

Legend: T tokens of a rank, P the same padded to buckets, D hidden width, H query heads, G key heads, C width of a head,
K experts per token, R rows of experts, I inner width, J = 2I, E experts, a bytes of the forward's type, w of the wider of that
and float32.
An op's `kept` is what it adds to what autograd holds until its own backward: its inputs and outputs that are saved, each
storage once, with the first op that saves it. `forward` and `backward` are what exists beside that while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

from prl.config.schema import RunConfig
from prl.models.spec import ModelSpec
from prl.plan.weights import BLOCK

BOUND, KEEP, LATENT, SPARSE, WASTE = 1 << 22, 1 << 20, 1 << 24, 4096, 1.5
"""prl.layers.layout.BOUND, attention.KEEP, latent_attention.KEEP and CHUNK, dsa.SPARSE, PackedLayout's waste."""


@dataclass(frozen=True)
class Op:
    name: str
    kept: int = 0
    forward: int = 0
    backward: int = 0
    weights: tuple[str, ...] = ()
    """Ends of the names of the parameters that get their gradient here."""
    part: str = ""
    """What `recompute_targets` calls the method that it is in."""


@dataclass(frozen=True)
class Bucket:
    """As `prl.layers.layout.PackedBucket`: B sequences of Q queries and S keys each, padded."""

    b: int
    q: int
    s: int
    single: bool

    @property
    def pairs(self) -> int:
        return self.b * self.q * self.s


def buckets(lengths: Sequence[int], ranks: int = 1, *, whole: bool = False) -> list[Bucket]:
    """Of documents end to end; with `ranks`, of the first of the ranks that share the row, which is cut as a zigzag, but with
    `whole` of all of it."""
    if ranks > 1 and not whole:
        total = sum(lengths)
        chunk = total // (2 * ranks)
        spans = [s for low in (0, total - chunk) for s in _spans(lengths, low, low + chunk)]
    else:
        spans = [(n, n) for n in lengths]
    full = sorted(s for q, s in spans if q == s and s * s <= BOUND)
    out: list[list[int]] = []
    for n in full:
        if not out or n > max(16, WASTE * out[-1][0]) or (len(out[-1]) + 1) * n * n > BOUND:
            out.append([])
        out[-1].append(n)
    found = [Bucket(len(g), g[-1], g[-1], len(g) == 1) for g in out]
    for q, s in spans:
        if q == s and s * s <= BOUND:
            continue
        before, done = s - q, 0
        while done < q:
            start = before + done
            n = min(max((isqrt(start * start + 4 * BOUND) - start) // 2, 1), q - done)
            found.append(Bucket(1, n, start + n, True))
            done += n
    return found


def _spans(lengths: Sequence[int], low: int, high: int) -> list[tuple[int, int]]:
    """(queries, keys) of what lies between two tokens of each document."""
    out, start = [], 0
    for n in lengths:
        first, last = max(start, low), min(start + n, high)
        if first < last:
            out.append((last - first, last - start))
        start += n
    return out


@dataclass(frozen=True)
class Sizes:
    """What the ops of a block are functions of."""

    spec: ModelSpec
    a: int
    t: int
    buckets: tuple[Bucket, ...]
    shared: int
    """Ranks that share the row."""
    row: int
    """Tokens of the whole row."""
    fp8: bool
    expert_ranks: int
    fp8_dispatch: bool

    @property
    def w(self) -> int:
        return max(self.a, 4)

    @property
    def padded(self) -> int:
        return sum(b.b * b.q for b in self.buckets)


def norm(name: str, rows: int, width: int, s: Sizes, *, saved: bool = True) -> Op:
    """RMSNorm: the input in float32 (itself where it is), its normalised copy, and the output where what follows saves it."""
    kept = rows * width * (s.w + s.a) + rows * s.w + (rows * width * s.a if saved else 0)
    return Op(name, kept, rows * width * s.w, rows * width * (s.a + 3 * s.w), (f"{name}.weight",), "norm")


def block(s: Sizes, layer: int) -> list[Op]:
    """In the order of the forward."""
    d = s.spec.hidden_size
    attention = mla(s, layer) if s.spec.architecture == "glm_moe_dsa" else grouped_query(s)
    mlp = moe(s) if layer in s.spec.moe_layers else feed_forward(s, "mlp", s.spec.raw["intermediate_size"])
    residual = s.t * d * s.a  # the stream's gradient waits while a branch computes
    return [
        replace(op, backward=op.backward + residual, forward=op.forward + residual)
        for op in (norm("input_layernorm", s.t, d, s), *attention, norm("post_attention_layernorm", s.t, d, s), *mlp)
    ]


def grouped_query(s: Sizes) -> list[Op]:
    raw, t, d, a = s.spec.raw, s.t, s.spec.hidden_size, s.a
    h, g, c = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    norms = s.spec.architecture in ("qwen3", "qwen3_moe") or bool(raw.get("use_qk_norm"))
    out = [
        Op(
            "self_attn.qkv",
            0,
            t * (h + 2 * g) * c * a,
            t * ((h + 2 * g) * c + d) * a,
            ("q_proj", "k_proj", "v_proj"),
            "attn_proj",
        )
    ]
    if norms:
        out += [
            replace(norm("self_attn.q_norm", t * h, c, s, saved=False), part="norm"),
            replace(norm("self_attn.k_norm", t * g, c, s, saved=False), part="norm"),
        ]
    keys = sum((b.s if b.single else b.b * b.s) for b in s.buckets) if s.shared == 1 else s.row
    kept = s.padded * h * c * a + keys * 2 * g * c * a
    work = 0
    for b in s.buckets:
        inner = b.b * b.q * h * (c * a + 4) + b.pairs * a
        if b.pairs > KEEP:
            work = max(work, inner)
        else:
            kept += inner
    out.append(Op("self_attn.core", kept, work + t * h * c * a, work + t * (2 * h + 2 * g) * c * a))
    out.append(Op("self_attn.o_proj", t * h * c * a, t * d * a, t * (d + h * c) * a, ("o_proj",)))
    return out


def mla(s: Sizes, layer: int) -> list[Op]:
    raw, t, d, a, w = s.spec.raw, s.t, s.spec.hidden_size, s.a, s.w
    h, q, c, nope, rope, v = (
        raw[k]
        for k in ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    x, p = c + rope, s.padded
    out = [
        Op("self_attn.kv_a", t * rope * w + t * rope * w, t * x * a, t * (x + d) * a, ("kv_a_proj_with_mqa",), "attn_proj"),
        replace(norm("self_attn.kv_a_layernorm", t, c, s, saved=False), part="attn_proj"),
        Op("self_attn.q_a", 0, t * q * a, t * (q + d) * a, ("q_a_proj",), "attn_proj"),
        replace(norm("self_attn.q_a_layernorm", t, q, s), part="attn_proj"),
    ]
    if layer in s.spec.indexed_layers:
        n, width, k = raw["index_n_heads"], raw["index_head_dim"], s.spec.index_topk
        kept, work = 0, 0
        for b in s.buckets:
            sparse = b.s >= max(SPARSE, 2 * k)
            kept += b.b * b.q * k * 4 if sparse else b.pairs
            work = max(work, b.pairs * (w + 2) + (b.pairs * 13 if sparse else 0))
        out.append(Op("self_attn.indexer", kept, work + t * n * width * a * 2, 0))
    out.append(
        Op(
            "self_attn.q_b",
            t * h * (nope + rope) * a + t * rope * w,
            t * h * x * a,
            t * h * (x + nope + rope) * a,
            ("q_b_proj",),
            "mla_up_proj",
        )
    )
    keys = s.row if s.shared > 1 else sum(b.s if b.single else b.b * b.s for b in s.buckets)
    kept, work = p * h * x * a + keys * x * a + p * h * c * a, 0
    for b in s.buckets:
        k = s.spec.index_topk
        if b.s >= max(SPARSE, 2 * k):
            n = max(1, LATENT // (k * x))
            work = max(work, n * (k * x * (a + w) + h * k * 3 * w))
        elif b.pairs * h <= LATENT:
            kept += b.pairs * h * w
            work = max(work, 2 * b.pairs * h * w)
        else:
            work = max(work, 3 * LATENT * w)
    out.append(Op("self_attn.core", kept, work + t * h * v * a, work + p * h * (x + c) * a))
    out.append(Op("self_attn.o_proj", t * h * v * a, t * d * a, t * (d + h * v) * a, ("o_proj", "kv_b_proj")))
    return out


def feed_forward(s: Sizes, name: str, width: int) -> list[Op]:
    """Gate and up run as one product with a copy of both weights, which autograd keeps."""
    t, d, a = s.t, s.spec.hidden_size, s.a
    return [
        Op(f"{name}.gate_up", 2 * width * d * a, 0, (t * (2 * width + d) + 2 * width * d) * a, ("gate_proj", "up_proj"), "mlp"),
        Op(f"{name}.swiglu", t * 2 * width * a, 0, t * 3 * width * a, (), "mlp"),
        Op(f"{name}.down", t * width * a, t * d * a, t * (width + d) * a, ("down_proj",), "mlp"),
    ]


def expert_rows(s: Sizes) -> int:
    """Rows of a rank's experts where tokens go to all experts alike. A token goes once to each rank that holds one of its."""
    slots = s.t * s.spec.top_k
    if s.fp8:
        e = s.spec.n_experts // s.expert_ranks
        return (slots + min(slots, e) * (BLOCK - 1)) // BLOCK * BLOCK
    return slots


def moe(s: Sizes) -> list[Op]:
    raw, t, d, a, w, k, e = s.spec.raw, s.t, s.spec.hidden_size, s.a, s.w, s.spec.top_k, s.spec.n_experts
    i, r = raw["moe_intermediate_size"], expert_rows(s)
    index = 8 * (r + t * k)
    out = [Op("mlp.gate", t * e * w + t * k * (8 + w), t * e * w, t * (e * w + d * (a + w)), ("gate.weight",))]
    if s.fp8:
        kept = r * 2 * i * a + r * d + r // BLOCK * d * 4 + index
        forward = r * (d + i) + r * max(i * a, d * a)
        out.append(
            Op("mlp.experts", kept, forward, r * (2 * d + 7 * i) + r * max(d, 2 * i) * a, ("experts.",), "routed_experts")
        )
    else:
        out += [
            Op("mlp.experts.gate_up", r * d * a + index, 0, r * (2 * i + d) * a, ("experts.gate_up_proj",), "routed_experts"),
            Op("mlp.experts.swiglu", r * 2 * i * a, 0, r * 3 * i * a, (), "routed_experts"),
            Op("mlp.experts.down", r * i * a, 0, r * (i + d) * a, ("experts.down_proj",), "routed_experts"),
            Op("mlp.experts.combine", r * d * a, t * d * (a + w), r * d * a + t * d * a, (), "routed_experts"),
        ]
    if shared := i * raw.get("n_shared_experts", 0):
        out += feed_forward(s, "mlp.shared_experts", shared)
    return out


def sizes(spec: ModelSpec, config: RunConfig, element: int, lengths: Sequence[int], shared: int, expert_ranks: int) -> Sizes:
    """Of a micro-batch of documents of these lengths, whose row so many ranks share."""
    row = sum(lengths)
    if shared > 1:
        row = -(-row // (2 * shared)) * 2 * shared
        lengths = [*lengths, *([1] * (row - sum(lengths)))]
    return Sizes(
        spec,
        element,
        row // shared,
        tuple(buckets(lengths, shared)),
        shared,
        row,
        config.trainer.precision == "fp8",
        expert_ranks,
        config.trainer.mesh.fp8_dispatch,
    )
