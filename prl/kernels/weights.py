"""FP8 copies of weights: quantised once per change of the weight, by each rank for its own shard, gathered as FP8.

Legend: E experts, N output width, K input width, M = N / 128, B = K / 128.
A copy is found again while nothing has changed: the count of changes that this process was told of (every optimizer step tells
by itself; what loads or imports weights calls `weights_changed`), the tensor, its storage and layout there, and torch's own
version counters, under FSDP2 those of the parameter and of its shard. They alone would not do: the optimizer under FSDP2 and
writes through `.data` or NumPy move none. With PRL_CHECK_WEIGHTS=1 a weight is quantised again at every use and compared, and
one that changed behind everybody's back is a StaleWeightError.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from prl.kernels.numerics import BLOCK, FP8
from prl.kernels.quantise import quantise_blocks, transpose_codes

_changes = 0


class StaleWeightError(RuntimeError):
    """A weight is not the one that its FP8 copy was made of, and nobody said so."""


def weights_changed(*_: Any) -> None:
    """Say that weights of this process have changed: call it after writing to any by hand."""
    global _changes
    _changes += 1


register_optimizer_step_post_hook(weights_changed)


class Quantised:
    """A weight's codes [E, N, K] and scales [E, M, B], and those of the transposed weight once they are asked for."""

    def __init__(self, codes_ENK: Tensor, scales_EMB: Tensor):
        self.plain = codes_ENK, scales_EMB

    @functools.cached_property
    def transposed(self) -> tuple[Tensor, Tensor]:
        """(codes [E, K, N], scales [E, B, M])."""
        codes_ENK, scales_EMB = self.plain
        return transpose_codes(codes_ENK), scales_EMB.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Copy:
    of: tuple[Any, ...]
    quantised: Quantised


_copies = WeakIdKeyDictionary()  # not attributes of the weights, which would be saved with them


def quantised(weight_ENK: Tensor, parameter: Tensor | None = None) -> Quantised:
    """The FP8 copy of a weight: the gathered one under FSDP, else made on first use after each change.

    `parameter` is what the weight is a shard of: writing to it moves its own version counter alone.
    """
    if isinstance(weight_ENK, CodedWeight):
        return weight_ENK.quantised
    with torch.no_grad():
        plain = weight_ENK.detach().as_subclass(Tensor)
        if weight_ENK.is_inference():  # it has no version counter
            return Quantised(*quantise_blocks(plain))
        versions = (_changes, weight_ENK._version, -1 if parameter is None else parameter._version)
        # An address may be another storage's by now, but not while a weak reference is held.
        storage = StorageWeakRef(plain.untyped_storage())
        of = (*versions, storage, plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
        found: _Copy | None = _copies.get(weight_ENK)
        if found is None or found.of != of:
            found = _copies[weight_ENK] = _Copy(of, Quantised(*quantise_blocks(plain)))
        elif os.environ.get("PRL_CHECK_WEIGHTS") == "1" and not _equal(found.quantised.plain, quantise_blocks(plain)):
            raise StaleWeightError(
                f"FP8 copy of a weight {list(plain.shape)}: the weight has changed since it was quantised, and neither an "
                "optimizer nor a load said so; call prl.kernels.weights.weights_changed() after writing to weights"
            )
        return found.quantised


def _equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    """Bit for bit: NaN is the same as NaN."""
    return all(torch.equal(x.view(t), y.view(t)) for x, y, t in zip(a, b, (torch.uint8, torch.int32), strict=True))


class ShardedWeight(Tensor):
    """A rank's shard of a weight in full precision, which FSDP2 gathers as FP8. Operations on it give plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[torch.Size, torch.Size] | None]:
        (parameter,) = (p for p in module.parameters(recurse=False) if getattr(p, "_local_tensor", None) is self)
        codes_ENK, scales_EMB = quantised(self, parameter).plain
        codes = codes_ENK.view(torch.uint8)  # gloo knows no float8
        if mesh.size() > 1:
            return (codes, scales_EMB), None
        # Where there is nothing to gather FSDP hands on the first tensor alone.
        return (torch.cat((codes.flatten(), scales_EMB.view(torch.uint8).flatten())),), (codes.shape, scales_EMB.shape)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        packed: tuple[torch.Size, torch.Size] | None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if packed is None:
            codes_ENK, scales_EMB = gathered[0].view(FP8), gathered[1]
        else:
            codes, scales = gathered[0].split((packed[0].numel(), gathered[0].numel() - packed[0].numel()))
            codes_ENK, scales_EMB = codes.view(FP8).view(packed[0]), scales.view(torch.float32).view(packed[1])
        if out is not None:  # the same buffers, filled anew
            assert isinstance(out, CodedWeight)
            out.quantised = Quantised(codes_ENK, scales_EMB)
            return None
        buffers = (codes_ENK, scales_EMB) if packed is None else gathered
        return CodedWeight(Quantised(codes_ENK, scales_EMB), dtype), buffers


class CodedWeight(Tensor):
    """A whole weight that exists in FP8 only: [E, N, K] or, of a linear layer, [N, K]. It takes a gradient, and nothing else
    can be done with it, but for putting linear layers' weights on top of each other."""

    quantised: Quantised

    @staticmethod
    def __new__(cls, quantised: Quantised, dtype: torch.dtype, *, linear: bool = False) -> CodedWeight:
        codes_ENK, _ = quantised.plain
        shape = codes_ENK.shape[1:] if linear else codes_ENK.shape
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes_ENK.device)
        self.quantised = quantised
        return self

    def __init__(self, quantised: Quantised, dtype: torch.dtype, *, linear: bool = False):
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):  # how FSDP makes it a parameter
            return CodedWeight(args[0].quantised, args[0].dtype, linear=args[0].dim() == 2)
        if func is torch.ops.aten.cat.default and all(isinstance(w, CodedWeight) and w.dim() == 2 for w in args[0]):
            codes, scales = zip(*(w.quantised.plain for w in args[0]), strict=True)
            joined = torch.cat([c.view(torch.uint8) for c in codes], 1).view(FP8)  # torch has next to no ops for FP8
            return CodedWeight(Quantised(joined, torch.cat(scales, 1)), args[0][0].dtype, linear=True)
        raise NotImplementedError(f"{func} of a weight that exists in FP8 only: no kernel but the FP8 ones can use it")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CodedWeight({list(self.shape)}, dtype={self.dtype})"


def gather_as_fp8(module: nn.Module, world: int) -> None:
    """Make FSDP2 gather the parameters of `module`, already sharded by whole experts, as FP8 codes and scales."""
    for name, p in module.named_parameters(recurse=False):
        e, n, k = p.shape
        if e % world or n % BLOCK or k % BLOCK:
            raise ValueError(
                f"{name} [{e}, {n}, {k}] cannot be gathered as FP8 over {world} ranks: the experts must be a multiple of the "
                f"ranks, the widths of {BLOCK}"
            )
    _say_how(module)
    module.register_load_state_dict_post_hook(_say_how)  # with assign=True its parameters are other tensors


def _say_how(module: nn.Module, *_: Any) -> None:
    for p in module.parameters(recurse=False):
        sharded = cast(DTensor, p)
        sharded._local_tensor = sharded._local_tensor.as_subclass(ShardedWeight)
