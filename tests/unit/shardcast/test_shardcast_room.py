"""A relay's room takes only work that the chain names; a refusal says why."""

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

from muster.protocol.ids import Address, Hash32, to_address
from muster.shardcast import ChunkStore, FileRoom, RoomRefusal, ServerLimits, room as rooms

LEAF = Hash32(b"\7" * 32)
WORKER, OTHER = to_address(b"\1" * 20), to_address(b"\2" * 20)
PROOFS = b'{"proofs": "of work"}'


def name_of(data: bytes) -> Hash32:
    return Hash32(hashlib.sha256(data).digest())


@dataclass
class Named:
    """The work that the chain names."""

    files: dict[Hash32, Address] = field(default_factory=dict)
    work: set[Hash32] = field(default_factory=lambda: {LEAF})

    def worker_of_file(self, name: Hash32) -> Address | None:
        return self.files.get(name)

    def worker_of_work(self, leaf: Hash32) -> Address | None:
        return WORKER if leaf in self.work else None

    def work_fault(self, _leaf: Hash32, document: bytes) -> str | None:
        return None if document == PROOFS else "the ticket is not the run's orchestrator's"

    def name(self, *files: bytes, worker: Address | None = None) -> None:
        self.files |= {name_of(data): worker or WORKER for data in files}


@pytest.fixture
def named() -> Named:
    return Named()


@pytest.fixture
def room(tmp_path: Path, named: Named) -> FileRoom:
    return FileRoom(tmp_path / "room", max_bytes=1000, admission=named)


@pytest.fixture
async def http(store: ChunkStore, room: FileRoom) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(store, room=room) as client:
        yield client


def path_of(data: bytes) -> str:
    return f"/v1/files/0x{name_of(data).hex()}"


async def parts(*data: bytes) -> AsyncIterator[bytes]:
    for each in data:
        yield each


