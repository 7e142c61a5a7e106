"""What autograd keeps of a block, and what a block needs beside it while it computes: bytes, op by op. Free of torch.

Legend: T tokens of a rank, P the same padded to buckets, D hidden width, H query heads, G key heads, C width of a head,
K experts per token, R rows of experts, I inner width, E experts, L query latent, X width of a latent key, a bytes of the
forward's type, w of the wider of that and float32.
Each storage counts once, with the first op that saves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

from prl.models.spec import ModelSpec
from prl.plan.weights import BLOCK

BOUND, WASTE = 1 << 22, 1.5
"""Of prl.layers.layout: pairs of a bucket, and what padding may cost."""
KEEP = 1 << 20
"""Of prl.layers.attention: pairs above which attention is computed again."""
LATENT = 1 << 24
"""KEEP and CHUNK of prl.kernels.latent_attention."""
SPARSE = 4096
"""Of prl.layers.dsa: keys from which they are kept by index."""


_QKV = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}


@dataclass(frozen=True)
class Op:
    name: str
    kept: int = 0
    """From its forward to its backward: what it saves of its inputs and outputs."""
    stays: int = 0
    """Of that what stays where the method that it is part of is computed again: inputs, and what others save of its outputs."""
    fixed: int = 0
    """Of `kept` integers and masks, which are never offloaded."""
    forward: int = 0
    """Beside what is kept, while it runs."""
    backward: int = 0
    weights: tuple[str, ...] = ()
    """Ends of the names of the parameters that get their gradient here."""
    wide: bool = False
    """Whether the gradient is made in float32 before it is cast."""
    parts: tuple[str, ...] = ()
    """What `recompute_targets` calls the methods that it is in, outer first."""


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

    @property
    def copied(self) -> int:
        """Rows of keys that are copied out; of a single span they are a view."""
        return 0 if self.single else self.b * self.s


@lru_cache(256)
def buckets(lengths: tuple[int, ...], ranks: int = 1, rank: int = 0) -> list[Bucket]:
    """Of documents end to end; with `ranks`, of one of the ranks that share the row, which is cut as a zigzag."""
    spans = [(n, n) for n in lengths]
    if ranks > 1:
        total = sum(lengths)
        chunk = total // (2 * ranks)
        first, length = rank * chunk, chunk if rank + 1 < ranks else 2 * chunk  # the last one's two pieces are neighbours
        spans = [span for low in dict.fromkeys((first, total - first - length)) for span in _spans(lengths, low, low + length)]
    whole = sorted(s for q, s in spans if q == s and s * s <= BOUND)
    groups: list[list[int]] = []
    for n in whole:
        if not groups or n > max(16, WASTE * groups[-1][0]) or (len(groups[-1]) + 1) * n * n > BOUND:
            groups.append([])
        groups[-1].append(n)
    found = [Bucket(len(g), g[-1], g[-1], len(g) == 1) for g in groups]
    for q, s in spans:
        if q == s and s * s <= BOUND:
            continue
        done = 0
        while done < q:
            start = s - q + done
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
    lengths: tuple[int, ...]
    """Documents of the whole row."""
    shared: int
    """Ranks that share it."""
    fp8: bool
    expert_ranks: int
    fp8_dispatch: bool
    context_rank: int = 0
    coded: frozenset[str] = frozenset()
    """Linear layers of the block that compute in FP8, by the ends of their names."""

    @property
    def w(self) -> int:
        return max(self.a, 4)

    @property
    def row(self) -> int:
        return sum(self.lengths)

    @property
    def t(self) -> int:
        return self.row // self.shared

    @property
    def buckets(self) -> list[Bucket]:
        return buckets(self.lengths, self.shared, self.context_rank)

    @property
    def stream(self) -> int:
        return self.t * self.spec.hidden_size * self.a


def sizes(
    spec: ModelSpec,
    element: int,
    lengths: Sequence[int],
    *,
    shared: int,
    fp8: bool,
    expert_ranks: int,
    fp8_dispatch: bool,
    context_rank: int = 0,
) -> Sizes:
    """Of a micro-batch of documents of these lengths, padded as ranks that share a row need it."""
    row = sum(lengths)
    padding = -row % (2 * shared) if shared > 1 else 0
    return Sizes(spec, element, (*lengths, *([1] * padding)), shared, fp8, expert_ranks, fp8_dispatch, context_rank)


def linear_kept(s: Sizes, name: str, out: int, width: int, *, copied: bool = False) -> int:
    """What a linear layer keeps beside its input, which it keeps too where it is not FP8: then the input's codes by column, and
    the weight's. `copied`: its weight is made for it, of two."""
    if name not in s.coded:
        return out * width * s.a if copied else 0
    rows = -(-s.t // BLOCK) * BLOCK
    return rows * width + rows // BLOCK * width * 4 + out * width + out * width // BLOCK**2 * 4


def block(s: Sizes, layer: int) -> list[Op]:
    """In the order of the forward."""
    d = s.spec.hidden_size
    attention = mla(s, layer) if s.spec.architecture == "glm_moe_dsa" else grouped_query(s)
    mlp = moe(s) if layer in s.spec.moe_layers else feed_forward(s, "mlp.", s.spec.raw["intermediate_size"])
    # Of the residual stream float32 keeps both states as the norms' inputs; else they are just there while the block runs.
    loose = s.stream if s.a < s.w else 0
    first = {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"} if s.spec.architecture == "glm_moe_dsa" else _QKV
    return [
        *norm("input_layernorm", s.t, d, s, loose, s.stream, saved=not first <= s.coded),
        *_beside(attention, 2 * s.stream if loose else 0, s.stream),
        Op("residual", forward=2 * s.stream + loose),
        *norm("post_attention_layernorm", s.t, d, s, 2 * loose, s.stream, saved="mlp.gate_proj" not in s.coded),
        *_beside(mlp, 2 * loose, s.stream),
        Op("residual", forward=2 * s.stream + 2 * loose),
    ]


def _beside(ops: Sequence[Op], forward: int, backward: int) -> list[Op]:
    """The residual stream, and in backward its gradient, wait while a branch computes."""
    return [
        Op(o.name, o.kept, o.stays, o.fixed, o.forward + forward, o.backward + backward, o.weights, o.wide, o.parts)
        for o in ops
    ]


def norm(
    name: str,
    rows: int,
    width: int,
    s: Sizes,
    forward: int = 0,
    backward: int = 0,
    *,
    saved: bool = True,
    parts: tuple[str, ...] = (),
) -> list[Op]:
    """RMSNorm in two ops. The root: the input in float32 (itself where it is), whose square's gradient takes five of it. The
    weight: the normalised copy, and the output where what follows saves it."""
    n = rows * width
    out = n * s.a if saved else 0
    parts = (*parts, "norm")
    wide = n * s.w
    return [
        Op(f"{name}.root", wide + rows * s.w, n * s.a, 0, forward + wide, backward + 5 * wide, (), False, parts),
        Op(
            f"{name}.weight",
            n * s.a + out,
            out,
            0,
            forward + n * s.a,
            backward + 3 * n * s.a,
            (f"{name}.weight",),
            False,
            parts,
        ),
    ]


def grouped_query(s: Sizes) -> list[Op]:
    raw, t, d, a, w = s.spec.raw, s.t, s.spec.hidden_size, s.a, s.w
    h, g, c, r = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"], s.spec.rope.dim
    bias = ("q_proj.bias", "k_proj.bias", "v_proj.bias") if raw["attention_bias"] else ()
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", *bias)
    parts = ("attn_proj",)
    # Rotation: half of the rotated part at a time in float32, then all of it again.
    qkv = sum(linear_kept(s, f"self_attn.{x}_proj", n * c, d) for x, n in (("q", h), ("k", g), ("v", g)))
    x = t * d * a if qkv else 0
    out = [
        Op("self_attn.qkv", qkv, x, 0, t * (h + 2 * g) * c * a, t * (h + 2 * g) * c * a + 2 * t * d * a, names, False, parts)
    ]
    if s.spec.architecture in ("qwen3", "qwen3_moe") or raw.get("use_qk_norm"):
        for name, heads in (("self_attn.q_norm", h), ("self_attn.k_norm", g)):
            out += norm(name, t * heads, c, s, t * (h + 2 * g) * c * a, t * (h + 2 * g) * c * a, saved=False, parts=parts)
    turned = t * h * r * w
    out.append(
        Op(
            "self_attn.rotate",
            0,
            0,
            0,
            t * (2 * h + 2 * g) * c * a + 2 * turned,
            t * (2 * h + g) * c * a + 2 * turned,
            (),
            False,
            parts,
        )
    )
    row, ranks, rows = (buckets(s.lengths), s.shared, s.row) if s.shared > 1 else (s.buckets, 1, t)
    heads, keys = h // ranks, max(g // ranks, 1)
    padded = sum(b.b * b.q for b in row)
    copied = sum(b.copied for b in row)
    held = rows if any(b.single for b in row) or not copied else 0  # views of the whole
    kept = padded * heads * c * a + (copied + held) * 2 * keys * c * a
    work = again = 0
    for b in row:
        inner = b.b * b.q * heads * (c * a + 4) + b.pairs * a
        if b.pairs > KEEP:
            again = max(again, inner + b.pairs)
        else:
            kept += inner
        work = max(work, b.pairs)  # the mask
    outs = padded * heads * c * a
    out.append(
        Op(
            "self_attn.core",
            kept,
            kept,
            0,
            max(work, again) + outs + t * (h + 2 * g) * c * a,
            again + outs + padded * (heads + 2 * keys) * c * a + t * h * c * a,
        )
    )
    o_bias = ("o_proj.bias",) if raw["attention_bias"] and s.spec.architecture != "glm4_moe" else ()
    weights = ("o_proj.weight", *o_bias)
    merged = linear_kept(s, "self_attn.o_proj", d, h * c) or t * h * c * a
    out.append(Op("self_attn.o_proj", merged, merged, 0, t * d * a + outs, t * h * c * a, weights))
    return out


def attended(s: Sizes) -> tuple[int, int]:
    """Latent attention's selection: (bytes that the layers after its indexer save too, bytes that go on with it unsaved)."""
    h, k = s.spec.raw["num_attention_heads"], s.spec.index_topk
    saved = loose = 0
    for b in s.buckets:
        if is_sparse(b, k):
            saved += b.b * b.q * k * 4
        elif b.pairs * h > LATENT:
            saved += b.pairs
        else:
            loose += b.pairs
    return saved, loose


def is_sparse(b: Bucket, k: int) -> bool:
    return b.s >= max(SPARSE, 2 * k)


def mla(s: Sizes, layer: int) -> list[Op]:
    raw, t, d, a, w = s.spec.raw, s.t, s.spec.hidden_size, s.a, s.w
    h, q, c, nope, rope, v = (
        raw[k]
        for k in ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    x, table = c + rope, t * rope * w  # of a rotation the complex table is kept
    bias = raw["attention_bias"]
    kv_a = ("kv_a_proj_with_mqa.weight", *(("kv_a_proj_with_mqa.bias",) if bias else ()))
    q_a = ("q_a_proj.weight", *(("q_a_proj.bias",) if bias else ()))
    project = ("attn_proj",)
    up_kept = linear_kept(s, "self_attn.q_b_proj", h * (nope + rope), q)
    # In float32 the norm's input is a view of the projection with its rotary part.
    tail = t * rope * a if a == w else 0
    out = [
        Op("self_attn.kv_a", table + tail, 0, 0, t * x * a, t * (x + 2 * d) * a, kv_a, False, project),
        *norm("self_attn.kv_a_layernorm", t, c, s, t * x * a, t * (x + d) * a, saved=False, parts=project),
        Op(
            "self_attn.q_a",
            linear_kept(s, "self_attn.q_a_proj", q, d),
            0,
            0,
            t * (q + x) * a,
            t * (q + 2 * d) * a,
            q_a,
            False,
            project,
        ),
        *norm("self_attn.q_a_layernorm", t, q, s, t * x * a, t * (x + d) * a, saved=not up_kept, parts=project),
    ]
    buckets_ = s.buckets
    padded = sum(b.b * b.q for b in buckets_)
    saved, loose = attended(s)
    indexed = layer in s.spec.indexed_layers
    if indexed:
        n, width, k = raw["index_n_heads"], raw["index_head_dim"], s.spec.index_topk
        work = max((b.pairs * (w + 2 + (16 if is_sparse(b, k) else 0)) for b in buckets_), default=0)
        queries = (t + padded) * (n * width * a + n * w) if any(b.s > k for b in buckets_) else 0
        out.append(Op("self_attn.indexer", saved, saved, saved, loose + work + queries + t * x * a, 0))
    passing = loose + t * x * a
    up = t * h * (nope + rope) * a
    keys = sum(b.copied for b in buckets_)
    held = (s.row if s.shared > 1 else t) if any(b.single for b in buckets_) or not keys or s.shared > 1 else 0
    kept, work, again = padded * h * (x + c) * a + (keys + held) * x * a, 0, 0
    cast = a if a < w else 0
    for b in buckets_:
        k = s.spec.index_topk
        # Chunk by chunk, the last one's tensors are there until the next one's take their names.
        if is_sparse(b, k):
            n = min(max(1, LATENT // (k * x)), b.b * b.q) * k
            work = max(work, n * max(2 * x * a + h * w, x * a + 3 * h * w))
            again = max(again, n * (x * (2 * a + w) + c * a + h * (3 * w + cast)))
        elif b.pairs * h <= LATENT:
            kept += b.pairs * h * w
            work = max(work, b.pairs * h * w)
            again = max(again, b.pairs * h * (2 * w + cast))
        else:
            n = max(1, LATENT // (b.b * b.s * h)) * b.b * b.s * h
            work = max(work, n * 3 * w)
            again = max(again, n * (3 * w + cast))
    outs, queries = padded * h * v * a, t * h * x * a
    chunks = padded * h * c * a if any(b.pairs * h > LATENT and not is_sparse(b, s.spec.index_topk) for b in buckets_) else 0
    forward = passing + queries + max(work - padded * h * c * a + chunks, 3 * outs, chunks)
    bias_o = ("o_proj.bias",) if bias else ()
    merged = linear_kept(s, "self_attn.o_proj", d, h * v) or t * h * v * a
    up_proj = ("q_b_proj.weight", "kv_b_proj.weight")
    return [
        *out,
        Op(
            "self_attn.q_b",
            up + table + up_kept,
            t * q * a if up_kept else 0,
            0,
            passing + t * h * (x + c) * a,
            up + t * h * x * a,
            up_proj,
            False,
            ("mla_up_proj",),
        ),
        Op("self_attn.core", kept, kept, 0, forward, again + outs + padded * h * (x + c) * a),
        Op("self_attn.o_proj", merged, merged, 0, loose + t * d * a, t * h * v * a, ("o_proj.weight", *bias_o)),
    ]


def feed_forward(s: Sizes, name: str, width: int) -> list[Op]:
    """Gate and up run as one product with a copy of both weights, which autograd keeps, in FP8 its codes."""
    t, d, a = s.t, s.spec.hidden_size, s.a
    parts, both = ("mlp",), (f"{name}gate_proj.weight", f"{name}up_proj.weight")
    joined = linear_kept(s, f"{name}gate_proj", 2 * width, d, copied=True)
    x = t * d * a if name == "mlp." and f"{name}gate_proj" in s.coded else 0
    down = linear_kept(s, f"{name}down_proj", d, width) or t * width * a
    return [
        Op(f"{name}gate_up", joined, x, 0, 0, t * (2 * width + d) * a, both, False, parts),
        Op(f"{name}swiglu", t * 2 * width * a, 0, 0, 0, t * 3 * width * a, (), False, parts),
        Op(f"{name}down", down, 0, 0, t * d * a, t * width * a, (f"{name}down_proj.weight",), False, parts),
    ]


def received(s: Sizes) -> int:
    """Tokens at a rank's experts where all experts get as many: of each rank those with one of theirs here."""
    share = 1 - (1 - 1 / s.expert_ranks) ** s.spec.top_k
    return round(s.t * s.expert_ranks * share)


def expert_rows(s: Sizes) -> int:
    """Rows of a rank's experts where all get as many: the ranks tell each other how many slots they send."""
    slots = s.t * s.spec.top_k
    if not s.fp8:
        return slots
    e = s.spec.n_experts // s.expert_ranks
    return (slots + min(slots, e) * (BLOCK - 1)) // BLOCK * BLOCK


def moe(s: Sizes) -> list[Op]:
    raw, t, d, a, w, k, e = s.spec.raw, s.t, s.spec.hidden_size, s.a, s.w, s.spec.top_k, s.spec.n_experts
    i, r = raw["moe_intermediate_size"], expert_rows(s)
    index = 8 * (r + received(s) * k)
    route = t * k * (8 + w)
    shared = i * raw.get("n_shared_experts", 0)
    # What the branches give to the norm's output waits while the next one computes.
    waits = t * d * a if shared else 0
    out = [
        Op(
            "mlp.gate",
            t * e * w + route,
            t * e * w + route,
            t * k * 8,
            0,
            t * e * w + t * d * (a + w) + waits,
            ("mlp.gate.weight",),
        )
    ]
    parts = ("routed_experts",)
    gate_up, down = ("experts.gate_up_proj",), ("experts.down_proj",)
    if s.fp8:
        kept = r * 2 * i * a + r * d + r // BLOCK * d * 4 + index
        forward = int(r * d * (1 + 4 / BLOCK)) + max(int(r * i * (1 + 4 / BLOCK)) + r * d * a, r * d * a + t * d * a)
        backward = int(2 * r * d * (1 + 4 / BLOCK)) + r * i * a + int(r * 5 * i * (1 + 4 / BLOCK)) + r * d * a
        out.append(Op("mlp.experts", kept, 0, index, forward, backward + waits, (*gate_up, *down), False, parts))
    else:
        out += [
            Op("mlp.experts.gate_up", r * d * a + index, 0, index, 0, r * (2 * i + d) * a + waits, gate_up, True, parts),
            Op("mlp.experts.swiglu", r * 2 * i * a, 0, 0, 0, r * 3 * i * a + waits, (), False, parts),
            Op("mlp.experts.down", r * i * a, 0, 0, 0, r * (i + d) * a + waits, down, True, parts),
            Op("mlp.experts.combine", r * d * a, 0, 0, t * d * a, r * d * a + waits, (), False, parts),
        ]
    if shared:
        out += _beside(feed_forward(s, "mlp.shared_experts.", shared), t * d * a, 0)
        out.append(Op("mlp.sum", forward=3 * t * d * a))
    return out
