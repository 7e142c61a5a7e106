"""The message format of everything that crosses a process boundary: frames = prefix, header, raw buffers.

frame 0   magic "prl", schema version (uint8), xxh3-128 digest of every later frame and its length
frame 1   header, msgpack: run id, kind, step, weight version, names, dtypes and shapes of the buffers, the kind's own fields
frame 2…  one raw little-endian buffer an array, in the header's order

Nothing is pickled. A message that differs from what the receiver expects raises `WireError`, which names both sides.
The digest guards against faults; forgery is kept out by CURVE (prl.transport.curve).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import msgspec
import numpy as np
import xxhash

from prl.samples import OPTIONAL, PER_TOKEN, Batch, MicroBatch, Rollout, Sample

SCHEMA = 1
_MAGIC = b"prl"
_PREFIX = struct.Struct("<3sB16s")
_LENGTH = struct.Struct("<Q")
_DTYPES = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
_MICRO_BATCH = ("positions", "lengths", "rollout", "rollout_tokens")

Buffer = bytes | memoryview


class WireError(ValueError):
    """A message that cannot be accepted. `reason` is the short name under which it is counted: frames, magic, schema, checksum,
    header, run, kind, step, shape or content."""

    def __init__(self, reason: str, text: str):
        super().__init__(f"{reason}: {text}")
        self.reason = reason


class _Array(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Header(msgspec.Struct):
    run: str
    kind: str
    step: int
    version: int
    arrays: list[_Array]
    fields: dict[str, Any]


class Message(msgspec.Struct):
    """A decoded message; `arrays` are writable copies."""

    kind: str
    step: int
    version: int
    header: dict[str, Any]
    arrays: dict[str, np.ndarray]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a message header cannot hold a {type(value).__name__}; put arrays into `arrays`")


_encode_header = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode_header = msgspec.msgpack.Decoder(_Header).decode


def _digest(frames: Iterable[Buffer]) -> bytes:
    h = xxhash.xxh3_128()
    for frame in frames:
        h.update(_LENGTH.pack(memoryview(frame).nbytes))
        h.update(frame)
    return h.digest()


def encode(
    kind: str,
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray] = {},
    *,
    run_id: str,
    step: int = -1,
    version: int = -1,
) -> list[Buffer]:
    """Frames of one message; the buffers are not copied where they are contiguous already."""
    specs: list[_Array] = []
    buffers: list[Buffer] = []
    for name, a in arrays.items():
        if a.dtype.name not in _DTYPES:
            raise TypeError(f"{kind}.{name}: dtype {a.dtype} cannot be sent; one of {', '.join(sorted(_DTYPES))} can")
        a = np.ascontiguousarray(a, a.dtype.newbyteorder("<")).reshape(a.shape)
        specs.append(_Array(name, a.dtype.name, a.shape))
        buffers.append(a.reshape(-1).view(np.uint8).data)
    head = _encode_header(_Header(run_id, kind, int(step), int(version), specs, dict(header)))
    rest: list[Buffer] = [head, *buffers]
    return [_PREFIX.pack(_MAGIC, SCHEMA, _digest(rest)), *rest]


def decode(frames: Sequence[Buffer], *, run_id: str, kinds: Iterable[str] = (), step: int | None = None) -> Message:
    """Check and read one message. `kinds` and `step`, where given, are what the receiver expects."""
    if len(frames) < 2:
        raise WireError("frames", f"the sender's message has {len(frames)} frames, at least 2 are expected (cut?)")
    if len(frames[0]) != _PREFIX.size:
        raise WireError("frames", f"the sender's first frame has {len(frames[0])} bytes, {_PREFIX.size} are expected")
    magic, schema, digest = _PREFIX.unpack(frames[0])
    if magic != _MAGIC:
        raise WireError("magic", f"the sender's message starts with {magic!r}, expected {_MAGIC!r}: not a prl message")
    if schema != SCHEMA:
        raise WireError("schema", f"the sender writes schema {schema}, this side reads {SCHEMA}: install the same prl on both")
    if _digest(frames[1:]) != digest:
        raise WireError("checksum", f"{len(frames)} frames do not match the sender's digest {digest.hex()}: damaged or cut")
    try:
        head = _decode_header(frames[1])
    except msgspec.MsgspecError as e:
        raise WireError("header", f"the sender's header is not one of schema {SCHEMA}: {e}") from e
    if head.run != run_id:
        raise WireError("run", f"the sender belongs to run {head.run!r}, this side to {run_id!r}")
    if kinds and head.kind not in (kinds := tuple(kinds)):
        raise WireError("kind", f"the sender sent {head.kind!r}, this side expects {' or '.join(kinds)}")
    if step is not None and head.step != step:
        raise WireError("step", f"the sender's {head.kind} is of step {head.step}, this side expects step {step}")
    if len(head.arrays) != len(frames) - 2:
        raise WireError("frames", f"the header names {len(head.arrays)} arrays, {len(frames) - 2} buffers came")
    arrays: dict[str, np.ndarray] = {}
    for spec, frame in zip(head.arrays, frames[2:], strict=True):
        if spec.dtype not in _DTYPES or min(spec.shape, default=0) < 0:
            raise WireError("shape", f"{head.kind}.{spec.name}: dtype {spec.dtype}, shape {spec.shape} is not an array")
        dtype = np.dtype(spec.dtype).newbyteorder("<")
        size = memoryview(frame).nbytes
        if math.prod(spec.shape) * dtype.itemsize != size:
            raise WireError("shape", f"{head.kind}.{spec.name}: {size} bytes came, header says {spec.dtype} {spec.shape}")
        arrays[spec.name] = np.frombuffer(frame, dtype).reshape(spec.shape).astype(spec.dtype)
    return Message(head.kind, head.step, head.version, head.fields, arrays)


def _put(arrays: dict[str, np.ndarray], prefix: str, sample: Sample) -> None:
    arrays.update({f"{prefix}.{name}": a for name in PER_TOKEN if (a := getattr(sample, name)) is not None})


def _take(message: Message, prefix: str, branch: Any) -> Sample:
    got = {name: message.arrays.get(f"{prefix}.{name}") for name in PER_TOKEN}
    missing = [name for name, a in got.items() if a is None and name not in OPTIONAL]
    if missing or not isinstance(branch, int):
        raise WireError("content", f"{message.kind}.{prefix}: misses {', '.join(missing) or 'its branch'}")
    return Sample(**cast(Any, got), branch=branch)


def batch_to_message(batch: Batch, *, run_id: str, state: bytes | None = None) -> list[Buffer]:
    """One rank's batch as frames. `state` is the orchestrator's half of the checkpoint of this step, where one is due."""
    arrays: dict[str, np.ndarray] = {}
    for i, m in enumerate(batch.micro_batches):
        _put(arrays, str(i), m.sample)
        arrays.update({f"{i}.{name}": getattr(m, name) for name in _MICRO_BATCH})
    if state is not None:
        arrays["state"] = np.frombuffer(state, np.uint8)
    header = {
        "counts": msgspec.to_builtins(batch.counts),
        "rollout_ids": batch.rollout_ids,
        "checksum": batch.checksum,
        "branches": [m.sample.branch for m in batch.micro_batches],
    }
    return encode("batch", header, arrays, run_id=run_id, step=batch.step)


def message_to_batch(message: Message) -> tuple[Batch, bytes | None]:
    """The batch and the orchestrator's state. WireError "content" where fields are missing or break the record."""
    head = dict(message.header)
    try:
        branches = head.pop("branches")
        batch = msgspec.convert({**head, "step": message.step, "micro_batches": []}, Batch)
        for i, branch in enumerate(branches):
            sample = _take(message, str(i), branch).check()
            m = MicroBatch(sample, *(message.arrays[f"{i}.{name}"] for name in _MICRO_BATCH))
            if len(m.positions) != len(sample) or int(m.lengths.sum()) != len(sample):
                raise WireError(
                    "content", f"batch.{i}: {len(sample)} tokens, {len(m.positions)} positions, lengths {m.lengths}"
                )
            if not len(m.lengths) == len(m.rollout) == len(m.rollout_tokens):
                raise WireError("content", f"batch.{i}: lengths, rollout and rollout_tokens differ in length")
            batch.micro_batches.append(m)
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as e:
        raise WireError("content", f"batch of step {message.step}: {e!r}") from e
    state = message.arrays.get("state")
    return batch, None if state is None else state.tobytes()


