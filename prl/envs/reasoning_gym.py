"""Tasks of the reasoning-gym library (https://github.com/open-thought/reasoning-gym), generated as they are asked for.

Which split a task belongs to follows from a hash of its prompt, so a held-out prompt can never be trained on, whatever its
ordinal, the seed or the dataset's order. Random access without a table: the train task of an ordinal is the first of the
items drawn for (ordinal, 0), (ordinal, 1), … that the split owns. Held-out and worked tasks are distinct from each other and
are kept as they are found.
"""

from __future__ import annotations

import difflib
import itertools
import struct
from typing import Any, Literal

import reasoning_gym
import xxhash
from reasoning_gym.factory import DATASETS

from prl.config.schema import Env as EnvConfig
from prl.config.schema import Fraction, Section
from prl.envs.base import UNBOUNDED, SingleTurn, Split, Task, TaskError

MAX_DRAWS = 20_000
"""Items drawn in vain for one task before the split counts as exhausted."""

EAGER = ("acre", "gsm_symbolic", "list_functions", "word_ladder")
"""Datasets that make all their items at once, so that they need a size (found by trying all 106 of version 0.1.19)."""


class Options(Section):
    dataset: str
    """A reasoning-gym dataset, such as spell_backward."""
    dataset_options: dict[str, Any] = {}
    """Of the dataset's own configuration; `size`, by default without end, for the few that need one."""
    prompt: str = "{question}"
    """str.format template over question, answer and the item's metadata."""
    answer: str = "{answer}"
    """Template of the worked answer, which is also what `exact` compares with."""
    lowercase: bool = False
    """Lower-case what the templates give."""
    reward: Literal["exact", "dataset"] = "exact"
    """exact: 1 for the answer, else 0. dataset: the dataset's own score_answer on the completion."""
    held_out: Fraction = 0.1
    """Share of all prompts that only evaluation sees."""
    worked: Fraction = 0.2
    """Share of all prompts that only SFT sees."""


class ReasoningGym(SingleTurn):
    def __init__(self, config: EnvConfig, *, seed: int, options: type[Options] = Options):
        super().__init__(config, seed=seed)
        self.options = o = options.model_validate(config.options)
        if o.held_out + o.worked >= 1:
            raise TaskError(f"env {self.name}: held_out {o.held_out:g} and worked {o.worked:g} leave nothing to train on")
        if o.dataset in EAGER and "size" not in o.dataset_options:
            raise TaskError(f"env {self.name}: {o.dataset} makes all its items at once; set dataset_options.size, such as 1000")
        if o.dataset not in DATASETS:
            near = difflib.get_close_matches(o.dataset, DATASETS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(sorted(DATASETS))}"
            raise TaskError(f"env {self.name}: reasoning-gym has no dataset {o.dataset!r}; {hint}")
        try:
            self.dataset = reasoning_gym.create_dataset(o.dataset, **{"seed": seed, "size": UNBOUNDED} | o.dataset_options)
        except Exception as error:  # the library's checks are assertions
            raise TaskError(f"env {self.name}: reasoning-gym dataset {o.dataset!r} {o.dataset_options}: {error}") from error
        self.inline = o.reward == "exact"
        self._kept: dict[Split, list[Task]] = {"held_out": [], "worked": []}
        self._seen: dict[Split, set[str]] = {"held_out": set(), "worked": set()}
        self._scan = itertools.count()

    def size(self, split: Split) -> int:
        return UNBOUNDED

    def task(self, ordinal: int, split: Split) -> Task:
        if split == "train":
            return self._train_task(ordinal)
        kept, in_vain = self._kept[split], 0
        while len(kept) <= ordinal:
            before = len(kept)
            self._keep(self._item(self._draw(0, next(self._scan))))
            in_vain = in_vain + 1 if len(kept) == before else 0
            if in_vain > MAX_DRAWS:
                raise TaskError(
                    f"env {self.name}: {self.options.dataset} has about {len(kept)} distinct {split} tasks, task {ordinal} was "
                    f"asked for; ask for fewer, raise options.{split}, or widen dataset_options"
                )
        return kept[ordinal]

    def _keep(self, task: Task) -> None:
        split = self._split(task)
        if split != "train" and task.id not in self._seen[split]:
            self._seen[split].add(task.id)
            self._kept[split].append(Task(len(self._kept[split]), task.id, task.prompt, task.data))

    def _train_task(self, ordinal: int) -> Task:
        for attempt in range(MAX_DRAWS):
            task = self._item(self._draw(ordinal + 1, attempt))
            if self._split(task) == "train":
                return Task(ordinal, task.id, task.prompt, task.data)
        raise TaskError(f"env {self.name}: no train task among {MAX_DRAWS} items; {self.options.dataset} has too few prompts")

    def _draw(self, stream: int, attempt: int) -> int:
        """An item's number: of 31 bits, because some datasets hand it to NumPy as a seed."""
        return xxhash.xxh3_64_intdigest(struct.pack("<2q", stream, attempt)) % len(self.dataset)

    def _item(self, index: int) -> Task:
        entry = self.dataset[index]
        prompt, answer = self._filled(self.options.prompt, entry), self._filled(self.options.answer, entry)
        return Task(index, xxhash.xxh3_64_hexdigest(prompt.encode()), prompt, {"answer": answer, "item": index})

    def _filled(self, template: str, entry: dict[str, Any]) -> str:
        values = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"]}
        try:
            text = template.format_map(values)
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            offers = ", ".join(sorted(values))
            raise TaskError(f"env {self.name}: template needs {error}; {self.options.dataset} offers {offers}") from error
        return text.lower() if self.options.lowercase else text

    def _split(self, task: Task) -> Split:
        place = int(task.id, 16) / 2**64
        if place < self.options.held_out:
            return "held_out"
        return "worked" if place < self.options.held_out + self.options.worked else "train"

    def worked_answer(self, task: Task) -> str:
        return str(task.data["answer"])

    def score(self, task: Task, completion: str) -> float:
        if self.options.reward == "exact":
            return float(completion == task.data["answer"])
        return float(self.dataset.score_answer(completion, self.dataset[task.data["item"]]))
