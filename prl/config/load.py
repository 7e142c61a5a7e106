"""From YAML files and overrides to a checked `RunConfig`, and back to YAML.

A file may name another as `base:` (relative to itself): mappings merge deeply, everything else replaces. Overrides are
`dotted.key=value`, the value parsed as YAML. YAML is read as its version 1.2 core: `1e-5` is a number, `no` a string, a date a
string; tags and aliases are refused. Everything wrong is reported at once, as one `ConfigError`.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prl.config.rules import broken_rules
from prl.config.schema import RunConfig

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    path: str
    """Dotted path in the configuration, or the name of a file."""
    message: str
    origin: str = ""
    """Where the value was written: `file:line` or the override."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f"  [{self.origin}]" if self.origin else "")


class ConfigError(Exception):
    """Everything wrong with a configuration; commands print it and exit with 2."""

    def __init__(self, name: str, problems: Sequence[Problem]):
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{name}: {count}", *(f"  {p}" for p in self.problems)]))


@dataclass
class _Tree:
    """Plain data, where each value was written, and what was wrong on the way."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    whole: bool = True
    """Whether every file was read: of what stands in the others nothing is known."""

    def origin(self, key: Key) -> str:
        """Of the value or of the nearest thing around it."""
        return next((self.origins[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.origins), "")


_SCALARS = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"line {event.start_mark.line + 1}: alias *{event.anchor}; write the value out, or use base:")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Line breaks of Unicode come back as they were only from an escape, so in double quotes."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & set("\x85\u2028\u2029") else None)


_Dumper.add_representer(str, _string)
for _cls in (_Loader, _Dumper):
    for _tag, (_pattern, _first) in _SCALARS.items():
        _firsts = [*_first, ""] if _tag == "null" else list(_first)
        _cls.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _firsts)

_PLAIN_TAGS = {f"tag:yaml.org,2002:{t}" for t in (*_SCALARS, "str", "seq", "map")}


def _parse(text: str, name: str, tree: _Tree) -> Any:
    """The value in `text`; problems and origins go to `tree`. Never raises for bad YAML."""

    def value(node: yaml.Node, key: Key) -> Any:
        where = f"{name}:{node.start_mark.line + 1}" if name else ""
        tree.origins[key] = where
        if node.tag not in _PLAIN_TAGS:
            tree.problems.append(Problem(_dotted(key) or name, f"tag {node.tag!r} is not supported", where))
            return None
        if isinstance(node, yaml.SequenceNode):
            return [value(child, (*key, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            out: dict[str, Any] = {}
            for k, v in node.value:
                at = f"{name}:{k.start_mark.line + 1}" if name else ""
                if not isinstance(k, yaml.ScalarNode):
                    tree.problems.append(Problem(_dotted(key) or name, "a key must be a plain string", at))
                elif k.value in out:
                    tree.problems.append(Problem(_dotted((*key, k.value)) or name, "written twice in one mapping", at))
                else:
                    out[k.value] = value(v, (*key, k.value))
                    tree.origins[(*key, k.value)] = at
            return out
        try:
            scalar = loader.construct_object(node)
            if isinstance(scalar, float) and not math.isfinite(scalar):
                raise ValueError
            return scalar
        except (ValueError, yaml.YAMLError):
            tree.problems.append(
                Problem(_dotted(key) or name, f"{str(node.value)[:40]!r} is not a finite {node.tag.split(':')[-1]}", where)
            )
            return None

    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else value(node, ())
    except yaml.YAMLError as error:
        tree.problems.append(Problem(name, f"not valid YAML: {' '.join(str(error).split())}"))
    except RecursionError:
        tree.problems.append(Problem(name, "not valid YAML: nested too deeply"))
    return None


def _merged(a: Any, b: Any) -> Any:
    """`b` laid on `a`: mappings merge deeply, everything else replaces."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return b
    return a | {k: _merged(a.get(k), v) for k, v in b.items()}


