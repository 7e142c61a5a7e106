"""Text to token ids and back, over the `tokenizers` library: a model's own file, or one token a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from prl.config.named import SetupError
from prl.config.schema import RunConfig

PAD, EOS = "<pad>", "<eos>"
CHAT_TEMPLATE = "chat_template.jinja"


class TokenizerError(SetupError):
    """A tokenizer that cannot be read or a text that it cannot hold: names the file or the text, and the mend."""


class Tokenizer:
    """Ids of `eos_id` end a completion, `pad_id` fills rows; both are never part of a text that is encoded.

    `decode` shows every id, special ones too, so that no two token sequences look alike where one is wrong.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos: str,
        pad: str,
        bos: str | None = None,
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.eos, self.pad, self.bos, self.chat_template = eos, pad, bos, chat_template
        self.eos_id, self.pad_id = (self._id(name) for name in (eos, pad))
        unknown = getattr(backend.model, "unk_token", None)
        self._unknown_id = backend.token_to_id(unknown) if unknown else None

    def _id(self, token: str) -> int:
        if (i := self.backend.token_to_id(token)) is None:
            raise TokenizerError(f"tokenizer: no token {token!r} in a vocabulary of {self.vocab_size}")
        return int(i)

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size())

    def encode(self, text: str) -> np.ndarray:
        """int32 [T], nothing added. TokenizerError names what the vocabulary lacks; nothing becomes <unk> in silence."""
        try:
            encoding = self.backend.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception where the model has no unknown token
            raise self._unknown(text) from error
        ids = np.array(encoding.ids, np.int32)
        if self._unknown_id is not None and (ids == self._unknown_id).any():
            raise self._unknown(text)
        return ids

    def _unknown(self, text: str) -> TokenizerError:
        vocabulary = self.backend.get_vocab()
        missing = sorted({c for c in text if c not in vocabulary})
        return TokenizerError(
            f"tokenizer: no token for {''.join(missing)!r} in the text {text[:80]!r}; "
            "add what is missing to the tokenizer (tokenizer.characters, or the tokens of its file), or change the text: an "
            "environment's templates, the chat template"
        )

    def decode(self, ids: np.ndarray | list[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def token_id(self, text: str) -> int:
        """The id of a text that must be exactly one token (a stop string); TokenizerError if it is several."""
        ids = self.encode(text)
        if len(ids) != 1:
            raise TokenizerError(f"tokenizer: {text!r} must be one token to stop on, it is {len(ids)}: {ids.tolist()}")
        return int(ids[0])

    def save(self, path: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template to a folder that transformers reads too.

        `path` is the folder or the tokenizer.json in it.
        """
        folder = path.parent if path.name == "tokenizer.json" else path
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos, "pad_token": self.pad}
        if self.bos is not None:
            config["bos_token"] = self.bos
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(self.chat_template, "utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": False}, indent=2))


def characters(alphabet: str, vocab_size: int | None = None) -> Tokenizer:
    """<pad> 0, <eos> 1, then one token a character of `alphabet` in its order; unused tokens fill up to `vocab_size`."""
    if len(set(alphabet)) != len(alphabet):
        twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
        raise TokenizerError(f"tokenizer.characters: {''.join(twice)!r} more than once")
    names = [PAD, EOS, *alphabet]
    if vocab_size is not None and vocab_size < len(names):
        raise TokenizerError(f"tokenizer.vocab_size: {vocab_size}, the alphabet needs at least {len(names)}")
    names += [f"<unused{i}>" for i in range((vocab_size or 0) - len(names))]
    # WordLevel without an unknown token refuses a character that it lacks.
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, eos=EOS, pad=PAD)


def load(path: Path) -> Tokenizer:
    """A tokenizer.json, or a folder with one; the end-of-text token comes from tokenizer_config.json or config.json."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(f"tokenizer: {file} is not there; set tokenizer.path or tokenizer.characters")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"tokenizer: {file} cannot be read: {error}") from error
    settings = _read_json(file.with_name("tokenizer_config.json"))
    eos = _content(settings.get("eos_token")) or _by_id(backend, _read_json(file.with_name("config.json")), "eos_token_id")
    if eos is None and backend.token_to_id(EOS) is not None:
        eos = EOS
    if eos is None:
        raise TokenizerError(f"tokenizer: no end-of-text token for {file}; name eos_token in tokenizer_config.json beside it")
    pad = _content(settings.get("pad_token")) or (PAD if backend.token_to_id(PAD) is not None else eos)
    return Tokenizer(
        backend, eos=eos, pad=pad, bos=_content(settings.get("bos_token")), chat_template=_chat_template(file, settings)
    )


def _chat_template(file: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja beside the tokenizer, else what tokenizer_config.json has; of several named ones the default."""
    beside = file.with_name(CHAT_TEMPLATE)
    if beside.is_file():
        return beside.read_text("utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        given = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}.get("default")
    if given is not None and not isinstance(given, str):
        raise TokenizerError(f"tokenizer: chat_template of {file.with_name('tokenizer_config.json')} is no text")
    return given


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise TokenizerError(f"tokenizer: {file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"tokenizer: {file} holds a {type(value).__name__}, expected an object")
    return value


def _content(token: Any) -> str | None:
    """transformers writes a special token as its text or as an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise TokenizerError(f"tokenizer: {token!r:.80} is no special token, expected its text")
    return text


def _by_id(backend: tokenizers.Tokenizer, config: dict[str, Any], key: str) -> str | None:
    ids = config.get(key)
    first = ids[0] if isinstance(ids, list) and ids else ids
    return backend.id_to_token(first) if isinstance(first, int) else None


def of_run(config: RunConfig) -> Tokenizer:
    """The tokenizer of a run: `tokenizer.characters`, else `tokenizer.path`, else the model's folder."""
    if config.tokenizer.characters is not None:
        model_size = (config.model.architecture or {}).get("vocab_size")
        return characters(config.tokenizer.characters, config.tokenizer.vocab_size or model_size)
    path = config.tokenizer.path or config.model.path
    if path is None:
        raise TokenizerError("tokenizer: set tokenizer.characters or tokenizer.path, since model.path is not set")
    return load(path)
