"""Every op as torch sees it: what the schema says is written to, the fake's shapes, the gradient's registration."""

import pytest
import torch
from torch.library import opcheck

from prl.kernels import registry
from prl.kernels.numerics import FP8


def samples():
    """Op → arguments, small but with every branch of the layout: padding, an empty group, an absent expert."""
    torch.manual_seed(0)
    x = torch.randn(128, 256)
    ids = torch.tensor([[0, 2], [2, -1], [0, 3]])
    source, position, starts, counts = torch.ops.prl.sort_rows(ids, 4, 128)
    rows = torch.randn(len(source), 128)
    codes, scales, columns, column_scales = torch.ops.prl.permute_quantise(torch.randn(3, 128), source, position, True, False)
    w = torch.randn(4, 256, 128)
    w_codes, w_scales = torch.ops.prl.quantise_blocks(w, False)
    grad = lambda t: t.clone().requires_grad_()  # noqa: E731
    logits = torch.randn(6, 8)
    recorded = torch.randint(8, (6, 2), dtype=torch.uint8)
    flags = torch.tensor([True, False, True, True, False, True])
    hidden, head = torch.randn(5, 4), torch.randn(7, 4)
    labels, ones = torch.tensor([0, -100, 3, 6, 1]), torch.ones(5)
    _, entropy, total = torch.ops.prl.logprobs(hidden, head, labels, ones, 2)
    index = torch.randn(2, 3, 9)
    return {
        "quantise_rows": (x, False),
        "quantise_columns": (x, True),
        "quantise_both": (x, False),
        "quantise_blocks": (w, False),
        "transpose_codes": (w_codes,),
        "sort_rows": (ids, 4, 128),
        "permute": (grad(torch.randn(3, 128)), source, position),
        "permute_quantise": (torch.randn(3, 128), source, position, False, False),
        "combine": (grad(rows), grad(torch.rand(3, 2)), source, position),
        "combine_backward": (torch.randn(3, 128), rows, torch.rand(3, 2), source, position),
        "swiglu": (grad(rows),),
        "swiglu_backward": (rows, rows[:, :64].contiguous()),
        "swiglu_quantise": (torch.randn(128, 256), True, False),
        "swiglu_backward_quantise": (torch.randn(128, 256), torch.randn(128, 128), torch.rand(128), False),
        "grouped_gemm": (grad(rows), grad(w), starts, counts, False),
        "grouped_gemm_weight": (rows, rows, starts, counts, torch.zeros(4, 128, 128)),
        "grouped_gemm_fp8": (codes, scales, w_codes, w_scales, starts, counts, torch.bfloat16),
        "grouped_gemm_weight_fp8": (columns, column_scales, columns, column_scales, starts, counts, torch.zeros(4, 128, 128)),
        "router_logits": (grad(torch.randn(6, 4)), grad(torch.randn(8, 4))),
        "route": (grad(logits), "softmax", torch.randn(8), recorded, flags, ~flags, 2, 2, 1, True, 2.5),
        "route_backward": (torch.rand(6, 2), logits, "sigmoid", recorded.long(), True, 2.5),
        "inspect_routes": (recorded[:, None], flags, 8),
        "logits": (hidden, head),
        "logprobs": (grad(hidden), grad(head), labels, ones, 2),
        "logprobs_backward": (ones, None, hidden, head, labels, ones, entropy, total, 2, True, False),
        "label_logprobs": (hidden @ head.T, labels.clamp(min=0), ones),
        "linear": (grad(hidden), grad(head)),
        "attention": (torch.randn(2, 3, 4, 8), torch.randn(2, 9, 2, 8), None, 5, index > -9, 0.3),
        "rotate_pairs": (grad(torch.randn(5, 2, 6)), torch.randn(5, 3), torch.randn(5, 3)),
        "index_scores": (torch.randn(2, 3, 4, 8), torch.randn(2, 9, 8), torch.rand(2, 3, 4)),
        "index_select": (index, index > 0, 4),
    }


def test_there_is_a_sample_of_every_op():
    assert samples().keys() == registry._OPS.keys()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("op", sorted(registry._OPS))
def test_schema_fake_and_gradient(op, backend, monkeypatch):
    monkeypatch.setenv("PRL_KERNELS", backend)
    args = samples()[op]
    coded = any(isinstance(a, torch.Tensor) and a.dtype == FP8 for a in args)  # test_schema multiplies, which float8 cannot
    tests = ["test_faketensor"] if coded else ["test_schema", "test_autograd_registration", "test_faketensor"]
    opcheck(getattr(torch.ops.prl, op), args, test_utils=tests)
