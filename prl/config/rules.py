"""Rules that span fields of a configuration: pure checks that say what is wrong and why, and never change anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prl.config import mesh
from prl.config.schema import RunConfig

Check = Callable[[RunConfig], Iterator[tuple[str, str]]]
_RULES: list[tuple[tuple[str, ...], Check]] = []


def _reads(*paths: str) -> Callable[[Check], Check]:
    """A rule yields (path, message) for what it finds; it reads `paths`, and stays out when one of them is not sound."""

    def register(check: Check) -> Check:
        _RULES.append((paths, check))
        return check

    return register


def broken_rules(config: RunConfig, unsound: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(path, message) of every broken rule, but for rules that read something at or below a path in `unsound`, or above one."""

    def overlap(a: str, b: str) -> bool:
        return not a or not b or f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")

    return [
        found for paths, check in _RULES if not any(overlap(p, u) for p in paths for u in unsound) for found in check(config)
    ]


Found = Iterator[tuple[str, str]]


@_reads("run.name")
def _name(c: RunConfig) -> Found:
    if c.run.name in (".", "..") or not re.fullmatch(r"[\w.+=-][\w.+= -]*", c.run.name):
        yield "run.name", f"expected the name of one folder (letters, digits, . _ + = -), got {c.run.name!r}"


@_reads("run.seed")
def _seed(c: RunConfig) -> Found:
    if not 0 <= c.run.seed < 2**63:
        yield "run.seed", f"expected 0 to 2^63 - 1, got {c.run.seed}"


@_reads("model.path", "model.architecture")
def _model_source(c: RunConfig) -> Found:
    if (c.model.path is None) == (c.model.architecture is None):
        got = "neither" if c.model.path is None else "both"
        yield "model", f"expected exactly one of path (weights to start from) and architecture (fresh weights), got {got}"


@_reads("model.frozen", "trainer.keep_gathered", "trainer.lora", "trainer.fp8_layers", "inference.fp8_layers")
def _patterns(c: RunConfig) -> Found:
    lora = [] if c.trainer.lora is None else c.trainer.lora.targets
    for path, patterns in (
        ("model.frozen", c.model.frozen),
        ("trainer.keep_gathered", c.trainer.keep_gathered),
        ("trainer.lora.targets", lora),
        ("trainer.fp8_layers", c.trainer.fp8_layers),
        ("inference.fp8_layers", c.inference.fp8_layers or []),
    ):
        for i, pattern in enumerate(patterns):
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{path}.{i}", f"not a regular expression: {error}"


@_reads("model.path", "model.architecture", "tokenizer")
def _tokenizer_source(c: RunConfig) -> Found:
    t, given = c.tokenizer, (c.tokenizer.path is not None) + (c.tokenizer.characters is not None)
    if given > 1:
        yield "tokenizer", "expected one of path and characters, got both"
    if given == 0 and c.model.path is None:
        yield "tokenizer", "a model made from architecture brings no tokenizer: set path or characters"
    if t.characters is not None and len(set(t.characters)) < len(t.characters):
        twice = sorted({ch for ch in t.characters if t.characters.count(ch) > 1})
        yield "tokenizer.characters", f"expected each character once, got {''.join(twice)!r} more than once"
    if t.vocab_size is not None and t.characters is None:
        yield "tokenizer.vocab_size", "pads a character vocabulary, and tokenizer.characters is not set"
    size = _number(c, "vocab_size")
    if size is not None and t.vocab_size is not None and t.vocab_size > size:
        yield "tokenizer.vocab_size", f"expected at most model.architecture.vocab_size = {size:g}, got {t.vocab_size}"


@_reads("envs", "sft")
def _envs(c: RunConfig) -> Found:
    if not c.envs and not (c.sft is not None and c.sft.data):
        yield "envs", "expected at least one environment, each with name and kind"
    names = [e.name for e in c.envs]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield f"envs.{i}.name", f"{name!r} names an earlier environment too; expected each name once"


