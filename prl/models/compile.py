"""torch.compile, block by block: the graphs are norms, projections, rotation, router, feed-forwards and sums.

What depends on documents, on selections or on other ranks stays outside: attention proper, the indexer, the experts, whose
kernels are opaque in any case. Graphs break there, and at FSDP's hooks. The number of tokens is a symbol, so that a micro-batch
of another length finds its graphs.
"""

from __future__ import annotations

import functools

import torch

from prl.layers.attention import Attention
from prl.layers.dsa import Indexer
from prl.layers.linear import Linear
from prl.layers.mla import MLA
from prl.layers.moe import Experts
from prl.models.base import Model


def compile_blocks(model: Model) -> None:
    """Before `recompute`, whose wholes are around the graphs."""
    _leave_out()
    # Else a count of tokens that equals a width once is taken for that width for good.
    torch.fx.experimental._config.use_duck_shape = False
    for block in model.layers:
        block.forward = torch.compile(block.forward, dynamic=True)


@functools.cache
def _leave_out() -> None:
    """Of the classes, not of instances: a function of its own per layer would be a graph of its own per layer."""
    Attention.attend = torch.compiler.disable(Attention.attend)  # type: ignore[method-assign]
    MLA.attend = torch.compiler.disable(MLA.attend)  # type: ignore[method-assign]
    Indexer.forward = torch.compiler.disable(Indexer.forward)  # type: ignore[method-assign]
    Experts.forward = torch.compiler.disable(Experts.forward)  # type: ignore[method-assign]
    Linear.multiply_fp8 = staticmethod(torch.compiler.disable(Linear.multiply_fp8))


def counts() -> dict[str, int]:
    """Graphs that this process has compiled and where they broke off, for the metrics."""
    found = torch._dynamo.utils.counters
    return {"graphs": found["stats"]["unique_graphs"], "graph_breaks": sum(found["graph_break"].values())}
