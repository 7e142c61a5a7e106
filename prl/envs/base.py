"""What an environment is: a source of tasks, and the answers it gives to what the policy writes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prl.config.named import SetupError
from prl.config.schema import Env as EnvConfig

Split = Literal["train", "held_out", "worked"]
"""train: RL tasks. held_out: evaluation, never trained on. worked: SFT's worked answers. Disjoint by content."""
UNBOUNDED = 1 << 31
"""The size of a source that generates tasks without end."""


class TaskError(SetupError):
    """A task that cannot be made: names the environment, the option to change, and what was found."""


@dataclass(frozen=True, slots=True)
class Task:
    ordinal: int
    """Place in its environment and split."""
    id: str
    """Follows from the content: equal tasks have equal ids."""
    prompt: str
    data: dict[str, Any] = field(default_factory=dict)
    """What the environment needs to score it."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Go on in a new branch: the first `keep` pieces of this one (0: none, 1: the prompt, then each completion and each
    environment text), token for token, and then the turn's text. What is kept is trained in the branch it was sampled in.
    """

    keep: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """The environment's answer to one completion."""

    reward: float = 0.0
    """Of the whole rollout, were it to end here; the last turn's counts."""
    done: bool = True
    text: str = ""
    """Appended to the context when not done."""
    fork: Fork | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Summed over the turns of a rollout."""


class Env(ABC):
    """Subclass it, or `SingleTurn`, and name it `package.module:Class` as `kind`.

    `start` and `step` may be plain or async functions. They run in a thread of their own, one call at a time per rollout,
    under the environment's deadline; whatever they raise becomes an outcome of the rollout.
    """

    inline = False
    """`start` and `step` are quick and never block: they run on the caller's event loop, which saves the thread. No deadline
    can stop a plain function there."""
    stop: tuple[str, ...] = ()
    """Texts of one token each that end a turn beside the end-of-text token; they stay in the completion."""
    slots: asyncio.Semaphore | None = None
    """Bound of calls at once; waiting for a slot does not count against the deadline."""

    def __init__(self, config: EnvConfig, *, seed: int):
        self.config, self.name, self.seed = config, config.name, seed

    @abstractmethod
    def size(self, split: Split) -> int:
        """Number of tasks, `UNBOUNDED` where they are generated without end."""

    @abstractmethod
    def task(self, ordinal: int, split: Split) -> Task:
        """Deterministic in (seed, ordinal, split). Raises TaskError."""

    def worked_answer(self, task: Task) -> str:
        """The completion that SFT shows, without the end-of-text token."""
        raise TaskError(f"env {self.name}: {type(self).__name__} has no worked answers; SFT needs an environment that has")

    def worked_turns(self, task: Task) -> Sequence[str]:
        """The same over several turns: a completion, what the environment says to it, the next completion, and so on."""
        return (self.worked_answer(task),)

    def start(self, task: Task) -> Any | Awaitable[Any]:
        """The state of one rollout, given back to every `step`."""
        return task

    @abstractmethod
    def step(self, state: Any, completion: str) -> Turn | Awaitable[Turn]:
        """Answer a completion (stop texts included, the end-of-text token not)."""


def make_task(env: Env, ordinal: int, split: Split) -> Task:
    """`env.task`; TaskError for whatever it raises, and for what is no task."""
    try:
        task = env.task(ordinal, split)
    except TaskError:
        raise
    except Exception as e:
        raise TaskError(f"env {env.name}, task {ordinal} of {split}: {type(e).__name__}: {e}") from e
    if not (isinstance(task, Task) and isinstance(task.id, str) and isinstance(task.prompt, str)):
        raise TaskError(f"env {env.name}, task {ordinal} of {split}: got {task!r:.200}, expected a Task, id and prompt texts")
    return task


class SingleTurn(Env):
    """One completion, one score."""

    @abstractmethod
    def score(self, task: Task, completion: str) -> float: ...

    def step(self, state: Any, completion: str) -> Turn | Awaitable[Turn]:
        return Turn(reward=self.score(state, completion))
