"""Sources are strangers: one that lies, hangs or talks without end costs a bounded time."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from worlds.internet import Answer, Internet, says

from muster.api import BatchEntry, RunDocuments, RunInfo
from muster.api.public_hosts import PrivateNetwork, Resolve, resolve
from muster.client import sources as module
from muster.client.sources import (
    MAX_REDIRECTS,
    MAX_SOURCES,
    Signer,
    SourcePatience,
    Sources,
    source_fault,
)
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import file_hash, hex0x, keccak
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step, to_address
from muster.protocol.merkle import batch_root
from muster.protocol.messages import Submission

FILE = b"PAR1 some rollouts PAR1"
WORKER = to_address("0x" + "11" * 20)
SUBMISSION = Submission(
    run_id=RunId(1),
    worker=WORKER,
    step=Step(3),
    index=0,
    policy_version=PolicyVersion(2),
    file_hash=file_hash(FILE),
    rollouts=2,
    units=20,
)
ENTRY = BatchEntry(
    submission=SUBMISSION, signature=bytes(65), ticket=None, ticket_signature=None, received_at=5
)
QUICK = SourcePatience(connect_s=5, source_s=0.2, hedge_s=0.01, document_s=5)

SLOW = SourcePatience(connect_s=60, source_s=60, document_s=60)


def hangs(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, headers={"x-hangs": "yes"})


def url(*names: str) -> list[str]:
    return [f"http://{name}.example" for name in names]


async def test_a_file_is_had_from_the_first_that_shows_it() -> None:
    internet = Internet(one=says(FILE), two=says(FILE))

    async with Sources(url("one", "two"), transport=internet, patience=QUICK) as sources:
        assert await sources.file(file_hash(FILE)) == FILE

    assert internet.asked == ["one.example"]
    assert internet.requests[0].url.path == f"/v1/files/{hex0x(file_hash(FILE))}"


@pytest.mark.parametrize("what", ["file", "document"])
async def test_what_is_hashed_does_not_hold_up_the_event_loop(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, data = {"file": file_hash, "document": keccak}[what], bytes(module.INLINE_BYTES + 1)
    threads: list[threading.Thread] = []

    def noting(data: bytes) -> Hash32:
        threads.append(threading.current_thread())
        return hashed(data)

    monkeypatch.setattr(module, hashed.__name__, noting)
    async with Sources(url("one"), transport=Internet(one=says(data)), patience=SLOW) as sources:
        assert await getattr(sources, what)(hashed(data)) == data
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    "liar",
    [
        says(FILE + b"!"),
        says(b""),
        says(FILE, 404),
        says(FILE, 302, location="http://bucket.example/"),
        says(FILE, **{"content-encoding": "gzip"}),
        hangs,
    ],
    ids=["other", "empty", "missing", "redirect", "packed", "hangs"],
)
async def test_a_file_is_had_from_another_when_one_lies(liar: Answer) -> None:
    internet = Internet(one=liar, two=says(FILE))

    async with Sources(
        url("none", "one", "two"), transport=internet, patience=QUICK, resolver=at("1.1.1.1")
    ) as sources:
        assert await sources.file(file_hash(FILE)) == FILE


def at(*addresses: str) -> Resolve:
    """Every name leads to these addresses."""

    async def resolve(_host: str, _port: int) -> Sequence[str]:
        return addresses

    return resolve


# Elsewhere


def sends(place: str | bytes, status: int = 307) -> Answer:
    raw = place.encode() if isinstance(place, str) else place
    return lambda _: httpx.Response(status, headers=[(b"location", raw)])


NEAR = at("1.1.1.1")


async def elsewhere(
    internet: Internet,
    source: str = "https://one.example",
    *,
    resolver: Resolve = NEAR,
    **options: Any,
) -> bytes:
    async with Sources(
        [source], transport=internet, patience=QUICK, resolver=resolver, **options
    ) as sources:
        return await sources.file(file_hash(FILE))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_file_is_fetched_where_a_source_sends_us(status: int) -> None:
    place = "https://bucket.example:8443/run1/file?X-Amz-Signature=ab%2Fc&X-Amz-SignedHeaders=host"
    internet = Internet(one=sends(place, status), bucket=says(FILE))

    assert await elsewhere(internet) == FILE

    request = internet.requests[-1]
    assert internet.asked == ["one.example", "bucket.example"]
    assert (request.url.host, request.headers["host"]) == ("1.1.1.1", "bucket.example:8443")
    assert request.url.query == b"X-Amz-Signature=ab%2Fc&X-Amz-SignedHeaders=host"


async def test_a_place_may_be_relative_and_send_on_a_few_times() -> None:
    def steps(request: httpx.Request) -> httpx.Response:
        place = {"/a": "b", "/b": "/c"}.get(request.url.path, "/a")
        is_there = request.url.path == "/c"
        return (says(FILE) if is_there else sends(place))(request)

    internet = Internet(one=steps)
    assert await elsewhere(internet) == FILE
    assert [request.url.path for request in internet.requests[1:]] == ["/a", "/b", "/c"]


async def test_our_signature_goes_to_the_source_alone() -> None:
    def asks_who(request: httpx.Request) -> httpx.Response:
        is_signed = "x-muster-signature" in request.headers
        return (sends("https://bucket.example/") if is_signed else says(b"", 401))(request)

    internet = Internet(one=asks_who, bucket=says(FILE))
    signer = Signer(b"\x01" * 32, Domain(31337, WORKER), WORKER)
    assert await elsewhere(internet, signer=signer) == FILE
    signed = [any("muster" in name for name in r.headers) for r in internet.requests]
    assert signed == [False, True, False]
    assert "authorization" not in internet.requests[-1].headers


@pytest.mark.parametrize(
    "place",
    [
        "",
        "http://bucket.example/",
        "ftp://bucket.example/",
        "file:///etc/passwd",
        "https://user:word@bucket.example/",
        "https://bucket.example:0/",
        "https://bucket.example:99999999/",
        "https:///",
        "https://[::1/",
        "https://bucket.example/" + "a" * 5000,
        b"https://b\xfccket.example/",
    ],
)
async def test_what_is_no_place_to_fetch_from_is_not_asked(place: str | bytes) -> None:
    internet = Internet(one=sends(place), bucket=says(FILE))
    with pytest.raises(ApiError, match="no source shows the file"):
        await elsewhere(internet)
    assert "bucket.example" not in internet.asked


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::7f00:1",
        "::127.0.0.1",
        "::ffff:0:7f00:1",
        "fec0::1",
        "2002:7f00:1::",
        "fe80::1%eth0",
        "fd00::1",
    ],
)
async def test_a_public_source_does_not_lead_us_into_a_private_network(address: str) -> None:
    """Also through a name that has one public address."""

    async def resolver(host: str, _port: int) -> list[str]:
        return ["1.1.1.1"] if host.startswith("one") else ["1.1.1.1", address]

    for place in ("https://bucket.example/", "https://127.0.0.1/", "https://2130706433/"):
        internet = Internet(one=sends(place), bucket=says(FILE), **{"127": says(FILE)})

        with pytest.raises(ApiError, match="into a private network"):
            await elsewhere(internet, resolver=resolver)
        assert internet.asked == ["one.example"]


async def test_a_public_source_of_ours_does_not_move_into_our_network() -> None:
    """Its owner chooses what each lookup of its name finds, but not where its answer came from."""

    def leads(request: httpx.Request) -> httpx.Response:
        answer = sends("http://router.lan/")(request)
        stream = SimpleNamespace(get_extra_info=lambda _: ("1.1.1.1", 443))
        answer.extensions["network_stream"] = stream
        return answer

    internet = Internet(one=leads, router=says(FILE))
    with pytest.raises(ApiError, match="into a private network"):
        await elsewhere(internet, "http://one.example", resolver=at("10.0.0.7"))
    assert internet.asked == ["one.example"]


async def test_a_name_without_an_address_is_asked_for_nothing() -> None:
    internet = Internet(one=sends("https://bucket.example/"), bucket=says(FILE))
    with pytest.raises(ApiError, match="no source shows the file"):
        await elsewhere(internet, resolver=at())
    assert internet.asked == ["one.example"]


async def test_a_name_that_nobody_can_have_has_no_address() -> None:
    with pytest.raises(OSError, match="no name"):
        await resolve("a" * 64 + ".example", 443)


async def test_a_source_of_our_own_network_may_lead_us_there_and_a_strangers_may_not() -> None:
    internet = Internet(one=sends("https://bucket.example/"), bucket=says(FILE))
    assert await elsewhere(internet, resolver=at("10.0.0.7")) == FILE
    for allowed in (True, False):
        async with Sources(
            named=["https://one.example"],
            allows_private=allowed,
            transport=internet,
            patience=QUICK,
            resolver=at("10.0.0.7"),
        ) as sources:
            if allowed:
                assert await sources.file(file_hash(FILE)) == FILE
            else:
                with pytest.raises(ApiError, match="into a private network"):
                    await sources.file(file_hash(FILE))


@pytest.mark.parametrize(
    ("bucket", "why"),
    [
        (sends("https://one.example/"), "answered 307"),
        (says(FILE + b"!"), "another hash"),
        (says(FILE * 9), "exceeds"),
        (says(FILE, **{"content-encoding": "gzip"}), "compressed"),
        (says(FILE, 403), "answered 403"),
        (hangs, "timed out"),
    ],
    ids=["loop", "other", "endless", "packed", "refused", "hangs"],
)
async def test_a_place_that_lies_costs_no_more_than_a_source_that_lies(
    bucket: Answer, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.sources.MAX_FILE_BYTES", 2 * len(FILE))
    internet = Internet(one=sends("https://bucket.example/"), bucket=bucket)
    with pytest.raises(ApiError, match=why):
        await elsewhere(internet)
    assert len(internet.asked) <= 1 + MAX_REDIRECTS


async def test_what_has_no_hash_is_not_fetched_elsewhere() -> None:
    body = ENTRY.model_dump_json().encode()
    internet = Internet(one=sends("https://bucket.example/"), bucket=says(body))
    async with Sources(
        url("one"), transport=internet, patience=QUICK, resolver=at("1.1.1.1")
    ) as sources:
        with pytest.raises(ApiError, match="answered 307"):
            await sources.work(SUBMISSION.leaf())
        assert await sources.run_info(RunId(1), url("one")[0]) is None
    assert set(internet.asked) == {"one.example"}


@pytest.mark.parametrize("liar", [says(FILE + b"!"), hangs], ids=["other", "hangs"])
async def test_nobody_shows_a_file(liar: Answer) -> None:
    async with Sources(url("one", "two"), transport=Internet(one=liar), patience=QUICK) as sources:
        with pytest.raises(ApiError, match="no source shows the file") as caught:
            await sources.file(file_hash(FILE))

    assert caught.value.code == "no_source"
    assert "two.example: ConnectError" in str(caught.value)


async def test_nobody_is_waited_for_when_all_have_refused() -> None:
    hedged = replace(QUICK, source_s=5, hedge_s=3600)
    internet = Internet(one=says(b"", 404), two=says(FILE, 404), three=says(b"", 401))
    async with (
        Sources(url("one", "two", "three"), transport=internet, patience=hedged) as sources,
        asyncio.timeout(5),
    ):
        with pytest.raises(ApiError, match=r"one\.example: answered 404"):
            await sources.file(file_hash(FILE))
    assert internet.asked == ["one.example", "two.example", "three.example"]


async def test_without_sources_nothing_is_shown() -> None:
    async with Sources() as sources:
        with pytest.raises(ApiError, match="no source shows") as caught:
            await sources.document(keccak(b"a"))

    assert "--source" in (caught.value.hint or "")


def test_strangers_do_not_lead_us_into_our_own_network() -> None:
    named = [
        "http://127.0.0.1:8545",
        "http://10.0.0.1",
        "http://router",
        "file:///etc/passwd",
        "http://me:secret@host.example",
        "http://long.example" + "a" * 128,
        "https://room.example/",
    ]

    theirs = Sources(url("mine"), named=named)
    at_home = Sources(["http://127.0.0.1:8600"], named=named[:1], allows_private=True)

    assert theirs.urls == ["http://mine.example", "https://room.example"]
    assert at_home.urls == ["http://127.0.0.1:8600", "http://127.0.0.1:8545"]


@pytest.mark.parametrize(
    "tail",
    [
        f"/v1/files/{hex0x(keccak(b'other'))}?",
        "?",
        "#",
        "/?a=b",
        "/path",
        "/v1/files/..",
        "\\v1",
        "@room.example",
        ";x",
    ],
)
async def test_a_stranger_does_not_choose_what_is_signed(tail: str) -> None:
    refuses = says(b"", 401)
    internet = Internet(evil=refuses, room=refuses)
    signer = Signer(b"\x01" * 32, Domain(31337, WORKER), WORKER)
    named = [f"http://evil.example{tail}", "http://room.example/"]
    async with Sources(
        named=named, signer=signer, transport=internet, patience=QUICK, resolver=NEAR
    ) as sources:
        with pytest.raises(ApiError, match="answered 401"):
            await sources.file(file_hash(FILE))
    assert internet.asked == ["room.example"] * 2
    path = f"/v1/files/{hex0x(file_hash(FILE))}".encode()
    assert [request.url.raw_path for request in internet.requests] == [path] * 2
    assert source_fault(named[0]) is not None
    assert source_fault(named[1]) is None


# Strangers' names


def looks_up(**addresses: str) -> tuple[list[str], Resolve]:
    """Return the names that were looked up, and names with these addresses."""
    asked: list[str] = []

    async def resolver(host: str, _port: int) -> list[str]:
        asked.append(host)
        return [addresses[host.split(".")[0]]]

    return asked, resolver


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "::ffff:10.0.0.1"])
async def test_a_strangers_name_does_not_lead_us_into_a_private_network(
    address: str, tmp_path: Path
) -> None:
    asked, resolver = looks_up(inside=address, room="1.1.1.1")
    internet = Internet(own=says(FILE), inside=says(FILE), room=says(FILE))
    named = ["http://inside.nip.io:8545", "http://room.example"]
    async with Sources(
        named=named, transport=internet, patience=QUICK, resolver=resolver
    ) as sources:
        assert await sources.file(file_hash(FILE)) == FILE
        with pytest.raises(ApiError, match="leads into a private network"):
            await sources.work(SUBMISSION.leaf())
        with pytest.raises(ApiError, match="leads into a private network"):
            await sources.download(keccak(b"tasks"), tmp_path / "set", max_bytes=100)
        assert await sources.run_info(RunId(1), named[0]) is None
    assert set(internet.asked) == {"room.example"}
    assert sorted(asked) == ["inside.nip.io", "room.example"]
    request = internet.requests[0]
    assert (request.url.host, request.headers["host"]) == ("1.1.1.1", "room.example")
    assert request.headers["connection"] == "close"
    async with Sources(
        ["http://own.example"], transport=internet, patience=QUICK, resolver=at(address)
    ) as own:
        assert await own.file(file_hash(FILE)) == FILE
    assert internet.requests[-1].url.host == "own.example"


async def test_a_strangers_name_that_is_not_found_in_time_is_looked_up_once() -> None:
    asked: list[str] = []

    async def hang(host: str, _port: int) -> list[str]:
        asked.append(host)
        if host == "one.example":
            await asyncio.Event().wait()
        return ["1.1.1.1"]

    patience = replace(QUICK, connect_s=0.05, source_s=5, hedge_s=5)
    internet = Internet(two=says(FILE))
    async with Sources(
        named=url("one", "two"), transport=internet, patience=patience, resolver=hang
    ) as sources:
        for _ in range(2):
            assert await sources.file(file_hash(FILE)) == FILE
        with pytest.raises(ApiError, match=r"one\.example: ConnectionError"):
            await sources.document(keccak(b"none"))
    assert asked == ["one.example", "two.example"]


async def test_relays_that_strangers_name_are_strangers() -> None:
    def names(*relays: str) -> Answer:
        info = RunInfo(
            run_id=RunId(1),
            chain_id=31337,
            ledger=WORKER,
            orchestrator=WORKER,
            documents=RunDocuments(
                recipe=keccak(b""), task_set=keccak(b""), calibration=keccak(b"")
            ),
            relays=list(relays),
            origin="",
            step=Step(1),
            policy_version=None,
        )
        return says(info.model_dump_json().encode())

    internet = Internet(
        own=names("http://10.0.0.3:8700", "no URL"),
        evil=names(
            "http://10.0.0.4:8545", "http://evil.example/a?b", "no URL", "http://inside.example"
        ),
    )
    _, resolver = looks_up(own="10.0.0.2", evil="1.1.1.1", inside="127.0.0.1")
    async with Sources(
        url("own"), named=url("evil"), transport=internet, patience=QUICK, resolver=resolver
    ) as sources:
        relays, connects_to = await sources.relays(RunId(1), ["http://mine.example"])
        assert relays == [
            *("http://mine.example", "http://10.0.0.3:8700", "http://own.example"),
            *("http://inside.example", "http://evil.example"),
        ]
        assert await connects_to("10.0.0.3", 8700) == ["10.0.0.3"]
        assert await connects_to("evil.example", 80) == ["1.1.1.1"]
        with pytest.raises(PrivateNetwork):
            await connects_to("inside.example", 80)

    _, resolver = looks_up(own="1.1.1.2", evil="1.1.1.1", **{"10": "10.0.0.3"})
    async with Sources(
        url("own"), named=url("evil"), transport=internet, patience=QUICK, resolver=resolver
    ) as public:
        relays, connects_to = await public.relays(RunId(1), ["http://mine.example"])
        assert relays == [
            *("http://mine.example", "http://own.example", "http://10.0.0.3:8700"),
            *("http://inside.example", "http://evil.example"),
        ]
        assert await connects_to("own.example", 80) == ["own.example"]
        with pytest.raises(PrivateNetwork):
            await connects_to("10.0.0.3", 8700)


def test_no_list_of_sources_is_endless() -> None:
    assert len(Sources(named=url(*map("h{}".format, range(500)))).urls) == MAX_SOURCES


async def test_work_is_the_submission_that_was_asked_for() -> None:
    other = ENTRY.model_copy(update={"submission": replace(SUBMISSION, index=1)})
    internet = Internet(
        one=says(other.model_dump_json().encode()), two=says(ENTRY.model_dump_json().encode())
    )

    async with Sources(url("one", "two"), transport=internet, patience=QUICK) as sources:
        assert await sources.work(SUBMISSION.leaf()) == ENTRY
    async with Sources(url("one"), transport=internet, patience=QUICK) as liar:
        with pytest.raises(ApiError, match="it shows another submission"):
            await liar.work(SUBMISSION.leaf())


async def test_work_with_other_signatures_is_passed_over() -> None:
    forged = ENTRY.model_copy(update={"signature": b"\1" * 65})
    internet = Internet(
        one=says(forged.model_dump_json().encode()), two=says(ENTRY.model_dump_json().encode())
    )

    async with Sources(url("one", "two"), transport=internet, patience=QUICK) as sources:
        shown = await sources.work(SUBMISSION.leaf(), lambda entry: entry.signature == bytes(65))

    assert shown == ENTRY


@pytest.mark.parametrize("body", [b"", b"[]", b"{" * 100_000, b"\xff"])
async def test_work_that_does_not_parse_is_passed_over(body: bytes) -> None:
    async with Sources(url("one"), transport=Internet(one=says(body)), patience=QUICK) as sources:
        with pytest.raises(ApiError, match="no source shows the work"):
            await sources.work(SUBMISSION.leaf())


async def test_a_batch_is_had_with_all_its_submissions() -> None:
    contents = {
        "batch_id": 7,
        "root": hex0x(batch_root([SUBMISSION.leaf()])),
        "count": 1,
        "submissions": [ENTRY.model_dump(mode="json")],
    }
    answer = httpx.Response(200, json=contents).content
    root = batch_root([SUBMISSION.leaf()])

    async with Sources(url("one"), transport=Internet(one=says(answer)), patience=QUICK) as sources:
        assert await sources.batch(7, root, 1) == [ENTRY]
        with pytest.raises(ApiError, match="other submissions"):
            await sources.batch(7, Hash32(bytes(32)), 1)
        with pytest.raises(ApiError, match="other submissions"):
            await sources.batch(7, root, 2)


async def test_who_lacks_documents_is_told_that_relays_have_none(tmp_path: Path) -> None:
    """Jurors see this error when a run's orchestrator is gone."""
    relay = Internet(one=says(b"", 404))
    async with Sources(url("one"), transport=relay, patience=QUICK) as sources:
        for ask in (
            sources.document(keccak(b"recipe")),
            sources.download(keccak(b"tasks"), tmp_path / "tasks", max_bytes=10),
        ):
            with pytest.raises(ApiError, match="no source shows the") as caught:
                await ask
            assert "relays have no task set" in (caught.value.hint or "")
            assert "--source URL" in (caught.value.hint or "")
        with pytest.raises(ApiError, match="no source shows the") as caught:
            await sources.file(file_hash(FILE))
        assert "or its relays" in (caught.value.hint or "")


