"""One optimizer step over one batch: forward and backward of every micro-batch, clip, update, measure. SFT and RL alike.

Legend: T tokens of a micro-batch, D its documents, N the positions whose logits score a trainable token, L MoE layers,
E experts, A layers with an indexer, S keys it keeps. `logits[t - 1]` score token t, so what speaks of token t is moved to
t - 1 by `shift_left`, and only there. Where ranks share the micro-batch (context parallelism), T are this rank's tokens and M
its positions of the N; the loss is that of all N on every rank, so that no loss knows of it.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from prl.config.schema import Loss
from prl.config.schema import Trainer as TrainerConfig
from prl.distributed.context import Shard, gather_some
from prl.distributed.mesh import Mesh
from prl.kernels.indexer import selection_flips
from prl.layers.layout import PackedLayout
from prl.layers.router import update_correction_bias
from prl.models import compile
from prl.models.base import ForwardInput, ForwardOutput
from prl.samples import CE, Batch, Counts, MicroBatch, pad, shift_left
from prl.trainer import drift, losses, optim
from prl.trainer.losses import LossFunction, LossInputs
from prl.trainer.state import Policy, TrainState


@dataclass(slots=True, frozen=True)
class Inputs:
    """A micro-batch on the device. Where nothing is trainable, N is 1, masked out, so that every rank runs the same graph;
    so is M where this rank has none of them."""

    forward: ForwardInput
    rows_M: Tensor
    """int64, the position whose logits score the token; the others speak of that token."""
    labels_M: Tensor
    temperature_M: Tensor
    scores: Scores | None
    """How the others' logprobs come here; None where there are none."""
    recorded_TAS: Tensor | None
    """The engine's selections, where they are not replayed."""
    old_logprobs_N: Tensor
    advantages_N: Tensor
    versions_N: Tensor
    documents_N: Tensor
    mask_N: Tensor
    ce_N: Tensor
    """bool, read by cross-entropy and not by the RL loss."""
    rollout_tokens_D: Tensor


@dataclass(slots=True, frozen=True)
class Scores:
    """Puts together what the ranks of a stream know of the N: `counts` of each, and the order of all, rank by rank."""

    group: dist.ProcessGroup
    counts: list[int]
    order_N: Tensor

    def __call__(self, logprobs_M: Tensor, entropy_M: Tensor) -> tuple[Tensor, Tensor]:
        both_N2 = gather_some(torch.stack((logprobs_M, entropy_M), 1), self.counts, self.order_N, self.group)
        logprobs_N, entropy_N = both_N2.unbind(1)
        return logprobs_N, entropy_N


@dataclass(slots=True, frozen=True)
class StepReport:
    """`metrics` are the batch's over all ranks, equal on every rank."""

    loss: float
    grad_norm: float
    skipped: str
    """Why the step was skipped, empty where it was not."""
    metrics: dict[str, Any]


