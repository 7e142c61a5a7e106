"""Triton kernels, importable as `prl_triton`. OPS: op of `prl.kernels` → its launcher; AOT: what is compiled to be checked."""

from collections.abc import Callable
from typing import Any

from prl_triton import grouped_gemm, indexer, lm_head, permute, quantise, router, router_logits, swiglu
from prl_triton.aot import Aot

_MODULES = (quantise, permute, swiglu, router, indexer, grouped_gemm, router_logits, lm_head)

OPS: dict[str, Callable[..., Any]] = {name: launch for module in _MODULES for name, launch in module.OPS.items()}
AOT: list[Aot] = [aot for module in _MODULES for aot in module.AOT]
