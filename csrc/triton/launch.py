"""How the launchers start a kernel: on the tensors' device, with the shipped configuration, and not at all for no programs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from prl_triton.configs import config


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of `x` current, so that kernels are launched there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def launch(op: str, kernel: Any, programs: int, *args: Any, **constexprs: Any) -> None:
    """Start `programs` programs of `kernel` on the device of `args[0]` with the configuration of `op`.

    Multiplications and additions stay apart (no fused multiply-add but where the kernel says so), as in the reference.
    """
    if programs:
        with device_of(args[0]):
            kernel[(programs,)](*args, **constexprs, **config(op), enable_fp_fusion=False)
