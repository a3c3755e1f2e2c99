"""The manifest's parser is total, strict and canonical; every accepted form has a refused twin."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, strategies as st

from muster.protocol.encoding import canonical_json, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast import Manifest, ManifestFile
from muster.shardcast.manifest import (
    DEFAULT_CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    MOST_CHUNKS,
    ManifestDelta,
    chunk_bytes_for,
    parse_digest,
    require_file_name,
)

ZERO = "00" * 32
VALID: dict[str, Any] = {
    "chunk_bytes": 1024,
    "delta": None,
    "files": [
        {"chunks": ["11" * 32, "22" * 32], "name": "a.bin", "size": 1025},
        {"chunks": [], "name": "empty", "size": 0},
    ],
    "kind": "full",
    "parent": None,
    "run_id": 1,
    "schema_version": 1,
    "state_hash": ZERO,
    "stream_from": 8,
    "stream_to": 12,
    "version": 3,
}

DELTA: dict[str, Any] = {"chunks": ["33" * 32], "parent_root": "44" * 32, "size": 9}
"""A delta that VALID may have, with a parent."""

names = st.from_regex(r"[a-z0-9_-][a-z0-9._-]{0,20}", fullmatch=True).filter(
    lambda name: is_file_name(name)
)


def is_file_name(name: str) -> bool:
    try:
        return require_file_name(name) == name
    except EncodingError:
        return False


digests = st.binary(min_size=32, max_size=32).map(Hash32)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    chunk_bytes = draw(st.integers(1024, 1 << 20))
    sizes = draw(st.dictionaries(names, st.integers(0, 8 * chunk_bytes), min_size=1, max_size=5))
    files = []
    for name in sorted(sizes):
        count = -(-sizes[name] // chunk_bytes)
        chunks = draw(st.lists(digests, min_size=count, max_size=count))
        files.append(ManifestFile(name, sizes[name], tuple(chunks)))
    stream_from = draw(st.integers(0, 1 << 40))
    version = PolicyVersion(draw(st.integers(1, (1 << 32) - 1)))
    parent, delta, kind = None, None, "full"
    if sum(sizes.values()) and draw(st.booleans()):
        size = draw(st.integers(1, sum(sizes.values())))
        count = -(-size // chunk_bytes)
        chunks = draw(st.lists(digests, min_size=count, max_size=count))
        delta = ManifestDelta(draw(digests), size, tuple(chunks))
        parent = PolicyVersion(draw(st.integers(0, version - 1)))
        kind = draw(st.sampled_from(["full", "delta"]))
    return Manifest(
        run_id=RunId(draw(st.integers(1, (1 << 53) - 1))),
        version=version,
        kind=kind,
        parent=parent,
        delta=delta,
        files=tuple(files),
        state_hash=draw(digests),
        stream_from=stream_from,
        stream_to=stream_from + draw(st.integers(0, 1000)),
        chunk_bytes=chunk_bytes,
    )


@given(manifests())
def test_manifest_returns_the_same_after_encoding(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@given(manifests())
def test_manifest_spans_cover_each_file_without_gap(manifest: Manifest) -> None:
    for file, spans in manifest.spans_by_file():
        assert [span.offset for span in spans] == [
            i * manifest.chunk_bytes for i in range(len(spans))
        ]
        assert sum(span.size for span in spans) == file.size
        assert all(0 < span.size <= manifest.chunk_bytes for span in spans)


@given(manifests())
def test_manifest_total_is_the_sum_of_its_spans(manifest: Manifest) -> None:
    assert manifest.total_bytes == sum(span.size for span in manifest.spans())


@given(manifests())
def test_manifest_broadcast_is_the_delta_and_in_full_versions_the_files(manifest: Manifest) -> None:
    carried = manifest.broadcast_spans()
    assert manifest.broadcast_bytes == sum(span.size for span in carried)
    files = list(manifest.spans()) if manifest.kind == "full" else []
    assert carried == manifest.delta_spans() + files
    assert all(not span.name.startswith(".") for span in files)


def test_manifest_with_a_delta_has_the_documented_bytes() -> None:
    data = canonical_json({**VALID, "delta": DELTA, "kind": "delta", "parent": 2})
    manifest = Manifest.from_bytes(data)
    delta = b'"delta":{"chunks":["' + b"33" * 32 + b'"],"parent_root":"' + b"44" * 32
    assert delta + b'","size":9}' in data
    assert manifest.to_bytes() == data
    assert manifest.without_delta().to_bytes() == canonical_json(VALID)


def test_manifest_has_the_documented_bytes_and_root() -> None:
    manifest = Manifest.from_bytes(canonical_json(VALID))
    expected = (
        b'{"chunk_bytes":1024,"delta":null,"files":[{"chunks":["'
        + b"11" * 32
        + b'","'
        + b"22" * 32
        + b'"],'
        b'"name":"a.bin","size":1025},{"chunks":[],"name":"empty","size":0}],"kind":"full",'
        b'"parent":null,"run_id":1,"schema_version":1,"state_hash":"' + b"00" * 32 + b'",'
        b'"stream_from":8,"stream_to":12,"version":3}'
    )
    assert manifest.to_bytes() == expected
    assert manifest.root() == keccak(expected)


@given(st.binary(max_size=400))
def test_manifest_gives_encoding_error_on_arbitrary_bytes(data: bytes) -> None:
    with pytest.raises(EncodingError):
        Manifest.from_bytes(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(VALID)), json_values)
def test_manifest_is_total_when_a_field_holds_any_json(key: str, value: object) -> None:
    data = json.dumps({**VALID, key: value}, separators=(",", ":"), sort_keys=True).encode()
    with contextlib.suppress(EncodingError):
        assert Manifest.from_bytes(data).to_bytes() == data


@given(st.integers(0, len(canonical_json(VALID)) - 1), st.integers(0, 255))
def test_manifest_is_refused_or_another_when_one_byte_changes(position: int, byte: int) -> None:
    data = bytearray(canonical_json(VALID))
    changed = data[position] != byte
    data[position] = byte
    try:
        manifest = Manifest.from_bytes(bytes(data))
    except EncodingError:
        return
    assert manifest.to_bytes() == bytes(data)
    assert (manifest.root() != keccak(canonical_json(VALID))) == changed


def file_entry(**changes: object) -> dict[str, object]:
    return {"chunks": ["11" * 32], "name": "a.bin", "size": 5, **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": 0}, "run_id must be"),
        ({"run_id": True}, "run_id: .* valid integer"),
        ({"run_id": "1"}, "run_id: .* valid integer"),
        ({"version": -1}, "version must be"),
        ({"version": 1 << 32}, "version must be"),
        ({"version": 0}, "version 0 is the base model"),
        ({"chunk_bytes": 0}, "chunk_bytes must be"),
        ({"chunk_bytes": 1023}, "chunk_bytes must be"),
        ({"chunk_bytes": (64 << 20) + 1}, "chunk_bytes must be"),
        ({"stream_from": 13}, "stream_from must be"),
        ({"stream_to": -1}, "stream_to must be"),
        ({"schema_version": 2}, "schema_version must be"),
        ({"kind": "part"}, "unknown kind"),
        ({"kind": "delta"}, "needs a delta"),
        ({"kind": None}, "kind: .* valid string"),
        ({"kind": []}, "kind: .* valid string"),
        ({"parent": 2}, "exactly when"),
        ({"delta": DELTA}, "exactly when"),
        ({"delta": DELTA, "parent": 3}, "parent must be"),
        ({"delta": DELTA, "parent": -1}, "parent must be"),
        ({"delta": DELTA, "parent": "2"}, "parent: .* valid integer"),
        ({"delta": DELTA, "parent": True}, "parent: .* valid integer"),
        ({"delta": {**DELTA, "size": 0}, "parent": 2}, "size of the delta must be"),
        ({"delta": {**DELTA, "size": 1026}, "parent": 2}, "size of the delta must be"),
        ({"delta": {**DELTA, "size": 1025}, "parent": 2}, "the delta needs 2 chunks"),
        ({"delta": {**DELTA, "chunks": []}, "parent": 2}, "the delta needs 1 chunks"),
        ({"delta": {**DELTA, "parent_root": ZERO[:-1]}, "parent": 2}, "not 64 lower-case"),
        ({"delta": {**DELTA, "more": 1}, "parent": 2}, "delta.more: [Uu]nexpected"),
        ({"delta": [], "parent": 2}, "delta: .* an object"),
        ({"state_hash": "AA" * 32}, "not 64 lower-case"),
        ({"state_hash": ZERO[:-1]}, "not 64 lower-case"),
        ({"state_hash": 5}, "not 64 lower-case"),
        ({"files": []}, "1 to 4096 files"),
        ({"files": {}}, "files: .* valid array"),
        ({"files": [5]}, "files.0: .* an object"),
        ({"files": [file_entry(mode=7)]}, "files.0.mode: [Uu]nexpected"),
        ({"files": [file_entry(size=-1)]}, "size of a.bin must be"),
        ({"files": [file_entry(size=5.5)]}, "size: .* valid integer"),
        ({"files": [file_entry(size=1025)]}, "needs 2 chunks"),
        ({"files": [file_entry(size=0)]}, "needs 0 chunks"),
        ({"files": [file_entry(size=1 << 41)]}, "size of a.bin must be"),
        ({"files": [file_entry(chunks="11" * 32)]}, "chunks: .* valid array"),
        ({"files": [file_entry(chunks=[ZERO[:-2] + "0x"])]}, "not 64 lower-case"),
        ({"files": [file_entry(), file_entry()]}, "a name comes twice"),
        ({"files": [file_entry(name="b"), file_entry(name="a")]}, "not sorted"),
        ({"files": [file_entry(name="A"), file_entry(name="a")]}, "differ in case"),
        ({"more": 1}, "more: [Uu]nexpected"),
    ],
)
def test_manifest_is_refused_when_a_field_is_wrong(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(EncodingError, match=reason):
        Manifest.from_bytes(canonical_json({**VALID, **changes}))


@pytest.mark.parametrize("missing", sorted(VALID))
def test_manifest_is_refused_when_a_field_is_missing(missing: str) -> None:
    with pytest.raises(EncodingError, match=f"{missing}: |lacks a field|needs 1 chunks"):
        Manifest.from_bytes(canonical_json({k: v for k, v in VALID.items() if k != missing}))


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".hidden", "../up", "a/b", "a\\b", "/etc/passwd", "a\0b", "a b", "ä"),
        *("a\n", "x" * 129, "~", "C:", "a%2fb", "a.", "con", "NUL.json", "com1.x", "e\u0301", "a "),
    ],
)
def test_manifest_is_refused_when_a_name_could_leave_its_folder(name: str) -> None:
    with pytest.raises(EncodingError, match="not a plain file name"):
        Manifest.from_bytes(canonical_json({**VALID, "files": [file_entry(name=name)]}))


@given(st.text(max_size=8) | st.from_regex(r"[./\\]*[a-z]*[./\\]*", fullmatch=True))
def test_file_name_that_passes_stays_in_its_folder(name: str) -> None:
    try:
        require_file_name(name)
    except EncodingError:
        return
    assert not set(name) & set("/\\\0")
    assert name not in ("", ".", "..")


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(VALID).encode(),
        canonical_json(VALID) + b"\n",
        canonical_json(VALID).replace(b'"run_id":1', b'"run_id":1.0'),
        canonical_json(VALID).replace(b'"parent":null', b'"parent":null,"parent":null'),
        canonical_json(VALID).decode().encode("utf-16"),
        b'{"chunk_bytes":"\\ud800"}',
        b"[" * 100_000,
        b"9" * 5000,
        b"null",
        b"NaN",
    ],
)
def test_manifest_is_refused_when_it_is_not_canonical(data: bytes) -> None:
    with pytest.raises(EncodingError):
        Manifest.from_bytes(data)


def test_manifest_is_refused_unread_when_it_is_too_large() -> None:
    with pytest.raises(EncodingError, match="exceeds the limit"):
        Manifest.from_bytes(b" " * (MAX_MANIFEST_BYTES + 1))


def test_manifest_cannot_be_encoded_when_it_has_too_many_chunks() -> None:
    file = ManifestFile("a", 20_000 * 1024, (Hash32(bytes(32)),) * 20_000)
    manifest = replace(Manifest.from_bytes(canonical_json(VALID)), files=(file,))
    with pytest.raises(EncodingError, match="exceeds the limit"):
        manifest.to_bytes()


def test_manifest_is_refused_when_the_files_exceed_the_total() -> None:
    chunk = Hash32(bytes(32))
    files = tuple(ManifestFile(f"f{i}", 1 << 39, (chunk,) * (1 << 13)) for i in range(3))
    manifest = Manifest.from_bytes(canonical_json(VALID))
    with pytest.raises(EncodingError, match="exceed"):
        replace(manifest, files=files, chunk_bytes=64 << 20)


@given(st.binary())
def test_digest_parses_back_from_its_hexadecimal(data: bytes) -> None:
    assert parse_digest(blake3(data).hexdigest()) == blake3(data).digest()


@pytest.mark.parametrize("text", ["", "0x" + "11" * 31, "11" * 31, "11" * 33, "G" * 64, "１" * 64])
def test_digest_is_none_for_anything_else(text: str) -> None:
    assert parse_digest(text) is None


@pytest.mark.parametrize("name", ["conf.json", "nul-model", "com10", "a.b.c", "Model.safetensors"])
def test_name_that_only_looks_reserved_passes(name: str) -> None:
    assert require_file_name(name) == name


@given(st.integers(0, 700 << 30))
def test_chunks_are_few_enough_for_a_manifest(size: int) -> None:
    chosen = chunk_bytes_for(size)
    assert DEFAULT_CHUNK_BYTES <= chosen <= MAX_CHUNK_BYTES
    assert -(-size // chosen) <= MOST_CHUNKS
    assert chosen == DEFAULT_CHUNK_BYTES or size > chosen // 2 * MOST_CHUNKS
