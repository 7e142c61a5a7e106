"""A run on one machine without the trainer's arithmetic: the real engine behind its real server, the real orchestrator, and a
peer that takes batches through the real client, publishes the weights slightly changed, keeps the ledger and checkpoints.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from prl.config.load import dump
from prl.config.schema import Env as EnvConfig
from prl.config.schema import RunConfig
from prl.inference import server as inference
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec
from prl.orchestrator import main as orchestrator
from prl.samples import Batch
from prl.trainer import checkpoint
from prl.trainer.ledger import Ledger
from prl.trainer.ledger import read as ledger_read
from prl.transport.batches import BatchClient, Finish
from prl.transport.run_dir import RunDir
from prl.transport.versions import VersionLog
from prl.transport.weights import WeightStore
from tests.orchestrator import killed
from tests.orchestrator.letters import ALPHABET
from tests.trainer.helpers import write_checkpoint

ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}


def config(root: Path, *, steps: int = 4, env: str = "Letters", **over: Any) -> RunConfig:
    sections: dict[str, Any] = {
        "run": {"dir": root, "name": "run"},
        "model": {"architecture": ARCHITECTURE},
        "tokenizer": {"characters": ALPHABET, "vocab_size": 16},
        "envs": [EnvConfig(name="letters", kind=f"tests.orchestrator.letters:{env}", timeout_s=0.3)],
        "sampling": {"max_tokens": 6, "max_length": 24, "max_turns": 2},
        "orchestrator": {"batch_size": 16, "group_size": 4, "max_in_flight": 48, "max_refills": 50},
        "trainer": {"steps": steps, "pack_tokens": 256},
        "inference": {"max_batch": 32, "kv_tokens": 4096},
        "evaluation": {"tasks": 16, "every": 2, "tasks_in_run": 8, "timeout_s": 20},
        "checkpoint": {"every": 2},
        "transport": {"weights": "filesystem"},
        "launch": {"wait_timeout_s": 30, "start_timeout_s": 20},
        "monitor": {"samples": 2},
    }
    for name, value in over.items():
        sections[name] = {**sections[name], **value}
    return RunConfig.model_validate(sections)


class Died(Exception):
    pass


class Trainer(threading.Thread):
    """The peer of rank 0. It begins with `begin` and takes `step_s` to "train". Once `stop` is set it drops dead at once."""

    def __init__(self, run: RunDir, config: RunConfig, *, step_s: float = 0.0, begin: threading.Event | None = None):
        super().__init__(daemon=True)
        self.run_dir, self.config, self.step_s, self.begin = run, config, step_s, begin
        self.batches: list[Batch] = []
        self.code: int | None = None
        self.error: BaseException | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            self.code = self._run()
        except Died:
            pass
        except BaseException as e:
            self.error = e

    def _run(self) -> int:
        run, config = self.run_dir, self.config
        versions, store = VersionLog(run / "versions.jsonl"), WeightStore(run, config.transport)
        ledger = Ledger(run / "ledger.jsonl")
        model = build(read_spec(config.model.architecture), dtype=torch.float32)  # type: ignore[arg-type]
        init_weights(model, config.run.seed)
        if self.begin is not None:
            self.begin.wait(30)
        folder = checkpoint.latest_complete(run)
        step = saved = checkpoint.read_manifest(folder).step if folder else 0
        if versions.current() is not None:
            ledger.resume(step=step, lineage=versions.lineage(step))
        for done in range(1, step + 1):
            self._change(model, done)
        version = versions.allocate(step)
        store.publish(version, step, model.state_dict().items())
        while run.address("orchestrator") is None:
            self._live()
            time.sleep(0.01)
        client = BatchClient(run, 0, 1)
        state: bytes | None = None
        try:
            while True:
                got = client.get(step + 1, 30, on_wait=self._live)
                if isinstance(got, Finish):
                    if got.code == 75 and saved < step:
                        self._save(step, version, versions, state)
                    client.flush(2)
                    return got.code
                batch, state = got
                self.stop.wait(self.step_s)
                self._live()
                step = batch.step
                self._change(model, step)
                version = versions.allocate(step)
                store.publish(version, step, model.state_dict().items())
                self._live()
                ledger.step(
                    step=step,
                    version=version,
                    lineage=versions.current_lineage,
                    rollouts=batch.rollout_ids,
                    checksum=batch.checksum,
                    loss=0.0,
                )
                self.batches.append(batch)
                self._live()
                client.trained(step, version, {})
                if step % config.checkpoint.every == 0:
                    self._save(step, version, versions, state)
                    saved = step
        finally:
            client.close()
            ledger.close()

    def _live(self) -> None:
        if self.stop.is_set():
            raise Died

    def _save(self, step: int, version: int, versions: VersionLog, state: bytes | None) -> None:
        manifest = checkpoint.Manifest(self.run_dir.id, step, version, versions.current_lineage, 1, "qwen3_moe", time.time())

        def trainer(folder: Path) -> None:
            (folder / "weights").write_text(str(step))

        write_checkpoint(self.run_dir, manifest, trainer, state, keep=self.config.checkpoint.keep)

    def _change(self, model: torch.nn.Module, step: int) -> None:
        """Weights of `step` follow from it alone, as a deterministic trainer's do."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.003)


