"""The record that flows from the engine to the loss: `Rollout` and `Sample`, and how they are cut, joined and packed.

Legend: T tokens of one sample, N tokens of one micro-batch, D documents of one micro-batch, L MoE layers, K experts per
token. Arrays are NumPy, never Python lists; this module does not import torch.

The shift: `logits[t - 1]` score token `t`. Every per-token array here is indexed by the token it speaks of, so entry `t` of
`logprobs` is the logprob of `tokens[t]`. `routes` alone is indexed by the forward pass: row `t` is of the forward of token
`t`, the one that scored token `t + 1`; the last token therefore never has an engine's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

RL, CE = 0, 1  # values of `loss_stream`: which loss reads the token
OUTCOMES = ("finished", "truncated", "timed_out", "environment_error", "engine_error", "bad_reward", "cancelled")


def route_dtype(n_experts: int) -> np.dtype:
    return np.dtype(np.uint8 if n_experts <= 256 else np.uint16)


PER_TOKEN: dict[str, np.dtype | None] = {
    "tokens": np.dtype(np.int32),
    "turn": np.dtype(np.int16),
    "trainable": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "temperature": np.dtype(np.float32),
    "routed": np.dtype(np.bool_),
    "advantages": np.dtype(np.float32),
    "loss_stream": np.dtype(np.uint8),
    "routes": None,  # uint8 or uint16 [T, L, K]
    "selections": None,  # int32 [T, L_attention, index_topk], -1 where fewer
    "ref_logprobs": np.dtype(np.float32),
}
"""Every per-token field and its dtype (None: checked in `Sample.check`). The functions below move exactly these."""
OPTIONAL = ("routes", "selections", "ref_logprobs")


@dataclass(slots=True)
class Sample:
    """One branch of a rollout: typed arrays of one length T (shapes and meaning: docs/design.md, "The record").

    tokens int32 [T]; turn int16 [T]; trainable bool [T], sampled by the policy; logprobs float32 [T] of the distribution
    sampled from, 0 where not sampled; versions int32 [T], -1 where not sampled; temperature float32 [T]; routed bool [T],
    whether the routes row is the engine's own; advantages float32 [T]; loss_stream uint8 [T]; routes uint8 or uint16
    [T, L, K] or None; selections int32 [T, L_attention, k] or None; ref_logprobs float32 [T] or None.
    """

    tokens: np.ndarray
    turn: np.ndarray
    trainable: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    temperature: np.ndarray
    routed: np.ndarray
    advantages: np.ndarray
    loss_stream: np.ndarray
    routes: np.ndarray | None = None
    selections: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    branch: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of_prompt(cls, tokens: Sequence[int] | np.ndarray, *, turn: int = 0, temperature: float = 1.0) -> Sample:
        """A sample of prompt or tool tokens: nothing trainable, nothing routed yet."""
        t = np.asarray(tokens, np.int32)
        n = len(t)
        return cls(
            tokens=t,
            turn=np.full(n, turn, np.int16),
            trainable=np.zeros(n, np.bool_),
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, -1, np.int32),
            temperature=np.full(n, temperature, np.float32),
            routed=np.zeros(n, np.bool_),
            advantages=np.zeros(n, np.float32),
            loss_stream=np.full(n, RL, np.uint8),
        )

    def check_lengths(self) -> None:
        """Raise ValueError naming the first field that is not as long as the tokens."""
        for name in PER_TOKEN:
            if (a := getattr(self, name)) is not None and len(a) != len(self):
                raise ValueError(f"sample.{name}: length {len(a)}, expected {len(self)} as in tokens")

    def check(self, *, n_experts: int | None = None) -> Sample:
        """Raise ValueError naming the first field whose length, dtype or content breaks the record."""
        n = len(self.tokens)
        self.check_lengths()
        for name, dtype in PER_TOKEN.items():
            a = getattr(self, name)
            if a is None:
                if name not in OPTIONAL:
                    raise ValueError(f"sample.{name}: missing")
                continue
            if dtype is not None and (a.dtype != dtype or a.ndim != 1):
                raise ValueError(f"sample.{name}: {a.dtype} of {a.ndim} dimensions, expected {dtype} [T]")
        if self.routes is not None:
            if self.routes.ndim != 3 or self.routes.dtype not in (np.uint8, np.uint16):
                raise ValueError(f"sample.routes: {self.routes.dtype} {self.routes.shape}, expected uint8 or uint16 [T, L, K]")
            if n and self.routed[-1]:
                raise ValueError("sample.routed: the last token cannot have an engine's row")
            if n_experts is not None and self.routed.any() and int(self.routes[self.routed].max()) >= n_experts:
                raise ValueError(f"sample.routes: expert id {int(self.routes[self.routed].max())}, the model has {n_experts}")
        elif self.routed.any():
            raise ValueError("sample.routed: rows marked, but sample.routes is missing")
        if self.selections is not None and (self.selections.ndim != 3 or self.selections.dtype != np.int32):
            raise ValueError(f"sample.selections: {self.selections.dtype} {self.selections.shape}, expected int32 [T, L, k]")
        if n and self.trainable[0]:
            raise ValueError("sample.trainable: the first token has no logits that score it")
        if (self.versions[self.trainable] < 0).any():
            raise ValueError("sample.versions: a trainable token without a weight version")
        if not np.isfinite(self.logprobs[self.trainable]).all():
            raise ValueError("sample.logprobs: not finite on a trainable token")
        return self


@dataclass(slots=True)
class Rollout:
    """One attempt at one task.

    `id` is unique for ever; `ordinal` is the task's place in the data order, `index` the place in its group, `attempt` counts
    environment errors: (seed, ordinal, index, attempt) key the sampling noise. `salt` is the prefix-cache salt.
    """

    id: str
    env: str
    task: str
    ordinal: int
    index: int
    attempt: int = 0
    reward: float = 0.0
    outcome: str = "finished"
    error: str = ""
    salt: str = ""
    advantage: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(len(s) for s in self.samples)

    @property
    def n_trainable(self) -> int:
        return sum(int(s.trainable.sum()) for s in self.samples)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for s in self.samples for f in PER_TOKEN if (a := getattr(s, f)) is not None)

    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled a trainable token, None where nothing is trainable."""
        olds = [int(s.versions[s.trainable].min()) for s in self.samples if s.trainable.any()]
        return min(olds) if olds else None


