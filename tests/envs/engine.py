"""An engine for tests of rollouts: a function whose answers follow from the tokens it is asked with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prl.inference.api import GenerateRequest, Generation
from prl.tokenizer import Tokenizer, characters

TOKENIZER = characters("abcdefghijklmnopqrstuvwxyz0123456789>=[]+ ")
L, K = 2, 3


def route_rows(tokens: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The route row of the forward of each position: it depends on the position and on every token up to it."""
    sums = np.cumsum(tokens.astype(np.int64) * (np.arange(len(tokens)) + 1))[start:stop]
    return ((sums[:, None, None] * 31 + np.arange(L * K).reshape(L, K) * 7) % 251).astype(np.uint8)


class Engine:
    """Answers each request with the next of `texts` ('$' is the end-of-text token); version and logprobs follow the call."""

    def __init__(
        self,
        *texts: str,
        routes: bool = True,
        selections: bool = False,
        spoil: Callable[[Generation], None] | None = None,
        tokenizer: Tokenizer = TOKENIZER,
    ):
        self.tokenizer = tokenizer
        self.texts, self.routes, self.selections, self.spoil = list(texts), routes, selections, spoil
        self.requests: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> Generation:
        k = len(self.requests)
        self.requests.append(request)
        text = self.texts[k]
        ids = self.tokenizer.encode(text.rstrip("$"))
        if text.endswith("$"):
            ids = np.append(ids, np.int32(self.tokenizer.eos_id))
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        whole = np.concatenate([request.tokens, ids])
        rows = route_rows(whole, request.routes_from, len(whole) - 1)
        generation = Generation(
            tokens=ids,
            logprobs=-0.25 * (k + 1) * np.arange(1, len(ids) + 1, dtype=np.float32),
            versions=np.full(len(ids), 10 + k, np.int32),
            routes=rows if self.routes else None,
            finish_reason="length" if cut else "stop",
            replica="r0",
            selections=rows.astype(np.int32) if self.selections else None,
        )
        if self.spoil:
            self.spoil(generation)
        return generation