_ROLLOUT = tuple(f.name for f in fields(Rollout) if f.name != "samples")


def rollout_to_bytes(rollout: Rollout, *, run_id: str) -> bytes:
    """One rollout as a self-contained block: the frames, each after its length (the spool's format)."""
    arrays: dict[str, np.ndarray] = {}
    for i, s in enumerate(rollout.samples):
        _put(arrays, str(i), s)
    header = {name: getattr(rollout, name) for name in _ROLLOUT} | {"branches": [s.branch for s in rollout.samples]}
    frames = encode("rollout", header, arrays, run_id=run_id)
    return b"".join(part for f in frames for part in (_LENGTH.pack(memoryview(f).nbytes), f))


def rollout_from_bytes(block: Buffer, *, run_id: str) -> Rollout:
    """The inverse of `rollout_to_bytes`; WireError on anything cut, damaged or of another run."""
    view, at = memoryview(block), 0
    frames: list[Buffer] = []
    while at < len(view):
        end = at + _LENGTH.size
        if end > len(view) or (end := end + _LENGTH.unpack(view[at:end])[0]) > len(view):
            raise WireError("frames", f"the block ends at byte {len(view)} inside frame {len(frames)}: cut")
        frames.append(view[at + _LENGTH.size : end])
        at = end
    message = decode(frames, run_id=run_id, kinds=("rollout",))
    head = dict(message.header)
    try:
        branches = head.pop("branches")
        rollout = msgspec.convert({**head, "samples": []}, Rollout)
        rollout.samples = [_take(message, str(i), branch).check() for i, branch in enumerate(branches)]
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as e:
        raise WireError("content", f"rollout: {e!r}") from e
    return rollout
