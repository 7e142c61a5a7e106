"""The ledger: durable lines, torn ends, resumes that void."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from prl.trainer.ledger import Ledger, LedgerError, read, surviving


def step(ledger: Ledger, n: int, lineage: int = 0) -> None:
    ledger.step(step=n, version=n, lineage=lineage, rollouts=[f"r{n}"], checksum="c", loss=0.1 + n / 3)


def test_a_resume_voids_later_steps_and_deletes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for n in (1, 2, 3):
        step(ledger, n)
    ledger.resume(step=1, lineage=1)
    step(ledger, 2, lineage=1)
    ledger.close()
    records = read(path)
    assert [(r["kind"], r["step"]) for r in records] == [("step", 1), ("step", 2), ("step", 3), ("resume", 1), ("step", 2)]
    assert [(r["step"], r["lineage"]) for r in surviving(records)] == [(1, 0), (2, 1)]
    assert records[2]["loss"] == 0.1 + 3 / 3, "losses read back bit for bit"


def test_a_torn_end_counts_as_never_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    step(ledger, 1)
    step(ledger, 2)
    ledger.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert [r["step"] for r in read(path)] == [1]
    ledger = Ledger(path)
    ledger.resume(step=1, lineage=1)
    step(ledger, 2, lineage=1)
    ledger.close()
    assert [r["step"] for r in surviving(read(path))] == [1, 2]


def test_damage_elsewhere_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    step(ledger, 1)
    step(ledger, 2)
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0][:-5] + b"\n" + lines[1])
    with pytest.raises(LedgerError, match="line 1"):
        read(path)


def test_a_full_disk_is_named_and_the_torn_line_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    step(ledger, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        with pytest.raises(LedgerError, match=r"ledger.jsonl: 10 of \d+ bytes written: disk full"):
            step(ledger, 2)
        with pytest.raises(LedgerError, match="ledger.jsonl: cannot be written: .*make room"):
            step(ledger, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [r["step"] for r in read(path)] == [1]


def test_a_run_without_a_ledger_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path / "ledger.jsonl") == []