async def test_a_document_is_checked_against_its_hash() -> None:
    internet = Internet(one=says(b"b"), two=says(b"a"))

    async with Sources(url("one", "two"), transport=internet, patience=QUICK) as sources:
        assert await sources.document(keccak(b"a")) == b"a"


async def test_task_set_leaves_the_reserve_of_the_disk_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(free=110, total=1600)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: disk)
    internet = Internet(one=says(b"of 11 bytes"))
    async with Sources(url("one"), transport=internet, patience=QUICK) as sources:
        with pytest.raises(ApiError, match="a task set needs 11 bytes, 10 are free"):
            await sources.download(keccak(b"tasks"), tmp_path / "set", max_bytes=100)
    assert not (tmp_path / "set").exists()


async def test_a_task_set_of_a_liar_is_had_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.sources.document_root", lambda p: keccak(p.read_bytes()))
    internet = Internet(one=says(b"longer than it"), two=says(b"the tasks"))

    async with Sources(url("one", "two"), transport=internet, patience=QUICK) as sources:
        await sources.download(keccak(b"the tasks"), tmp_path / "set", max_bytes=100)
        with pytest.raises(ApiError, match="no source shows the task set"):
            await sources.download(keccak(b"others"), tmp_path / "set", max_bytes=100)


async def test_a_room_is_given_the_proofs_and_then_the_file() -> None:
    internet = Internet(one=says(b"", 201), two=says(b"", 403))

    async with Sources(url("one", "two"), transport=internet, patience=QUICK) as rooms:
        refused = await rooms.deposit(FILE, ENTRY)

    assert refused == {"http://two.example": "answered 403"}
    ours = [each for each in internet.requests if each.url.host == "one.example"]
    work, file = f"/v1/work/{hex0x(SUBMISSION.leaf())}", f"/v1/files/{hex0x(file_hash(FILE))}"
    assert [(each.method, each.url.path) for each in ours] == [
        ("GET", work), ("PUT", work), ("GET", file), ("PUT", file),
    ]  # fmt: skip
    assert BatchEntry.model_validate_json(ours[1].content) == ENTRY
    assert ours[3].content == FILE


