"""How csrc/cuda becomes an object: one truth for setup.py and for the compile gate. Standard library only; needs no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.cu"))
OLDEST = (12, 4)
FLAGS = [
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",  # -arch=sm_90a would compile for sm_90 as well, which has no wgmma
    "-cudart=static",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xptxas=-warn-spills,-warn-lmem-usage",
]


class NoCompiler(Exception):
    """No nvcc that serves; the message says why."""


def find_nvcc() -> str:
    """The nvcc of PATH, else of CUDA_HOME, else of /usr/local/cuda. Raises NoCompiler."""
    homes = [Path(home) / "bin" / "nvcc" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    nvcc = shutil.which("nvcc") or next((str(p) for p in homes if os.access(p, os.X_OK)), None)
    if nvcc is None:
        raise NoCompiler("nvcc is neither in PATH nor below CUDA_HOME or /usr/local/cuda")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < OLDEST:
        raise NoCompiler(f"{nvcc} is version {'.'.join(map(str, version))}, {'.'.join(map(str, OLDEST))} or newer is needed")
    return nvcc


def compile_object(nvcc: str, target: Path) -> str:
    """Compile SOURCES into the shared object `target`; returns what nvcc said. Raises CalledProcessError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [nvcc, *FLAGS, "-shared", "-o", str(target), *map(str, SOURCES)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return done.stdout