def _optional_like(parts: Sequence[Sample], name: str) -> np.ndarray | None:
    """The template of an optional field over parts of which some lack it; None where all do."""
    have = [a for p in parts if (a := getattr(p, name)) is not None]
    if not have:
        return None
    kinds = {(a.shape[1:], a.dtype) for a in have}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} {list(shape)}" for shape, dtype in kinds))
        raise ValueError(f"sample.{name}: parts differ in shape or dtype: {found}")
    return have[0]


def concatenate(parts: Sequence[Sample]) -> Sample:
    """Join samples end to end, all fields together. A part without routes gets unrouted rows of zeros.

    ValueError where a field is not as long as its sample: everything behind it would be misaligned.
    """
    if not parts:
        raise ValueError("concatenate: no samples")
    for part in parts:
        part.check_lengths()
    out: dict[str, np.ndarray | None] = {}
    for name in PER_TOKEN:
        like = _optional_like(parts, name)
        if like is None:
            out[name] = None
            continue
        fill = -1 if name == "selections" else 0
        arrays = [
            a if (a := getattr(p, name)) is not None else np.full((len(p), *like.shape[1:]), fill, like.dtype) for p in parts
        ]
        out[name] = np.concatenate(arrays)
    return Sample(**out, branch=parts[0].branch)  # type: ignore[arg-type]


def truncate(sample: Sample, length: int) -> Sample:
    """Keep the first `length` tokens of every field; the new last token loses its route row's claim."""
    if length >= len(sample):
        return sample
    cut = replace(sample, **{n: a[:length] for n in PER_TOKEN if (a := getattr(sample, n)) is not None})
    if length:
        cut.routed = cut.routed.copy()
        cut.routed[-1] = False
    return cut


def shift_left(a: np.ndarray, fill: float | int = 0) -> np.ndarray:
    """Index by the position whose logits score the token: out[t] = a[t + 1], out[-1] = fill. The one shift helper."""
    out = np.empty_like(a)
    out[:-1] = a[1:]
    out[-1:] = fill
    return out


@dataclass(slots=True)
class Counts:
    """Global sums over a whole batch that normalise the loss, the same on every rank."""

    rollouts: int = 0
    rl_tokens: int = 0
    ce_tokens: int = 0


