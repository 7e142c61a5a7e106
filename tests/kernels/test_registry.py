"""The choice of backend."""

import pytest

import prl.kernels.experts
import prl.kernels.indexer
import prl.kernels.latent_attention
import prl.kernels.lm_head
import prl.kernels.permute
import prl.kernels.replay
import prl.kernels.router
import prl.kernels.swiglu  # noqa: F401
from prl.kernels import registry


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(registry, "_OPS", {op: dict(have) for op, have in registry._OPS.items()})
    registry.choose.cache_clear()
    yield monkeypatch
    registry.choose.cache_clear()


def test_every_op_has_the_reference(fresh):
    fresh.delenv("PRL_KERNELS", raising=False)
    assert set(registry.backends().values()) == {"reference"}
    assert {"experts", "replay_select", "router_select", "permute", "combine", "logprobs", "index_select"} <= set(
        registry.backends()
    )


def test_a_demanded_backend_runs_or_is_an_error(fresh):
    registry.implements("experts", "other")(lambda: "other")
    fresh.setenv("PRL_KERNELS", "other")
    assert registry.choose("experts")() == "other"
    with pytest.raises(registry.KernelError, match="kernel logprobs: no backend other; it has reference"):
        registry.choose("logprobs")
    with pytest.raises(registry.KernelError, match="kernel nonsense: no backend other; it has none"):
        registry.choose("nonsense")
