"""Every op on Triton and on CUDA against the reference, at real sizes and at awkward ones, in memory that holds NaN."""

import pytest
import torch

from prl.bench.cases import check, device_cases
from prl.kernels import registry
from prl.kernels.experts import experts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_every_op_agrees_with_the_reference(device, backend):
    why = registry.unavailable(backend)
    if why:
        pytest.skip(f"{backend}: {why}")
    ops, differ, checked = registry.functions(backend), [], set()
    for case in device_cases(device):
        if case.op not in ops:
            continue
        try:
            check(case, ops)
        except AssertionError as e:
            differ.append(f"{case}: {e}")
        checked.add(case.op)
    assert not differ, "\n".join(differ)
    assert checked == set(ops)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_token_does_not_depend_on_its_batch_and_bits_repeat(device, precision):
    torch.manual_seed(0)
    x = torch.randn(3000, 1024, device=device).bfloat16()
    ids = torch.rand(3000, 16, device=device).argsort(-1)[:, :4].contiguous()
    weights = torch.rand(3000, 4, device=device)
    gate_up = (torch.randn(16, 1024, 1024, device=device) / 32).bfloat16()
    down = (torch.randn(16, 1024, 512, device=device) / 23).bfloat16()

    def forward(rows):
        return experts(
            x[rows].contiguous(), ids[rows].contiguous(), weights[rows].contiguous(), gate_up, down, precision=precision
        )

    whole = forward(slice(None))
    assert torch.equal(forward(slice(None)), whole)
    for rows in (slice(7, 8), slice(100, 133), slice(0, 1000)):
        assert torch.equal(forward(rows), whole[rows])


def test_more_elements_than_32_bits_count(device):
    """349,526 rows of 6,144 are more than 2^31 elements: the last rows are moved as the first are."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GB")
    rows, width = 349_526, 6144
    ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    ops = torch.ops.prl
    source, position, starts, counts = ops.sort_rows(ids, 1, 128)
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    x[-1] = torch.arange(width, device=device) % 7
    moved = ops.permute(x, source, position)
    assert torch.equal(moved[rows - 1], x[-1])
    del moved
    codes, scales, _, _ = ops.permute_quantise(x, source, position, False, False)
    assert torch.equal(codes[rows - 1].float() * scales[:, rows - 1].repeat_interleave(128), x[-1].float())
