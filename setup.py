"""The parts of the packaging that need code: csrc/triton as a package, and the kernels that are compiled.

Everything else is in pyproject.toml. `csrc/cpu/*.cpp` become the extension `prl._cpu` where there is a C++ compiler; without
one the package installs all the same, and plain torch serves. They use libtorch's stable ABI and Python's limited API: what is
built runs with every torch and Python that the package takes. It is built against the headers of the environment's torch, also
under build isolation, which hides it; only where there is none the build asks for torch of its own.

`csrc/cuda/*.cu` become `prl/_cuda_sm90a.so`, which is no module of Python (prl.kernels.cuda loads it), where there is an nvcc
that serves; PRL_BUILD_CUDA=0 builds without it, PRL_BUILD_CUDA=1 not without it. No GPU is needed.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from sysconfig import get_config_var, get_path
from types import ModuleType

from setuptools import Extension, find_packages, setup

TORCH = "torch>=2.11"
TORCH_ABI = "0x020b000000000000"  # the same version, as libtorch's headers want it
PYTHON_ABI = "cp311"
CUDA_OBJECT = "prl._cuda_sm90a"


def found_torch() -> Path | None:
    """The folder of a torch that serves, the environment's before the build's own."""
    for place in [get_path("purelib"), get_path("platlib"), *sys.path]:
        for torch in distributions(name="torch", path=[place]):
            if [int(n) for n in torch.version.split("+")[0].split(".")[:2]] >= [2, 11]:
                return Path(str(torch.locate_file("torch")))
    return None


def cpu_extension() -> dict[str, list[object]]:
    """The arguments of `setup` that build `prl._cpu`."""
    compiler = shlex.split(os.environ.get("CXX") or get_config_var("CXX") or "c++")[0]
    if shutil.which(compiler) is None:
        print(f"prl: no C++ compiler ({compiler}): building without the CPU kernels", file=sys.stderr)
        return {}
    if not (Path(get_path("include")) / "Python.h").is_file():
        print("prl: no headers of Python (on Debian: python3-dev): building without the CPU kernels", file=sys.stderr)
        return {}
    torch = found_torch()
    if torch is None:
        return {"setup_requires": [TORCH]}
    extension = Extension(
        "prl._cpu",
        sorted(str(p) for p in Path("csrc/cpu").glob("*.cpp")),
        depends=sorted(str(p) for p in Path("csrc/cpu").glob("*.h")),
        include_dirs=[str(torch / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu", "c10"],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_ABI)],
        extra_compile_args=["-std=c++20", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"],
        language="c++",
        py_limited_api=True,
    )
    return {"ext_modules": [extension]}


def cuda_build() -> ModuleType:
    """csrc/cuda/build.py."""
    spec = importlib.util.spec_from_file_location("prl_cuda_build", "csrc/cuda/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cuda_extension() -> dict[str, object]:
    """The arguments of `setup` that build the CUDA object."""
    wish = os.environ.get("PRL_BUILD_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"prl: PRL_BUILD_CUDA must be 0 or 1, got {wish}")
    if wish == "0":
        return {}
    build = cuda_build()
    try:
        nvcc = build.find_nvcc()
    except build.NoCompiler as e:
        if wish == "1":
            sys.exit(f"prl: PRL_BUILD_CUDA=1 asks for the CUDA kernels, but {e}")
        print(f"prl: {e}: building without the CUDA kernels", file=sys.stderr)
        return {}

    from setuptools.command.build_ext import build_ext

    class BuildExt(build_ext):
        def get_ext_filename(self, fullname: str) -> str:
            if fullname.split(".")[-1] != CUDA_OBJECT.split(".")[-1]:
                return super().get_ext_filename(fullname)
            return str(Path(*fullname.split("."))) + ".so"

        def build_extension(self, ext: Extension) -> None:
            if ext.name != CUDA_OBJECT:
                return super().build_extension(ext)
            try:
                print(build.compile_object(nvcc, Path(self.get_ext_fullpath(ext.name))), end="")
            except subprocess.CalledProcessError as e:
                sys.exit(f"{e.output}\nprl: nvcc failed; PRL_BUILD_CUDA=0 builds without the CUDA kernels")

    files = sorted(str(p) for p in Path("csrc/cuda").iterdir() if p.is_file())
    sources = [f for f in files if f.endswith(".cu")]
    return {"ext_modules": [Extension(CUDA_OBJECT, sources, depends=files)], "cmdclass": {"build_ext": BuildExt}}


cpu, cuda = cpu_extension(), cuda_extension()
extensions = {**cpu, **cuda, "ext_modules": [*cpu.get("ext_modules", []), *cuda.get("ext_modules", [])]}

setup(
    packages=[*find_packages(include=["prl", "prl.*"]), "prl_triton"],
    package_dir={"prl_triton": "csrc/triton"},
    package_data={"prl.monitor": ["*.html", "*.yaml"], "prl.plan": ["*.yaml"], "prl_triton": ["*.json"]},
    options={"bdist_wheel": {"py_limited_api": PYTHON_ABI}} if extensions["ext_modules"] else {},
    **extensions,
)
