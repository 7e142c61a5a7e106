"""The same numbers in every run: a test is judged by the code alone."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
