"""Hugging Face folders read and written by several ranks: the same files' values, no more memory than the part of each."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prl.config.mesh import resolve
from prl.config.schema import RunConfig
from prl.distributed.mesh import ALONE, Mesh, lay_out
from prl.distributed.sharded import local
from prl.models import hf
from prl.models.hf import load_hf, save_hf
from prl.trainer.state import TrainState
from tests.distributed.ranks import Ranks
from tests.trainer.helpers import ARCHITECTURE, config

MESHES: dict[str, dict[str, Any]] = {
    "1": {"ranks": 1},
    "2": {"ranks": 2, "mesh": {"ep": 1}},
    "4, ep 2": {"ranks": 4, "mesh": {"ep": 2}},
    "4, replicate 2": {"ranks": 4, "mesh": {"replicate": 2, "ep": 2}},
}


def config_of(mesh: dict[str, Any], **architecture: Any) -> RunConfig:
    tree = config("float32", optim={"kind": "sgd"}, **mesh).model_dump()
    tree["model"]["architecture"] = ARCHITECTURE | architecture
    return RunConfig.model_validate(tree)


def open_mesh(rank: int, c: RunConfig) -> Mesh:
    shape = resolve(c.trainer, c.model.architecture["n_routed_experts"] if c.model.architecture else 0)
    return lay_out(shape, rank, torch.device("cpu")) if shape.world > 1 else ALONE


def there_and_back(rank: int, c: RunConfig, folder: Path, other: Path) -> tuple[list[str], dict[str, int], list[bool]]:
    """Import, export, import: the tensors read, the bytes read of each, and whether all parts are the same."""
    mesh = open_mesh(rank, c)
    read: dict[str, int] = {}
    real = hf._Reader.read

    def counted(self: Any, file: str, name: str, block: tuple[slice, ...]) -> torch.Tensor:
        x = real(self, file, name, block)
        read[name] = read.get(name, 0) + x.nbytes
        return x

    hf._Reader.read = counted  # type: ignore[method-assign]
    try:
        state = TrainState(c, c.trainer.optim, mesh, folder)
    finally:
        hf._Reader.read = real  # type: ignore[method-assign]
    save_hf(other, state.spec, state.parts(), shard_bytes=30_000, mesh=mesh)
    again = TrainState(c, c.trainer.optim, mesh, other)
    same = [torch.equal(local(a), local(b)) for a, b in zip(state.weights().values(), again.weights().values(), strict=True)]
    return sorted(read), read, same


@pytest.mark.parametrize("experts", [8, 6], ids=["whole experts", "experts cut by rows"])
@pytest.mark.parametrize("name", list(MESHES))
def test_ranks_read_and_write_what_one_does(name: str, experts: int, ranks: Ranks, tmp_path: Path) -> None:
    mesh = MESHES[name]
    if experts == 6:
        mesh = mesh | {"mesh": mesh.get("mesh", {}) | {"ep": 1}}
    c = config_of(mesh, n_routed_experts=experts)
    alone = TrainState(config_of({"ranks": 1}, n_routed_experts=experts), c.trainer.optim, ALONE)
    folder = save_hf(tmp_path / "one", alone.spec, alone.parts())
    told = ranks.run(mesh["ranks"], there_and_back, c, folder, tmp_path / "other")
    assert all(all(same) for _, _, same in told)
    expected, got = load_hf(folder).state_dict(), load_hf(tmp_path / "other").state_dict()
    assert all(torch.equal(t, got[n]) for n, t in expected.items())
    files = [p for p in (tmp_path / "other").iterdir() if p.suffix == ".safetensors"]
    assert len(files) >= mesh["ranks"] and not list(tmp_path.glob("*.tmp-*"))
    copies = mesh.get("mesh", {}).get("replicate", 1)
    buffers = sum(t.nbytes for n, t in expected.items() if n.endswith("e_score_correction_bias"))
    sharded = sum(t.nbytes for t in expected.values()) - buffers
    read = sum(sum(read.values()) for _, read, _ in told)
    assert read == copies * sharded + mesh["ranks"] * buffers, "each byte by one rank of a copy"
    if experts == 8 and mesh["ranks"] > 1:
        assert all(sum("experts" in n and "shared" not in n for n in names) < 8 * 2 * 3 for names, _, _ in told), "not all"


def peak(reset: bool = False) -> int:
    """The most memory that this process has had since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


BIG = {"hidden_size": 512, "vocab_size": 32768, "moe_intermediate_size": 512, "n_routed_experts": 32, "num_hidden_layers": 9}


def measured(rank: int, c: RunConfig, folder: Path) -> dict[str, float]:
    """Peak memory of export and import above what was there, as multiples of this rank's part of the model."""
    mesh = open_mesh(rank, c)
    state = TrainState(c, c.trainer.optim, mesh)
    part = sum(local(t).nbytes for t in state.weights().values())
    gc.collect()
    before = peak(reset=True)
    save_hf(folder, state.spec, state.parts(), shard_bytes=64 << 20, mesh=mesh)
    out = {"bytes": float(part), "export": (peak() - before) / part}
    del state
    gc.collect()
    before = peak(reset=True)
    state = TrainState(c, c.trainer.optim, mesh, folder)
    assert state.step == 0
    return out | {"import": (peak() - before) / part}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n", [1, 2])
def test_a_model_of_a_gigabyte_is_never_held_twice(n: int, ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(n, measured, config_of({"ranks": n, "mesh": {"ep": n}}, **BIG), tmp_path / "model", timeout_s=500)
    print(told)
    assert sum(t["bytes"] for t in told) > 0.9e9
    for t in told:
        assert t["import"] < 1.25, "its part once, and what is read at a time"
        # Not a share of the model: the file at hand, and the embedding, which is gathered.
        assert t["export"] * t["bytes"] < 4 * (64 << 20), "while the model itself is there already"
