"""GLM-5 (zai-org/GLM-5): MLA with DSA, leading dense layers, then MoE with a shared expert."""

from __future__ import annotations

from prl.layers.block import Block
from prl.layers.dsa import Indexer
from prl.layers.mla import MLA
from prl.layers.mlp import MLP
from prl.layers.moe import MoE
from prl.layers.router import MoEConfig
from prl.models.base import Model
from prl.models.spec import ModelSpec


def build(spec: ModelSpec) -> Model:
    return Model(spec, lambda layer: _block(spec, layer))


def _block(spec: ModelSpec, layer: int) -> Block:
    raw, hidden = spec.raw, spec.hidden_size
    indexer = None
    if layer in spec.indexed_layers:
        indexer = Indexer(
            layer,
            hidden,
            q_latent=raw["q_lora_rank"],
            n_heads=raw["index_n_heads"],
            width=raw["index_head_dim"],
            rope_width=raw["qk_rope_head_dim"],
            top_k=raw["index_topk"],
        )
    attention = MLA(
        layer,
        hidden,
        n_heads=raw["num_attention_heads"],
        q_latent=raw["q_lora_rank"],
        kv_latent=raw["kv_lora_rank"],
        nope_width=raw["qk_nope_head_dim"],
        rope_width=raw["qk_rope_head_dim"],
        value_width=raw["v_head_dim"],
        bias=raw["attention_bias"],
        indexer=indexer,
    )
    if layer not in spec.moe_layers:
        return Block(attention, MLP(hidden, raw["intermediate_size"]), hidden, raw["rms_norm_eps"])
    moe = MoE(
        MoEConfig(
            hidden=hidden,
            width=raw["moe_intermediate_size"],
            n_experts=spec.n_experts,
            top_k=spec.top_k,
            scoring="sigmoid",
            correction_bias=True,
            n_group=raw["n_group"],
            topk_group=raw["topk_group"],
            normalise=raw["norm_topk_prob"],
            scale=raw["routed_scaling_factor"],
            shared_width=raw["moe_intermediate_size"] * raw["n_shared_experts"],
        )
    )
    return Block(attention, moe, hidden, raw["rms_norm_eps"])
