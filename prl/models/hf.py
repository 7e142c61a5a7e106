"""Hugging Face model folders: config.json and safetensors, read and written tensor by tensor.

Which tensors there are and how they are cut up is in `prl.models.convert` and in the WEIGHTS of each model's hf.py.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prl.distributed.sharded import copy_into
from prl.models.base import Model
from prl.models.convert import Assignment, Problem, Shape, WeightError, assign, keeps_float32, written
from prl.models.registry import build, operations, shapes_of
from prl.models.spec import ModelSpec, SpecError, read_spec

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = "_scale_inv"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_FLOAT8 = "F8_E4M3"
_FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = _FLOATS | {torch.float8_e4m3fn: _FLOAT8}


@dataclass(frozen=True)
class Stored:
    """One tensor that can be read: where it stands, its safetensors type name, its shape."""

    file: str
    dtype: str
    shape: Shape
    read: Callable[[], Tensor]


def load_hf(path: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Model:
    """The model of a Hugging Face folder, its parameters in `dtype` (what must stay float32 does).

    Streams: beside the model there is never more than one file tensor in memory. Float8 tensors with `…_scale_inv` are
    dequantised block by block. Tensors left out (multi-token prediction layers, …) are logged by reason. Every header is
    checked before any weight is read.

    Raises SpecError or UnsupportedArchitecture for config.json, WeightError for tensors that are missing, unexpected or of
    another shape, FileNotFoundError for a missing file.
    """
    folder = Path(path)
    model = build(read_spec(folder), dtype=dtype, device=device)
    read_hf(folder, model.spec, model.state_dict())
    return model


def read_hf(folder: Path, spec: ModelSpec, state: Mapping[str, Tensor]) -> None:
    """Read a folder's weights into a model's tensors as `load_hf` does; of sharded ones each rank keeps its part."""
    with ExitStack() as stack:
        stored = _open_folder(folder, stack)
        plan = _assign(spec, {n: tuple(t.shape) for n, t in state.items()}, stored, str(folder))
        for why, names in plan.left_out.items():
            log.warning(
                "%s: left out %d tensors (%s): %s%s", folder, len(names), why, names[0], ", …" if len(names) > 1 else ""
            )
        _copy(plan, stored, state, block_size(spec))


def from_hf(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors from a mapping with Hugging Face names, each in the type of the tensors it is made of."""
    stored = {
        name: Stored("mapping", _DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape), partial(tensors.__getitem__, name))
        for name, t in tensors.items()
    }
    shapes = shapes_of(spec)
    plan = _assign(spec, shapes, stored, "tensors")
    dtypes = {view.name: tensors[hf_name].dtype for hf_name, view in plan.views.items()}
    out = {n: torch.empty(s, dtype=torch.float32 if dtypes[n] == torch.float8_e4m3fn else dtypes[n]) for n, s in shapes.items()}
    _copy(plan, stored, out, block_size(spec))
    return out


