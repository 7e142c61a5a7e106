"""Curricula, spool, fates, state, measures and waits, each alone."""

from __future__ import annotations

import random
import resource
import signal
from pathlib import Path

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.monitor.status import Status
from prl.orchestrator import curriculum, fates, measures
from prl.orchestrator.curriculum import EASY, FRESH, HARD, NORMAL, Difficulty, Uniform, walk
from prl.orchestrator.fates import TaskLog, open_members
from prl.orchestrator.scheduler import Cut, Fate, SchedulerState, Work
from prl.orchestrator.spool import Spool, still_needed
from prl.orchestrator.state import SCHEMA, State, StateError, decode, encode
from prl.orchestrator.waits import Waits
from prl.samples import Rollout
from prl.trainer.ledger import read
from tests.orchestrator.world import rollout_of


def rollout(n: int, *, ordinal: int = 0, reward: float = 0.0) -> Rollout:
    r = rollout_of(Work(f"r{n}", ordinal, n, 0, (0, 0)), reward=reward, versions=[n, n])
    r.samples[0].tokens += np.int32(n)
    return r


@given(st.integers(0, 2**31), st.integers(1, 300), st.integers(0, 3))
def test_an_epoch_visits_every_task_once(seed: int, size: int, epoch: int) -> None:
    assert sorted(walk(seed, 0, size, epoch * size + i) for i in range(size)) == list(range(size))


