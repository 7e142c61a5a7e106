"""Settings of every test process: one thread (the machine's cores are shared), no network, and hypothesis's examples fixed.

`make test` draws the same examples every time, so that a change is judged by the change alone; `make test-long` sets
HYPOTHESIS_PROFILE=default and draws new ones.
"""

import os

from hypothesis import settings

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("fixed", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
