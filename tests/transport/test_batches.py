"""Batches over real sockets: delivery, acknowledgement, bounds, and every way in which a peer can be wrong."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prl.samples import Batch, Rollout, Sample, pack
from prl.transport import curve
from prl.transport.batches import BatchClient, BatchError, BatchQueueFull, BatchServer, Finish, Trained
from prl.transport.run_dir import RunDir
from prl.transport.wire import decode, encode


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def step_batches(step: int, ranks: int = 1, tokens: int = 20) -> list[Batch]:
    def rollout(i: int) -> Rollout:
        sample = Sample.of_prompt([step, *range(tokens)])
        sample.trainable[1:] = True
        sample.versions[1:] = 0
        return Rollout(f"{step}-{i}", "e", "t", i, 0, samples=[sample])

    return pack([rollout(i) for i in range(ranks)], step=step, budget=tokens + 1, ranks=ranks)


@asynccontextmanager
async def serving(run: RunDir, ranks: int = 1, **kwargs: int) -> AsyncIterator[BatchServer]:
    server = BatchServer(run, run.secret, ranks=ranks, **kwargs)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.close)


def timed(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(bounded())


def train(run: RunDir, rank: int, world: int, first: int = 1) -> tuple[list[int], int]:
    """A trainer rank: every step it gets, until the end."""
    client = BatchClient(run, rank, world, timeout_s=5)
    steps = []
    try:
        while not isinstance(got := client.get(first + len(steps), 10), Finish):
            batch, state = got
            assert batch.step == first + len(steps) and batch.micro_batches[0].sample.tokens[0] == batch.step
            assert (state == b"orchestrator") == (rank == 0 and batch.step % 2 == 0)
            steps.append(batch.step)
            client.trained(batch.step, batch.step + 100, {"loss": 0.5, "rank": rank})
        client.flush(5)
        return steps, got.code
    finally:
        client.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_gets_every_step_and_the_server_learns_of_each_once(run: RunDir, ranks: int) -> None:
    async def test() -> None:
        async with serving(run, ranks, first_step=5) as server:
            tasks = [asyncio.create_task(asyncio.to_thread(train, run, r, ranks, 5)) for r in range(ranks)]
            seen: list[Trained] = []
            done = server.trained()
            for step in range(5, 11):
                server.offer(step, step_batches(step, ranks), b"orchestrator" if step % 2 == 0 else None)
                if step > 6:
                    seen.append(await anext(done))
            seen += [await anext(done) for _ in range(2)]
            server.finish(75)
            await server.wait_finished(5)
            assert await asyncio.gather(*tasks) == [(list(range(5, 11)), 75)] * ranks
            assert seen == [Trained(s, s + 100, {"loss": 0.5, "rank": 0}) for s in range(5, 11)]
            assert server.held_bytes == 0 and not +server.counts

    timed(test)


def test_the_next_batch_is_fetched_while_one_trains(run: RunDir) -> None:
    async def test() -> None:
        async with serving(run) as server:
            server.offer(1, step_batches(1))
            server.offer(2, step_batches(2))
            client = BatchClient(run, 0, 1)
            await asyncio.to_thread(client.get, 1, 5)
            while 2 not in client._inbox:
                await asyncio.sleep(0.01)
            client.close()

    timed(test)


def test_held_bytes_are_bounded_and_freed_by_the_last_rank(run: RunDir) -> None:
    async def test() -> None:
        async with serving(run, 2, max_bytes=1000) as server:
            server.offer(1, step_batches(1, 2, tokens=500))  # larger than the bound, but alone
            with pytest.raises(BatchQueueFull, match=r"step 2: .* bound 1000"):
                server.offer(2, step_batches(2, 2))
            with pytest.raises(TimeoutError, match=r"step 1 to be trained on ranks \[0, 1\]"):
                await server.wait_room(0.05)
            clients = [BatchClient(run, r, 2) for r in range(2)]
            for rank, client in enumerate(clients):
                await asyncio.to_thread(client.get, 1, 5)
                client.trained(1, 1, {})
                await asyncio.to_thread(client.flush, 5)
                assert (server.held_bytes == 0) == (rank == 1)
            await server.wait_room(5)
            server.offer(2, step_batches(2, 2))
            with pytest.raises(ValueError, match="step 4 offered, step 3 is next"):
                server.offer(4, step_batches(4, 2))
            with pytest.raises(ValueError, match="for 2 ranks"):
                server.offer(3, step_batches(3, 1))
            for client in clients:
                client.close()

    timed(test)


def test_waits_end_with_a_named_error_and_beat_meanwhile(run: RunDir) -> None:
    async def test() -> None:
        async with serving(run) as server:
            client = BatchClient(run, 0, 1)
            beats: list[int] = []
            with pytest.raises(TimeoutError, match=rf"batch of step 1 from the orchestrator at .*:{server.port}"):
                await asyncio.to_thread(client.get, 1, 0.7, on_wait=lambda: beats.append(1))
            assert len(beats) >= 3

            def stop() -> None:
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                await asyncio.to_thread(client.get, 1, 5, on_wait=stop)
            client.close()
        async with serving(run) as server:
            server.finish(0)
            with pytest.raises(TimeoutError, match=r"ranks \[0\] to ask for a batch"):
                await server.wait_finished(0.05)

    timed(test)


def test_a_peer_without_the_runs_keys_gets_nothing(run: RunDir, tmp_path: Path) -> None:
    """Wrong secret on both sides of the handshake, the right server key with a wrong client key, and plain text."""

    async def test() -> None:
        async with serving(run) as server:
            server.offer(1, step_batches(1))
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            for how in ("stranger", "client key", "plain"):
                socket = context.socket(zmq.DEALER)
                socket.setsockopt(zmq.LINGER, 0)
                if how != "plain":
                    curve.join(socket, "another secret")
                if how == "client key":
                    socket.curve_serverkey, _ = curve.key_pair(run.secret, "server")
                before = server.counts["unauthenticated"]
                socket.connect(f"tcp://127.0.0.1:{server.port}")
                socket.send_multipart(encode("want", {"rank": 0}, run_id=run.id, step=1))
                while server.counts["unauthenticated"] == before:
                    await asyncio.sleep(0.01)
                assert not await asyncio.to_thread(socket.poll, 100)
                socket.close()
            context.term()
            assert not server._wants and not server._steps[1].sent
            run.announce("orchestrator", host="127.0.0.1", port=server.port)
            assert (await asyncio.to_thread(train_one, run)).step == 1  # an honest rank is served all the same

    timed(test)


def train_one(run: RunDir) -> Batch:
    client = BatchClient(run, 0, 1)
    got = client.get(1, 10)
    client.close()
    assert not isinstance(got, Finish)
    return got[0]


@asynccontextmanager
async def raw(run: RunDir, server: BatchServer) -> AsyncIterator[Callable[..., Awaitable[object]]]:
    """A peer with the right keys that says what it likes; the answer, decoded."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    curve.join(socket, run.secret)
    socket.connect(f"tcp://127.0.0.1:{server.port}")

    def ask(frames: list[bytes]) -> object:
        socket.send_multipart(frames)
        assert socket.poll(5000)
        m = decode(socket.recv_multipart(), run_id=run.id)
        return m.header.get("reason", m.kind)

    try:
        yield lambda frames: asyncio.to_thread(ask, frames)
    finally:
        socket.close()
        context.term()


