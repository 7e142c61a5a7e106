"""GLM-4.5 (arXiv 2508.06471), GLM-4.5-Air and INTELLECT-3: half-rotary attention, a sigmoid router with correction bias,
a shared expert and leading dense layers."""

from prl.layers.attention import AttentionConfig
from prl.layers.router import MoEConfig
from prl.models.decoder import Decoder
from prl.models.spec import ModelSpec


def build(spec: ModelSpec) -> Decoder:
    raw = spec.raw
    attention = AttentionConfig(
        hidden=spec.hidden_size,
        heads=raw["num_attention_heads"],
        key_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        norm_eps=raw["rms_norm_eps"],
        qkv_bias=raw["attention_bias"],
        qk_norm=raw["use_qk_norm"],
    )
    moe = None
    if spec.moe_layers:
        moe = MoEConfig(
            hidden=spec.hidden_size,
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
    return Decoder(spec, attention, moe)
