"""The ops, one module per family; importing the package defines all of them in `torch.ops.prl`."""

from prl.kernels import grouped_gemm, indexer, lm_head, permute, quantise, router, swiglu

__all__ = ["grouped_gemm", "indexer", "lm_head", "permute", "quantise", "router", "swiglu"]
