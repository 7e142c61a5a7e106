"""The package installs both ways, and brings csrc/triton along."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "prl", "csrc", "configs")
PROBE = (
    "import importlib.util, prl, prl.config.load, prl.monitor; print(prl.__path__[0]);"
    "print(importlib.util.find_spec('prl_triton').submodule_search_locations[0])"  # found, not imported: not all have Triton
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy without build outputs, so that the checkout stays clean."""
    root = tmp_path / "source"
    root.mkdir()
    for name in TOP:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, root / name)
    return root


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def needs(source: Path) -> list[str]:
    """What the build asks for, as a front end learns it."""
    code = "import json, sys, setuptools.build_meta as b; sys.stderr.write(json.dumps(b.get_requires_for_build_wheel()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=100, check=True)
    return json.loads(done.stderr.strip().splitlines()[-1])


def test_the_build_takes_the_environments_torch(source: Path) -> None:
    assert not any(r.startswith("torch") for r in needs(source))


def test_the_build_asks_for_torch_where_there_is_none_and_a_compiler(source: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "setuptools.py").write_text(
        "Extension, find_packages = dict, lambda **_: []\n"
        "def setup(**given): print(given.get('setup_requires'), bool(given['ext_modules']))\n"
    )
    command = (venv / "bin" / "python", "setup.py")
    assert run(*command, cwd=source, PYTHONPATH=str(stub), PRL_BUILD_CUDA="0").split() == ["['torch>=2.11']", "False"]
    assert run(*command, cwd=source, PYTHONPATH=str(stub), PRL_BUILD_CUDA="0", CXX="no-such-compiler").split() == [
        "None",
        "False",
    ]


def test_requirements_and_the_makefile_agree() -> None:
    makefile, setup = (ROOT / "Makefile").read_text(), (ROOT / "setup.py").read_text()
    assert "TORCH ?= torch==2.13.0" in makefile and 'TORCH = "torch>=2.11"' in setup
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"torch>=2.11", "transformers>=5.16.1,<5.20"} <= set(project["dependencies"])
    assert {"vllm", "deep_ep", "dev", "peers"} <= project["optional-dependencies"].keys()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("editable", [False, True], ids=["plain", "editable"])
def test_pip_install_into_a_fresh_environment(source: Path, tmp_path: Path, editable: bool) -> None:
    """With build isolation. The requirements are this environment's own: nothing is downloaded but setuptools."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    own = run(sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    for part in Path(own).glob("torch*"):  # as the Makefile does, torch comes first; without it the build fetches one
        (Path(site) / part.name).symlink_to(part)
    run(python, "-m", "pip", "install", "--no-deps", "-q", *(["-e"] if editable else []), ".", cwd=source)
    (Path(site) / "zz_requirements.pth").write_text(own + "\n")
    where = run(python, "-c", PROBE, cwd=tmp_path, PYTHONPATH="").split()
    home = source if editable else Path(site)
    assert where == [str(home / "prl"), str(home / ("csrc/triton" if editable else "prl_triton"))]
    assert "Usage" in run(venv / "bin" / "prl", "--help", cwd=tmp_path, PYTHONPATH="")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_cpu_kernels_are_built_where_there_is_a_compiler(source: Path, tmp_path: Path) -> None:
    code = "from prl.kernels import registry; print(registry.unavailable('cpu'))"
    install = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-q", "--target")
    run(*install, tmp_path / "with", ".", cwd=source)
    assert run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "with")).strip() == "None"
    shutil.rmtree(source / "build")  # or the kernels just built would be packed again
    run(*install, tmp_path / "without", ".", cwd=source, CXX="no-such-compiler")
    assert "not built" in run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "without"))


@pytest.mark.parametrize(
    ("command", "says"), [("PYTHON=/nowhere/python", "not found"), ("CXX=no-such-compiler", "no C++ compiler")]
)
def test_make_says_what_is_missing(command: str, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-f", ROOT / "Makefile", "check-python", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and says in done.stderr


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 10); exec(sys.argv[2])" "$@"\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "-f", ROOT / "Makefile", "check-python", f"PYTHON={old}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "is Python 3.10; 3.11 or newer is needed" in done.stderr
