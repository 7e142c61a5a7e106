"""What vLLM gets wrong, one file each: VERSIONS it is for, the upstream fault in the docstring, `needed()` whether this vLLM
still has the fault (a test fails once it has not), `apply()`.

Patches are applied to the versions they name and no other.
"""

from __future__ import annotations

import logging
from types import ModuleType

from prl.inference.vllm.installed import release

log = logging.getLogger(__name__)


def everywhere() -> tuple[ModuleType, ...]:
    """For every process of a server."""
    from prl.inference.vllm.patches import routed_experts_config, token_ids

    return routed_experts_config, token_ids


def workers() -> tuple[ModuleType, ...]:
    """For the processes that hold the model."""
    from prl.inference.vllm.patches import moe_reload, routed_experts_runner, seeded_prefill

    return moe_reload, routed_experts_runner, seeded_prefill


def apply(modules: tuple[ModuleType, ...], version: str) -> None:
    for module in modules:
        if release(version) in module.VERSIONS and module.needed():
            module.apply()
            log.info("patched: %s", module.__name__.rpartition(".")[2])
