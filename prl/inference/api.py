"""What goes into and comes out of an engine, whichever it is. Free of torch and of HTTP.

Legend: P prompt tokens, C completion tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class GenerateRequest:
    tokens: np.ndarray
    """int32 [P]."""
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """Keys the sampling noise; the noise of a token follows from (seed, its position in the sequence)."""
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    """Lower is served first; ties by arrival."""
    routes_from: int = 0
    """First position whose routes row comes back (earlier turns' rows are there already)."""
    request_id: str = ""
    session: str = ""
    """The rollout's id: replicas are chosen with affinity to it."""


@dataclass(slots=True)
class Generation:
    tokens: np.ndarray
    """int32 [C], the stop token included."""
    logprobs: np.ndarray
    """float32 [C], of the distribution actually sampled from."""
    versions: np.ndarray
    """int32 [C], the weight version that produced each token."""
    routes: np.ndarray | None
    """uint8 or uint16 [P + C − 1 − routes_from, L, K], row i of the forward of position routes_from + i; MoE layers only."""
    finish_reason: str
    """stop, length or abort."""
    replica: str
    selections: np.ndarray | None = None
    """int32, like routes, the DSA indexer's top-k."""
    timings: dict[str, float] = field(default_factory=dict)


class EngineError(Exception):
    """A request that no replica could answer: names the replica, the route, what was expected and what came."""
