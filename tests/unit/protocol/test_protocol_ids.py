"""Identifiers and words: parsed once, at the edge."""

from typing import Any

import pytest
from eth_utils.address import to_checksum_address
from hypothesis import given, strategies as st

from muster.protocol import errors
from muster.protocol.encoding import abi_words, require_uint
from muster.protocol.errors import EncodingError, MusterError
from muster.protocol.ids import to_address, to_hash32


@given(st.binary(min_size=20, max_size=20))
def test_address_is_the_same_from_bytes_and_text(raw: bytes) -> None:
    assert to_address(raw) == to_address("0x" + raw.hex()) == to_address("0x" + raw.hex().upper())


@given(st.binary(min_size=20, max_size=20))
def test_address_is_checksummed_as_eth_utils_does_it(raw: bytes) -> None:
    assert to_address(raw) == to_checksum_address(raw)
    assert to_address(to_checksum_address(raw)) == to_address(raw)


@pytest.mark.parametrize("value", [None, 7, "0x" + "１" * 40, "0x" + "1" * 40 + "\n"])
def test_address_refuses_what_is_hardly_text(value: Any) -> None:
    with pytest.raises(EncodingError, match="not an account address"):
        to_address(value)


@pytest.mark.parametrize("value", ["", "0x", "0x" + "1" * 39, "zz" * 20, b"\1" * 19])
def test_address_refuses_anything_else(value: str | bytes) -> None:
    with pytest.raises(EncodingError, match="not an account address"):
        to_address(value)


def test_address_refuses_a_wrong_checksum() -> None:
    with pytest.raises(EncodingError, match="checksum"):
        to_address("0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAee")


@given(st.binary(min_size=32, max_size=32))
def test_hash_is_the_same_from_bytes_and_text(raw: bytes) -> None:
    assert to_hash32(raw) == to_hash32("0x" + raw.hex()) == raw


@pytest.mark.parametrize("value", ["0x12", "nothex", b"short", "0x" + "0" * 66])
def test_hash_refuses_anything_else(value: str | bytes) -> None:
    with pytest.raises(EncodingError):
        to_hash32(value)


@pytest.mark.parametrize("value", [-1, 1 << 256, b"123"])
def test_words_refuse_what_does_not_fit(value: int | bytes) -> None:
    with pytest.raises(EncodingError):
        abi_words(value)


def test_words_pad_addresses_left() -> None:
    assert abi_words(b"\x01" * 20) == bytes(12) + b"\x01" * 20


@pytest.mark.parametrize("value", [-1, 256])
def test_uint_refuses_out_of_range(value: int) -> None:
    with pytest.raises(EncodingError, match="count does not fit uint8"):
        require_uint("count", value, 8)


def test_every_error_is_a_muster_error_and_drawn_in_the_tree() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert all(issubclass(c, MusterError) for c in classes)
    assert all(c.__name__ in (errors.__doc__ or "") for c in classes)
