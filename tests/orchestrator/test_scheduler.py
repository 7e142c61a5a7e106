from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prl.orchestrator.scheduler import QueueTooSmall, Rules, length_bucket, spread
from tests.orchestrator.world import World, rollout_of

SMALL = Rules(batch_size=8, group_size=4, steps=6, lead=2, max_in_flight=64, max_refills=1000)


class Orchestration(RuleBasedStateMachine):
    """Any order of dispatches, outcomes, trainings, weight updates and crashes."""

    @initialize(
        group_size=st.sampled_from([2, 4]),
        groups=st.integers(1, 3),
        lead=st.integers(0, 3),
        mask=st.booleans(),
        lockstep=st.booleans(),
        in_flight=st.sampled_from([1, 3, 16, 64]),
        retries=st.integers(0, 2),
        failed=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def begin(
        self, group_size: int, groups: int, lead: int, mask: bool, lockstep: bool, in_flight: int, retries: int, failed: float
    ) -> None:
        self.world = World(
            Rules(
                batch_size=group_size * groups,
                group_size=group_size,
                steps=8,
                lead=0 if lockstep else lead,
                mask_stale=mask,
                lockstep=lockstep,
                max_in_flight=in_flight,
                max_refills=10_000,
                max_failed_fraction=failed,
                retries=(retries, retries),
            )
        )

    @rule()
    def dispatch(self) -> None:
        self.world.dispatch()

    @precondition(lambda self: self.world.scheduler.flying)
    @rule(data=st.data(), share=st.floats(0.1, 1.0))
    def finish(self, data: st.DataObject, share: float) -> None:
        flying = sorted(self.world.scheduler.flying)
        for i in flying[: max(1, int(share * len(flying)))]:
            outcome = data.draw(
                st.sampled_from(
                    ["finished"] * 6 + ["truncated", "environment_error", "timed_out", "engine_error", "bad_reward"]
                )
            )
            reward = data.draw(st.sampled_from([0.0, 1.0, 1.0, float("nan")]))
            self.world.finish(i, reward, outcome, empty=data.draw(st.integers(0, 9)) == 0)

    @rule()
    def cancel_overdue(self) -> None:
        for i in self.world.scheduler.overdue():
            self.world.finish(i, 0.0, "cancelled")

    @rule()
    def cut(self) -> None:
        self.world.cut()

    @rule()
    def train(self) -> None:
        self.world.train()

    @rule()
    def update(self) -> None:
        self.world.update()

    @rule(rounds=st.integers(1, 4))
    def work(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.round()

    @rule(lose=st.booleans(), foul=st.booleans(), late_engine=st.booleans())
    def crash(self, lose: bool, foul: bool, late_engine: bool) -> None:
        """Also with a spooled rollout gone, or with one found to hold weights of the abandoned lineage."""
        if lose and self.world.spool:
            self.world.spool.pop(sorted(self.world.spool)[len(self.world.spool) // 2])
        gone = {v for v, s in self.world.steps.items() if s > self.world.checkpoint[0]}
        if foul and gone and self.world.spool:
            victim = self.world.spool[sorted(self.world.spool)[len(self.world.spool) // 3]]
            for s in victim.samples:
                s.versions[s.trainable] = max(gone)
        self.world.crash(late_engine=late_engine)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_to_end()


# Shrinking takes minutes; let it run (all phases) when a failure here is to be understood.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
Orchestration.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, phases=PHASES)
TestOrchestration = Orchestration.TestCase


def test_synchronous_rules_hold_back_the_next_batch_until_its_weights_are_applied() -> None:
    world = World(Rules(batch_size=8, group_size=4, steps=4, lead=0))
    assert len(world.dispatch()) == 8
    for i in list(world.scheduler.flying):
        world.finish(i, float(world.scheduler.flying[i].index % 2))
    assert world.cut() is not None
    assert world.dispatch() == [] and world.train()
    assert world.dispatch() == [], "the engine has not applied step 1 yet"
    world.update()
    assert len(world.dispatch()) == 8


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_dispatch_stops_where_a_rollout_would_have_to_exceed_the_bound(lead: int) -> None:
    world = World(Rules(batch_size=8, group_size=4, steps=100, lead=lead, max_in_flight=10_000))
    assert len(world.dispatch()) == 8 * (lead + 1)
    for i in list(world.scheduler.flying):
        world.finish(i, float(world.scheduler.flying[i].index % 2))
    while world.cut() or world.train():
        pass
    assert world.trained == lead + 1, "what was dispatched at step 0 fills exactly the batches that may use it"


def stale_world(*, mask: bool) -> tuple[World, str]:
    """Two batches are cut while one member of the first group, begun at step 0, is still being generated."""
    world = World(Rules(batch_size=4, group_size=4, steps=9, lead=1, mask_stale=mask, max_failed_fraction=0.9))
    slow = world.dispatch()[0].id
    while world.trained < 2:
        world.dispatch()
        for i in [i for i in world.scheduler.flying if i != slow]:
            world.finish(i, float(world.scheduler.flying[i].index % 2))
        world.cut()
        world.train()
        world.update()
    return world, slow


def test_a_rollout_over_the_bound_is_cancelled_dropped_and_counted_by_length() -> None:
    world, slow = stale_world(mask=False)
    assert world.scheduler.overdue() == [slow]
    world.finish(slow, 1.0, "cancelled")
    assert world.scheduler.take_dropped()["stale"] == {"4": 4}, "it and its group, whose other members waited for it"
    assert {f.fate for f in world.fates if f.ordinal == 0} == {"stale"}
    world.run_to_end()


def test_a_rollout_that_ends_over_the_bound_is_dropped() -> None:
    world, slow = stale_world(mask=False)
    world.finish(slow, 0.5)
    (dropped,) = [f for f in world.fates if slow in [i for _, i in f.members]]
    assert (dropped.fate, dropped.reason) == ("stale", "max_staleness")
    assert all(min(r.samples[0].versions[2:]) >= 1 for r in world.scheduler.held())
    world.run_to_end()


def test_a_rollout_sampled_by_weights_of_an_abandoned_lineage_is_generated_anew() -> None:
    world = World(Rules(batch_size=4, group_size=4, steps=6, lead=2), every=1)
    while world.trained < 2:
        world.round()
    world.checkpoint = (1, *world.states[1])
    world.crash(late_engine=True)
    (work, *_) = world.dispatch()
    world.finish(work.id, 1.0)
    assert work.id not in {r.id for r in world.scheduler.held()}
    assert world.scheduler.totals["retried: abandoned"] == 1
    world.update()
    (again,) = world.dispatch()
    assert (again.ordinal, again.index, again.attempt) == (work.ordinal, work.index, work.attempt)
    world.run_to_end()


def test_masking_keeps_the_fresh_tokens_of_a_rollout_over_the_bound() -> None:
    world, slow = stale_world(mask=True)
    assert world.scheduler.overdue() == []
    world.finish(slow, 0.5)  # its first token is of step 0, its last of step 2
    world.dispatch()
    for i in list(world.scheduler.flying):
        world.finish(i, float(world.scheduler.flying[i].index % 2))
    cut = world.cut()
    assert cut is not None
    (rollout,) = [r for r in cut.rollouts if r.id == slow]
    assert rollout.samples[0].trainable.tolist() == [False, False, False, True]
    assert rollout.samples[0].advantages[:3].tolist() == [0, 0, 0] and rollout.samples[0].advantages[3] != 0
    assert cut.staleness[cut.rollouts.index(rollout)] == 0


def test_groups_without_signal_are_filtered_and_refilled_until_refills_run_out() -> None:
    world = World(Rules(batch_size=8, group_size=4, steps=2, lead=1, max_refills=2, max_in_flight=8))
    for _ in range(3):
        assert len(world.dispatch()) == 8
        for i in list(world.scheduler.flying):
            world.finish(i, 1.0)
    exhausted = world.scheduler.exhausted()
    assert exhausted is not None and exhausted.solved and "solved 24" in exhausted.reason
    assert world.dispatch() == []
    assert {(f.fate, f.reason) for f in world.fates} == {("filtered", "solved")}


def test_exhaustion_is_not_learning_when_one_group_failed_to_solve() -> None:
    world = World(Rules(batch_size=8, group_size=4, steps=2, lead=1, max_refills=2, max_in_flight=8))
    for n in range(3):
        world.dispatch()
        for i in list(world.scheduler.flying):
            world.finish(i, 0.0 if n == 1 and world.scheduler.flying[i].index < 4 else 1.0)
    exhausted = world.scheduler.exhausted()
    assert exhausted is not None and not exhausted.solved


@pytest.mark.parametrize("failed, trains", [(1, True), (2, True), (3, False)])
def test_survivors_of_a_group_train_with_their_own_baseline_up_to_the_failed_fraction(failed: int, trains: bool) -> None:
    world = World(Rules(batch_size=4, group_size=4, steps=2, lead=1, max_failed_fraction=0.5, max_in_flight=4, retries=(0, 0)))
    for work in world.dispatch():
        outcome = "bad_reward" if work.index < failed else "finished"
        world.finish(work.id, float(work.index == 3), outcome)
    assert world.scheduler.queued == (4 - failed if trains else 0)
    reasons = {f.reason for f in world.fates}
    assert reasons == ({"bad_reward"} if trains else {"bad_reward", "group_failed"})
    if trains:
        assert sum(r.advantage for r in world.scheduler.held()) == pytest.approx(0)
    world.run_to_end()


@pytest.mark.parametrize("reward", [1e39, 1e307])
def test_a_group_whose_advantages_cannot_be_had_keeps_its_place(reward: float) -> None:
    world = World(Rules(batch_size=4, group_size=4, steps=2))
    works = [w for w in world.dispatch() if w.ordinal == 0]
    for work in works[:-1]:
        world.finish(work.id, reward)
    with pytest.raises(ValueError, match="expected a finite float32"):
        world.finish(works[-1].id, -reward)
    world.check()


def test_an_environment_error_is_tried_again_with_new_noise_an_engine_error_with_the_same() -> None:
    world = World(Rules(batch_size=2, group_size=2, steps=1, lead=0, retries=(1, 1)))
    first = {w.index: w for w in world.dispatch()}
    world.finish(first[0].id, 0.0, "environment_error")
    world.finish(first[1].id, 0.0, "engine_error")
    again = {w.index: w for w in world.dispatch()}
    assert (again[0].attempt, again[1].attempt) == (1, 0)
    assert {again[0].id, again[1].id}.isdisjoint({first[0].id, first[1].id})
    world.finish(again[0].id, 0.0, "environment_error")
    assert world.dispatch() == [], "retries are used up"


def test_lockstep_rounds_do_not_depend_on_the_order_of_completion() -> None:
    def run(reverse: bool) -> list[tuple[int, int, float]]:
        world = World(Rules(batch_size=8, group_size=4, steps=3, lead=0, lockstep=True, max_in_flight=6))
        out = []
        while world.trained < 3:
            works = world.dispatch()
            assert not works or world.dispatch() == []
            for work in sorted(works, key=lambda w: (w.ordinal, w.index), reverse=reverse):
                world.finish(work.id, float((work.ordinal + work.index) % 2 if work.ordinal % 3 else 1))
                assert not world.scheduler.flying or world.dispatch() == [], "no newcomer joins a round"
            if (cut := world.cut()) is not None:
                out += [(r.ordinal, r.index, r.advantage) for r in cut.rollouts]
                world.train()
                world.update()
        return out

    assert run(False) == run(True)


def test_the_byte_bound_holds_dispatch_back_and_an_impossible_one_is_an_error() -> None:
    rules = Rules(batch_size=8, group_size=4, steps=9, lead=3, max_in_flight=8)
    world = World(rules)
    size = rollout_of(world.dispatch()[0], reward=0, versions=[0, 0]).nbytes
    bounded = World(Rules(**{**{f: getattr(rules, f) for f in rules.__slots__}, "queue_bytes": 17 * size}))
    for _ in range(9):
        bounded.dispatch()
        for i in list(bounded.scheduler.flying):
            bounded.finish(i, float(bounded.scheduler.flying[i].index % 2))
        assert bounded.scheduler.held_bytes <= 17 * size
    assert bounded.scheduler.queued == 16 and bounded.scheduler.dispatch() is None
    bounded.run_to_end()
    tight = World(Rules(**{**{f: getattr(rules, f) for f in rules.__slots__}, "queue_bytes": 7 * size, "max_in_flight": 4}))
    with pytest.raises(QueueTooSmall, match="orchestrator.queue_bytes"):
        tight.run_to_end()


def test_a_resume_keeps_finished_members_and_counts_what_the_abandoned_lineage_sampled() -> None:
    world = World(Rules(batch_size=4, group_size=4, steps=6, lead=2, max_in_flight=64), every=1)
    world.dispatch()
    for i in list(world.scheduler.flying)[:7]:
        world.finish(i, float(world.scheduler.flying[i].index % 2))
    world.cut()  # ordinal 0 is cut; three members of ordinal 1 are finished
    world.train()
    kept = {r.id for r in world.scheduler.held()}
    assert len(kept) == 3
    world.crash()
    assert {r.id for r in world.scheduler.held()} == kept
    assert [f.members for f in world.fates if f.fate == "requeued" and f.ordinal == 1] == [((3, ""),)]
    victim = world.spool[min(kept)]
    world.steps[99], world.abandoned = 5, world.abandoned | {99}
    victim.samples[0].versions[-1] = 99
    world.crash()
    assert {r.id for r in world.scheduler.held()} == kept - {victim.id}
    assert world.scheduler.dropped["abandoned", 1] == 1
    world.run_to_end()


def test_weights_of_an_abandoned_lineage_are_not_taken_as_confirmed() -> None:
    world = World(SMALL)
    world.scheduler.confirmed = None
    world.scheduler.confirm(3)
    assert world.scheduler.confirmed is None, "no batch was cut, so weights of step 3 are another lineage's"


def test_small_pure_parts() -> None:
    assert [length_bucket(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    world = World(SMALL)
    (work, *_) = world.dispatch()
    assert spread(rollout_of(work, reward=0, versions=[3, 1, 2])) == (1, 3)
    assert spread(rollout_of(work, reward=0, versions=[])) is None
