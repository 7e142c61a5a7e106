"""Version ids are durable, never reused, and a resume abandons the later ones."""

import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.transport.versions import VersionError, VersionLog


def test_ids_rise_and_survive_a_resume(tmp_path: Path) -> None:
    log, reader = VersionLog(tmp_path / "v"), VersionLog(tmp_path / "v")
    assert reader.current() is None
    assert [log.allocate(s) for s in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert reader.step_of(3) == 3 and reader.is_surviving(3)
    again = VersionLog(tmp_path / "v")  # killed at step 3, resumed from the checkpoint of step 1
    assert again.lineage(1) == 1
    assert [v for v in range(4) if reader.is_surviving(v)] == [0, 1]
    assert again.allocate(1) == 4 and again.allocate(2) == 5
    assert reader.step_of(5) == 2 and reader.step_of(3) == 3 and reader.current() == 5 and reader.current_lineage == 1
    assert not reader.is_surviving(99)
    with pytest.raises(VersionError, match="version 99 was never allocated"):
        reader.step_of(99)


def test_a_torn_record_is_cut_by_the_next_writer_and_its_id_was_never_used(tmp_path: Path) -> None:
    path = tmp_path / "v"
    log = VersionLog(path)
    log.allocate(0)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert VersionLog(path).current() == 0
    assert VersionLog(path).allocate(1) == 1
    assert VersionLog(path).current() == 1 and path.read_bytes().startswith(whole)


@pytest.mark.parametrize("room", [0, 1, 30])
def test_on_a_full_disk_no_id_is_given_and_none_twice(tmp_path: Path, room: int) -> None:
    path = tmp_path / "v"
    log = VersionLog(path)
    log.allocate(0)
    whole = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + room, hard))
        for writer in (log, VersionLog(path)):
            with pytest.raises(OSError):
                writer.allocate(1)
            assert path.read_bytes() == whole
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert log.allocate(1) == 1 and VersionLog(path).allocate(2) == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "v"
    VersionLog(path).allocate(0)
    line = path.read_bytes()
    for bad in (b"{nonsense\n", b"[]\n", b"{}\n", line):
        path.write_bytes(line + bad)
        with pytest.raises(VersionError, match=f"byte {len(line)}"):
            VersionLog(path)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=20))
def test_no_id_twice_whatever_happens(tmp_path_factory: pytest.TempPathFactory, script: list[tuple[bool, int]]) -> None:
    """Allocations and resumes in any order, by a fresh process each time."""
    path = tmp_path_factory.mktemp("v") / "v"
    ids: list[int] = []
    surviving: dict[int, int] = {}
    for resume, step in script:
        if resume:
            VersionLog(path).lineage(step)
            surviving = {v: s for v, s in surviving.items() if s <= step}
        else:
            ids.append(VersionLog(path).allocate(step))
            surviving[ids[-1]] = step
    assert ids == sorted(set(ids))
    log = VersionLog(path)
    assert {v for v in ids if log.is_surviving(v)} == set(surviving)
