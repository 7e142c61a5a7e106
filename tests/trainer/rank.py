"""One trainer rank in a process of its own: `python -m tests.trainer.rank RUN INDEX`, the config in RUN/config.json."""

import logging
import sys
import threading
from pathlib import Path

import torch

from prl.config.schema import RunConfig
from prl.trainer.train import main
from prl.transport.run_dir import RunDir

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    config = RunConfig.model_validate_json((root / "config.json").read_text())
    sys.exit(main(RunDir(root), config, int(sys.argv[2]), threading.Event()))
