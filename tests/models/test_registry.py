"""Building on the meta device, counting parameters, and first weights that depend on seed and name alone."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from prl.models.base import Model
from prl.models.registry import build, count_parameters, init_weights
from prl.models.spec import read_spec
from tests.models.configs import GLM_4_5_AIR, GLM_5, TINY

SPEC = read_spec(TINY["glm4_moe"] | {"architectures": ["Glm4MoeForCausalLM"]})


def their_count(name, config):
    """Parameters and router biases of transformers' model, which has no layer for multi-token prediction either."""
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    return sum(t.numel() for t in model.state_dict().values())


def test_glm_4_5_air_has_its_published_size():
    """106B in all, 12B active (arXiv 2508.06471, table 1)."""
    total, active = count_parameters(read_spec(GLM_4_5_AIR))
    assert total == their_count("Glm4Moe", GLM_4_5_AIR)
    assert int(total / 1e9) == 106 and round(active / 1e9) == 12, (total, active)


def test_glm_5_has_its_published_size():
    """744B in all, 40B active (zai-org/GLM-5)."""
    total, active = count_parameters(read_spec(GLM_5))
    assert total == their_count("GlmMoeDsa", GLM_5)
    assert round(total / 1e9) == 744 and round(active / 1e9) == 40, (total, active)


def test_counting_takes_only_the_experts_in_use():
    total, active = count_parameters(SPEC)
    expert = 3 * 64 * 32
    assert total == sum(t.numel() for t in build(SPEC, device="meta").state_dict().values())
    assert total - active == 2 * (8 - 3) * expert + 2 * 96 * 64 + 64, "and embedding, LM head, final norm"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_tensor_is_of_the_type_but_the_correction_bias(dtype):
    model = build(SPEC, dtype=dtype)
    assert isinstance(model, Model)
    for name, tensor in model.state_dict().items():
        wide = torch.promote_types(dtype, torch.float32)
        assert tensor.dtype == (wide if name.endswith("e_score_correction_bias") else dtype), name


def test_first_weights_depend_on_seed_and_name_alone():
    model = build(SPEC)
    init_weights(model, 3)
    state = model.state_dict()
    late = build(SPEC, device="meta").to_empty(device="cpu")
    torch.manual_seed(7)
    init_weights(late, 3)
    assert all(torch.equal(state[k], v) for k, v in late.state_dict().items())
    half = build(SPEC, dtype=torch.bfloat16)
    init_weights(half, 3)
    assert all(torch.equal(state[k].to(v.dtype), v) for k, v in half.state_dict().items())
    fewer = build(read_spec(SPEC.raw | {"num_hidden_layers": 2}))
    init_weights(fewer, 3)
    assert all(torch.equal(state[k], v) for k, v in fewer.state_dict().items())
    other = build(SPEC)
    init_weights(other, 4)
    weight = "model.layers.1.mlp.experts.gate_up_proj"
    assert not torch.equal(other.state_dict()[weight], state[weight])
    assert not torch.equal(state["model.layers.1.self_attn.k_proj.weight"], state["model.layers.1.self_attn.v_proj.weight"])


def test_first_weights_are_of_the_right_size():
    model = build(SPEC)
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan"))
    init_weights(model, 0)
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            assert (tensor == 0).all(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name
        else:
            assert tensor.std().item() == pytest.approx(0.2, rel=0.15) and abs(tensor.mean().item()) < 0.04, name


def test_first_weights_do_not_depend_on_sharding(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole, sharded = build(SPEC), build(SPEC)
        init_weights(whole, 3)
        for module in sharded.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    placed = distribute_tensor(torch.zeros_like(parameter), mesh, [Shard(0)])
                    module._parameters[name] = torch.nn.Parameter(placed)
        init_weights(sharded, 3)
        for name, parameter in sharded.named_parameters():
            assert torch.equal(parameter.full_tensor(), whole.state_dict()[name]), name
    finally:
        torch.distributed.destroy_process_group()
