"""`python -m prl.bench gpu` as far as a CPU goes: every row is made, at sizes of a few blocks; nothing foreign is imported."""

import subprocess
import sys

import pytest
import torch

from prl.bench import gpu, main
from prl.kernels import registry
from prl.monitor.report import measured

SMALL = gpu.Size(
    tokens=128,
    top_k=2,
    experts=4,
    hidden=128,
    inner=128,
    routed=8,
    vocabulary=64,
    head_tokens=16,
    index_queries=4,
    index_keys=32,
    index_heads=2,
    index_width=16,
    index_kept=8,
)


def clock(run):
    """Whether it runs is the point, not for how long."""
    run()
    return 1e-3


@pytest.mark.parametrize("wrong", [["--budget", "-3"], ["--tokens", "0"], ["--json", "/"]])
def test_wrong_arguments_are_told_before_anything_runs(wrong, capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["gpu", *wrong])
    assert wrong[0] in capfd.readouterr().err


def test_every_kernel_has_its_row():
    bench = gpu.Bench(SMALL, device="cpu", square=64, copied=1 << 16)
    bench.clock = clock
    rows = list(bench.rows())
    timed = {r.op for r in rows}
    assert {"grouped_gemm_fp8", "grouped_gemm_weight_fp8", "permute_quantise", "combine", "route", "logprobs"} <= timed
    assert sum(r.op == "grouped_gemm_fp8" for r in rows) == 4 and sum(r.op == "grouped_gemm_weight_fp8" for r in rows) == 2
    whole = next(r for r in rows if r.op == "experts in FP8")
    assert whole.ratio == pytest.approx(1 / 6)
    assert all(r.met is not None for r in rows if r.goal)
    made = [r.as_dict() for r in rows]
    assert {"name", "value", "unit", "ratio", "goal", "met", "verdict", "op", "shape", "backend"} <= made[0].keys()
    assert all((r["value"] or 0) > 0 and r["name"].startswith(r["op"]) for r in made)
    assert [row[4] for row in measured({"rows": made})] == [r.met for r in rows]
    text = gpu.table(rows)
    assert "MISSED" in text and all(r.op in text for r in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without a GPU")
def test_without_a_gpu_it_is_2(capsys):
    assert main(["gpu"]) == 2
    assert registry.no_gpu() in capsys.readouterr().err


def test_it_imports_torch_triton_and_numpy_only():
    code = """
import sys
import importlib.abc
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rich", "typer", "pydantic", "yaml", "psutil", "orjson", "msgspec", "transformers"):
            raise ImportError(name + " is not on a bare node")
sys.meta_path.insert(0, Refuse())
from prl.bench import main
assert main(["gpu"]) in (0, 1, 2)
import prl.bench.cases
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
