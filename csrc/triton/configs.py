"""Launch configurations: block sizes, warps and stages of every op, read once from `configs.json` beside this file.

They are part of the package, the same on every rank and for every number of rows; nothing is tuned while training runs.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path


@functools.cache
def _table() -> dict[str, dict[str, int]]:
    return json.loads(Path(__file__).with_name("configs.json").read_text())


def config(op: str) -> dict[str, int]:
    """The configuration of `op`: constexprs by name, num_warps, num_stages and maxnreg. Raises KeyError."""
    return dict(_table()[op])
