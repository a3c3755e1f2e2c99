"""Proof of checking: blocks cover every row once; fingerprints round-trip or are refused."""

import pytest
from hypothesis import given, strategies as st

from muster.protocol import checking
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import to_address

ME, YOU = (to_address(keccak(name)[:20]) for name in (b"me", b"you"))
BEACON, LEAF = keccak(b"beacon"), keccak(b"leaf")


@given(st.lists(st.integers(1, 200), max_size=60))
def test_blocks_cover_every_row_once_and_are_long_enough(lengths: list[int]) -> None:
    blocks = checking.split_blocks(lengths)
    assert [row for block in blocks for row in block] == list(range(len(lengths)))
    if sum(lengths) >= checking.BLOCK_TOKENS:
        assert all(sum(lengths[row] for row in block) >= checking.BLOCK_TOKENS for block in blocks)
    else:
        assert len(blocks) == bool(lengths)


@pytest.mark.parametrize(
    ("lengths", "ends"),
    [([], []), ([5], [1]), ([64], [1]), ([63, 1, 64], [2, 3]), ([64, 64, 10], [1, 3])],
)
def test_rows_that_are_left_over_join_the_last_block(lengths: list[int], ends: list[int]) -> None:
    assert [block.stop for block in checking.split_blocks(lengths)] == ends


def test_seed_is_of_one_validator_beacon_submission_and_block() -> None:
    seeds = {
        checking.block_seed(ME, BEACON, LEAF, 0),
        checking.block_seed(YOU, BEACON, LEAF, 0),
        checking.block_seed(ME, LEAF, BEACON, 0),
        checking.block_seed(ME, BEACON, BEACON, 0),
        checking.block_seed(ME, BEACON, LEAF, 1),
    }
    assert len(seeds) == 5


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_packed_fingerprints_come_back(parts: list[bytes]) -> None:
    assert checking.unpack_fingerprints(checking.pack_fingerprints(parts), len(parts)) == parts


@given(st.binary(max_size=200), st.integers(0, 30))
def test_any_bytes_unpack_to_what_packs_to_them_or_are_refused(data: bytes, count: int) -> None:
    try:
        parts = checking.unpack_fingerprints(data, count)
    except EncodingError:
        return
    assert len(parts) == count
    assert checking.pack_fingerprints(parts) == data


@pytest.mark.parametrize(
    ("data", "count", "says"),
    [
        (b"\0\0\0\5abcd", 1, "fingerprints 0 of 1 end early"),
        (b"\0\0\0\1ab", 1, "1 bytes follow"),
        (b"", 1, "fingerprints 0 of 1 end early"),
        (b"\0\0\0\0", 2, "fingerprints 1 of 2 end early"),
        (b"\0\0", 1, "fingerprints 0 of 1 end early"),
    ],
)
def test_malformed_fingerprints_are_refused_with_the_place(
    data: bytes, count: int, says: str
) -> None:
    with pytest.raises(EncodingError, match=says):
        checking.unpack_fingerprints(data, count)


def test_hash_binds_every_submissions_fingerprints_and_their_order() -> None:
    whole = checking.fingerprints_hash([b"ab", b"c"])
    assert whole != checking.fingerprints_hash([b"a", b"bc"])
    assert whole != checking.fingerprints_hash([b"c", b"ab"])
    assert whole != checking.fingerprints_hash([b"ab", b"c", b""])
