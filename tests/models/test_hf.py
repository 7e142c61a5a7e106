"""Folders: round trips, float8, what is left out, and errors that name tensor, file and shapes."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prl.models import hf
from prl.models.convert import WeightError
from prl.models.hf import from_hf, load_hf, save_hf, to_hf
from prl.models.registry import build, init_weights
from prl.models.spec import ARCHITECTURES, SpecError, read_spec
from tests.models.configs import TINY

GLM = TINY["glm4_moe"] | {"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def fresh(config=GLM, seed=0, dtype=torch.float32):
    model = build(read_spec(config), dtype=dtype)
    init_weights(model, seed)
    return model


def randomise_bias(model):
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture
def folder(tmp_path):
    """A tiny GLM-4.5 in one file with per-expert names."""
    model = randomise_bias(fresh())
    return save_hf(tmp_path / "model", model.spec, model.state_dict().items())


def edit(folder: Path, change) -> None:
    """Apply `change` to the dict of the folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_there_and_back_are_the_same_bits(name, dtype):
    architecture = next(c for c, a in ARCHITECTURES.items() if a == name.split("-")[0])
    model = randomise_bias(fresh(TINY[name] | {"architectures": [architecture]}, dtype=dtype))
    files = dict(to_hf(model.spec, model.state_dict()))
    assert equal(from_hf(model.spec, files), model.state_dict())
    if model.spec.moe_layers:
        layer = model.spec.moe_layers[-1]
        stacked = model.state_dict()[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        half = stacked.shape[1] // 2
        assert torch.equal(files[f"model.layers.{layer}.mlp.experts.3.up_proj.weight"], stacked[3, half:])


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders_there_and_back_are_the_same_bits(tmp_path, shard_bytes, dtype):
    model = randomise_bias(fresh(dtype=dtype))
    save_hf(tmp_path / "m", model.spec, model.state_dict().items(), shard_bytes=shard_bytes)
    again = load_hf(tmp_path / "m", dtype=dtype)
    assert equal(again.state_dict(), model.state_dict())
    assert again.state_dict()[BIAS].dtype == torch.float32
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.") and config["num_nextn_predict_layers"] == 0
    assert again.spec.moe_layers == model.spec.moe_layers
    if shard_bytes == 20_000:
        index = json.loads((tmp_path / "m" / hf.INDEX).read_text())
        sizes = {f: (tmp_path / "m" / f).stat().st_size for f in set(index["weight_map"].values())}
        assert len(sizes) > 3 and sum(sizes.values()) < index["metadata"]["total_size"] * 1.5
        assert max(sizes.values()) < 20_000 + 96 * 64 * 4 + 10_000


def test_the_correction_bias_is_written_as_float32_from_a_narrower_copy(tmp_path):
    model = randomise_bias(fresh())
    state = {k: v.bfloat16() for k, v in model.state_dict().items()}
    save_hf(tmp_path / "m", model.spec, state.items())
    assert load_file(tmp_path / "m" / "model.safetensors")[BIAS].dtype == torch.float32


def test_float8_blocks_are_dequantised(tmp_path):
    """Weights in e4m3 with a scale for each 128x128 block, the last block of a dimension cut."""
    model = randomise_bias(fresh(GLM | {"intermediate_size": 160, "moe_intermediate_size": 136}))
    folder = save_hf(tmp_path / "m", model.spec, model.state_dict().items())
    original = load_file(folder / "model.safetensors")
    expected = {}

    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))

    def quantise(tensors):
        for name in [n for n in tensors if ".mlp." in n and n.endswith("proj.weight") or n.endswith("q_proj.weight")]:
            w = tensors[name]
            rows, columns = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
            scale = torch.rand(rows, columns) + 0.5
            blown_up = (
                scale[:, :, None, None].expand(rows, columns, 128, 128).transpose(1, 2).reshape(rows * 128, columns * 128)
            )
            blown_up = blown_up[: w.shape[0], : w.shape[1]]
            tensors[name] = (w / blown_up).to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scale
            expected[name] = tensors[name].float() * blown_up

    edit(folder, quantise)
    state = dict(to_hf(read_spec(folder), load_hf(folder).state_dict()))
    assert len(expected) > 50
    again = save_hf(tmp_path / "again", read_spec(folder), load_hf(folder).state_dict().items())
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    for name, tensor in state.items():
        assert torch.equal(tensor, expected.get(name, original[name])), name
    assert any(w.shape[0] > 128 for w in expected.values()), "more than one block"


