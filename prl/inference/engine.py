"""The embedded engine: continuous batching over prl's own models, one synchronous `step` at a time.

It is the reference that other engines are compared with, so it is plain: a step admits waiting requests by (priority,
arrival), runs one forward over every running sequence's outstanding tokens (one each when decoding, a chunk of the prompt
before), samples, and hands out what is finished. A request is admitted only when the blocks for all it can ever need are
free, so a running one never waits for memory and nothing can deadlock. Weights change between two steps; requests go on with
the keys and values they have.

Per-sequence state lives in arrays [max_batch, capacity] indexed by the sequence's row, so a step costs a fixed number of
NumPy and torch calls; Python loops only over sequences that begin, end or stream. Routes lie beside the KV slots and so come
with cached prefixes.

Legend: T flat rows of a step, P prompt tokens, C completion tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prl.inference.api import GenerateRequest, Generation
from prl.inference.kv_cache import BlockPool, CachedLayout, PagedCache, block_hashes
from prl.inference.sampling import log_probabilities, noise, sample
from prl.kernels import registry
from prl.kernels.lm_head import label_logprobs, logits
from prl.kernels.weights import weights_changed
from prl.models import precision
from prl.models.base import ForwardInput
from prl.models.bitwise import fix_order
from prl.models.spec import ModelSpec
from prl.samples import route_dtype


class RequestError(ValueError):
    """A request that this engine cannot ever serve: names the field, what it holds and what was expected."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(slots=True)
class Event:
    """What a step has to say about one request: its tokens since the last event, and on the last event the rest."""

    request_id: str
    generation: Generation
    """finish_reason is empty until the last event; that one alone has routes, and versions of the whole completion."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


def no_generation(replica: str, reason: str) -> Generation:
    """Of a request that never got to a token."""
    empty = np.zeros(0, np.int32)
    return Generation(empty, empty.astype(np.float32), empty, None, reason, replica)


@dataclass(slots=True)
class Scored:
    """logprobs float32 [T], entry t of token t, 0 for the first; routes [T, L, K] and selections of every forward, or None."""

    logprobs: np.ndarray
    routes: np.ndarray | None
    selections: np.ndarray | None


@dataclass(slots=True)
class _Sequence:
    request: GenerateRequest
    stream_interval: int
    arrived: float
    chunk: int = 0
    """Tokens per step at most (scoring), 0 where only the step's budget counts."""
    scoring: bool = False
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    """Blocks offered to the prefix cache."""
    cached: int = 0
    sent: int = 0
    """Completion tokens handed out."""
    admitted: float = 0.0


