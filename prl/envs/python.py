"""Multi-turn: reasoning-gym tasks with Python. The policy writes a code block, reads what it printed, and goes on.

A turn that ends with a code block is a call; any other turn is the answer, scored as in `prl.envs.reasoning_gym`. Each block
runs in a fresh sandbox (`prl.envs.sandbox`); nothing is kept from one to the next.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

from pydantic import Field

from prl.config.named import SetupError
from prl.config.schema import Env as EnvConfig
from prl.config.schema import PositiveFloat, PositiveInt
from prl.envs import sandbox
from prl.envs.base import Turn
from prl.envs.reasoning_gym import Options, ReasoningGym


class PythonOptions(Options):
    opening: str = "```python\n"
    closing: str = "```"
    reply: str = "\n```output\n{output}\n```\n"
    """str.format template over output."""
    time_s: PositiveFloat = 5.0
    memory_mb: PositiveInt = 512
    processes: PositiveInt = 16
    file_mb: PositiveInt = 16
    output_characters: PositiveInt = 2000
    at_once: PositiveInt = Field(default_factory=lambda: os.cpu_count() or 1)
    """Snippets at once."""


class Python(ReasoningGym):
    inline = False
    options: PythonOptions

    def __init__(self, config: EnvConfig, *, seed: int):
        super().__init__(config, seed=seed, options=PythonOptions)
        o = self.options
        self.mode, self.slots = config.sandbox, asyncio.Semaphore(o.at_once)
        self.limits = sandbox.Limits(o.time_s, o.memory_mb << 20, o.processes, o.file_mb << 20, 4 * o.output_characters)
        self.call = re.compile(re.escape(o.opening) + "(.*?)" + re.escape(o.closing) + r"\s*$", re.DOTALL)
        try:
            sandbox.require(self.mode)
        except sandbox.SandboxUnavailable as error:
            raise SetupError(f"env {self.name}: {error}") from error

    def step(self, state: Any, completion: str) -> Turn:
        if (call := self.call.search(completion)) is None:
            return Turn(reward=self.score(state, completion))
        result = sandbox.run(call[1], self.limits, self.mode)
        output = result.output[: self.options.output_characters].rstrip("\n")
        if result.timed_out:
            output += f"\nstopped after {self.limits.time_s:g} s"
        text = self.options.reply.format(output=output)
        return Turn(done=False, text=text, metrics={"call_errors": float(result.exit_code != 0)})
