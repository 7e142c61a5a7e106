"""Ranks that meet, agree and sum; in one process where one rank is enough, else in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from prl.config.mesh import MeshShape
from prl.distributed.fsdp import shard
from prl.distributed.mesh import STORE, join
from prl.distributed.sharded import full, local
from prl.transport.run_dir import RunDir

WORLD = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 25, dtype=torch.float32).view(5, 5))  # does not divide by 3
        self.gate = nn.Linear(5, 5, bias=False)
        with torch.no_grad():
            self.gate.weight.copy_(torch.eye(5) * 0.1)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [self.weight.dtype, self.gate.weight.dtype]
        return x + x @ self.weight.to(x.dtype)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def rank(root: Path, index: int) -> None:
    """What each process does; its findings go to <root>/<index>.json."""
    run = RunDir(root)
    with join(run, index, MeshShape(shard=WORLD), start_s=30, wait_s=30) as mesh:
        found: dict[str, object] = {
            "sum": mesh.sum(torch.tensor([1.0 * index, 1.0])).tolist(),
            "max": mesh.max(torch.tensor([index])).tolist(),
            "any": [mesh.any(False), mesh.any(index == 1)],
            "gather": mesh.gather(torch.full((index,), float(index))).tolist(),
            "empty": mesh.gather(torch.zeros(0)).tolist(),
        }
        assert mesh.dense is not None
        for compute in (torch.float32, torch.bfloat16):
            root_module = nn.Sequential(Block(), Block())
            wide = [b.gate for b in root_module] if compute == torch.bfloat16 else []  # type: ignore[union-attr]
            for gate in wide:
                shard(gate, mesh.dense, compute=torch.float32, master=torch.float32)  # type: ignore[arg-type]
            for module in (*root_module, root_module):
                shard(module, mesh.dense, compute=compute, master=torch.float32)
            x = torch.arange(5.0).add(index).view(1, 5)
            root_module(x).sum().backward()
            grad = root_module[0].weight.grad  # type: ignore[union-attr]
            found[f"grad {compute}"] = full(grad).tolist()  # type: ignore[arg-type]
            found[f"dtype {compute}"] = [str(grad.dtype), str(local(grad).dtype), str(root_module[0].seen[0])]  # type: ignore[union-attr, index, arg-type]
        scale = Scale()
        shard(scale, mesh.dense, compute=torch.bfloat16, master=torch.float32)
        scale(torch.tensor([256.0, 1.0, 0.0][index], dtype=torch.bfloat16)).backward()
        found["257"] = full(scale.weight.grad).tolist()  # type: ignore[arg-type]
    (root / f"{index}.json").write_text(json.dumps(found))


def test_ranks_meet_sum_and_gather(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    run.announce(STORE, host="127.0.0.1", port=1)  # a killed trainer's, where nobody listens
    code = f"from pathlib import Path; from tests.distributed.test_mesh import rank; rank(Path({str(tmp_path)!r}), %d)"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, "-c", code % i], env=environment) for i in range(WORLD)]
    assert [p.wait(90) for p in processes] == [0] * WORLD
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(WORLD)]
    assert found[0] == found[1] == found[2]
    assert found[0]["sum"] == [3, 3] and found[0]["max"] == [2] and found[0]["any"] == [False, True]
    assert found[0]["gather"] == [1, 2, 2] and found[0]["empty"] == []

    whole = nn.Sequential(Block(), Block())
    for index in range(WORLD):
        whole(torch.arange(5.0).add(index).view(1, 5)).sum().backward()
    expected = whole[0].weight.grad
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(torch.tensor(found[0]["grad torch.float32"]), expected, rtol=1e-6, atol=1e-5)
    assert found[0]["dtype torch.float32"] == ["torch.float32"] * 3
    # Reduced and kept in float32, computed in bfloat16.
    torch.testing.assert_close(torch.tensor(found[0]["grad torch.bfloat16"]), expected, rtol=2e-2, atol=2e-2)
    assert found[0]["dtype torch.bfloat16"] == ["torch.float32", "torch.float32", "torch.bfloat16"]
    assert found[0]["257"] == [257] * 3, "bfloat16 would have made 256 of it"


def test_the_store_listens_on_the_jobs_interface_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    code = (
        "import sys; from pathlib import Path; from prl.distributed import mesh; from prl.transport.run_dir import RunDir\n"
        "store = mesh._open_store(RunDir(Path(sys.argv[1])), '127.0.0.1')\n"
        "print(open('/proc/net/tcp').read() + open('/proc/net/tcp6').read())"
    )
    out = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60, check=True).stdout
    address = run.address(STORE)
    assert address is not None
    port = f"{address['port']:04X}"
    listening = [line.split()[1] for line in out.splitlines() if f":{port} " in line and " 0A " in line]
    assert listening == [f"0100007F:{port}"]


def test_an_absent_rank_0_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    with pytest.raises(TimeoutError, match="trainer-store did not announce itself"):
        join(run, 1, MeshShape(shard=2), start_s=0.1, wait_s=1)
    run.announce(STORE, host="127.0.0.1", port=1)
    with pytest.raises(TimeoutError, match=r"announced 127.0.0.1:1, which did not answer within 0.1 s"):
        join(run, 1, MeshShape(shard=2), start_s=0.1, wait_s=1)


def test_one_rank_needs_nobody(tmp_path: Path) -> None:
    with join(RunDir(tmp_path), 0, MeshShape(), start_s=0, wait_s=0) as mesh:
        x = torch.tensor([1.0, 2.0])
        assert mesh.sum(x) is x and mesh.gather(x) is x and mesh.any(True) and not mesh.any(False)
        assert not torch.distributed.is_initialized() and list(tmp_path.iterdir()) == []