class Engine:
    """Continuous batching of one model. Not thread-safe: one thread owns it.

    `held` stops the admission of waiting requests, running ones go on. `version` labels the tokens sampled from now on.
    KernelError where a backend is demanded that cannot run here.
    With `bitwise` logprobs are the trainer's own, to the last bit (`prl.models.bitwise`): running requests forward their tokens
    again under new weights (counted as `recomputed`), and no request reads keys of older ones.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        *,
        max_batch: int = 128,
        max_prefill_tokens: int = 2048,
        kv_tokens: int = 65536,
        block_size: int = 8,
        prefix_cache: bool = True,
        record_routes: bool = True,
        record_selections: bool = False,
        selection_bytes: int = 1 << 28,
        bitwise: bool = False,
        version: int = 0,
        name: str = "engine",
    ):
        self.model, self.spec, self.name, self.version = model.eval(), spec, name, version
        self.block_size, self.max_batch, self.max_prefill_tokens = block_size, max_batch, max_prefill_tokens
        self.prefix_cache, self.selection_bytes, self.bitwise = prefix_cache, selection_bytes, bitwise
        self.capacity = min(spec.max_positions, kv_tokens)
        """Tokens of the longest sequence, prompt and completion."""
        self.pool = BlockPool(kv_tokens // block_size)
        self.cache = PagedCache(model.cache_spec(), self.pool.n_blocks, block_size)  # type: ignore[operator]
        self.device = next(model.parameters()).device
        if bitwise:
            fix_order(model, self.device)  # type: ignore[arg-type]
        registry.backends(self.device.type)  # a demand that cannot be met is told before the first request
        self.fp8 = precision.layers_in(precision.held(model))
        """Layers that compute in FP8."""
        self.held = False
        self.counts = dict.fromkeys(
            ("prompt", "generated", "prefix_queries", "prefix_hits", "steps", "forwarded", "recomputed"), 0
        )
        self.finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)

        slots, n_moe = self.cache.slots, len(spec.moe_layers)
        self._routes = np.zeros((slots, n_moe, spec.top_k), route_dtype(spec.n_experts)) if record_routes and n_moe else None
        recorded = record_selections and spec.index_topk > 0
        self._selections = np.full((slots, len(spec.indexed_layers), spec.index_topk), -1, np.int32) if recorded else None

        rows, width = (max_batch,), (max_batch, self.capacity)
        self._tokens = np.zeros(width, np.int32)
        self._logprobs = np.zeros(width, np.float32)
        self._versions = np.zeros(width, np.int32)
        self._noise = np.zeros(width, np.float64)
        self._table = np.zeros((max_batch, -(-self.capacity // block_size)), np.int64)
        self._known = np.zeros(rows, np.int64)  # tokens there are
        self._done = np.zeros(rows, np.int64)  # tokens whose keys are in the cache
        self._limit = np.zeros(rows, np.int64)  # tokens there may ever be
        self._due = np.zeros(rows, np.int64)  # tokens at which a part is streamed
        self._chunk = np.zeros(rows, np.int64)
        self._scoring = np.zeros(rows, np.bool_)
        self._temperature = np.zeros(rows, np.float32)
        self._top_p = np.ones(rows, np.float32)
        self._top_k = np.zeros(rows, np.int64)
        self._stops = np.full((max_batch, 1), -1, np.int64)

        self._waiting: list[tuple[int, int, _Sequence]] = []
        self._arrivals = 0
        self._running: dict[int, _Sequence] = {}  # by row, in order of admission
        self._free_rows = list(range(max_batch))
        self._ids: set[str] = set()
        self._out: list[Event] = []
        self._scored: dict[str, Scored] = {}
        self._weights = precision.held(model)

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def kv_use(self) -> float:
        return 1 - self.pool.free / self.pool.n_blocks

    @property
    def ready(self) -> bool:
        """Whether a step would get anything done."""
        return bool(self._running or self._out or (self._waiting and not self.held))

    def check(self, request: GenerateRequest) -> None:
        """Raise RequestError for what can never be served. Pure, and safe from any thread."""
        prompt = len(request.tokens)
        if request.max_tokens < 1:
            raise RequestError("max_tokens", f"{request.max_tokens}, expected at least 1")
        self._check_tokens(request.tokens, request.max_tokens)
        if not (request.temperature == 0 or 1e-5 <= request.temperature <= 1e5):
            raise RequestError("temperature", f"{request.temperature}, expected 0 (greedy) or 1e-5 to 1e5")
        if not 0 < request.top_p <= 1:
            raise RequestError("top_p", f"{request.top_p}, expected above 0 and at most 1")
        if request.top_k < 0:
            raise RequestError("top_k", f"{request.top_k}, expected 0 (off) or more")
        if any(not 0 <= t < self.spec.vocab_size for t in request.stop_token_ids):
            raise RequestError(
                "stop_token_ids", f"{request.stop_token_ids}, expected tokens of the vocabulary of {self.spec.vocab_size}"
            )
        if not 0 <= request.routes_from <= prompt:
            raise RequestError(
                "routed_experts_prompt_start", f"{request.routes_from}, expected 0 to {prompt}, the prompt's length"
            )

    def _check_tokens(self, tokens: np.ndarray, new: int) -> None:
        total = len(tokens) + new
        if not len(tokens):
            raise RequestError("token_ids", "empty, expected at least one token")
        if tokens.min() < 0 or tokens.max() >= self.spec.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self.spec.vocab_size)][0]
            raise RequestError("token_ids", f"token {bad} is outside of the vocabulary of {self.spec.vocab_size}")
        if total > self.capacity:
            raise RequestError(
                "max_tokens" if new else "token_ids",
                f"{len(tokens)} tokens and {new} new ones are more than a sequence may have, {self.capacity} "
                f"(the smaller of the model's {self.spec.max_positions} positions and the KV cache's tokens): ask for fewer",
            )
        if self._selections is not None and total * self._selections[0].nbytes > self.selection_bytes:
            raise RequestError(
                "max_tokens" if new else "token_ids",
                f"the selections of {total} tokens take {total * self._selections[0].nbytes} bytes, the cap is "
                f"{self.selection_bytes} (inference.selection_bytes)",
            )

    def add(self, request: GenerateRequest, *, stream_interval: int = 0) -> None:
        """Queue a request; `stream_interval` > 0 hands out its tokens in parts of that many. Raises RequestError."""
        self.check(request)
        if request.request_id in self._ids:
            raise RequestError("request_id", f"{request.request_id!r} is running already")
        self._queue(_Sequence(request, stream_interval, time.monotonic()))

    def _queue(self, sequence: _Sequence) -> None:
        self._ids.add(sequence.request.request_id)
        heapq.heappush(self._waiting, (sequence.request.priority, self._arrivals, sequence))
        self._arrivals += 1

    def abort(self, ids: Iterable[str] | None = None) -> int:
        """End these requests (None: all) with what they have so far; returns how many there were."""
        wanted = self._ids.copy() if ids is None else self._ids & set(ids)
        kept = [w for w in self._waiting if w[2].request.request_id not in wanted]
        for _, _, sequence in sorted(w for w in self._waiting if w[2].request.request_id in wanted):
            self._emit(sequence, "abort")
        self._waiting = kept
        heapq.heapify(self._waiting)
        for sequence in [s for s in self._running.values() if s.request.request_id in wanted]:
            self._end(sequence, "abort")
        return len(wanted)

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Take over new weights, between two steps; of layers in FP8 codes and scales. Nothing changes unless every tensor is
        there in its right shape, and no layer is FP8 here or there alone: ValueError."""
        if apart := precision.differences(self.fp8, precision.layers_in(tensors), ("this engine", "the weights")):
            raise ValueError(f"weights of version {version}: layers in FP8: {apart}")
        missing, unknown = self._weights.keys() - tensors.keys(), tensors.keys() - self._weights.keys()
        if missing or unknown:
            raise ValueError(f"weights of version {version}: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")
        for name, own in self._weights.items():
            if own.shape != tensors[name].shape:
                raise ValueError(
                    f"weights of version {version}: {name} is {tuple(tensors[name].shape)}, not {tuple(own.shape)}"
                )
        with torch.no_grad():
            for name, own in self._weights.items():
                own.copy_(tensors[name])
        weights_changed()
        self.version = version
        if self.bitwise:
            self.reset_prefix_cache()
            for row, sequence in self._running.items():
                self.counts["recomputed"] += int(self._done[row])
                self._done[row] = sequence.registered = 0

    def reset_prefix_cache(self) -> None:
        self.pool.forget()

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Admit, forward, sample: the events since the last step."""
        rows, counts = self._schedule()
        if rows.size:
            with torch.inference_mode():
                self._forward(rows, counts)
        out, self._out = self._out, []
        return out

    def _schedule(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of this step and how many tokens each forwards: decoding ones all, prompts within the token budget."""
        running = np.fromiter(self._running, np.int64, len(self._running))
        counts = self._known[running] - self._done[running]
        chunk = self._chunk[running]
        counts = np.where(chunk > 0, np.minimum(counts, chunk), counts)
        prefill = np.where(counts > 1, counts, 0)
        budget = self.max_prefill_tokens
        if prefill.any():
            counts = np.where(counts > 1, np.clip(budget - (prefill.cumsum() - prefill), 0, counts), counts)
            budget = max(budget - int(prefill.sum()), 0)
            for i in np.flatnonzero((prefill > 0) & (counts > 0)):
                self._register(self._running[int(running[i])], int(self._done[running[i]] + counts[i]))
        new_rows, new_counts = self._admit(budget)
        rows = np.concatenate([running, np.array(new_rows, np.int64)])
        counts = np.concatenate([counts, np.array(new_counts, np.int64)])
        return rows[counts > 0], counts[counts > 0]

    def _admit(self, budget: int) -> tuple[list[int], list[int]]:
        rows: list[int] = []
        counts: list[int] = []
        while self._waiting and not self.held and self._free_rows and budget > 0:
            sequence = self._waiting[0][2]
            request, prompt = sequence.request, len(sequence.request.tokens)
            # The last sampled token is never forwarded, and a prompt's last token always is: its logits are wanted.
            need = -(-(prompt + request.max_tokens - 1) // self.block_size)
            shared: list[int] = []
            if self.prefix_cache and not sequence.scoring:
                sequence.hashes = sequence.hashes or block_hashes(request.cache_salt, request.tokens, self.block_size)
                shared = self.pool.match(sequence.hashes[: (prompt - 1) // self.block_size])
            blocks = self.pool.take(shared, need - len(shared))
            if blocks is None:
                break
            heapq.heappop(self._waiting)
            row = heapq.heappop(self._free_rows)
            sequence.row, sequence.blocks, sequence.admitted = row, blocks, time.monotonic()
            sequence.cached, sequence.registered = len(shared) * self.block_size, len(shared)
            self._running[row] = sequence
            self._tokens[row, :prompt] = request.tokens
            self._table[row, : len(blocks)] = blocks
            self._known[row], self._done[row], self._limit[row] = prompt, sequence.cached, prompt + request.max_tokens
            self._due[row] = prompt + sequence.stream_interval if sequence.stream_interval else np.iinfo(np.int64).max
            self._chunk[row], self._scoring[row] = sequence.chunk, sequence.scoring
            self._temperature[row], self._top_p[row] = request.temperature, request.top_p
            self._top_k[row] = min(request.top_k, self.spec.vocab_size)
            if not sequence.scoring:
                self._noise[row, prompt : prompt + request.max_tokens] = noise(request.seed, prompt, request.max_tokens)
            stops = request.stop_token_ids
            if len(stops) > self._stops.shape[1]:
                self._stops = np.pad(self._stops, ((0, 0), (0, len(stops) - self._stops.shape[1])), constant_values=-1)
            self._stops[row] = -1
            self._stops[row, : len(stops)] = stops
            count = min(prompt - sequence.cached, budget, sequence.chunk or budget)
            budget -= count
            self._register(sequence, sequence.cached + count)
            self.counts["prompt"] += prompt
            self.counts["prefix_queries"] += prompt
            self.counts["prefix_hits"] += sequence.cached
            rows.append(row)
            counts.append(count)
        return rows, counts

    def _register(self, sequence: _Sequence, done: int) -> None:
        """Offer the whole blocks among the first `done` tokens, in the cache or about to be, to later requests."""
        end = min(done // self.block_size, len(sequence.hashes))
        for i in range(sequence.registered, end):
            self.pool.register(sequence.blocks[i], sequence.hashes[i])
        sequence.registered = max(sequence.registered, end)

    def _forward(self, rows: np.ndarray, counts: np.ndarray) -> None:
        done = self._done[rows]
        layout = CachedLayout(self.cache, self.block_size, done, counts, self._table[rows], self.device)
        row_T, position_T = rows[layout.sequence_T], layout.positions_T
        output = self.model(
            ForwardInput(
                tokens_T=self._to_device(self._tokens[row_T, position_T].astype(np.int64)),
                positions_T=self._to_device(position_T),
                layout=layout,
                record_selections=self._selections is not None,
            )
        )
        if self._routes is not None:
            self._routes[layout.slots_T] = output.routes_TLK.cpu().numpy()
        if self._selections is not None:
            self._selections[layout.slots_T] = output.selections_TAS.cpu().numpy()
        self._done[rows] = done + counts
        self.counts["steps"] += 1
        self.counts["forwarded"] += len(row_T)
        if self._scoring.any():
            self._score_rows(output.hidden_TD, row_T, position_T)
        # The row that reaches a sequence's last known token scores the next one.
        last_T = np.flatnonzero((position_T + 1 == self._known[row_T]) & ~self._scoring[row_T])
        if last_T.size:
            self._sample(output.hidden_TD[self._to_device(last_T)], row_T[last_T])
        for row in rows[self._scoring[rows] & (self._done[rows] == self._known[rows])]:
            self._end(self._running[int(row)], "length")

    def _logits(self, hidden_TD: Tensor) -> Tensor:
        return logits(hidden_TD, self.model.lm_head_weight)  # type: ignore[arg-type]

    def _sample(self, hidden_BD: Tensor, rows: np.ndarray) -> None:
        at = self._known[rows]
        temperature, top_p, top_k = self._temperature[rows], self._top_p[rows], self._top_k[rows]
        logits_BV, temperature_B = self._logits(hidden_BD), self._to_device(temperature)
        plain = (temperature > 0) & (top_p == 1) & (top_k == 0)
        token_B, logprob_B = sample(
            logits_BV,
            temperature_B,
            self._to_device(top_p),
            self._to_device(top_k),
            self._to_device(self._noise[rows, at]),
            plain=bool(plain.all()),
        )
        if self.bitwise:
            own_B = label_logprobs(logits_BV, token_B, torch.where(temperature_B > 0, temperature_B, 1.0))
            logprob_B = torch.where(self._to_device(plain), own_B, logprob_B)
        tokens = token_B.cpu().numpy()
        logprobs = logprob_B.float().cpu().numpy()
        self._tokens[rows, at], self._logprobs[rows, at], self._versions[rows, at] = tokens, logprobs, self.version
        self._known[rows] = at + 1
        self.counts["generated"] += len(rows)
        broken = ~np.isfinite(logprobs)
        stopped = (tokens[:, None] == self._stops[rows]).any(1)
        ended = broken | stopped | (at + 1 == self._limit[rows])
        for i in np.flatnonzero(ended):
            sequence = self._running[int(rows[i])]
            self._end(sequence, "error" if broken[i] else "stop" if stopped[i] else "length")
        for row in rows[~ended & (at + 1 >= self._due[rows])]:
            self._emit(self._running[int(row)], "")

    def _score_rows(self, hidden_TD: Tensor, row_T: np.ndarray, position_T: np.ndarray) -> None:
        """Logprobs of given tokens, in chunks so that not all logits are there at once."""
        which_T = np.flatnonzero(self._scoring[row_T] & (position_T + 1 < self._known[row_T]))
        for part in np.array_split(which_T, -(-len(which_T) // 1024)) if len(which_T) else []:
            rows, at = row_T[part], position_T[part] + 1
            labels = self._to_device(self._tokens[rows, at].astype(np.int64))
            temperature = self._to_device(self._temperature[rows])
            logits_TV = self._logits(hidden_TD[self._to_device(part)])
            if self.bitwise:
                logprobs_T = label_logprobs(logits_TV, labels, temperature)
            else:
                logprobs_T = log_probabilities(logits_TV, temperature).gather(1, labels[:, None]).squeeze(1)
            self._logprobs[rows, at] = logprobs_T.float().cpu().numpy()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _emit(self, sequence: _Sequence, reason: str) -> None:
        generation = no_generation(self.name, reason) if sequence.row < 0 else self._part(sequence, reason)
        error = ""
        if reason == "error":
            at = int(self._known[sequence.row]) - 1
            error = f"the logprob of the token at position {at} is not finite, under weight version {self.version}"
        self._out.append(Event(sequence.request.request_id, generation, len(sequence.request.tokens), sequence.cached, error))
        if reason:
            self.finished[reason] += 1
            self._ids.discard(sequence.request.request_id)

    def _part(self, sequence: _Sequence, reason: str) -> Generation:
        """The tokens since the last part; with a reason also the routes and versions of the whole."""
        request, prompt, row = sequence.request, len(sequence.request.tokens), sequence.row
        known = int(self._known[row])
        new = slice(prompt + sequence.sent, known)
        # The prompt of an aborted request may not have been forwarded to its end: rows go as far as it was.
        done = min(known - 1, int(self._done[row]))
        sequence.sent, self._due[row] = known - prompt, known + sequence.stream_interval
        return Generation(
            tokens=self._tokens[row, new].copy(),
            logprobs=self._logprobs[row, new].copy(),
            versions=self._versions[row, slice(prompt, known) if reason else slice(0, 0)].copy(),
            routes=self._rows_of(self._routes, row, request.routes_from, done) if reason else None,
            finish_reason=reason,
            replica=self.name,
            selections=self._rows_of(self._selections, row, request.routes_from, done) if reason else None,
            timings={"queued_s": sequence.admitted - sequence.arrived, "engine_s": time.monotonic() - sequence.arrived},
        )

    def _rows_of(self, store: np.ndarray | None, row: int, first: int, end: int) -> np.ndarray | None:
        if store is None:
            return None
        at = np.arange(first, max(end, first))
        return store[self._table[row, at // self.block_size] * self.block_size + at % self.block_size]

    def _end(self, sequence: _Sequence, reason: str) -> None:
        row = sequence.row
        if sequence.scoring:
            n = int(self._done[row])
            self._scored[sequence.request.request_id] = Scored(
                self._logprobs[row, :n].copy(),
                self._rows_of(self._routes, row, 0, n),
                self._rows_of(self._selections, row, 0, n),
            )
            self._ids.discard(sequence.request.request_id)
        else:
            self._emit(sequence, reason)
            if self.prefix_cache and reason in ("stop", "length"):
                done = int(self._done[row])
                sequence.hashes = block_hashes(
                    sequence.request.cache_salt, self._tokens[row, :done], self.block_size, sequence.hashes
                )
                self._register(sequence, done)
        self.pool.release(sequence.blocks)
        del self._running[row]
        heapq.heappush(self._free_rows, row)
        self._scoring[row] = False

    # -- scoring -------------------------------------------------------------------------------------------------------

    def score(self, token_lists: Sequence[np.ndarray], *, temperature: float = 1.0, chunk: int = 0) -> list[Scored]:
        """Logprobs and routes of given tokens through the cached path; `chunk` 1 forwards them one by one, as decoding does.

        Needs an engine with nothing else to do. Raises RequestError as `add` does.
        """
        if self._running or self._waiting:
            raise RuntimeError(f"{self.name}: score() needs an idle engine, {self.running} run and {self.waiting} wait")
        for i, tokens in enumerate(token_lists):  # max_tokens 1: a sampled token needs no slot, so this is the given ones' room
            request = GenerateRequest(np.asarray(tokens, np.int32), 1, temperature, request_id=f"score-{i}")
            self._check_tokens(request.tokens, 0)
            self._queue(_Sequence(request, 0, time.monotonic(), chunk=chunk, scoring=True))
        while self._running or self._waiting:
            self.step()
        scored, self._scored = self._scored, {}
        return [scored[f"score-{i}"] for i in range(len(token_lists))]

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; safe from any thread."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "kv_use": self.kv_use,
            "version": self.version,
            **self.counts,
            "finished": dict(self.finished),
        }
