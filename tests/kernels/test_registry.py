"""The choice of backend."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import prl.kernels.dense  # noqa: F401
from prl.kernels import registry
from prl.kernels.quantise import quantise_rows
from prl.kernels.registry import KernelError


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("PRL_KERNELS", raising=False)
    yield monkeypatch
    registry._chosen.cache_clear()


def without(monkeypatch, *backends):
    """As on a machine where these are not available."""
    monkeypatch.setattr(registry, "unavailable", lambda b: "missing here" if b in backends else None)
    registry._chosen.cache_clear()


def test_every_op_has_the_reference(fresh):
    without(fresh, "cpu", "triton", "cuda")
    assert set(registry.backends().values()) == {"reference"}


def test_a_demanded_backend_runs_or_is_an_error(fresh):
    without(fresh, "cpu", "triton", "cuda")
    fresh.setenv("PRL_KERNELS", "cpu")
    with pytest.raises(KernelError, match=r"kernel quantise_rows on cpu: cpu: missing here \(unset PRL_KERNELS and"):
        quantise_rows(torch.zeros(1, 128))
    fresh.setenv("PRL_KERNELS", "reference")
    assert quantise_rows(torch.zeros(1, 128))[1].item() == 1


def test_an_op_that_should_not_have_a_demanded_backend_takes_the_reference(fresh):
    """Those of the bitwise mode are the CPU's."""
    for demanded in ("triton", "cuda"):
        assert registry._chosen("linear", "cpu", False, demanded)[0] == "reference"
    fresh.setenv("PRL_KERNELS", "cpu")
    without(fresh, "cpu")
    with pytest.raises(KernelError, match="kernel linear on cpu: cpu: missing here"):
        registry.backend_of("linear")


def test_demands_that_make_no_sense_are_named(fresh):
    fresh.setenv("PRL_KERNELS", "gpu")
    with pytest.raises(KernelError, match=r"no backend gpu \(PRL_KERNELS\); there are cuda, triton, cpu, reference"):
        registry.backend_of("permute")
    with pytest.raises(KernelError, match="no such op"):
        registry.backend_of("nonsense")


def test_an_empty_demand_is_none(fresh):
    own = registry.backends()
    fresh.setenv("PRL_KERNELS", "")
    assert registry.backends() == own


def test_it_says_why_there_is_no_gpu(fresh):
    fresh.setattr(torch.cuda, "is_available", lambda: False)
    fresh.setattr(torch.version, "cuda", "12.8")
    assert registry.no_gpu() == "no CUDA device"
    fresh.setattr(torch.version, "cuda", None)
    assert registry.no_gpu().startswith(f"torch {torch.__version__} is built without CUDA; on a machine with a GPU install")
    fresh.setattr(torch.cuda, "is_available", lambda: True)
    assert registry.no_gpu() is None


def test_where_the_package_of_tritons_kernels_is_missing_the_mend_is_told(fresh):
    fresh.setitem(sys.modules, "prl_triton", None)
    assert "pip install prl, whose package prl_triton is csrc/triton" in registry.unavailable.__wrapped__("triton")


@pytest.mark.parametrize("share", [0, 0.01, 0.5])
def test_an_extension_that_is_cut_short_is_named_and_not_loaded(share, fresh, tmp_path):
    """To load it would kill the process."""
    cut = tmp_path / "_cpu.abi3.so"
    whole = Path(torch._C.__file__).read_bytes()
    cut.write_bytes(whole)
    assert registry.damaged(cut) is None
    cut.write_bytes(whole[: int(share * len(whole))])
    fresh.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(cut)))
    fresh.setattr(importlib, "import_module", lambda name: pytest.fail("it is loaded"))
    why = registry.unavailable.__wrapped__("cpu")
    assert why.startswith(f"{cut}: ") and "install prl again" in why, why


def test_float64_runs_on_the_reference_only(fresh):
    assert registry._chosen("grouped_gemm", "cpu", True, None)[0] == "reference"
    with pytest.raises(KernelError, match="cpu: float64 runs on the reference only"):
        registry._chosen("grouped_gemm", "cpu", True, "cpu")


def test_a_tensor_elsewhere_is_not_for_the_cpu_backend(fresh):
    without(fresh, "triton", "cuda")
    with pytest.raises(KernelError, match="it takes cpu tensors"):
        registry._chosen("permute", "cuda", False, "cpu")
    assert registry._chosen("permute", "cuda", False, None)[0] == "reference"


def test_cuda_means_triton_where_there_is_no_cuda_kernel(fresh):
    without(fresh, "cuda")
    with pytest.raises(KernelError, match="kernel grouped_gemm_fp8 on cuda: cuda: missing here"):
        registry._chosen("grouped_gemm_fp8", "cuda", False, "cuda")
    fresh.setattr(registry, "functions", lambda backend: {"permute": print})
    assert registry._chosen("permute", "cuda", False, "cuda")[0] == "triton"


def test_status_says_why(fresh):
    without(fresh, "triton", "cuda")
    rows = {(op, backend): state for op, backend, state in registry.status("cpu")}
    assert rows["grouped_gemm_fp8", "cuda"] == "missing here"
    assert sum(state == "chosen" for state in rows.values()) == len(registry._OPS)


@pytest.mark.skipif(registry.unavailable("cpu") is not None, reason=str(registry.unavailable("cpu")))
def test_an_op_of_an_older_build_does_not_serve(fresh):
    """Only its schema can tell: a call would read other arguments than were meant."""
    fresh.setattr(torch.ops.prl_cpu, "swiglu", torch.ops.prl_cpu.swiglu_backward)
    registry._chosen.cache_clear()
    assert registry.backend_of("swiglu") == "reference" and registry.backend_of("permute") == "cpu"
    fresh.setenv("PRL_KERNELS", "cpu")
    with pytest.raises(
        KernelError, match=r"prl._cpu was built from other sources, its op is swiglu_backward\(Tensor gate_up_RJ"
    ):
        registry.backend_of("swiglu")


@pytest.mark.skipif(registry.unavailable("cpu") is not None, reason=str(registry.unavailable("cpu")))
def test_an_op_that_is_imported_after_a_backend_was_asked_finds_it_too():
    code = """from prl.kernels import quantise, registry
before = registry.backend_of("quantise_rows")
from prl.kernels import lm_head
print(before, registry.backend_of("logits"))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["cpu", "cpu"]