class Engine(threading.Thread):
    """The inference role in a thread, with an event loop of its own."""

    def __init__(self, run: RunDir, config: RunConfig, index: int = 0):
        super().__init__(daemon=True)
        self.run_dir, self.config, self.index, self.stop = run, config, index, threading.Event()

    def run(self) -> None:
        inference.main(self.run_dir, self.config, self.index, self.stop)


class Orchestrator(threading.Thread):
    def __init__(self, run: RunDir, config: RunConfig):
        super().__init__(daemon=True)
        self.run_dir, self.config, self.stop = run, config, threading.Event()
        self.code: int | None = None
        self.raised: Exception | None = None

    def run(self) -> None:
        try:
            self.code = orchestrator.main(self.run_dir, self.config, 0, self.stop)
        except Exception as e:
            self.raised = e


class Process:
    """The orchestrator as a process of its own, to be killed."""

    def __init__(self, run: RunDir, config: RunConfig):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.orchestrator.killed", "tests.orchestrator.letters"])
        self._child = context.Process(target=killed.role, args=(run.root,), daemon=True)

    @property
    def code(self) -> int | None:
        return self._child.exitcode

    def start(self) -> None:
        self._child.start()

    def kill(self) -> None:
        self._child.kill()  # SIGKILL
        self._child.join()


@contextlib.contextmanager
def running(
    config: RunConfig, *, process: bool = False, engines_first: bool = False, **options: Any
) -> Iterator[tuple[RunDir, Any, Trainer]]:
    """All roles of a run, until the end of the block, where what still lives dies.

    engines_first: the orchestrator starts once all replicas have announced themselves.
    """
    torch.set_num_threads(1)
    run = RunDir(config.run.dir / config.run.name).create()
    run.config_path.write_text(dump(config))
    for path in (run / "rendezvous").glob("*.json"):  # as the launcher does
        path.unlink()
    engines = [Engine(run, config, i) for i in range(config.inference.replicas)]
    peer = Trainer(run, config, **options)
    subject = Process(run, config) if process else Orchestrator(run, config)
    for role in (*engines, peer):
        role.start()
    for engine in engines if engines_first else ():
        run.find(f"inference-{engine.index}", 20)
    subject.start()
    try:
        yield run, subject, peer
    finally:
        if isinstance(subject, Process):
            subject.kill()
        threads = [t for t in (subject, peer, *engines) if isinstance(t, threading.Thread)]
        for thread in threads:
            thread.stop.set()
        for thread in threads:
            thread.join(15)


def finish(*threads: threading.Thread, timeout_s: float = 60) -> None:
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), f"{type(thread).__name__} did not end within {timeout_s:g} s"
        assert getattr(thread, "error", None) is None, thread.error


def records(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [r for r in ledger_read(run / "metrics.jsonl") if r["kind"] == kind]
