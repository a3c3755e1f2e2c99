"""The tree over lines: compiled and plain Python agree, and a root binds every line's place."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.merkle import merkle_proof, merkle_root
from muster.tasks import line_tree
from muster.tasks.document import LineProof
from muster.tasks.line_tree import as_leaves, hash_lines, leaf_of, path_of, root_of

LINES = st.lists(st.binary(max_size=300).map(lambda b: b.replace(b"\n", b" ")), min_size=1)
needs_kernel = pytest.mark.skipif(not line_tree.load_keccak(), reason="no compiled kernel")


@pytest.fixture(params=["compiled", "python"])
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(line_tree, "load_keccak", lambda: None)
    elif line_tree.load_keccak() is None:
        pytest.skip("no compiled kernel")


def joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


@pytest.mark.usefixtures("_backend")
def test_leaf_is_the_documented_hash() -> None:
    leaves, ends = hash_lines(b"ab\n\nc\nrest", 258, max_line_bytes=4)
    expected = [
        keccak(keccak(line) + position.to_bytes(8, "big"))
        for position, line in [(258, b"ab"), (259, b""), (260, b"c")]
    ]
    assert [row.tobytes() for row in leaves] == expected
    assert ends.tolist() == [2, 3, 5]
    assert [leaf_of(b"ab", 258), leaf_of(b"", 259)] == expected[:2]


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("data", [b"12345\n", b"1\n12345", b"12345"])
def test_line_above_the_limit_is_refused_ended_or_not(data: bytes) -> None:
    assert len(hash_lines(data, 0, max_line_bytes=5)[1]) == data.count(b"\n")
    with pytest.raises(EncodingError, match="exceeds 4"):
        hash_lines(data, 0, max_line_bytes=4)


@needs_kernel
@given(LINES, st.integers(0, 2**40))
def test_kernel_and_python_agree(lines: list[bytes], first: int) -> None:
    compiled = hash_lines(joined(lines) + b"x", first, max_line_bytes=400)
    plain = line_tree._hash_lines(joined(lines) + b"x", first, 400)
    assert all(map(np.array_equal, compiled, plain))


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33])
def test_root_and_paths_are_those_of_the_protocol(count: int) -> None:
    hashes = [keccak(bytes([i])) for i in range(count)]
    leaves = as_leaves(hashes)
    assert root_of(leaves) == merkle_root(hashes)
    for position in range(count):
        assert path_of(leaves, position) == merkle_proof(hashes, position)


@given(LINES, st.data())
def test_every_line_is_proven_at_its_place_and_nowhere_else(
    lines: list[bytes], data: st.DataObject
) -> None:
    leaves, _ = hash_lines(joined(lines), 0, max_line_bytes=400)
    root, position = root_of(leaves), data.draw(st.integers(0, len(lines) - 1))
    path = tuple(path_of(leaves, position))
    assert LineProof(position, path).proves(lines[position], root)
    assert not LineProof(position + 1, path).proves(lines[position], root)
    assert not LineProof(position, path).proves(lines[position] + b"x", root)


def test_lines_that_change_places_change_the_root() -> None:
    roots = {
        root_of(hash_lines(joined(lines), 0, max_line_bytes=9)[0])
        for lines in ([b"a", b"b", b"c", b"d"], [b"b", b"a", b"c", b"d"], [b"c", b"d", b"a", b"b"])
    }
    assert len(roots) == 3


def test_empty_tree_and_missing_leaf_are_refused() -> None:
    with pytest.raises(EncodingError, match="at least one"):
        root_of(as_leaves([]))
    with pytest.raises(EncodingError, match="no leaf 1 among 1"):
        path_of(as_leaves([keccak(b"")]), 1)
