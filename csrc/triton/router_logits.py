"""Dense products that keep float32 to the end: the router's logits, and the LM head's for sampling.

Tiles and the order of K are the same for every number of rows, so that a row's logits do not depend on the batch. The router
multiplies in IEEE float32 on the ordinary units whatever the types: TF32 moves logits by 1e-3, which is other experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prl_triton.aot import Aot, shipped
from prl_triton.configs import config
from prl_triton.grouped_gemm import ordered, product, product_aot
from prl_triton.launch import launch


@triton.jit(do_not_specialize=["M"])
def dense_kernel(
    a_ptr,
    w_ptr,
    out_ptr,
    M,
    N,
    K,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = ordered(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = product(
        a_ptr, tl.minimum(rows, M - 1), w_ptr, tl.minimum(columns, N - 1), N, K, BLOCK_M, BLOCK_N, BLOCK_K, False, WIDE
    )
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out_ptrs, total, mask=(rows < M)[:, None] & (columns < N)[None, :])


def dense(name: str, a_MK: Tensor, w_NK: Tensor, wide: bool) -> Tensor:
    """float32 [M, N]: a · wᵀ with the configuration `name`; if `wide`, multiplied in float32."""
    (m, k), n = a_MK.shape, len(w_NK)
    out_MN = a_MK.new_empty(m, n, dtype=torch.float32)
    table = config(name)
    programs = triton.cdiv(m, table["BLOCK_M"]) * triton.cdiv(n, table["BLOCK_N"])
    launch(name, dense_kernel, programs, a_MK, w_NK, out_MN, m, n, k, WIDE=wide)
    return out_MN


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return dense("router_logits", x_TD, weight_ED, True)


def dense_aot(name: str, a: str, w: str, wide: bool) -> Aot:
    sizes = {"M": "i32", "N": "i32", "K": "i32"}
    aot = shipped(name, dense_kernel, {"a_ptr": a, "w_ptr": w, "out_ptr": "*fp32", **sizes}, WIDE=wide)
    return product_aot(aot, None if wide else "HGMMA")


OPS: dict[str, Callable[..., Any]] = {"router_logits": router_logits}
_TYPES = (("*bf16", "*fp32"), ("*bf16", "*bf16"), ("*fp32", "*fp32"))
AOT: list[Aot] = [dense_aot("router_logits", *types, wide=True) for types in _TYPES]
