"""What logprobs a completion has when weights change in its middle and the cache stays, by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from prl.models.base import Model
from prl.models.hf import save_hf


def independent(model: Model, folder: Path) -> Any:
    """The same weights in transformers' model."""
    path = save_hf(folder, model.spec, model.state_dict().items())
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def mixed(models: dict[int, Any], tokens: np.ndarray, prompt: int, versions: np.ndarray) -> np.ndarray:
    """Logprobs [C] of tokens[prompt:], each by the model of its version over the keys and values that were there.

    The forward that sampled token t took in token t − 1; the first took in the whole prompt.
    """
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    cache = DynamicCache(config=next(iter(models.values())).config)
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    out, done = [], 0
    for a, b in zip(edges, edges[1:], strict=False):
        end = prompt + b - 1
        logits = models[int(versions[a])](ids[:, done:end], past_key_values=cache).logits[0]
        scored = torch.log_softmax(logits[-(b - a) :].float(), -1)
        out.append(scored.gather(1, ids[0, prompt + a : prompt + b, None])[:, 0])
        done = end
    return torch.cat(out).numpy()
