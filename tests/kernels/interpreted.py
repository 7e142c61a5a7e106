"""Tests under Triton's interpreter: whether a kernel is compiled or interpreted is settled when Triton is imported, once per
process, and other tests compile. So one process of its own runs all interpreted cases of a file.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(file: str, folder: Path, **env: str) -> None:
    """Run pytest on `file`, beside this one, with the kernels of this checkout; what it needs besides goes to `folder`."""
    (folder / "prl_triton").symlink_to(ROOT / "csrc" / "triton")
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", Path(__file__).with_name(file)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path} | env,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
