"""The same weights give the same logprobs as transformers, and a folder goes there and back bit for bit.

Router selections of both are equal here (the assertion on routes), so the bar of 1e-5 holds for every token.
"""

import pytest
import torch
import transformers
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from prl.layers.layout import PackedLayout
from prl.models.base import ForwardInput
from prl.models.hf import load_hf, save_hf
from prl.models.spec import ARCHITECTURES
from tests.models.configs import TINY

CLASSES = {a: c.removesuffix("ForCausalLM") for c, a in ARCHITECTURES.items()}
LENGTHS = [50, 33, 70, 1, 2]


def their_model(name):
    class_ = CLASSES[name.split("-")[0]]
    torch.manual_seed(0)
    config = getattr(transformers, f"{class_}Config")(**TINY[name])
    model = getattr(transformers, f"{class_}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith("bias"):
                tensor.normal_(0, 0.3)
            elif tensor.dim() == 1:
                tensor.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module", params=sorted(TINY))
def saved(request, tmp_path_factory):
    """(transformers' model, the folder it saved)."""
    model = their_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def our_logprobs(model, tokens, lengths):
    positions = torch.cat([torch.arange(n) for n in lengths])
    out = model(ForwardInput(tokens, positions, PackedLayout(lengths)))
    return (out.hidden_TD @ model.lm_head_weight.T).log_softmax(-1), out


def their_routes(model, tokens, spec):
    """Experts chosen in every MoE layer [T, L, K], sorted, by hooks on transformers' routers."""
    chosen = []
    hooks = [
        model.model.layers[i].mlp.gate.register_forward_hook(lambda m, args, out: chosen.append(out[2].sort(-1).values))
        for i in spec.moe_layers
    ]
    logits = model(tokens[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.log_softmax(-1), torch.stack(chosen, 1) if chosen else None


@torch.no_grad()
def test_logprobs_equal_transformers_for_single_and_packed_documents(saved):
    theirs, folder = saved
    ours = load_hf(folder)
    tokens = torch.randint(0, 96, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    packed, out = our_logprobs(ours, tokens, LENGTHS)
    start = 0
    for n in LENGTHS:
        document = tokens[start : start + n]
        expected, routes = their_routes(theirs, document, ours.spec)
        single, _ = our_logprobs(ours, document, [n])
        torch.testing.assert_close(single, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(packed[start : start + n], expected, atol=1e-5, rtol=0)
        if routes is not None:
            assert torch.equal(out.routes_TLK[start : start + n].sort(-1).values, routes)
        start += n
    assert (out.expert_counts_LE is None) == (not ours.spec.moe_layers)


class NoFloat32(TorchDispatchMode):
    """Records every operation that gives a float32 tensor."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.dtype in (torch.float32, torch.complex64):
                self.seen.append(str(func))
        return out


@torch.no_grad()
def test_a_float64_model_is_float64_throughout(saved):
    _, folder = saved
    tokens = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1))
    model = load_hf(folder, dtype=torch.float64)
    with NoFloat32() as mode:
        wide, out = our_logprobs(model, tokens, [40])
    assert wide.dtype == torch.float64 and mode.seen == []
    narrow, out32 = our_logprobs(load_hf(folder), tokens, [40])
    assert out.routes_TLK is None or torch.equal(out.routes_TLK, out32.routes_TLK)
    torch.testing.assert_close(wide.float(), narrow, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_saved_folder_opens_in_transformers_with_the_same_bits(saved, tmp_path):
    theirs, folder = saved
    ours = load_hf(folder)
    save_hf(tmp_path / "out", ours.spec, ours.state_dict().items(), shard_bytes=50_000)
    again = type(theirs).from_pretrained(tmp_path / "out")
    state = again.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(state[key], tensor), key
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    tokens = torch.arange(20)[None]
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("saved", ["glm4_moe", "qwen3_moe"], indirect=True)
def test_expert_names_of_both_kinds_load_to_the_same_bits(saved, tmp_path):
    theirs, folder = saved
    theirs.save_pretrained(tmp_path, save_original_format=False)
    kinds = []
    for f in (folder, tmp_path):
        with safe_open(f / "model.safetensors", "pt") as opened:
            kinds.append(any(".experts.gate_up_proj" in n for n in opened.keys()))  # noqa: SIM118
    assert kinds == [False, True], "transformers saved both forms"
    apart, fused = load_hf(folder).state_dict(), load_hf(tmp_path).state_dict()
    assert all(torch.equal(apart[k], fused[k]) for k in apart)
