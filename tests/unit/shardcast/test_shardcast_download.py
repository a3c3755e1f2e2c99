"""A relay's list of versions: any bytes give versions or a fault."""

import json

import pytest
from hypothesis import given, strategies as st

from muster.shardcast.download import MAX_VERSIONS, RelayFault, parse_versions

versions = st.lists(st.integers(0, (1 << 32) - 1), max_size=MAX_VERSIONS, unique=True)


@given(versions, st.sampled_from([None, 2]))
def test_listing_gives_its_versions_newest_first(listed: list[int], indent: int | None) -> None:
    data = json.dumps({"versions": listed}, indent=indent).encode()
    assert parse_versions(data) == sorted(listed, reverse=True)


@given(st.binary(max_size=200))
def test_listing_parser_is_total(data: bytes) -> None:
    parsed = parse_versions(data)
    assert parsed is RelayFault.LIED or isinstance(parsed, list)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"versions": 3}',
        b'{"versions": [-1]}',
        b'{"versions": [1.5]}',
        b'{"versions": ["1"]}',
        b'{"versions": [1,]}',
        b'{"versions": [1 2]}',
        b'{"versions": [[1]]}',
        b'{"versions": [1], "more": 1}',
        b"[" * 60_000,
        b'{"versions": [' + b"1," * 30_000,
        b'{"versions": [' + b" " * 60_000,
    ],
)
def test_listing_is_a_lie_when_it_is_anything_else(data: bytes) -> None:
    assert parse_versions(data) is RelayFault.LIED


def test_listing_loses_versions_that_cannot_be() -> None:
    assert parse_versions(b'{"versions": [4294967296, 4294967295, 7, 7]}') == [4294967295, 7]


def test_listing_is_read_no_further_than_its_limit() -> None:
    data = json.dumps({"versions": list(range(1000))}).encode()
    parsed = parse_versions(data)
    assert isinstance(parsed, list)
    assert len(parsed) == MAX_VERSIONS
