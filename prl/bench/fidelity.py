"""`bench fidelity`: how far trainer and engine are apart where nothing is wrong, and the bands that follow.

Each run is a small model that has learned something, then a few synchronous rounds of RL: the embedded engine answers, the
trainer's step measures and updates, the engine takes over the weights. No other role is needed.
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prl.bench import machine
from prl.bench.rows import Goal, Result, Row
from prl.config.schema import RunConfig
from prl.distributed.mesh import ALONE
from prl.inference.api import GenerateRequest, Generation
from prl.inference.engine import Engine
from prl.inference.server import engine_of
from prl.kernels.weights import weights_changed
from prl.models.registry import build
from prl.monitor import bands
from prl.monitor.bands import Pair
from prl.samples import CE, Rollout, Sample, pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper

SEEDS = (0, 1, 2)
ROUNDS = 4
WARM_STEPS = 50
ROLLOUTS, EXAMPLES, WORD, LETTERS, SEPARATOR = 96, 96, 5, 20, 1
TEMPERATURES = (1.0, 0.7)
_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
}
MODELS: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": _SMALL
    | {"architectures": ["GlmMoeDsaForCausalLM"], "num_attention_heads": 8, "first_k_dense_replace": 1, "n_routed_experts": 16}
    | {"n_shared_experts": 1, "routed_scaling_factor": 1.0, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16}
    | {"qk_rope_head_dim": 16, "v_head_dim": 16, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 8},
    "glm4_moe": _SMALL
    | {"architectures": ["Glm4MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 32, "first_k_dense_replace": 1}
    | {"n_routed_experts": 16, "n_shared_experts": 1, "use_qk_norm": True},
    "qwen3_moe": _SMALL
    | {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 32, "num_experts": 16},
}
"""Widths are multiples of 128, so that all of them run in FP8."""


def config_of(model: str, pair: Pair, *, seed: int = 0, lr: float = 3e-4) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "model": {"architecture": MODELS[model], "dtype": pair.trainer_dtype},
            "tokenizer": {"characters": "abcdefghij", "vocab_size": 64},
            "trainer": {
                "precision": pair.trainer,
                "router_replay": pair.replay,
                "pack_tokens": 1024,
                "steps": 1000,
                "optim": {"lr": lr},
            },
            "inference": {"dtype": pair.engine_dtype, "precision": pair.engine, "kv_tokens": 8192, "max_batch": ROLLOUTS},
        }
    )


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    """int32 [count, WORD] of letters."""
    return rng.integers(SEPARATOR + 1, SEPARATOR + 1 + LETTERS, (count, WORD)).astype(np.int32)


def warm_start(model: str, seed: int, steps: int = WARM_STEPS) -> dict[str, Tensor]:
    """Weights of a model that has partly learned to spell backward: its routers and its answers are not uniform any more."""
    c = config_of(model, Pair(), seed=seed, lr=3e-3)
    state = TrainState(c, c.trainer.optim, ALONE)
    stepper, rng = Stepper(state, c.trainer, 1000), np.random.default_rng(seed)
    for step in range(1, steps + 1):
        examples = []
        for i, word in enumerate(words(rng, EXAMPLES)):
            s = Sample.of_prompt(np.concatenate((word, [SEPARATOR], word[::-1], [SEPARATOR])))
            s.trainable = np.arange(len(s)) > WORD
            s.versions = np.where(s.trainable, 0, -1).astype(np.int32)
            s.loss_stream[:] = CE
            examples.append(Rollout(f"w{step}-{i}", "words", str(i), i, 0, samples=[s]))
        stepper(pack(examples, step=step, budget=2048, ranks=1)[0])
    return {name: t.clone() for name, t in state.weights().items()}


def sample_of(prompt: np.ndarray, g: Generation, temperature: float) -> Sample:
    """The record of one answer."""
    n, answered = len(prompt) + len(g.tokens), np.arange(len(prompt) + len(g.tokens)) >= len(prompt)
    s = Sample.of_prompt(np.concatenate((prompt, g.tokens)), temperature=temperature)
    s.trainable = answered
    s.logprobs[answered], s.versions[answered] = g.logprobs, g.versions
    if g.routes is not None:
        s.routes = np.concatenate((g.routes, np.zeros((n - len(g.routes), *g.routes.shape[1:]), g.routes.dtype)))
        s.routed = np.arange(n) < len(g.routes)
    return s.check()


class Rig:
    """A trainer and an engine with the same weights; every `round` is one synchronous step of RL."""

    def __init__(self, model: str, pair: Pair, weights: Mapping[str, Tensor], *, seed: int, lr: float = 3e-4):
        self.config = config_of(model, pair, seed=seed, lr=lr)
        self.state = TrainState(self.config, self.config.trainer.optim, ALONE)
        with torch.no_grad():
            for name, own in self.state.weights().items():
                own.copy_(weights[name])
        weights_changed()
        self.stepper = Stepper(self.state, self.config.trainer, self.config.trainer.steps)
        engine_dtype = getattr(torch, self.config.inference.dtype)
        self.engine: Engine = engine_of(build(self.state.spec, dtype=engine_dtype).eval(), self.config, "engine")
        self.rng = np.random.default_rng([seed, 1])
        self.other_sums = False
        """The engine's dense products add up in another order, as those of another engine or of ranks do."""
        self.publish()

    def publish(self) -> None:
        self.state.version += 1
        self.engine.load_weights(self.state.version, dict(self.state.transfer()))
        self.engine.reset_prefix_cache()

    def answers(self) -> list[Rollout]:
        """One answer to each of ROLLOUTS prompts, by the engine."""
        prompts = [np.append(word, np.int32(SEPARATOR)) for word in words(self.rng, ROLLOUTS)]
        temperatures = [TEMPERATURES[i % len(TEMPERATURES)] for i in range(ROLLOUTS)]
        for i, (prompt, t) in enumerate(zip(prompts, temperatures, strict=True)):
            seed = int(self.rng.integers(1 << 62))
            self.engine.add(GenerateRequest(prompt, 2 * WORD, t, seed=seed, stop_token_ids=(SEPARATOR,), request_id=str(i)))
        done: dict[int, Generation] = {}
        with torch.backends.mkldnn.flags(enabled=not self.other_sums):
            while self.engine.ready:
                done |= {int(e.request_id): e.generation for e in self.engine.step() if e.generation.finish_reason}
        out = []
        for i, (prompt, t) in enumerate(zip(prompts, temperatures, strict=True)):
            s = sample_of(prompt, done[i], t)
            n = min(len(done[i].tokens), WORD)
            right = float((done[i].tokens[:n] == prompt[WORD - 1 :: -1][:n]).mean())
            s.advantages[s.trainable] = right - 0.5
            out.append(Rollout(f"r{self.state.step}-{i}", "words", str(i), i, 0, reward=right, samples=[s]))
        return out

    def round(self) -> dict[str, Any]:
        """Answer, measure and update, publish; the step's measures."""
        batch = pack(self.answers(), step=self.state.step + 1, budget=self.config.trainer.pack_tokens, ranks=1)[0]
        report = self.stepper(batch)
        self.publish()
        return report.metrics


