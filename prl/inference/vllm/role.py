"""A replica: vLLM's server as a child process, until it ends or is asked to."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from prl.config.schema import RunConfig
from prl.inference.client import GAUGES
from prl.inference.vllm.arguments import arguments, config_json, environment
from prl.inference.vllm.installed import check, untested
from prl.inference.vllm.settings import Settings
from prl.models.spec import ModelSpec, read_spec
from prl.monitor.metrics import Metrics
from prl.monitor.status import Status
from prl.transport import ports
from prl.transport.run_dir import RunDir

log = logging.getLogger(__name__)

REPORT_S = 2.0
ALIVE_S = 5.0
"""The role shows life only while its server has answered this lately."""
STOP_S = 3.0
_PR_SET_CHILD_SUBREAPER = 36
COUNTS = {"tokens_prompt": "prompt", "tokens_generated": "generated"}


def main(run: RunDir, config: RunConfig, index: int, stop: threading.Event) -> int:
    """The inference role. Announces itself once the engine has confirmed its first weight version."""
    from prl.inference.start import start_of

    found = check()
    if warning := untested(found):
        log.warning("%s", warning)
    name = f"inference-{index}"
    metrics = run.metrics(name)
    status = run.status(name, metrics)
    spec = read_spec(start_of(run, config))
    model = write_config(run / "vllm" / name, spec, config)
    t = config.transport
    settings = Settings(
        folder=str(run.root.resolve()),
        name=name,
        weights=t.weights,
        keep_versions=t.keep_versions,
        poll_s=t.poll_s,
        deadline_s=config.launch.heartbeat_timeout_s,
        parent=os.getpid(),
    )
    host = os.environ.get("PRL_HOST", "127.0.0.1")
    with served(config, spec, model, host, free_port(name, host), settings) as (process, url):
        return asyncio.run(_watch(run, name, process, url, status, metrics, stop))


def serve(config: RunConfig, host: str, port: int, run: RunDir) -> int:
    """`prl.serve` by vLLM, until SIGINT or SIGTERM; 1 where the server ended by itself."""
    from prl.inference.start import start_of

    if warning := untested(check()):
        print(f"warning: {warning}", file=sys.stderr)
    run.create()
    run.secret  # noqa: B018  # mode and length are checked before anything listens
    start = start_of(RunDir(config.run.dir / config.run.name), config)
    model = start if isinstance(start, Path) else _first_weights(run / "model", start, config)
    settings = Settings(folder=str(run.root.resolve()), name="prl.serve", parent=os.getpid())
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with served(config, read_spec(start), model, host, port or free_port("prl.serve", host), settings) as (process, url):
        told = False
        while not stop.wait(0.2):
            if process.poll() is not None:
                return 1
            if not told and (told := _healthy(url)):
                print(f"{url}  secret: {run.secret_path}", flush=True)
    return 0


def _first_weights(folder: Path, architecture: dict[str, Any], config: RunConfig) -> Path:
    """A model folder of weights drawn from the seed."""
    import torch

    from prl.models.hf import save_hf
    from prl.models.registry import build, init_weights

    model = build(read_spec(architecture), dtype=getattr(torch, config.inference.dtype))
    init_weights(model, config.run.seed)
    return save_hf(folder, model.spec, model.state_dict().items())


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=ALIVE_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def write_config(folder: Path, spec: ModelSpec, config: RunConfig) -> Path:
    """A model folder that has no weights: they come from the run's store."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "config.json").write_text(json.dumps(config_json(spec, config.inference.dtype)))
    return folder


def free_port(role: str, host: str) -> int:
    """Where the role would listen; vLLM binds it itself, a moment later."""
    with ports.listener(role, host) as s:
        return int(s.getsockname()[1])


@contextmanager
def served(
    config: RunConfig, spec: ModelSpec, model: Path, host: str, port: int, settings: Settings
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """vLLM's server; it and all its processes have ended afterwards."""
    command = [sys.executable, "-m", "prl.inference.vllm.cli", "serve"]
    command += arguments(config, spec, model=model, host=host, port=port, settings=settings)
    log.info("starting %s", " ".join(command[1:]))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the engine of a server that dies comes to this process
    process = subprocess.Popen(command, env={**os.environ, **environment(config, settings)}, stdin=subprocess.DEVNULL)
    try:
        yield process, f"http://{host}:{port}"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    deadline = time.monotonic() + STOP_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, STOP_S)


async def _watch(
    run: RunDir,
    name: str,
    process: subprocess.Popen[bytes],
    url: str,
    status: Status,
    metrics: Metrics,
    stop: threading.Event,
) -> int:
    headers = {"Authorization": f"Bearer {run.secret}"}
    before: dict[str, Any] | None = None
    answered = reported = time.monotonic()
    status.set(phase="starting", waits_for="vLLM")
    async with aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(total=ALIVE_S)) as http:
        while not stop.is_set():
            if (code := process.poll()) is not None:
                log.error("vLLM's server has ended with %d; its own words are above", code)
                return 1
            now = time.monotonic()
            if before is None or now - reported >= REPORT_S:
                try:
                    stats = await _stats(http)
                except aiohttp.ClientConnectorError:
                    if before is not None:
                        # Its engine has died; the server itself would wait for requests that nothing answers any more.
                        log.error("vLLM's server listens no more; its own words are above")
                        return 1
                    stats = None
                if stats is not None and before is None:
                    host, port = url.removeprefix("http://").rsplit(":", 1)
                    run.announce(name, host=host, port=int(port))
                    status.set(phase="serving", step=stats["version"], waits_for="")
                elif stats is not None and before is not None:
                    rate = {f"{k}_per_s": (stats[k] - before[k]) / (now - reported) for k in ("prompt", "generated")}
                    metrics.log("engine", **stats, **rate)
                    status.set(
                        phase="serving", step=stats["version"], tokens_per_s=rate["generated_per_s"], running=stats["running"]
                    )
                if stats is not None:
                    before, answered, reported = stats, time.monotonic(), now
            # Until the first version is there the start's own deadline counts.
            if before is None or time.monotonic() - answered < ALIVE_S:
                status.beat()
            await asyncio.sleep(0.1 if before is not None else 0.3)
        with suppress(aiohttp.ClientConnectorError):
            if (stats := await _stats(http)) is not None:
                metrics.log("engine", **stats)
    return 0


async def _stats(http: aiohttp.ClientSession) -> dict[str, Any] | None:
    """The gauges under the embedded engine's names, and the version; None while there is no answer or no version.

    ClientConnectorError where nobody listens.
    """
    try:
        async with http.get("/weight_info") as response:
            version = (await response.json())["weight_version"]
        if not version.isdecimal():
            return None
        async with http.get("/metrics") as response:
            text = await response.text()
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
        return None
    out: dict[str, Any] = dict.fromkeys((COUNTS.get(v, v) for v in GAUGES.values()), 0.0) | {"version": int(version)}
    for line in text.splitlines():
        gauge = GAUGES.get(line.partition("{")[0].removeprefix("vllm:"))
        if gauge is not None:
            out[COUNTS.get(gauge, gauge)] += float(line.rpartition(" ")[2])
    return out
