"""Hugging Face model folders: config.json and safetensors, read and written tensor by tensor.

Which tensors there are and how they are cut up is in `prl.models.convert` and in the WEIGHTS of each model's hf.py.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from prl.distributed.mesh import ALONE, Mesh
from prl.distributed.sharded import copy_into, full, local, part_of
from prl.models.base import Model
from prl.models.convert import Assignment, Problem, Shape, View, WeightError, assign, keeps_float32, written
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


MAPPED = 64 << 20
"""Bytes of a file that are read before it is opened anew: what was read counts as this process's memory until then."""
SHARD_BYTES = 5 << 30
"""Size of the files that are written."""


@dataclass(frozen=True)
class Stored:
    """One tensor that can be read: where it stands, its safetensors type name, its shape, and how to read a block of it."""

    file: str
    dtype: str
    shape: Shape
    read: Callable[[tuple[slice, ...]], Tensor]

    def whole(self) -> Tensor:
        return self.read(tuple(slice(0, n) for n in self.shape))


class _Reader:
    """Blocks of tensors from a folder's files, of which one is open at a time; what is returned lives until the next read."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, ""
        self._opened: Any = None
        self._left = 0

    def read(self, file: str, name: str, block: tuple[slice, ...]) -> Tensor:
        if file != self.file or self._left < 0:
            self._opened = None  # unmaps it, before the next is mapped
            self._opened, self.file, self._left = _open(self.folder / file), file, MAPPED
        tensor: Tensor = self._opened.get_slice(name)[block] if block else self._opened.get_tensor(name)
        self._left -= tensor.nbytes
        return tensor


def load_hf(path: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Model:
    """The model of a Hugging Face folder, its parameters in `dtype` (what must stay float32 does).

    Streams: beside the model there is never more than `MAPPED` and one file tensor in memory. Float8 tensors with
    `…_scale_inv` are dequantised block by block. Tensors left out (multi-token prediction layers, …) are logged by reason.
    Every header is checked before any weight is read.

    Raises SpecError or UnsupportedArchitecture for config.json, WeightError for tensors that are missing, unexpected or of
    another shape, FileNotFoundError for a missing file.
    """
    folder = Path(path)
    model = build(read_spec(folder), dtype=dtype, device=device)
    read_hf(folder, model.spec, model.state_dict())
    return model


def read_hf(folder: Path, spec: ModelSpec, state: Mapping[str, Tensor]) -> None:
    """Read a folder's weights into a model's tensors as `load_hf` does; of sharded ones each rank reads its part alone.

    Only of a float8 tensor that ranks share does each read all.
    """
    stored = _open_folder(folder)
    plan = _assign(spec, {n: tuple(t.shape) for n, t in state.items()}, stored, str(folder))
    for why, names in plan.left_out.items():
        log.warning("%s: left out %d tensors (%s): %s%s", folder, len(names), why, names[0], ", …" if len(names) > 1 else "")
    _copy(plan, stored, state, block_size(spec))


def from_hf(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors from a mapping with Hugging Face names, each in the type of the tensors it is made of."""
    stored = {
        name: Stored("mapping", _DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape), t.__getitem__)
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
    shard_bytes: int = SHARD_BYTES,
    mesh: Mesh = ALONE,
) -> Path:
    """Write a Hugging Face folder from the model's tensors, in their types; held are the tensor at hand and `shard_bytes`.

    With several ranks a collective: every rank gives the same names in the same order, parts of sharded tensors or whole ones,
    and writes files of its own. A file tensor is written by a rank that holds it whole (experts), else gathered for the rank
    that has written least. The folder appears whole, by one rename, and replaces one that is there; after a crash a `.tmp-…`
    folder may stay beside it. Tokenizer files are copied from `tokenizer_from` (a folder or a tokenizer.json). Raises
    ValueError for tensors that are not the model's, or not all of them; what fails on one rank fails on all.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp-{mesh.gather_objects(uuid.uuid4().hex)[0]}")
    try:
        with mesh.agree():
            if mesh.main:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.mkdir()
        shards = _Shards(temporary, mesh, shard_bytes)
        dtypes = _write_shards(shards, spec, tensors)
        with mesh.agree():
            shards.close()
        files = [file for rank in mesh.gather_objects(shards.written) for file in rank]
        total = sum(mesh.gather_objects(shards.total))
        with mesh.agree():
            if mesh.main:
                _number(temporary, files, total)
                _copy_tokenizer(tokenizer_from, temporary)
                (temporary / "config.json").write_text(json.dumps(_config_of(spec, dtypes), indent=2) + "\n")
                _reveal(temporary, path)
    except BaseException:
        if mesh.main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def _reveal(temporary: Path, path: Path) -> None:
    """Make a finished folder durable and put it in place of what is there."""
    for file in temporary.iterdir():
        _fsync(file)
    _fsync(temporary)
    replaced = path.with_name(f"{temporary.name}.old")
    if path.exists():
        path.rename(replaced)
    temporary.rename(path)
    _fsync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


class _Shards:
    """The safetensors files that a rank writes, each once it is full. A failure is kept for `close`: others may wait for us."""

    def __init__(self, folder: Path, mesh: Mesh, shard_bytes: int):
        self.folder, self.mesh, self.shard_bytes = folder, mesh, shard_bytes
        self.written: list[tuple[str, list[str]]] = []
        """Name of each file and of the tensors in it."""
        self.total = self.pending_bytes = 0
        self.pending: dict[str, Tensor] = {}
        self.error: Exception | None = None

    def add(self, hf_name: str, tensor: Tensor) -> None:
        if self.pending and self.pending_bytes + tensor.nbytes > self.shard_bytes:
            self.flush()
        # A copy, unless it is alone in its storage: a view would keep the whole of it in memory.
        alone = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        self.pending[hf_name] = tensor if alone else tensor.to("cpu", copy=True).contiguous()
        self.pending_bytes += tensor.nbytes
        self.total += tensor.nbytes

    def flush(self) -> None:
        file = f"shard-{self.mesh.rank}-{len(self.written)}"
        try:
            if self.pending and self.error is None:
                save_file(self.pending, self.folder / file, metadata={"format": "pt"})
                self.written.append((file, list(self.pending)))
        except (OSError, SafetensorError) as e:
            self.error = OSError(f"{self.folder / file}: cannot be written: {e}")
        self.pending, self.pending_bytes = {}, 0

    def close(self) -> None:
        self.flush()
        if self.error is not None:
            raise self.error


def _write_shards(shards: _Shards, spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]]) -> set[torch.dtype]:
    """Give every file tensor to one rank's files. The types written."""
    ops, mesh = operations(spec), shards.mesh
    left = shapes_of(spec)
    dtypes: set[torch.dtype] = set()
    load = [0] * mesh.world
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
        views = written(ops, name, shape)
        for view, owner in zip(views, _owners(tensor, views, mesh), strict=True):
            gathered = owner is None
            block = full(tensor[view.index] if view.index else tensor) if gathered else None
            writer = load.index(min(load)) if owner is None else owner
            load[writer] += math.prod(view.shape) * tensor.itemsize
            if writer != mesh.rank:
                continue
            if block is None:
                part = part_of(tensor, view.index)
                assert part is not None
                block = local(tensor)[part[0]]
            shards.add(view.hf_name, block)
    if left:
        raise ValueError(f"{spec.architecture}: {len(left)} tensors were not given: {', '.join(sorted(left)[:5])}, …")
    return dtypes


