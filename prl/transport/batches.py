"""Batches from the orchestrator to the trainer's ranks over ZeroMQ (ROUTER and DEALER, CURVE with keys from the run's secret).

A rank asks for a step and gets its batch as soon as it is offered; it reports a step trained and gets an acknowledgement. A
step's batches are kept until every rank has reported it. Both questions may be repeated: an answer that came twice is
dropped, a report that came twice is acknowledged again. What cannot be accepted is counted by reason and answered with a
named refusal. Kinds: "want", "trained" (rank to orchestrator); "batch", "finish", "ack", "refused" (back).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from prl.samples import Batch
from prl.transport import curve, ports
from prl.transport.run_dir import RunDir
from prl.transport.wire import Buffer, Message, WireError, batch_to_message, decode, encode, message_to_batch

MAX_QUESTION_BYTES = 16 << 20
RETRY_S = 10.0
MAX_RETRIES = 5
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class BatchError(Exception):
    """The other side refused for good, or too many messages in a row were damaged."""


class BatchQueueFull(Exception):
    """More bytes of batches are held than allowed; await `wait_room` before `offer`."""


@dataclass(slots=True)
class Trained:
    """Every rank has finished `step`; version and metrics are rank 0's."""

    step: int
    version: int
    metrics: dict[str, Any]


@dataclass(slots=True)
class Finish:
    """No batch comes any more; the trainer ends with this exit code (0 done, 75 save)."""

    code: int


@dataclass(slots=True)
class _Held:
    frames: list[list[Buffer]]
    nbytes: int
    sent: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    version: int = -1
    metrics: dict[str, Any] = field(default_factory=dict)


