"""From a configuration to an environment."""

from __future__ import annotations

import pkgutil
from typing import Any

from pydantic import ValidationError

from prl.config.named import SetupError, named
from prl.config.schema import Env as EnvConfig
from prl.envs.base import Env

KINDS: dict[str, Any] = {  # import paths, so that an environment's libraries load only where it is used
    "reasoning_gym": "prl.envs.reasoning_gym:ReasoningGym",
    "calculator": "prl.envs.calculator:Calculator",
    "python": "prl.envs.python:Python",
}


def make(config: EnvConfig, *, seed: int = 0) -> Env:
    """The environment of `config.kind`: registered, or a subclass of `Env` at `package.module:Class`.

    Raises SetupError that names the environment and every wrong option; what the constructor raises passes through.
    """
    found = named(config.kind, KINDS, f"env {config.name}: kind")
    env_class = pkgutil.resolve_name(found) if isinstance(found, str) else found
    if not (isinstance(env_class, type) and issubclass(env_class, Env)):
        raise SetupError(f"env {config.name}: kind {config.kind!r} is {env_class!r}, expected a subclass of prl.envs.base.Env")
    try:
        return env_class(config, seed=seed)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors())
        raise SetupError(f"env {config.name}: options: {problems}") from error