def test_the_order_differs_by_epoch_and_seed() -> None:
    orders = {tuple(walk(seed, 0, 97, p) for p in range(e * 97, e * 97 + 97)) for seed in (1, 2) for e in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize("kind", ["uniform", "difficulty"])
def test_a_curriculum_goes_on_from_its_state(kind: str) -> None:
    def drawn(c: curriculum.Curriculum, ordinals: range) -> list[curriculum.Place]:
        out = []
        for o in ordinals:
            out.append(c.draw(o))
            c.observe(out[-1], o % 5 / 4)
        return out

    whole = curriculum.make(kind, 3, [10, 20], [1, 2])  # type: ignore[arg-type]
    expected = drawn(whole, range(60))
    first, second = (curriculum.make(kind, 3, [10, 20], [1, 2]) for _ in range(2))  # type: ignore[arg-type]
    assert drawn(first, range(25)) == expected[:25]
    second.load(msgspec.msgpack.decode(msgspec.msgpack.encode(first.state())))
    assert drawn(second, range(25, 60)) == expected[25:]
    envs = [e for e, _ in expected]
    assert envs.count(1) > envs.count(0) > 5
    with pytest.raises(ValueError, match="2 environments, the configuration has 1"):
        Uniform(0, [5], [1]).load(first.state())


def test_difficulty_returns_most_to_tasks_solved_now_and_then() -> None:
    c = Difficulty(0, [10_000], [1])
    reward = {0: 0.0, 1: 0.5, 2: 1.0}
    seen: dict[curriculum.Place, int] = {}
    again = {HARD: 0, NORMAL: 0, EASY: 0, FRESH: 0}
    for ordinal in range(3000):
        place = c.draw(ordinal)
        kind = seen.get(place, FRESH)
        again[kind] += 1
        c.observe(place, reward[place[1] % 3])
        seen[place] = (HARD, NORMAL, EASY)[place[1] % 3]
    assert again[NORMAL] > 3 * again[HARD] > 100 and again[NORMAL] > 3 * again[EASY] > 100 and again[FRESH] > 1000


def test_the_spool_writes_each_rollout_once_and_reads_it_back_by_place(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "run")
    a, b, c = rollout(1), rollout(2), rollout(3)
    places = spool.put([a, b])
    size = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert spool.put([a, b]) == places and sum(p.stat().st_size for p in tmp_path.iterdir()) == size
    spool.roll()
    later = spool.put([b, c])
    assert later["r2"] == places["r2"] and later["r3"][0] == 1 and spool.first_needed == 0
    again = Spool(tmp_path, "run")
    found, broken = again.load(later)
    assert set(found) == {"r2", "r3"} and not broken
    assert (found["r2"].samples[0].versions == b.samples[0].versions).all()
    assert again.put([found["r2"], found["r3"]]) == later, "what a resume has read is not written again"


def test_the_spool_names_what_it_cannot_read_and_prunes_whole_segments(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "run")
    places = spool.put([rollout(1), rollout(2)])
    spool.roll()
    places |= spool.put([rollout(3)])
    path = tmp_path / "000000.bin"
    data = bytearray(path.read_bytes())
    data[places["r2"][1] + 200] ^= 1
    path.write_bytes(data)
    found, broken = Spool(tmp_path, "run").load(places | {"gone": (7, 0, 10)})
    assert set(found) == {"r1", "r3"}
    assert len(broken) == 2 and "r2" in broken[0] and "checksum" in broken[0] and "000007.bin" in broken[1]
    assert "holds rollout r3" in Spool(tmp_path, "run").load({"r1": places["r3"]})[1][0]
    assert not Spool(tmp_path, "another run").load({"r1": places["r1"]})[0]
    spool.prune(1)
    assert not path.exists() and (tmp_path / "000001.bin").exists()


def test_the_spool_keeps_what_a_resume_may_need() -> None:
    first = {step: step // 2 for step in range(1, 10)}
    assert still_needed(first, [], 2) == first
    # 4 and 6 are the newest complete ones, 2 is kept for good, 8 may be in the making though 9 is trained.
    assert sorted(still_needed(first, [2, 4, 6], 2)) == [4, 6, 7, 8, 9]


def test_the_task_log_survives_a_torn_line_and_a_resume_voids_by_number(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    log = TaskLog(path)
    for n in range(4):
        log.fates([Fate("filtered", n, ((0, f"r{n}"),), "solved")])
    log.sync()
    with path.open("ab") as f:
        f.write(b'{"kind": "fate", "seq": 4, "fa')
    log = TaskLog(path)
    assert log.seq == 4
    log.add("resume", step=1, **{"from": 2})
    log.fates([Fate("trained", 2, ((0, "r9"),), step=2)])
    log.close()
    kept = fates.surviving(read(path))
    assert [(r["seq"], r["fate"], r["ordinal"]) for r in kept] == [
        (0, "filtered", 0),
        (1, "filtered", 1),
        (5, "trained", 2),
    ]
    assert path.read_bytes().count(b"\n") == 7, "nothing is deleted"


def test_fates_are_on_disk_only_once_they_are_synced(tmp_path: Path) -> None:
    log = TaskLog(tmp_path / "tasks.jsonl")
    log.fates([Fate("failed", 0, ((1, "a"),), "timed_out")])
    assert (tmp_path / "tasks.jsonl").read_bytes() == b""
    log.sync()
    (record,) = read(tmp_path / "tasks.jsonl")
    assert record["members"] == [[1, "a"]] and record["reason"] == "timed_out" and "step" not in record
    assert open_members([(3, 1), (1, 0), (3, 0)]) == [(1, [0]), (3, [0, 1])]


def test_a_full_disk_leaves_no_half_of_what_is_written_again_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    log = TaskLog(path)
    log.fates([Fate("failed", i, ((0, f"r{i}"),), "timed_out") for i in range(3)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150, limits[1]))
        with pytest.raises(OSError, match=r"tasks.jsonl: 150 of \d+ bytes written"):
            log.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, heard)
    log.close()  # somebody made room
    assert [r["seq"] for r in read(path)] == [0, 1, 2]
    assert TaskLog(path).seq == 3, "the run can go on"


STATE = State(
    SCHEMA,
    SchedulerState(3, 9, [], [], [(3, [(0, 1, "a")])], {"trained": 2}),
    {"positions": [4]},
    {"a": (0, 1, 2)},
    {2: 0},
    7,
    25,
)


def test_a_state_comes_back_as_it_was_and_another_schema_is_refused() -> None:
    assert decode(encode(STATE)) == STATE
    with pytest.raises(StateError, match=f"schema {SCHEMA + 1}"):
        decode(encode(msgspec.structs.replace(STATE, schema=SCHEMA + 1)))


@given(st.integers(0, 10_000), st.binary(max_size=6))
def test_a_damaged_state_is_a_clear_error(at: int, junk: bytes) -> None:
    data = encode(STATE)
    broken = data[: at % len(data)] + junk
    if broken != data:
        with pytest.raises(StateError):
            decode(broken)


def test_a_checksum_follows_from_what_is_taught_not_from_names() -> None:
    a, b = [rollout(n) for n in range(3)], [rollout(n) for n in range(3)]
    for r in b:
        r.id += "-again"
        r.samples[0].versions[r.samples[0].trainable] += 100
    assert measures.checksum(a) == measures.checksum(b)
    for name in ("tokens", "trainable", "logprobs", "temperature", "advantages"):
        c = [rollout(n) for n in range(3)]
        array = getattr(c[1].samples[0], name)
        array[-1] = not array[-1] if array.dtype == bool else array[-1] + 1
        assert measures.checksum(c) != measures.checksum(a), name
    assert measures.checksum(a[::-1]) != measures.checksum(a)


def test_shuffled_rewards_are_the_same_rewards_with_advantages_of_their_new_groups() -> None:
    rng = random.Random(0)
    rollouts = [rollout(n, ordinal=n // 4, reward=rng.random()) for n in range(32)]
    before = [r.reward for r in rollouts]
    measures.shuffle_rewards(
        rollouts, lambda g: np.array([r.reward for r in g]) - np.mean([r.reward for r in g]), seed=1, step=2
    )
    after = [r.reward for r in rollouts]
    assert sorted(before) == sorted(after) and before != after
    for group in range(8):
        members = rollouts[group * 4 : group * 4 + 4]
        assert sum(r.advantage for r in members) == pytest.approx(0, abs=1e-9)
        for r in members:
            assert r.samples[0].advantages[-1] == np.float32(r.advantage) and r.samples[0].advantages[0] == 0
    moved = [rollout(n, ordinal=n // 4, reward=before[n]) for n in range(32)]
    measures.shuffle_rewards(moved, lambda g: np.zeros(len(g)), seed=1, step=2)
    assert [r.reward for r in moved] == after, "the same in a repeated run"


def test_the_step_record_counts_everything_that_finished() -> None:
    tally = measures.Tally()
    for n, (reward, outcome) in enumerate([(1.0, "finished"), (0.0, "truncated"), (0.0, "timed_out"), (0.5, "finished")]):
        r = rollout(n, reward=reward)
        r.outcome = outcome
        tally.add(r)
    record = tally.take()
    assert record["reward"] == 0.5 and record["solve_rate"] == pytest.approx(1 / 3) and record["finished"] == 3
    assert record["outcomes"] == {"finished": 2, "truncated": 1, "timed_out": 1}
    assert tally.take()["finished"] == 0
    batch = measures.of_batch(Cut(4, [rollout(n) for n in range(3)], [0, 2, 2], 0))
    assert batch["staleness"] == {"0": 1, "2": 2} and batch["staleness_max"] == 2 and batch["batch_trainable"] == 6
    shown = measures.shown([rollout(n, ordinal=n) for n in range(9)], 3)
    assert [s["ordinal"] for s in shown] == [0, 4, 8] and orjson.dumps(shown)


def test_a_wait_without_progress_ends_with_its_name(tmp_path: Path) -> None:
    now = [0.0]
    waits = Waits(Status(tmp_path / "s.json", "orchestrator"), 10, clock=lambda: now[0])
    waits.on("rollouts for batch 1")
    assert orjson.loads((tmp_path / "s.json").read_bytes())["waits_for"] == "rollouts for batch 1"
    now[0] = 9
    waits.check()
    waits.moved()
    now[0] = 18
    waits.check()
    now[0] = 19.5
    with pytest.raises(TimeoutError, match="waited 10 s for rollouts for batch 1"):
        waits.check()
    waits.off()
    assert orjson.loads((tmp_path / "s.json").read_bytes())["waits_for"] == ""
