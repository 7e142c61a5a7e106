"""One cluster for all tests of the session, each test in a folder of its own; skipped where this machine cannot run it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab, until, why_not


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := why_not():
        pytest.skip(reason)
    with Lab(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    """The cluster with every node idle before the test, and no job or fault of it left after."""
    until("idle nodes", lambda: set(cluster.states().values()) == {"idle"}, 60)
    yield cluster
    cluster.run("scancel", "-u", "root")
    cluster.mend()
