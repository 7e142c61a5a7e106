"""Measurements: `python -m prl.bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Exit code as `prl.bench.command.HELP` says.

    `gpu` is apart: it runs on nodes where nothing but torch, triton and NumPy is installed.
    """
    given = list(sys.argv[1:] if args is None else args)
    if given[:1] == ["gpu"]:
        from prl.bench.gpu import main as on_gpu

        return on_gpu(given[1:])
    try:
        from prl.bench.command import main as command
    except ModuleNotFoundError as e:
        print(f"{e}; where only torch, triton and NumPy are, `python -m prl.bench gpu` runs", file=sys.stderr)
        return 2
    return command(given)
