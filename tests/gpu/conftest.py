"""Tests on one GPU: `pytest -m gpu tests/gpu/kernels`. Imports only what a bare GPU node has."""

import pytest
import torch


@pytest.fixture(autouse=True)
def device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.fixture(autouse=True)
def poisoned(device):
    """What the allocator hands out next holds NaN: a kernel that leaves a row unwritten shows it."""
    torch.full((1 << 28,), torch.nan, device=device)
    yield
    torch.cuda.empty_cache()