@dataclass(slots=True)
class MicroBatch:
    """Samples packed end to end into one row of N tokens.

    The per-token fields of `Sample` [N]; positions int32 [N], from 0 in each document; lengths int32 [D], documents in order;
    rollout int32 [D], the rollout's place in the batch; rollout_tokens int32 [D], trainable tokens of the whole rollout in
    all its documents, for sequence-level normalisation.
    """

    sample: Sample
    positions: np.ndarray
    lengths: np.ndarray
    rollout: np.ndarray
    rollout_tokens: np.ndarray

    @property
    def n_tokens(self) -> int:
        return len(self.sample)


@dataclass(slots=True)
class Batch:
    """What one trainer rank gets for one optimizer step: its micro-batches and the whole batch's counts."""

    step: int
    counts: Counts
    rollout_ids: list[str]
    micro_batches: list[MicroBatch]
    checksum: str = ""
    """Of the whole batch (all ranks), as the ledger records it."""


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `budget`; an item over the budget gets a bin alone. Deterministic."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        for b, r in enumerate(room):
            if lengths[i] <= r:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins


def balance(bins: Sequence[Sequence[int]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Give each rank the same number of bins (empty ones fill up) with summed costs as level as greedy choice gets them."""
    per_rank = -(-len(bins) // ranks)
    out: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for b in sorted(range(len(bins)), key=lambda b: (-sum(costs[i] for i in bins[b]), b)):
        r = min((r for r in range(ranks) if len(out[r]) < per_rank), key=lambda r: (load[r], r))
        out[r].append(list(bins[b]))
        load[r] += sum(costs[i] for i in bins[b])
    for rank in out:
        rank.extend([] for _ in range(per_rank - len(rank)))
    return out


def pack(rollouts: Sequence[Rollout], *, step: int, budget: int, ranks: int, checksum: str = "") -> list[Batch]:
    """Pack a whole batch for `ranks` trainer ranks: first-fit-decreasing to `budget` tokens, then balance.

    Every rank gets the same number of micro-batches (an empty one is a single untrainable token, since all ranks must join
    every collective). The counts are the whole batch's.
    """
    documents = [(r, s) for r, rollout in enumerate(rollouts) for s in rollout.samples]
    for _, s in documents:
        s.check_lengths()
    trainable = [r.n_trainable for r in rollouts]
    counts = Counts(
        rollouts=sum(t > 0 for t in trainable),
        rl_tokens=sum(int((s.trainable & (s.loss_stream == RL)).sum()) for _, s in documents),
        ce_tokens=sum(int((s.trainable & (s.loss_stream == CE)).sum()) for _, s in documents),
    )
    lengths = [len(s) for _, s in documents]
    plan = balance(first_fit_decreasing(lengths, budget), [float(n) for n in lengths], ranks)
    ids = [r.id for r in rollouts]
    like = concatenate([truncate(s, 1) for _, s in documents])

    def micro_batch(docs: Sequence[int]) -> MicroBatch:
        chosen = [documents[i] for i in docs] or [(0, _blank(like))]
        ns = np.array([len(s) for _, s in chosen], np.int32)
        return MicroBatch(
            sample=concatenate([s for _, s in chosen]),
            positions=np.concatenate([np.arange(n, dtype=np.int32) for n in ns]),
            lengths=ns,
            rollout=np.array([r for r, _ in chosen], np.int32),
            rollout_tokens=np.array([max(trainable[r], 1) for r, _ in chosen], np.int32),
        )

    return [Batch(step, counts, ids, [micro_batch(b) for b in rank], checksum) for rank in plan]


def pad(mb: MicroBatch, multiple: int) -> MicroBatch:
    """Lone padding tokens, documents of their own, up to a multiple of tokens."""
    n = -mb.n_tokens % multiple
    if not n:
        return mb
    blank = _blank(mb.sample)
    ones = np.ones(n, np.int32)
    return MicroBatch(
        sample=concatenate([mb.sample, *[blank] * n]),
        positions=np.append(mb.positions, 0 * ones),
        lengths=np.append(mb.lengths, ones),
        rollout=np.append(mb.rollout, 0 * ones),
        rollout_tokens=np.append(mb.rollout_tokens, ones),
    )


def _blank(like: Sample) -> Sample:
    """One untrainable token with the optional fields that `like` has."""
    blank = Sample.of_prompt([0])
    for name in OPTIONAL:
        a = getattr(like, name)
        if a is not None:
            setattr(blank, name, np.full((1, *a.shape[1:]), -1 if name == "selections" else 0, a.dtype))
    return blank


assert {f.name for f in fields(Sample)} - {"branch"} == set(PER_TOKEN)