@_reads("sampling.temperature", "sampling.top_p", "sampling.top_k")
def _training_distribution(c: RunConfig) -> Found:
    why = "the trainer scores tokens under the whole distribution and cannot reproduce a truncated one"
    if c.sampling.top_p < 1:
        yield "sampling.top_p", f"expected 1 for training rollouts, got {c.sampling.top_p:g}: {why}; see evaluation.top_p"
    if c.sampling.top_k:
        yield "sampling.top_k", f"expected 0 for training rollouts, got {c.sampling.top_k}: {why}; see evaluation.top_k"
    if c.sampling.temperature == 0:
        yield "sampling.temperature", f"expected above 0 for training rollouts: {why}"
    elif not 1e-5 <= c.sampling.temperature <= 1e5:  # what the engine takes
        yield "sampling.temperature", f"expected 1e-5 to 1e5, got {c.sampling.temperature:g}"


@_reads(
    "envs", "sampling.max_length", "sampling.max_tokens", "model.architecture", "inference.kv_tokens", "trainer.pack_tokens"
)
def _lengths(c: RunConfig) -> Found:
    if not c.envs:
        return  # nothing is sampled
    length = c.sampling.max_length
    if c.sampling.max_tokens >= length:
        yield (
            "sampling.max_tokens",
            f"expected below max_length = {length}, which counts the prompt too, got {c.sampling.max_tokens}",
        )
    positions = _number(c, "max_position_embeddings")
    if positions is not None and length > positions:
        yield "sampling.max_length", f"expected at most the model's max_position_embeddings = {positions:g}, got {length}"
    for path, tokens in (("inference.kv_tokens", c.inference.kv_tokens), ("trainer.pack_tokens", c.trainer.pack_tokens)):
        if tokens < length:
            yield path, f"expected at least sampling.max_length = {length}, so that one sample fits, got {tokens}"


@_reads("orchestrator.batch_size", "orchestrator.group_size", "orchestrator.max_in_flight")
def _groups(c: RunConfig) -> Found:
    o = c.orchestrator
    if o.batch_size % o.group_size:
        below, above = o.batch_size // o.group_size * o.group_size, -(-o.batch_size // o.group_size) * o.group_size
        near = f"{below} or {above}" if below else str(above)
        yield (
            "orchestrator.batch_size",
            f"expected a multiple of group_size = {o.group_size}, such as {near}, got {o.batch_size}",
        )
    if o.max_in_flight < o.group_size:
        yield "orchestrator.max_in_flight", f"expected at least group_size = {o.group_size}, got {o.max_in_flight}"


@_reads("orchestrator.group_size", "orchestrator.advantage")
def _advantage(c: RunConfig) -> Found:
    o = c.orchestrator
    if o.group_size < 2 and ":" not in o.advantage.kind:
        yield (
            "orchestrator.group_size",
            f"{o.advantage.kind} compares rollouts of a group: expected at least 2, got {o.group_size}",
        )


@_reads(
    "run.deterministic",
    "orchestrator.synchronous",
    "orchestrator.max_in_flight",
    "orchestrator.batch_size",
    "inference.prefix_cache",
)
def _deterministic(c: RunConfig) -> Found:
    if not c.run.deterministic:
        return
    o, why = c.orchestrator, "run.deterministic needs it: an engine's bits depend on what shares its batch"
    if not o.synchronous:
        yield "orchestrator.synchronous", f"expected true; {why}"
    if c.inference.prefix_cache:
        yield "inference.prefix_cache", f"expected false; {why}"
    if o.max_in_flight < o.batch_size:
        yield "orchestrator.max_in_flight", f"expected at least batch_size = {o.batch_size}, got {o.max_in_flight}; {why}"


@_reads("run.bitwise", "model.dtype", "inference", "trainer", "launch.kernels")
def _bitwise(c: RunConfig) -> Found:
    if not c.run.bitwise:
        return
    t, i = c.trainer, c.inference
    if i.engine != "embedded":
        yield "inference.engine", f"expected embedded; run.bitwise needs it: {i.engine} sums in an order of its own"
    if c.model.dtype == "float64":
        yield "model.dtype", "expected bfloat16 or float32; run.bitwise needs it: no kernel computes float64"
    if i.dtype != c.model.dtype:
        yield "inference.dtype", f"expected model.dtype = {c.model.dtype}, got {i.dtype}; run.bitwise needs it"
    if i.precision != t.precision:
        yield "inference.precision", f"expected trainer.precision = {t.precision}, got {i.precision}; run.bitwise needs it"
    if t.precision == i.precision == "fp8" and i.fp8_layers not in (None, t.fp8_layers):
        yield "inference.fp8_layers", "expected none, which takes the trainer's; run.bitwise needs it: the same layers in FP8"
    if t.compile:
        yield "trainer.compile", "expected false; run.bitwise needs it: compiled blocks sum in an order of their own"
    if t.ranks > 1 and t.mesh.ep != 1:
        why = "sums over experts of several ranks are rounded once per rank"
        yield "trainer.mesh.ep", f"expected 1, got {t.mesh.ep}; run.bitwise needs it: {why}"
    if t.lora is not None:
        yield "trainer.lora", "expected none; run.bitwise needs it: merged weights are not shown to be equal to the last bit"
    if c.launch.kernels not in (None, "cpu"):
        yield "launch.kernels", f"expected cpu, got {c.launch.kernels}; run.bitwise needs it: no other backend fixes the order"


