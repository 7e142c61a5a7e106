"""Run by `test_triton_glue.py` with TRITON_INTERPRET=1: big tiles and few of them, for a program takes milliseconds here."""

from collections.abc import Iterator

import pytest
import torch

import prl_triton
from prl_triton import configs
from tests.kernels import cases

BIG = dict.fromkeys(("permute", "combine_backward", "swiglu", "swiglu_backward"), "ROWS")
BIG |= dict.fromkeys(("combine", "router_scores", "route", "route_backward"), "TOKENS")
for op, size in BIG.items():
    configs._table()[op][size] = 64  # results do not depend on tiles, the time here does

BF16, F32 = torch.bfloat16, torch.float32


def glue() -> Iterator[cases.Case]:
    for dtype in (BF16, F32):
        for make in (cases.normal, cases.awkward):
            yield from cases.quantisers("cpu", 256, 256, dtype, make)
    for shape in ((0, 128), (128, 0)):
        yield from cases.quantisers("cpu", *shape, F32)
    for shape in ((2, 128, 256), (3, 37, 200), (0, 128, 128), (2, 0, 128)):
        yield from cases.transposes("cpu", *shape)
    for sizes in ((70, 8, 20), (40, 2, 3), (7, 3, 0), (0, 8, 5), (5, 0, 4)):
        yield from cases.sorts("cpu", *sizes)
    for sizes in ((50, 3, 2, 256), (9, 3, 1, 100), (3, 2, 0, 128), (0, 2, 3, 128), (3, 0, 2, 128)):
        for dtype in (BF16, F32):
            yield from cases.movements("cpu", *sizes, dtype)
    for dtype in (BF16, F32):
        for sizes in ((128, 256), (37, 128), (5, 100), (0, 128), (128, 0)):
            yield from cases.swiglus("cpu", *sizes, dtype)
    for sizes in ((30, 20), (1, 1), (0, 8), (3, 0)):
        yield from cases.scorings("cpu", *sizes)
    for sizes in ((30, 20, 3), (12, 24, 4, 4, 2), (9, 6, 2, 6, 3), (1, 1, 1), (0, 4, 2)):
        yield from cases.routings("cpu", *sizes)
    yield from cases.routings("cpu", 12, 10, 10, ids=torch.int16)
    for ids in (torch.uint8, torch.uint16, torch.int32, torch.int64):
        yield from cases.inspections("cpu", 30, 3, 5, ids)
    for sizes in ((0, 3, 2), (3, 0, 2), (3, 2, 1)):
        yield from cases.inspections("cpu", *sizes, torch.uint8)
    for dtype in (BF16, F32):
        for sizes in ((2, 70, 40, 3, 20), (1, 1, 130, 2, 64), (1, 3, 5, 0, 8), (2, 0, 3, 2, 8), (1, 2, 0, 2, 8)):
            yield from cases.indexes("cpu", *sizes, dtype)
    for selection in ((9, 100, 7), (9, 300, 40), (3, 5, 5), (0, 9, 3), (3, 0, 2), (8, 2, 1)):
        yield from cases.selections("cpu", *selection)


@pytest.mark.parametrize("case", list(glue()), ids=str)
def test_agrees_with_the_reference(case: cases.Case) -> None:
    cases.check(case, prl_triton.OPS)
