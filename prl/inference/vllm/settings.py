"""What the processes of one vLLM server are told by whoever starts it: one environment variable, read by prl's plugins."""

from __future__ import annotations

import os

import msgspec

VARIABLE = "PRL_VLLM"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    folder: str
    """The run's folder, or the one that `prl.serve` keeps its secret in."""
    name: str
    """The replica's."""
    weights: str = ""
    """`transport.weights`: the run's store is followed. Empty: the model folder's weights are version 0, for good."""
    keep_versions: int = 2
    poll_s: float = 0.02
    deadline_s: float = 60.0
    """Of a weight update."""
    parent: int = 0
    """The process that the server must not outlive."""

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def settings() -> Settings | None:
    """None in a vLLM that prl has not started."""
    text = os.environ.get(VARIABLE)
    return msgspec.json.decode(text, type=Settings) if text else None


def required() -> Settings:
    if (found := settings()) is None:
        raise RuntimeError(f"{VARIABLE} is not set: start vLLM with `python -m prl.serve` or as a role of a run")
    return found
