"""The Triton GEMMs and LM head, under Triton's interpreter: the cases of `triton_gemm.py`, in a process of their own.

Whether a kernel is compiled or interpreted is settled when Triton is imported, once per process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_under_the_interpreter() -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", here / "triton_gemm.py"],
        cwd=here.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "PRL_KERNELS": "triton"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
