"""What an inference role starts from, whichever engine it is. Free of torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from prl.config.schema import RunConfig
from prl.transport.run_dir import RunDir


def main(run: RunDir, config: RunConfig, index: int, stop: threading.Event) -> int:
    """The inference role: the configured engine's."""
    if config.inference.engine == "vllm":
        from prl.inference.vllm.role import main as of_engine
    else:
        from prl.inference.server import main as of_engine
    return of_engine(run, config, index, stop)


def start_of(run: RunDir, config: RunConfig) -> Path | dict[str, Any]:
    """What the run's model is read from: the SFT stage's result, the given folder or the config.json written inline."""
    if config.sft is not None:
        return run / "sft" / "model"
    if config.model.path is not None:
        return config.model.path
    if config.model.architecture is not None:
        return config.model.architecture
    raise ValueError("model: neither path nor architecture is set")
