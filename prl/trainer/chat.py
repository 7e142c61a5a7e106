"""Chat data: JSONL files of conversations, rendered by the model's own chat template; tokens of chosen roles are trained.

A line is {"messages": [{"role": …, "content": …}, …], "tools": […]}; whatever else a message has goes to the template, and
"tools" may be missing. Prompts and answers are encoded apart, as an engine sees them: a trained message is what the template
adds to the conversation before it (with the generation prompt, for an assistant). Where a template rewrites what came before,
such as thoughts that it strips from earlier turns, the conversation becomes several samples, one for each version of its past.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
import orjson
import xxhash
from transformers.utils.chat_template_utils import render_jinja_template

from prl.config.named import SetupError
from prl.samples import Sample, truncate
from prl.tokenizer import Tokenizer, TokenizerError
from prl.trainer.sft import example

TooLong = Literal["drop", "cut"]


class ChatError(SetupError):
    """Chat data that cannot be used: names the file, the line, what was expected and what was found."""


class Conversations:
    """The conversations of a file, read when they are asked for: what is held is 8 bytes a line.

    `counts` has the samples given so far that were dropped or cut for being longer than `max_length` tokens, and the
    conversations without a trained message.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, *, roles: Sequence[str], max_length: int, too_long: TooLong):
        if tokenizer.chat_template is None:
            raise ChatError(
                "tokenizer: no chat template; chat data needs chat_template.jinja beside tokenizer.json, or chat_template in "
                "tokenizer_config.json"
            )
        self.path, self.tokenizer, self.template = path, tokenizer, tokenizer.chat_template
        self.roles, self.max_length, self.too_long = frozenset(roles), max_length, too_long
        self.counts: Counter[str] = Counter()
        self.source = str(path)
        self.starts, self.checksum, self._stamp = self._index()

    def _index(self) -> tuple[np.ndarray, str, tuple[int, int]]:
        """int64 [lines, 2]: where each line starts and ends, empty ones left out; the checksum; what tells a later change."""
        starts, at, digest = [], 0, xxhash.xxh3_128()
        try:
            with self.path.open("rb") as file:
                stamp = _stamp(file.fileno())
                for line in file:
                    digest.update(line)
                    if line.strip():
                        starts.append((at, at + len(line)))
                    at += len(line)
        except OSError as e:
            raise ChatError(f"{self.path}: cannot be read: {e}") from e
        if not starts:
            raise ChatError(f"{self.path}: no conversations in it; expected one JSON object a line")
        return np.array(starts, np.int64), digest.hexdigest(), stamp

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> list[Sample]:
        """The samples of conversation `i`, too long ones dropped or cut. ChatError where it cannot be rendered."""
        start, end = self.starts[i]
        try:
            with self.path.open("rb") as file:
                line, same = os.pread(file.fileno(), int(end - start), int(start)), _stamp(file.fileno()) == self._stamp
        except OSError as e:
            raise ChatError(f"{self.path}: cannot be read: {e}") from e
        if not same:
            raise ChatError(f"{self.path}: changed since this training began to read it; restore it, then resume")
        samples = self._samples(line, f"{self.path}, conversation {i + 1} (byte {start})")
        if not samples:
            self.counts["untrained"] += 1
        kept = []
        for sample in samples:
            if len(sample) > self.max_length:
                self.counts[{"drop": "dropped", "cut": "cut"}[self.too_long]] += 1
                sample = truncate(sample, self.max_length)
                if self.too_long == "drop" or not sample.trainable.any():
                    continue
            kept.append(sample)
        return kept

    def _samples(self, line: bytes, where: str) -> list[Sample]:
        messages, tools = _conversation(line, where)
        samples: list[list[np.ndarray]] = []
        text = ""  # of the last sample so far
        for i, message in enumerate(messages):
            if message["role"] not in self.roles:
                continue
            before = self._render(messages[:i], tools, message["role"] == "assistant", where)
            after = self._render(messages[: i + 1], tools, False, where)
            if not after.startswith(before):
                raise ChatError(
                    f"{where}: message {i + 1} ({message['role']}): the chat template does not go on from its own prompt "
                    f"…{before[-40:]!r}; train other roles (sft.roles) or mend the template"
                )
            if samples and before.startswith(text):
                pieces, before = samples[-1], before[len(text) :]
            else:
                samples.append(pieces := [])
                text = ""
            text += before + (answer := after[len(text) + len(before) :])
            try:
                prompt_ids, ids = self.tokenizer.encode(before), self.tokenizer.encode(answer)
            except TokenizerError as e:
                raise ChatError(f"{where}: message {i + 1} ({message['role']}): {e}") from e
            if not pieces and not len(prompt_ids):
                prompt_ids, ids = ids[:1], ids[1:]  # nothing comes before a first token that could score it
            pieces += [prompt_ids, ids]
        made = [example(*pieces) for pieces in samples]
        return [sample for sample in made if sample.trainable.any()]  # a template may show nothing of a message

    def _render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool, where: str) -> str:
        if not messages:
            return ""
        try:
            texts: Any = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                eos_token=self.tokenizer.eos,
                pad_token=self.tokenizer.pad,
                bos_token=self.tokenizer.bos,
            )
        except jinja2.TemplateError as e:
            raise ChatError(f"{where}: the chat template refuses it: {e}") from e
        except Exception as e:  # a template is a program: it can fail in every way
            raise ChatError(f"{where}: the chat template refuses it: {type(e).__name__}: {e}") from e
        return str(texts[0][0])


def _stamp(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_size, stat.st_mtime_ns


def _conversation(line: bytes, where: str) -> tuple[list[dict[str, Any]], Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise ChatError(f"{where}: not JSON: {e}") from e
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ChatError(f'{where}: expected {{"messages": [{{"role": …, "content": …}}, …]}}, got {line[:60]!r}')
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str | list | None):
            raise ChatError(f"{where}: message {i + 1}: expected an object with role and content, got {str(m)[:60]}")
    return messages, record.get("tools")
