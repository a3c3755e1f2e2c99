"""Blocks of floats: bit-exact, the same bytes from both codecs, hostile ones refused by name."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from muster.protocol.errors import DeltaError
from muster.shardcast import delta_block
from muster.shardcast.delta_block import (
    CODED,
    FORMATS,
    RAW,
    SAME,
    BlockCodec,
    CompiledCodec,
    FloatFormat,
    Patterns,
    load_kernel,
    make_codec,
)

BF16 = FORMATS["BF16"]
CODECS: list[Callable[[], BlockCodec]] = [BlockCodec]
if (library := load_kernel()) is not None:
    CODECS.append(lambda: CompiledCodec(library))


@pytest.fixture(params=CODECS, ids=["numpy", "compiled"][: len(CODECS)])
def codec(request: pytest.FixtureRequest) -> BlockCodec:
    """Each of the two codecs; only numpy's where no kernel was compiled."""
    made: BlockCodec = request.param()
    return made


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Patterns, Patterns, FloatFormat]:
    """Two blocks of floats: few, many or all differ, by a step or by any amount."""
    kind = draw(st.sampled_from(list(FORMATS.values())))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.sampled_from([1, 2, 31, 32, 33, 700]))
    if draw(st.booleans()):
        base = _patterns(rng.integers(0, 2 ** (8 * kind.width), count), kind)
    else:
        wide = (rng.normal(size=count) * 0.02).astype(np.float32).view(np.uint32)
        base = _patterns(wide >> (32 - 8 * kind.width), kind)
    steps = rng.integers(-draw(st.sampled_from([1, 3, 2000])), 3, count)
    steps[rng.random(count) >= draw(st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]))] = 0
    if draw(st.booleans()):
        return base, _patterns(base + steps, kind), kind
    return base, np.where(steps != 0, _patterns(rng.integers(0, 65536, count), kind), base), kind


def _patterns(values: object, kind: FloatFormat) -> Patterns:
    return np.asarray(values).astype(f"u{kind.width}")


@given(blocks())
def test_block_returns_the_same_patterns(case: tuple[Patterns, Patterns, FloatFormat]) -> None:
    base, fresh, kind = case
    for make in CODECS:
        delta = make().encode(base, fresh, kind)
        assert make().decode(base, delta, kind).tobytes() == fresh.tobytes()
        assert len(delta) <= fresh.nbytes + 1


@pytest.mark.skipif(len(CODECS) < 2, reason="no C compiler when the package was installed")
@given(blocks())
def test_codecs_write_the_same_bytes(case: tuple[Patterns, Patterns, FloatFormat]) -> None:
    first, second = (make().encode(*case) for make in CODECS)
    assert first == second


