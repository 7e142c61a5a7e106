from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.rig import CONFIGS, Rig, rig


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two replicas of a glm4_moe model, for all tests; each starts with the first test that wants it."""
    folder: Path = tmp_path_factory.mktemp("vllm")
    with rig(folder, CONFIGS["glm4_moe"], replicas=2) as made:
        yield made
