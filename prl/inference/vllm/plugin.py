"""prl's plugins of vLLM: a general one in every process, and one that adds routes to the API server.

Both do nothing in a vLLM that prl has not started.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

from prl.inference.vllm import patches
from prl.inference.vllm.installed import PLUGIN, vllm_version
from prl.inference.vllm.settings import required, settings
from prl.inference.vllm.updater import StageFailed, Updater, UpdateUnderWay
from prl.transport.run_dir import RunDir

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)
_done = False


def register() -> None:
    """The general plugin; vLLM may call it more than once in a process."""
    global _done
    if _done or settings() is None:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(PLUGIN, "prl.inference.vllm.transfer", "StoreTransfer")
    patches.apply(patches.everywhere(), vllm_version())
    _done = True


class InProcess:
    """`prl.inference.vllm.updater.Engine` by the calls of vLLM's engine client."""

    def __init__(self, client: Any):
        self._client = client

    async def stage(self, version: int) -> None:
        await self._client.collective_rpc("prl_stage", args=(version,))

    async def staged(self) -> bool:
        said = await self._client.collective_rpc("prl_staged")
        if wrong := [s for s in said if s]:
            raise StageFailed("; ".join(wrong))
        return None not in said

    async def pause(self) -> None:
        await self._client.pause_generation(mode="keep", clear_cache=False)

    async def swap(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._client.start_weight_update()
        await self._client.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        await self._client.finish_weight_update(str(version))

    async def resume(self) -> None:
        await self._client.resume_generation()


class Endpoints:
    """The routes that vLLM has not; the updater runs beside them in the API server's event loop."""

    name = PLUGIN
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        from starlette.responses import JSONResponse

        async def hold(request: Request) -> Response:
            deadline_s = (await request.json()).get("deadline_s")
            if not isinstance(deadline_s, int | float) or not deadline_s > 0:
                return _error(400, f"deadline_s: {deadline_s!r}, expected seconds above 0")
            try:
                return JSONResponse({"weight_version": str(await app.state.prl_updater.hold(deadline_s))})
            except UpdateUnderWay as e:
                return _error(409, str(e))

        async def release(_: Request) -> Response:
            updater: Updater = app.state.prl_updater
            try:
                return JSONResponse({"held": await updater.release(), "weight_version": str(updater.version)})
            except UpdateUnderWay as e:
                return _error(409, str(e))

        def _error(status: int, message: str) -> Response:
            return JSONResponse({"error": {"message": message, "type": "", "param": None, "code": status}}, status)

        app.add_route("/hold_updates", hold, methods=["POST"])
        app.add_route("/release_updates", release, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        from prl.config.schema import Transport
        from prl.transport.weights import WeightStore

        s = required()
        run = RunDir(s.folder)
        if not s.weights:
            await engine_client.update_weight_version("0")
        store = WeightStore(
            run, Transport.model_validate({"weights": s.weights or "filesystem", "keep_versions": s.keep_versions})
        )
        metrics = run.metrics(s.name)
        state.prl_updater = updater = Updater(
            InProcess(engine_client),
            store.versions if s.weights else lambda: [],
            end,
            poll_s=s.poll_s,
            deadline_s=s.deadline_s,
            record=metrics.log,
        )
        updater.version = -1 if s.weights else 0
        state.prl_update_task = asyncio.create_task(updater.run())


def end(why: str) -> None:
    """The engine cannot go on, so this server ends at once; its parent sees that, and the log says why."""
    log.critical("%s: this replica ends: %s", required().name, why)
    logging.shutdown()
    os._exit(1)
