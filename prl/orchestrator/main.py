"""The orchestrator of a run: what to generate, what becomes a batch, when to evaluate. One asyncio loop; free of torch."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import Any

import uvloop

from prl.config.mesh import data_ranks
from prl.config.schema import RunConfig
from prl.envs.base import Env, Task, TaskError, make_task
from prl.envs.registry import make
from prl.envs.runner import EnvironmentStuck, run_rollout
from prl.inference.api import EngineError, GenerateRequest, Generation
from prl.inference.client import Client, Replica, run_replicas
from prl.models.spec import read_spec
from prl.monitor.metrics import Metrics
from prl.monitor.status import Status
from prl.orchestrator import advantages, curriculum, evaluation, measures
from prl.orchestrator.curriculum import Place
from prl.orchestrator.fates import TaskLog, open_members
from prl.orchestrator.rounds import RoundClient
from prl.orchestrator.scheduler import Cut, QueueTooSmall, Rules, Scheduler, Work
from prl.orchestrator.spool import Spool, still_needed
from prl.orchestrator.state import SCHEMA, State, decode, encode
from prl.orchestrator.waits import Waits
from prl.plan.search import shape_here
from prl.samples import Rollout, pack
from prl.tokenizer import of_run
from prl.trainer import checkpoint
from prl.transport.batches import BatchError, BatchQueueFull, BatchServer
from prl.transport.run_dir import RunDir
from prl.transport.versions import VersionLog

log = logging.getLogger(__name__)
DONE, FAILED, CONFIG, SAVED = 0, 1, 2, 75
EXPECTED = (BatchError, EngineError, EnvironmentStuck, TimeoutError, checkpoint.CheckpointError)
"""Failures whose message says all; anything else is a fault of ours and keeps its traceback."""
TICK_S = 0.25
"""The loop looks at the clock, the stop request and the weights at least this often."""
STOP_S = 3.0
"""How long a trainer that was asked to stop as well is given to fetch the end and have its last reports acknowledged."""


def main(run: RunDir, config: RunConfig, index: int, stop: threading.Event) -> int:
    """The role: 0 when all batches are trained, 75 when asked to stop or out of refills, 2 or 1 with the reason in the log."""
    metrics = run.metrics("orchestrator")
    status = run.status("orchestrator", metrics)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_main(run, config, stop, metrics, status))
    except (*EXPECTED, QueueTooSmall) as e:
        log.error("%s", e)
        metrics.log("event", name="failed", error=str(e))
        return CONFIG if isinstance(e, QueueTooSmall) else FAILED


async def _main(run: RunDir, config: RunConfig, stop: threading.Event, metrics: Metrics, status: Status) -> int:
    start = run / "sft" / "model" if config.sft is not None else config.model.path or config.model.architecture
    assert start is not None, "model: neither path nor architecture is set"
    replicas = run_replicas(run, config.inference.replicas)
    orchestrator = Orchestrator(run, config, stop, metrics, status, replicas, read_spec(start).moe_layers)
    try:
        async with orchestrator.client:
            return await orchestrator.run()
    finally:
        await orchestrator.close()


class Orchestrator:
    """Owns the scheduler and everything around it that has a clock, a network or a file."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        stop: threading.Event,
        metrics: Metrics,
        status: Status,
        replicas: Callable[[], list[Replica]],
        moe_layers: tuple[int, ...],
    ):
        self.run_dir, self.config, self.stop = run, config, stop
        self.metrics, self.status, self.replicas = metrics, status, replicas
        self.waits = Waits(status, config.launch.wait_timeout_s)
        self.versions = VersionLog(run / "versions.jsonl")
        self.log = TaskLog(run / "tasks.jsonl")
        self.spool = Spool(run / "spool", run.id)
        self.tokenizer = of_run(config)
        self.envs: list[Env] = [make(env, seed=config.run.seed) for env in config.envs]
        sizes, weights = [env.size("train") for env in self.envs], [env.weight for env in config.envs]
        self.curriculum = curriculum.make(config.orchestrator.curriculum, config.run.seed, sizes, weights)
        self.advantages = advantages.resolve(config.orchestrator.advantage)
        self.scheduler = Scheduler(
            Rules.of(config),
            draw=self.curriculum.draw,
            observe=self.curriculum.observe,
            advantages=self.advantages,
            step_of=self.step_of,
            new_id=lambda ordinal, index: f"{ordinal}.{index}-{secrets.token_hex(6)}",
        )
        self.held: str | None = None
        """The replica that an evaluation keeps at its version; training rollouts go to the others."""
        timeout_s = config.launch.wait_timeout_s
        self.client = Client(self._training_replicas, run.secret, moe_layers=moe_layers, timeout_s=timeout_s)
        self.moe_layers = moe_layers
        rounds = RoundClient(self.client, replicas, timeout_s=timeout_s)
        self.rounds = rounds if config.run.deterministic else None
        self.task = functools.lru_cache(1024)(self._task)
        self.tally = measures.Tally()
        self.rollouts: dict[str, asyncio.Task[None]] = {}
        self.background: dict[str, asyncio.Task[None]] = {}
        self.changed = asyncio.Event()
        self.next_evaluation = 0
        self.first_segments: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._polled = 0.0

    async def run(self) -> int:
        """From the newest checkpoint, if there is one, to the run's end; the exit code."""
        self._resume()
        server = BatchServer(
            self.run_dir,
            self.run_dir.secret,
            ranks=self.config.trainer.ranks,
            first_step=self.scheduler.step + 1,
            max_bytes=self.config.orchestrator.queue_bytes,
        )
        with closing(server) as self.server:
            self._spawn("acknowledgements", self._acknowledgements())
            self.status.set(phase="generating", step=self.scheduler.step)
            return await self._loop() if await self._first_weights() else await self._save("asked to stop")

    async def _loop(self) -> int:
        """Dispatch what may run, cut what is full, else wait for something to happen."""
        while not self.scheduler.finished_all:
            if self.stop.is_set():
                return await self._save("asked to stop")
            if (exhausted := self.scheduler.exhausted()) is not None:
                if not (exhausted.solved and self.config.orchestrator.when_learned == "stop"):
                    return await self._save(exhausted.reason)
                self.metrics.log("event", name="learned", reason=exhausted.reason)
                break
            self._dispatch()
            if (cut := self.scheduler.cut()) is not None:
                await self._offer(cut)
            else:
                await self._something()
        return await self._finish()

    # -- start and end -------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Go on from the newest complete checkpoint, or void what a run without one had written."""
        folder = checkpoint.latest_complete(self.run_dir)
        data = checkpoint.orchestrator_state(folder) if folder is not None else None
        if data is None:
            if self.log.seq:
                self.log.add("resume", step=0, **{"from": 0})
                self.log.sync()
            return
        try:
            state = decode(data)
            self.curriculum.load(state.curriculum)
        except (ValueError, KeyError, TypeError) as e:
            raise checkpoint.CheckpointError(f"{folder}/{checkpoint.ORCHESTRATOR}: {e}") from e
        self.log.add("resume", step=state.scheduler.step, **{"from": state.fates})
        rollouts, broken = self.spool.load(state.spool)
        self.scheduler.load(state.scheduler, rollouts)
        self.next_evaluation, self.first_segments = state.next_evaluation, state.first_segments
        self._write_fates()
        for text in broken:
            log.warning("generated anew: %s", text)
        self.metrics.log(
            "event",
            name="resume",
            step=self.scheduler.step,
            kept=len(rollouts),
            broken=len(broken),
            dropped=self.scheduler.totals,
        )

    async def _first_weights(self) -> bool:
        """Until the engines apply the weights that the run starts from; False if asked to stop before.

        After a resume the log's newest version is of an abandoned step until the trainer has put the resume on record.
        """
        start = self.scheduler.step
        while self.scheduler.confirmed is None:
            if self.stop.is_set():
                return False
            current = self.versions.current()
            if current is not None and self.versions.step_of(current) == start:
                await self._poll_weights(f"inference to apply the weights of step {start}")
            else:
                self.waits.on(f"the trainer to publish the weights of step {start}")
            await self._pause()
        if self.next_evaluation == 0:
            self._begin_evaluation("start", self.config.evaluation.tasks)
        return True

    async def _finish(self) -> int:
        """Every batch is cut: wait for the trainer, evaluate the last weights, end the run."""
        last = self.scheduler.step
        await self._cancel_rollouts()
        while self.scheduler.acknowledged < last or self.scheduler.confirmed != last or "evaluation" in self.background:
            if self.stop.is_set():
                return await self._save("asked to stop")
            await self._something()
        if last > 0:
            self._begin_evaluation("final", self.config.evaluation.tasks)
        while "evaluation" in self.background:
            if self.stop.is_set():
                return await self._save("asked to stop")
            await self._something()
        return await self._end(DONE, "all batches are trained")

    async def _save(self, reason: str) -> int:
        """Have the trainer save what it has and end."""
        await self._cancel_rollouts()
        log.warning("saving: %s", reason)
        return await self._end(SAVED, reason)

    async def _end(self, code: int, reason: str) -> int:
        """Until the trainer has reported what it was given and knows of the end, which then is put on record."""
        s, began = self.scheduler, time.monotonic()
        self.server.finish(code)
        told, stopped = False, 0.0
        self.waits.on("the trainer to end")
        while not (told and s.acknowledged == s.step):
            try:
                await (self._pause() if told else self.server.wait_finished(TICK_S))
                told = True
            except TimeoutError:
                if time.monotonic() - began > self.config.launch.wait_timeout_s:
                    raise
            self.status.beat()
            stopped = stopped or (time.monotonic() if self.stop.is_set() else 0.0)
            if stopped and time.monotonic() - stopped > STOP_S:  # a trainer that was asked to stop too may be gone already
                break
        self.waits.off()
        self._write_fates()
        self.log.add("end", step=s.step, **self._frontier(), code=code, reason=reason)
        self.log.sync()
        self.metrics.log("event", name="end", code=code, reason=reason, totals=s.totals)
        self.status.set(phase="done" if code == DONE else "saved", reason=reason)
        return code

    async def close(self) -> None:
        await self._cancel_rollouts()
        for task in self.background.values():
            task.cancel()
        await asyncio.gather(*self.background.values(), return_exceptions=True)
        self.log.close()
        self.spool.close()

    async def _cancel_rollouts(self) -> None:
        rollouts, self.rollouts = self.rollouts, {}
        for task in rollouts.values():
            task.cancel()
        await asyncio.gather(*rollouts.values(), return_exceptions=True)

    # -- rollouts ------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while (work := self.scheduler.dispatch()) is not None:
            if self.rounds is not None:
                self.rounds.join(work.id)
            self.rollouts[work.id] = asyncio.ensure_future(self._rollout(work))

    async def _rollout(self, work: Work) -> None:
        """Generate one rollout and hand it to the scheduler, whatever becomes of it."""
        salt = ""

        async def generate(request: GenerateRequest) -> Generation:
            nonlocal salt
            if not salt:
                salt = await self.client.salt(work.id)
                if (step := self.step_of(int(salt))) is not None:
                    self.scheduler.started(work.id, step)
            if self.rounds is not None:
                return await self.rounds.generate((work.ordinal, work.index), request)
            return await self.client.generate(request)

        env = self.envs[work.place[0]]
        try:
            rollout = await run_rollout(
                env,
                self.task(work.place),
                generate,
                self.tokenizer,
                self.config.sampling,
                rollout_id=work.id,
                ordinal=work.ordinal,
                index=work.index,
                attempt=work.attempt,
                seed=self.config.run.seed,
            )
        except asyncio.CancelledError:
            if work.id not in self.rollouts:  # the run ends
                raise
            rollout = Rollout(work.id, env.name, "", work.ordinal, work.index, work.attempt, outcome="cancelled")
        except TaskError as e:
            rollout = Rollout(work.id, env.name, "", work.ordinal, work.index, work.attempt, outcome="environment_error")
            rollout.error = str(e)
        except Exception as e:
            self._fail(e)
            return
        finally:
            self.client.forget(work.id)
            if self.rounds is not None:
                self.rounds.leave(work.id)
        rollout.salt = salt
        if rollout.error:
            log.info("rollout %s: %s: %s", rollout.id, rollout.outcome, rollout.error)
        self.rollouts.pop(work.id, None)
        self.tally.add(rollout)
        try:
            self.scheduler.finished(rollout)
        except Exception as e:  # nobody awaits this task, and an advantage may be a user's function
            self._fail(e)
            return
        self._progress()

    def _task(self, place: Place) -> Task:
        return make_task(self.envs[place[0]], place[1], "train")

    # -- batches -------------------------------------------------------------------------------------------------------

    async def _offer(self, cut: Cut) -> None:
        """Make batch `cut.step` and the state that belongs to it durable, hand both to the trainer, and say what it is."""
        config, rollouts = self.config, cut.rollouts
        self.waits.off()
        if config.orchestrator.shuffle_rewards:
            measures.shuffle_rewards(rollouts, self.advantages, seed=config.run.seed, step=cut.step)
        due = cut.step % config.checkpoint.every == 0
        state = self._state(cut, due)
        checksum = measures.checksum(rollouts)
        streams = data_ranks(config.trainer) if config.trainer.mesh.cp != "auto" else shape_here(config).data
        packed = pack(rollouts, step=cut.step, budget=config.trainer.pack_tokens, ranks=streams, checksum=checksum)
        batches = [batch for batch in packed for _ in range(config.trainer.ranks // streams)]
        while not self.stop.is_set():
            try:
                self.server.offer(cut.step, batches, state)
                break
            except BatchQueueFull:
                await self._something("the trainer to make room for a batch")
        for rollout_id in self.scheduler.overdue():
            self.rollouts[rollout_id].cancel()
        s = self.scheduler
        dropped = s.take_dropped()
        self.metrics.log(
            "step",
            step=cut.step,
            **self.tally.take(),
            **measures.of_batch(cut),
            dropped={reason: sum(lengths.values()) for reason, lengths in dropped.items()},
            dropped_by_length=dropped,
            totals=s.totals,
            lost=cut.lost,
            in_flight=len(s.flying),
            queued=s.queued,
            queue_bytes=s.held_bytes,
            offered_bytes=self.server.held_bytes,
            position=s.position,
            retries=self.client.retries,
            checksum=checksum,
        )
        for text in measures.shown(rollouts, config.monitor.samples):
            self.metrics.log("sample", step=cut.step, **text)
        self.status.set(phase="generating", step=cut.step)
        self._progress()

    def _state(self, cut: Cut, due: bool) -> bytes:
        """The state after taking out `cut`; what it refers to is written, and on disk where a checkpoint is due.

        It goes along with every batch, so that a run that is asked to stop can be saved at any step.
        """
        s = self.scheduler
        places = self.spool.put(s.held())
        if due:
            self.spool.sync()
        self.first_segments[cut.step] = self.spool.first_needed
        complete = [step for step, _ in checkpoint.complete(self.run_dir)]
        self.first_segments = still_needed(self.first_segments, complete, self.config.checkpoint.keep)
        if due:
            self.spool.prune(min(self.first_segments.values()))
            self.spool.roll()
        self._write_fates(sync=False)
        self.log.add(
            "cut",
            step=cut.step,
            **self._frontier(),
            batch=[(r.ordinal, r.index, r.id) for r in cut.rollouts],
            staleness_max=max(cut.staleness),
        )
        self.log.sync()
        return encode(
            State(SCHEMA, s.state(), self.curriculum.state(), places, self.first_segments, self.log.seq, self.next_evaluation)
        )

    def _frontier(self) -> dict[str, Any]:
        """How far the data order is opened, what of it is open, and the rules till then: a resume may change them."""
        s, rules = self.scheduler, self.scheduler.rules
        named = {"batch_size": rules.batch_size, "group_size": rules.group_size, "lead": rules.lead}
        return {"position": s.position, "open": open_members(s.open_members()), "rules": named}

    async def _acknowledgements(self) -> None:
        async for trained in self.server.trained():
            self.scheduler.trained(trained.step)
            self._write_fates()
            self._progress()

    def _write_fates(self, *, sync: bool = True) -> None:
        self.log.fates(self.scheduler.fates)
        self.scheduler.fates.clear()
        if sync:
            self.log.sync()

    # -- weights and evaluation ----------------------------------------------------------------------------------------

    def step_of(self, version: int) -> int | None:
        """The step of a version of the surviving lineage. The lineage changes at a start only, so an answer holds."""
        if version not in self._steps and self.versions.is_surviving(version):
            self._steps[version] = self.versions.step_of(version)
        return self._steps.get(version)

    def _training_replicas(self) -> list[Replica]:
        there = self.replicas()
        return [r for r in there if r.name != self.held] if len(there) > 1 else there

    async def _poll_weights(self, waits_for: str = "") -> None:
        """Ask the engines which version they have applied, if the log has a newer one than they had."""
        s, now = self.scheduler, time.monotonic()
        if now - self._polled < self.config.transport.poll_s or (self.held and len(self.replicas()) == 1):
            return
        self._polled = now
        current = self.versions.current()
        newest = self.step_of(current) if current is not None else None
        if newest is None or newest == s.confirmed:
            return
        if waits_for:
            self.waits.on(waits_for)
        names = {r.name for r in self._training_replicas()}
        applied = [self.step_of(v) for name, v in (await self.client.versions()).items() if name in names]
        steps = [step for step in applied if step is not None]
        if steps and len(steps) == len(applied) and min(steps) != s.confirmed:
            s.confirm(min(steps))
            self._progress()
            step = s.confirmed if s.confirmed is not None else -1
            if self.config.trainer.steps > step >= self.next_evaluation > 0 and "evaluation" not in self.background:
                self._begin_evaluation("running", self.config.evaluation.tasks_in_run)

    def _begin_evaluation(self, stage: str, count: int) -> None:
        """One replica keeps its weights; where it is the only one, no training rollout is dispatched meanwhile."""
        replica = self.replicas()[-1]
        self.held = replica.name
        self.scheduler.paused = len(self.replicas()) == 1 or self.config.run.deterministic
        self.status.set(phase="evaluating")
        every = self.config.evaluation.every
        self.next_evaluation = ((self.scheduler.confirmed or 0) // every + 1) * every
        self._spawn("evaluation", self._evaluation(replica, stage, evaluation.held_out(self.envs, count)))

    async def _evaluation(self, replica: Replica, stage: str, places: list[Place]) -> None:
        try:
            version, result = await self._evaluated(replica, places)
        except EngineError as error:
            others = [r for r in self.replicas() if r.name != replica.name]
            if not others:
                raise
            log.warning("evaluating anew on %s: %s", others[-1].name, error)
            self.held = others[-1].name
            version, result = await self._evaluated(others[-1], places)
        finally:
            self.held, self.scheduler.paused = None, False
            self.status.set(phase="generating")
        step = self.versions.step_of(version)
        if not result.complete:
            log.warning("evaluation of step %d is incomplete: %s", step, result.reason)
        self.metrics.log("eval", step=step, stage=stage, **asdict(result))

    async def _evaluated(self, replica: Replica, places: list[Place]) -> tuple[int, evaluation.Evaluation]:
        """The replica's version and its answers; EngineError where it is lost meanwhile."""

        lost = False

        def there() -> list[Replica]:
            nonlocal lost
            lost = lost or replica not in self.replicas()
            if lost:
                raise EngineError(f"{replica.name} ({replica.url}): no longer among the replicas")
            return [replica]

        e = self.config.evaluation
        client = Client(there, self.run_dir.secret, moe_layers=self.moe_layers, timeout_s=e.timeout_s)
        async with client:
            version = await client.hold_updates(replica, e.timeout_s + 10)
            result = await evaluation.evaluate(
                places,
                self.envs,
                client.generate,
                self.tokenizer,
                self.config.sampling,
                version=version,
                seed=self.config.run.seed,
                greedy=e.greedy,
                top_p=e.top_p,
                top_k=e.top_k,
                timeout_s=e.timeout_s,
                max_in_flight=self.config.orchestrator.max_in_flight,
                forget=client.forget,
                progress=lambda done, of: self._progress(),
            )
            there()  # a lost replica may still answer this, but what it failed meanwhile would count as judged
            await client.release_updates(replica)
        return version, result

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _something(self, what: str = "") -> None:
        """Until something has happened, or a tick has passed; the wait is named, and bounded by `launch.wait_timeout_s`."""
        self.waits.on(what or self._waits_for())
        await self._pause()
        await self._poll_weights()

    async def _pause(self) -> None:
        behind = self.scheduler.confirmed is None or self.scheduler.confirmed < self.scheduler.step
        try:
            async with asyncio.timeout(self.config.transport.poll_s if behind else TICK_S):
                await self.changed.wait()
        except TimeoutError:
            self.waits.check()
        self.changed.clear()
        self.status.beat()
        for name, task in list(self.background.items()):
            if task.done():
                del self.background[name]
                task.result()

    def _waits_for(self) -> str:
        s = self.scheduler
        if s.paused:
            return f"the evaluation of step {s.confirmed} to end"
        if s.flying and self.rollouts:
            return f"rollouts for batch {s.step + 1}"
        if s.acknowledged < s.step:
            return f"the trainer to finish step {s.acknowledged + 1}"
        return f"inference to apply the weights of step {s.acknowledged}"

    def _progress(self) -> None:
        self.waits.moved()
        self.changed.set()

    def _spawn(self, name: str, work: Any) -> None:
        task = self.background[name] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._progress())

    def _fail(self, error: BaseException) -> None:
        async def fail() -> None:
            raise error

        self._spawn("rollout", fail())
