"""Weight versions: whole or not there, never overtaken by pruning, verified on load, and a full disk hurts nobody."""

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from prl.config.schema import Transport
from prl.transport import weights
from prl.transport.run_dir import RunDir
from prl.transport.weights import VersionGone, WeightStore, WeightStoreError


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def store(run: RunDir, **kwargs: int) -> WeightStore:
    return WeightStore(run, Transport(weights="filesystem"), **kwargs)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((64, 33), value) for i in range(6)}


def test_round_trip_of_every_type_and_layout(run: RunDir) -> None:
    base = torch.randn(6, 8)
    sent = {
        "f32": base,
        "tied": base,
        "slice": base[2:4],
        "transposed": base.T,
        "bf16": torch.randn(5).bfloat16(),
        "f64": torch.randn(3, dtype=torch.float64),
        "int": torch.arange(4),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }
    w = store(run, shard_bytes=300)
    assert w.latest() is None and w.load_latest() is None
    manifest = w.publish(4, 3, sent.items())
    assert (manifest.version, manifest.step) == (4, 3) and len({e.file for e in manifest.tensors.values()}) > 1
    assert w.latest() == manifest
    got = w.load(4)
    assert got.keys() == sent.keys()
    for name, t in sent.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t.detach()), name
    got["f32"].zero_()  # the reader's own
    assert torch.equal(w.load(4)["f32"], base)
    assert w.load_latest(4) is None
    assert (run / "weights").stat().st_mode & 0o077 == 0


def test_a_folder_that_others_may_have_made_is_neither_filled_nor_read(run: RunDir) -> None:
    """In /dev/shm anybody can make the folder before the run does, who then could change its weights."""
    w = store(run)
    w.publish(1, 1, tensors(1).items())
    w.root.chmod(0o777)
    with pytest.raises(
        WeightStoreError, match="weights: owner .*, mode 777; expected .* 700 at most: another user may have made"
    ):
        w.publish(2, 2, tensors(2).items())
    with pytest.raises(WeightStoreError, match="mode 777"):
        w.load_latest()
    assert sorted(p.name for p in w.root.iterdir()) == ["v1"]


def test_old_versions_are_pruned_and_named_when_asked_for(run: RunDir) -> None:
    w = store(run)
    for v in range(5):
        w.publish(v, v, tensors(v).items())
        assert w.versions() == list(range(max(0, v - 2), v + 1))
    assert sorted(p.name for p in (run / "weights").iterdir()) == ["v2", "v3", "v4"]
    with pytest.raises(VersionGone, match=r"version 1 is not there; complete ones: \[2, 3, 4\]"):
        w.load(1)
    with pytest.raises(WeightStoreError, match="never used again"):
        w.publish(4, 4, tensors(0).items())
    w.close(remove=True)
    assert not (run / "weights").exists()


def test_an_unfinished_version_is_invisible_and_is_replaced(run: RunDir) -> None:
    w = store(run)
    w.publish(0, 0, tensors(0).items())

    def killed():  # type: ignore[no-untyped-def]
        yield "a", torch.zeros(2000)
        assert w.versions() == [0] and w.load_latest(0) is None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WeightStore(run, Transport(weights="filesystem"), shard_bytes=1).publish(1, 1, killed())
    assert w.versions() == [0]
    w.publish(1, 1, tensors(1).items())
    assert w.load(1).keys() == tensors(1).keys()


@pytest.mark.parametrize("what", ["data", "header", "cut", "lost", "manifest", "run"])
def test_damage_is_named(run: RunDir, what: str) -> None:
    w = store(run)
    w.publish(0, 0, tensors(1).items())
    file = run / "weights" / "v0" / ("manifest.json" if what in ("manifest", "run") else "weights-0.safetensors")
    data = bytearray(file.read_bytes())
    if what == "data":
        data[-1] ^= 1
    elif what == "header":
        data[0] ^= 255
    elif what == "cut":
        del data[len(data) // 2 :]
    elif what == "manifest":
        del data[-1]
    elif what == "run":
        data = data.replace(run.id.encode(), b"0" * len(run.id))
    file.write_bytes(data) if what != "lost" else file.unlink()
    with pytest.raises(WeightStoreError, match=r"v0"):
        w.load(0)


READER = """
import sys
from prl.config.schema import Transport
from prl.transport.run_dir import RunDir
from prl.transport.weights import WeightStore
w = WeightStore(RunDir(sys.argv[1]), Transport(weights="filesystem"))
last, loads = -1, 0
print("ready", flush=True)
while last < int(sys.argv[2]):
    if (got := w.load_latest(last)) is None:
        continue
    manifest, tensors = got
    assert manifest.version > last and manifest.step == manifest.version
    assert len(tensors) == 6 and all((t == manifest.version).all() for t in tensors.values()), manifest.version
    last, loads = manifest.version, loads + 1
print(loads)
"""


def test_readers_beside_the_writer_see_whole_versions_only(run: RunDir) -> None:
    """Two reader processes load all the time while 150 versions are published and pruned at full speed."""
    w = WeightStore(run, Transport(weights="filesystem", keep_versions=2), shard_bytes=9000)
    readers = [subprocess.Popen([sys.executable, "-c", READER, run.root, "149"], stdout=subprocess.PIPE) for _ in range(2)]
    for r in readers:
        assert r.stdout is not None and r.stdout.readline() == b"ready\n"
    for v in range(150):
        w.publish(v, v, tensors(v).items())
        assert v in w.versions()
    for r in readers:
        out, _ = r.communicate(timeout=30)
        assert r.returncode == 0 and int(out) > 1


def test_a_version_pruned_while_it_is_read_is_gone_not_damaged(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    w = WeightStore(run, Transport(weights="filesystem", keep_versions=2))
    w.publish(0, 0, tensors(0).items())

    def pruned_first(path: Path, **options: str) -> object:
        shutil.rmtree(w.root / "v0")
        return safe_open(path, **options)

    monkeypatch.setattr(weights, "safe_open", pruned_first)
    with pytest.raises(VersionGone, match="version 0 is not there"):
        w.load(0)


def test_a_reader_with_open_files_is_not_disturbed_by_pruning(run: RunDir) -> None:
    w = store(run)
    w.publish(0, 0, tensors(0).items())
    held = w.load(0)
    for v in range(1, 5):
        w.publish(v, v, tensors(v).items())
    assert all((t == 0).all() for t in held.values())


def test_a_full_disk_is_a_named_error_and_the_last_version_stays(run: RunDir) -> None:
    """The kernel refuses to let the file grow, as it does on a full disk (EFBIG in place of ENOSPC)."""
    w = store(run)
    w.publish(0, 0, tensors(7).items())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(WeightStoreError, match=r"v1.tmp: weight version 1 cannot be written.*make room"):
            w.publish(1, 1, tensors(1).items())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in (run / "weights").iterdir()] == ["v0"]
    assert (w.load(0)["layer.0"] == 7).all()
    w.publish(1, 1, tensors(1).items())


def test_eight_megabytes_take_less_than_30_ms(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    w = WeightStore(run, Transport())
    sent = {f"t{i}": torch.randn(256, 128) for i in range(64)}
    times = []
    try:
        for v in range(8):
            t0 = time.perf_counter()
            w.publish(v, v, sent.items())
            t1 = time.perf_counter()
            assert w.load_latest(v - 1) is not None
            times.append((t1 - t0, time.perf_counter() - t1))
    finally:
        w.close(remove=True)
    assert not w.root.exists()
    assert min(p for p, _ in times) < 0.03 and min(q for _, q in times) < 0.03, times
