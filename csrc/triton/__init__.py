"""Triton kernels, importable as `prl_triton`: one module per op, under the op's name in `prl.kernels`."""
