"""Qwen3-MoE (arXiv 2505.09388): Qwen3's attention, a softmax router, no shared expert."""

from prl.layers.router import MoEConfig
from prl.models.decoder import Decoder
from prl.models.qwen3.model import attention_of
from prl.models.spec import ModelSpec


def build(spec: ModelSpec) -> Decoder:
    moe = None
    if spec.moe_layers:
        moe = MoEConfig(
            hidden=spec.hidden_size,
            width=spec.raw["moe_intermediate_size"],
            n_experts=spec.n_experts,
            top_k=spec.top_k,
            scoring="softmax",
            correction_bias=False,
            normalise=spec.raw["norm_topk_prob"],
        )
    return Decoder(spec, attention_of(spec), moe)
