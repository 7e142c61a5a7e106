"""A rank of `bench memory`: `python -m prl.bench.memory_rank SPEC.json INDEX FOLDER` trains and prints one JSON object.

With `tracked` every live tensor is counted and sorted into the plan's categories; without, the process is measured.
"""

from __future__ import annotations

import functools
import gc
import resource
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from prl.bench.live import Live
from prl.bench.trainer_ranks import rollouts
from prl.config.mesh import resolve
from prl.config.schema import RunConfig
from prl.distributed import expert
from prl.distributed.mesh import Mesh, lay_out
from prl.distributed.sharded import local
from prl.kernels import weights
from prl.models import offload
from prl.models.spec import read_spec
from prl.samples import Batch, pack
from prl.trainer import offload as transfer
from prl.trainer import state as states
from prl.trainer import step as steps
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper

TIMEOUT_S = 600.0
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
}
"""What a model is made as to be next to nothing, of the same ops."""


class Sorter(Live):
    """Live bytes by the plan's categories."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name() if hasattr(func, "name") else ""
        if name.startswith("prl::grouped_gemm_weight"):
            self.mark(args[-1], "gradients: new")
        elif name == "prl::logprobs_backward":
            self.mark(out[1], "gradients: new")
        return out

    def watch(self) -> None:
        """Tell tensors apart where they are made."""
        self._within(weights, "quantise_blocks", "parameters: FP8")
        self._within(weights, "transpose_codes", "parameters: FP8")
        self._within(steps, "inputs", "activations: inputs")
        self._within(offload.Stage, "move_out", "activations: offloaded")
        self._within(transfer.Transfer, "_host", "optimizer: transfer")
        self._within(_fsdp_param_group, "foreach_all_gather", "buffers: gather")
        self._within(_fsdp_param_group, "foreach_all_gather_copy_out", "buffers: gather")
        self._within(_fsdp_param_group, "foreach_reduce", "buffers: reduction")
        self._before(_fsdp_param_group, "foreach_reduce", lambda args: self._all(args[1], "gradients: whole"))
        self._after(_fsdp_param.FSDPParam, "init_all_gather_outputs", self._gathered)
        self._after(expert, "_start", lambda args, out: self._all((args[0], out), "buffers: dispatch"))
        self._before(states, "_reparametrize_module", lambda args: self._casts(args[1]))

    def state(self, state: TrainState) -> None:
        for moments in state.optimizer.state.values():
            self._all((local(t) for t in moments.values()), "optimizer: state")
        for p in state.params.values():
            p.register_post_accumulate_grad_hook(lambda p: self.mark(local(p.grad), "gradients: sums"))
        for i, layer in enumerate(state.model.layers):
            layer.register_forward_pre_hook(lambda m, args, i=i: self.place(f"forward of layer {i}"))
            layer.register_forward_hook(functools.partial(self._block, i, i + 1 == len(state.model.layers)))

    def _block(self, i: int, last: bool, module: Any, args: Any, out: Any) -> None:
        if out.x_TD.requires_grad:
            out.x_TD.register_hook(lambda grad: self.place(f"backward of layer {i}"))
        if last:
            self.place("LM head")

    def lap(self, part: str) -> None:
        """At the end of a part of a step."""
        if part == "backward":
            self.place("gradients' casts")
        elif part == "sums":
            self.place("update")
            self.kind = "optimizer: update"
        elif part == "optimizer":
            self.kind = "activations: working"
            self.place("between")

    def _all(self, tensors: Any, kind: str) -> None:
        for t in tensors:
            self.mark(t, kind)

    def _gathered(self, args: Any, out: Any) -> None:
        self._all(args[0].all_gather_outputs, "parameters: gathered")

    def _casts(self, casts: dict[str, Tensor]) -> None:
        self._all(casts.values(), "parameters: copies")
        for t in casts.values():
            if t.requires_grad:
                t.register_hook(lambda grad: self.mark(grad, "gradients: new"))

    def _within(self, owner: Any, name: str, kind: str) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.making(kind):
                return function(*args, **kwargs)

        setattr(owner, name, run)

    def _before(self, owner: Any, name: str, act: Callable[[Any], None]) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            act(args)
            return function(*args, **kwargs)

        setattr(owner, name, run)

    def _after(self, owner: Any, name: str, act: Callable[[Any, Any], None]) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            act(args, out)
            return out

        setattr(owner, name, run)


def tracked(config: RunConfig, mesh: Mesh, batches: list[Batch]) -> dict[str, Any]:
    live = Sorter()
    live.kind = "activations: working"
    live.watch()
    with live:
        with live.making("parameters: masters"):
            state = TrainState(config, config.trainer.optim, mesh)
        live.state(state)
        live.place("between")
        stepper = Stepper(state, config.trainer, len(batches), lap=live.lap)
        norm = steps.optim.global_norm
        live._before(steps.optim, "global_norm", lambda args: live._all(map(local, args[0]), "gradients: sums"))
        for batch in batches:
            stepper(batch)
        steps.optim.global_norm = norm
        top, most, places = live.peaks()
    return {
        "total": top.total,
        "at": top.at,
        "kinds": dict(top.by_kind),
        "most": most,
        "phases": {name: dict(m.by_kind) for name, m in places.items()},
        "largest": [(n, k.kind, k.made_by) for n, k in live.live_at(live.top)[:60]],
    }


def measured(config: RunConfig, mesh: Mesh, batches: list[Batch]) -> dict[str, Any]:
    """Bytes of the process: once it has trained a model that is next to nothing, and at the peak of these steps."""
    documents = rollouts(0, [64] * mesh.shape.data, 128)
    (*_, batch) = pack(documents, step=1, budget=64, ranks=mesh.shape.data)
    update = {"architecture": (config.model.architecture or {}) | TINY}
    tiny = config.model_copy(update={"model": config.model.model_copy(update=update)})
    Stepper(TrainState(tiny, config.trainer.optim, mesh), config.trainer, 1)(batch)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    baseline = _memory("VmRSS")
    state = TrainState(config, config.trainer.optim, mesh)
    stepper = Stepper(state, config.trainer, len(batches))
    for batch in batches:
        stepper(batch)
    return {"baseline": baseline, "peak": _memory("VmHWM")}


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def join(index: int, ranks: int, folder: Path) -> None:
    """One thread, and the process group where there are several ranks."""
    torch.set_num_threads(1)
    if ranks > 1:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=index, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S))


def prepare(index: int, spec: dict[str, Any]) -> tuple[RunConfig, Mesh, list[Batch]]:
    """Of a case, with a batch for each step."""
    config = RunConfig.model_validate(spec["config"])
    model = read_spec(config.model.architecture or {})
    device = torch.device("cpu")
    alone = config.trainer.ranks == 1
    mesh = Mesh(0, 1, device) if alone else lay_out(resolve(config.trainer, model.n_experts), index, device)
    documents = rollouts(0, spec["lengths"], model.vocab_size)
    streams = mesh.shape.data
    batches = [
        pack(documents, step=n, budget=config.trainer.pack_tokens, ranks=streams)[mesh.stream]
        for n in range(1, spec["steps"] + 1)
    ]
    return config, mesh, batches


def rank(index: int, spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    join(index, spec["config"]["trainer"]["ranks"], folder)
    config, mesh, batches = prepare(index, spec)
    found = (tracked if spec["tracked"] else measured)(config, mesh, batches)
    mb = batches[0].micro_batches[0]
    found |= {
        "lengths": [int(n) for n in mb.lengths],
        "scored": int(mb.sample.trainable.sum()),
        "micro_batches": len(batches[0].micro_batches),
        "cpu_s": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
    }
    if config.trainer.ranks > 1:
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(orjson.dumps(rank(int(sys.argv[2]), orjson.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[3]))).decode())
