"""Memory of a training step beside what the plan says: peak live tensor bytes by category, and the process's own memory.

Each case is a real trainer of one or two ranks in processes of their own, once with every tensor tracked (memory_rank.py) and
once as it is. On a CPU device and host are one memory, so what the plan puts on the host is added.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from prl.bench import machine
from prl.bench.rows import Goal, Result, Row
from prl.bench.runs import run_ranks, say
from prl.config.mesh import resolve
from prl.config.schema import RunConfig
from prl.models.spec import read_spec
from prl.plan.hardware import find
from prl.plan.memory import Memory, trainer_memory

TIMEOUT_S = 900.0
STEPS = 2
ALLOCATORS: dict[str, dict[str, str]] = {
    "freed memory given back": {"MALLOC_MMAP_THRESHOLD_": "131072"},
    "malloc as it is": {},
}
"""glibc keeps what it was given back, up to 32 MiB at a time, for the next to ask: the peak is more than what lives. With a
fixed threshold each tensor is the system's own, and gone when it is freed, at 10 to 35% more CPU time on small models."""


@dataclass(frozen=True)
class Cpu:
    kind: str = "cpu"


_COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 128, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _COMMON | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "head_dim": 32},
    "GLM-4.5": _COMMON
    | _EXPERTS
    | {"architectures": ["Glm4MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 32, "first_k_dense_replace": 1},
    "GLM-5": _COMMON
    | _EXPERTS
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_key_value_heads": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_topk": 128,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
LARGER: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}


def larger(model: str) -> dict[str, Any]:
    """The same at sizes that take 1 GB and more."""
    indexers = {"indexer_types": ["full", "shared"] * 4} if model == "GLM-5" else {}
    return MODELS[model] | LARGER | indexers


@dataclass(frozen=True)
class Case:
    model: Mapping[str, Any]
    lengths: tuple[int, ...]
    """Documents, the second half of each trained."""
    dtype: str = "float32"
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        longest = max(self.lengths)
        return RunConfig.model_validate(
            {
                "model": {"architecture": dict(self.model), "dtype": self.dtype},
                "trainer": {"pack_tokens": sum(self.lengths), "optim": {"lr": 1e-4}, **self.trainer},
                "sampling": {"max_length": longest},
            }
        )


@dataclass(frozen=True)
class Found:
    """Of a rank."""

    predicted: Memory
    total: int
    at: str
    categories: dict[str, int]
    """At the moment of the peak."""
    phases: dict[str, dict[str, int]]
    largest: list[Any]


SHORT = (512,) * 8
CASES: dict[str, Case] = {
    "dense, float32": Case(larger("dense"), SHORT),
    "GLM-4.5, bfloat16": Case(larger("GLM-4.5"), SHORT, "bfloat16"),
    "GLM-4.5, FP8": Case(larger("GLM-4.5"), SHORT * 2, "bfloat16", {"precision": "fp8", "pack_tokens": 8192}),
    "GLM-5, bfloat16, one document": Case(larger("GLM-5"), (4096,), "bfloat16"),
    "GLM-5, bfloat16, selective": Case(larger("GLM-5"), SHORT, "bfloat16", {"recompute": "selective"}),
    "GLM-4.5, Muon": Case(larger("GLM-4.5"), SHORT, "float32", {"optim": {"kind": "muon"}}),
    "GLM-4.5, bfloat16, offloaded": Case(
        larger("GLM-4.5"), SHORT * 2, "bfloat16", {"offload": "parameters", "offload_activations": 1, "pack_tokens": 8192}
    ),
    "GLM-4.5, ep 2": Case(larger("GLM-4.5"), SHORT * 2, "bfloat16", {"ranks": 2, "mesh": {"ep": 2}, "pack_tokens": 4096}),
    "dense, two ranks": Case(larger("dense"), SHORT * 2, "float32", {"ranks": 2, "pack_tokens": 4096}),
}
NEAR, NEAR_PROCESS = Goal(0.95, 1.05), Goal(0.85, 1.15)
SHARE = 0.01
"""Of the total: a category of fewer bytes is not judged by itself."""


def measure(only: Sequence[str] = ()) -> Result:
    """BenchError where a case fails. Of two ranks see `judged`."""
    load = machine.calibrate()
    rows = []
    for name, case in CASES.items():
        if only and not any(part in name for part in only):
            continue
        found = judged(track(case), even=resolve(case.config.trainer, read_spec(case.model).n_experts).expert > 1)
        planned = categories(found.predicted)
        total = sum(planned.values())
        say(f"{name}: {found.total / 1e6:.0f} MB, planned {total / 1e6:.0f} MB")
        rows.append(Row(f"{name}: planned / measured peak of live tensors", total / found.total, "", goal=NEAR, timed=False))
        for kind, n in sorted(found.categories.items()):
            if n > SHARE * found.total:
                rows.append(Row(f"{name}: {kind}", planned[kind] / n, "", goal=NEAR, timed=False))
        for how, env in ALLOCATORS.items():
            plain = run(case, tracked=False, env=env)[0]
            process = plain["peak"] - plain["baseline"]
            say(f"{name}: process {process / 1e6:.0f} MB, {how}")
            planned_process = total if env else total / find("cpu").achieved.usable
            rows.append(
                Row(
                    f"{name}: planned / process above its baseline, {how}",
                    planned_process / process,
                    "",
                    goal=NEAR_PROCESS,
                    timed=False,
                )
            )
    settings = {name: {"lengths": list(c.lengths), "dtype": c.dtype, "trainer": dict(c.trainer)} for name, c in CASES.items()}
    return Result("memory", rows, machine.facts(), vars(load), (), {"cases": settings}, {})


def judged(ranks: Sequence[Found], *, even: bool) -> Found:
    """The rank that has most; with `even`, the mean of all, as of experts the plan takes to get as many tokens each."""
    top = max(ranks, key=lambda f: f.total)
    if not even:
        return top
    mean = {kind: sum(f.categories.get(kind, 0) for f in ranks) // len(ranks) for kind in top.categories}
    return replace(top, total=sum(mean.values()), categories=mean)


def categories(memory: Memory) -> Counter[str]:
    """Bytes by category at the plan's peak, device and host together: on a CPU they are one."""
    out = Counter[str]()
    for part, n in memory.parts.items():
        out[part.partition(":")[0]] += n
    out.update(memory.host)
    return out


def track(case: Case) -> list[Found]:
    """Of every rank. BenchError where one fails."""
    out = []
    for found in run(case, tracked=True):
        by = Counter[str]()
        for kind, n in found["kinds"].items():
            by[kind.partition(":")[0]] += n
        out.append(Found(predict(case, found), found["total"], found["at"], dict(by), found["phases"], found["largest"]))
    return out


def predict(case: Case, found: Mapping[str, Any]) -> Memory:
    config, spec = case.config, read_spec(case.model)
    shape = resolve(config.trainer, spec.n_experts)
    batch = {"lengths": found["lengths"], "scored": found["scored"] // shape.context, "micro_batches": found["micro_batches"]}
    return trainer_memory(spec, config, shape, Cpu(), **batch)  # type: ignore[arg-type]


def run(case: Case, *, tracked: bool, env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    given = {"config": case.config.model_dump(mode="json"), "lengths": case.lengths, "steps": STEPS, "tracked": tracked}
    return launch("prl.bench.memory_rank", case.config.trainer.ranks, given, env)


def launch(module: str, ranks: int, given: Mapping[str, Any], more: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What each rank found, run by `module`. `more`: of the environment."""
    with tempfile.TemporaryDirectory(prefix="prl-bench-") as name:
        folder = Path(name)
        (folder / "spec.json").write_bytes(orjson.dumps(given))
        base = [sys.executable, "-m", module, str(folder / "spec.json")]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(more or {})}
        return run_ranks([[*base, str(r), name] for r in range(ranks)], "training steps", TIMEOUT_S, env)
