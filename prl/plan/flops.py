"""Floating point operations of a training step, by formula. A multiply-add is two. Free of torch.

Only matrix products count, as in every published MFU (Chowdhery et al. 2022, appendix B): projections, feed-forwards, the
top_k experts of a token, router and LM head. Attention counts the pairs that exist: of causal documents, and of DSA only the
keys that are kept; its indexer scores every causal pair. MLA counts as published (keys and values expanded), whatever form is
computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from prl.models.spec import ModelSpec


def pairs(lengths: Sequence[int], most: int | None = None) -> int:
    """Query-key pairs of causal documents; `most` keys a query where given."""
    if most is None:
        return sum(n * (n + 1) // 2 for n in lengths)
    return sum(k * (k + 1) // 2 + (n - k) * most for n in lengths for k in [min(n, most)])


def forward(spec: ModelSpec, lengths: Sequence[int], scored: int) -> dict[str, int]:
    """FLOPs of one forward over documents of these lengths, of which `scored` positions reach the LM head; by part."""
    raw, d, t, heads = spec.raw, spec.hidden_size, sum(lengths), spec.raw["num_attention_heads"]
    indexer = 0
    if spec.architecture == "glm_moe_dsa":
        q, c, nope, rope, v = (
            raw[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        projections = d * q + q * heads * (nope + rope) + d * (c + rope) + c * heads * (nope + v) + heads * v * d
        attention = pairs(lengths, spec.index_topk) * heads * (nope + rope + v)
        n, w = raw["index_n_heads"], raw["index_head_dim"]
        indexer = len(spec.indexed_layers) * (t * (q * n * w + d * w + d * n) + pairs(lengths) * n * w)
    else:
        width = raw.get("head_dim") or d // heads
        projections = d * width * (2 * heads + 2 * raw["num_key_value_heads"])
        attention = pairs(lengths) * heads * 2 * width
    moe = len(spec.moe_layers)
    inner, shared = raw.get("moe_intermediate_size", 0), raw.get("n_shared_experts", 0)
    dense = (spec.n_layers - moe) * 3 * d * raw["intermediate_size"] + moe * 3 * d * inner * shared
    macs = {
        "projections": spec.n_layers * t * projections,
        "attention": spec.n_layers * attention,
        "indexer": indexer,
        "feed-forwards": t * dense,
        "router": moe * t * d * spec.n_experts,
        "experts": moe * t * spec.top_k * 3 * d * inner,
        "head": scored * d * spec.vocab_size,
    }
    return {part: 2 * n for part, n in macs.items()}


def training(spec: ModelSpec, lengths: Sequence[int], scored: int) -> int:
    """FLOPs of forward and backward: twice the forward again for the gradients, none for the indexer, which is frozen; what is
    computed again (activation checkpointing) does not count."""
    parts = forward(spec, lengths, scored)
    return 3 * sum(parts.values()) - 2 * parts["indexer"]
