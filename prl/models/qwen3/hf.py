"""Weights of Qwen3ForCausalLM in files: the names are the model's own."""

from prl.models.convert import Operation

WEIGHTS: tuple[Operation, ...] = ()
