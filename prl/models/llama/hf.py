"""Weights of LlamaForCausalLM in files: the names are the model's own."""

from prl.models.convert import LeftOut, Operation

WEIGHTS: tuple[Operation, ...] = (LeftOut(r".*\.rotary_emb\.inv_freq", "computed from config.json"),)
