"""The plan from the command line: it fits or says what would, and docs/plan.md is what it says now."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prl.config.load import load
from prl.config.mesh import MeshShape, resolve
from prl.config.schema import RunConfig
from prl.distributed.context import zigzag
from prl.layers.layout import PackedLayout
from prl.models.spec import read_spec
from prl.plan import main, page, work
from prl.plan.activations import buckets, expert_rows, linear_kept, received, sizes
from prl.plan.hardware import HardwareError, find, table
from prl.plan.memory import trainer_memory
from prl.plan.plan import make
from prl.plan.search import changed, shape_for
from prl.plan.weights import weights
from prl.plan.work import Batch, micro_batches, training
from tests.models.configs import GLM_4_5_AIR, GLM_5

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def glm5(*overrides: str) -> RunConfig:
    return load(CONFIGS / "rl_glm5.yaml", overrides, planning=True)


@pytest.mark.parametrize(("name", "nodes"), page.LARGE)
def test_the_large_configurations_fit(name: str, nodes: int) -> None:
    plan = page.of(name, nodes, search=False)
    assert not plan.problems and plan.all_gpus == 8 * nodes
    assert 0 < plan.peak.floor < plan.asked.times.floor <= plan.asked.times.serial


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_page_is_current() -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    assert page.page(text) == text


def test_the_architectures_beside_the_configurations_are_the_published() -> None:
    for name, architecture in (("GLM-5", GLM_5), ("GLM-4.5-Air", GLM_4_5_AIR)):
        assert json.loads((CONFIGS / "models" / name / "config.json").read_text()) == architecture


def test_it_needs_no_torch() -> None:
    code = "import sys, prl.plan.command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_json_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(CONFIGS / "demo.yaml"), "--hardware", "cpu", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["problems"] == [] and record["trainer"]["memory"]["total"] == sum(
        record["trainer"]["memory"]["device"].values()
    )


def test_what_does_not_fit_is_refused_with_the_nearest_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    args = [str(CONFIGS / "rl_glm45_air.yaml"), "--nodes", "4", "trainer.recompute=none"]
    assert main(args) == 2
    said = capsys.readouterr().err
    assert "cannot run: trainer: a rank needs" in said and "nearest that fits: trainer.recompute=" in said
    change = said.split("nearest that fits: ")[1].split()
    assert main([*args, *change]) == 0


def test_fine_tuning_needs_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(CONFIGS / "sft_glm5.yaml"), "--length", "8192", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["batch"]["rollouts"] == 256 and record["step"]["gpus"] == 128 and record["inference"] is None
    assert record["step"]["seconds"] == record["trainer"]["seconds"]["serial"]
    assert "256 conversations of 8,192 tokens" in err and "inference" not in err and "Rollouts" not in err


def test_engines_that_need_more_nodes_are_told_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(CONFIGS / "rl_glm5.yaml")]) == 2
    assert "engines of 16 GPUs (--nodes 28, or" in capsys.readouterr().err
    assert main([str(CONFIGS / "rl_glm5.yaml"), "--nodes", "28"]) == 0


def test_an_engine_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(CONFIGS / "rl_glm5.yaml"), "--nodes", "28", "inference.kv_tokens=2097152"]) == 2
    assert "lower inference.kv_tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["rl_glm5.yaml", "--hardware", "H20"], "neither a file nor one of H100, H200, B200, cpu; did you mean H200?"),
        (["rl_glm5.yaml", "model.path=models/none"], "models/none: no such file or folder"),
        (["rl_glm5.yaml", "trainer.mesh.ep=7"], "expected a divisor"),
        (["rl_glm5.yaml", "--nodes", "17"], "do not share evenly"),
        (["none.yaml"], "no such file"),
    ],
)
def test_bad_input(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(CONFIGS / args[0]), *args[1:]]) == 2
    assert said in capsys.readouterr().err


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(table()["H200"].model_dump(exclude={"name"})))
    assert find(str(file)).name == "mine"
    file.write_text("kind: cuda\nflop: 3\n")
    with pytest.raises(HardwareError, match="flop: Extra inputs"):
        find(str(file))
    file.write_text("[")
    with pytest.raises(HardwareError, match="not a YAML mapping"):
        find(str(file))


def test_work_by_hand() -> None:
    """GLM-5's experts on 128 ranks, from its published sizes alone."""
    config = glm5("trainer.mesh.cp=8", "trainer.mesh.ep=8")
    spec, batch = read_spec(GLM_5), Batch(256, 131072)
    shape = MeshShape(1, 16, 8, 8)
    assert micro_batches(config, shape, batch) == 16
    found = training(spec, config, shape, find("H200"), batch)
    tokens = 256 * 131072 / 128
    routed = 4 * 2 * 75 * tokens * 8 * 3 * 6144 * 2048
    linear = 78 * (6144 * 2048 + 2048 * 64 * 256 + 64 * 256 * 6144) + 3 * 3 * 6144 * 12288 + 75 * 3 * 6144 * 2048
    assert 576 % 128  # so that kv_a_proj_with_mqa stays as it is, and kv_b_proj is read as a matrix
    assert found.flops["fp8"] == pytest.approx(routed + 4 * 2 * tokens * linear)
    none = training(spec, changed(config, {"recompute": "none"}, {}), shape, find("H200"), batch)
    assert none.flops["fp8"] == pytest.approx(found.flops["fp8"] * 3 / 4) and none.useful == found.useful
    # Codes and scales gathered twice, gradients in float32 reduced once, 16 times a step, by an adapter for each GPU of a node.
    experts = 75 * 32 * 3 * 6144 * 2048
    moved = 16 * experts * (2 * (1 + 4 / 128**2) + 4) * 15 / 16
    assert found.network == pytest.approx(moved, rel=0.1) and found.network > moved
    # Twice the ranks between the experts: half of them on each.
    wide = training(spec, config, MeshShape(1, 16, 8, 16), find("H200"), batch)
    assert wide.network < found.network


