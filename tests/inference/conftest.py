from collections.abc import Callable

import numpy as np
import pytest

from tests.inference.tiny import VOCABULARY


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def prompt(rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    return lambda n: rng.integers(0, VOCABULARY, n, dtype=np.int32)
