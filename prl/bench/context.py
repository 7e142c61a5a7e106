"""Peak memory of a rank as a function of a row's length, for several numbers of ranks that share the row.

Each figure is of ranks in processes of their own that train one step on one document of that length: a small GLM-5 (latent
attention, DSA) with every block computed again in backward. Memory above the baseline is resident memory at its peak in that
step, less what was resident after a step on a tiny row: weights, gradients and the process itself are not in it.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from prl.bench import machine
from prl.bench.rows import Result, Row
from prl.bench.runs import run_ranks, say

TIMEOUT_S = 900.0
MODEL: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "indexer_types": ["full", "shared", "full", "shared"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_attention_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 128,
    "max_position_embeddings": 1 << 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}


def measure(lengths: Sequence[int], ranks: Sequence[int]) -> Result:
    """BenchError where a run fails."""
    load = machine.calibrate()
    rows, details = [], {}
    for cp in ranks:
        for length in lengths:
            found = run(length, cp)
            peak = max(rank["above_mb"] for rank in found)
            details[f"{length} tokens, cp {cp}"] = found
            say(f"{length} tokens, cp {cp}: {peak:.0f} MB")
            name = f"{length} tokens, cp {cp}: largest rank's peak above the baseline"
            rows.append(Row(name, peak, "MB", timed=False, about={"tokens": str(length), "cp": str(cp)}))
    settings = {"model": MODEL, "recompute": "full", "dtype": "float32"}
    return Result("context", rows, machine.facts(), vars(load), (), settings, details)


def run(length: int, cp: int) -> list[dict[str, float]]:
    """What each rank found."""
    with tempfile.TemporaryDirectory() as folder:
        args = [[sys.executable, "-m", "prl.bench.context", str(r), str(cp), str(length), folder] for r in range(cp)]
        found: list[dict[str, float]] = run_ranks(args, f"{length} tokens, cp {cp}", TIMEOUT_S)
        return found


def rank(index: int, cp: int, length: int, folder: Path) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from prl.config.mesh import MeshShape
    from prl.config.schema import RunConfig
    from prl.distributed.mesh import Mesh, lay_out
    from prl.samples import CE, Rollout, Sample, pack
    from prl.trainer.state import TrainState
    from prl.trainer.step import Stepper

    torch.set_num_threads(1)
    config = RunConfig.model_validate(
        {
            "model": {"architecture": MODEL, "dtype": "float32"},
            "trainer": {"ranks": cp, "mesh": {"cp": cp, "ep": 1}, "recompute": "full", "optim": {"kind": "sgd"}},
        }
    )
    mesh = Mesh(0, 1, torch.device("cpu"), MeshShape())
    if cp > 1:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=index, world_size=cp, timeout=timedelta(seconds=TIMEOUT_S))
        mesh = lay_out(MeshShape(context=cp), index, torch.device("cpu"))
    stepper = Stepper(TrainState(config, config.trainer.optim, mesh), config.trainer, 2)

    def step(number: int, n: int) -> float:
        s = Sample.of_prompt(np.random.default_rng(0).integers(0, MODEL["vocab_size"], n))
        s.trainable[1:], s.versions[1:], s.loss_stream[:] = True, 0, CE
        (batch,) = pack([Rollout("r", "e", "t", 0, 0, samples=[s])], step=number, budget=n, ranks=1)
        t0 = time.process_time()
        stepper(batch)
        return time.process_time() - t0

    step(1, 64)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    baseline = _memory("VmRSS")
    seconds = step(2, length)
    peak = _memory("VmHWM")
    if cp > 1:
        dist.destroy_process_group()
    return {"above_mb": peak - baseline, "baseline_mb": baseline, "cpu_s": seconds}


def _memory(field: str) -> float:
    """MB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024 / 1e6


if __name__ == "__main__":
    index, cp, length = map(int, sys.argv[1:4])
    print(json.dumps(rank(index, cp, length, Path(sys.argv[4]))))
