"""The bitwise mode: a forward whose bits, for each token, follow from the tokens before it and the weights alone.

Packing, padding, chunks, the batch, cached prefixes and the number of threads change nothing, so a trainer and an embedded
engine with the same weights give a token the same logprob, to the last bit. Every sum whose order torch leaves open goes
through an op of the backend `cpu` that fixes it: dense products, attention, logprobs of sampled tokens. What is already fixed
stays: experts, router, SwiGLU, the indexer and its selection, and torch's sums along the last dimension (norms).
"""

from __future__ import annotations

import torch

from prl.config.named import SetupError
from prl.kernels import registry
from prl.layers.attention import Attention, attend_in_order
from prl.layers.linear import Linear
from prl.layers.mla import MLA
from prl.models.base import Model

SPLIT = 1 << 15
"""Numbers from which on torch's threads share the sum of a single row."""
OPS = (
    "attention",
    "combine",
    "grouped_gemm",
    "grouped_gemm_fp8",
    "index_scores",
    "index_select",
    "label_logprobs",
    "linear",
    "logits",
    "logprobs",
    "permute",
    "permute_quantise",
    "quantise_rows",
    "rotate_pairs",
    "route",
    "router_logits",
    "swiglu",
    "swiglu_quantise",
)
"""Those of a forward."""


def fix_order(model: Model, device: torch.device) -> None:
    """Let `model` compute in the fixed order on `device`. SetupError where it cannot: another backend, float64, too wide."""
    for name in OPS:
        if (backend := registry.backend_of(name, device.type)) != "cpu":
            raise SetupError(
                f"run.bitwise: {name} would run on {backend}, whose order of sums is not fixed; expected the backend cpu "
                "(set launch.kernels: cpu to be told what it lacks)"
            )
    for name, p in model.named_parameters():
        if p.dtype == torch.float64:
            raise SetupError(f"run.bitwise: {name} is float64, which only the reference computes; expected bfloat16 or float32")
    if model.spec.hidden_size >= SPLIT:
        raise SetupError(
            f"run.bitwise: hidden_size is {model.spec.hidden_size}, expected less than {SPLIT}: torch's threads share "
            "the sum of a larger norm"
        )
    model.rope.in_order = True
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = attend_in_order
        elif isinstance(module, MLA | Linear):
            module.in_order = True
