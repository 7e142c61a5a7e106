"""What a config.json says about a model: `read_spec` checks it and fills in the defaults. Free of torch.

A value that prl does not compute (a sliding window, another activation, …) is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.config.named import SetupError

ARCHITECTURES = {
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
}
"""Hugging Face class → the folder of `prl.models` that has it."""

ROPE_TYPES = ("default", "linear", "llama3")


class SpecError(SetupError):
    """A config.json that prl cannot use: names the key, the value and what is supported."""


class UnsupportedArchitecture(SpecError):
    """The architecture is not one of `ARCHITECTURES`."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al. 2021) of `dim` of a head's dimensions; the scaled kinds as in transformers."""

    theta: float
    dim: int
    kind: str = "default"
    """default, linear (positions divided by `factor`) or llama3 (Llama 3.1: low frequencies divided, a smooth band between)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    interleaved: bool = False
    """Pairs are neighbours (GLM-5), not halves."""


@dataclass(frozen=True)
class ModelSpec:
    architecture: str
    """The folder of `prl.models`: glm_moe_dsa, glm4_moe, qwen3_moe, qwen3 or llama."""
    raw: dict[str, Any]
    """config.json with the architecture's defaults filled in where a key is missing or null."""
    vocab_size: int
    hidden_size: int
    n_layers: int
    moe_layers: tuple[int, ...]
    """Layers with experts; the place in this tuple is the MoE ordinal that `routes` is indexed by."""
    n_experts: int
    top_k: int
    index_topk: int
    """Keys the DSA indexer keeps per query, 0 where there is no indexer."""
    indexed_layers: tuple[int, ...]
    """Layers with an indexer of their own, in the order of `selections`."""
    max_positions: int
    tied: bool
    """The LM head is the embedding."""
    rope: Rope