def test_wrong_late_repeated_and_unknown_messages_are_named_and_counted(run: RunDir) -> None:
    async def test() -> None:
        async with serving(run, first_step=3) as server, raw(run, server) as ask:
            server.offer(3, step_batches(3))

            def message(kind: str, step: int, rank: object = 0, run_id: str = run.id) -> list[bytes]:
                return encode(kind, {"rank": rank, "metrics": {}}, run_id=run_id, step=step)  # type: ignore[return-value]

            script = [
                (message("want", 2), "late"),
                (message("trained", 3), "unknown_step"),  # not sent to it yet
                (message("trained", 4), "unknown_step"),
                (message("want", 3, rank=1), "rank"),
                (message("want", 3, rank="0"), "rank"),
                (message("want", 3, run_id="other"), "run"),
                (message("batch", 3), "kind"),
                (message("want", 3)[:1], "frames"),
                (message("want", 3), "batch"),
                (message("want", 3), "batch"),  # repeated
                (message("trained", 3), "ack"),
                (message("trained", 3), "ack"),  # repeated
                (message("trained", 2), "ack"),  # of an earlier life
            ]
            for frames, answer in script:
                assert await ask(frames) == answer, (frames, answer)
            assert await anext(server.trained()) == Trained(3, -1, {})
            assert server._queue.empty()
            expected = {"late": 1, "unknown_step": 2, "rank": 2, "run": 1, "kind": 1, "frames": 1, "repeated": 3}
            assert +server.counts == expected

    timed(test)


