"""The bodies of vLLM's `/inference/v1/generate`, as the server reads and writes them and the client does the reverse.

Names and shapes are vLLM's (vllm/entrypoints/scale_out/token_in_token_out/protocol.py); what prl adds is named in
docs/inference.md. Free of torch. Legend: P prompt tokens, C completion tokens, N layers, L MoE layers, K experts per token.
"""

from __future__ import annotations

import base64
import io
import re
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import orjson

from prl.inference.api import GenerateRequest, Generation

T = TypeVar("T")
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class FieldError(ValueError):
    """A body that does not follow the schema: names the field."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}" if name else message)
        self.name = name


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or −1: off."""
    seed: int | None = None
    """None: noise of its own."""
    stop_token_ids: list[TokenId] = []
    logprobs: int | None = None
    """None: not returned; 0: of the sampled tokens."""
    ignore_eos: bool = True
    """The engine knows no end-of-sequence token of its own; stop_token_ids names it."""
    detokenize: bool = False
    routed_experts_prompt_start: int = 0


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: list[TokenId]
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    cache_salt: str | None = None
    priority: int = 0


_decoder = msgspec.json.Decoder(GenerateBody)
_PATH = re.compile(r"(?:unknown|required) field `(?P<field>[^`]+)`|`\$\.?(?P<path>[^`]*)`$")


def decode(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises FieldError naming the field that is unknown, missing or of the wrong type."""
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as e:
        found = _PATH.search(str(e))
        raise FieldError((found["field"] or found["path"] or "") if found else "", str(e)) from None


def read_request(raw: bytes) -> tuple[GenerateRequest, GenerateBody]:
    body = decode(raw, _decoder)
    p = body.sampling_params
    if p.logprobs not in (None, 0):
        raise FieldError("sampling_params.logprobs", f"{p.logprobs}: only the sampled token's is returned; expected 0 or null")
    if not p.ignore_eos:
        raise FieldError(
            "sampling_params.ignore_eos", "false, but this engine has no token of its own to stop at: use stop_token_ids"
        )
    request = GenerateRequest(
        tokens=np.array(body.token_ids, np.int32),
        max_tokens=p.max_tokens,
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=max(p.top_k, 0) if p.top_k >= -1 else p.top_k,
        seed=p.seed if p.seed is not None else secrets.randbits(63),
        stop_token_ids=tuple(p.stop_token_ids),
        cache_salt=body.cache_salt or "",
        priority=body.priority,
        routes_from=p.routed_experts_prompt_start,
        request_id=body.request_id or secrets.token_hex(8),
    )
    return request, body


def write_request(request: GenerateRequest, *, request_id: str, cache_salt: str, stream: bool = False) -> bytes:
    body = {
        "token_ids": np.ascontiguousarray(request.tokens, np.int32),
        "sampling_params": {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": request.seed,
            "stop_token_ids": request.stop_token_ids,
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
            "routed_experts_prompt_start": request.routes_from,
        },
        "stream": stream,
        "priority": request.priority,
        "request_id": request_id,
    }
    if cache_salt:
        body["cache_salt"] = cache_salt
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def spans(versions: np.ndarray) -> list[dict[str, Any]]:
    """Runs of equal weight versions over the completion: [{"version", "start", "end"}]."""
    if not len(versions):
        return []
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [{"version": str(versions[a]), "start": a, "end": b} for a, b in zip(edges, edges[1:], strict=False)]


def write_choice(generation: Generation, *, logprobs: bool, moe_layers: Sequence[int], n_layers: int) -> dict[str, Any]:
    """One of `choices`, of a whole response or of a streamed chunk."""
    tokens = generation.tokens.tolist()
    return {
        "index": 0,
        "finish_reason": generation.finish_reason or None,
        "token_ids": tokens,
        "logprobs": {
            "content": [
                {"token_id": t, "logprob": p, "rank": None, "top_logprobs": []}
                for t, p in zip(tokens, generation.logprobs.tolist(), strict=True)
            ]
        }
        if logprobs
        else None,
        "routed_experts": write_npy(_all_layers(generation.routes, moe_layers, n_layers)),
        "selections": write_npy(generation.selections),
        "weight_versions": spans(generation.versions) if generation.finish_reason else None,
    }


def _all_layers(routes: np.ndarray | None, moe_layers: Sequence[int], n_layers: int) -> np.ndarray | None:
    """[rows, L, K] → [rows, N, K], zeros in dense layers, as vLLM has it."""
    if routes is None or len(moe_layers) == n_layers:
        return routes
    out = np.zeros((len(routes), n_layers, routes.shape[2]), routes.dtype)
    out[:, list(moe_layers)] = routes
    return out


@lru_cache(4096)
def _npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue()


@lru_cache(4096)
def _parse_npy_header(version: int, header: bytes) -> tuple[tuple[int, ...], np.dtype]:
    """NumPy evaluates the header as Python source, which takes longer than all the rest of a short answer."""
    read = np.lib.format.read_array_header_1_0 if version == 1 else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(io.BytesIO(header))
    if fortran_order or dtype.hasobject:
        raise ValueError(f"expected a C-ordered array of numbers, found {header!r}")
    return shape, dtype


def write_npy(array: np.ndarray | None) -> str | None:
    if array is None:
        return None
    return base64.b64encode(_npy_header(array.dtype, array.shape) + array.tobytes()).decode()


def _read_npy(text: str | None) -> np.ndarray | None:
    """The array of base64 .npy bytes, read-only and without a copy."""
    if text is None:
        return None
    raw = base64.b64decode(text)
    if raw[:6] != np.lib.format.MAGIC_PREFIX or raw[6:7] not in (b"\x01", b"\x02"):
        raise ValueError(f"expected .npy bytes of version 1 or 2, found {raw[:8]!r}")
    size = 2 if raw[6] == 1 else 4
    end = 8 + size + int.from_bytes(raw[8 : 8 + size], "little")
    shape, dtype = _parse_npy_header(raw[6], raw[8:end])
    return np.frombuffer(raw, dtype, offset=end).reshape(shape)


def read_choice(choice: dict[str, Any], moe_layers: Sequence[int], replica: str) -> Generation:
    """The reverse of `write_choice`; dense layers are dropped. Raises KeyError, TypeError or ValueError on another shape."""
    tokens = np.array(choice["token_ids"] or [], np.int32)
    content = (choice["logprobs"] or {}).get("content") or []
    versions = np.full(len(tokens), -1, np.int32)
    if choice.get("weight_versions"):
        versions = np.full(choice["weight_versions"][-1]["end"], -1, np.int32)
        for span in choice["weight_versions"]:
            versions[span["start"] : span["end"]] = int(span["version"])
    routes = _read_npy(choice.get("routed_experts"))
    if routes is not None and routes.shape[1] != len(moe_layers):
        routes = routes[:, list(moe_layers)]
    return Generation(
        tokens=tokens,
        logprobs=np.array([c["logprob"] for c in content], np.float32),
        versions=versions,
        routes=routes,
        finish_reason=choice["finish_reason"] or "",
        replica=replica,
        selections=_read_npy(choice.get("selections")),
    )
