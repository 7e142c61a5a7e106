"""The parts of the packaging that need code: csrc/triton as a package, and torch pinned where C++ is compiled against it.

Everything else is in pyproject.toml. `csrc/cpu/*.cpp`, where there are any, become the extension `prl._cpu`. Compiled code
runs only with the torch it was built with, so the build then asks for the torch of the environment it is installed into
(also under build isolation, which hides it), and the package for that same torch.
"""

import sys
from importlib.metadata import distributions
from pathlib import Path
from sysconfig import get_path

from setuptools import find_packages, setup

SOURCES = sorted(str(p) for p in Path("csrc/cpu").glob("*.cpp"))
TORCH = "torch>=2.11"
DEPENDENCIES = [
    "aiohttp>=3.12",
    "jinja2>=3.1",
    "msgspec>=0.19",
    "numpy>=2.0",
    "orjson>=3.10",
    "plotly>=6",
    "psutil>=6",
    "pydantic>=2.11",
    "pyyaml>=6",
    "pyzmq>=26",
    "reasoning-gym>=0.1.25",
    "rich>=14",
    "safetensors>=0.5",
    "tokenizers>=0.22",
    "transformers>=5.16.1,<5.20",
    "typer>=0.16",
    "uvloop>=0.21",
    "xxhash>=3.5",
]

extension = {}
if SOURCES:
    site = [get_path("purelib"), get_path("platlib")]
    installed = next((d.version.split("+")[0] for d in distributions(name="torch", path=site)), None)
    TORCH = f"torch=={installed}" if installed else TORCH
    extension["setup_requires"] = [TORCH]
    if "egg_info" not in sys.argv:  # there the build front end still asks what the build needs
        from torch.utils.cpp_extension import BuildExtension, CppExtension

        extension["ext_modules"] = [CppExtension("prl._cpu", SOURCES)]
        extension["cmdclass"] = {"build_ext": BuildExtension}

setup(
    packages=[*find_packages(include=["prl", "prl.*"]), "prl_triton"],
    package_dir={"prl_triton": "csrc/triton"},
    package_data={"prl.monitor": ["*.html"], "prl_triton": ["*.json"]},
    install_requires=[TORCH, *DEPENDENCIES],
    **extension,
)
