"""Settings of every test process: one thread (the machine's cores are shared), no network, and hypothesis's examples fixed.

`make test` draws the same examples every time, so that a change is judged by the change alone; `make test-long` sets
HYPOTHESIS_PROFILE=default and draws new ones. Nothing here imports hypothesis: the tests of a GPU run without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.distributed.ranks import Ranks

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hypothesis_profile", "not installed") is None:  # the option of hypothesis's plugin, not given
        config.option.hypothesis_profile = os.environ.get("HYPOTHESIS_PROFILE", "ci")  # one that it brings along


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Rank processes shared by all tests of the session."""
    from tests.distributed.ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()
