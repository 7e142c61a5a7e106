"""Weights of GlmMoeDsaForCausalLM in files."""

from prl.models.convert import Experts, Float32, LayersLeftOut, Operation

WEIGHTS: tuple[Operation, ...] = (
    Experts("mlp.experts.gate_up_proj", ("gate_proj", "up_proj")),
    Experts("mlp.experts.down_proj", ("down_proj",)),
    Float32("mlp.gate.e_score_correction_bias"),
    Float32("self_attn.indexer.weights_proj.weight"),
    LayersLeftOut("multi-token prediction layer"),
)
