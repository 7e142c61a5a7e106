"""Where a bench writes its JSON; needs nothing installed."""

from __future__ import annotations

import tempfile
from pathlib import Path


def refusal(json_to: str | None) -> str | None:
    """Why `--json json_to` cannot be written, asked before anything is measured; makes its folder. None where it can."""
    if json_to is None or json_to == "-":
        return None
    path = Path(json_to)
    if path.is_dir():
        return f"--json: {path} is a folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as e:
        return f"--json: {path} cannot be written ({e})"
    return None
