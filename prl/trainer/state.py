"""What the trainer carries from step to step: the policy, its optimizer, the counters; built, published, saved and loaded."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from prl.config.schema import Optim, RunConfig
from prl.distributed.fsdp import full, shard
from prl.distributed.mesh import Mesh
from prl.kernels import lm_head
from prl.kernels.weights import weights_changed
from prl.layers.moe import Experts, set_precision
from prl.models.base import ForwardInput, ForwardOutput, Model
from prl.models.hf import load_hf
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec
from prl.trainer import optim
from prl.trainer.checkpoint import CheckpointError

# DCP says so at every call without a process group; that is how one rank runs.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Policy(nn.Module):
    """A model and its LM head in one forward, so that sharding and casting cover both.

    Legend: N rows whose logits are wanted.
    """

    def __init__(self, model: Model, chunk: int):
        super().__init__()
        self.model, self.chunk = model, chunk

    def forward(
        self, x: ForwardInput, rows_N: Tensor, labels_N: Tensor, temperature_N: Tensor
    ) -> tuple[Tensor, Tensor, ForwardOutput]:
        """(logprob [N] of the labels at the temperature, entropy [N], the model's output)."""
        out = self.model(x)
        hidden_ND = out.hidden_TD.index_select(0, rows_N)
        logprob_N, entropy_N = lm_head.logprobs(hidden_ND, self.model.lm_head_weight, labels_N, temperature_N, chunk=self.chunk)
        return logprob_N, entropy_N, out


class TrainState:
    """Parameters are masters, float32 or float64; the forward sees them in `model.dtype`.

    Counters: `step` optimizer steps done, `version` of the weights published for it, `lineage` of the run, `skipped` steps.
    """

    def __init__(self, model: Model, config: RunConfig, optim_config: Optim, mesh: Mesh):
        self.spec, self.mesh, self.optim = model.spec, mesh, optim_config
        self.step = self.version = self.skipped = self.lineage = 0
        dtype = getattr(torch, config.model.dtype)
        meta = build(model.spec, dtype=dtype, device="meta")
        self.published = {name: t.dtype for name, t in meta.state_dict().items()}
        """Types of the weights that engines get."""
        set_precision(model, config.trainer.precision)
        fp8 = {n: m for n, m in model.named_modules() if isinstance(m, Experts) and m.precision == "fp8"}
        masters = {f"{n}.{p}": master_dtype(config) for n, m in fp8.items() for p, _ in m.named_parameters()}
        self.dtypes = self.published | masters  # FP8 is quantised from the masters themselves
        frozen = [re.compile(p) for p in config.model.frozen]
        for name, p in model.named_parameters():
            p.requires_grad_(not any(f.fullmatch(name) for f in frozen))
        model.recompute = config.trainer.recompute
        self.policy = Policy(model, config.trainer.lm_head_chunk)
        if mesh.data is not None:
            wide = [
                m
                for n, m in model.named_modules()
                if any(self.dtypes[f"{n}.{p}"] != dtype for p, _ in m.named_parameters(recurse=False))
            ]
            shard(self.policy, model.layers, wide, mesh.data, compute=dtype, master=master_dtype(config), fp8=fp8.values())
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.biases = [t for n, t in model.state_dict().items() if n.endswith("e_score_correction_bias")]
        """The routers' correction biases, in MoE order."""
        self.optimizer = optim.make(optim_config, self.params.values())

    @property
    def model(self) -> Model:
        return self.policy.model

    def forward(
        self, x: ForwardInput, rows_N: Tensor, labels_N: Tensor, temperature_N: Tensor
    ) -> tuple[Tensor, Tensor, ForwardOutput]:
        """`Policy.forward` in `model.dtype`; gradients arrive in the masters' type."""
        args = (x, rows_N, labels_N, temperature_N)
        casts = (
            {f"model.{n}": p.to(self.dtypes[n]) for n, p in self.model.named_parameters() if p.dtype != self.dtypes[n]}
            if self.mesh.data is None
            else {}
        )
        return torch.func.functional_call(self.policy, casts, args) if casts else self.policy(*args)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of the weights as the forward sees them; a collective, so every rank goes through it."""
        for name, t in self.model.state_dict().items():
            yield name, full(t.detach()).to(self.published[name])

    def join_gathering(self) -> None:
        """What the other ranks do while rank 0 goes through `tensors`."""
        for _ in self.tensors():
            pass

    def whole_model(self) -> Model:
        """The model itself on one rank, else on rank 0 an unsharded copy of it; a collective."""
        if self.mesh.world == 1:
            return self.model
        if not self.mesh.main:
            self.join_gathering()
            return self.model
        copy = build(self.spec, dtype=next(iter(self.params.values())).dtype, device=self.mesh.device)
        copy.load_state_dict(dict(self.tensors()))
        return copy

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, counters and random state with torch.distributed.checkpoint; a collective.

        Rank 0 calls it once the folder above exists.
        """
        self.mesh.barrier()
        dcp.save(self._state(), checkpoint_id=folder, no_dist=self.mesh.world == 1)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, bit for bit. CheckpointError where it is of another model or optimizer.

        The files must be verified before: DCP's .metadata is a pickle.
        """
        state = self._state()
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        mine = f"random.{self.mesh.rank}"
        if mine not in stored:  # saved by fewer ranks
            del state[mine]
        problems = [
            f"{name}: {_kind(state.get(name))} here, {_kind(stored.get(name))} in the checkpoint"
            for name in sorted(state.keys() | stored.keys())
            if not name.startswith("random.") and _kind(state.get(name)) != _kind(stored.get(name))
        ]
        if problems:
            shown = "\n  ".join([*problems[:10], *([f"… and {len(problems) - 10} more"] if len(problems) > 10 else [])])
            raise CheckpointError(f"{folder}: saved by another model or optimizer than this configuration's:\n  {shown}")
        dcp.load(state, checkpoint_id=folder, no_dist=self.mesh.world == 1)
        weights_changed()
        self.step, self.version, self.skipped = state["counters"].tolist()
        if mine in state:
            torch.set_rng_state(state[mine])

    def _state(self) -> dict[str, Tensor]:
        state = {f"model.{name}": t.detach() for name, t in self.model.state_dict().items()}
        for name, p in self.params.items():
            state |= {f"optimizer.{name}.{key}": t for key, t in self.optimizer.state[p].items()}
        state["counters"] = torch.tensor([self.step, self.version, self.skipped])
        state[f"random.{self.mesh.rank}"] = torch.get_rng_state()
        return state


def _kind(t: object) -> str:
    if isinstance(t, Tensor):
        return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
    if isinstance(t, TensorStorageMetadata):
        return f"{str(t.properties.dtype).removeprefix('torch.')} {list(t.size)}"
    return "nothing" if t is None else type(t).__name__


def master_dtype(config: RunConfig) -> torch.dtype:
    return torch.promote_types(getattr(torch, config.model.dtype), torch.float32)


def make_model(config: RunConfig, mesh: Mesh, path: Path | None, *, filled: bool = True) -> Model:
    """The model of masters: from a Hugging Face folder, else `model.architecture` with weights drawn from the seed.

    With `filled` false its values are not set: a checkpoint follows.
    """
    dtype = master_dtype(config)
    if path is not None and filled:
        return load_hf(path, dtype=dtype, device=mesh.device)
    model = build(read_spec(path or config.model.architecture or {}), dtype=dtype, device=mesh.device)
    if filled:
        init_weights(model, config.run.seed)
    return model
