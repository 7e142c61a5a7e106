"""The optimizer step on a GPU beside the same step on the CPU's reference, in bf16 and with the experts in FP8."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from prl.config.mesh import MeshShape
from prl.distributed.mesh import Mesh, lay_out
from prl.samples import pack
from prl.trainer.step import Stepper
from tests.trainer.helpers import state_of
from tests.trainer.test_fp8 import fp8_config, reversed_words

pytestmark = pytest.mark.gpu


def losses(device: str, precision: str, steps: int = 20, mesh: Mesh | None = None) -> list[float]:
    c = fp8_config(precision, optim={"lr": 3e-3})
    stepper = Stepper(state_of(c, mesh or Mesh(0, 1, torch.device(device))), c.trainer, steps)
    rng = np.random.default_rng(0)
    return [stepper(pack(reversed_words(rng, 32), step=i, budget=4096, ranks=1)[0]).loss for i in range(1, steps + 1)]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_gpu_learns_as_the_reference_does(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = losses("cuda", precision)
    monkeypatch.setenv("PRL_KERNELS", "reference")
    cpu = losses("cpu", precision)
    assert abs(gpu[0] / cpu[0] - 1) < 0.01, "the first forward"
    assert abs(np.mean(gpu[-5:]) / np.mean(cpu[-5:]) - 1) < 0.05


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_step_is_the_same_bits_again(precision: str) -> None:
    assert losses("cuda", precision, 5) == losses("cuda", precision, 5)


@pytest.fixture
def sharded() -> Iterator[Mesh]:
    """A group of one rank, over which FSDP2 shards."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield lay_out(MeshShape(), 0, torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fsdp_on_one_gpu_trains_the_same_bits(precision: str, sharded: Mesh) -> None:
    assert losses("cuda", precision, mesh=sharded) == losses("cuda", precision)
