import contextlib
from typing import Any

import pytest
from abi_values import ELEMENTARY, values_of
from eth_abi.abi import encode
from hypothesis import given, strategies as st

from muster.chain.conversion import compile_decoder
from muster.protocol.errors import EncodingError


@st.composite
def typed_values(draw: st.DrawFn, depth: int = 2) -> tuple[str, Any]:
    """Draw an ABI type and a value of it, arrays and structs included."""
    kind = draw(st.sampled_from(["elementary", "array", "tuple"] if depth else ["elementary"]))
    if kind == "elementary":
        name = draw(st.sampled_from(sorted(ELEMENTARY)))
        return name, draw(ELEMENTARY[name])
    if kind == "array":
        inner, _ = draw(typed_values(depth - 1))
        values = draw(st.lists(values_of(inner), max_size=4))
        return f"{inner}[]", tuple(values)
    parts = draw(st.lists(typed_values(depth - 1), min_size=1, max_size=4))
    return f"({','.join(name for name, _ in parts)})", tuple(value for _, value in parts)


sequences = st.lists(typed_values(), max_size=5)


@given(sequences)
def test_decoder_returns_what_eth_abi_encoded(drawn: list[tuple[str, Any]]) -> None:
    types = tuple(name for name, _ in drawn)
    values = tuple(value for _, value in drawn)
    assert compile_decoder(types)(encode(types, values)) == values


@given(sequences, st.data())
def test_decoder_refuses_truncated_data(drawn: list[tuple[str, Any]], data: st.DataObject) -> None:
    types = tuple(name for name, _ in drawn)
    encoded = encode(types, tuple(value for _, value in drawn))
    kept = data.draw(st.integers(0, max(0, len(encoded) - 1)))
    try:
        decoded = compile_decoder(types)(encoded[:kept])
    except EncodingError:
        return
    # Only the padding of a last byte string may be missing unnoticed.
    assert decoded == tuple(value for _, value in drawn)


@given(sequences, st.binary(max_size=400))
def test_decoder_never_raises_anything_else(drawn: list[tuple[str, Any]], garbage: bytes) -> None:
    with contextlib.suppress(EncodingError):
        compile_decoder(tuple(name for name, _ in drawn))(garbage)


@pytest.mark.parametrize(
    ("kind", "word", "problem"),
    [
        ("uint64", 1 << 64, "does not fit uint64"),
        ("uint8", 256, "does not fit uint8"),
        ("address", 1 << 160, "not an address"),
        ("bool", 2, "not a bool"),
    ],
)
def test_decoder_refuses_values_beyond_their_type(kind: str, word: int, problem: str) -> None:
    with pytest.raises(EncodingError, match=problem):
        compile_decoder((kind,))(word.to_bytes(32, "big"))


def test_decoder_refuses_an_offset_beyond_the_data() -> None:
    with pytest.raises(EncodingError, match="offset or length"):
        compile_decoder(("bytes",))((1 << 255).to_bytes(32, "big"))


def test_decoder_refuses_an_array_longer_than_the_data() -> None:
    data = (32).to_bytes(32, "big") + (50).to_bytes(32, "big")
    with pytest.raises(EncodingError, match="array of 50 elements"):
        compile_decoder(("uint256[]",))(data)


def test_decoder_refuses_a_type_it_does_not_know() -> None:
    with pytest.raises(EncodingError, match="int256"):
        compile_decoder(("int256",))
    with pytest.raises(EncodingError, match=r"uint256\[2\]"):
        compile_decoder(("uint256[2]",))


def test_addresses_come_out_checksummed() -> None:
    mixed = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
    word = bytes(12) + bytes.fromhex(mixed[2:])
    assert compile_decoder(("address",))(word) == (mixed,)