def inputs(
    mb: MicroBatch, device: torch.device, *, replay: bool, replay_selections: bool, context: dist.ProcessGroup | None = None
) -> Inputs:
    """Tensors of a micro-batch, or of what a rank of `context` has of it. ValueError where a document's first token is
    trainable: no logits score it."""
    shard = None
    if context is not None:
        mb = pad(mb, 2 * context.size())
        shard = Shard(context, mb.n_tokens, device)
    s = mb.sample
    starts = np.cumsum(mb.lengths) - mb.lengths
    if s.trainable[starts[mb.lengths > 0]].any():
        raise ValueError("micro-batch: the first token of a document is trainable, but no logits of the document score it")
    rows = np.flatnonzero(shift_left(s.trainable, False))
    empty = len(rows) == 0
    if empty:
        rows = np.zeros(1, np.int64)
    documents = np.repeat(np.arange(len(mb.lengths)), mb.lengths)
    here = np.arange(mb.n_tokens) if shard is None else shard.here_L.numpy()
    mine = np.flatnonzero(np.isin(here, rows))
    idle = empty or len(mine) == 0
    if idle:
        mine = np.zeros(1, np.int64)

    def whole(a: np.ndarray) -> Tensor:
        return torch.from_numpy(a).to(device)

    def part(a: np.ndarray) -> Tensor:
        return whole(a if shard is None else a[here])

    def scored(a: np.ndarray, at: np.ndarray = rows) -> Tensor:
        return whole(shift_left(a)[at])

    routes = s.routes if replay else None
    if routes is not None and routes.dtype == np.uint16:  # torch has next to no ops for it
        routes = routes.astype(np.int32)
    padding = np.repeat(mb.lengths == 1, mb.lengths)  # a lone token trains nothing: the filler of a rank without work
    selections = None if s.selections is None else part(s.selections)
    return Inputs(
        forward=ForwardInput(
            tokens_T=part(s.tokens.astype(np.int64)),
            positions_T=part(mb.positions.astype(np.int64)),
            layout=PackedLayout(mb.lengths.tolist(), device, shard=shard),
            routes_TLK=None if routes is None else part(routes),
            routed_T=None if routes is None else part(s.routed),
            padding_T=part(padding),
            selections_TAS=selections if replay_selections else None,
            record_selections=not replay_selections and selections is not None,
        ),
        rows_M=whole(mine),
        labels_M=torch.full((1,), -100, device=device) if idle else scored(s.tokens.astype(np.int64), here[mine]),
        temperature_M=torch.ones(1, device=device) if idle else scored(s.temperature, here[mine]),
        scores=None if shard is None else _scores(shard, rows, device),
        recorded_TAS=None if replay_selections else selections,
        old_logprobs_N=scored(s.logprobs),
        advantages_N=scored(s.advantages),
        versions_N=scored(s.versions),
        documents_N=whole(documents[rows]),
        mask_N=torch.full((len(rows),), not empty, device=device),
        ce_N=scored(s.loss_stream) == CE,
        rollout_tokens_D=whole(mb.rollout_tokens),
    )


def _scores(shard: Shard, rows: np.ndarray, device: torch.device) -> Scores:
    held = [place[np.isin(place, rows)] for place in shard.places_RL.numpy()]
    return Scores(shard.group, [len(h) for h in held], torch.from_numpy(np.argsort(np.concatenate(held))).to(device))


def forward(policy: Policy, x: Inputs) -> tuple[Tensor, Tensor, ForwardOutput]:
    """(logprob [N], entropy [N], the model's output for this rank's tokens)."""
    logprobs_M, entropy_M, out = policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)
    if x.scores is None:
        return logprobs_M, entropy_M, out
    return *x.scores(logprobs_M, entropy_M), out


