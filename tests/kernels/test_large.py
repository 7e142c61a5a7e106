"""Tensors of more than 2^31 elements, on the CPU backend: what an index of 32 bits would read or write elsewhere."""

import re
from pathlib import Path

import pytest
import torch

from prl.bench.cases import same
from prl.kernels import registry
from prl.kernels.permute import combine, permute, sort_rows
from prl.kernels.quantise import quantise_rows

TOKENS, TOP_K, WIDTH = 43_691, 8, 6144
GIB = 2**30


def available_memory() -> int:
    """Bytes."""
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(registry.unavailable("cpu") is not None, reason=str(registry.unavailable("cpu")))
def test_more_than_two_to_the_31_elements(monkeypatch):
    if available_memory() < 10 * GIB:
        pytest.skip("needs 10 GiB of memory")
    monkeypatch.setenv("PRL_KERNELS", "cpu")
    ids = torch.arange(TOKENS * TOP_K).remainder(64).view(TOKENS, TOP_K)
    source, position, starts, counts = sort_rows(ids, 64)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    rows = permute(x, source, position)
    assert rows.numel() > 2**31
    beyond = slice(2**31 // WIDTH - 64, None)  # rows on both sides of element 2^31, up to the last
    wanted = x[source[beyond] // TOP_K]
    assert torch.equal(rows[beyond], wanted) and torch.equal(rows[:64], x[source[:64] // TOP_K])

    codes, scales = quantise_rows(rows)
    monkeypatch.setenv("PRL_KERNELS", "reference")
    want_codes, want_scales = quantise_rows(wanted)
    assert same(codes[beyond], want_codes) and torch.equal(scales[:, beyond], want_scales)
    del codes, scales

    monkeypatch.setenv("PRL_KERNELS", "cpu")
    total = combine(rows, None, source, position)
    last = ids[:, -1] == 63  # tokens with a row of the last expert
    assert torch.equal(total[last][-64:], (x[last][-64:].float() * TOP_K).to(torch.bfloat16))
