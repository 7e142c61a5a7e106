"""Qwen3 (arXiv 2505.09388), dense: QK-norm on every head."""

from prl.layers.attention import AttentionConfig
from prl.models.decoder import Decoder
from prl.models.spec import ModelSpec


def attention_of(spec: ModelSpec) -> AttentionConfig:
    raw = spec.raw
    return AttentionConfig(
        hidden=spec.hidden_size,
        heads=raw["num_attention_heads"],
        key_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        norm_eps=raw["rms_norm_eps"],
        qkv_bias=raw["attention_bias"],
        output_bias=raw["attention_bias"],
        qk_norm=True,
    )


def build(spec: ModelSpec) -> Decoder:
    return Decoder(spec, attention_of(spec))