def test_any_bytes_from_an_authenticated_peer_are_answered_with_a_refusal(run: RunDir) -> None:
    good = [bytes(f) for f in encode("want", {"rank": 0}, run_id=run.id, step=1)]

    async def test() -> None:
        async with serving(run) as server, raw(run, server) as ask:
            loop = asyncio.get_running_loop()

            @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
            @given(st.data())
            def fuzz(data: st.DataObject) -> None:
                frames = data.draw(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
                if data.draw(st.booleans()):
                    frames = list(good)
                    i = data.draw(st.integers(0, 1))
                    at = data.draw(st.integers(0, len(frames[i]) - 1))
                    frames[i] = frames[i][:at] + data.draw(st.binary(max_size=2)) + frames[i][at + 1 :]
                if frames != good:
                    answer = asyncio.run_coroutine_threadsafe(ask(frames), loop).result(10)  # type: ignore[arg-type]
                    assert answer in ("frames", "magic", "schema", "checksum", "header")

            await asyncio.to_thread(fuzz)
            server.offer(1, step_batches(1))
            assert (await asyncio.to_thread(train_one, run)).step == 1

    timed(test)


class Mangler:
    """A fake orchestrator with the right keys that damages its first `n` answers."""

    def __init__(self, run: RunDir, n: int, monkeypatch: pytest.MonkeyPatch):
        self.left = n
        honest = BatchServer._answer

        def answer(server: BatchServer, peer: bytes, frames: list[bytes]) -> None:
            if self.left > 0:
                self.left -= 1
                frames = [*frames[:-1], b"x" + bytes(frames[-1])[1:]]
            honest(server, peer, frames)

        monkeypatch.setattr(BatchServer, "_answer", answer)


def test_damaged_answers_are_asked_for_again_and_counted(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving(run) as server:
            server.offer(1, step_batches(1))
            Mangler(run, 3, monkeypatch)
            client = BatchClient(run, 0, 1)
            got = await asyncio.to_thread(client.get, 1, 5)
            assert not isinstance(got, Finish) and got[0].step == 1
            assert client.counts["checksum"] == 3 and client.counts["resent"] >= 3
            Mangler(run, 100, monkeypatch)
            client.trained(1, 1, {})
            with pytest.raises(BatchError, match="6 damaged messages in a row.*checksum"):
                await asyncio.to_thread(client.flush, 5)
            client.close()

    timed(test)


def test_questions_are_repeated_until_answered(run: RunDir) -> None:
    """The orchestrator's port comes up late: a lost question is asked again."""

    async def test() -> None:
        run.announce("orchestrator", host="127.0.0.1", port=1)  # nobody listens there
        client = BatchClient(run, 0, 1, retry_s=0.1)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(client.get, 1, 0.5)
        assert client.counts["resent"] >= 2
        client.close()

    timed(test)


def test_a_refusal_ends_the_wait_with_the_servers_words(run: RunDir) -> None:
    async def test() -> None:
        async with serving(run, first_step=7) as server:
            client = BatchClient(run, 0, 1)
            with pytest.raises(BatchError, match="step 2 is trained already, step 7 is next"):
                await asyncio.to_thread(client.get, 2, 5)
            client.close()
            wrong = BatchClient(run, 1, 2)
            with pytest.raises(BatchError, match="from rank 1, ranks are 0 to 0"):
                await asyncio.to_thread(wrong.get, 7, 5)
            wrong.close()
            assert server.counts["late"] and server.counts["rank"]

    timed(test)


def test_a_dead_socket_thread_is_reported(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("bang")

    async def test() -> None:
        async with serving(run) as server:
            client = BatchClient(run, 0, 1)
            monkeypatch.setattr(BatchClient, "_turn", broken)
            with pytest.raises(BatchError, match="bang"):
                await asyncio.to_thread(client.get, 1, 5)
            monkeypatch.setattr(BatchServer, "_turn", broken)
            with pytest.raises(BatchError, match="bang"):
                await anext(server.trained())
            client.close()

    timed(test)


def test_closing_frees_the_port_threads_and_descriptors(run: RunDir) -> None:
    async def test() -> None:
        before = len(os.listdir("/proc/self/fd"))
        async with serving(run) as server:
            client = BatchClient(run, 0, 1)
            t0 = time.monotonic()
            client.close()
            port = server.port
        assert time.monotonic() - t0 < 3
        assert len(os.listdir("/proc/self/fd")) <= before
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"tcp://127.0.0.1:{port}")
        socket.close(0)
        context.term()

    timed(test)


def test_the_batch_side_does_not_import_torch() -> None:
    code = "import sys, prl.transport.batches, prl.transport.versions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
