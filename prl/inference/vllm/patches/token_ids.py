"""Without a tokenizer vLLM lets ids beyond the vocabulary through to the embedding, where one request ends the engine for all
(`BaseRenderer.validate_token_ids`: "Skipped when the tokenizer is not initialized"). The model's vocabulary is known all the
same."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

VERSIONS = ("0.32.0",)


def needed() -> bool:
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.base import BaseRenderer

    renderer = SimpleNamespace(tokenizer=None, model_config=SimpleNamespace(get_vocab_size=lambda: 1))
    try:
        BaseRenderer.validate_token_ids(renderer, [1])
    except VLLMValidationError:
        return False
    return True


def apply() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.base import BaseRenderer

    validate = BaseRenderer.validate_token_ids

    def validate_token_ids(self: Any, token_ids: Sequence[int], *, parameter: str | None = None) -> None:
        if self.tokenizer is not None:
            return validate(self, token_ids, parameter=parameter)
        size = self.model_config.get_vocab_size()
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
            wrong = next(t for t in token_ids if not 0 <= t < size)
            raise VLLMValidationError(f"Token id {wrong} is out of vocabulary", parameter=parameter)

    BaseRenderer.validate_token_ids = validate_token_ids
