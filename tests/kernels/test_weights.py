"""FP8 copies of weights: never stale, quantised once a change, gathered as FP8."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from prl.distributed.fsdp import shard
from prl.distributed.sharded import full
from prl.kernels import weights
from prl.kernels.checks import ArgumentError
from prl.kernels.experts import experts
from prl.kernels.quantise import quantise_blocks
from prl.kernels.weights import StaleWeightError, gather_as_fp8, quantised, weights_changed
from prl.layers.moe import Experts

WORLD = 2


def adam(w):
    w.grad = torch.ones_like(w)
    torch.optim.AdamW([w], lr=0.1).step()


def sgd_foreach(w):
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.1, foreach=True).step()


def in_place(w):
    with torch.no_grad():
        w.mul_(2)


def load(w):
    holder = nn.ParameterList([w])
    holder.load_state_dict({"0": torch.randn_like(w)})


def data(w):
    w.data.mul_(2)


def data_replaced(w):
    w.data = torch.randn_like(w)


def numpy(w):
    w.detach().numpy()[:] = 3


def negated(w):
    w.data.neg_()  # of an even number of signs nothing is left in an exclusive or


def experts_swapped(w):
    w.data.copy_(w.data.flip(0).clone())


def same_address(w):
    """New storage where the old one was, as an allocator gives it."""
    memory = w.detach().numpy().copy()
    w.data = torch.from_numpy(memory)
    quantised(w)
    memory *= 2
    w.data = torch.from_numpy(memory)


def in_inference_mode(w):
    with torch.inference_mode():
        w.mul_(2)


def told(change):
    def both(w):
        change(w)
        weights_changed()

    return both


SEEN = [adam, sgd_foreach, in_place, load, data_replaced, same_address, in_inference_mode, told(data), told(numpy)]
UNSEEN = [data, numpy, negated, experts_swapped]


@pytest.mark.parametrize("change", SEEN)
def test_after_a_change_the_copy_is_new(change):
    w = nn.Parameter(torch.randn(2, 128, 128))
    before = quantised(w)
    assert quantised(w) is before, "once a change, not once a forward"
    change(w)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(quantised(w).plain, quantise_blocks(w.detach()), strict=True))


@pytest.mark.parametrize("change", [*SEEN, *UNSEEN])
def test_checking_finds_what_nobody_said(change, monkeypatch):
    monkeypatch.setenv("PRL_CHECK_WEIGHTS", "1")
    w = nn.Parameter(torch.randn(2, 128, 128))
    quantised(w)
    change(w)
    if change in UNSEEN:
        with pytest.raises(StaleWeightError, match=r"\[2, 128, 128\].*call prl.kernels.weights.weights_changed"):
            quantised(w)
    else:
        assert torch.equal(quantised(w).plain[1], quantise_blocks(w.detach())[1])


def test_a_weight_that_was_turned_where_it_lies_is_not_found_as_it_was():
    w = nn.Parameter(torch.randn(2, 128, 128))
    quantised(w)
    w.data = w.data.transpose(1, 2)
    with pytest.raises(ArgumentError, match="quantise_blocks: w_ENK must be contiguous"):
        quantised(w)


def test_weights_made_in_inference_mode_are_quantised_as_they_are():
    with torch.inference_mode():
        w = torch.randn(2, 128, 128)
        quantised(w)
        w.mul_(3)
        assert torch.equal(quantised(w).plain[1], quantise_blocks(w)[1])


def test_copies_are_not_saved_with_their_weight(tmp_path):
    w = nn.Parameter(torch.randn(2, 128, 128))
    quantised(w)
    torch.save({"w": w}, tmp_path / "w.pt")
    assert torch.equal(torch.load(tmp_path / "w.pt")["w"], w) and not vars(w)


def test_the_transposed_copy_is_that_of_the_transposed_weight():
    w = torch.randn(2, 256, 128)
    codes, scales = quantised(w).transposed
    expected = quantise_blocks(w.transpose(1, 2).contiguous())
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scales, expected[1])


def test_a_weight_is_quantised_once_a_step_whatever_the_micro_batches(monkeypatch):
    calls = []
    monkeypatch.setattr(weights, "quantise_blocks", lambda w: calls.append(w.shape) or quantise_blocks(w))
    module = Experts(2, 128, 128)
    for p in module.parameters():
        nn.init.normal_(p, std=0.1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            step(module, torch.randn(5, 128))
        optimizer.step()
    assert len(calls) == 2 * 2


def step(module, x):
    ids = torch.arange(len(x))[:, None] % 2
    y = experts(x, ids, torch.ones(len(x), 1), module.gate_up_proj, module.down_proj, precision="fp8")
    y.square().sum().backward()
    return y


def rank(folder: Path, index: int) -> None:
    """Two steps of two micro-batches on sharded experts; every rank has the whole batch, and half of it as its own."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=index, world_size=WORLD)
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)

    class Layer(Experts):
        def forward(self, x):  # type: ignore[override]
            ids = torch.arange(len(x))[:, None] % 2
            return experts(x, ids, torch.ones(len(x), 1), self.gate_up_proj, self.down_proj, precision="fp8")

    whole, sharded = Layer(4, 128, 128), Layer(4, 128, 128)
    for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
        nn.init.normal_(a, std=0.1)
        b.data.copy_(a)
    root = nn.Sequential(sharded)
    shard(sharded, mesh, compute=torch.float32, master=torch.float32)
    shard(root, mesh, compute=torch.bfloat16, master=torch.float32)
    gather_as_fp8(sharded, WORLD)
    gathered = []
    post = weights.ShardedWeight.fsdp_post_all_gather

    def spy(self, outputs, *args, **kwargs):
        gathered.extend(o.dtype for o in outputs)
        return post(self, outputs, *args, **kwargs)

    weights.ShardedWeight.fsdp_post_all_gather = spy  # type: ignore[method-assign]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, sharded)]
    for _ in range(2):
        for _ in range(2):
            x = torch.randn(WORLD * 40, 128).bfloat16()
            expected = whole(x)
            expected.float().square().sum().backward()
            mine = root(x[index * 40 : index * 40 + 40])
            mine.float().square().sum().backward()
            assert torch.equal(mine, expected[index * 40 : index * 40 + 40])
        for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
            difference = (full(b.grad) - a.grad).norm() / a.grad.norm()
            assert b.grad.dtype == torch.float32 and difference < 0.05, difference  # columns share other blocks
            a.grad.copy_(full(b.grad))
        for o in optimizers:
            o.step()
            o.zero_grad()
        for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(full(b.detach()), a.detach(), rtol=1e-6, atol=1e-7)
            with torch.no_grad():
                a.copy_(full(b.detach()))
    assert set(gathered) == {torch.uint8, torch.float32}

    def scaled():
        with torch.no_grad():
            for p in sharded.parameters():
                p.mul_(1.5)

    def scaled_shards():
        with torch.no_grad():
            for p in sharded.parameters():
                p.to_local().mul_(1.5)

    def loaded():
        sharded.load_state_dict({name: -p for name, p in sharded.state_dict().items()})

    def assigned():
        sharded.load_state_dict({name: -2 * p for name, p in sharded.state_dict().items()}, assign=True)

    x = torch.randn(WORLD * 40, 128).bfloat16()
    for change in (scaled, scaled_shards, loaded, assigned, loaded):
        gathered.clear()
        root(x[:40])
        change()
        with torch.no_grad():
            for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
                a.copy_(full(b.detach()))
        assert torch.equal(root(x[:40]), whole(x)[:40]), change.__name__
        assert set(gathered) == {torch.uint8, torch.float32}, change.__name__
    dist.destroy_process_group()


def test_sharded_experts_gather_fp8_and_train_like_whole_ones(tmp_path):
    code = "import sys, pathlib; from tests.kernels.test_weights import rank; rank(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(i)], stderr=subprocess.PIPE, text=True)
        for i in range(WORLD)
    ]
    ends = [p.communicate(timeout=100)[1] for p in ranks]
    assert [p.returncode for p in ranks] == [0] * WORLD, "\n".join(ends)


def test_a_gathered_weight_is_for_the_fp8_kernels_only():
    gathered = weights.CodedWeight(quantised(torch.randn(2, 128, 128)), torch.float32)
    with pytest.raises(NotImplementedError, match="exists in FP8 only: no kernel but the FP8 ones can use it"):
        gathered + 1
