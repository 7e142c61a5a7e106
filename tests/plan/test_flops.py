"""FLOPs against numbers worked out by hand, against brute force, and against the parameters of published models."""

import pytest

from prl.models.registry import count_parameters
from prl.models.spec import read_spec
from prl.plan.flops import forward, pairs, training
from tests.trainer.helpers import ARCHITECTURE
from tests.trainer.invariance import GLM_5


@pytest.mark.parametrize("lengths", [[1], [5], [3, 9, 1], [4, 4]])
@pytest.mark.parametrize("most", [None, 1, 4, 100])
def test_pairs_are_those_of_a_mask(lengths: list[int], most: int | None) -> None:
    assert pairs(lengths, most) == sum(min(q + 1, most or q + 1) for n in lengths for q in range(n))


def test_grouped_queries_by_hand() -> None:
    """glm4_moe: width 32, 4 heads of 8 over 2 key heads, 3 layers of which 2 have 8 experts of 16, 2 a token, 1 shared."""
    parts = forward(read_spec(ARCHITECTURE), [3, 2], 4)
    assert parts == {
        "projections": 2 * 3 * 5 * (32 * 32 + 32 * 16 + 32 * 16 + 32 * 32),
        "attention": 2 * 3 * (6 + 3) * 4 * (8 + 8),
        "indexer": 0,
        "feed-forwards": 2 * 5 * (3 * 32 * 64 + 2 * 3 * 32 * 16),
        "router": 2 * 2 * 5 * 32 * 8,
        "experts": 2 * 2 * 5 * 2 * 3 * 32 * 16,
        "head": 2 * 4 * 32 * 32,
    }
    assert sum(parts.values()) == 262_528
    assert training(read_spec(ARCHITECTURE), [3, 2], 4) == 787_584


def test_sparse_attention_by_hand() -> None:
    """12 tokens, 8 keys kept: 36 + 4 · 8 pairs attend, 78 are scored by the indexers of 2 layers, which are not trained."""
    parts = forward(read_spec(GLM_5), [12], 1)
    assert parts["attention"] == 2 * 3 * (36 + 32) * 4 * (8 + 8 + 8)
    assert parts["indexer"] == 2 * 2 * (12 * (16 * 4 * 16 + 32 * 16 + 32 * 4) + 78 * 4 * 16)
    assert parts["projections"] == 2 * 3 * 12 * (32 * 16 + 16 * 4 * 16 + 32 * 24 + 16 * 4 * 16 + 32 * 32)
    assert training(read_spec(GLM_5), [12], 1) == 3 * (sum(parts.values()) - parts["indexer"]) + parts["indexer"]


@pytest.mark.parametrize("architecture", [ARCHITECTURE, GLM_5])
def test_a_tokens_products_are_two_a_parameter(architecture: dict[str, object]) -> None:
    """What is no pair of tokens is a matrix: as many multiply-adds as active parameters, but for norms and biases."""
    spec = read_spec(architecture)
    parts = forward(spec, [1], 0)
    scored = 2 * len(spec.indexed_layers) * spec.raw.get("index_n_heads", 0) * spec.raw.get("index_head_dim", 0)
    products = sum(n for part, n in parts.items() if part != "attention") - scored
    active = count_parameters(spec)[1]
    assert 0 <= active - products // 2 < 0.02 * active
