"""The Triton kernels other than GEMMs, under Triton's interpreter.

Whether a kernel is compiled or interpreted is settled when Triton is imported, once per process, and other tests compile: so
one process of its own runs all the interpreted cases of `triton_glue.py`.
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
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", here / "triton_glue.py"],
        cwd=here.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