def test_experts_have_rows_for_the_slots_that_are_theirs() -> None:
    """Two ranks, two of four experts a token: 3 of 4 tokens of each rank come, with 4 of 3 slots on average."""
    raw = GLM_4_5_AIR | {"n_routed_experts": 4, "num_experts_per_tok": 2}
    s = sizes(read_spec(raw), 2, [1024], shared=1, fp8=False, expert_ranks=2, fp8_dispatch=False)
    assert received(s) == 1536 and expert_rows(s) == 2048


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(64,), (40, 8, 16), (4096,)])
def test_buckets_are_those_of_the_ranks_layout(lengths: tuple[int, ...], ranks: int) -> None:
    for rank in range(ranks):
        part: Any = None if ranks == 1 else SimpleNamespace(here_L=zigzag(sum(lengths), ranks)[rank])
        own = [tuple(b.mask_BQS.shape) for b in PackedLayout(lengths, shard=part).buckets]
        assert [(b.b, b.q, b.s) for b in buckets(lengths, ranks, rank)] == own


def test_attention_counts_the_pairs_that_are_computed() -> None:
    """A row of two documents of 2,048: masked pairs too, and once more, since a bucket of so many is computed again."""
    short = ("trainer.pack_tokens=4096", "sampling.max_length=4096", "sampling.max_tokens=1024")
    config = glm5(*short, "trainer.recompute=none", "trainer.mesh.cp=1")
    air = read_spec(GLM_4_5_AIR)
    found = training(air, config, MeshShape(), find("H200"), Batch(2, 2048))
    assert found.flops["attention"] == 2 * 46 * 2 * 2048**2 * 96 * 2 * 128 * (3 + 1)
    # Latent keys are of 576 and values of 512; scores are computed again.
    one = training(read_spec(GLM_5), config, MeshShape(), find("H200"), Batch(1, 2048))
    assert one.flops["attention"] == 2 * 78 * 2048**2 * 64 * ((576 + 512) * 3 + 576)


def test_a_linear_layer_in_fp8_keeps_codes() -> None:
    """Of 200 tokens, in 256 rows by column with a scale for each 128, and of its weight with a scale for each 128 x 128."""
    s = sizes(read_spec(GLM_4_5_AIR), 2, [200], shared=1, fp8=True, expert_ranks=1, fp8_dispatch=False)
    coded = replace(s, coded=frozenset({"self_attn.o_proj"}))
    assert linear_kept(s, "self_attn.o_proj", 512, 1024) == 0
    assert linear_kept(coded, "self_attn.o_proj", 512, 1024) == 256 * 1024 + 2 * 1024 * 4 + 512 * 1024 + 4 * 8 * 4


def test_a_thread_of_a_cpu_hides_nothing() -> None:
    config = load(CONFIGS / "demo.yaml", ["model.dtype=float32"], planning=True)
    spec = read_spec(config.model.architecture or {})
    found = training(spec, config, MeshShape(), find("cpu"), Batch(8, 64))
    t = work.times(found, find("cpu"))
    assert found.flops["float32"] > 0 == found.flops["bf16"]
    assert t.floor == t.serial == t.compute + t.memory + t.network + t.update
    half = training(spec, config, MeshShape(), find("cpu"), Batch(8, 64, scored=0.5))
    head = 2 * 4 * 8 * 32 * spec.hidden_size * spec.vocab_size
    assert found.flops["float32"] - half.flops["float32"] == pytest.approx(head)


def test_gradients_on_the_host_are_there_once() -> None:
    config = load(CONFIGS / "rl_glm5_16.yaml", planning=True)
    spec, shape = read_spec(GLM_5), MeshShape(1, 8, 8, 32)
    held = weights(spec, config, shape)
    memory = trainer_memory(spec, config, shape, find("H200"))
    assert memory.host["gradients"] == sum(w.shard * w.master for w in held if w.trained)
    assert memory.device["gradients"] < memory.host["gradients"] / 10  # one block's, on their way


def test_twice_the_machine_takes_half_the_time() -> None:
    h, config = find("H200"), glm5()
    found = training(read_spec(GLM_5), config, MeshShape(1, 16, 8, 16), h, Batch(256, 131072))
    fast = h.model_copy(update={k: getattr(h, k) * 2 for k in type(h).model_fields if k.endswith("_per_s")})
    fast = fast.model_copy(update={"flops": h.flops.model_copy(update={"bf16": h.flops.bf16 * 2, "fp8": h.flops.fp8 * 2})})
    assert work.times(found, fast).serial == pytest.approx(work.times(found, h).serial / 2)


def test_auto_asks_what_fits() -> None:
    spec = read_spec(GLM_5)
    config = glm5("trainer.mesh.cp=auto", "trainer.mesh.ep=auto")
    old = resolve(config.trainer, spec.n_experts)
    assert shape_for(spec, config, find("cpu")) == old and old.context == 1
    found = shape_for(spec, config, find("H200"))
    assert (
        found.context > 1
        and not make(spec, changed(config, {}, {"cp": found.context, "ep": found.expert}), find("H200")).asked.problem
    )
    assert shape_for(spec, glm5(), find("H200")) == MeshShape(1, 16, 8, 16)
