"""What the trainer carries from step to step: the policy, its optimizer, the counters; built, published, saved and loaded."""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.utils.stateless import _reparametrize_module

from prl.config.named import SetupError
from prl.config.schema import INDEXER, Optim, RunConfig
from prl.distributed.mesh import Mesh
from prl.distributed.sharded import full
from prl.kernels import lm_head
from prl.kernels.weights import gather_as_fp8, weights_changed
from prl.layers.moe import Experts
from prl.models import lora, precision
from prl.models.base import ForwardInput, ForwardOutput, Model
from prl.models.bitwise import fix_order
from prl.models.compile import compile_blocks
from prl.models.hf import read_hf
from prl.models.offload import Offload
from prl.models.parallelize import parallelize, share_rows, split_experts, whole
from prl.models.recompute import recompute
from prl.models.registry import build, draw
from prl.models.spec import read_spec
from prl.trainer import optim
from prl.trainer.checkpoint import CheckpointError
from prl.trainer.muon import matrices

# DCP says so at every call without a process group; that is how one rank runs.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


UNREAD = {
    *("_name_or_path", "architectures", "dtype", "quantization_config", "torch_dtype", "transformers_version", "use_cache"),
    *("attention_dropout", "initializer_range", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Keys of config.json that no forward reads."""


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

    def __init__(self, config: RunConfig, optim_config: Optim, mesh: Mesh, start: Path | None = None, *, filled: bool = True):
        """The weights of a Hugging Face folder, else those of `model.architecture` drawn from the seed; with `filled` false
        none are set: a checkpoint follows. No rank ever holds more than its own part and one tensor."""
        self.spec, self.mesh, self.optim = read_spec(start or config.model.architecture or {}), mesh, optim_config
        self.step = self.version = self.skipped = self.lineage = 0
        dtype = getattr(torch, config.model.dtype)
        self.published = {n: t.dtype for n, t in build(self.spec, dtype=dtype, device="meta").state_dict().items()}
        """Types of the weights that engines get."""
        model = build(self.spec, dtype=master_dtype(config), device="meta")
        self.fp8 = precision.trainer_layers(config, model)
        """Layers that compute in FP8."""
        self.coded = precision.weights_of(model, precision.engine_layers(config, model))
        """Weights that engines get as FP8."""
        precision.set_fp8(model, self.fp8)
        fp8 = {n: m for n, m in model.named_modules() if isinstance(m, Experts) and m.precision == "fp8"}
        masters = {f"{n}.{p}": master_dtype(config) for n, m in fp8.items() for p, _ in m.named_parameters()}
        self.dtypes = self.published | masters  # experts in FP8 are quantised from the masters themselves
        for name, p in model.named_parameters():
            p.requires_grad_(not any(re.fullmatch(pattern, name) for pattern in config.model.frozen))
        for pattern in config.model.frozen:
            if pattern != INDEXER and not any(re.fullmatch(pattern, name) for name, _ in model.named_parameters()):
                raise SetupError(f"model.frozen: {pattern!r} matches no parameter, such as model.layers.0.mlp.gate_proj.weight")
        if not any(p.requires_grad for p in model.parameters()):
            raise SetupError(
                f"model.frozen: {', '.join(config.model.frozen)} freezes every parameter; nothing is left to train"
            )
        split_experts(model, mesh, config.trainer.mesh)
        if config.run.bitwise:
            fix_order(model, mesh.device)
        share_rows(model, mesh)
        self.adapted = lora.adapt(model, config.trainer.lora) if config.trainer.lora else {}
        """Name → scale of the weights that have adapters."""
        self.dtypes |= {name + x: self.dtypes[name] for name in self.adapted for x in (lora.A, lora.B)}
        if config.trainer.compile:
            compile_blocks(model)
        recompute(model, config.trainer.recompute, config.trainer.recompute_targets)
        self.activations = Offload(mesh.device, n) if (n := config.trainer.offload_activations) else None
        if self.activations is not None:
            self.activations.wrap(model)
        self.policy = Policy(model, config.trainer.lm_head_chunk)
        offload, keep = config.trainer.offload, config.trainer.keep_gathered
        on_host, types, master = offload == "parameters", self.dtypes, master_dtype(config)
        parallelize(self.policy, model, mesh, types, master, offload=on_host, keep_gathered=keep)
        self._materialise(torch.device("cpu") if on_host else mesh.device)
        if filled:
            weights = self.weights()
            base = {n: weights[n] for n in self.published}
            if start is not None:
                read_hf(start, self.spec, base)
            else:
                draw(self.spec, base, config.run.seed)
            lora.draw(self.adapted, weights, config.run.seed)
        if mesh.dense is not None:
            for name, module in fp8.items():
                if not any(adapted.startswith(f"{name}.") for adapted in self.adapted):  # these are added to before
                    gather_as_fp8(module, mesh.shape.expert_fsdp)
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.biases = [t for n, t in model.state_dict().items() if n.endswith("e_score_correction_bias")]
        """The routers' correction biases, in MoE order."""
        self.optimizer = optim.make(optim_config, self.params, matrices=matrices(model), device=mesh.device, offload=offload)

    def _materialise(self, masters: torch.device) -> None:
        """Parameters on `masters`, buffers where the forward runs; without values."""
        self.policy.to_empty(device=masters)
        for module in self.policy.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.mesh.device)

    @property
    def model(self) -> Model:
        return self.policy.model

    @contextmanager
    def computing(self) -> Iterator[Policy]:
        """The policy in `model.dtype`, for forward and backward (which may compute parts again); not for updates.

        Gradients arrive in the masters' type. FSDP casts by itself; else every weight is cast once, here.
        """
        if self.mesh.dense is not None:
            yield self.policy
            return
        device = self.mesh.device
        casts = {
            f"model.{n}": p.to(device, self.dtypes[n])
            for n, p in self.model.named_parameters()
            if (p.device, p.dtype) != (device, self.dtypes[n])
        }
        with _reparametrize_module(self.policy, casts):
            yield self.policy

    def weights(self) -> dict[str, Tensor]:
        """The model's own tensors, under FSDP as parts of whole ones: writing to them writes the model."""
        return {n: whole(self.model, self.mesh, n, t.detach()) for n, t in self.model.state_dict().items()}

    def parts(self, types: Mapping[str, torch.dtype] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of the weights in `types`, by default in `model.dtype`; under FSDP this rank's parts, but those that
        adapters are merged into are whole. A collective, so every rank goes through it."""
        weights = self.weights()
        for name, dtype in (types or self.published).items():
            if name in self.adapted:
                w, a, b = (full(weights[n]).to(self.dtypes[name]) for n in (name, name + lora.A, name + lora.B))
                yield name, lora.merged(w, a, b, self.adapted[name]).to(dtype)
            else:
                yield name, weights[name].to(dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As `parts`, but all of them whole; a collective."""
        for name, t in self.parts():
            yield name, full(t)

    def transfer(self) -> Iterator[tuple[str, Tensor]]:
        """As `tensors`, but the weights that engines run in FP8 as codes and scales (`prl.models.precision.coded`), quantised
        from what this trainer's own forward quantises or multiplies by; a collective."""
        coded = set(self.coded)
        for name, t in self.parts(self.published | {n: self.dtypes[n] for n in coded}):
            whole = full(t)
            if name not in coded:
                yield name, whole
            elif self.mesh.main:
                yield from precision.coded(name, whole)

    @staticmethod
    def join_gathering(tensors: Iterator[tuple[str, Tensor]]) -> None:
        """What the other ranks do with `tensors` or `transfer` while rank 0 goes through it."""
        deque(tensors, maxlen=0)

    def whole_model(self) -> Model:
        """The model itself on one rank, else on rank 0 an unsharded copy of it; a collective."""
        if self.mesh.world == 1:
            return self.model
        if not self.mesh.main:
            self.join_gathering(self.tensors())
            return self.model
        copy = build(self.spec, dtype=next(iter(self.params.values())).dtype, device=self.mesh.device)
        copy.load_state_dict(dict(self.tensors()))
        return copy

    def reads(self) -> dict[str, Any]:
        """How the forward reads the weights, as far as their shapes do not say it: config.json, and the adapters' scales."""
        return {k: v for k, v in self.spec.raw.items() if k not in UNREAD} | ({"lora": self.adapted} if self.adapted else {})

    def load(self, folder: Path) -> None:
        """Read what torch.distributed.checkpoint wrote of `saved`, bit for bit, from whatever mesh; a collective.

        CheckpointError on every rank where it is of another model or optimizer, or cannot be read. The files must be verified
        before: DCP's .metadata is a pickle.
        """
        state = self.saved()
        with self.mesh.agree():
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
            mend = "go on with the configuration that it was saved by, or start a new run"
            raise CheckpointError(
                f"{folder}: saved by another model or optimizer than this configuration's; {mend}:\n  {shown}"
            )
        try:
            dcp.load(state, checkpoint_id=folder, no_dist=self.mesh.world == 1)
        except dcp.CheckpointException as e:  # DCP has every rank raise it
            raise CheckpointError(f"{folder}: cannot be read: {failures(e)}") from e
        weights_changed()
        self.step, self.version, self.skipped = state["counters"].tolist()
        if mine in state:
            torch.set_rng_state(state[mine])

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint holds: weights, optimizer, counters and random state, the tensors themselves, this rank's parts."""
        state = {f"model.{name}": t for name, t in self.weights().items()}
        for name, p in self.params.items():
            for key, t in self.optimizer.state[p].items():
                state[f"optimizer.{name}.{key}"] = whole(self.model, self.mesh, name, t) if t.dim() else t
        state["counters"] = torch.tensor([self.step, self.version, self.skipped])
        state[f"random.{self.mesh.rank}"] = torch.get_rng_state()
        return state


def failures(e: dcp.CheckpointException) -> str:
    """What failed on which rank."""
    return "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in sorted(e.failures.items()))


def _kind(t: object) -> str:
    if isinstance(t, Tensor):
        return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
    if isinstance(t, TensorStorageMetadata):
        return f"{str(t.properties.dtype).removeprefix('torch.')} {list(t.size)}"
    return "nothing" if t is None else type(t).__name__


def master_dtype(config: RunConfig) -> torch.dtype:
    return torch.promote_types(getattr(torch, config.model.dtype), torch.float32)
