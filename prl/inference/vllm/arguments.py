"""From a run's configuration to vLLM's own command line. Pure, and free of torch and vLLM.

Nothing else decides a flag. Every flag that comes out of here is accepted by vLLM's parser (tests/vllm/test_arguments.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prl.config.schema import RunConfig
from prl.inference.vllm.installed import PLUGIN
from prl.inference.vllm.settings import VARIABLE, Settings
from prl.models.spec import ModelSpec

BYTES = {"bfloat16": 2, "float32": 4}
KV_BLOCK = 128
"""Tokens of a block in vLLM's CPU attention, the largest of any backend."""
PACKAGE = "prl.inference.vllm"


def arguments(config: RunConfig, spec: ModelSpec, *, model: Path, host: str, port: int, settings: Settings) -> list[str]:
    """What follows `vllm serve`."""
    c, v = config.inference, config.inference.vllm
    longest = min(spec.max_positions, c.kv_tokens)
    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "served-model-name": settings.name,
        "dtype": c.dtype,
        "load-format": "dummy" if settings.weights else "safetensors",
        "skip-tokenizer-init": True,
        "generation-config": "vllm",
        "max-model-len": longest,
        "max-num-seqs": c.max_batch,
        "max-num-batched-tokens": max(c.max_prefill_tokens, c.max_batch, longest),
        "kv-cache-memory-bytes": kv_bytes(spec, c.kv_tokens, c.dtype, v.tensor_parallel),
        "enable-prefix-caching": c.prefix_cache,
        "scheduling-policy": "priority",
        "logprobs-mode": "processed_logprobs",
        "stream-interval": c.stream_interval,
        "enable-scale-out": True,
        "enable-return-routed-experts": c.record_routes and bool(spec.moe_layers),
        "tensor-parallel-size": v.tensor_parallel,
        "api-server-count": 1,
        "enforce-eager": v.eager,
        "weight-transfer-config": json.dumps({"backend": PLUGIN}),
        "worker-extension-cls": f"{PACKAGE}.worker.WorkerExtension",
        "middleware": f"{PACKAGE}.guard.Guard",
        "disable-uvicorn-access-log": True,
        "disable-fastapi-docs": True,
    }
    if not c.prefix_cache:
        flags["no-enable-prefix-caching"] = True
    return [str(model), *flatten(flags)]


def flatten(flags: Mapping[str, Any]) -> list[str]:
    """True is a bare flag, False none."""
    return [
        part
        for name, value in flags.items()
        if value is not False
        for part in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]


def environment(config: RunConfig, settings: Settings) -> dict[str, str]:
    """What vLLM reads from the environment and not from its command line."""
    env = {
        VARIABLE: settings.text(),
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes of weight updates, all behind the secret
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would pin its threads to cores that other roles use
    }
    if config.inference.vllm.tensor_parallel == 1:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the one worker lives in the engine's process
    return env


def kv_bytes(spec: ModelSpec, tokens: int, dtype: str, tensor_parallel: int) -> int:
    """Bytes on each rank of a cache that holds `tokens` in whole blocks, and the one block that vLLM keeps empty."""
    raw = spec.raw
    if "kv_lora_rank" in raw:
        width = raw["kv_lora_rank"] + raw["qk_rope_head_dim"]
    else:
        heads = raw.get("num_key_value_heads") or raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        width = 2 * math.ceil(heads / tensor_parallel) * head_dim
    return (math.ceil(tokens / KV_BLOCK) + 1) * KV_BLOCK * spec.n_layers * width * BYTES[dtype]


def config_json(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The model folder's config.json: as the model is trained, so without the quantisation of the files it came from."""
    return {k: v for k, v in spec.raw.items() if k != "quantization_config"} | {"dtype": dtype}
