"""How a model's tensors are named and cut up in Hugging Face files: one list of operations per model, used both ways.

A model's names are Hugging Face's own, but the experts of a layer are one stacked tensor. So every file tensor is a view
`tensor[index]` of one of the model's tensors, and an operation only has to name the views: writing takes them, reading
fills them, and the two are inverse to each other bit for bit.

Legend: E experts, I expert width, D hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prl.models.spec import ModelSpec

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class View:
    """The file tensor `hf_name` is `tensor[index]`, of this shape, of the model's tensor `name`."""

    hf_name: str
    name: str
    index: Index
    shape: Shape


@dataclass(frozen=True)
class Experts:
    """[E, n·rows, cols] of the model ↔ E·n tensors `experts.{e}.{part}.weight` [rows, cols] in files.

    Files of transformers 5 may hold the stacked tensor itself; it is read too.
    """

    suffix: str
    parts: tuple[str, ...]

    def views(self, name: str, shape: Shape) -> list[View] | None:
        if not name.endswith("." + self.suffix):
            return None
        n_experts, height, width = shape
        rows = height // len(self.parts)
        stem = name.rpartition(".")[0]
        return [
            View(f"{stem}.{e}.{part}.weight", name, (e, slice(p * rows, (p + 1) * rows)), (rows, width))
            for e in range(n_experts)
            for p, part in enumerate(self.parts)
        ]


@dataclass(frozen=True)
class Float32:
    """A tensor that is never narrower than float32, whatever the model's type."""

    suffix: str


@dataclass(frozen=True)
class LeftOut:
    """File tensors that the model has no use for: a regular expression over the whole name."""

    pattern: str
    why: str

    def covers(self, hf_name: str, spec: ModelSpec) -> bool:
        return re.fullmatch(self.pattern, hf_name) is not None


@dataclass(frozen=True)
class LayersLeftOut:
    """File tensors of the layers after the model's last one."""

    why: str

    def covers(self, hf_name: str, spec: ModelSpec) -> bool:
        m = re.match(r"model\.layers\.(\d+)\.", hf_name)
        return m is not None and int(m[1]) >= spec.n_layers


Operation = Experts | Float32 | LeftOut | LayersLeftOut


def written(operations: Sequence[Operation], name: str, shape: Shape) -> list[View]:
    """The file tensors that the model's tensor `name` is written as."""
    for op in operations:
        if isinstance(op, Experts) and (views := op.views(name, shape)) is not None:
            return views
    return [View(name, name, (), shape)]


def readable(operations: Sequence[Operation], name: str, shape: Shape) -> list[list[View]]:
    """Every form in which the model's tensor may stand in files, as it is written first; a file has exactly one of them."""
    forms = [written(operations, name, shape)]
    if [v.hf_name for v in forms[0]] != [name]:
        forms.append([View(name, name, (), shape)])
    return forms


def is_expert(operations: Sequence[Operation], name: str) -> bool:
    return any(isinstance(op, Experts) and name.endswith("." + op.suffix) for op in operations)


def keeps_float32(operations: Sequence[Operation], name: str) -> bool:
    return any(isinstance(op, Float32) and name.endswith("." + op.suffix) for op in operations)


def why_left_out(operations: Sequence[Operation], hf_name: str, spec: ModelSpec) -> str | None:
    """The reason why a file tensor is not read, None for one that is expected to be read."""
    for op in operations:
        if isinstance(op, LeftOut | LayersLeftOut) and op.covers(hf_name, spec):
            return op.why
    if spec.tied and hf_name == "lm_head.weight":
        return "tied to the embedding"
    return None


@dataclass(frozen=True)
class Problem:
    """A file tensor that does not fit."""

    hf_name: str
    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.hf_name} ({self.file}): expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Assignment:
    """Which view every file tensor fills, and which file tensors are left out, by reason."""

    views: dict[str, View]
    left_out: dict[str, list[str]]


class WeightError(ValueError):
    """Files that do not hold the model: every problem names the tensor, the file, the expected and the found shape."""

    def __init__(self, where: str, problems: Sequence[Problem], *, shown: int = 20):
        self.problems = list(problems)
        more = [f"… and {len(problems) - shown} more"] if len(problems) > shown else []
        super().__init__("\n  ".join([f"{where}: {len(problems)} tensors do not fit:", *map(str, problems[:shown]), *more]))


def assign(
    operations: Sequence[Operation],
    spec: ModelSpec,
    shapes: Mapping[str, Shape],
    found: Mapping[str, tuple[str, Shape]],
    where: str,
) -> Assignment:
    """Match the file tensors `found` (name → file, shape) with the model's tensors `shapes`; WeightError with all problems."""
    views: dict[str, View] = {}
    problems: list[Problem] = []
    for name, shape in shapes.items():
        forms = readable(operations, name, shape)
        present = [form for form in forms if any(v.hf_name in found for v in form)]
        for form in present[1:]:
            v = next(v for v in form if v.hf_name in found)
            problems.append(Problem(v.hf_name, found[v.hf_name][0], f"only {present[0][0].hf_name}", "both forms"))
        for v in (present or forms)[0]:
            if v.hf_name not in found:
                problems.append(Problem(v.hf_name, "no file", str(list(v.shape)), "missing"))
            elif found[v.hf_name][1] != v.shape:
                problems.append(Problem(v.hf_name, found[v.hf_name][0], str(list(v.shape)), str(list(found[v.hf_name][1]))))
            else:
                views[v.hf_name] = v
    known = {v.hf_name for name, shape in shapes.items() for form in readable(operations, name, shape) for v in form}
    left_out: dict[str, list[str]] = {}
    for hf_name, (file, shape) in found.items():
        if hf_name in known:
            continue
        if (why := why_left_out(operations, hf_name, spec)) is not None:
            left_out.setdefault(why, []).append(hf_name)
        else:
            problems.append(Problem(hf_name, file, "no such tensor", str(list(shape))))
    if problems:
        raise WeightError(where, problems)
    return Assignment(views, left_out)
