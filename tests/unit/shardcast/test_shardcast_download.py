"""A relay's answers: any bytes give versions or a fault, and what came of a chunk stays."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given, strategies as st

from muster.protocol.ids import to_hash32
from muster.shardcast.chunks import VerifyingSink
from muster.shardcast.download import (
    BUFFER_BYTES,
    INLINE_BYTES,
    MAX_VERSIONS,
    RelayFault,
    ShardClient,
    parse_versions,
)

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


class MemorySink(VerifyingSink):
    """A sink in memory."""

    data = b""

    def close(self) -> None: ...

    def _store(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.data += b"".join(pieces)

    def _keep(self) -> None: ...


@pytest.mark.parametrize("size", [INLINE_BYTES, 2 * BUFFER_BYTES])
@pytest.mark.parametrize("is_left", [True, False])
async def test_chunk_continues_after_the_last_byte_of_an_attempt_that_ended_early(
    size: int, is_left: bool
) -> None:
    data, sent, asked = Random(size).randbytes(size), size - 1000, list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        begin, end = (0, sent) if len(asked) == 1 else (sent, size)
        status = b"206 Partial Content" if begin else b"200 OK"
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, size - begin))
        writer.write(data[begin:end])
        if is_left and not begin:
            await reader.read()  # until the client goes away
        writer.close()

    sink, client = MemorySink(to_hash32(blake3(data).digest()), size), ShardClient()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        attempt = asyncio.create_task(client.chunk(url, sink))
        if is_left:
            while sink.seen < sent:
                await asyncio.sleep(0)
            attempt.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert await attempt is RelayFault.FAILED
        assert sink.received == sent
        assert await client.chunk(url, sink) is None
        client.close()
    assert b"bytes=%d-" % sent in asked[1]
    assert sink.data == data