class _Loop:
    """A thread that owns one socket; other threads wake it through an eventfd after they changed the shared state."""

    def __init__(self, name: str, socket: zmq.Socket[bytes], also: Sequence[zmq.Socket[bytes]] = ()):
        self.socket = socket
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for s in (socket, self._wake, *also):
            self._poller.register(s, zmq.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                ready = dict(self._poller.poll(200))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._turn(ready)
        except Exception as e:  # whoever waits for this thread must learn of it
            self._fail(e)

    def _turn(self, ready: dict[Any, int]) -> None:
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        self._closing = True
        self.wake()
        self._thread.join(5)
        os.close(self._wake)


class BatchServer(_Loop):
    """The orchestrator's end. Create it inside a running event loop; it announces itself as "orchestrator".

    `first_step` is the first step that was not trained yet; steps before it are answered as late.
    """

    def __init__(self, run: RunDir, secret: str, *, ranks: int, first_step: int = 1, max_bytes: int = 1 << 30):
        self.ranks, self.max_bytes = ranks, max_bytes
        self.counts: Counter[str] = Counter()
        """Messages refused or repeated, by reason; "unauthenticated" peers too."""
        self._run_id = run.id
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._first = first_step
        self._steps: dict[int, _Held] = {}
        self._wants: dict[tuple[int, int], bytes] = {}  # (rank, step) to the peer that waits
        self._code: int | None = None
        self._told: set[int] = set()
        self._queue: asyncio.Queue[Trained | Exception | None] = asyncio.Queue()
        self._change = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        self._authenticator = curve.serve(socket, secret)
        self._monitor = socket.get_monitor_socket(_HANDSHAKE_FAILED)
        super().__init__("batches", socket, (self._monitor,))
        host = os.environ.get("PRL_HOST", "127.0.0.1")

        def bind(port: int) -> int:
            try:
                return int(socket.bind(f"tcp://{host}:{port or '*'}").addr.rpartition(":")[2])
            except zmq.ZMQError as e:
                raise OSError(e.errno, f"tcp://{host}:{port}: {e}") from e

        self.port = ports.bound("orchestrator", host, bind)
        self._thread.start()
        run.announce("orchestrator", host=host, port=self.port)

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(h.nbytes for h in self._steps.values())

    def offer(self, step: int, batches: list[Batch], state: bytes | None = None) -> None:
        """Hand over a step's batches, one a rank; `state` (a checkpoint is due) goes to rank 0.

        BatchQueueFull where more than `max_bytes` are held already; one batch of any size always fits.
        """
        if len(batches) != self.ranks or any(b.step != step for b in batches):
            raise ValueError(f"step {step}: batches of steps {[b.step for b in batches]} for {self.ranks} ranks")
        frames = [batch_to_message(b, run_id=self._run_id, state=state if r == 0 else None) for r, b in enumerate(batches)]
        nbytes = sum(memoryview(f).nbytes for rank in frames for f in rank)
        with self._lock:
            expected = self._first + len(self._steps)
            if step != expected:
                raise ValueError(f"step {step} offered, step {expected} is next")
            held = sum(h.nbytes for h in self._steps.values())
            if held and held + nbytes > self.max_bytes:
                raise BatchQueueFull(f"step {step}: {nbytes} bytes on top of {held} held, bound {self.max_bytes}")
            self._steps[step] = _Held(frames, nbytes)
        self.wake()

    async def wait_room(self, timeout_s: float) -> None:
        """Until fewer than `max_bytes` are held; TimeoutError names the oldest step and the ranks it waits for."""
        await self._until(
            lambda: self.held_bytes < self.max_bytes,
            timeout_s,
            lambda: f"step {self._first} to be trained on ranks {sorted(self._missing())}",
        )

    def finish(self, code: int) -> None:
        """Answer every question for a step that was not offered with Finish(code)."""
        with self._lock:
            self._code = code
        self.wake()

    async def wait_finished(self, timeout_s: float) -> None:
        """After `finish`: until every rank was told."""
        await self._until(
            lambda: len(self._told) == self.ranks,
            timeout_s,
            lambda: f"ranks {sorted(set(range(self.ranks)) - self._told)} to ask for a batch and be told the end",
        )

    async def trained(self) -> AsyncIterator[Trained]:
        """Steps in order, each once, as every rank has finished it. Ends with `close`."""
        while (t := await self._queue.get()) is not None:
            if isinstance(t, Exception):
                raise BatchError(f"the thread that serves batches failed: {t!r}") from t
            yield t

    def close(self) -> None:
        self._stop()
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._authenticator.stop()
        self._context.term()
        self._queue.put_nowait(None)

    def _missing(self) -> set[int]:
        with self._lock:
            held = self._steps.get(self._first)
            return set(range(self.ranks)) - held.trained if held else set()

    async def _until(self, done: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            self._change.clear()
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"orchestrator waited {timeout_s:g} s for {what()}")
            try:
                await asyncio.wait_for(self._change.wait(), min(left, 1.0))
            except TimeoutError:
                continue

    # Below: the socket's thread.

    def _fail(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, error)

    def _turn(self, ready: dict[Any, int]) -> None:
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            self.counts["unauthenticated"] += 1
        if self.socket in ready:
            peer, *frames = self.socket.recv_multipart()
            self._question(peer, frames)
        with self._lock:
            for (rank, step), peer in list(self._wants.items()):
                if (held := self._steps.get(step)) is not None:
                    held.sent.add(rank)
                    self._answer(peer, held.frames[rank])
                elif self._code is not None:
                    self._told.add(rank)
                    self._answer(peer, encode("finish", {"code": self._code}, run_id=self._run_id, step=step))
                else:
                    continue
                del self._wants[rank, step]
        self._notify()

    def _answer(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        self.socket.send_multipart([peer, *frames], copy=False)

    def _refuse(self, peer: bytes, step: int, reason: str, text: str) -> None:
        self.counts[reason] += 1
        self._answer(peer, encode("refused", {"reason": reason, "text": text}, run_id=self._run_id, step=step))

    def _question(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            m = decode(frames, run_id=self._run_id, kinds=("want", "trained"))
        except WireError as e:
            return self._refuse(peer, -1, e.reason, str(e))
        rank = m.header.get("rank")
        if not isinstance(rank, int) or not 0 <= rank < self.ranks:
            return self._refuse(peer, m.step, "rank", f"{m.kind} from rank {rank!r}, ranks are 0 to {self.ranks - 1}")
        with self._lock:
            held = self._steps.get(m.step)
            if m.kind == "want" and m.step < self._first:
                return self._refuse(peer, m.step, "late", f"step {m.step} is trained already, step {self._first} is next")
            if m.kind == "want":
                self.counts["repeated"] += held is not None and rank in held.sent
                self._wants[rank, m.step] = peer
                return None
            if held is None and m.step >= self._first:
                return self._refuse(peer, m.step, "unknown_step", f"step {m.step} was never offered")
            if held is not None and rank not in held.sent:
                return self._refuse(peer, m.step, "unknown_step", f"step {m.step} was never sent to rank {rank}")
            if held is None or rank in held.trained:
                self.counts["repeated"] += 1
            else:
                held.trained.add(rank)
                if rank == 0:
                    held.version, held.metrics = m.version, m.header.get("metrics", {})
            self._answer(peer, encode("ack", {}, run_id=self._run_id, step=m.step))
            return None

    def _notify(self) -> None:
        done: list[Trained | None] = []
        with self._lock:
            while (held := self._steps.get(self._first)) is not None and len(held.trained) == self.ranks:
                done.append(Trained(self._first, held.version, held.metrics))
                del self._steps[self._first]
                self._first += 1
        if not self._loop.is_closed():
            for t in done:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, t)
            self._loop.call_soon_threadsafe(self._change.set)


class BatchClient(_Loop):
    """A trainer rank's end; it connects to the run's orchestrator and fetches the next step's batch while one trains."""

    def __init__(
        self,
        run: RunDir,
        rank: int,
        world: int,
        *,
        timeout_s: float = 60.0,
        retry_s: float = RETRY_S,
        on_wait: Callable[[], None] = lambda: None,
    ):
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        address = run.find("orchestrator", timeout_s, on_wait=on_wait)
        self.endpoint = f"tcp://{address['host']}:{address['port']}"
        self.rank, self.retry_s = rank, retry_s
        self.counts: Counter[str] = Counter()
        """Answers dropped as repeated, and damaged ones, by reason; "resent" questions."""
        self._run_id = run.id
        self._state = threading.Condition()
        self._wants: dict[int, float] = {}  # step to when it is asked for again
        self._reports: dict[int, tuple[list[Buffer], float]] = {}
        self._inbox: dict[int, tuple[Batch, bytes | None] | Finish] = {}
        self._current = -1
        self._damaged = 0
        self._error: str = ""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        curve.join(socket, run.secret)
        super().__init__("batches", socket)
        socket.connect(self.endpoint)
        self._thread.start()

    def get(
        self, step: int, timeout_s: float, *, on_wait: Callable[[], None] = lambda: None
    ) -> tuple[Batch, bytes | None] | Finish:
        """This rank's batch of `step`, with the orchestrator's state where a checkpoint is due (rank 0), or the end.

        `on_wait` is called about five times a second meanwhile (heartbeat; what it raises ends the wait). Asking for a step
        drops earlier ones. TimeoutError names step and orchestrator; BatchError a refusal.
        """
        deadline = time.monotonic() + timeout_s
        with self._state:
            self._current = step
            self._inbox = {s: b for s, b in self._inbox.items() if s >= step}
            self._wants = {s: t for s, t in self._wants.items() if s >= step}
            for s in (step, step + 1):
                if s not in self._inbox:
                    self._wants.setdefault(s, 0.0)
            self.wake()
            while step not in self._inbox:
                self._check()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {self.rank} waited {timeout_s:g} s for the batch of step {step} "
                        f"from the orchestrator at {self.endpoint}"
                    )
                self._state.wait(0.2)
                on_wait()
            return self._inbox[step]

    def trained(self, step: int, version: int, metrics: dict[str, Any]) -> None:
        """Report a finished step. Returns at once; the report is repeated until it is acknowledged (see `flush`)."""
        header = {"rank": self.rank, "metrics": metrics}
        frames = encode("trained", header, run_id=self._run_id, step=step, version=version)
        with self._state:
            self._check()
            self._reports[step] = (frames, 0.0)
        self.wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until every report is acknowledged; TimeoutError names the steps."""
        with self._state:
            if not self._state.wait_for(lambda: not self._reports or self._error, timeout_s):
                raise TimeoutError(f"{self.endpoint} did not acknowledge steps {sorted(self._reports)} within {timeout_s:g} s")
            self._check()

    def close(self) -> None:
        self._stop()
        self.socket.close()
        self._context.term()

    def _check(self) -> None:
        if self._error:
            raise BatchError(f"orchestrator at {self.endpoint}: {self._error}")

    # Below: the socket's thread.

    def _fail(self, error: Exception) -> None:
        with self._state:
            self._error = f"the thread that fetches batches failed: {error!r}"
            self._state.notify_all()

    def _turn(self, ready: dict[Any, int]) -> None:
        if self.socket in ready:
            self._receive([f.buffer for f in self.socket.recv_multipart(copy=False)])
        now = time.monotonic()
        with self._state:
            for step, due in self._wants.items():
                if now >= due:
                    self.counts["resent"] += due > 0
                    self._wants[step] = now + self.retry_s
                    self.socket.send_multipart(encode("want", {"rank": self.rank}, run_id=self._run_id, step=step))
            for step, (frames, due) in self._reports.items():
                if now >= due:
                    self.counts["resent"] += due > 0
                    self._reports[step] = (frames, now + self.retry_s)
                    self.socket.send_multipart(frames)

    def _receive(self, frames: list[memoryview]) -> None:
        try:
            m = decode(frames, run_id=self._run_id, kinds=("batch", "finish", "ack", "refused"))
            item = message_to_batch(m) if m.kind == "batch" else None
        except WireError as e:
            return self._count_damage(e.reason, str(e))
        with self._state:
            if m.kind == "refused":
                return self._refused(m)
            self._damaged = 0
            if m.kind == "ack":
                self.counts["repeated"] += self._reports.pop(m.step, None) is None
            elif self._wants.pop(m.step, None) is None:
                self.counts["repeated"] += 1
            else:
                self._inbox[m.step] = item if item is not None else Finish(m.header["code"])
            self._state.notify_all()
        return None

    def _refused(self, m: Message) -> None:
        reason, text = str(m.header.get("reason")), str(m.header.get("text"))
        if reason in ("frames", "magic", "checksum", "header", "shape"):  # our question was damaged on its way
            return self._count_damage(reason, text)
        self._error = self._error or text
        self._state.notify_all()
        return None

    def _count_damage(self, reason: str, text: str) -> None:
        """Ask again at once; give up after MAX_RETRIES damaged messages in a row."""
        with self._state:
            self.counts[reason] += 1
            self._damaged += 1
            if self._damaged > MAX_RETRIES and not self._error:  # the first stays: more may come before it is read
                self._error = f"{self._damaged} damaged messages in a row, the last: {text}"
                self._state.notify_all()
            self._wants = dict.fromkeys(self._wants, 1e-9)
            self._reports = {s: (frames, 1e-9) for s, (frames, _) in self._reports.items()}
