"""Llama (arXiv 2407.21783): dense, grouped-query attention, rotary embedding with Llama 3.1's scaling."""

from prl.layers.attention import AttentionConfig
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
        output_bias=raw["attention_bias"],
    )
    return Decoder(spec, attention)
