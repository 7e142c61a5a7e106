"""What a run needs and how long it takes, before a GPU is spent on it: `python -m prl.plan`."""

from __future__ import annotations

from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Exit code as `prl.plan.command.HELP` says."""
    from prl.plan.command import main as command

    return command(args)