def _owners(tensor: Tensor, views: Sequence[View], mesh: Mesh) -> list[int | None]:
    """For each view the lowest rank that holds it whole, None where none does or every rank does."""
    if not isinstance(tensor, DTensor):
        return [None] * len(views)

    def whole(view: View) -> bool:
        part = part_of(tensor, view.index)
        return part is not None and [s.stop - s.start for s in part[1]] == list(view.shape)

    holders = torch.tensor([whole(view) * (mesh.world - mesh.rank) for view in views], device=mesh.device)
    return [mesh.world - n if n else None for n in mesh.max(holders).tolist()]


def _number(folder: Path, files: Sequence[tuple[str, list[str]]], total: int) -> None:
    """Give the files their final names and, where there are several, an index."""
    if len(files) == 1:
        (folder / files[0][0]).rename(folder / SINGLE)
        return
    weight_map = {}
    for i, (shard, tensors) in enumerate(files):
        name = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        (folder / shard).rename(folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


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


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, FileNotFoundError) as e:
        raise FileNotFoundError(f"{path}: not a readable safetensors file: {e}") from None


def _open_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's safetensors files, from their headers."""
    stored: dict[str, Stored] = {}
    files, weight_map = _files_of(folder)
    reader = _Reader(folder)
    for file in files:
        opened = _open(folder / file)
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            header = opened.get_slice(name)
            if weight_map.get(name, file) == file:
                read = partial(reader.read, file, name)
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
    for hf_name, view in sorted(plan.views.items(), key=lambda item: stored[item[0]].file):
        tensor, scale = stored[hf_name], stored.get(hf_name + SCALE)

        def dequantised(part: tuple[slice, ...], tensor: Stored = tensor, scale: Stored | None = scale) -> Tensor:
            assert scale is not None
            weight = tensor.whole().clone()  # the scale's read may unmap it
            return dequantise(weight, scale.whole(), block)[part]

        copy_into(state[view.name], view.index, dequantised if tensor.dtype == _FLOAT8 else tensor.read)


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """float8 [..., R, C] times its block's scale [..., ⌈R/rows⌉, ⌈C/columns⌉], in float32 (DeepSeek-V3's layout)."""
    rows, columns = block
    wide = scale.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]
