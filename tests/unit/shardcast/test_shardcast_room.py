"""A relay's room takes what the chain names, and nothing else; a refusal says why."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from shardcast_policies import serving

from muster.protocol.ids import Hash32
from muster.protocol.rollouts import MAX_FILE_BYTES
from muster.shardcast import ChunkStore, Room, RoomRefusal, ServerLimits, room as rooms

LEAF = Hash32(b"\7" * 32)
PROOFS = b'{"proofs": "of work"}'


def name_of(data: bytes) -> Hash32:
    return Hash32(hashlib.sha256(data).digest())


@dataclass
class Named:
    """What the chain names."""

    files: set[Hash32] = field(default_factory=set)
    work: set[Hash32] = field(default_factory=lambda: {LEAF})

    def names_file(self, name: Hash32) -> bool:
        return name in self.files

    def names_work(self, leaf: Hash32) -> bool:
        return leaf in self.work

    def work_fault(self, _leaf: Hash32, document: bytes) -> str | None:
        return None if document == PROOFS else "the ticket is not the run's orchestrator's"

    def name(self, *files: bytes) -> None:
        self.files |= {name_of(data) for data in files}


@pytest.fixture
def named() -> Named:
    return Named()


@pytest.fixture
def room(tmp_path: Path, named: Named) -> Room:
    return Room(tmp_path / "room", max_bytes=1000, admission=named)


@pytest.fixture
async def http(store: ChunkStore, room: Room) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(store, room=room) as client:
        yield client


def path_of(data: bytes) -> str:
    return f"/v1/files/0x{name_of(data).hex()}"


async def parts(*data: bytes) -> AsyncIterator[bytes]:
    for each in data:
        yield each


async def take(room: Room, data: bytes, address: str = "a") -> None:
    await room.take("files", name_of(data), parts(data), address)


# Over HTTP


async def test_named_file_and_its_proofs_are_taken_and_served(
    http: httpx.AsyncClient, named: Named
) -> None:
    data = os.urandom(900)
    named.name(data)
    assert (await http.get(path_of(data))).status_code == 404
    assert (await http.put(path_of(data), content=data)).status_code == 201
    assert (await http.put(f"/v1/work/0x{LEAF.hex()}", content=PROOFS)).status_code == 201
    served = await http.get(path_of(data).replace("0x", ""))
    assert (served.status_code, served.content) == (200, data)
    assert served.headers["content-length"] == "900"
    assert (await http.get(f"/v1/work/0x{LEAF.hex()}")).content == PROOFS
    assert (await http.head(path_of(data))).headers["content-length"] == "900"


async def test_what_the_chain_does_not_name_is_refused_with_the_reason(
    http: httpx.AsyncClient, named: Named
) -> None:
    refused = await http.put(path_of(b"junk"), content=b"junk")
    assert refused.status_code == 404
    assert refused.json()["error"] == {
        "code": "not_named",
        "message": "the chain names no such work with a bond behind it",
        "hint": "submit it directly, or claim about it, then try again in some blocks",
    }
    named.work.clear()
    refused = await http.put(f"/v1/work/{LEAF.hex()}", content=PROOFS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_named")


@pytest.mark.parametrize(
    ("kind", "body", "code"),
    [("files", b"other", "other_hash"), ("files", b"", "other_hash"), ("work", b"x", "not_proven")],
)
async def test_what_is_not_what_its_name_says_is_not_kept(
    http: httpx.AsyncClient, named: Named, room: Room, kind: str, body: bytes, code: str
) -> None:
    named.name(b"file")
    name = name_of(b"file") if kind == "files" else LEAF
    refused = await http.put(f"/v1/{kind}/{name.hex()}", content=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, code)
    assert room.find(kind, name) is None
    assert room.used_bytes() == 0


async def test_forged_proofs_do_not_displace_the_right_ones(http: httpx.AsyncClient) -> None:
    path = f"/v1/work/{LEAF.hex()}"
    await http.put(path, content=PROOFS)
    assert (await http.put(path, content=b"forged")).status_code == 422
    assert (await http.get(path)).content == PROOFS


@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH"])
async def test_other_methods_and_other_paths_take_nothing(
    http: httpx.AsyncClient, method: str
) -> None:
    assert (await http.request(method, path_of(b"a"))).status_code == 405
    assert (await http.put("/v1/chunks/" + "0" * 64, content=b"a")).status_code == 405
    assert (await http.put("/v1/files/../../etc/passwd", content=b"a")).status_code == 405
    assert (await http.put("/v1/files/0x" + "AB" * 32, content=b"a")).status_code == 405


async def test_server_without_a_room_takes_and_shows_nothing(store: ChunkStore) -> None:
    async with serving(store) as client:
        assert (await client.put(path_of(b"a"), content=b"a")).status_code == 405
        assert (await client.get(path_of(b"a"))).status_code == 404


async def test_who_must_show_a_token_must_show_it_here(
    store: ChunkStore, room: Room, named: Named
) -> None:
    named.name(b"a")
    async with serving(store, room=room, token="secret") as client:
        assert (await client.put(path_of(b"a"), content=b"a")).status_code == 401
        shown = {"Authorization": "Bearer secret"}
        assert (await client.put(path_of(b"a"), content=b"a", headers=shown)).status_code == 201


async def test_upload_that_never_ends_is_cut_off_and_leaves_nothing(
    store: ChunkStore, room: Room, named: Named, tmp_path: Path
) -> None:
    named.name(b"slow")
    stays_open = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"sl"
        await stays_open.wait()
        yield b"ow"

    async with serving(store, room=room, limits=ServerLimits(send_s=0.1)) as client:
        sending = asyncio.ensure_future(client.put(path_of(b"slow"), content=slowly()))
        async with asyncio.timeout(5):
            while not list((tmp_path / "room" / "files").iterdir()):
                await asyncio.sleep(0.001)
            while list((tmp_path / "room" / "files").iterdir()):
                await asyncio.sleep(0.001)
        stays_open.set()
        await asyncio.wait([sending])
    assert room.used_bytes() == 0


# Its bounds


async def test_full_room_makes_way_for_what_is_named_and_drops_the_oldest_unnamed(
    room: Room, named: Named
) -> None:
    first, second, third = (bytes([i]) * 400 for i in range(3))
    named.name(first, second, third)
    await take(room, first)
    await take(room, second)
    with pytest.raises(RoomRefusal, match="hold work that is still open") as caught:
        await take(room, third)
    assert caught.value.status == 507
    assert room.used_bytes() == 800
    named.files.discard(name_of(second))
    named.files.discard(name_of(first))
    await take(room, third)
    assert room.find("files", name_of(first)) is None
    assert room.find("files", name_of(second)) is not None


async def test_proofs_that_are_no_longer_needed_make_way_and_a_lost_file_is_not_found(
    http: httpx.AsyncClient, room: Room, named: Named
) -> None:
    await room.take("work", LEAF, parts(PROOFS), "a")
    data = b"a" * (1000 - len(PROOFS) + 1)
    named.name(data)
    with pytest.raises(RoomRefusal, match="still open"):
        await take(room, data)
    named.work.clear()
    await take(room, data)
    assert room.find("work", LEAF) is None
    kept = room.find("files", name_of(data))
    assert kept is not None
    kept.unlink()
    assert (await http.get(path_of(data))).status_code == 404


async def test_large_body_that_is_refused_is_not_read_to_its_end(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.shardcast.server.DRAINED_BYTES", 1000)
    # Whether the answer comes before the connection is cut is the network's matter.
    with contextlib.suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
        refused = await http.put(path_of(b"junk"), content=bytes(5_000_000))
        assert refused.status_code == 404
    assert (await http.get("/healthz")).text == "ok"


async def test_room_remembers_what_it_holds_and_forgets_what_was_half_received(
    room: Room, named: Named, tmp_path: Path
) -> None:
    named.name(b"a" * 400)
    await take(room, b"a" * 400)
    (tmp_path / "room" / "files" / "partial-1").write_bytes(b"half")
    again = Room(tmp_path / "room", max_bytes=1000, admission=named)
    assert again.used_bytes() == 400
    assert again.find("files", name_of(b"a" * 400)) is not None
    assert not (tmp_path / "room" / "files" / "partial-1").exists()


async def test_same_file_twice_counts_once(room: Room, named: Named) -> None:
    named.name(b"a" * 400)
    await take(room, b"a" * 400)
    await take(room, b"a" * 400)
    assert room.used_bytes() == 400


@pytest.mark.parametrize(
    ("kind", "bound"), [("files", "MAX_FILE_BYTES"), ("work", "MAX_WORK_BYTES")]
)
async def test_nothing_larger_than_it_may_be_is_received(
    room: Room, named: Named, kind: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, bound, len(PROOFS))
    name = name_of(PROOFS) if kind == "files" else LEAF
    named.name(PROOFS)
    await room.take(kind, name, parts(PROOFS), "a")
    with pytest.raises(RoomRefusal, match=f"more than {len(PROOFS)} bytes"):
        await room.take(kind, name, parts(PROOFS, b"!"), "a")


def test_largest_file_is_that_of_the_protocol() -> None:
    assert rooms.MAX_FILE_BYTES == MAX_FILE_BYTES


async def test_uploads_from_one_address_and_in_all_are_few(
    room: Room, named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    named.name(b"a")
    monkeypatch.setattr(rooms, "UPLOADS", 2)
    monkeypatch.setattr(rooms, "UPLOADS_PER_ADDRESS", 1)
    go_on = asyncio.Event()

    async def held() -> AsyncIterator[bytes]:
        await go_on.wait()
        yield b"a"

    async def upload(address: str) -> None:
        await room.take("files", name_of(b"a"), held(), address)

    first = [asyncio.ensure_future(upload(address)) for address in ("one", "two")]
    await asyncio.sleep(0)
    for address in ("one", "three"):
        with pytest.raises(RoomRefusal, match="too many uploads"):
            await upload(address)
    go_on.set()
    await asyncio.gather(*first)
    await upload("three")


async def test_full_disk_keeps_nothing_and_says_so(
    http: httpx.AsyncClient, named: Named, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    named.name(b"a")

    def full(_self: Path, _target: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        refused = await http.put(path_of(b"a"), content=b"a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk")
        refused = await http.put(f"/v1/work/{LEAF.hex()}", content=PROOFS)
        assert refused.status_code == 507
    assert room.used_bytes() == 0
    assert (await http.put(path_of(b"a"), content=b"a")).status_code == 201