async def test_a_room_that_shows_the_file_and_its_proofs_is_given_neither() -> None:
    internet = Internet(one=says(FILE))
    async with Sources(url("one"), transport=internet, patience=QUICK) as rooms:
        assert await rooms.deposit(FILE, ENTRY) == {}
    assert {each.method for each in internet.requests} == {"GET"}


async def test_a_room_in_a_private_network_is_given_nothing_unless_it_is_our_own() -> None:
    internet = Internet(own=says(b"", 201), room=says(b"", 201), inside=says(b"", 201))
    _, resolver = looks_up(own="10.0.0.7", room="1.1.1.1", inside="10.0.0.7")
    async with Sources(
        url("own"), named=url("room", "inside"), transport=internet, patience=QUICK,
        resolver=resolver,
    ) as rooms:  # fmt: skip
        refused = await rooms.deposit(FILE, ENTRY)
    assert refused == {"http://inside.example": "it leads into a private network"}
    assert set(internet.asked) == {"own.example", "room.example"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"code": "not_named", "message": "..."}}', "answered 404 (not_named)"),
        (b'{"error": {"code": "call 0900 123456"}}', "answered 404"),
        (b'{"error": {"code": 7}}', "answered 404"),
        (b"[" * 3000, "answered 404"),
        (b'{"error": {"code": "not_named"}}' + b" " * 5000, "answered 404"),
        (b"", "answered 404"),
    ],
)
async def test_room_says_why_in_a_word_and_no_strangers_sentences(body: bytes, said: str) -> None:
    internet = Internet(one=says(body, 404))
    async with Sources(url("one"), transport=internet, patience=QUICK) as room:
        assert await room.deposit(FILE, ENTRY) == {"http://one.example": said}
