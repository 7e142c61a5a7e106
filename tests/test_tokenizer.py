"""Round trips of both kinds of tokenizer, agreement with transformers, and named errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from prl.config.schema import RunConfig
from prl.tokenizer import Tokenizer, TokenizerError, characters, load, of_run

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789>=[]+-*. \n\tü"


@given(st.text(ALPHABET))
def test_characters_round_trip(text: str) -> None:
    tokenizer = characters(ALPHABET)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_ids_and_padding_of_the_vocabulary() -> None:
    tokenizer = characters("ab", 8)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 8)
    assert tokenizer.encode("ba").tolist() == [3, 2]
    assert tokenizer.decode([3, 0, 1, 7, 2]) == "b<pad><eos><unused3>a"


def test_save_and_load_keep_ids_and_transformers_agrees(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = characters(ALPHABET, 64)
    tokenizer.save(tmp_path / "tokenizer.json")
    text = "so [1+2]=3.\n\tü"
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load(path)
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert (again.eos_id, again.pad_id, again.vocab_size) == (1, 0, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (1, 0)


@pytest.mark.parametrize("text", ["word#", "A", "<eos>", "a\x00"])
def test_an_unknown_character_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(TokenizerError, match="no token for"):
        characters("abcdefghijklmnopqrstuvwxyz").encode(text)


def byte_pairs(unknown: str | None = None) -> tokenizers.Tokenizer:
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE(unk_token=unknown))
    if unknown is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", *([unknown] if unknown else [])]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if unknown is None else []
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    return backend


@pytest.mark.parametrize("settings", [b"{", b"\xff\xfe", b"[]", b'{"eos_token": 5}', b'{"eos_token": {"content": [1]}}'])
def test_damaged_settings_are_named(tmp_path: Path, settings: bytes) -> None:
    byte_pairs().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes(settings)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json|no special token"):
        load(tmp_path)


def test_a_file_tokenizer_round_trips_and_finds_its_end_token(tmp_path: Path) -> None:
    byte_pairs().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="no end-of-text token"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [0]}))
    assert load(tmp_path).eos == "<|end|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    tokenizer = load(tmp_path)
    text = "the cat, naïve 猫"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.pad_id == tokenizer.eos_id == 0
    assert tokenizer.decode([0]) == "<|end|>"
    assert tokenizer.token_id("the") >= 0
    with pytest.raises(TokenizerError, match="must be one token"):
        tokenizer.token_id("dog")


def test_a_file_tokenizer_does_not_fall_back_to_its_unknown_token() -> None:
    tokenizer = Tokenizer(byte_pairs("<unk>"), eos="<|end|>", pad="<|end|>")
    assert tokenizer.decode(tokenizer.encode("cat")).replace(" ", "") == "cat"
    with pytest.raises(TokenizerError, match="'Z'"):
        tokenizer.encode("catZ")


def test_the_tokenizer_of_a_run(tmp_path: Path) -> None:
    run = RunConfig.model_validate({"tokenizer": {"characters": "ab"}, "model": {"architecture": {"vocab_size": 16}}})
    assert of_run(run).vocab_size == 16
    characters("xyz").save(tmp_path)
    assert of_run(RunConfig.model_validate({"model": {"path": tmp_path}})).decode([2, 3, 4]) == "xyz"
    with pytest.raises(TokenizerError, match=r"tokenizer\.characters or tokenizer\.path"):
        of_run(RunConfig())
    with pytest.raises(TokenizerError, match="is not there"):
        load(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match="more than once"):
        characters("aba")
    with pytest.raises(TokenizerError, match="at least 5"):
        characters("abc", 4)
