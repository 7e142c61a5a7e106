"""Ports in a Slurm job: derived, below the ephemeral range, and never two listeners on one."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prl.transport import ports
from prl.transport.batches import BatchServer
from prl.transport.run_dir import RunDir


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    yield monkeypatch


def test_ports_follow_from_job_and_role(job: pytest.MonkeyPatch) -> None:
    mine = list(ports.ports("inference-0"))
    assert mine == list(ports.ports("inference-0")) and len(set(mine)) == len(mine) == ports.TRIES
    assert all(20_000 <= port < 30_000 for port in mine)
    assert next(ports.ports("inference-1")) != mine[0]
    job.setenv("SLURM_JOB_ID", "4712")
    assert next(ports.ports("inference-0")) != mine[0]
    job.delenv("SLURM_JOB_ID")
    assert list(ports.ports("inference-0")) == [0], "outside a job the kernel chooses"


@pytest.mark.parametrize(
    ("low", "expected"), [("32768", (20_000, 29_999)), ("22000", (20_000, 21_999)), ("9000", (1024, 8999))]
)
def test_they_end_below_the_ephemeral_range(
    low: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text(f"{low}\t60999\n")
    monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")
    assert ports.span() == expected


def test_one_that_is_taken_is_passed_over(job: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second, third = list(ports.ports("orchestrator"))[:3]
    with ports.listener("orchestrator", "127.0.0.1") as one, ports.listener("orchestrator", "127.0.0.1") as two:
        assert (one.getsockname()[1], two.getsockname()[1]) == (first, second)
        run = RunDir(tmp_path / "run").create()

        async def serve() -> int:
            server = BatchServer(run, run.secret, ranks=1)
            try:
                return server.port
            finally:
                server.close()

        assert asyncio.run(serve()) == third, "ZeroMQ passes over them too"
        address = run.address("orchestrator")
        assert address is not None and address["port"] == third


def test_other_errors_are_not_passed_over(job: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(port: int) -> None:
        tried.append(port)
        raise OSError(errno.EADDRNOTAVAIL, "no such address")

    with pytest.raises(OSError, match="no such address"):
        ports.bound("trainer-store", "192.0.2.1", refuse)
    assert len(tried) == 1


def test_none_free_is_said(job: pytest.MonkeyPatch) -> None:
    def taken(port: int) -> socket.socket:
        raise OSError(errno.EADDRINUSE, "taken")

    with pytest.raises(OSError, match="inference-0: none of its ports on 10.0.0.1 is free"):
        ports.bound("inference-0", "10.0.0.1", taken)
