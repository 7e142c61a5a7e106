"""prl.score: what it prints, what it compares, what it refuses."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from prl.kernels import registry
from prl.layers.layout import PackedLayout
from prl.models.base import ForwardInput
from prl.models.hf import load_hf, save_hf
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec
from prl.score import Scores, compare, main, read_tokens, score

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 16,
    "index_head_dim": 32,
    "index_n_heads": 8,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
LENGTHS = [40, 1, 7, 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = build(read_spec(CONFIG))
    init_weights(model, 0)
    return save_hf(tmp_path_factory.mktemp("score") / "model", model.spec, model.state_dict().items())


@pytest.fixture(scope="module")
def lines():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 96, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory, lines):
    file = tmp_path_factory.mktemp("tokens") / "tokens.jsonl"
    file.write_text("".join(json.dumps({"tokens": line}) + "\n" for line in lines))
    return file


def expected(model, line):
    """Logprobs by the definition, one line alone, and the routes of that forward."""
    out = model(ForwardInput(torch.tensor(line), torch.arange(len(line)), PackedLayout([len(line)])))
    table = (out.hidden_TD @ model.lm_head_weight.T).log_softmax(-1)
    return [table[t - 1, line[t]].item() for t in range(1, len(line))], out.routes_TLK


@pytest.mark.parametrize("engine", ["trainer", "embedded"])
@torch.no_grad()
def test_logprobs_and_experts_of_every_token(engine, folder, tokens, lines, capsys):
    assert main([str(folder), "--tokens", str(tokens), "--engine", engine, "--routes"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == len(lines)
    model = load_hf(folder)
    for line, got in zip(lines, printed, strict=True):
        logprobs, routes = expected(model, line)
        assert got["logprobs"][0] is None and len(got["logprobs"]) == len(line)
        assert got["logprobs"][1:] == pytest.approx(logprobs, abs=1e-4)
        assert np.array(got["routes"]).shape == (len(line), 2, 2)
        assert (np.sort(got["routes"], -1) == np.sort(routes.numpy(), -1)).mean() > 0.99


def test_routes_only_where_asked_for(folder, tokens, capsys):
    assert main([str(folder), "--tokens", str(tokens)]) == 0
    assert all(json.loads(line).keys() == {"logprobs"} for line in capsys.readouterr().out.splitlines())


def test_trainer_and_embedded_engine_agree_up_to_flips(folder, tokens, lines, capsys):
    assert main([str(folder), "--tokens", str(tokens), "--against", "embedded"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == len(lines), "the table goes to stderr"
    for words in ("trainer − embedded", "mismatch KL", "other experts", "other selections", "max |d| before"):
        assert words in printed.err
    model = load_hf(folder)
    difference = compare(*(score(model, read_tokens(tokens, model.spec), e, selections=True) for e in ("trainer", "embedded")))
    assert difference.tokens == sum(n - 1 for n in LENGTHS)
    assert difference.pairs == 2 * sum(LENGTHS) and difference.selection_pairs == 3 * sum(LENGTHS)
    assert difference.max_before_flip < 1e-4
    assert (
        difference.other_experts <= 0.01 * difference.pairs and difference.other_selections <= 0.01 * difference.selection_pairs
    )


def test_bfloat16_differs_from_float32_and_says_so(folder, tokens, capsys):
    assert main([str(folder), "--tokens", str(tokens), "--dtype", "bfloat16", "--against", "embedded"]) == 0
    model, half = load_hf(folder), load_hf(folder, dtype=torch.bfloat16)
    given = read_tokens(tokens, model.spec)
    difference = compare(score(model, given, "trainer"), score(half, given, "trainer"))
    assert 1e-4 < difference.mean < 0.5 and difference.mismatch_kl > 1e-7


def scores(logprobs, routes=None, selections=None):
    array = lambda a: None if a is None else np.array(a)  # noqa: E731
    return Scores(np.array(logprobs, np.float32), array(routes), array(selections))


@pytest.mark.skipif(registry.unavailable("cpu") is not None, reason="needs the CPU kernels")
def test_in_the_bitwise_order_nothing_differs(folder, tokens, capsys, monkeypatch):
    args = [str(folder), "--tokens", str(tokens), "--dtype", "bfloat16", "--against", "embedded", "--bitwise"]
    assert main(args) == 0
    assert re.search(r"max \|d\| +│ +0 ", capsys.readouterr().err)
    monkeypatch.setenv("PRL_KERNELS", "reference")
    assert main(args) == 2 and "run.bitwise: attention would run on reference" in capsys.readouterr().err


def test_differences_by_hand():
    first = [scores([0, -1.0, -2.0, -3.0], [[[0, 1]], [[0, 1]], [[2, 3]], [[0, 1]]]), scores([0, -1.0], [[[0, 1]], [[0, 1]]])]
    second = [scores([0, -1.0, -2.5, -4.0], [[[1, 0]], [[0, 2]], [[3, 2]], [[0, 1]]]), scores([0, -1.0], [[[0, 1]], [[0, 1]]])]
    d = compare(first, second)
    assert (d.tokens, d.max, d.mean, d.p50) == (4, 1.0, 0.375, 0.25)
    assert d.p99 == pytest.approx(0.985)
    assert d.mismatch_kl == pytest.approx((math.exp(0.5) - 1.5 + math.exp(1.0) - 2.0) / 4)
    assert (d.pairs, d.other_experts) == (6, 1), "order within a token does not count"
    assert (d.first_flip, d.first_above) == ((0, 1), (0, 2)), "forward 1 scores token 2"
    assert d.max_before_flip == 0 and d.selection_pairs == 0
    assert compare(second, first).mismatch_kl == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(-1.0)) / 4)


def test_selections_that_differ_are_flips():
    a, b = (
        scores([0, -1.0, -2.0], None, [[[0, -1]], [[0, 1]], [[0, 2]]]),
        scores([0, -1.0, -3.0], None, [[[0, -1]], [[1, 0]], [[1, 2]]]),
    )
    d = compare([a], [b], tolerance=2.0)
    assert (d.selection_pairs, d.other_selections, d.first_flip, d.first_above) == (3, 1, (0, 2), None)
    assert d.max_before_flip == 1.0, "token 2 is scored by forward 1, before the flip"


def test_a_nan_is_the_first_difference_and_is_not_hidden():
    d = compare([scores([0, -1.0, float("nan")])], [scores([0, -1.0, -1.0])])
    assert d.first_above == (0, 2) and math.isnan(d.max) and math.isnan(d.mismatch_kl)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ":2: expected"),
        ("", ":2: expected"),
        ("[1, 2]", ":2: expected"),
        ('{"ids": [1]}', ":2: expected"),
        ('{"tokens": []}', ":2: tokens: expected a list"),
        ('{"tokens": [1, "a"]}', ":2: tokens: expected a list"),
        ('{"tokens": [1.5]}', ":2: tokens: expected a list"),
        ('{"tokens": [true]}', ":2: tokens: expected a list"),
        ('{"tokens": [5, 96]}', ":2: tokens: 96 is outside of the vocabulary of 96"),
        ('{"tokens": [-1]}', ":2: tokens: -1 is outside"),
        (json.dumps({"tokens": [1] * 129}), ":2: 129 tokens, the model has 128 positions"),
    ],
)
def test_a_bad_line_is_named_and_exits_2(line, words, folder, tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"tokens": [1, 2]}\n' + line + '\n{"tokens": [1]}\n')
    assert main([str(folder), "--tokens", str(file)]) == 2
    printed = capsys.readouterr()
    assert f"{file}{words}" in printed.err and printed.out == ""


def test_other_bad_input_exits_2(folder, tokens, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["Bert"]}')
    for args, words in [
        ([str(folder), "--tokens", str(empty)], f"{empty}: empty"),
        ([str(folder), "--tokens", str(tmp_path / "none.jsonl")], "none.jsonl"),
        ([str(tmp_path / "nowhere"), "--tokens", str(tokens)], "nowhere"),
        ([str(other), "--tokens", str(tokens)], "GlmMoeDsaForCausalLM"),
        ([str(folder), "--tokens", str(tokens), "--engine", "other"], "trainer"),
        ([str(folder)], "--tokens"),
    ]:
        assert main(args) == 2
        assert words in capsys.readouterr().err


def test_a_demanded_backend_that_is_not_there_is_named(folder, tokens, capsys, monkeypatch):
    monkeypatch.setenv("PRL_KERNELS", "gpu")
    assert main([str(folder), "--tokens", str(tokens)]) == 2
    assert "no backend gpu (PRL_KERNELS)" in capsys.readouterr().err


def test_help_has_examples_and_needs_no_torch():
    code = "import sys, prl.score; c = prl.score.main(['--help']); sys.exit(c or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Examples" in done.stdout and "--against" in done.stdout
