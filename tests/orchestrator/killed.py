"""The orchestrator in a process that can be killed. Imported once by a fork server, so that a start costs little; no torch."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

from prl.config.load import load_resolved
from prl.orchestrator.main import main
from prl.transport.run_dir import RunDir


def role(root: Path) -> None:
    run = RunDir(root)
    logging.basicConfig(level=logging.INFO, filename=run / "logs" / "orchestrator.log")
    sys.exit(main(run, load_resolved(run.config_path), 0, threading.Event()))