def to_hf(spec: ModelSpec, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors under their Hugging Face names, experts apart: views, nothing is copied."""
    ops = operations(spec)
    for name, tensor in state.items() if isinstance(state, Mapping) else state:
        for view in written(ops, name, tuple(tensor.shape)):
            yield view.hf_name, tensor[view.index]


def save_hf(
    path: Path | str,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tokenizer_from: Path | None = None,
    shard_bytes: int = 5 << 30,
) -> Path:
    """Write a Hugging Face folder from the model's tensors, in their types; held are the tensor at hand and `shard_bytes`.

    The folder appears whole, by one rename, and replaces one that is there; after a crash a `.tmp-…` folder may stay beside
    it. Tokenizer files are copied from `tokenizer_from` (a folder or a tokenizer.json). Raises ValueError for tensors that
    are not the model's, or not all of them.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        dtypes = _write_shards(temporary, spec, tensors, shard_bytes)
        _copy_tokenizer(tokenizer_from, temporary)
        (temporary / "config.json").write_text(json.dumps(_config_of(spec, dtypes), indent=2) + "\n")
        for file in temporary.iterdir():
            _fsync(file)
        _fsync(temporary)
        replaced = path.with_name(f"{temporary.name}.old")
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        _fsync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def _write_shards(folder: Path, spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> set[torch.dtype]:
    """The safetensors files and, for more than one, the index, last. The types written."""
    ops = operations(spec)
    left = shapes_of(spec)
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    dtypes: set[torch.dtype] = set()
    size = total = 0

    def flush() -> None:
        nonlocal pending, size
        if pending:
            save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append(list(pending))
        pending, size = {}, 0

    for name, tensor in tensors:
        shape = left.pop(name, None)
        if shape != tuple(tensor.shape):
            expected = list(shape) if shape else "no such tensor, or once"
            raise ValueError(f"{name}: expected {expected}, found {list(tensor.shape)}")
        tensor = tensor.detach()
        if keeps_float32(ops, name):
            tensor = tensor.to(torch.promote_types(torch.float32, tensor.dtype))
        else:
            dtypes.add(tensor.dtype)
        for hf_name, part in to_hf(spec, [(name, tensor)]):
            if size and size + part.nbytes > shard_bytes:
                flush()
            pending[hf_name] = part.to("cpu").contiguous()
            size += part.nbytes
            total += part.nbytes
    if left:
        raise ValueError(f"{spec.architecture}: {len(left)} tensors were not given: {', '.join(sorted(left)[:5])}, …")
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return dtypes
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    return dtypes


def _config_of(spec: ModelSpec, dtypes: set[torch.dtype]) -> dict[str, Any]:
    """config.json of what is written: no quantisation, no multi-token prediction layers, the type of the weights."""
    raw = {k: v for k, v in spec.raw.items() if k not in ("quantization_config", "torch_dtype")}
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if key in raw:
            raw[key] = 0
    return raw | {"dtype": max(dtypes, key=lambda d: d.itemsize).__str__().removeprefix("torch.")}


def _copy_tokenizer(source: Path | None, folder: Path) -> None:
    if source is None:
        return
    if source.is_file():
        shutil.copyfile(source, folder / "tokenizer.json")
        return
    if not (source / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{source}: no tokenizer.json to copy beside the weights")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_folder(folder: Path, stack: ExitStack) -> dict[str, Stored]:
    """Every tensor of the folder's safetensors files, from their headers; the files stay open as long as `stack`."""
    stored: dict[str, Stored] = {}
    files, weight_map = _files_of(folder)
    for file in files:
        try:
            opened = stack.enter_context(safe_open(folder / file, framework="pt"))
        except (SafetensorError, FileNotFoundError) as e:
            raise FileNotFoundError(f"{folder / file}: not a readable safetensors file: {e}") from None
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            header = opened.get_slice(name)
            if weight_map.get(name, file) == file:
                read = partial(opened.get_tensor, name)
                stored[name] = Stored(file, header.get_dtype(), tuple(header.get_shape()), read)
    return stored


def _files_of(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The folder's safetensors files, and the index where there is one (tensor → file)."""
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            return sorted(set(weight_map.values())), weight_map
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
            raise SpecError(f"{index}: not an index of safetensors files (weight_map): {e!r}") from None
    if (folder / SINGLE).is_file():
        return [SINGLE], {}
    raise FileNotFoundError(f"{folder}: neither {INDEX} nor {SINGLE} (convert other formats with transformers)")


def block_size(spec: ModelSpec) -> tuple[int, int]:
    """Rows and columns of a float8 block, from config.json."""
    config = spec.raw.get("quantization_config") or {}
    if (method := config.get("quant_method", "fp8")) != "fp8":
        raise SpecError(f"quantization_config: quant_method {method!r} is not supported; supported: fp8 with weight_block_size")
    rows, columns = config.get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def _assign(spec: ModelSpec, shapes: Mapping[str, Shape], stored: Mapping[str, Stored], where: str) -> Assignment:
    """`convert.assign`, with the types checked and the scales of float8 tensors set aside."""
    block = block_size(spec)
    problems = []
    scales = {name + SCALE for name, s in stored.items() if s.dtype == _FLOAT8}
    found = {name: (s.file, s.shape) for name, s in stored.items() if name not in scales}
    plan = assign(operations(spec), spec, shapes, found, where)
    for name in plan.views:
        s = stored[name]
        if s.dtype == _FLOAT8:
            expected = (*s.shape[:-2], *(-(-n // b) for n, b in zip(s.shape[-2:], block, strict=True)))
            scale = stored.get(name + SCALE)
            if scale is None or scale.shape != expected:
                wanted = f"{list(expected)}, one for each block of {block}"
                problems.append(
                    Problem(name + SCALE, (scale or s).file, wanted, str(list(scale.shape)) if scale else "missing")
                )
        elif s.dtype not in _FLOATS.values():
            problems.append(Problem(name, s.file, f"one of {', '.join(_FLOATS.values())} or {_FLOAT8}", s.dtype))
    if problems:
        raise WeightError(where, problems)
    return plan


@torch.no_grad()
def _copy(plan: Assignment, stored: Mapping[str, Stored], state: Mapping[str, Tensor], block: tuple[int, int]) -> None:
    for hf_name, view in plan.views.items():
        tensor = stored[hf_name].read()
        if stored[hf_name].dtype == _FLOAT8:
            tensor = dequantise(tensor, stored[hf_name + SCALE].read(), block)
        copy_into(state[view.name], view.index, tensor)


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """float8 [..., R, C] times its block's scale [..., ⌈R/rows⌉, ⌈C/columns⌉], in float32 (DeepSeek-V3's layout)."""
    rows, columns = block
    wide = scale.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]