def pairs() -> Iterator[Pair]:
    """All that bands are for."""
    for trainer_dtype, engine_dtype in (("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")):
        for trainer in ("bf16", "fp8"):
            for engine in ("bf16", "fp8"):
                for replay in (True, False):
                    yield Pair(trainer_dtype, trainer, engine_dtype, engine, replay)


def steps_of(rig: Rig, rounds: int) -> list[dict[str, float]]:
    """Measures of `rounds` rounds; in every other one the engine's sums are in another order."""
    out = []
    for i in range(rounds):
        rig.other_sums = i % 2 == 1
        live = bands.measures(rig.round())
        assert live is not None  # all tokens are of the trained version
        out.append(live)
    return out


Found = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""Measures of steps, by pair, then by run ("seed 0, glm4_moe")."""


def used(runs: Mapping[str, Sequence[Mapping[str, float]]], fresh: str) -> list[Mapping[str, float]]:
    """The steps that the band is made of."""
    return [s for run, steps in runs.items() if not run.startswith(fresh) for s in steps]


def rows_of(found: Found, fresh: str) -> list[Row]:
    """Of each pair the median of KL and p99 with least and greatest, and the share of fresh steps in the band."""
    out = []
    for key, runs in found.items():
        for measure, name in (("kl", "mismatch KL"), ("p99", "p99 of |Δ logprob|")):
            values = [s[measure] for steps in runs.values() for s in steps]
            out.append(Row(f"{key}: {name}", float(np.median(values)), "nats", (min(values), max(values)), timed=False))
        held = [s for run, steps in runs.items() if run.startswith(fresh) for s in steps]
        if held:
            band = bands.band_of(key, used(runs, fresh))
            inside = sum(all(s[m] <= band.bound(m, int(s["tokens"])) for m in bands.MEASURES) for s in held)
            name = f"{key}: steps of the fresh seed within the band"
            out.append(Row(name, inside / len(held), "", goal=Goal(0.9), timed=False))
    return out


def measure(
    *,
    seeds: Sequence[int] = SEEDS,
    models: Sequence[str] = tuple(MODELS),
    only: Sequence[str] = (),
    rounds: int = ROUNDS,
    write: Path | None = None,
) -> Result:
    """Of several seeds the last is not used for the bands, but held against them. `only`: pairs whose name has one of these;
    `write`: where the bands go."""
    before = machine.calibrate()
    chosen = [p for p in pairs() if not only or any(text in p.key for text in only)]
    found: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(dict)
    for model in models:
        for seed in seeds:
            weights = warm_start(model, seed)
            for pair in chosen:
                found[pair.key][f"seed {seed}, {model}"] = steps_of(Rig(model, pair, weights, seed=seed), rounds)
    fresh = f"seed {seeds[-1]}," if len(seeds) > 1 else "none"
    settings = {"seeds": list(seeds), "fresh": seeds[-1] if len(seeds) > 1 else None, "models": list(models), "rounds": rounds}
    if write is not None:
        write.write_text(text_of(found, fresh, settings), "utf-8")
    return Result(
        bench="fidelity",
        rows=rows_of(found, fresh),
        machine=machine.facts(),
        load={"others": before.others, "spread": before.spread},
        settings=settings,
        details=found,
    )


def text_of(found: Found, fresh: str, settings: Mapping[str, Any]) -> str:
    """bands.yaml."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [
        "# Written by `python -m prl.bench fidelity --write`; docs/fidelity.md says how. Not edited by hand.",
        f"measured: {{at: {day}, torch: {torch.__version__}, machine: {platform.machine()}}}",
        *(f"{name}: {'null' if value is None else value}" for name, value in settings.items()),
        "bands:",
    ]
    for key, runs in found.items():
        band = bands.band_of(key, used(runs, fresh))
        lines.append(f"  {key}:")
        for name, of in (("low", band.low), ("high", band.high)):
            lines.append(f"    {name}: {{{', '.join(f'{m}: {of[m]:.3e}' for m in bands.MEASURES)}}}")
        lines.append(f"    tokens: {band.tokens}")
    return "\n".join(lines) + "\n"