def test_float8_of_a_stacked_tensor():
    """transformers 5 may write the experts of a layer as one float8 tensor with `gate_up_proj_scale_inv`."""
    model = fresh(GLM | {"hidden_size": 160, "moe_intermediate_size": 128})
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weight = model.state_dict()[name].to(torch.float8_e4m3fn)
    scale = torch.rand(8, 2, 2) + 0.5
    out = from_hf(model.spec, model.state_dict() | {name: weight, name + "_scale_inv": scale})[name]
    assert out.dtype == torch.float32
    for e, r, c in [(0, 0, 0), (1, 127, 128), (2, 128, 127), (7, 255, 159)]:
        assert out[e, r, c] == weight.float()[e, r, c] * scale[e, r // 128, c // 128]


def test_float8_without_a_fitting_scale_is_an_error(folder):
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(WeightError, match=rf"{name}_scale_inv .*\[1, 1\].* missing"):
        load_hf(folder)
    edit(folder, lambda t: t.update({name + "_scale_inv": torch.ones(2, 1)}))
    with pytest.raises(WeightError, match=rf"{name}_scale_inv \(model.safetensors\): expected \[1, 1\].* found \[2, 1\]"):
        load_hf(folder)


def test_other_quantisations_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(SpecError, match="awq"):
        load_hf(folder)
    (folder / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(WeightError, match="I8"):
        load_hf(folder)


def test_missing_unexpected_and_misshaped_tensors_are_all_named(folder):
    def break_three(tensors):
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.0.extra.weight"] = torch.zeros(2, 3)
        tensors["lm_head.weight"] = torch.zeros(95, 64)

    edit(folder, break_three)
    with pytest.raises(WeightError) as e:
        load_hf(folder)
    assert sorted(map(str, e.value.problems)) == [
        "lm_head.weight (model.safetensors): expected [96, 64], found [95, 64]",
        "model.layers.0.extra.weight (model.safetensors): expected no such tensor, found [2, 3]",
        "model.layers.1.mlp.experts.3.up_proj.weight (no file): expected [32, 64], found missing",
    ]
    assert str(folder) in str(e.value)


def test_experts_in_both_forms_are_an_error(folder):
    name = "model.layers.2.mlp.experts.down_proj"
    edit(folder, lambda t: t.update({name: torch.zeros(8, 64, 32)}))
    with pytest.raises(WeightError, match=f"{name} .*both forms"):
        load_hf(folder)


def test_layers_for_multi_token_prediction_are_left_out_and_reported(folder, caplog):
    edit(
        folder,
        lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(2), "model.layers.3.enorm.weight": torch.zeros(2)}),
    )
    with caplog.at_level(logging.WARNING):
        load_hf(folder)
    assert "left out 2 tensors (multi-token prediction layer)" in caplog.text and "model.layers.3." in caplog.text


def test_a_tied_head_in_the_file_is_left_out_and_reported(tmp_path, caplog):
    model = fresh(TINY["qwen3"] | {"architectures": ["Qwen3ForCausalLM"]})
    folder = save_hf(tmp_path / "m", model.spec, model.state_dict().items())
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    with caplog.at_level(logging.WARNING):
        load_hf(folder)
    assert "tied to the embedding" in caplog.text


def test_files_that_are_missing_or_damaged_are_named(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="neither"):
        load_hf(tmp_path / "empty")
    (folder / hf.INDEX).write_text('{"weights": {}}')
    with pytest.raises(SpecError, match="weight_map"):
        load_hf(folder)
    (folder / hf.INDEX).write_text('{"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00001\.safetensors"):
        load_hf(folder)
    (folder / hf.INDEX).unlink()
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors: not a readable"):
        load_hf(folder)


def test_writing_refuses_what_is_not_the_whole_model_and_leaves_the_old_folder(folder, tmp_path):
    before = sorted(p.name for p in tmp_path.iterdir()), load_hf(folder).state_dict()
    model = fresh(seed=5)
    state = model.state_dict()
    for broken, words in [
        (list(state.items())[:-1], "1 tensors were not given: lm_head.weight"),
        ([*state.items(), ("extra", torch.zeros(1))], "extra"),
        ([(n, t[:1] if n == "lm_head.weight" else t) for n, t in state.items()], "lm_head.weight"),
        ([*state.items(), next(iter(state.items()))], "or once"),
    ]:
        with pytest.raises(ValueError, match=words):
            save_hf(folder, model.spec, broken)
        assert sorted(p.name for p in tmp_path.iterdir()) == before[0]
        assert equal(load_hf(folder).state_dict(), before[1])


def test_writing_over_a_folder_replaces_it_whole(folder, tmp_path):
    (folder / "stale.txt").write_text("old")
    model = fresh(seed=5)
    save_hf(folder, model.spec, model.state_dict().items(), shard_bytes=30_000)
    assert equal(load_hf(folder).state_dict(), model.state_dict())
    assert not (folder / "stale.txt").exists() and not (folder / "model.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_tokenizer_files_travel_with_the_weights(folder, tmp_path):
    model = fresh()
    source = tmp_path / "tokenizer"
    source.mkdir()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        save_hf(tmp_path / "m", model.spec, model.state_dict().items(), tokenizer_from=source)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    save_hf(tmp_path / "m", model.spec, model.state_dict().items(), tokenizer_from=source)
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}" and (
        tmp_path / "m" / "chat_template.jinja"
    ).read_text() == "x"
    save_hf(tmp_path / "n", model.spec, model.state_dict().items(), tokenizer_from=source / "tokenizer.json")
    assert (tmp_path / "n" / "tokenizer.json").read_text() == "{}"


def test_loading_never_holds_a_second_copy(tmp_path):
    """Allocations of loading, by torch's profiler, stay near the model's size (a mapped file counts as one, but is none)."""
    config = GLM | {"n_routed_experts": 64, "vocab_size": 512}
    model = fresh(config)
    folder = save_hf(tmp_path / "m", model.spec, model.state_dict().items())
    size = sum(t.nbytes for t in model.state_dict().values())
    largest = max(t.nbytes for _, t in to_hf(model.spec, model.state_dict()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loaded = load_hf(folder)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert equal(loaded.state_dict(), model.state_dict())
    peak -= (folder / "model.safetensors").stat().st_size
    assert size <= peak <= size + 3 * largest, (size, largest, peak)
