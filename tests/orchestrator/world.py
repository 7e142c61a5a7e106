"""A world around the scheduler for its tests: engine, trainer with checkpoints, spool and fates, all in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from prl.orchestrator.curriculum import Uniform
from prl.orchestrator.scheduler import FINAL, Cut, Fate, Rules, Scheduler, SchedulerState, Work
from prl.samples import Rollout, Sample


def sample_of(versions: Sequence[int], prompt: int = 2) -> Sample:
    s = Sample.of_prompt(np.arange(prompt + len(versions)))
    s.trainable[prompt:] = True
    s.versions[prompt:] = versions
    s.logprobs[prompt:] = -1.0
    return s


def rollout_of(work: Work, *, reward: float, versions: Sequence[int], outcome: str = "finished") -> Rollout:
    rollout = Rollout(work.id, "env", str(work.place), work.ordinal, work.index, work.attempt, reward, outcome)
    rollout.samples = [sample_of(versions)] if len(versions) else [Sample.of_prompt([1, 2])]
    return rollout


class World:
    def __init__(self, rules: Rules, seed: int = 0, every: int = 2):
        self.rules, self.seed, self.every = rules, seed, every
        self.ids = 0
        self.steps: dict[int, int] = {0: 0}  # version to step
        self.abandoned: set[int] = set()
        self.engine = 0  # the version that samples
        self.published = 0
        self.trained = 0
        self.spool: dict[str, Rollout] = {}
        self.checkpoint: tuple[int, bytes | None, int] = (0, None, 0)  # step, state, fates written by then
        self.states: dict[int, tuple[bytes, int]] = {}
        self.offered: dict[int, Cut] = {}
        self.fates: list[Fate] = []
        self.ledger: list[tuple[int, list[str]]] = []
        self.born: dict[str, tuple[Work, int]] = {}
        self.start()

    def step_of(self, version: int) -> int | None:
        return None if version in self.abandoned else self.steps.get(version)

    def new_id(self, ordinal: int, index: int) -> str:
        self.ids += 1
        return f"{ordinal}-{index}-{self.ids}"

    def start(self) -> None:
        self.curriculum = Uniform(self.seed, [7, 5], [2, 1])
        self.scheduler = Scheduler(
            self.rules,
            draw=self.curriculum.draw,
            observe=self.curriculum.observe,
            advantages=lambda rollouts: [r.reward - float(np.mean([q.reward for q in rollouts])) for r in rollouts],
            step_of=self.step_of,
            new_id=self.new_id,
        )
        self.scheduler.confirm(0)

    def flush(self) -> None:
        self.fates += self.scheduler.fates
        self.scheduler.fates.clear()

    def dispatch(self) -> list[Work]:
        out = []
        while (work := self.scheduler.dispatch()) is not None:
            self.born[work.id] = (work, self.engine)
            self.scheduler.started(work.id, self.steps[self.engine])
            out.append(work)
        return out

    def finish(self, rollout_id: str, reward: float, outcome: str = "finished", empty: bool = False) -> None:
        work, first = self.born[rollout_id]
        versions = [] if empty else [v for v in (first, self.engine) if v not in self.abandoned or v == self.engine]
        rollout = rollout_of(work, reward=reward, versions=versions, outcome=outcome)
        self.spool[work.id] = rollout
        self.scheduler.finished(rollout)
        self.flush()

    def cut(self) -> Cut | None:
        cut = self.scheduler.cut()
        if cut is not None:
            self.offered[cut.step] = cut
            self.flush()
            self.states[cut.step] = (msgspec.msgpack.encode(self.scheduler.state()), len(self.fates))
            self.check_batch(cut)
        return cut

    def train(self) -> bool:
        """The trainer takes the next batch, publishes its weights and acknowledges; a checkpoint where one is due."""
        step = self.trained + 1
        if step not in self.offered:
            return False
        cut = self.offered.pop(step)
        self.ledger.append((step, [r.id for r in cut.rollouts]))
        self.trained = step
        self.published = max(self.steps) + 1
        self.steps[self.published] = step
        if step % self.every == 0:
            self.checkpoint = (step, *self.states[step])
        self.scheduler.trained(step)
        self.flush()
        return True

    def update(self) -> None:
        """The engine applies the newest weights."""
        self.engine = self.published
        self.scheduler.confirm(self.steps[self.engine])

    def crash(self, *, late_engine: bool = False) -> None:
        """Everything dies; all go on from the last checkpoint. A late engine still has weights of the abandoned lineage."""
        step, state, written = self.checkpoint
        self.fates = self.fates[:written]
        self.ledger = [(s, ids) for s, ids in self.ledger if s <= step]
        self.abandoned |= {v for v, s in self.steps.items() if s > step}
        self.trained, self.offered, self.born = step, {}, {}
        self.published = max(self.steps) + 1
        self.steps[self.published] = step
        self.start()
        if state is not None:
            self.scheduler.load(msgspec.msgpack.decode(state, type=SchedulerState), self.spool)
        self.flush()
        self.update()
        if late_engine:
            self.engine = max(v for v in self.steps if v != self.published)

    def round(self, reward: float | None = None) -> None:
        """Everybody works once."""
        self.dispatch()
        for i in list(self.scheduler.flying):
            self.finish(i, float(self.scheduler.flying[i].index % 2) if reward is None else reward)
        while self.cut() is not None:
            pass
        self.train()
        self.update()

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check_batch(self, cut: Cut) -> None:
        assert len(cut.rollouts) == self.rules.batch_size
        for rollout, staleness in zip(cut.rollouts, cut.staleness, strict=True):
            steps = [self.step_of(int(v)) for s in rollout.samples for v in s.versions[s.trainable]]
            assert steps and None not in steps
            assert cut.step - 1 - min(s for s in steps if s is not None) == staleness <= self.rules.lead

    def check(self) -> None:
        s, g = self.scheduler, self.rules.group_size
        trained = [i for _, ids in self.ledger for i in ids]
        assert len(set(trained)) == len(trained), "a rollout trained twice"
        final = Counter((f.ordinal, i) for f in self.fates if f.fate in FINAL for i, _ in f.members)
        open_members = Counter(s.open_members())
        assert final + open_members == Counter((o, i) for o in range(s.position) for i in range(g)), "the sums do not close"
        assert sorted(i for f in self.fates if f.fate == "trained" for _, i in f.members) == sorted(trained)
        assert [n for n, _ in self.ledger] == list(range(1, self.trained + 1))
        assert len(s.flying) <= self.rules.max_in_flight
        assert s.step - s.acknowledged <= 2
        held = list(s.held())
        assert s.held_bytes == sum(r.nbytes for r in held) and {r.id for r in held} <= set(self.spool)

    def run_to_end(self, limit: int = 400) -> None:
        """With everybody at work and signal in every group, the run must end: nothing starves, nothing locks up."""
        for _ in range(limit):
            if self.trained == self.rules.steps:
                return
            self.round()
            self.check()
        raise AssertionError(
            f"stuck at step {self.trained}: cut {self.scheduler.step}, confirmed {self.scheduler.confirmed}, "
            f"queued {self.scheduler.queued}, flying {len(self.scheduler.flying)}, exhausted {self.scheduler.exhausted()}"
        )
