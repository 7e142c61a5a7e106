"""The CUDA backend: GEMMs for Hopper out of csrc/cuda, an object of its own with a plain C interface, loaded with ctypes.

The object lies beside the package and needs neither the torch nor the CUDA toolkit that it was built with: prl can be carried
to another machine as it is. The schemas and their semantics are in prl.kernels.grouped_gemm.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl.kernels import checks
from prl.kernels.registry import damaged, no_gpu

OBJECT = Path(__file__).parents[1] / "_cuda_sm90a.so"
CAPABILITY = (9, 0)
LARGEST = 2**31 - 257
"""Along one dimension: the coordinates of Hopper's tensor copies are int32, and a tile may begin just below."""
LARGEST_MATRIX = 2**40 - 1
"""In bytes: what a stride of theirs holds."""

_POINTER, _SIZE, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class CudaError(RuntimeError):
    """A kernel that could not be launched; the message names the op and says why."""


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(OBJECT))
    library.prl_cuda_ready.argtypes = []
    library.prl_cuda_error.argtypes, library.prl_cuda_error.restype = [ctypes.c_int], ctypes.c_char_p
    library.prl_grouped_gemm_fp8.argtypes = [*[_POINTER] * 7, _FLAG, *[_SIZE] * 4, _POINTER]
    library.prl_grouped_gemm_weight_fp8.argtypes = [*[_POINTER] * 7, *[_SIZE] * 4, _POINTER]
    return library


def unavailable() -> str | None:
    """Why these kernels cannot run in this process, in words; None where they can."""
    if not OBJECT.exists():
        return f"{OBJECT.name} is not built; install prl where nvcc 12.4 or newer is found"
    if why := no_gpu():
        return why
    capability = torch.cuda.get_device_capability()
    if capability != CAPABILITY:
        return f"the device has compute capability {capability[0]}.{capability[1]}, the kernels are for 9.0 (H100, H200)"
    mend = "install prl again where nvcc 12.4 or newer is found"
    if why := damaged(OBJECT):
        return f"{why}; {mend}"
    try:
        code = _library().prl_cuda_ready()
    except (OSError, AttributeError) as e:  # no library, or that of another version
        return f"{OBJECT} cannot be loaded ({e}); {mend}"
    return _words(code) if code else None


def _words(code: int) -> str:
    return _library().prl_cuda_error(code).decode()


def _sizes(op: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size > LARGEST:
            checks.fail(op, name, f"at most {LARGEST} (tensor copies count in int32)", size)


def _matrix(op: str, argument: str, t: Tensor) -> None:
    """A matrix of codes, the last two dimensions of `t`."""
    if t.shape[-1] * t.shape[-2] > LARGEST_MATRIX:
        checks.fail(op, argument, f"of at most {LARGEST_MATRIX} bytes in its last two dimensions", list(t.shape))
    _aligned(op, argument, t)


def _aligned(op: str, argument: str, t: Tensor) -> None:
    """What is moved 16 bytes at a time; a tensor of its own is aligned, a part of another may not be."""
    if t.data_ptr() % 16:
        checks.fail(op, argument, "aligned to 16 bytes", f"an address that is {t.data_ptr() % 16} beyond")


def _launch(op: str, device: torch.device, *args: Any) -> None:
    """`args` as in the C interface, without the stream."""
    with torch.cuda.device(device):
        pointers = (a.data_ptr() if isinstance(a, Tensor) else a for a in args)
        code = getattr(_library(), f"prl_{op}")(*pointers, torch.cuda.current_stream().cuda_stream)
    if code:
        raise CudaError(f"{op}: {_words(code)} (code {code})")


def _grouped_gemm_fp8(
    a_RK: Tensor,
    a_scales_BR: Tensor,
    w_ENK: Tensor,
    w_scales_EMB: Tensor,
    starts_E1: Tensor,
    counts_E: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    op, r, (e, n, k) = "grouped_gemm_fp8", len(a_RK), w_ENK.shape
    _sizes(op, R=r, N=n, K=k, E=e)
    _matrix(op, "a_RK", a_RK)
    _matrix(op, "w_ENK", w_ENK)
    if not e or not k:
        return a_RK.new_zeros(r, n, dtype=out_dtype)
    out_RN = a_RK.new_empty(r, n, dtype=out_dtype)
    wide = out_dtype == torch.float32
    operands = (a_RK, a_scales_BR, w_ENK, w_scales_EMB, starts_E1, counts_E)
    _launch(op, a_RK.device, *operands, out_RN, wide, r, n, k, e)
    return out_RN


def _grouped_gemm_weight_fp8(
    g_NR: Tensor,
    g_scales_CN: Tensor,
    a_KR: Tensor,
    a_scales_CK: Tensor,
    starts_E1: Tensor,
    counts_E: Tensor,
    out_ENK: Tensor,
) -> None:
    op, r, (e, n, k) = "grouped_gemm_weight_fp8", g_NR.shape[1], out_ENK.shape
    _sizes(op, R=r, N=n, K=k, E=e)
    _matrix(op, "g_NR", g_NR)
    _matrix(op, "a_KR", a_KR)
    _aligned(op, "a_scales_CK", a_scales_CK)
    _aligned(op, "out_ENK", out_ENK)
    if r:
        operands = (g_NR, g_scales_CN, a_KR, a_scales_CK, starts_E1, counts_E)
        _launch(op, g_NR.device, *operands, out_ENK, r, n, k, e)


OPS: dict[str, Callable[..., Any]] = {
    "grouped_gemm_fp8": _grouped_gemm_fp8,
    "grouped_gemm_weight_fp8": _grouped_gemm_weight_fp8,
}