def loss_share(
    x: Inputs, logprobs_N: Tensor, entropy_N: Tensor, counts: Counts, config: Loss, function: LossFunction
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """This micro-batch's share of the batch's loss, and the RL loss's metrics (sums over tokens).

    RL tokens by the configured loss and normalisation, ce tokens by cross-entropy as the mean over all of them; the counts
    are the whole batch's, so shares of micro-batches and ranks add up.
    """
    dtype = logprobs_N.dtype

    def share(mask_N: Tensor, loss: LossFunction, normalise: losses.Normalise, n_tokens: int, **options: float) -> Any:
        weights_N = losses.weights(
            mask_N,
            x.documents_N,
            x.rollout_tokens_D,
            normalise=normalise,
            n_tokens=n_tokens,
            n_rollouts=counts.rollouts,
            constant_tokens=config.constant_tokens,
            dtype=dtype,
        )
        fields = LossInputs(
            logprobs=logprobs_N,
            old_logprobs=x.old_logprobs_N.to(dtype),
            advantages=x.advantages_N.to(dtype),
            mask=mask_N,
            documents=x.documents_N,
            weights=weights_N,
            entropy=entropy_N,
        )
        out = loss(fields, **options)
        return losses.total(fields, out), out.metrics

    total = torch.zeros((), dtype=dtype, device=logprobs_N.device)
    metrics: Mapping[str, Tensor] = {}
    if counts.rl_tokens or not counts.ce_tokens:
        rl, metrics = share(x.mask_N & ~x.ce_N, function, config.normalise, counts.rl_tokens, **config.options)
        total = total + rl
    if counts.ce_tokens:
        total = total + share(x.mask_N & x.ce_N, losses.ce, "token", counts.ce_tokens)[0]
    return total, metrics


def quantiles(d: Tensor) -> dict[str, float]:
    """Of |d|, d [N] float64."""
    if not len(d):
        return {}
    p50, p90, p99 = np.quantile(d.abs().cpu().numpy(), [0.5, 0.9, 0.99]).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": float(d.abs().max())}


def alone(mb: MicroBatch, version: int) -> Tensor:
    """bool [D]: whether `version` sampled all of a document. What follows an update in flight was sampled from keys and values
    of older weights, too."""
    older = (mb.sample.versions >= 0) & (mb.sample.versions != version)
    documents = np.repeat(np.arange(len(mb.lengths)), mb.lengths)
    return torch.from_numpy(np.bincount(documents[older], minlength=len(mb.lengths)) == 0)


class Seen:
    """What the micro-batches of a step showed: sums, and the mismatch of every RL token.

    Of what all ranks of a stream know the same, the first one speaks, so that nothing is counted twice.
    """

    def __init__(self, version: int, mesh: Mesh, *, moe_layers: int = 0, n_experts: int = 0):
        self.version, self.device, self.speaks = version, mesh.device, mesh.place == 0
        self.sums: dict[str, Tensor | float] = {}
        self.d: list[Tensor] = []
        self.own_d: list[Tensor] = []
        self.own_kl_2LE = torch.zeros(2, moe_layers, n_experts, dtype=torch.float64)
        """By expert of the engine's routes: sum of the KL of own tokens that used it, and their number."""
        self.expert_counts_LE: Tensor | None = None

    def add(
        self, mb: MicroBatch, x: Inputs, loss: Tensor, logprobs_N: Tensor, entropy_N: Tensor, own_TAS: Tensor | None
    ) -> None:
        rl_N = x.mask_N & ~x.ce_N
        d_N = (logprobs_N.detach().double() - x.old_logprobs_N)[rl_N]
        own_N = alone(mb, self.version).to(self.device)[x.documents_N][rl_N]
        kl_N = drift.mismatch(d_N)
        self.d.append(d_N if self.speaks else d_N[:0])
        self.own_d.append(d_N[own_N] if self.speaks else d_N[:0])
        if self.speaks and self.own_kl_2LE.numel():
            self.own_kl_2LE += drift.kl_by_expert(mb, kl_N.cpu(), rl_N.cpu(), own_N.cpu(), self.own_kl_2LE.shape[1:])
        self._sum(**selection_counts(x.recorded_TAS, own_TAS))
        self._sum_once(
            loss=loss.detach(),
            entropy=torch.where(x.mask_N, entropy_N.detach(), 0.0).sum(),
            nonfinite=(~logprobs_N.detach().isfinite() & x.mask_N).sum(),
            trainable=x.mask_N.sum(),
            rl=rl_N.sum(),
            kl=kl_N.sum(),
            own=own_N.sum(),
            kl_own=kl_N[own_N].sum(),
            **drift.tempered_kl(mb, kl_N, rl_N, own_N),
            **drift.shifted_kl(logprobs_N.detach().double()[rl_N], x.old_logprobs_N[rl_N], x.documents_N[rl_N], own_N),
            **route_counts(mb, replayed=x.forward.routed_T is not None),
        )

    def add_counts(self, counts_LE: Tensor | None) -> None:
        if counts_LE is not None:
            counts_LE = counts_LE.detach()
            self.expert_counts_LE = counts_LE if self.expert_counts_LE is None else self.expert_counts_LE + counts_LE

    def add_loss_metrics(self, metrics: Mapping[str, Tensor]) -> None:
        self._sum_once(**{f"loss_{name}": value.detach() for name, value in metrics.items()})

    def _sum_once(self, **values: Tensor | float) -> None:
        self._sum(**(values if self.speaks else dict.fromkeys(values, 0.0)))

    def _sum(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def reduce(self, mesh: Mesh) -> dict[str, float]:
        """The sums over all ranks; afterwards `d` and `expert_counts_LE` are the whole batch's too."""
        names = list(self.sums)
        values = [torch.as_tensor(self.sums[n], dtype=torch.float64, device=self.device) for n in names]
        total = mesh.sum(torch.stack(values)).tolist()
        self.d = [mesh.gather(torch.cat(self.d))]
        self.own_d = [mesh.gather(torch.cat(self.own_d))]
        if self.own_kl_2LE.numel():
            self.own_kl_2LE = mesh.sum(self.own_kl_2LE.to(self.device)).cpu()
        if self.expert_counts_LE is not None:
            self.expert_counts_LE = mesh.sum(self.expert_counts_LE)
        return dict(zip(names, total, strict=True))

    def metrics(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """The step record's values; those of RL only where there are RL tokens."""
        rl, own, rows = sums["rl"], sums["own"], max(sums["rows"], 1.0)
        out: dict[str, Any] = {
            "entropy": sums["entropy"] / max(sums["trainable"], 1.0),
            "tokens": int(sums["tokens"]),
            "rows": int(sums["rows"]),
            "trainable_tokens": int(sums["trainable"]),
        }
        if self.expert_counts_LE is not None:
            out["expert_counts"] = self.expert_counts_LE.tolist()
        if rl:
            d = self.d[0]
            out |= {
                "mismatch_kl": sums["kl"] / rl,
                "mismatch_kl_own": sums["kl_own"] / own if own else None,
                "own_tokens": int(own),
                "mismatch": quantiles(d),
                "mismatch_own": quantiles(self.own_d[0]) or None,
                "drift_hints": drift.hints(sums, self.own_d[0], self.own_kl_2LE) if own else None,
                "ratio_min": float(d.min().exp()),
                "ratio_max": float(d.max().exp()),
                "unrouted_fraction": sums["unrouted"] / rows,
                "recaptured_fraction": sums["recaptured"] / rows,
                "replayed_fraction": sums["replayed"] / rows,
            }
            out |= {name: value / rl for name, value in sums.items() if name.startswith("loss_")}
        if sums["selections"]:
            out["selection_flip_fraction"] = sums["selection_flips"] / sums["selections"]
        return out


def route_counts(mb: MicroBatch, *, replayed: bool) -> dict[str, float]:
    """Rows of the forward, last tokens of documents aside: all, without the engine's own route, replayed, and recaptured.

    A recaptured row is that of a turn's last token, whose forward only ran in the next turn.
    """
    s = mb.sample
    ends = np.cumsum(mb.lengths) - 1
    inner = np.ones(len(s), np.bool_)
    inner[ends] = False
    sampled = s.versions >= 0
    recaptured = s.routed & inner & sampled & ~shift_left(sampled, False)
    routed = int((s.routed & inner).sum())
    rows = int(inner.sum())
    return {
        "tokens": len(s) if len(s) > 1 else 0,
        "rows": rows,
        "unrouted": rows - routed,
        "replayed": routed if replayed else 0,
        "recaptured": int(recaptured.sum()),
    }


def selection_counts(recorded_TAS: Tensor | None, own_TAS: Tensor | None) -> dict[str, Tensor | float]:
    """Recorded selections, of a row and a layer each, and those of them that keep other keys than the trainer's indexer."""
    if recorded_TAS is None or own_TAS is None:
        return {"selections": 0, "selection_flips": 0}
    recorded_TA = (recorded_TAS >= 0).any(-1)
    flips_TA = selection_flips(recorded_TAS, own_TAS) & recorded_TA
    return {"selections": recorded_TA.sum(), "selection_flips": flips_TA.sum()}


class Stepper:
    """Runs optimizer steps on a state. `total` steps shape the schedule; `beat` is called after every micro-batch, `lap` at the
    end of each part of a step, with its name."""

    def __init__(
        self,
        state: TrainState,
        config: TrainerConfig,
        total: int,
        *,
        beat: Callable[[], None] = lambda: None,
        lap: Callable[[str], None] = lambda part: None,
    ):
        self.state, self.config, self.total, self.beat, self.lap = state, config, total, beat, lap
        self.function = losses.resolve(config.loss.kind)

    def __call__(self, batch: Batch) -> StepReport:
        """Train on one rank's part of a batch; every rank calls it. Afterwards `state.step` is `batch.step`."""
        state, mesh, config = self.state, self.state.mesh, self.config
        t0 = time.perf_counter()
        replay = {"replay": config.router_replay, "replay_selections": config.replay_selections}
        spec = state.spec
        seen = Seen(state.version, mesh, moe_layers=len(spec.moe_layers), n_experts=spec.n_experts)
        with state.computing() as policy:
            for mb in batch.micro_batches:
                x = inputs(mb, mesh.device, context=mesh.context, **replay)
                self.lap("data")
                logprobs_N, entropy_N, out = forward(policy, x)
                self.lap("forward")
                loss, loss_metrics = loss_share(x, logprobs_N, entropy_N, batch.counts, config.loss, self.function)
                self.lap("own")
                loss.backward()
                self.lap("backward")
                seen.add(mb, x, loss, logprobs_N, entropy_N, out.selections_TAS)
                seen.add_counts(out.expert_counts_LE)
                seen.add_loss_metrics(loss_metrics)
                self.beat()
                self.lap("own")
        sums = seen.reduce(mesh)
        self.lap("sums")
        t1 = time.perf_counter()
        grads = [p.grad for p in state.params.values() if p.grad is not None]
        norm = optim.global_norm(grads, mesh)
        lr = optim.lr_at(state.optim, batch.step, self.total)
        skipped = why_skip(sums["loss"], norm, int(sums["nonfinite"]))
        if skipped:
            state.skipped += 1
        else:
            optim.clip(grads, norm, state.optim.clip)
            optim.apply(state.optimizer, lr)
            if config.bias_update and seen.expert_counts_LE is not None:
                for bias_E, counts_E in zip(state.biases, seen.expert_counts_LE, strict=True):
                    update_correction_bias(bias_E, counts_E, config.bias_update)
        state.optimizer.zero_grad(set_to_none=True)
        state.step = batch.step
        self.lap("optimizer")
        t2 = time.perf_counter()
        metrics = {
            "loss": sums["loss"],
            "grad_norm": norm,
            "lr": lr,
            "skipped": state.skipped,
            "tokens_per_s": sums["tokens"] / (t2 - t0),
            "time": {"forward_backward": t1 - t0, "optimizer": t2 - t1},
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            **seen.metrics(sums),
        }
        if config.compile:
            metrics["compile"] = compile.counts()
        self.lap("own")
        return StepReport(sums["loss"], norm, skipped, metrics)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The loss of a batch, nothing trained; every rank calls it with its part."""
        mesh = self.state.mesh
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        with self.state.computing() as policy:
            for mb in batch.micro_batches:
                x = inputs(mb, mesh.device, replay=False, replay_selections=False, context=mesh.context)
                logprobs_N, entropy_N, _ = forward(policy, x)
                loss, _ = loss_share(x, logprobs_N, entropy_N, batch.counts, self.config.loss, self.function)
                total += loss if mesh.place == 0 else 0.0
                self.beat()
        return float(mesh.sum(total))


def why_skip(loss: float, norm: float, nonfinite: int) -> str:
    """Why a step must not be applied; empty where all is finite."""
    parts = []
    if nonfinite:
        parts.append(f"{nonfinite} trainer logprobs are not finite")
    if not math.isfinite(loss):
        parts.append(f"the loss is {loss}")
    if not math.isfinite(norm):
        parts.append(f"the gradient's norm is {norm}")
    return "; ".join(parts)
