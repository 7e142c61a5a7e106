"""The ranks of `bench trainer`: `python -m prl.bench.trainer_ranks SPEC.json` prints one JSON object.

Every rank holds both trainers, from the same weights, and the two take turns: ours, and transformers under FSDP2.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from prl.config.mesh import resolve
from prl.config.schema import RunConfig
from prl.distributed.mesh import Mesh, lay_out
from prl.samples import CE, Batch, Rollout, Sample, pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""How transformers can compute the experts."""
Step = Callable[[], float]


def rollouts(seed: int, lengths: list[int], vocabulary: int) -> list[Rollout]:
    """One document each, the first half of it a prompt; cross-entropy on the rest."""
    rng = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(lengths):
        sampled = np.arange(n) >= n // 2
        sample = Sample(
            tokens=rng.integers(0, vocabulary, n).astype(np.int32),
            turn=np.zeros(n, np.int16),
            trainable=sampled,
            logprobs=np.zeros(n, np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            temperature=np.ones(n, np.float32),
            routed=np.zeros(n, np.bool_),
            advantages=np.zeros(n, np.float32),
            loss_stream=np.full(n, CE, np.uint8),
        )
        out.append(Rollout(id=str(i), env="bench", task=str(i), ordinal=i, index=0, samples=[sample]))
    return out


class Laps:
    """Seconds by part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now


class Ours:
    def __init__(self, config: RunConfig, mesh: Mesh, batch: Batch):
        self.laps, self.batch = Laps(), batch
        self.state = TrainState(config, config.trainer.optim, mesh, config.model.path)
        self.stepper = Stepper(self.state, config.trainer, 1, lap=self.laps)

    def __call__(self) -> float:
        self.laps.last = time.perf_counter()
        return self.stepper(self.batch).loss


class Scorer(nn.Module):
    """A language model of transformers whose LM head sees the wanted rows alone."""

    def __init__(self, model: Any):
        super().__init__()
        self.lm = model

    def forward(self, tokens: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        hidden = self.lm.model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        return self.lm.lm_head(hidden[rows])


class Theirs:
    """transformers' model sharded layer by layer, masters and AdamW in float32, forward in bfloat16, as ours.

    Documents are padded rows, sorted by length; only positions that are trained reach the LM head.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, batch: Batch, rows: int, scored: int):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        lm = AutoModelForCausalLM.from_pretrained(str(config.model.path), dtype=torch.float32)
        self.lm, self.model = lm, Scorer(lm)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in lm.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        for m in self.model.modules():
            if isinstance(m, FSDPModule):
                m.set_gradient_divide_factor(1.0)
                m.set_force_sum_reduction_for_comms(True)
        o = config.trainer.optim
        self.clip, self.scored = o.clip, scored
        options: dict[str, Any] = {"lr": o.lr, "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay, "fused": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        documents = []
        for mb in batch.micro_batches:
            at = np.cumsum(mb.lengths)[:-1]
            documents += [*zip(np.split(mb.sample.tokens, at), np.split(mb.sample.trainable, at), strict=True)]
        documents.sort(key=lambda d: len(d[0]))
        self.rows = [self._padded(documents[i : i + rows]) for i in range(0, len(documents), rows)]

    @staticmethod
    def _padded(documents: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, attention mask, labels already shifted), each [B, S]."""
        shape = len(documents), max(len(t) for t, _ in documents)
        tokens, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, -100)
        for i, (t, trainable) in enumerate(documents):
            n, whole = len(t), torch.from_numpy(t.astype(np.int64))
            tokens[i, :n], mask[i, :n] = whole, 1
            labels[i, : n - 1] = torch.where(torch.from_numpy(trainable[1:]), whole[1:], -100)
        return tokens, mask, labels

    @property
    def padding(self) -> float:
        """Share of the rows that is padding."""
        return 1 - sum(int(m.sum()) for _, m, _ in self.rows) / sum(m.numel() for _, m, _ in self.rows)

    def __call__(self) -> float:
        total = torch.zeros(())
        for tokens, mask, labels in self.rows:
            rows = labels != -100
            logits = self.model(tokens, mask, rows).float()
            loss = F.cross_entropy(logits, labels[rows], reduction="sum") / self.scored
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total)


def timed(step: Step) -> tuple[float, float]:
    """(seconds from the common start to this rank's end, loss)."""
    dist.barrier()
    t0 = time.perf_counter()
    loss = step()
    dist.barrier()
    return time.perf_counter() - t0, loss


def agreed(seconds: float) -> float:
    """Rank 0's figure, on every rank."""
    x = torch.tensor([seconds], dtype=torch.float64)
    dist.broadcast(x, 0)
    return float(x)


def rank(index: int, spec: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    world = spec["ranks"]
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=index, world_size=world, timeout=timedelta(seconds=600))
    config = RunConfig.model_validate(spec["config"])
    device = torch.device("cpu")
    n_experts = spec["n_experts"]
    mesh = lay_out(resolve(config.trainer, n_experts), index, device) if world > 1 else Mesh(0, 1, device)
    documents = rollouts(0, spec["lengths"], spec["vocabulary"])
    batches = pack(documents, step=1, budget=config.trainer.pack_tokens, ranks=mesh.shape.data)
    batch = batches[mesh.stream]
    ours = Ours(config, mesh, batch)
    theirs = Theirs(config, mesh, batch, spec["rows"], batch.counts.ce_tokens)
    found: dict[str, float] = {}
    losses = [timed(ours)[1]]
    for name in spec["implementations"]:
        theirs.lm.set_experts_implementation(name)
        losses.append(timed(theirs)[1])
        found[name] = min(agreed(timed(theirs)[0]) for _ in range(2))
    best = min(found, key=found.__getitem__)
    theirs.lm.set_experts_implementation(best)
    timed(ours)
    timed(theirs)
    ours.laps.seconds.clear()
    turns: list[tuple[float, float]] = []
    for i in range(spec["turns"]):
        first, second = (ours, theirs) if i % 2 == 0 else (theirs, ours)
        a, b = timed(first)[0], timed(second)[0]
        turns.append((a, b) if i % 2 == 0 else (b, a))
    if index == 0:
        out = {
            "turns": turns,
            "parts": dict(ours.laps.seconds),
            "implementation": best,
            "implementations": found,
            "losses": losses[:2],
            "padding": theirs.padding,
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        (Path(folder) / "result.json").write_bytes(orjson.dumps(out))
    dist.destroy_process_group()


def main() -> None:
    spec = orjson.loads(Path(sys.argv[1]).read_bytes())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank, (spec, folder), nprocs=spec["ranks"], start_method="spawn")
        print((Path(folder) / "result.json").read_text())


if __name__ == "__main__":
    main()
