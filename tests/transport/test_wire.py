"""The wire: every message comes back as it was sent, and every damaged one is a named error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.samples import PER_TOKEN, Batch, Rollout, Sample, pack
from prl.transport import wire
from prl.transport.wire import (
    WireError,
    batch_to_message,
    decode,
    encode,
    message_to_batch,
    rollout_from_bytes,
    rollout_to_bytes,
)

RUN = "run-1"


def sample(n: int, seed: int, *, routes: bool) -> Sample:
    rng = np.random.default_rng(seed)
    s = Sample.of_prompt(rng.integers(0, 50, n))
    s.trainable[1:] = rng.random(n - 1) < 0.5
    s.versions[s.trainable] = 3
    s.logprobs[s.trainable] = rng.normal(size=int(s.trainable.sum()))
    if routes:
        s.routes = rng.integers(0, 16, (n, 2, 4)).astype(np.uint8)
        s.routed[:-1] = True
    return s


def rollout(seed: int = 0, *, routes: bool = True) -> Rollout:
    samples = [sample(5 + seed % 3, seed, routes=routes), sample(3, seed + 1, routes=routes)]
    samples[1].branch = 1
    return Rollout(f"r{seed}", "env", "task", seed, 0, reward=0.5, text={"prompt": "é"}, metrics={"x": 1.5}, samples=samples)


def batches(ranks: int = 2) -> list[Batch]:
    return pack([rollout(i) for i in range(4)], step=7, budget=16, ranks=ranks, checksum="abc")


def same(a: Sample, b: Sample) -> None:
    assert a.branch == b.branch
    for name in PER_TOKEN:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), name


def test_batch_round_trip() -> None:
    for batch in batches():
        message = decode(batch_to_message(batch, run_id=RUN, state=b"\0state"), run_id=RUN, kinds=("batch",), step=7)
        got, state = message_to_batch(message)
        assert state == b"\0state"
        assert (got.step, got.counts, got.rollout_ids, got.checksum) == (7, batch.counts, batch.rollout_ids, "abc")
        assert len(got.micro_batches) == len(batch.micro_batches)
        for m, n in zip(got.micro_batches, batch.micro_batches, strict=True):
            same(m.sample, n.sample)
            assert m.sample.tokens.flags.writeable
            for name in ("positions", "lengths", "rollout", "rollout_tokens"):
                np.testing.assert_array_equal(getattr(m, name), getattr(n, name))
    assert message_to_batch(decode(batch_to_message(batch, run_id=RUN), run_id=RUN))[1] is None


@pytest.mark.parametrize("routes", [False, True])
def test_rollout_round_trip(routes: bool) -> None:
    sent = rollout(2, routes=routes)
    sent.reward = np.float32(0.25)  # type: ignore[assignment]
    got = rollout_from_bytes(rollout_to_bytes(sent, run_id=RUN), run_id=RUN)
    for a, b in zip(got.samples, sent.samples, strict=True):
        same(a, b)
    got.samples = sent.samples = []
    assert got == sent


DTYPES, SHAPE = st.lists(st.sampled_from(sorted(wire._DTYPES)), max_size=3), st.lists(st.integers(0, 3), max_size=3)


@given(DTYPES, SHAPE, st.binary(min_size=216))
def test_arrays_round_trip(dtypes: list[str], shape: list[int], raw: bytes) -> None:
    n = int(np.prod(shape))
    arrays = {
        f"{d}-{i}": (np.frombuffer(raw[:n], np.uint8) > 99).reshape(shape)
        if d == "bool"
        else np.frombuffer(raw[: n * np.dtype(d).itemsize], d).reshape(shape)
        for i, d in enumerate(dtypes)
    }
    got = decode(encode("x", {"k": [1, "a", None]}, arrays, run_id=RUN, step=3, version=9), run_id=RUN)
    assert (got.kind, got.step, got.version, got.header) == ("x", 3, 9, {"k": [1, "a", None]})
    for k, a in arrays.items():
        assert got.arrays[k].dtype == a.dtype and got.arrays[k].shape == a.shape and got.arrays[k].tobytes() == a.tobytes()


def test_mismatches_name_both_sides() -> None:
    frames = encode("batch", {}, {}, run_id="theirs", step=4)
    for kwargs, reason, words in (
        ({"run_id": "ours"}, "run", ("theirs", "ours")),
        ({"run_id": "theirs", "kinds": ("trained",)}, "kind", ("batch", "trained")),
        ({"run_id": "theirs", "step": 5}, "step", ("step 4", "step 5")),
    ):
        with pytest.raises(WireError) as e:
            decode(frames, **kwargs)
        assert e.value.reason == reason and all(w in str(e.value) for w in words)
    other = bytearray(frames[0])
    other[3] = 2
    with pytest.raises(WireError, match="schema 2, this side reads 1"):
        decode([bytes(other), *frames[1:]], run_id="theirs")


FRAMES = [bytes(f) for f in batch_to_message(batches()[0], run_id=RUN, state=b"state")]
BLOCK = rollout_to_bytes(rollout(), run_id=RUN)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_message_is_a_named_error(data: st.DataObject) -> None:
    """Flipped bits, cut and lengthened frames, lost, added and swapped ones."""
    frames = list(FRAMES)
    i, j = data.draw(st.integers(0, len(frames) - 1)), data.draw(st.integers(0, len(frames) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "grow", "lose", "repeat", "swap", "junk"]))
    if how == "flip" and frames[i]:
        bit = data.draw(st.integers(0, 8 * len(frames[i]) - 1))
        flipped = bytearray(frames[i])
        flipped[bit // 8] ^= 1 << bit % 8
        frames[i] = bytes(flipped)
    elif how == "cut":
        frames[i] = frames[i][: data.draw(st.integers(0, max(len(frames[i]) - 1, 0)))]
    elif how == "grow":
        frames[i] += data.draw(st.binary(min_size=1, max_size=4))
    elif how == "lose":
        del frames[i]
    elif how == "repeat":
        frames.insert(j, frames[i])
    elif how == "swap":
        frames[i], frames[j] = frames[j], frames[i]
    elif how == "junk":
        frames = data.draw(st.lists(st.binary(max_size=40), max_size=4))
    if frames == FRAMES:
        return
    with pytest.raises(WireError):
        message_to_batch(decode(frames, run_id=RUN))


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_block_is_a_named_error(data: st.DataObject) -> None:
    block = bytearray(BLOCK)
    if data.draw(st.booleans()):
        block[data.draw(st.integers(0, len(block) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del block[data.draw(st.integers(0, len(block) - 1)) :]
    with pytest.raises(WireError):
        rollout_from_bytes(bytes(block), run_id=RUN)


FIELDS = st.sampled_from(["counts", "rollout_ids", "checksum", "branches"])


@settings(max_examples=100)
@given(st.dictionaries(FIELDS, st.none() | st.integers(-9, 9) | st.lists(st.integers(0, 2))))
def test_a_well_formed_message_with_wrong_content_is_a_named_error(header: dict) -> None:
    """Another version of prl could send it: the digest is right, the fields are not."""
    with pytest.raises(WireError) as e:
        message_to_batch(decode(encode("batch", header, {"0.tokens": np.zeros(3, np.int32)}, run_id=RUN), run_id=RUN))
    assert e.value.reason == "content"


def test_a_record_that_breaks_its_rules_is_refused() -> None:
    batch = batches(ranks=1)[0]
    batch.micro_batches[0].sample.trainable[0] = True
    with pytest.raises(WireError, match="first token"):
        message_to_batch(decode(batch_to_message(batch, run_id=RUN), run_id=RUN))
    with pytest.raises(TypeError, match="dtype"):
        encode("x", {}, {"a": np.array(["s"])}, run_id=RUN)
