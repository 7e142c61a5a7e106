"""The supervisor's pure half: whatever happens, in whatever order, a run ends, within its deadlines, with a true account."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.config.load import load
from prl.config.schema import Launch, RunConfig
from prl.launch.local import GONE
from prl.launch.roles import role_specs, stages_of
from prl.launch.supervisor import (
    Beat,
    Began,
    Event,
    Exited,
    Kill,
    Limits,
    Restart,
    Stage,
    StageDone,
    Start,
    State,
    StopRequested,
    Terminate,
    Tick,
    begin,
    transition,
)
from prl.transport.run_dir import RunDir

LIMITS = Limits(start_s=100, wait_s=500, stop_s=8, save_s=8, heartbeat_s=50, service_s=50, restarts=2)
SFT = Stage("sft", frozenset(["sft"]))
RL = Stage("rl", frozenset(["trainer", "orchestrator"]), frozenset(["inference-0"]))


def run(state: State, *events: Event) -> tuple[State, list[object]]:
    actions: list[object] = []
    for event in events:
        state, more = transition(state, event)
        actions += more
    return state, actions


def running(*stages: Stage) -> State:
    state, _ = begin(stages, LIMITS, 0.0)
    state, _ = run(state, Began(1.0), *(Beat(r, True, 2.0) for r in sorted(stages[0].roles)))
    assert state.phase == "running"
    return state


def test_the_ordinary_course() -> None:
    state, actions = begin((SFT, RL), LIMITS, 0.0)
    assert actions == [Start(SFT)] and state.phase == "starting"
    state, actions = run(state, Began(1.0), Beat("sft", False, 2.0))
    assert state.phase == "starting" and state.deadline() == 101
    state, actions = run(state, Beat("sft", True, 3.0))
    assert state.phase == "running" and state.deadline() == 53
    state, actions = run(state, Exited("sft", 0, 4.0))
    assert actions == [Kill(), StageDone(SFT), Start(RL)] and state.phase == "starting"
    state, _ = run(state, *(Beat(r, True, 5.0) for r in RL.roles))
    state, actions = run(state, Exited("trainer", 0, 6.0))
    assert (state.phase, actions) == ("draining", [])
    state, actions = run(state, Exited("orchestrator", 0, 7.0))
    assert (state.phase, actions) == ("closing", [Terminate(frozenset(["inference-0"]))])
    assert state.deadline() == 15
    state, actions = run(state, Exited("inference-0", -15, 8.0))
    assert (state.phase, state.code, actions) == ("done", 0, [Kill(), StageDone(RL)])


TWO = Stage("rl", RL.primaries, frozenset(["inference-0", "inference-1"]))


def test_a_service_that_is_lost_while_another_serves_is_started_again() -> None:
    state, actions = run(running(TWO), Exited("inference-0", -9, 3.0))
    assert (state.phase, actions) == ("running", [Restart("inference-0", "was killed by SIGKILL (out of memory?)")])
    others = [Beat(r, True, 90.0) for r in sorted(TWO.roles - {"inference-0"})]
    state, actions = run(state, Beat("inference-0", False, 60.0), *others, Tick(100.0))
    assert (state.phase, actions) == ("running", []), "it may take start_s for its start-up"
    serving, _ = run(state, Beat("inference-0", True, 101.0))
    assert run(serving, Exited("inference-1", 0, 102.0))[1][0].role == "inference-1"  # type: ignore[attr-defined]
    late, actions = run(state, Tick(104.0))
    assert (late.phase, actions) == ("running", [Restart("inference-0", "did not start within 100 s (launch.start_timeout_s)")])
    late, _ = run(late, *(Beat(r, True, 180.0) for r in sorted(TWO.roles - {"inference-0"})), Tick(205.0))
    assert late.phase == "failed" and "inference-0 did not start" in late.cause, "twice, and no third time"


def test_a_service_that_does_not_start_is_started_again_if_another_has() -> None:
    state, _ = begin((TWO,), LIMITS, 0.0)
    assert run(state, Exited("inference-0", -9, 3.0))[0].phase == "failed", "it may be the fault of all"
    state, actions = run(state, Began(1.0), Beat("inference-1", True, 2.0), Exited("inference-0", -9, 3.0))
    assert (state.phase, actions) == ("starting", [Restart("inference-0", "was killed by SIGKILL (out of memory?)")])
    assert run(state, *(Beat(role, True, 4.0) for role in TWO.roles))[0].phase == "running"


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([Exited("inference-0", -9, 3.0), Exited("inference-1", -9, 4.0)], "inference-1 was killed"),
        ([Exited("inference-0", 2, 3.0)], "inference-0 ended with exit code 2"),
        ([Exited("trainer", -9, 3.0)], "trainer was killed"),
        ([Exited("trainer", GONE, 3.0)], "trainer is gone"),
    ],
)
def test_what_no_other_service_makes_up_for_is_a_failure(events: list[Event], cause: str) -> None:
    state, actions = run(running(TWO), *events)
    assert state.phase == "failed" and cause in state.cause and actions[-1] == Kill()
    strict = replace(running(TWO), limits=replace(LIMITS, restarts=0))
    assert run(strict, Exited("inference-0", -9, 3.0))[0].phase == "failed"


def test_a_silent_service_is_started_again_and_a_stopped_one_too() -> None:
    there = [Beat(r, True, 40.0) for r in sorted(TWO.roles - {"inference-0"})]
    state, actions = run(running(TWO), *there, Tick(52.5))
    assert actions == [Restart("inference-0", "hangs: no sign of life for 50.5 s (launch.replica_heartbeat_s)")]
    state, actions = run(running(TWO), *there, Tick(52.5, {"inference-0": "stands still"}))
    assert actions == [Restart("inference-0", "stands still")] and state.phase == "running"


def test_nothing_to_do_is_done() -> None:
    state, actions = begin((), LIMITS, 0.0)
    assert state.over and state.code == 0 and not actions


def test_a_service_that_does_not_close_is_killed_and_the_stage_counts() -> None:
    state, _ = run(running(RL), Exited("trainer", 0, 3.0), Exited("orchestrator", 0, 3.0))
    assert not run(state, Tick(11.0))[0].over
    state, actions = run(state, Tick(11.1))
    assert (state.phase, state.code, actions) == ("done", 0, [Kill(), StageDone(RL)])


def test_a_stop_asks_the_primaries_first_and_then_the_services() -> None:
    state, actions = run(running(RL), StopRequested(3.0))
    assert (state.phase, actions) == ("saving", [Terminate(RL.primaries)])
    state, actions = run(state, Exited("trainer", 75, 4.0))
    assert actions == []
    state, actions = run(state, Exited("orchestrator", 75, 4.0))
    assert actions == [Terminate(RL.services)] and state.deadline() == 12
    state, actions = run(state, Exited("inference-0", 0, 5.0))
    assert (state.phase, state.code, actions) == ("done", 75, [Kill()])


def test_a_save_may_take_longer_than_an_end_and_services_have_their_own_time_after_it() -> None:
    slow = replace(running(RL), limits=replace(LIMITS, save_s=60))
    state, _ = run(slow, StopRequested(3.0))
    assert state.deadline() == 63 and not run(state, Tick(62.0))[0].over
    late, actions = run(state, Tick(63.1))
    assert actions == [Kill()] and late.cause == "orchestrator, trainer did not save within 60 s (launch.save_timeout_s)"
    state, _ = run(state, Exited("trainer", 75, 62.0), Exited("orchestrator", 75, 62.5))
    assert state.deadline() == 70.5


def test_a_rank_asked_to_end_before_it_could_listen_had_nothing_to_save() -> None:
    state, actions = run(running(RL), Exited("orchestrator", 75, 3.0))
    assert actions == [Terminate(frozenset(["trainer"]))]
    state, _ = run(state, Exited("trainer", -15, 4.0), Exited("inference-0", 0, 5.0))
    assert (state.phase, state.code) == ("done", 75)
    assert run(running(RL), Exited("trainer", -15, 4.0))[0].phase == "failed", "nobody asked it to"


def test_a_stop_as_the_last_stage_ends_is_done_and_before_another_stage_saved() -> None:
    last, _ = run(running(SFT), StopRequested(3.0), Exited("sft", 0, 4.0))
    assert (last.phase, last.code) == ("done", 0)
    first, actions = run(running(SFT, RL), StopRequested(3.0), Exited("sft", 0, 4.0))
    assert (first.phase, first.code) == ("done", 75) and StageDone(SFT) in actions and Start(RL) not in actions


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([Exited("trainer", 1, 3.0)], "trainer ended with exit code 1"),
        ([Exited("trainer", -9, 3.0)], "trainer was killed by SIGKILL"),
        ([Exited("inference-0", 0, 3.0)], "inference-0 ended with exit code 0 while it was needed"),
        ([Exited("guard", 0, 3.0)], "guard ended with exit code 0"),
        ([Beat("trainer", True, 40.0), Beat("inference-0", True, 40.0), Tick(52.5)], "orchestrator hangs"),
        ([Tick(52.5, {"trainer": "stands still", "nobody": "x"})], "trainer stands still"),
        ([Exited("trainer", 0, 3.0), *(Beat(r, True, 500.0) for r in RL.roles), Tick(503.5)], "orchestrator did not end"),
        ([StopRequested(3.0), Exited("trainer", 1, 4.0)], "trainer ended with exit code 1"),
    ],
)  # fmt: skip
def test_failures_name_the_first_cause(events: list[Event], cause: str) -> None:
    state, actions = run(running(RL), *events)
    assert state.phase == "failed" and state.code == 1 and actions[-1] == Kill()
    assert cause in state.cause and state.cause.startswith("stage rl: ") and state.cause.split()[2] == state.culprit
    assert run(state, Exited("orchestrator", 5, 99.0), Tick(1e9), StopRequested(1e9)) == (state, [])


ROLES = st.sampled_from(["sft", "trainer", "orchestrator", "inference-0", "inference-1", "guard", "nobody"])
CODES = st.sampled_from([0, 0, 75, 75, 1, 2, -9, -15])
STEP = st.one_of(
    st.tuples(st.just("beat"), ROLES, st.booleans()),
    st.tuples(st.just("exit"), ROLES, CODES),
    st.tuples(st.just("stop")),
    st.tuples(st.just("began")),
    st.tuples(st.just("tick"), st.floats(0, 120)),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_every_run_ends_whatever_happens(script: list[tuple]) -> None:
    """Then nothing happens any more but time: the run still ends, after at most one deadline a phase and start."""
    now, stops = 0.0, 0
    state, actions = begin((SFT, TWO), LIMITS, now)
    log: list[object] = list(actions)

    def feed(event: Event) -> None:
        nonlocal state
        before = state
        state, more = transition(state, event)
        log.extend(more)
        if before.over:
            assert state == before and not more
        assert state.over or state.deadline() <= now + 600
        assert state.over == (state.phase in ("done", "failed"))
        if state.over:
            assert not state.alive and (state.code in (1, 2)) == (state.phase == "failed")
            assert state.cause or state.code == 0
            assert state.code != 0 or not state.stages
        if state.over and not before.over:
            assert Kill() in more  # nothing is left running
        assert state.alive <= (state.stages[0].roles if state.stages else frozenset())

    for kind, *rest in script:
        now += 0.1
        match kind:
            case "beat":
                feed(Beat(rest[0], rest[1], now))
            case "exit":
                feed(Exited(rest[0], rest[1], now))
            case "stop":
                stops += 1
                feed(StopRequested(now))
            case "began":
                feed(Began(now))
            case "tick":
                now += rest[0]
                feed(Tick(now))
    for _ in range(10):  # two services, started again twice each, and a deadline a phase
        if state.over:
            break
        now = state.deadline() + 0.01
        feed(Tick(now))
    assert state.over
    done = [a.stage.name for a in log if isinstance(a, StageDone)]
    started = [a.stage.name for a in log if isinstance(a, Start)]
    assert done == ["sft", "rl"][: len(done)] and started == ["sft", "rl"][: len(started)] and len(done) <= len(started)
    assert (state.code == 0) == (done == ["sft", "rl"])
    if stops == 0 and state.code == 75:
        assert any(s[0] == "exit" and s[2] == 75 for s in script)


def config(**changes: object) -> RunConfig:
    return load("configs/demo.yaml").model_copy(update={"launch": Launch(), **changes})


def test_the_stages_of_a_configuration(tmp_path) -> None:  # type: ignore[no-untyped-def]
    demo = config()
    assert [s.name for s in stages_of(demo)] == ["sft", "rl", "control", "evaluate"]
    assert [s.name for s in stages_of(demo, {"sft", "rl"})] == ["control", "evaluate"]
    assert [s.name for s in stages_of(config(sft=None, control=None))] == ["rl"]
    two = config(trainer=demo.trainer.model_copy(update={"ranks": 2}))
    rl = stages_of(two)[1]
    assert rl == Stage("rl", frozenset(["trainer", "trainer-1", "orchestrator"]), frozenset(["inference-0"]))
    specs = {s.name: s for s in role_specs(RunDir(tmp_path), two, rl, cores=9)}
    assert specs["trainer-1"].command[-5:] == ("trainer", "--run", str(tmp_path), "--index", "1")
    assert specs["trainer"].command[-1] == "0" and {s.threads for s in specs.values()} == {2}
    tuned = two.model_copy(update={"launch": two.launch.model_copy(update={"threads": {"inference": 5}})})
    assert {s.name: s.threads for s in role_specs(RunDir(tmp_path), tuned, rl, cores=2)} == {
        "trainer": 1, "trainer-1": 1, "orchestrator": 1, "inference-0": 5,
    }  # fmt: skip