_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
_GLM: dict[str, Any] = _COMMON | {
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": _GLM | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "mlp_bias": False},
    "glm4_moe": _GLM | {"use_qk_norm": False, "partial_rotary_factor": 0.5},
    "qwen3_moe": _COMMON
    | {
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "qwen3": _COMMON | {"rms_norm_eps": 1e-6, "head_dim": 128, "use_sliding_window": False},
    "llama": _COMMON | {"rms_norm_eps": 1e-6, "mlp_bias": False, "pretraining_tp": 1},
}
"""transformers' defaults for keys that published files leave out; sizes have no default."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DSA_SIZES = ("index_topk", "index_head_dim", "index_n_heads")
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "use_sliding_window": False,
    "pretraining_tp": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Keys of which prl computes one value only."""


def read_spec(source: Path | str | Mapping[str, Any]) -> ModelSpec:
    """The spec of a model folder, of a config.json or of its content.

    Raises UnsupportedArchitecture with the list of supported ones, SpecError for a missing, wrong or unsupported value and
    FileNotFoundError where there is no config.json.
    """
    if isinstance(source, Mapping):
        return _understood(dict(source), "config")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a model folder has config.json and *.safetensors")
    try:
        raw = json.loads(path.read_text("utf-8"))
    except ValueError as e:  # nor UTF-8
        raise SpecError(f"{path}: not JSON: {e}") from None
    if not isinstance(raw, dict):
        raise SpecError(f"{path}: expected an object, found {type(raw).__name__}")
    return _understood(raw, str(path))


def _understood(raw: dict[str, Any], where: str) -> ModelSpec:
    try:
        return _spec(raw, where)
    except SetupError:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as e:
        raise SpecError(f"{where}: a value is of the wrong kind: {e}") from e


def _spec(raw: dict[str, Any], where: str) -> ModelSpec:
    architecture = _architecture(raw, where)
    raw = dict(raw)
    experts_key = "num_experts" if architecture == "qwen3_moe" else "n_routed_experts"

    def fill(key: str, value: Any) -> Any:
        """The value of `key`, which becomes `value` where it is missing or null."""
        if raw.get(key) is None and value is not None:
            raw[key] = value
        return raw.get(key)

    for alias in ("num_local_experts", "num_experts"):
        fill(experts_key, raw.get(alias))
    for key, value in DEFAULTS[architecture].items():
        fill(key, value)

    def size(key: str) -> int:
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"{where}: {key}: expected a positive integer, found {value!r}")
        return value

    for key in _SIZES:
        size(key)
    for key, only in _ONLY.items():
        if raw.get(key, only) not in (only, None):
            raise SpecError(f"{where}: {key}: {raw[key]!r} is not supported, only {only!r}")
    heads = size("num_attention_heads")
    fill("num_key_value_heads", heads)
    if heads % (key_heads := size("num_key_value_heads")):
        raise SpecError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}")

    n_layers = size("num_hidden_layers")
    moe_layers: tuple[int, ...] = ()
    indexed_layers: tuple[int, ...] = ()
    if architecture == "glm_moe_dsa":
        for key in (*_MLA_SIZES, *_DSA_SIZES):
            size(key)
        raw["head_dim"] = raw["qk_rope_head_dim"]  # as transformers has it: what rope applies to
        n_dense = min(raw["first_k_dense_replace"], n_layers)
        mlps = fill("mlp_layer_types", ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense))
        moe_layers = _layers_of(mlps, "sparse", "dense", n_layers, f"{where}: mlp_layer_types")
        indexers = fill("indexer_types", _indexer_types(raw, n_layers))
        indexed_layers = _layers_of(indexers, "full", "shared", n_layers, f"{where}: indexer_types")
        if 0 not in indexed_layers:
            raise SpecError(f"{where}: indexer_types: the first layer must be 'full', there is none before it to share from")
    else:
        fill("head_dim", raw["hidden_size"] // heads)
    if architecture == "glm4_moe":
        moe_layers = tuple(range(raw["first_k_dense_replace"], n_layers))
    elif architecture == "qwen3_moe":
        step, dense = raw["decoder_sparse_step"], raw["mlp_only_layers"]
        moe_layers = tuple(i for i in range(n_layers) if i not in dense and (i + 1) % step == 0)
    n_experts = top_k = 0
    if moe_layers:
        n_experts, top_k = size(experts_key), size("num_experts_per_tok")
        size("moe_intermediate_size")
        if top_k > n_experts:
            raise SpecError(f"{where}: num_experts_per_tok {top_k} of only {n_experts} experts")
    return ModelSpec(
        architecture=architecture,
        raw=raw,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        n_layers=n_layers,
        moe_layers=moe_layers,
        n_experts=n_experts,
        top_k=top_k,
        index_topk=raw["index_topk"] if indexed_layers else 0,
        indexed_layers=indexed_layers,
        max_positions=raw["max_position_embeddings"],
        tied=bool(raw["tie_word_embeddings"]),
        rope=_rope(raw, architecture, where),
    )


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    named = raw.get("architectures") or []
    if named:
        found = [ARCHITECTURES[a] for a in named if a in ARCHITECTURES]
    else:
        found = [a for a in ARCHITECTURES.values() if a == raw.get("model_type")]
    if found:
        return found[0]
    raise UnsupportedArchitecture(
        f"{where}: architectures {list(named) or raw.get('model_type')!r} not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def _layers_of(kinds: Any, wanted: str, other: str, n_layers: int, where: str) -> tuple[int, ...]:
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(k not in (wanted, other) for k in kinds):
        raise SpecError(f"{where}: expected {n_layers} of {wanted!r} or {other!r}, found {kinds!r}")
    return tuple(i for i, k in enumerate(kinds) if k == wanted)


def _indexer_types(raw: Mapping[str, Any], n_layers: int) -> list[str]:
    """The layers that run their own indexer, from the pattern or the schedule a config.json may have instead of the list."""
    if (pattern := raw.get("index_topk_pattern")) is not None:
        return [{"F": "full", "S": "shared"}.get(c, c) for c in pattern]
    every, offset = max(raw.get("index_topk_freq", 1), 1), raw.get("index_skip_topk_offset", 2)
    return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(n_layers)]


def _rope(raw: Mapping[str, Any], architecture: str, where: str) -> Rope:
    """transformers 5 has it all in `rope_parameters`; before, `rope_theta` and `rope_scaling` stood apart."""
    p: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = p.get("rope_type", p.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise SpecError(f"{where}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    needed = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}[kind]
    missing = [key for key in needed if key not in p]
    if missing:
        raise SpecError(f"{where}: rope_parameters of type {kind!r} lack {', '.join(missing)}")
    fraction = p.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    dim = int(raw["head_dim"] * fraction)
    if dim < 2 or dim % 2:
        raise SpecError(f"{where}: rope covers {dim} of {raw['head_dim']} dimensions of a head; expected an even number")
    return Rope(
        theta=float(p.get("rope_theta", raw.get("rope_theta", 10000.0))),
        dim=dim,
        kind=kind,
        factor=float(p.get("factor", 1.0)),
        low_freq_factor=float(p.get("low_freq_factor", 1.0)),
        high_freq_factor=float(p.get("high_freq_factor", 4.0)),
        original_max_positions=int(p.get("original_max_position_embeddings", raw["max_position_embeddings"])),
        interleaved=architecture == "glm_moe_dsa",
    )