@_reads("trainer.router_replay", "trainer.replay_selections", "inference.record_routes", "inference.record_selections")
def _replay(c: RunConfig) -> Found:
    for replay, record in (("router_replay", "record_routes"), ("replay_selections", "record_selections")):
        if getattr(c.trainer, replay) and not getattr(c.inference, record):
            yield f"inference.{record}", f"expected true, since trainer.{replay} replays what the engine records"


@_reads("inference", "run.deterministic", "run.bitwise")
def _engine(c: RunConfig) -> Found:
    i = c.inference
    if i.engine != "vllm":
        return
    if i.precision == "fp8":
        yield "inference.engine", "vllm takes no FP8 weights yet; expected embedded, or inference.precision: bf16"
    if i.dtype == "float64":
        yield "inference.dtype", "vllm computes in bfloat16 or float32, not float64"
    if i.record_selections:
        yield "inference.record_selections", "vllm does not return the indexer's selections; expected false"
    if i.record_routes and not i.prefix_cache:
        yield "inference.prefix_cache", "vllm keeps the routes of record_routes by the prefix cache's blocks; expected true"
    if c.run.deterministic and not c.run.bitwise:
        yield "run.deterministic", "vllm's bits depend on what it batches; expected false, or inference.engine: embedded"


@_reads("trainer.precision", "inference.precision", "model", "inference.dtype")
def _precision(c: RunConfig) -> Found:
    for section, precision, dtype in (
        ("trainer", c.trainer.precision, c.model.dtype),
        ("inference", c.inference.precision, c.inference.dtype),
    ):
        if precision == "fp8" and dtype == "float64":
            yield f"{section}.precision", "fp8 quantises bfloat16 or float32, the forward is in float64"
        for key in ("hidden_size", "moe_intermediate_size"):
            width = _number(c, key)
            if precision == "fp8" and width is not None and width % 128:
                mend = f"model.architecture.{key}={-(-int(width) // 128) * 128}, or " if c.model.architecture else ""
                yield f"{section}.precision", f"fp8 needs a multiple of 128 for {key}, which is {width:g}; set {mend}bf16"


@_reads("sft", "envs", "trainer.pack_tokens")
def _sft(c: RunConfig) -> Found:
    if c.sft is None:
        return
    if c.sft.data and not c.sft.roles:
        yield "sft.roles", "empty: no message of sft.data would be trained; expected some, such as assistant"
    if c.sft.stop_at is not None and not c.envs:
        yield "sft.stop_at", "is a solve rate on the environments' tasks, and envs is empty"
    if c.sft.max_length is not None and c.sft.max_length > c.trainer.pack_tokens:
        packed, got = c.trainer.pack_tokens, c.sft.max_length
        yield "sft.max_length", f"expected at most trainer.pack_tokens = {packed}, so that one sample fits, got {got}"
        return
    longest, positions = c.sft.max_length or c.trainer.pack_tokens, _number(c, "max_position_embeddings")
    if (c.sft.data or c.sft.validation) and positions is not None and longest > positions:
        said = longest if c.sft.max_length is not None else f"none, which is trainer.pack_tokens = {longest}"
        yield "sft.max_length", f"expected at most the model's max_position_embeddings = {positions:g}, got {said}"


