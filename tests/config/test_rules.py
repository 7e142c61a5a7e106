"""Each cross-field rule: a configuration one change away from a sound one breaks exactly it, and nothing is altered."""

from pathlib import Path
from typing import Any

import pytest

from prl.config.load import _merged
from prl.config.rules import broken_rules
from prl.config.schema import RunConfig

SOUND: dict[str, Any] = {
    "model": {"architecture": {"vocab_size": 8, "max_position_embeddings": 512}},
    "tokenizer": {"characters": "abc", "vocab_size": 8},
    "envs": [{"name": "a", "kind": "calculator"}],
    "sft": {},
    "control": {},
}
DETERMINISTIC = {"run": {"deterministic": True}, "orchestrator": {"synchronous": True}, "inference": {"prefix_cache": False}}


def config(*changes: dict[str, Any]) -> RunConfig:
    tree: Any = SOUND
    for change in changes:
        tree = _merged(tree, change)
    return RunConfig.model_validate(tree)


def test_the_sound_ones_break_none() -> None:
    assert broken_rules(config()) == [] == broken_rules(config(DETERMINISTIC))
    bitwise = {"run": {"bitwise": True}, "trainer": {"ranks": 2, "mesh": {"ep": 1, "cp": 2}}, "launch": {"kernels": "cpu"}}
    assert broken_rules(config(bitwise)) == []


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"run": {"name": "a/b"}}, "run.name", "one folder"),
        ({"run": {"name": ".."}}, "run.name", "one folder"),
        ({"run": {"seed": -1}}, "run.seed", "2^63"),
        ({"model": {"path": "x"}}, "model", "got both"),
        ({"model": {"architecture": None}, "tokenizer": {"vocab_size": None}}, "model", "got neither"),
        ({"model": {"dtype": "float64"}, "trainer": {"precision": "fp8"}}, "trainer.precision", "float64"),
        (
            {"model": {"architecture": {"moe_intermediate_size": 192}}, "inference": {"precision": "fp8"}},
            "inference.precision",
            "for moe_intermediate_size, which is 192; set model.architecture.moe_intermediate_size=256, or bf16",
        ),
        ({"run": {"bitwise": True}, "inference": {"dtype": "bfloat16"}}, "inference.dtype", "expected model.dtype = float32"),
        ({"run": {"bitwise": True}, "trainer": {"compile": True}}, "trainer.compile", "run.bitwise"),
        ({"run": {"bitwise": True}, "trainer": {"lora": {}}}, "trainer.lora", "run.bitwise"),
        ({"run": {"bitwise": True}, "launch": {"kernels": "triton"}}, "launch.kernels", "expected cpu, got triton"),
        ({"run": {"bitwise": True}, "inference": {"precision": "fp8"}}, "inference.precision", "trainer.precision = bf16"),
        (
            {
                "run": {"bitwise": True},
                "trainer": {"precision": "fp8"},
                "inference": {"precision": "fp8", "fp8_layers": [".*experts"]},
            },
            "inference.fp8_layers",
            "expected none, which takes the trainer's; run.bitwise",
        ),
        ({"run": {"bitwise": True}, "trainer": {"ranks": 2}}, "trainer.mesh.ep", "expected 1, got auto; run.bitwise"),
        (
            {"run": {"bitwise": True}, "model": {"dtype": "float64"}, "inference": {"dtype": "float64"}},
            "model.dtype",
            "expected bfloat16 or float32",
        ),
        ({"trainer": {"recompute": "selective", "recompute_targets": []}}, "trainer.recompute_targets", "at least one part"),
        ({"trainer": {"ranks": 6, "mesh": {"cp": 4}}}, "trainer.mesh.cp", "such as 3 or 6"),
        ({"trainer": {"ranks": 2, "mesh": {"ep": 2}}}, "trainer.mesh.ep", "no experts"),
        (
            {"model": {"architecture": {"n_routed_experts": 6}}, "trainer": {"ranks": 4, "mesh": {"ep": 4}}},
            "trainer.mesh.ep",
            "a divisor of the model's 6 experts, such as 3 or 6",
        ),
        (
            {"launch": {"slurm": {"trainer": {"nodes": 2}}}, "transport": {"weights": "filesystem"}, "trainer": {"ranks": 3}},
            "trainer.ranks",
            "a multiple of launch.slurm.trainer.nodes = 2, got 3",
        ),
        (
            {"launch": {"slurm": {"inference": {"nodes": 2}}}, "transport": {"weights": "filesystem"}},
            "inference.replicas",
            "a multiple of launch.slurm.inference.nodes = 2, got 1",
        ),
        ({"launch": {"slurm": {}}}, "transport.weights", "expected filesystem"),
        ({"trainer": {"mesh": {"fp8_dispatch": True}}}, "trainer.mesh.fp8_dispatch", "need trainer.precision fp8, got bf16"),
        (
            {"model": {"dtype": "float32"}, "trainer": {"mesh": {"dispatcher": "deepep"}}},
            "trainer.mesh.dispatcher",
            "deepep sends bfloat16, the forward is in float32",
        ),
        ({"envs": [], "sft": {"data": [{"path": "x"}], "max_length": 512, "stop_at": 0.5}}, "sft.stop_at", "envs is empty"),
        ({"sft": {"data": [{"path": "x"}], "max_length": 512, "roles": []}}, "sft.roles", "such as assistant"),
        ({"sft": {"max_length": 9000}}, "sft.max_length", "at most trainer.pack_tokens = 8192"),
        ({"sft": {"data": [{"path": "x"}], "max_length": 513}}, "sft.max_length", "max_position_embeddings = 512, got 513"),
        ({"sft": {"data": [{"path": "x"}]}}, "sft.max_length", "got none, which is trainer.pack_tokens = 8192"),
        ({"trainer": {"keep_gathered": ["("]}}, "trainer.keep_gathered.0", "regular expression"),
        ({"model": {"frozen": ["a", "("]}}, "model.frozen.1", "regular expression"),
        ({"tokenizer": {"path": "x"}}, "tokenizer", "got both"),
        ({"tokenizer": {"characters": None, "vocab_size": None}}, "tokenizer", "brings no tokenizer"),
        ({"tokenizer": {"characters": "abca"}}, "tokenizer.characters", "'a' more than once"),
        ({"tokenizer": {"vocab_size": 9}}, "tokenizer.vocab_size", "at most"),
        ({"tokenizer": {"characters": None, "path": "x"}}, "tokenizer.vocab_size", "not set"),
        ({"envs": []}, "envs", "at least one"),
        ({"envs": [{"name": "a", "kind": "x"}, {"name": "a", "kind": "y"}]}, "envs.1.name", "each name once"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p", "see evaluation.top_p"),
        ({"sampling": {"top_k": 5}}, "sampling.top_k", "see evaluation.top_k"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature", "cannot reproduce a truncated"),
        ({"sampling": {"temperature": 1e-6}}, "sampling.temperature", "expected 1e-5 to 1e5, got 1e-06"),
        ({"sampling": {"max_tokens": 512}}, "sampling.max_tokens", "below max_length"),
        ({"sampling": {"max_length": 513}}, "sampling.max_length", "max_position_embeddings = 512"),
        ({"inference": {"kv_tokens": 100}}, "inference.kv_tokens", "one sample fits"),
        ({"trainer": {"pack_tokens": 100}}, "trainer.pack_tokens", "one sample fits"),
        ({"orchestrator": {"batch_size": 60}}, "orchestrator.batch_size", "such as 56 or 64"),
        ({"orchestrator": {"group_size": 1}}, "orchestrator.group_size", "at least 2"),
        ({"orchestrator": {"max_in_flight": 4}}, "orchestrator.max_in_flight", "at least group_size"),
        (DETERMINISTIC | {"orchestrator": {}}, "orchestrator.synchronous", "deterministic needs it"),
        (DETERMINISTIC | {"inference": {}}, "inference.prefix_cache", "deterministic needs it"),
        (
            DETERMINISTIC | {"orchestrator": {"synchronous": True, "max_in_flight": 32}},
            "orchestrator.max_in_flight",
            "batch_size",
        ),
        ({"inference": {"record_routes": False}}, "inference.record_routes", "router_replay"),
        ({"trainer": {"replay_selections": True}}, "inference.record_selections", "replay_selections"),
        ({"inference": {"engine": "vllm", "precision": "fp8"}}, "inference.engine", "no FP8 weights yet"),
        ({"inference": {"engine": "vllm", "dtype": "float64"}}, "inference.dtype", "not float64"),
        ({"inference": {"engine": "vllm", "record_selections": True}}, "inference.record_selections", "does not return"),
        ({"inference": {"engine": "vllm", "prefix_cache": False}}, "inference.prefix_cache", "by the prefix cache's blocks"),
        (
            DETERMINISTIC
            | {
                "inference": {"engine": "vllm", "prefix_cache": False, "record_routes": False},
                "trainer": {"router_replay": False},
            },
            "run.deterministic",
            "depend on what it batches",
        ),
        ({"trainer": {"optim": {"adam_lr": 0.1}}}, "trainer.optim.adam_lr", "kind adamw"),
        ({"sft": {"optim": {"kind": "muon", "lr": 0, "adam_lr": 0.1}}}, "sft.optim.adam_lr", "lr 0"),
        ({"trainer": {"optim": {"betas": [0.9, 0.999], "state_dtype": "bfloat16"}}}, "trainer.optim.betas", "stands still"),
        ({"trainer": {"optim": {"momentum": 0.995, "state_dtype": "bfloat16"}}}, "trainer.optim.momentum", "at most 0.99"),
        (
            {"trainer": {"steps": 10, "optim": {"schedule": "wsd", "warmup_steps": 3, "decay_steps": 8}}},
            "trainer.optim.decay_steps",
            "trainer.steps - warmup_steps = 7, got 8",
        ),
        ({"trainer": {"lora": {"targets": []}}}, "trainer.lora.targets", "at least one"),
        ({"trainer": {"lora": {"targets": ["a", "("]}}}, "trainer.lora.targets.1", "regular expression"),
        ({"trainer": {"offload": "parameters", "precision": "fp8"}}, "trainer.offload", "expected none or optimizer"),
        ({"sft": None}, "control", "not set"),
    ],
)
def test_a_broken_rule_is_named(change: dict[str, Any], path: str, says: str) -> None:
    broken = config(change)
    before = broken.model_dump()
    found = broken_rules(broken)
    assert [p for p, _ in found] == [path] and says in found[0][1]
    assert broken.model_dump() == before


def test_rules_of_a_model_that_cannot_be_read_and_of_sampling_that_is_not_done_stay_silent(tmp_path: Path) -> None:
    spread = {"trainer": {"ranks": 4, "mesh": {"ep": 2}}}
    unread = {"model": {"architecture": None, "path": tmp_path}, "tokenizer": {"characters": None, "vocab_size": None}}
    assert [p for p, _ in broken_rules(config(spread))] == ["trainer.mesh.ep"]
    assert broken_rules(config(spread, unread)) == []
    (tmp_path / "config.json").write_text("[1]")
    assert broken_rules(config(spread, unread)) == []
    chats = {"envs": [], "sft": {"data": [{"path": "x"}], "max_length": 64}, "sampling": {"max_length": 4096}}
    assert broken_rules(config(chats, {"trainer": {"pack_tokens": 64}})) == []


def test_every_broken_rule_is_collected() -> None:
    found = broken_rules(config({"run": {"seed": -1}, "sampling": {"top_p": 0.5, "top_k": 3}, "envs": [], "sft": None}))
    assert [p for p, _ in found] == ["run.seed", "envs", "sampling.top_p", "sampling.top_k", "control"]
