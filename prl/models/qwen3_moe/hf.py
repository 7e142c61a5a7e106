"""Weights of Qwen3MoeForCausalLM in files."""

from prl.models.convert import Experts, Operation

WEIGHTS: tuple[Operation, ...] = (
    Experts("mlp.experts.gate_up_proj", ("gate_proj", "up_proj")),
    Experts("mlp.experts.down_proj", ("down_proj",)),
)
