"""csrc/cuda on an emulated Hopper (emulated_hopper.h): the kernels' own source, through their launchers, against the reference.

Codes are small integers, so that sums of products are exact and results equal the reference bit for bit.
"""

import contextlib
import ctypes
import itertools
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.kernels import cuda
from prl.kernels import grouped_gemm as ops
from prl.kernels.checks import ArgumentError
from prl.kernels.cuda import OPS, CudaError
from prl.kernels.numerics import BLOCK, FP8, NAN_CODE

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CXX = shutil.which("c++")
pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    """The kernels compiled for the host in place of the object; the launchers take CPU tensors."""
    target = tmp_path_factory.mktemp("emulated") / "kernels.so"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    flags += ["-Wno-unknown-pragmas", "-Wno-psabi", "-shared", "-fPIC", "-include", str(HERE / "emulated_hopper.h")]
    source = str(ROOT / "csrc" / "cuda" / "grouped_gemm_fp8.cu")
    subprocess.run([CXX, *flags, "-x", "c++", source, "-o", str(target)], check=True, timeout=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "OBJECT", target)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=None))
        cuda._library.cache_clear()
        yield cuda._library()
        cuda._library.cache_clear()


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def machine(processors=1, seed=0, readable=()):
    """Make a machine of so many processors (they work in pairs); `seed` orders its events; scales are in `readable` alone."""
    first, last = (ctypes.c_void_p * len(readable))(), (ctypes.c_void_p * len(readable))()
    for i, t in enumerate(readable):
        first[i], last[i] = t.data_ptr(), t.data_ptr() + t.nbytes
    cuda._library().emulate(processors, seed, len(readable), first, last)


def codes(*shape):
    return torch.randint(-8, 9, shape).float().to(FP8)


