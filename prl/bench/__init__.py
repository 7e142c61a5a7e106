"""`python -m prl.bench`: measurements that compare things in one run on one machine (docs/bench.md)."""

from __future__ import annotations

from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """The command, for `prl bench`; exit codes in prl.bench.__main__."""
    from prl.bench.__main__ import main as command

    return command(args)
