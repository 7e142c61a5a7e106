"""Each invariant has a test that fails without it: every entry of tests/mutations/*.yaml, made in a copy of the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ENTRIES = [
    pytest.param(entry, id=f"{path.stem}-{i}")
    for path in sorted((ROOT / "tests" / "mutations").glob("*.yaml"))
    for i, entry in enumerate(yaml.safe_load(path.read_text()) or [])
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mutations")
    skip = shutil.ignore_patterns("__pycache__", "outputs", "build", ".*", "*.egg-info", "mutations-*")
    shutil.copytree(ROOT, root, ignore=skip, dirs_exist_ok=True)
    return root


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_can_be_applied(entry: dict[str, Any]) -> None:
    assert entry.keys() == {"file", "old", "new", "test"}
    count = (ROOT / entry["file"]).read_text().count(entry["old"])
    assert count == 1, f"{entry['file']}: {entry['old']!r} found {count} times, expected once"
    assert (ROOT / entry["test"].split("::")[0]).is_file()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_named_test_goes_red(copy: Path, entry: dict[str, Any]) -> None:
    target = copy / entry["file"]
    original = target.read_text()
    # The fault is in the reference: no other backend may stand in for it.
    reference = {"PRL_KERNELS": "reference"} if entry["file"].startswith("prl/kernels/") else {}
    target.write_text(original.replace(entry["old"], entry["new"]))
    # A fault in C++ has to be compiled in; afterwards the sound extension comes back.
    compiled = {p: p.read_bytes() for p in copy.glob("prl/_cpu*.so")} if entry["file"].startswith("csrc/cpu/") else {}
    try:
        if compiled:
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
            subprocess.run(build, cwd=copy, env=os.environ | {"PRL_BUILD_CUDA": "0"}, check=True, capture_output=True)
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", entry["test"]],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)} | reference,
            capture_output=True,
            text=True,
            timeout=550,
            check=False,
        )
    finally:
        target.write_text(original)
        for path, content in compiled.items():
            path.write_bytes(content)
    # 1: tests ran and failed. Anything else (2 interrupted, 4 no such test, 5 none collected) shows nothing.
    assert done.returncode == 1, (
        f"pytest ended with {done.returncode} on the mutated code:\n{done.stdout[-2000:]}{done.stderr[-1000:]}"
    )