def layout(counts, gaps, tail):
    """(starts, counts, R): each group padded to 128, `gaps` blocks of nobody's rows after it, `tail` rows at the end."""
    room = [-(-count // BLOCK) * BLOCK + gap * BLOCK for count, gap in zip(counts, gaps, strict=True)]
    starts = list(itertools.accumulate(room, initial=0))
    return torch.tensor(starts), torch.tensor(counts, dtype=torch.int64), starts[-1] + tail


def forward_arguments(counts, gaps, tail, n, k):
    starts, counts, r = layout(counts, gaps, tail)
    a, w = codes(r, k), codes(len(counts), n, k)
    a_scales, w_scales = torch.rand(k // BLOCK, r) + 0.5, torch.rand(len(counts), n // BLOCK, k // BLOCK) + 0.5
    return a, a_scales, w, w_scales, starts, counts


def weight_arguments(counts, gaps, tail, n, k):
    starts, counts, r = layout(counts, gaps, tail)
    g, a = codes(n, r), codes(k, r)
    return g, torch.rand(r // BLOCK, n) + 0.5, a, torch.rand(r // BLOCK, k) + 0.5, starts, counts


groups = st.lists(st.tuples(st.sampled_from([0, 0, 1, 60, 128, 129, 200]), st.sampled_from([0, 0, 1])), min_size=1, max_size=4)
widths = st.sampled_from([128, 256, 384])


@given(groups, st.sampled_from([0, 56, 128]), widths, widths, st.booleans(), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=14, deadline=None)
def test_forward_equals_the_reference(group, tail, n, k, wide, processors, seed):
    torch.manual_seed(seed)
    counts, gaps = zip(*group, strict=True)
    arguments = forward_arguments(counts, gaps, tail, n, k)
    a, a_scales, w, w_scales, starts, counts = arguments
    nobody = torch.ones(len(a), dtype=torch.bool)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=False):
        nobody[start : start + count] = False
    a.view(torch.uint8)[nobody] = NAN_CODE  # whatever the rows of no group hold
    a_scales[:, nobody] = torch.nan
    machine(processors, seed, [a_scales, w_scales])
    dtype = torch.float32 if wide else torch.bfloat16
    out = OPS["grouped_gemm_fp8"](*arguments, dtype)
    assert out.dtype == dtype and torch.equal(out, ops._fp8_reference(*arguments, dtype))


@given(groups, st.sampled_from([0, 128]), widths, widths, st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_weight_gradient_equals_the_reference_and_leaves_empty_groups_alone(group, tail, n, k, processors, seed):
    torch.manual_seed(seed)
    counts, gaps = zip(*group, strict=True)
    arguments = weight_arguments(counts, gaps, tail, n, k)
    out = torch.randn(len(counts), n, k)
    out[arguments[-1] == 0] = torch.nan
    expected = out.clone()
    machine(processors, seed, [arguments[1], arguments[3]])
    OPS["grouped_gemm_weight_fp8"](*arguments, out)
    ops._weight_fp8_reference(*arguments, expected)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


def test_a_row_does_not_depend_on_the_others():
    arguments = forward_arguments([300, 40], [0, 0], 0, 256, 256)
    a, a_scales, w, w_scales, starts, counts = arguments
    machine()
    out = OPS["grouped_gemm_fp8"](*arguments, torch.float32)
    few = torch.tensor([0, 128]), torch.tensor([128])
    alone = OPS["grouped_gemm_fp8"](a[128:256].clone(), a_scales[:, 128:256].clone(), w[:1], w_scales[:1], *few, torch.float32)
    assert torch.equal(alone, out[128:256])


def test_many_tiles_are_each_computed_once():
    """More bands, of which the last is not full, tiles and processors than the fuzzed ones have."""
    counts = [BLOCK * 18, 5]
    arguments = forward_arguments(counts, [0, 0], 0, 640, 128)
    machine(7, 1, [arguments[1], arguments[3]])
    out = OPS["grouped_gemm_fp8"](*arguments, torch.bfloat16)
    assert torch.equal(out, ops._fp8_reference(*arguments, torch.bfloat16))


def test_a_long_contraction():
    arguments = forward_arguments([70], [0], 0, 128, 34 * BLOCK)
    machine(2, 0, [arguments[1], arguments[3]])
    out = OPS["grouped_gemm_fp8"](*arguments, torch.float32)
    assert torch.equal(out, ops._fp8_reference(*arguments, torch.float32))


def test_nothing_to_do():
    none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    a, a_scales, w, w_scales = codes(130, 128), torch.ones(1, 130), codes(0, 256, 128), torch.ones(0, 2, 1)
    assert torch.equal(OPS["grouped_gemm_fp8"](a, a_scales, w, w_scales, *none, torch.float32), torch.zeros(130, 256))
    one = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    no_k = OPS["grouped_gemm_fp8"](
        codes(130, 0), torch.ones(0, 130), codes(1, 256, 0), torch.ones(1, 2, 0), *one, torch.bfloat16
    )
    assert torch.equal(no_k, torch.zeros(130, 256, dtype=torch.bfloat16))
    no_rows = OPS["grouped_gemm_fp8"](
        codes(0, 128), torch.ones(1, 0), codes(1, 256, 128), torch.ones(1, 2, 1), *one, torch.float32
    )
    assert no_rows.shape == (0, 256)
    out = torch.ones(1, 128, 256)
    OPS["grouped_gemm_weight_fp8"](codes(128, 0), torch.ones(0, 128), codes(256, 0), torch.ones(0, 256), *one, out)
    assert (out == 1).all()


@pytest.mark.parametrize("starts", [[-(10**12), 128, 10**15], [7, 7, 7], [0, 64, 2**62]])
def test_groups_that_make_no_sense_read_and_write_nothing_outside(starts):
    """They are not read on the host; guards around the output and the limits of what may be read show what is touched."""
    counts = torch.tensor([10**14, 5])
    a, a_scales, w, w_scales, *_ = forward_arguments([128, 0], [0, 0], 60, 256, 128)
    machine(2, 0, [a_scales, w_scales])
    out = OPS["grouped_gemm_fp8"](a, a_scales, w, w_scales, torch.tensor(starts), counts, torch.float32)
    assert out.shape == (188, 256)
    g, g_scales, b, b_scales, *_ = weight_arguments([128, 100], [0, 0], 0, 128, 384)
    machine(2, 0, [g_scales, b_scales])
    guarded = torch.zeros(4, 128, 384)
    OPS["grouped_gemm_weight_fp8"](g, g_scales, b, b_scales, torch.tensor(starts), counts, guarded[1:3])
    assert (guarded[0] == 0).all() and (guarded[3] == 0).all()


def test_what_is_not_aligned_is_refused_by_name():
    arguments = list(forward_arguments([128], [0], 0, 128, 128))
    shifted = torch.zeros(128 * 128 + 1, dtype=torch.uint8)[1:].view(128, 128).view(FP8)
    with pytest.raises(
        ArgumentError, match="grouped_gemm_fp8: a_RK must be aligned to 16 bytes, got an address that is 1 beyond"
    ):
        OPS["grouped_gemm_fp8"](shifted, *arguments[1:], torch.float32)
    out = torch.zeros(128 * 128 + 2)[2:].view(1, 128, 128)
    with pytest.raises(ArgumentError, match="grouped_gemm_weight_fp8: out_ENK must be aligned"):
        OPS["grouped_gemm_weight_fp8"](*weight_arguments([128], [0], 0, 128, 128), out)


def test_what_the_driver_refuses_is_an_error_that_names_the_op(monkeypatch):
    monkeypatch.setattr(cuda, "_matrix", lambda *_: None)
    arguments = forward_arguments([128], [0], 0, 128, 128)
    shifted = torch.zeros(128 * 128 + 1, dtype=torch.uint8)[1:].view(128, 128).view(FP8)
    with pytest.raises(CudaError, match="grouped_gemm_fp8: the driver refused to describe an operand"):
        OPS["grouped_gemm_fp8"](shifted, *arguments[1:], torch.float32)


def test_sizes_beyond_tensor_copies_are_refused_by_name(library):
    def on_meta(*shape, dtype=FP8):
        return torch.empty(shape, dtype=dtype, device="meta")

    starts, counts = on_meta(2, dtype=torch.int64), on_meta(1, dtype=torch.int64)
    scales = on_meta(1, 1, dtype=torch.float32)
    with pytest.raises(ArgumentError, match=r"grouped_gemm_fp8: R must be at most 2147483391 .*, got 3000000000"):
        OPS["grouped_gemm_fp8"](
            on_meta(3_000_000_000, 128), scales, on_meta(1, 128, 128), scales, starts, counts, torch.bfloat16
        )
    with pytest.raises(ArgumentError, match="grouped_gemm_fp8: a_RK must be of at most 1099511627775 bytes"):
        wide = on_meta(1_000_000_000, 1280), scales, on_meta(1, 128, 1280), scales
        OPS["grouped_gemm_fp8"](*wide, starts, counts, torch.bfloat16)
    with pytest.raises(ArgumentError, match="grouped_gemm_weight_fp8: K must be at most"):
        long = on_meta(128, 128), scales, on_meta(2_200_000_000, 128), scales
        OPS["grouped_gemm_weight_fp8"](*long, starts, counts, on_meta(1, 128, 2_200_000_000, dtype=torch.float32))
    code = library.prl_grouped_gemm_fp8(*[None] * 7, 0, 3_000_000_000, 128, 128, 1, None)
    assert "2^31 - 257" in cuda._words(code)