async def take(room: FileRoom, data: bytes, address: str = "a") -> None:
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
        "message": "the chain has no such work with a bond",
        "hint": "submit it directly, or open a dispute, then try again after some blocks",
    }
    named.work.clear()
    refused = await http.put(f"/v1/work/{LEAF.hex()}", content=PROOFS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_named")


@pytest.mark.parametrize(
    ("kind", "body", "code"),
    [("files", b"other", "other_hash"), ("files", b"", "other_hash"), ("work", b"x", "not_proven")],
)
async def test_what_is_not_what_its_name_says_is_not_kept(
    http: httpx.AsyncClient, named: Named, room: FileRoom, kind: str, body: bytes, code: str
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
    store: ChunkStore, room: FileRoom, named: Named
) -> None:
    named.name(b"a")
    async with serving(store, room=room, token="secret") as client:
        assert (await client.put(path_of(b"a"), content=b"a")).status_code == 401
        shown = {"Authorization": "Bearer secret"}
        assert (await client.put(path_of(b"a"), content=b"a", headers=shown)).status_code == 201


async def test_upload_that_never_ends_is_cut_off_and_leaves_nothing(
    store: ChunkStore, room: FileRoom, named: Named, tmp_path: Path
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
    room: FileRoom, named: Named
) -> None:
    first, second, third = (bytes([i]) * 400 for i in range(3))
    named.name(first, second, third)
    await take(room, first)
    await take(room, second)
    with pytest.raises(RoomRefusal, match="hold work that is still open") as caught:
        await take(room, third)
    assert caught.value.status == 507
    assert room.used_bytes() == 800
    del named.files[name_of(second)]
    del named.files[name_of(first)]
    await take(room, third)
    assert room.find("files", name_of(first)) is None
    assert room.find("files", name_of(second)) is not None


async def test_the_worker_that_has_most_makes_way_in_a_full_room(
    room: FileRoom, named: Named
) -> None:
    junk = [bytes([i]) * size for i, size in enumerate((400, 500, 100))]
    named.name(*junk)
    for data in junk:
        await take(room, data)
    small, more = b"a" * 300, b"b" * 400
    named.name(small, more, worker=OTHER)
    await take(room, small)
    assert [room.find("files", name_of(data)) is None for data in junk] == [False, True, False]
    # The other worker would have 700 bytes now, the first has 500.
    with pytest.raises(RoomRefusal, match="still open"):
        await take(room, more)
    assert room.used_bytes() == 400 + 100 + 300


async def test_what_is_not_verified_makes_nothing_give_way(room: FileRoom, named: Named) -> None:
    held, other = [bytes([i]) * 450 for i in range(2)], b"a" * 300
    named.name(*held)
    for data in held:
        await take(room, data)
    named.name(other, worker=OTHER)
    with pytest.raises(RoomRefusal, match="another hash"):
        await room.take("files", name_of(other), parts(b"b" * 300), "a")
    assert all(room.find("files", name_of(data)) for data in held)
    await take(room, other)
    assert sum(room.find("files", name_of(data)) is None for data in held) == 1


async def test_file_that_is_held_already_makes_nothing_give_way(
    room: FileRoom, named: Named
) -> None:
    mine, theirs = b"a" * 400, b"b" * 500
    named.name(mine, worker=OTHER)
    named.name(theirs)
    for data in (mine, theirs, mine):
        await take(room, data)
    assert room.find("files", name_of(theirs))


async def test_proofs_that_are_no_longer_needed_make_way_and_a_lost_file_is_not_found(
    http: httpx.AsyncClient, room: FileRoom, named: Named
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
    # The answer may come before or after the connection is cut.
    with contextlib.suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
        refused = await http.put(path_of(b"junk"), content=bytes(5_000_000))
        assert refused.status_code == 404
    assert (await http.get("/healthz")).text == "ok"


async def test_room_remembers_what_it_holds_and_forgets_what_was_half_received(
    room: FileRoom, named: Named, tmp_path: Path
) -> None:
    named.name(b"a" * 400)
    await take(room, b"a" * 400)
    (tmp_path / "room" / "files" / "partial-1").write_bytes(b"half")
    again = FileRoom(tmp_path / "room", max_bytes=1000, admission=named)
    assert again.used_bytes() == 400
    assert again.find("files", name_of(b"a" * 400)) is not None
    assert not (tmp_path / "room" / "files" / "partial-1").exists()


@pytest.mark.parametrize("damaged", [b"", b"a" * 399, b"b" * 400])
async def test_file_that_a_power_failure_damaged_is_not_served_and_taken_again(
    store: ChunkStore, room: FileRoom, named: Named, tmp_path: Path, damaged: bytes
) -> None:
    data = b"a" * 400
    named.name(data)
    await take(room, data)
    kept = tmp_path / "room" / "files" / name_of(data).hex()
    kept.write_bytes(damaged)
    again = FileRoom(tmp_path / "room", max_bytes=1000, admission=named)
    async with serving(store, room=again) as http:
        assert (await http.get(path_of(data))).status_code == 404
        assert (await http.put(path_of(data), content=data)).status_code == 201
        assert (await http.get(path_of(data))).content == data
    assert again.used_bytes() == 400


async def test_upload_repairs_a_damaged_file_that_nobody_has_asked_for(
    room: FileRoom, named: Named, tmp_path: Path
) -> None:
    data = b"a" * 400
    named.name(data)
    await take(room, data)
    kept = tmp_path / "room" / "files" / name_of(data).hex()
    kept.write_bytes(b"a")
    again = FileRoom(tmp_path / "room", max_bytes=1000, admission=named)
    await take(again, data)
    assert (kept.read_bytes(), again.used_bytes()) == (data, 400)


async def test_file_that_was_not_damaged_is_kept_and_served(
    store: ChunkStore,
    room: FileRoom,
    named: Named,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"a" * 400
    named.name(data)
    await take(room, data)
    again = FileRoom(tmp_path / "room", max_bytes=1000, admission=named)
    read: list[Path] = []
    digest_of = rooms._digest_of
    monkeypatch.setattr(rooms, "_digest_of", lambda path: read.append(path) or digest_of(path))
    async with serving(store, room=again) as http:
        both = await asyncio.gather(*(http.get(path_of(data)) for _ in range(2)))
    assert [served.content for served in both] == [data, data]
    assert len(read) == 1


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> dict[str, OSError]:
    """The errors of the next opening of files, by name."""
    errors: dict[str, OSError] = {}
    opened = Path.open

    def fail_once(path: Path, *args: Any, **options: Any) -> Any:
        if error := errors.pop(path.name, None):
            raise error
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", fail_once)
    return errors


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
async def test_file_that_cannot_be_read_now_is_kept_and_served_later(
    store: ChunkStore,
    room: FileRoom,
    named: Named,
    tmp_path: Path,
    unreadable: dict[str, OSError],
    is_read: bool,
    code: int,
) -> None:
    data = b"a" * 400
    named.name(data)
    await take(room, data)
    again = room if is_read else FileRoom(tmp_path / "room", max_bytes=1000, admission=named)
    async with serving(store, room=again) as http:
        unreadable[name_of(data).hex()] = OSError(code, os.strerror(code))
        assert (await http.get(path_of(data))).status_code == 503
        assert (await http.get(path_of(data))).content == data


@pytest.mark.parametrize("is_read", [False, True])
async def test_file_that_is_gone_from_the_disk_is_not_found(
    store: ChunkStore, room: FileRoom, named: Named, tmp_path: Path, is_read: bool
) -> None:
    data = b"a" * 400
    named.name(data)
    await take(room, data)
    again = room if is_read else FileRoom(tmp_path / "room", max_bytes=1000, admission=named)
    (tmp_path / "room" / "files" / name_of(data).hex()).unlink()
    async with serving(store, room=again) as http:
        assert (await http.get(path_of(data))).status_code == 404


async def test_upload_replaces_a_file_that_cannot_be_read(
    room: FileRoom, named: Named, tmp_path: Path, unreadable: dict[str, OSError]
) -> None:
    data = b"a" * 400
    named.name(data)
    await take(room, data)
    kept = tmp_path / "room" / "files" / name_of(data).hex()
    kept.write_bytes(b"a")
    again = FileRoom(tmp_path / "room", max_bytes=1000, admission=named)
    unreadable[kept.name] = OSError(errno.EIO, os.strerror(errno.EIO))
    await take(again, data)
    assert (kept.read_bytes(), again.used_bytes()) == (data, 400)


async def test_file_and_its_name_are_on_the_disk_before_the_answer(
    room: FileRoom, named: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    named.name(b"a")
    await take(room, b"a")
    folder = tmp_path / "room" / "files"
    assert synced == [path.stat().st_ino for path in (folder / name_of(b"a").hex(), folder)]


async def test_same_file_twice_counts_once(room: FileRoom, named: Named) -> None:
    named.name(b"a" * 400)
    await take(room, b"a" * 400)
    await take(room, b"a" * 400)
    assert room.used_bytes() == 400


@pytest.mark.parametrize(
    ("kind", "bound"), [("files", "MAX_FILE_BYTES"), ("work", "MAX_WORK_BYTES")]
)
async def test_nothing_larger_than_it_may_be_is_received(
    room: FileRoom, named: Named, kind: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, bound, len(PROOFS))
    name = name_of(PROOFS) if kind == "files" else LEAF
    named.name(PROOFS)
    await room.take(kind, name, parts(PROOFS), "a")
    larger = name_of(PROOFS + b"!") if kind == "files" else LEAF
    named.name(PROOFS + b"!")
    with pytest.raises(RoomRefusal, match=f"more than {len(PROOFS)} bytes"):
        await room.take(kind, larger, parts(PROOFS, b"!"), "a")


class Upload:
    """An upload of a named file that arrives part by part."""

    def __init__(self, room: FileRoom, address: str, file: bytes = b"a") -> None:
        self._parts: asyncio.Queue[bytes] = asyncio.Queue()
        self._taking = asyncio.ensure_future(
            room.take("files", name_of(file), self._arriving(), address)
        )
        self._taking.add_done_callback(lambda taking: taking.exception())

    async def _arriving(self) -> AsyncIterator[bytes]:
        while part := await self._parts.get():
            yield part

    async def send(self, part: bytes) -> None:
        """Send a part, or end the upload with an empty one."""
        self._parts.put_nowait(part)
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def goes_on(self) -> bool:
        return not self._taking.done()

    async def refusal(self) -> RoomRefusal:
        with pytest.raises(RoomRefusal) as caught:
            await self._taking
        return caught.value

    async def finish(self, part: bytes) -> None:
        await self.send(part)
        await self.send(b"")
        await self._taking


async def uploads(room: FileRoom, *addresses: str) -> list[Upload]:
    found = []
    for address in addresses:
        found.append(Upload(room, address))
        await asyncio.sleep(0.001)
    return found


@pytest.mark.parametrize(
    "addresses", [["10.0.0.1"] * 5, [f"2001:db8::{i}" for i in range(5)], ["unix"] * 5]
)
async def test_one_machine_has_few_uploads(
    room: FileRoom, named: Named, addresses: list[str]
) -> None:
    named.name(b"a")
    *first, one_more = await uploads(room, *addresses)
    assert "too many uploads" in str(await one_more.refusal())
    (stranger,) = await uploads(room, "2001:db8:0:1::1")
    for upload in (*first, stranger):
        await upload.finish(b"a")


async def test_newcomer_replaces_the_slowest_upload_of_the_machine_with_most(
    room: FileRoom, named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    named.name(b"a", b"aaa")
    monkeypatch.setattr(rooms, "UPLOADS", 3)
    alone, slow, quick = await uploads(room, "one", "two", "two")
    await quick.send(b"a")
    newcomer = Upload(room, "three", b"aaa")
    await newcomer.send(b"aa")
    refused = await slow.refusal()
    assert (refused.status, refused.code) == (503, "busy")
    assert "took its place" in str(refused)
    await newcomer.finish(b"a")
    await quick.finish(b"")
    await alone.finish(b"a")


async def test_upload_that_makes_progress_outlives_any_number_of_newcomers(
    room: FileRoom, named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = bytes(900)
    named.name(b"a", honest)
    monkeypatch.setattr(rooms, "FIRST_BYTES", 20)
    upload = Upload(room, "honest", honest)
    strangers = []
    for i in range(2 * rooms.UPLOADS):
        strangers += await uploads(room, f"stranger {i}")
        await upload.send(honest[:10])
    assert sum(stranger.goes_on for stranger in strangers) == rooms.UPLOADS - 1
    await upload.finish(honest[:260])
    assert room.find("files", name_of(honest)) is not None
    await asyncio.gather(*(stranger.send(b"") for stranger in strangers))


async def test_bytes_of_a_stalled_upload_give_way(room: FileRoom, named: Named) -> None:
    named.name(b"a", bytes(900))
    stalled = Upload(room, "stranger")
    await stalled.send(b"b" * 900)
    honest = Upload(room, "honest", bytes(900))
    await honest.send(bytes(100))
    await honest.finish(bytes(800))
    assert (await stalled.refusal()).code == "busy"
    assert room.used_bytes() == 900
    too_much = Upload(room, "honest")
    await too_much.send(bytes(101))
    assert (await too_much.refusal()).code == "full"


async def test_honest_upload_arrives_while_strangers_send_slowly(
    store: ChunkStore, room: FileRoom, named: Named
) -> None:
    named.name(b"evidence", b"wanted")
    async with serving(store, room=room) as client:
        host, port = client.base_url.host, client.base_url.port

        async def trickle(source: str) -> None:
            reader, writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
            head = f"PUT {path_of(b'wanted')} HTTP/1.1\r\nHost: x\r\nContent-Length: 60000"
            writer.write(head.encode() + b"\r\n\r\n{")
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                await reader.read()

        trickling = [
            asyncio.ensure_future(trickle(f"127.0.0.{9 + i}")) for i in range(rooms.UPLOADS)
        ]
        async with asyncio.timeout(60):
            while room.used_bytes() < rooms.UPLOADS:
                await asyncio.sleep(0.001)
        answer = await client.put(path_of(b"evidence"), content=b"evidence")
        assert answer.status_code == 201
    await asyncio.gather(*trickling)


async def test_full_disk_keeps_nothing_and_says_so(
    http: httpx.AsyncClient, named: Named, room: FileRoom, monkeypatch: pytest.MonkeyPatch
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