def _read(path: Path, chain: tuple[Path, ...] = ()) -> _Tree:
    """A file with its bases under it."""
    tree, name = _Tree(), _shown(path)
    by = f"base of {_shown(chain[-1])}" if chain else ""

    def wrong(message: str) -> _Tree:
        tree.problems.append(Problem(name, message, by))
        tree.whole = False
        return tree

    try:
        real = path.resolve()
        if real in chain:
            return wrong(f"base goes round in a cycle: {' → '.join(map(_shown, (*chain[chain.index(real) :], real)))}")
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        return wrong(f"no such file{_nearest(path.name, siblings)}")
    except UnicodeDecodeError:
        return wrong("not a text file (expected YAML in UTF-8)")
    except (OSError, ValueError, RuntimeError) as error:
        return wrong(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    data = _parse(text, name, tree)
    if data is None and tree.problems:
        tree.whole = False
        return tree
    if not isinstance(data, dict):
        found = "is empty" if data is None else f"holds a {type(data).__name__}"
        return wrong(f"{found}; expected a mapping such as `trainer: {{steps: 100}}`")
    base = data.pop("base", None)
    tree.data = data
    if base is None:
        return tree
    if not isinstance(base, str):
        tree.problems.append(Problem("base", f"expected the name of a YAML file, got {base!r}", tree.origin(("base",))))
        tree.whole = False
        return tree
    return _laid_on(_read(path.parent / base, (*chain, real)), tree)


def _laid_on(below: _Tree, tree: _Tree) -> _Tree:
    """`tree` on the file below it."""
    # A list replaces: where its old items were written no longer matters.
    kept = {
        key: where
        for key, where in below.origins.items()
        if not any(isinstance(step, int) and key[:n] in tree.origins for n, step in enumerate(key))
    }
    problems = below.problems + tree.problems
    return _Tree(_merged(below.data, tree.data), kept | tree.origins, problems, below.whole and tree.whole)


def _override(tree: _Tree, text: str) -> None:
    """Apply `dotted.key=value`; a number in the key is an index of a list."""
    dotted, equals, raw = text.partition("=")
    steps = dotted.strip().split(".")
    if not equals or not all(steps):
        name = text if text.strip() else f"override {text!r}"
        tree.problems.append(Problem(name, "expected dotted.key=value, for example trainer.optim.lr=1e-5"))
        return
    read = _Tree()
    value = _parse(raw, "", read)
    key: Key = ()
    made: list[Key] = []

    def changed(at: Any) -> Any:
        nonlocal key
        if len(key) == len(steps):
            return _merged(at, value)
        step = steps[len(key)]
        if isinstance(at, list):
            if not step.isdecimal() or int(step) >= len(at):
                raise ValueError(f"{_dotted(key)} is a list of {len(at)}, and {step!r} is no index of it")
            key = (*key, int(step))
            return [changed(item) if i == int(step) else item for i, item in enumerate(at)]
        if not isinstance(at, dict | None):
            raise ValueError(f"{_dotted(key)} is {at!r}, which has no keys")
        key = (*key, step)
        if step not in (at or {}):
            made.append(key)
        return (at or {}) | {step: changed((at or {}).get(step))}

    try:
        data = changed(tree.data)
    except ValueError as error:
        read.problems.append(Problem(dotted, str(error)))
    tree.problems.extend(Problem(dotted, p.message, text) for p in read.problems)
    if not read.problems:
        tree.data = data
        tree.origins = {k: where for k, where in tree.origins.items() if k[: len(key)] != key}
        tree.origins |= dict.fromkeys([*made, key], text)


def _shown(path: Path) -> str:
    """Relative to the working folder where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))


def _nearest(word: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, valid, 1, 0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _models(annotation: Any) -> Iterator[Any]:
    """The parts of an annotation, Annotated and unions taken apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _models(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _models(part)
    else:
        yield annotation


def _section(key: Key) -> type[BaseModel] | None:
    """The schema's section at `key`."""
    at: list[Any] = [RunConfig]
    for step in key:
        following: list[Any] = []
        for part in at:
            if isinstance(step, int) and get_origin(part) is list:
                following += _models(get_args(part)[0])
            elif isinstance(part, type) and issubclass(part, BaseModel) and step in part.model_fields:
                following += _models(part.model_fields[str(step)].annotation)
        at = following
    return next((p for p in at if isinstance(p, type) and issubclass(p, BaseModel)), None)


def _leaves(section: type[BaseModel] = RunConfig, at: Key = ()) -> Iterator[Key]:
    """Every key of the schema below `section`, outer ones first."""
    for name, info in section.model_fields.items():
        yield (*at, name)
        for part in _models(info.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _leaves(part, (*at, name))


def _described(error: ErrorDetails, tree: _Tree) -> tuple[Key, Problem]:
    """A pydantic error as a problem: what was expected, what came, and the nearest valid thing."""
    key: Key = tuple(step for step in error["loc"] if step != "[key]")
    got, context = error["input"], error.get("ctx", {})
    shown = "true" if got is True else "false" if got is False else "null" if got is None else repr(got)
    shown = shown if len(shown) <= 60 else shown[:57] + "…"
    section = _section(key[:-1]) if key else RunConfig
    match error["type"]:
        case "extra_forbidden":
            valid = list(section.model_fields) if section else []
            near = difflib.get_close_matches(str(key[-1]), valid, 1, 0.6)
            elsewhere = [_dotted(k) for k in _leaves() if k[-1] == key[-1]]
            if near:
                message = f"unknown key; did you mean {_dotted((*key[:-1], near[0]))}?"
            elif elsewhere:
                message = f"unknown key here; did you mean {' or '.join(elsewhere[:3])}?"
            else:
                message = f"unknown key; valid here: {', '.join(valid)}"
        case "literal_error":
            options = [str(v) for v in _choices(section, key)]
            message = f"expected {context['expected']}, got {shown}{_nearest(str(got), options)}"
        case "bool_type":
            message = f"expected true or false, got {shown}"
        case "missing":
            message = "missing, and it has no default"
        case "model_type" | "dict_type":
            message = f"expected a mapping, got {shown}"
        case _:
            expected = re.sub(r"^\w+ should (be |have )?", "expected ", error["msg"]).split(", got")[0].split(", unable")[0]
            message = f"{expected}, got {shown}"
    return key, Problem(_dotted(key) or "configuration", message, tree.origin(key))


def _choices(section: type[BaseModel] | None, key: Key) -> tuple[Any, ...]:
    """The values of the Literal at `key`, or of the keys of a mapping there."""
    if section is None:
        section, key = _section(key[:-2]), key[:-1]
    info = section.model_fields.get(str(key[-1])) if section and key else None
    for part in _models(info.annotation) if info else ():
        if get_origin(part) is dict:
            part = get_args(part)[0]
        if get_origin(part) is Literal:
            return get_args(part)
    return ()


def _checked(tree: _Tree) -> RunConfig | None:
    """Validate; every problem of fields, rules and named files goes to `tree`. None where the fields are not sound."""
    bad: list[Key] = []
    for attempt in range(2):
        try:
            # By way of JSON, whose strict mode takes a list for a tuple and a string for a path, and nothing else by force.
            config = RunConfig.model_validate_json(json.dumps(_without(tree.data, bad)), strict=True)
            break
        except ValidationError as error:
            if attempt:
                return None
            for detail in error.errors(include_url=False):
                key, problem = _described(detail, tree)
                tree.problems.append(problem)
                bad.append(key)
    if not tree.whole:
        return None
    # What is not sound has fallen back to its default; rules that read it stay out, the others still speak.
    for path, message in (*broken_rules(config, [_dotted(k) for k in bad]), *_missing_files(config)):
        tree.problems.append(
            Problem(path, message, tree.origin(tuple(int(s) if s.isdecimal() else s for s in path.split("."))))
        )
    return None if bad else config


def _without(data: Any, keys: Sequence[Key]) -> Any:
    """A copy without the entries at `keys`; a list with a bad item goes as a whole."""
    if not isinstance(data, dict):
        return data
    out = {}
    for k, v in data.items():
        below = [key[1:] for key in keys if key[:1] == (k,)]
        if () in below or (below and not isinstance(v, dict)):
            continue
        out[k] = _without(v, below) if below else v
    return out


def _missing_files(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What a run starts from must be there."""
    for section, expected in (("model", "config.json"), ("tokenizer", "tokenizer.json")):
        path = getattr(config, section).path
        if path is None or (path / expected).is_file() or (section == "tokenizer" and path.is_file()):
            continue
        yield f"{section}.path", f"{path}: {f'no {expected} in it' if path.exists() else 'no such file or folder'}"
    for name in ("data", "validation"):
        for i, source in enumerate(getattr(config.sft, name, ())):
            if not source.path.is_file():
                yield f"sft.{name}.{i}.path", f"{source.path}: no such file"


PLANNED = ("inference.engine", "inference.replicas", "tokenizer.path", "sft.data", "sft.validation")
"""What a plan can do without, at or below these paths."""


def load(
    path: Path | str, overrides: Sequence[str] = (), *, site: Path | str | None = None, planning: bool = False
) -> RunConfig:
    """The configuration in `path`, with its bases under it and the overrides over it; ConfigError names every problem.

    `site` is a file that goes below all of them: what is true of the cluster.
    `planning`: nothing will be run, so data, tokenizer and engine need not be there, and a model folder that is not there
    may be one of the same name beside the file, with no more than its config.json.

    Paths of models, tokenizers and data are relative to the working folder, and absolute in what is returned.
    """
    name = _shown(Path(path))
    tree = _Tree()
    config = None
    try:
        tree = _read(Path(path))
        if site is not None:
            tree = _laid_on(_read(Path(site)), tree)
        if tree.whole:  # without its file an override may reach for what only seems missing
            for override in overrides:
                _override(tree, override)
        if planning:
            _beside(tree, Path(path).parent)
        if tree.whole or tree.data:
            config = _checked(tree)
    except RecursionError:
        tree.problems.append(Problem(name, "nested too deeply"))
    if planning and config is not None:
        tree.problems = [p for p in tree.problems if not any(f"{p.path}.".startswith(f"{known}.") for known in PLANNED)]
    if config is None or tree.problems:
        raise ConfigError(name, tree.problems)
    found = {s: _absolute(part) for s in ("model", "tokenizer") if (part := getattr(config, s)).path is not None}
    if config.sft is not None:
        sources = {name: [_absolute(s) for s in getattr(config.sft, name)] for name in ("data", "validation")}
        found["sft"] = config.sft.model_copy(update=sources)
    return config.model_copy(update=found)


def load_site(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """What a site file says, without what only a run needs, such as a model. ConfigError as `load`."""
    tree = _read(Path(path))
    if tree.whole:
        for override in overrides:
            _override(tree, override)
    before = list(tree.problems)
    config = _checked(tree) if tree.whole else None
    problems = [p for p in tree.problems if p.origin or p in before]  # what stands nowhere is missing for a run alone
    if config is None or problems:
        raise ConfigError(_shown(Path(path)), problems)
    return config


def _beside(tree: _Tree, folder: Path) -> None:
    model = tree.data.get("model")
    if not isinstance(model, dict) or not isinstance(path := model.get("path"), str):
        return
    if not (Path(path) / "config.json").is_file() and (folder / path / "config.json").is_file():
        tree.data = tree.data | {"model": model | {"path": str(folder / path)}}


def _absolute(part: Any) -> Any:
    return part.model_copy(update={"path": part.path.absolute()})


def load_resolved(path: Path | str) -> RunConfig:
    """The configuration stored with a run (`dump`); it stands alone."""
    return load(path)


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML, defaults written out: `load_resolved` of it gives an equal one."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
