"""A task of a job's component: `python -m prl.launch.slurm.component FOLDER` calls the function that was submitted for it.

It is submitit's own task, with what a component needs beside: a folder that is nobody else's, since a pickle is code; and an
exit code that says how the function ended.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from submitit.core.logger import get_logger
from submitit.core.submission import process_job

from prl.launch.slurm.executor import Ended, installed
from prl.transport.run_dir import exposed, keep_private


def main(folder: str) -> int:
    """0 where the function has returned, the code of `Ended`, else 1."""
    keep_private()
    read = (Path(folder).parent, Path(folder), *Path(folder).glob("*.pkl"))
    if why := installed() or next(filter(None, (exposed(path, 0o022) for path in read)), ""):
        print(why, file=sys.stderr)
        return 1
    get_logger().setLevel(logging.WARNING)
    get_logger().addFilter(lambda record: "triggered an exception" not in record.getMessage())  # which speaks for itself
    try:
        process_job(folder)
    except Ended as end:
        return end.code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