@_reads("trainer", "sft")
def _optim(c: RunConfig) -> Found:
    sections = {"trainer": (c.trainer.optim, c.trainer.steps)} | ({} if c.sft is None else {"sft": (c.sft.optim, c.sft.steps)})
    for section, (o, steps) in sections.items():
        path = f"{section}.optim"
        if o.adam_lr is not None and (o.kind != "muon" or not o.lr):
            got = f"kind {o.kind}" if o.kind != "muon" else "lr 0"
            yield f"{path}.adam_lr", f"is of what kind muon leaves to AdamW, as a multiple of lr: expected none, got {got}"
        for name, value in (("betas", max(o.betas)), ("momentum", o.momentum)):
            if o.state_dtype == "bfloat16" and value > 0.99:
                why = "state in bfloat16 stands still: it cannot hold changes below 1/256 of itself"
                yield f"{path}.{name}", f"expected at most 0.99, got {value:g}: {why}"
        if o.schedule == "wsd" and o.decay_steps is not None and o.warmup_steps + o.decay_steps > steps:
            yield (
                f"{path}.decay_steps",
                f"expected at most {section}.steps - warmup_steps = {steps - o.warmup_steps}, got {o.decay_steps}",
            )


@_reads("trainer.lora")
def _lora(c: RunConfig) -> Found:
    if c.trainer.lora is not None and not c.trainer.lora.targets:
        yield "trainer.lora.targets", "expected at least one regular expression over names of linear layers and experts"


@_reads("trainer.offload", "trainer.precision")
def _offload(c: RunConfig) -> Found:
    if c.trainer.offload == "parameters" and c.trainer.precision == "fp8":
        yield (
            "trainer.offload",
            "parameters cannot go with trainer.precision fp8, which gathers the experts' weights quantised: FSDP2 moves "
            "masters from the host as they are; expected none or optimizer",
        )


@_reads("control", "sft")
def _control(c: RunConfig) -> Found:
    if c.control is not None and c.sft is None:
        yield "control", "is more SFT on the worked answers of sft, which is not set"


@_reads("trainer.recompute", "trainer.recompute_targets")
def _recompute(c: RunConfig) -> Found:
    if c.trainer.recompute == "selective" and not c.trainer.recompute_targets:
        yield "trainer.recompute_targets", "expected at least one part of a block for trainer.recompute: selective, got none"


@_reads("trainer.ranks", "trainer.mesh", "model")
def _mesh(c: RunConfig) -> Found:
    if _architecture(c) is None:
        return  # how many experts there are is not known
    n_experts = next((n for key in ("n_routed_experts", "num_experts") if (n := _number(c, key)) is not None), 0)
    for path, message in mesh.problems(c.trainer, int(n_experts)):
        yield f"trainer.{path}", message


@_reads("trainer.mesh", "trainer.precision", "model.dtype")
def _dispatch(c: RunConfig) -> Found:
    if c.trainer.mesh.fp8_dispatch and c.trainer.precision != "fp8":
        got = c.trainer.precision
        yield "trainer.mesh.fp8_dispatch", f"experts that take FP8 codes need trainer.precision fp8, got {got}"
    if c.trainer.mesh.dispatcher == "deepep" and c.model.dtype != "bfloat16":
        yield "trainer.mesh.dispatcher", f"deepep sends bfloat16, the forward is in {c.model.dtype}: set all_to_all"


@_reads("launch.slurm", "trainer.ranks", "inference.replicas", "transport.weights")
def _slurm(c: RunConfig) -> Found:
    slurm = c.launch.slurm
    if slurm is None:
        return
    for name, path, processes in (
        ("trainer", "trainer.ranks", c.trainer.ranks),
        ("inference", "inference.replicas", c.inference.replicas),
    ):
        nodes = getattr(slurm, name).nodes
        if processes % nodes:
            yield path, f"expected a multiple of launch.slurm.{name}.nodes = {nodes}, got {processes}"
    if c.transport.weights != "filesystem":
        yield "transport.weights", f"expected filesystem with launch.slurm (nodes share no memory), got {c.transport.weights}"


def _architecture(c: RunConfig) -> dict[str, Any] | None:
    """The model's config.json, inline or in its folder; None where it cannot be read, which is the model's to report."""
    if c.model.architecture is not None or c.model.path is None:
        return c.model.architecture
    try:
        found = json.loads((c.model.path / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _number(c: RunConfig, key: str) -> float | None:
    """A number of the model's config.json, if it is there."""
    value = (_architecture(c) or {}).get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
