"""`python -m prl.inference.vllm.cli serve MODEL …`: vLLM's own command, as prl starts it."""

from __future__ import annotations

import sys

from prl.inference.vllm import installed
from prl.inference.vllm.patches import distribution_name
from prl.inference.vllm.settings import settings
from prl.launch.role import die_with_parent


def main() -> None:
    if (s := settings()) is not None and s.parent:
        die_with_parent(s.parent)
    found = installed.check()
    if warning := installed.untested(found):
        print(f"warning: {warning}", file=sys.stderr)
    distribution_name.apply()
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()