@pytest.mark.skipif(len(CODECS) < 2, reason="no C compiler when the package was installed")
@given(blocks(), st.data())
@settings(max_examples=300)
def test_codecs_agree_on_damaged_bytes(
    case: tuple[Patterns, Patterns, FloatFormat], data: st.DataObject
) -> None:
    base, fresh, kind = case
    delta = bytearray(BlockCodec().encode(base, fresh, kind))
    for _ in range(data.draw(st.integers(1, 3))):
        delta[data.draw(st.integers(0, len(delta) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(delta[: data.draw(st.integers(0, len(delta)))]) if data.draw(st.booleans()) else b""
    outcomes = [_outcome(make(), base, cut or bytes(delta), kind) for make in CODECS]
    assert outcomes[0] == outcomes[1]


def _outcome(codec: BlockCodec, base: Patterns, delta: bytes, kind: FloatFormat) -> bytes | str:
    try:
        return codec.decode(base, delta, kind).tobytes()
    except DeltaError as error:
        return error.reason


def test_one_change_is_written_as_computed_by_hand(codec: BlockCodec) -> None:
    # 1.0 sixteen times; the third becomes the next larger bfloat16.
    base = np.array([0x3F80] * 16, np.uint16)
    fresh = base.copy()
    fresh[2] = 0x3F81
    # One class, exponent 127; a list of one gap, 2; no change larger than one step. Rice
    # parameters 0, 1 and 2 would take three bits each: 0 is taken, 0 0 1 in unary. Then the sign.
    table = bytes([1, 127, 0, 1, 0, 0, 0])
    quotients, fixed = bytes([1, 0b100]), bytes([0])
    assert codec.encode(base, fresh, BF16) == bytes([CODED]) + table + quotients + fixed


def test_equal_blocks_take_one_byte(codec: BlockCodec) -> None:
    base = np.arange(1000, dtype=np.uint16)
    assert codec.encode(base, base.copy(), BF16) == bytes([SAME])
    assert codec.decode(base, bytes([SAME]), BF16).tobytes() == base.tobytes()


def test_noise_is_stored_raw(codec: BlockCodec) -> None:
    rng = np.random.default_rng(1)
    base, fresh = (rng.integers(0, 65536, 5000).astype(np.uint16) for _ in range(2))
    delta = codec.encode(base, fresh, BF16)
    assert delta == bytes([RAW]) + fresh.tobytes()


def test_change_of_sign_near_zero_is_one_step(codec: BlockCodec) -> None:
    base = np.array([0x0000] * 64, np.uint16)
    fresh = np.array([0x8000] * 64, np.uint16)
    delta = codec.encode(base, fresh, BF16)
    # Every float of the class changed by one: a sign bit each, and no gap listed.
    assert len(delta) == len([CODED]) + 8 + 1 + 64 // 8
    assert codec.decode(base, delta, BF16).tobytes() == fresh.tobytes()


def test_coded_size_follows_the_exponent(codec: BlockCodec) -> None:
    """All small floats change and no others: the positions cost almost nothing."""
    rng = np.random.default_rng(2)
    is_small = rng.random(100_000) < 0.05
    base = np.where(is_small, 0x3000, 0x3C00).astype(np.uint16)
    fresh = base + is_small
    assert len(codec.encode(base, fresh, BF16)) < 1.05 * is_small.sum() / 8


CLASS = [127, 0, 1, 0, 0, 0]
"""A class's row: one change in exponent 127, of one step."""


@pytest.mark.parametrize(
    ("delta", "what"),
    [
        ([], "first byte"),
        ([9], "first byte"),
        ([SAME, 0], "first byte"),
        ([RAW, 0, 0], "first byte"),
        ([CODED], "cut off"),
        ([CODED, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1], "cut off"),
        ([CODED, 1, *CLASS], "cut off"),
        ([CODED, 1, *CLASS, 9, 1, 0], "cut off"),
        ([CODED, 1, *CLASS, 1, 0, 0], "cut off"),
        ([CODED, 1, *CLASS, 1, 1], "cut off"),
        ([CODED, 2, *CLASS, *CLASS, 1, 3, 0], "table|order"),
        ([CODED, 1, 127, 32, 1, 0, 0, 0, 1, 1, 0], "table"),
        ([CODED, 1, 127, 0, 0, 0, 0, 0, 0], "table"),
        ([CODED, 1, 127, 0, 9, 0, 0, 0, 2, 255, 1, 0], "table|more changes"),
        ([CODED, 1, 127, 0, 1, 0, 2, 0, 1, 7, 0], "table"),
        ([CODED, 1, *CLASS, 1, 0b10000, 0], "outside"),
        ([CODED, 1, 127, 31, 1, 0, 0, 0, 1, 1, 0xFF, 0xFF, 0xFF, 0xFF], "outside"),
        ([CODED, 1, 126, 0, 1, 0, 0, 0, 1, 1, 0], "outside"),
        ([CODED, 1, 127, 0x80, 2, 1, 0, 0, 0, 1, 1, 0], "outside"),
        ([CODED, 1, *CLASS, 1, 3, 0], "longer"),
        ([CODED, 1, *CLASS, 1, 1, 0, 0], "longer"),
    ],
)
def test_malformed_block_is_refused(codec: BlockCodec, delta: list[int], what: str) -> None:
    base = np.array([0x3F80] * 4, np.uint16)
    with pytest.raises(DeltaError, match=what) as caught:
        codec.decode(base, bytes(delta), BF16)
    assert caught.value.reason == "block"


def test_valid_twin_of_the_malformed_blocks_is_accepted(codec: BlockCodec) -> None:
    base = np.array([0x3F80] * 4, np.uint16)
    made = codec.decode(base, bytes([CODED, 1, *CLASS, 1, 1, 0]), BF16)
    assert made.tolist() == [0x3F81, 0x3F80, 0x3F80, 0x3F80]


@pytest.mark.parametrize("kind", FORMATS.values())
def test_every_cut_of_a_block_is_refused(codec: BlockCodec, kind: FloatFormat) -> None:
    rng = np.random.default_rng(3)
    base = _patterns(rng.integers(0, 2 ** (8 * kind.width), 400), kind)
    fresh = base.copy()
    fresh[::7] += np.array(3).astype(base.dtype)
    delta = codec.encode(base, fresh, kind)
    for length in range(len(delta)):
        with pytest.raises(DeltaError):
            codec.decode(base, delta[:length], kind)


# The compiled block codec is used if it was built from these sources, otherwise numpy's is


needs_kernel = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernel")


@needs_kernel
def test_compiled_codec_is_in_use() -> None:
    assert isinstance(make_codec(), CompiledCodec)


def test_numpy_is_used_where_no_kernel_was_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_kernel(tmp_path)
    monkeypatch.setattr(delta_block, "load_kernel", lambda: library)
    assert not isinstance(make_codec(), CompiledCodec)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no compiled kernel" in caplog.text


@needs_kernel
def test_kernel_of_other_sources_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(delta_block.KERNEL_FOLDER, tmp_path / "same")
    shutil.copytree(delta_block.KERNEL_FOLDER, tmp_path / "changed")
    with (tmp_path / "changed" / "delta.c").open("a") as source:
        source.write("/* changed */\n")
    assert load_kernel(tmp_path / "same") is not None
    assert load_kernel(tmp_path / "changed") is None
    assert "is stale" in caplog.text
