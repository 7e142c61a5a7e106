"""The CUDA object, and the gate that looks at every kernel's machine code without a GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import check_gpu_code as gate
from prl.kernels import cuda

ROOT = Path(__file__).parents[2]
build = gate.cuda_build()
try:
    NVCC, WHY = build.find_nvcc(), ""
except build.NoCompiler as e:
    NVCC, WHY = "", str(e)
needs_nvcc = pytest.mark.skipif(not NVCC, reason=WHY)

PLANTED_TRITON = """
import sys
import prl_triton, triton, triton.language as tl
from prl_triton.aot import Aot
from bench import check_gpu_code as gate

@triton.jit
def spilling(x, out):
    i = tl.arange(0, 4096)
    a, b, c = tl.load(x + i), tl.load(x + 4096 + i), tl.load(x + 8192 + i)
    tl.store(out + i, a * tl.sum(b * c) + b * tl.sum(a * c) + c * tl.sum(a * b))

@triton.jit
def fine(x, out):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.load(x + i))

def entry(f, **demands):
    return Aot(f"{f.__name__},x", f, {"x": "*fp32", "out": "*fp32"}, {}, ("x", "out"), num_warps=1, **demands)

prl_triton.AOT[:] = [
    entry(spilling),
    entry(fine, sixteen_byte_access=True),
    entry(fine, tensor_core="QGMMA", async_loads=True),
    Aot("broken", fine, {"x": "*fp32"}, {}),
]

class NoNvcc:
    class NoCompiler(Exception):
        pass
    def find_nvcc(self):
        raise self.NoCompiler("no nvcc here")

gate.cuda_build = lambda: NoNvcc
NoNvcc.find_nvcc = NoNvcc().find_nvcc
sys.exit(gate.main(sys.argv[1:]))
"""

PLANTED_CUDA = """
__global__ void __launch_bounds__(1024) spilling(float* x) {
  float a[128];
  for (int i = 0; i < 128; ++i) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = a[i] * a[127 - i];
}
extern "C" __attribute__((visibility("default"))) int prl_cuda_shared_bytes() { return 300000; }
"""


def test_the_gate_names_what_is_wrong_and_says_what_it_skipped(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED_TRITON)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "planted.py", "--json", "table.json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    spills, tensor_core, loads, broken = done.stderr.strip().splitlines()
    assert spills.startswith("check-gpu-code: spilling,x: ") and spills.endswith("spills to local memory")
    assert tensor_core == "check-gpu-code: fine,x: no QGMMA"
    assert loads == "check-gpu-code: fine,x: no asynchronous loads (UTMALDG, LDGSTS)"
    assert broken.startswith("check-gpu-code: broken: it does not compile") and "in both: out" in broken
    assert "skipped: csrc/cuda: no nvcc here" in done.stdout and "3 kernels, 4 faults" in done.stdout
    kept = json.loads((tmp_path / "table.json").read_text())
    assert [k["kernel"] for k in kept["kernels"]] == ["spilling", "fine", "fine"] and len(kept["faults"]) == 4
    assert kept["kernels"][0]["spills"] > 0 and kept["kernels"][1]["wide"] == [4, 4]


@needs_nvcc
def test_the_gate_sees_a_cuda_kernel_that_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.cu").write_text(PLANTED_CUDA)
    planted = gate.cuda_build()
    planted.SOURCES = [tmp_path / "planted.cu"]
    monkeypatch.setattr(gate, "cuda_build", lambda: planted)
    (_, where, warned), (code, name, found) = gate.check_cuda(NVCC, tmp_path / "planted.so")
    assert where == "csrc/cuda" and "spill" in warned[0].lower()
    assert code is not None and code.kernel == "cuda.spilling" and code.spills > 0
    assert name == "cuda.spilling" and {"no QGMMA", "300000 bytes of shared memory, at most 232448"} < set(found)


@needs_nvcc
def test_the_kernels_pass_the_gate_and_the_object_loads_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tmp_path / "elsewhere.so"
    checked = list(gate.check_cuda(NVCC, built))
    assert [found for _, _, found in checked] == [[], [], []]
    for code, _, _ in checked:
        assert code is not None and code.tensor == {"QGMMA": 8} and code.loads.keys() == {"UTMALDG"}
    monkeypatch.setattr(cuda, "OBJECT", built)
    cuda._library.cache_clear()
    try:
        assert cuda._words(100000) == "the driver has no cuTensorMapEncodeTiled; 12.0 or newer is needed"
        assert cuda._words(2) == "out of memory"
    finally:
        cuda._library.cache_clear()
    needed = subprocess.run(["objdump", "-p", built], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed, "neither the driver nor the runtime is linked: the object loads where there is none"


def test_why_the_backend_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(cuda, "OBJECT", tmp_path / "_cuda_sm90a.so")
    cuda._library.cache_clear()
    assert cuda.unavailable() == "_cuda_sm90a.so is not built; install prl where nvcc 12.4 or newer is found"
    cuda.OBJECT.write_text("no object")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert cuda.unavailable() == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "compute capability 8.0, the kernels are for 9.0" in (cuda.unavailable() or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert cuda.unavailable() == f"{cuda.OBJECT}: not a 64-bit ELF object; install prl again where nvcc 12.4 or newer is found"
    shutil.copy(torch._C.__file__, cuda.OBJECT)  # another's
    assert (cuda.unavailable() or "").startswith(f"{cuda.OBJECT} cannot be loaded")


def test_nvcc_is_found_or_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "bin" / "nvcc"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.3, V12.3.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(build.NoCompiler, match=r"nvcc is version 12\.3, 12\.4 or newer is needed"):
        build.find_nvcc()
    old.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.10, V12.10.1\n")
    assert build.find_nvcc() == str(old)


@pytest.mark.parametrize(
    ("wish", "says"), [("1", "PRL_BUILD_CUDA=1 asks for the CUDA kernels, but"), ("yes", "must be 0 or 1")]
)
def test_a_wish_that_cannot_be_met_is_an_error(wish: str, says: str, tmp_path: Path) -> None:
    root = tmp_path / "source"
    shutil.copytree(ROOT / "csrc", root / "csrc", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", root)
    fake = tmp_path / "bin" / "nvcc"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho release 9.0,\n")
    fake.chmod(0o755)
    env = os.environ | {"PRL_BUILD_CUDA": wish, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    command = [sys.executable, "setup.py", "--name"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and says in done.stderr
