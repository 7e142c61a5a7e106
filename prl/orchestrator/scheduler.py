"""What to generate next, what goes into batch n, and what becomes of every rollout. Pure: no clock, network or randomness.

A task of the data order is a group of `group_size` members. A member is waiting, flying (being generated) or done; a group
whose members are all done is settled: judged, filtered or failed; judged rollouts queue up, lowest ordinal first, until a
batch of exactly `batch_size` is cut. A group may be split over two batches: its advantages are known by then.

Clock. Batch n trains the weights of step n − 1 into step n, so a rollout's staleness in batch n is (n − 1) − the step of the
oldest version that sampled one of its trainable tokens. With B rollouts a batch, c the step that the engines have confirmed
and `lead` the bound, a new group opens only while

    cut · B + queued + open < min(c + lead + 1, steps) · B

so that what is opened first fits, fresh from step c, into a batch that may still use it (the capacity rule of AReaL, arXiv
2505.24298). It holds for the next batch always, so dropping stale rollouts never starves.

Invariants, checked by tests/orchestrator/test_scheduler.py: every member of every opened ordinal is in exactly one of
waiting, flying, done, queued, cut, or has exactly one final fate; batches are full; staleness is bounded.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from prl.config.schema import RunConfig
from prl.orchestrator.curriculum import Place
from prl.samples import Rollout

JUDGED = ("finished", "truncated")
"""Outcomes whose reward counts."""
RETRIED = ("environment_error", "timed_out")
"""Outcomes tried again with new noise, `env.retries` times."""
ENGINE_TRIES = 4
"""Dispatches of a member whose engine failed, or had weights of an abandoned lineage, until it counts as failed."""
FLOAT32_MAX = float(np.finfo(np.float32).max)
AHEAD = 2
"""Batches cut and not trained yet: the one that trains and the one fetched ahead of need."""


class QueueTooSmall(ValueError):
    """`orchestrator.queue_bytes` does not hold one batch."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that the scheduler reads; `lead` is the staleness bound, 0 in synchronous runs."""

    batch_size: int
    group_size: int
    steps: int
    lead: int = 2
    mask_stale: bool = False
    lockstep: bool = False
    max_in_flight: int = 256
    max_refills: int = 20
    max_failed_fraction: float = 0.5
    queue_bytes: int = 1 << 30
    retries: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, config: RunConfig) -> Rules:
        o, deterministic = config.orchestrator, config.run.deterministic
        return cls(
            batch_size=o.batch_size,
            group_size=o.group_size,
            steps=config.trainer.steps,
            lead=0 if o.synchronous or deterministic else o.max_staleness,
            mask_stale=o.stale == "mask",
            lockstep=deterministic,
            max_in_flight=o.max_in_flight,
            max_refills=o.max_refills,
            max_failed_fraction=o.max_failed_fraction,
            queue_bytes=o.queue_bytes,
            retries=tuple(env.retries for env in config.envs),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """One rollout to generate. (ordinal, index, attempt) key its sampling noise; `id` is unique for ever."""

    id: str
    ordinal: int
    index: int
    attempt: int
    place: Place


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of members of one ordinal. `members` are (index, rollout id).

    Final: trained (in batch `step`), filtered, failed, stale, each for a named reason. Not final: requeued.
    """

    fate: str
    ordinal: int
    members: tuple[tuple[int, str], ...]
    reason: str = ""
    step: int | None = None


FINAL = ("trained", "filtered", "failed", "stale")


@dataclass(slots=True)
class Member:
    attempt: int = 0
    tries: int = 0
    id: str = ""
    rollout: Rollout | None = None
    failure: str = ""

    @property
    def done(self) -> bool:
        return self.rollout is not None or bool(self.failure)


@dataclass(slots=True)
class Group:
    ordinal: int
    place: Place
    members: dict[int, Member]


@dataclass(frozen=True, slots=True, order=True)
class Queued:
    """A judged rollout with its advantages. Sorted by place in the data order: the oldest go first."""

    ordinal: int
    index: int
    rollout: Rollout = field(compare=False)
    place: Place = field(compare=False)
    oldest: int = field(compare=False)
    newest: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Cut:
    """Batch `step`: exactly batch_size rollouts, in the data order, and the staleness of each; `lost` were replaced for it."""

    step: int
    rollouts: list[Rollout]
    staleness: list[int]
    lost: int


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The refills of a batch are used up; `solved`: because every group dropped was solved by all its members."""

    reason: str
    solved: bool


class GroupState(msgspec.Struct, array_like=True):
    ordinal: int
    place: tuple[int, int]
    members: list[tuple[int, int, int, str]]
    """(index, attempt, tries, id of the finished rollout or "")."""


class QueuedState(msgspec.Struct, array_like=True):
    ordinal: int
    index: int
    place: tuple[int, int]
    id: str
    advantage: float


class SchedulerState(msgspec.Struct):
    """After taking out batches up to `step`. Rollouts are named by id; the spool holds them."""

    step: int
    position: int
    groups: list[GroupState]
    queue: list[QueuedState]
    awaiting: list[tuple[int, list[tuple[int, int, str]]]]
    """Batches cut and not acknowledged: (step, [(ordinal, index, id)])."""
    totals: dict[str, int]


def spread(rollout: Rollout) -> tuple[int, int] | None:
    """The oldest and the newest version of a rollout's trainable tokens; None where nothing is trainable."""
    versions = [v for s in rollout.samples if len(v := s.versions[s.trainable])]
    return (min(int(v.min()) for v in versions), max(int(v.max()) for v in versions)) if versions else None


def length_bucket(n_tokens: int) -> int:
    """Upper bound of the power-of-two bucket that drops are counted by."""
    return 1 << max(n_tokens - 1, 0).bit_length()


def give_advantage(rollout: Rollout, advantage: float) -> None:
    rollout.advantage = advantage
    for s in rollout.samples:
        s.advantages = np.where(s.trainable, np.float32(advantage), np.float32(0))


class Scheduler:
    """The state machine. Events in: `confirm`, `started`, `finished`, `trained`. Decisions out: `dispatch`, `overdue`, `cut`,
    `exhausted`; `fates` and `dropped` gather what happened for whoever writes it down.

    `draw` names the task of the next ordinal; `observe` hears a judged group's mean reward; `advantages` maps a group's
    surviving rollouts to one number each; `step_of` maps a version to its step, None where it is unknown or abandoned.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        draw: Callable[[int], Place],
        observe: Callable[[Place, float], None],
        advantages: Callable[[Sequence[Rollout]], Iterable[float]],
        step_of: Callable[[int], int | None],
        new_id: Callable[[int, int], str],
    ):
        self.rules = rules
        self._draw, self._observe, self._advantages, self._step_of, self._new_id = draw, observe, advantages, step_of, new_id
        self.position = 0
        self.step = 0
        """Batches cut."""
        self.acknowledged = 0
        self.confirmed: int | None = None
        self.paused = False
        self.groups: dict[int, Group] = {}
        self.flying: dict[str, Work] = {}
        self.fates: list[Fate] = []
        self.dropped: Counter[tuple[str, int]] = Counter()
        """(reason, length bucket) since the last `take_dropped`."""
        self.totals: Counter[str] = Counter()
        self._since: dict[str, int] = {}
        self._waiting: list[tuple[int, int]] = []
        self._queue: list[Queued] = []
        self._awaiting: dict[int, list[tuple[int, int, str]]] = {}
        self._held_bytes = 0
        self._largest = 0
        self._round_sealed = False
        self._lost, self._lost_solved = 0, 0

    # -- events --------------------------------------------------------------------------------------------------------

    def confirm(self, step: int) -> None:
        """The engines apply the weights of `step`. A step that no cut batch can have made is of an abandoned lineage."""
        if step <= self.step:
            self.confirmed = step

    def started(self, rollout_id: str, step: int) -> None:
        """A rollout's engine had confirmed the weights of `step` at its first turn."""
        if rollout_id in self.flying:
            self._since[rollout_id] = step

    def finished(self, rollout: Rollout) -> None:
        """Account for a rollout that was dispatched: it counts, is tried again, or has failed for a named reason."""
        work = self.flying.pop(rollout.id)
        self._since.pop(rollout.id, None)
        member = self.groups[work.ordinal].members[work.index]
        versions = spread(rollout) if rollout.outcome in JUDGED else None
        failure = rollout.outcome
        if rollout.outcome in JUDGED:
            failure = "empty" if versions is None else "" if np.isfinite(rollout.reward) else "bad_reward"
        if versions is not None and not failure and self._step_of(versions[1]) is None:
            failure = "abandoned"
        if not failure:
            member.rollout = rollout
            self._held_bytes += rollout.nbytes
            self._largest = max(self._largest, rollout.nbytes)
        elif failure in RETRIED and member.attempt < self.rules.retries[work.place[0]]:
            member.attempt += 1
            self._again(work, failure)
        elif failure in ("engine_error", "abandoned") and member.tries < ENGINE_TRIES:
            self._again(work, failure)
        else:
            member.failure = "stale" if failure == "cancelled" else failure
            self._drop(member.failure, rollout.n_tokens)
        if self.rules.lockstep:
            if not self.flying:
                self._round_sealed = False
                for ordinal in sorted(self.groups):
                    self._settle(ordinal)
        else:
            self._settle(work.ordinal)

    def trained(self, step: int) -> None:
        """Every trainer rank finished the optimizer step of batch `step`; batches before it are trained too."""
        for done in sorted(s for s in self._awaiting if s <= step):
            by_ordinal: dict[int, list[tuple[int, str]]] = {}
            for ordinal, index, rollout_id in self._awaiting.pop(done):
                by_ordinal.setdefault(ordinal, []).append((index, rollout_id))
                self.totals["trained"] += 1
            self.fates.extend(Fate("trained", o, tuple(m), step=done) for o, m in by_ordinal.items())
        self.acknowledged = max(self.acknowledged, step)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def dispatch(self) -> Work | None:
        """The next rollout to generate now, or None. Open groups come first, lowest ordinal first."""
        if self.paused or self.confirmed is None or self._round_sealed or self.exhausted() is not None:
            return None
        if len(self.flying) >= self.rules.max_in_flight or not (self._waiting or self._open()):
            self._round_sealed = self.rules.lockstep and bool(self.flying)
            return None
        ordinal, index = heapq.heappop(self._waiting)
        member = self.groups[ordinal].members[index]
        member.tries += 1
        member.id = self._new_id(ordinal, index)
        work = Work(member.id, ordinal, index, member.attempt, self.groups[ordinal].place)
        self.flying[work.id] = work
        return work

    def overdue(self) -> list[str]:
        """Flying rollouts that no batch can use any more; whoever generates them should stop and report them cancelled."""
        if self.rules.mask_stale:
            return []
        return [i for i, since in self._since.items() if self.step - since > self.rules.lead]

    def cut(self) -> Cut | None:
        """Take out the next batch if it is full and the trainer has use for it."""
        r = self.rules
        if len(self._queue) < r.batch_size or self.step >= r.steps or self.step - self.acknowledged >= AHEAD:
            return None
        taken, self._queue = self._queue[: r.batch_size], self._queue[r.batch_size :]
        self.step += 1
        lost, self._lost, self._lost_solved = self._lost, 0, 0
        self._awaiting[self.step] = [(q.ordinal, q.index, q.rollout.id) for q in taken]
        self._held_bytes -= sum(q.rollout.nbytes for q in taken)
        if r.mask_stale:
            for q in taken:
                self._mask(q.rollout, self.step)
        rollouts = [q.rollout for q in taken]
        cut = Cut(self.step, rollouts, [self._staleness(r, self.step) for r in rollouts], lost)
        self._queue = [q for q in self._queue if not self._drop_if_stale(q)]
        return cut

    def exhausted(self) -> Exhausted | None:
        """Whether this batch has used up its refills."""
        limit = self.rules.max_refills * self.rules.batch_size
        if self._lost <= limit:
            return None
        reasons = Counter({reason: 0 for reason, _ in self.dropped})
        for (reason, _), count in self.dropped.items():
            reasons[reason] += count
        named = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        few = "; next to nothing is solved: warm-start the model longer (sft), or take easier tasks"
        return Exhausted(
            f"batch {self.step + 1} lost {self._lost} rollouts, more than orchestrator.max_refills = {self.rules.max_refills} "
            f"batches of {self.rules.batch_size} ({named}){few if reasons['unsolved'] * 2 > self._lost else ''}",
            solved=self._lost == self._lost_solved,
        )

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def held_bytes(self) -> int:
        """Bytes of finished rollouts that wait for their group or for a batch."""
        return self._held_bytes

    @property
    def finished_all(self) -> bool:
        """The last batch is cut."""
        return self.step >= self.rules.steps

    def take_dropped(self) -> dict[str, dict[str, int]]:
        """Drops since the last call: {reason: {bucket upper bound: count}}."""
        out: dict[str, dict[str, int]] = {}
        for (reason, bucket), count in sorted(self.dropped.items()):
            out.setdefault(reason, {})[str(bucket)] = count
        self.dropped.clear()
        return out

    def open_members(self) -> Iterator[tuple[int, int]]:
        """(ordinal, index) of every member without a final fate: in an open group, queued, or cut and not acknowledged."""
        for ordinal, group in self.groups.items():
            yield from ((ordinal, index) for index in group.members)
        yield from ((q.ordinal, q.index) for q in self._queue)
        for batch in self._awaiting.values():
            yield from ((ordinal, index) for ordinal, index, _ in batch)

    # -- checkpoint ----------------------------------------------------------------------------------------------------

    def held(self) -> Iterator[Rollout]:
        """Finished rollouts that the state names by id."""
        yield from (m.rollout for g in self.groups.values() for m in g.members.values() if m.rollout is not None)
        yield from (q.rollout for q in self._queue)

    def state(self) -> SchedulerState:
        return SchedulerState(
            step=self.step,
            position=self.position,
            groups=[
                GroupState(
                    g.ordinal, g.place, [(i, m.attempt, m.tries, m.id if m.rollout else "") for i, m in g.members.items()]
                )
                for g in self.groups.values()
            ],
            queue=[QueuedState(q.ordinal, q.index, q.place, q.rollout.id, q.rollout.advantage) for q in self._queue],
            awaiting=list(self._awaiting.items()),
            totals=dict(self.totals),
        )

    def load(self, state: SchedulerState, rollouts: dict[str, Rollout]) -> None:
        """Go on from a checkpoint of step `state.step`, whose batches are all trained.

        `rollouts` are the finished ones by id, as far as the spool still has them. One that is missing or holds versions of
        the abandoned lineage is dropped and counted, and its member generated anew; so is every member in flight then.
        """
        self.position, self.step = state.position, state.step
        self.totals = Counter(state.totals)
        self._awaiting = {step: list(members) for step, members in state.awaiting}
        self.trained(state.step)
        kept = {i: r for i, r in rollouts.items() if (v := spread(r)) is not None and self._step_of(v[1]) is not None}
        for g in state.groups:
            members = {
                index: Member(attempt, 0 if not (r := kept.get(rollout_id)) else tries, rollout_id if r else "", r)
                for index, attempt, tries, rollout_id in g.members
            }
            self._reopen(Group(g.ordinal, g.place, members), {i for _, _, _, i in g.members if i} - set(kept))
        broken = {q.ordinal for q in state.queue if q.id not in kept}
        named = {i for g in state.groups for *_, i in g.members} | {q.id for q in state.queue}
        self._held_bytes = sum(r.nbytes for i, r in kept.items() if i in named)
        groups: dict[int, Group] = {}
        for q in state.queue:
            if q.ordinal in broken:
                group = groups.setdefault(q.ordinal, Group(q.ordinal, q.place, {}))
                group.members[q.index] = Member(id=q.id if q.id in kept else "", rollout=kept.get(q.id))
            else:
                give_advantage(kept[q.id], q.advantage)
                self._enqueue(q.ordinal, q.index, q.place, kept[q.id])
        for group in groups.values():
            self._reopen(group, {q.id for q in state.queue if q.ordinal == group.ordinal} - set(kept))
        for ordinal in sorted(self.groups):
            self._settle(ordinal)

    def _reopen(self, group: Group, lost: set[str]) -> None:
        self.groups[group.ordinal] = group
        again = [i for i, m in group.members.items() if not m.done]
        for index in again:
            heapq.heappush(self._waiting, (group.ordinal, index))
        for _ in lost:
            self._drop("abandoned", 0)
        if again:
            self.fates.append(Fate("requeued", group.ordinal, tuple((i, "") for i in again), reason="resume"))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Open the next ordinal's group if the staleness and the byte bounds allow it."""
        r = self.rules
        assert self.confirmed is not None
        unfinished = sum(len(g.members) for g in self.groups.values())
        if self.step * r.batch_size + len(self._queue) + unfinished >= min(self.confirmed + r.lead + 1, r.steps) * r.batch_size:
            return False
        if self._held_bytes + self._largest * (len(self.flying) + len(self._waiting) + r.group_size) > r.queue_bytes:
            if not (self.flying or self._waiting) and len(self._queue) < r.batch_size:
                raise QueueTooSmall(
                    f"orchestrator.queue_bytes = {r.queue_bytes}: {len(self._queue)} finished rollouts take "
                    f"{self._held_bytes} bytes and the next group up to {self._largest * r.group_size}, but a batch needs "
                    f"{r.batch_size} rollouts; raise it or lower orchestrator.batch_size"
                )
            return False
        ordinal = self.position
        self.position += 1
        self.groups[ordinal] = Group(ordinal, self._draw(ordinal), {i: Member() for i in range(r.group_size)})
        for index in range(r.group_size):
            heapq.heappush(self._waiting, (ordinal, index))
        return True

    def _again(self, work: Work, reason: str) -> None:
        self.totals[f"retried: {reason}"] += 1
        heapq.heappush(self._waiting, (work.ordinal, work.index))

    def _settle(self, ordinal: int) -> None:
        """Judge a group whose members are all done.

        The rule of failed members: a group of which more than `max_failed_fraction` failed is dropped whole; else the
        survivors alone form the baseline and train.
        """
        group = self.groups[ordinal]
        if not all(m.done for m in group.members.values()):
            return
        survivors = {i: m.rollout for i, m in group.members.items() if m.rollout is not None}
        rollouts = list(survivors.values())
        rewards = [r.reward for r in rollouts]
        failed = len(group.members) - len(survivors) > self.rules.max_failed_fraction * len(group.members) or not rollouts
        level = not failed and min(rewards) == max(rewards)
        # Before anything changes: it may raise, and a state saved afterwards must have the group.
        given = [] if failed or level else self._judged(rollouts)
        del self.groups[ordinal]
        for index, member in group.members.items():
            if member.failure:
                self.fates.append(
                    Fate("stale" if member.failure == "stale" else "failed", ordinal, ((index, member.id),), member.failure)
                )
        if failed:
            return self._discard("failed", "group_failed", group, survivors)
        self._observe(group.place, float(np.mean(rewards)))
        if level:
            reason = "solved" if rewards[0] >= 1 else "unsolved" if rewards[0] <= 0 else "no_signal"
            return self._discard("filtered", reason, group, survivors)
        for (index, rollout), advantage in zip(survivors.items(), given, strict=True):
            give_advantage(rollout, advantage)
            self._enqueue(ordinal, index, group.place, rollout)

    def _judged(self, rollouts: list[Rollout]) -> list[float]:
        """The advantages of a group's survivors; ValueError for one that the record's float32 cannot hold."""
        given = [float(a) for a in self._advantages(rollouts)]
        for rollout, advantage in zip(rollouts, given, strict=True):
            if not abs(advantage) <= FLOAT32_MAX:
                raise ValueError(
                    f"advantage of rollout {rollout.id}: {advantage}, expected a finite float32 "
                    f"(rewards {[r.reward for r in rollouts]}); see orchestrator.advantage"
                )
        return given

    def _discard(self, fate: str, reason: str, group: Group, survivors: dict[int, Rollout]) -> None:
        for rollout in survivors.values():
            self._drop(reason, rollout.n_tokens)
            self._held_bytes -= rollout.nbytes
        if survivors:
            self.fates.append(Fate(fate, group.ordinal, tuple((i, r.id) for i, r in survivors.items()), reason))

    def _enqueue(self, ordinal: int, index: int, place: Place, rollout: Rollout) -> None:
        versions = spread(rollout)
        assert versions is not None
        queued = Queued(ordinal, index, rollout, place, *versions)
        if not self._drop_if_stale(queued):
            insort(self._queue, queued)

    def _drop_if_stale(self, q: Queued) -> bool:
        """Drop what the next batch, and so any later one, may not use: over the bound, or in mask mode wholly over it."""
        step = self._step_of(q.newest if self.rules.mask_stale else q.oldest)
        assert step is not None
        if step >= self.step - self.rules.lead:
            return False
        self._held_bytes -= q.rollout.nbytes
        self._drop("stale", q.rollout.n_tokens)
        self.fates.append(Fate("stale", q.ordinal, ((q.index, q.rollout.id),), reason="max_staleness"))
        return True

    def _mask(self, rollout: Rollout, step: int) -> None:
        """Take the policy gradient off tokens over the staleness bound in batch `step`."""
        for s in rollout.samples:
            sampled = np.unique(s.versions[s.trainable])
            old = [v for v in sampled if (at := self._step_of(int(v))) is None or step - 1 - at > self.rules.lead]
            if old:
                stale = s.trainable & np.isin(s.versions, old)
                self.totals["masked_tokens"] += int(stale.sum())
                s.trainable = s.trainable & ~stale
                s.advantages = np.where(s.trainable, s.advantages, np.float32(0))

    def _staleness(self, rollout: Rollout, step: int) -> int:
        versions = spread(rollout)
        at = self._step_of(versions[0]) if versions else None
        assert at is not None, f"rollout {rollout.id} in batch {step} has no version of the surviving lineage"
        return step - 1 - at

    def _drop(self, reason: str, n_tokens: int) -> None:
        self.dropped[reason, length_bucket(n_tokens)] += 1
        self.totals[reason] += 1
        self._lost += 1
        self._lost_solved += reason == "solved"
