"""`python -m prl.serve`: one engine, answering over HTTP until it is stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, load
from prl.config.named import SetupError
from prl.config.schema import Model, RunConfig
from prl.launch.role import demand_kernels
from prl.transport.run_dir import RunDir, keep_private

HELP = """Serve a model over HTTP with vLLM's routes, until Ctrl-C.

SOURCE is a model folder (config.json, safetensors) or a configuration file, whose `inference` section then counts: with
`engine: vllm` vLLM serves, on a command line made of it. The address is printed, and the file with the secret that every request
but /health must carry as `Authorization: Bearer <secret>`.

\b
Examples:
  python -m prl.serve outputs/run/sft/model --port 8000
  python -m prl.serve configs/demo.yaml inference.max_batch=32
  curl -H "Authorization: Bearer $(cat outputs/serve/secret)" 127.0.0.1:8000/inference/v1/generate -d '{"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "seed": 0, "logprobs": 0}}'
"""  # noqa: E501

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=HELP)
def command(
    source: Annotated[Path, typer.Argument(help="Model folder or configuration file.", metavar="CONFIG|MODEL_DIR")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as in every command.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where the file `secret` is or is made.")] = Path("outputs/serve"),
) -> None:
    try:
        config = _config(source, overrides or [])
        if config.inference.engine == "vllm":
            from prl.inference.vllm.role import serve

            raise typer.Exit(serve(config, host, port, RunDir(folder)))
        demand_kernels(config.launch.kernels)
        raise typer.Exit(_serve(config, host, port, RunDir(folder)))
    except (ConfigError, SetupError, FileNotFoundError, PermissionError) as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(2) from None


def _config(source: Path, overrides: Sequence[str]) -> RunConfig:
    if source.is_dir():
        if overrides:
            raise FileNotFoundError(f"{source} is a model folder; overrides ({overrides[0]}) need a configuration file")
        return RunConfig(model=Model(path=source))
    return load(source, overrides)


def _serve(config: RunConfig, host: str, port: int, run: RunDir) -> int:
    """Until a signal; the exit code."""
    import torch
    import uvloop

    from prl.inference.server import Server, engine_of
    from prl.inference.start import start_of
    from prl.models.convert import WeightError
    from prl.models.hf import load_hf
    from prl.models.registry import build, init_weights
    from prl.models.spec import read_spec

    start = start_of(RunDir(config.run.dir / config.run.name), config)
    dtype = getattr(torch, config.inference.dtype)
    try:
        if isinstance(start, Path):
            model = load_hf(start, dtype=dtype)
        else:
            model = build(read_spec(start), dtype=dtype)
            init_weights(model, config.run.seed)
        engine = engine_of(model, config, "prl.serve")
    except WeightError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    keep_private()
    try:
        run.create()
        secret = run.secret
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    server = Server(engine, secret, stream_interval=config.inference.stream_interval)

    async def serve() -> int:
        try:
            bound = await server.start(host, port)
        except OSError as e:
            print(f"error: cannot listen on {host}:{port}: {e.strerror}; choose another --port, or 0 for any", file=sys.stderr)
            return 1
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print(f"http://{host}:{bound}  secret: {run.secret_path}", flush=True)
        while not stop.is_set() and not server.failure:
            await asyncio.sleep(0.1)
        failure = server.failure
        await server.close()
        return 1 if failure else 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 when stopped, 2 for a wrong command line, configuration or model, 1 when it could not listen or failed."""
    return exit_code(app, args, "python -m prl.serve")


if __name__ == "__main__":
    sys.exit(main())
