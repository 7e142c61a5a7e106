"""What read_spec takes, fills in and refuses."""

import json
import subprocess
import sys

import pytest

from prl.models.spec import ARCHITECTURES, SpecError, UnsupportedArchitecture, read_spec
from tests.models.configs import GLM_4_5_AIR, GLM_5


def test_glm_5_by_the_published_values():
    spec = read_spec(GLM_5)
    assert spec.architecture == "glm_moe_dsa"
    assert (spec.n_experts, spec.top_k, spec.index_topk) == (256, 8, 2048)
    assert spec.moe_layers == tuple(range(3, 78)) and spec.indexed_layers == tuple(range(78))
    assert (spec.rope.dim, spec.rope.theta, spec.rope.interleaved) == (64, 1e6, True)


def test_glm_4_5_air_in_the_old_rope_form():
    spec = read_spec(GLM_4_5_AIR)
    assert spec.moe_layers == tuple(range(1, 46)) and spec.index_topk == 0 and spec.indexed_layers == ()
    assert (spec.rope.dim, spec.rope.theta, spec.rope.kind, spec.rope.interleaved) == (64, 1e6, "default", False)


@pytest.mark.parametrize(
    ("extra", "full"),
    [
        ({"index_topk_freq": 3, "index_skip_topk_offset": 2}, (0, 1, 4)),
        ({"index_topk_pattern": "FSFSS"}, (0, 2)),
        ({"indexer_types": ["full", "shared", "shared", "full", "shared"]}, (0, 3)),
    ],
)
def test_layers_that_share_an_indexer(extra, full):
    """The same lists as transformers' configuration derives."""
    import transformers

    small = GLM_5 | {"num_hidden_layers": 5} | extra
    theirs = transformers.GlmMoeDsaConfig(**small).indexer_types
    assert read_spec(small).indexed_layers == tuple(i for i, t in enumerate(theirs) if t == "full") == full


def test_qwen3_moe_layers_and_expert_names():
    config = GLM_4_5_AIR | {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config |= {"num_hidden_layers": 8, "num_local_experts": 16, "attention_bias": False}
    spec = read_spec(config)
    assert spec.moe_layers == (1, 5, 7) and spec.n_experts == 16
    assert read_spec(config | {"num_experts": 32}).n_experts == 32


def test_nulls_become_defaults_and_other_nulls_stay():
    spec = read_spec(GLM_4_5_AIR | {"num_key_value_heads": None, "initializer_range": None, "bos_token_id": None})
    assert spec.raw["num_key_value_heads"] == 96 and spec.raw["initializer_range"] == 0.02
    assert spec.raw["bos_token_id"] is None


def test_the_model_type_names_the_architecture_where_there_is_no_class():
    config = {k: v for k, v in GLM_4_5_AIR.items() if k != "architectures"}
    assert read_spec(config | {"model_type": "glm4_moe"}).architecture == "glm4_moe"


def test_an_unsupported_architecture_is_refused_with_the_list():
    with pytest.raises(UnsupportedArchitecture) as e:
        read_spec(GLM_5 | {"architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM" in str(e.value) and all(a in str(e.value) for a in ARCHITECTURES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"mlp_bias": True}, ("mlp_bias", "True", "False")),
        ({"hidden_size": "large"}, ("hidden_size", "'large'")),
        ({"vocab_size": None}, ("vocab_size", "None")),
        ({"num_key_value_heads": 7}, ("num_key_value_heads", "7")),
        ({"num_experts_per_tok": 200}, ("num_experts_per_tok", "200", "128")),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, ("yarn", "llama3")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, ("low_freq_factor",)),
        ({"partial_rotary_factor": 0.01}, ("rope", "128")),
        ({"rope_parameters": 5}, ("wrong kind", "int")),
        ({"rope_theta": "far"}, ("wrong kind", "far")),
        ({"partial_rotary_factor": float("inf")}, ("wrong kind", "infinity")),
    ],
)
def test_values_that_prl_does_not_compute_are_refused_by_name(change, words):
    with pytest.raises(SpecError) as e:
        read_spec(GLM_4_5_AIR | change)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_spec(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(SpecError, match="not JSON"):
        read_spec(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="not JSON"):
        read_spec(tmp_path)
    file.write_text("[]")
    with pytest.raises(SpecError, match="expected an object"):
        read_spec(tmp_path)
    file.write_text(json.dumps(GLM_5))
    assert read_spec(tmp_path) == read_spec(file) == read_spec(GLM_5)


def test_the_spec_is_free_of_torch():
    code = "import sys, prl.models.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
