"""The orchestrator's half of a checkpoint, as bytes and back."""

from __future__ import annotations

from typing import Any

import msgspec

from prl.orchestrator.scheduler import SchedulerState

SCHEMA = 1


class StateError(ValueError):
    """Bytes that are not a state of this schema."""


class State(msgspec.Struct):
    """The state after taking out batches up to `scheduler.step`."""

    schema: int
    scheduler: SchedulerState
    curriculum: dict[str, Any]
    spool: dict[str, tuple[int, int, int]]
    """Rollout id to its place in the spool."""
    first_segments: dict[int, int]
    """Checkpoint's step to the oldest spool segment it needs."""
    fates: int
    """Records of tasks.jsonl that belong to this state; a resume voids the later ones."""
    next_evaluation: int


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(State)


def decode(data: bytes) -> State:
    try:
        state = _decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise StateError(f"not a state of schema {SCHEMA}: {e}") from e
    if state.schema != SCHEMA:
        raise StateError(f"schema {state.schema}, this side reads {SCHEMA}; resume with the prl that wrote it")
    return state
