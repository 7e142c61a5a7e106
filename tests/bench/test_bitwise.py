"""The bench of the bitwise mode: its rows, and a whole measurement at the smallest size."""

import pytest

from prl.bench import bitwise
from prl.kernels import registry


def test_the_goal_is_on_the_ratio_of_the_times() -> None:
    off, on, time = bitwise.rows_of("engine", [(1.0, 1.2), (2.0, 3.2), (1.0, 1.1)], 100)
    assert (off.value, on.value, time.value) == (100, 100 / 1.2, 1.2)
    assert time.ratio == pytest.approx(1.2) and time.met and not bitwise.rows_of("engine", [(1.0, 1.6)], 1)[2].met


@pytest.mark.skipif(registry.unavailable("cpu") is not None, reason="needs the CPU kernels")
def test_it_measures_and_finds_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"REQUESTS": 3, "PROMPT": 5, "NEW": 4, "DOCUMENTS": 2}.items():
        monkeypatch.setattr(bitwise, name, value)
    small = ["model.architecture.hidden_size=64", "model.architecture.num_hidden_layers=2", "model.architecture.vocab_size=64"]
    result = bitwise.measure("bench/trainer.yaml", [*small, "tokenizer.vocab_size=64"], turns=1)  # type: ignore[arg-type]
    rows = {r.name: r for r in result.rows}
    for dtype in ("bfloat16", "float32"):
        assert rows[f"engine in {dtype}: logprobs that are not the trainer's to the last bit, bitwise"].value == 0
        assert rows[f"trainer's step in {dtype}, bitwise: time"].goal is not None
