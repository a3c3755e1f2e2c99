import asyncio
import gzip
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from muster.api import Lease, NoWork, OrchestratorApi, SlotTaken
from muster.api.client import ATTEMPTS
from muster.api.public_hosts import Resolve, resolve
from muster.api.signing import NONCE_HEADER, SUBMISSION_HEADER, verify_request
from muster.protocol.bounds import MAX_FILE_BYTES
from muster.protocol.eip712 import Domain, address_of
from muster.protocol.encoding import file_hash, hex0x, keccak
from muster.protocol.errors import ApiError, ConfigError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import Submission, Ticket

KEY = b"\x11" * 32
DOMAIN = Domain(31337, address_of(b"\x22" * 32))
AUDIENCE = address_of(b"\x33" * 32)
WORKER = address_of(b"\x44" * 32)
NOW = 1_700_000_000
RUN = RunId(1)
HASH = Hash32(b"\x02" * 32)

Handler = Callable[[httpx.Request], httpx.Response]


ADDRESSES = {"orchestrator.test": "1.1.1.1", "storage.test": "8.8.8.8", "inside.test": "10.0.0.7"}


async def looks_up(host: str, _port: int) -> list[str]:
    return [ADDRESSES[host]]


def client(
    handler: Handler, *, key: bytes | None = KEY, resolver: Resolve = looks_up
) -> OrchestratorApi:
    return OrchestratorApi(
        "http://orchestrator.test",
        key=key,
        domain=DOMAIN,
        audience=AUDIENCE,
        transport=httpx.MockTransport(handler),
        clock=lambda: NOW,
        backoff_s=0.0,
        resolver=resolver,
    )


def answer(value: object, status: int = 200) -> Handler:
    return lambda _request: httpx.Response(status, json=value)


def verified(request: httpx.Request) -> httpx.Request:
    """The request, if its signature covers exactly what arrived."""
    headers = verify_request(
        request.headers,
        domain=DOMAIN,
        audience=AUDIENCE,
        method=request.method,
        path=request.url.raw_path.decode(),
        now=NOW,
    )
    assert headers.body_hash == file_hash(request.content)
    return request


async def test_heartbeat_is_signed_over_what_is_sent() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert json.loads(verified(request).content)["state"] == "generating"
        return httpx.Response(200, json={"status": "active", "policy_version": 3})

    async with client(handler) as api:
        told = await api.heartbeat(
            RUN, policy_version=PolicyVersion(2), state="generating", software="muster 0.1"
        )
    assert (told.status, told.policy_version) == ("active", 3)


async def test_query_is_part_of_the_signed_path() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert verified(request).url.query == b"state=committed&after=7"
        return httpx.Response(200, json={"batches": [8, 9], "called": [2, 3]})

    async with client(handler) as api:
        assert await api.called(after=7) == {8: 2, 9: 3}


async def test_submission_travels_in_headers_and_body() -> None:
    submission = Submission(RUN, WORKER, Step(2), 3, PolicyVersion(1), file_hash(b"rows"), 4, 50)

    def handler(request: httpx.Request) -> httpx.Response:
        assert verified(request).url.path == "/v1/submissions/1/2/3"
        assert Submission.from_json(json.loads(request.headers[SUBMISSION_HEADER])) == submission
        return httpx.Response(202, json={})

    async with client(handler) as api:
        assert await api.submit(submission, b"\x05" * 65, b"rows") == file_hash(b"rows")


async def test_lease_is_a_ticket_when_there_is_work() -> None:
    ticket = Ticket(RUN, WORKER, Step(2), 3, PolicyVersion(1), HASH, HASH, NOW)
    document = {"ticket": ticket.to_json(), "signature": "0x" + "05" * 65}
    async with client(answer(document)) as api:
        assert await api.lease(RUN) == Lease(ticket=ticket, signature=b"\x05" * 65)


@pytest.mark.parametrize(
    ("header", "pause_s"), [("0.5", 0.5), ("x", 1.0), ("-1", 1.0), ("nan", 1.0), ("1e9", 60.0)]
)
async def test_lease_says_when_to_ask_again_when_there_is_none(header: str, pause_s: float) -> None:
    def handler(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(204, headers={"retry-after": header})

    async with client(handler) as api:
        assert await api.lease(RUN) == NoWork(retry_after_s=pause_s)


@pytest.mark.parametrize(
    ("header", "reason"), [("unit_cap", "unit_cap"), ("x" * 33, None), ("Bad thing", None)]
)
async def test_reason_for_no_lease_is_one_word(header: str, reason: str | None) -> None:
    def handler(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(204, headers={"x-muster-reason": header})

    async with client(handler) as api:
        assert await api.lease(RUN) == NoWork(retry_after_s=1.0, reason=reason)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_request_is_repeated_with_a_fresh_nonce_when_the_server_is_busy(status: int) -> None:
    nonces: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        nonces.append(verified(request).headers[NONCE_HEADER])
        return httpx.Response(status if len(nonces) == 1 else 204)

    async with client(handler) as api:
        await api.lease(RUN)
    assert len(set(nonces)) == 2


async def test_request_fails_with_a_hint_when_nobody_answers() -> None:
    tries: list[int] = []

    def handler(_request: httpx.Request) -> httpx.Response:
        tries.append(1)
        raise httpx.ConnectError("refused")

    async with client(handler) as api:
        with pytest.raises(ApiError, match="no answer") as caught:
            await api.lease(RUN)
    assert (caught.value.code, len(tries)) == ("unreachable", ATTEMPTS)
    assert caught.value.hint


@pytest.mark.parametrize("status", [400, 401, 403, 409, 500])
async def test_request_is_not_repeated_when_it_is_refused(status: int) -> None:
    tries: list[int] = []

    def handler(_request: httpx.Request) -> httpx.Response:
        tries.append(1)
        error = {"code": "slot_taken", "message": "taken", "hint": "lease again"}
        return httpx.Response(status, json={"error": error})

    async with client(handler) as api:
        with pytest.raises(ApiError, match="taken") as caught:
            await api.lease(RUN)
    error = caught.value
    assert (error.status, error.code, error.hint) == (status, "slot_taken", "lease again")
    assert len(tries) == 1


SUBMISSION = Submission(RUN, WORKER, Step(2), 3, PolicyVersion(1), file_hash(b"rows"), 4, 50)
HELD = {"submission": SUBMISSION.to_json(), "signature": "0x" + "7f" * 65}


@pytest.mark.parametrize(
    ("status", "code", "held", "expected"),
    [
        (409, "slot_taken", HELD, (409, "slot_taken")),
        (403, "slot_taken", HELD, None),
        (409, "late", HELD, None),
        (409, "slot_taken", None, None),
        (409, "slot_taken", {**HELD, "signature": "0x7f"}, None),
        (409, "slot_taken", {"submission": 1}, None),
    ],
)
async def test_refusal_shows_the_submission_in_the_slot_when_it_is_whole(
    status: int, code: str, held: object, expected: tuple[int, str] | None
) -> None:
    error = {"code": code, "message": "taken", "hint": None, "held": held}
    async with client(lambda _request: httpx.Response(status, json={"error": error})) as api:
        with pytest.raises(ApiError) as caught:
            await api.status()
    found = caught.value
    assert found.status == status
    assert isinstance(found, SlotTaken) is (expected is not None)
    if isinstance(found, SlotTaken):
        assert (found.held.submission, found.held.signature) == (SUBMISSION, b"\x7f" * 65)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"error": 1}', b'{"error": {}}', b"\xff"])
async def test_refusal_keeps_its_status_when_its_form_is_unknown(body: bytes) -> None:
    async with client(lambda _request: httpx.Response(418, content=body)) as api:
        with pytest.raises(ApiError) as caught:
            await api.status()
    assert (caught.value.status, caught.value.code) == (418, "http_418")


@pytest.mark.parametrize(("status", "code"), [(503, "http_503"), (200, "bad_answer")])
async def test_compressed_page_of_a_proxy_keeps_its_status(status: int, code: str) -> None:
    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"content-encoding": "gzip"}, stream=Packed())

    class Packed(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield gzip.compress(b"<html>down for maintenance</html>")

    async with client(answer) as api:
        with pytest.raises(ApiError) as caught:
            await api.status()
    assert caught.value.code == code


@pytest.mark.parametrize("body", [b"", b"no", b"[]", b'{"status": 5}', b"[" * 100_000])
async def test_answer_is_refused_when_it_is_not_the_documented_form(body: bytes) -> None:
    async with client(lambda _request: httpx.Response(200, content=body)) as api:
        with pytest.raises(ApiError) as caught:
            await api.run_info(RUN)
    assert caught.value.code == "bad_answer"


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"batches": [1]},
        {"called": [1]},
        {"batches": 1, "called": 1},
        {"batches": ["1"], "called": [1]},
        {"batches": [1], "called": [True]},
        {"batches": [1, 2], "called": [1]},
    ],
)
async def test_batch_list_is_refused_when_it_is_not_two_lists_of_integers(value: object) -> None:
    async with client(answer(value)) as api:
        with pytest.raises(ApiError, match=r"CommittedBatches|list of batches"):
            await api.called()


async def test_file_and_document_are_returned_when_they_match_their_hash() -> None:
    async with client(lambda _request: httpx.Response(200, content=b"data")) as api:
        assert await api.file(file_hash(b"data")) == b"data"
        assert await api.document(keccak(b"data")) == b"data"


async def test_file_and_document_are_refused_when_they_do_not_match_their_hash() -> None:
    async with client(lambda _request: httpx.Response(200, content=b"forged")) as api:
        with pytest.raises(ApiError, match="hashes to something else"):
            await api.file(file_hash(b"data"))
        with pytest.raises(ApiError, match="hashes to something else"):
            await api.document(keccak(b"data"))


def in_parts(data: bytes, asked: list[str]) -> Handler:
    """Serve ranges, as any web server does."""

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["range"])
        first, last = map(int, asked[-1].removeprefix("bytes=").split("-"))
        if first >= len(data):
            return httpx.Response(416)
        part = data[first : last + 1]
        stated = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return httpx.Response(206, content=part, headers={"content-range": stated})

    return handler


@pytest.mark.parametrize("held", [b"", b"01234", b"0123456789", b"0123456789 and more"])
async def test_download_goes_on_where_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bytes
) -> None:
    monkeypatch.setattr("muster.api.client.DOWNLOAD_BYTES", 4)
    path, asked = tmp_path / "d", list[str]()
    path.write_bytes(held)
    async with client(in_parts(b"0123456789", asked)) as api:
        await api.download(HASH, path, max_bytes=10)
    assert path.read_bytes() == b"0123456789"
    assert asked[0] == f"bytes={len(held)}-{len(held) + 3}"


async def test_document_that_comes_whole_is_taken(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"half")
    async with client(lambda _request: httpx.Response(200, content=b"all of it")) as api:
        await api.download(HASH, tmp_path / "d", max_bytes=10)
    assert (tmp_path / "d").read_bytes() == b"all of it"


@pytest.mark.parametrize(
    ("stated", "content", "reason"),
    [
        ("bytes 0-3/11", b"0123", "bytes 0 of 11"),
        ("bytes 4-7/10", b"0123", "bytes 4 of 10"),
        ("bytes 0-3/10", b"", "bytes 0 of 10"),
        ("bytes 0-3/*", b"0123", "which part"),
        ("", b"0123", "which part"),
        ("bytes 0-3/" + "9" * 99, b"0123", "which part"),
    ],
)
async def test_part_that_does_not_fit_is_refused(
    tmp_path: Path, stated: str, content: bytes, reason: str
) -> None:
    reply = httpx.Response(206, content=content, headers={"content-range": stated})
    async with client(lambda _request: reply) as api:
        with pytest.raises(ApiError, match=reason):
            await api.download(HASH, tmp_path / "d", max_bytes=10)
    assert not (tmp_path / "d").exists()


async def test_file_is_refused_when_it_exceeds_the_limit() -> None:
    async def endless() -> object:
        for _ in range(MAX_FILE_BYTES // (1 << 20) + 2):
            yield bytes(1 << 20)

    async with client(lambda _request: httpx.Response(200, content=endless())) as api:
        with pytest.raises(ApiError, match="exceeds"):
            await api.file(HASH)


async def test_outcomes_and_metrics_are_sent_as_documented() -> None:
    seen: dict[str, object] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        seen[request.url.path] = json.loads(verified(request).content)
        return httpx.Response(202, json={})

    async with client(handler) as api:
        await api.post_outcomes(7, b"\x01\x02", b"\x05" * 65)
        await api.post_metrics(3, {"reward": 0.5})
    assert seen == {
        "/v1/batches/7/outcomes": {"records": "0x0102", "signature": hex0x(b"\x05" * 65)},
        "/v1/metrics": {"step": 3, "metrics": {"reward": 0.5}},
    }


async def test_metrics_are_refused_when_not_finite() -> None:
    async with client(answer({})) as api:
        with pytest.raises(ValueError, match="finite number"):
            await api.post_metrics(3, {"reward": float("nan")})


async def test_signed_request_is_refused_when_there_is_no_key() -> None:
    async with client(answer({}), key=None) as api:
        with pytest.raises(ConfigError, match="signed"):
            await api.lease(RUN)


async def test_events_yield_each_status() -> None:
    stream = b': alive\n\nevent: status\ndata: {"step": 1}\n\nevent: status\ndata: {"step": 2}\n\n'
    async with client(lambda _request: httpx.Response(200, content=stream)) as api:
        assert [event["step"] async for event in api.events()] == [1, 2]


async def test_events_are_refused_when_there_are_too_many_listeners() -> None:
    error = {"error": {"code": "too_many_listeners", "message": "full"}}
    async with client(answer(error, 503)) as api:
        with pytest.raises(ApiError, match="full"):
            async for _event in api.events():
                pass


def elsewhere(location: str, asked: list[httpx.Request]) -> Handler:
    """An orchestrator that sends readers to storage, which has the bytes `data`."""

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if request.url.host == "orchestrator.test" and len(asked) == 1:
            return httpx.Response(307, headers={"location": location})
        return httpx.Response(200, content=b"data")

    return handle


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_file_is_fetched_from_storage_that_learns_nothing_of_us(scheme: str) -> None:
    asked: list[httpx.Request] = []
    async with client(elsewhere(f"{scheme}://storage.test/a?signature=b", asked)) as api:
        assert await api.file(file_hash(b"data")) == b"data"
    assert str(asked[1].url) == f"{scheme}://8.8.8.8/a?signature=b"
    assert asked[1].headers["host"] == "storage.test"
    assert NONCE_HEADER not in asked[1].headers


async def test_storage_is_in_our_network_only_if_the_orchestrator_is() -> None:
    asked: list[httpx.Request] = []
    async with client(elsewhere("http://inside.test/a", asked)) as api:
        with pytest.raises(ApiError, match="it leads into a private network"):
            await api.file(file_hash(b"data"))
    assert [request.url.host for request in asked] == ["orchestrator.test"]

    async def private(_host: str, _port: int) -> list[str]:
        return ["10.0.0.7"]

    own: list[httpx.Request] = []
    async with client(elsewhere("http://inside.test/a", own), resolver=private) as api:
        assert await api.file(file_hash(b"data")) == b"data"
        assert await api.connects_to("inside.test", 80) == ["inside.test"]


async def test_relays_that_an_orchestrator_names_are_in_our_network_only_if_it_is() -> None:
    async with client(answer({})) as api:
        assert await api.connects_to("storage.test", 80) == ["8.8.8.8"]
        with pytest.raises(ConnectionError, match="private network"):
            await api.connects_to("inside.test", 8545)


async def test_storage_is_asked_at_every_address_until_one_is_reached() -> None:
    """The one that was reached is asked first the next time."""
    found = ["2606:4700::1", "2606:4700::2", "1.0.0.1", "8.8.8.8"]
    asked: list[str] = []

    async def resolver(_host: str, _port: int) -> list[str]:
        return found

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "orchestrator.test":
            return httpx.Response(307, headers={"location": "http://storage.test/a"})
        asked.append(request.url.host)
        assert request.extensions["timeout"]["connect"] <= 10.0
        if request.url.host == "1.0.0.1":
            raise httpx.ConnectTimeout("it hangs")
        if request.url.host != "8.8.8.8":
            raise httpx.ConnectError("it refuses")
        return httpx.Response(200, content=b"data")

    async with client(handle, resolver=resolver) as api:
        assert await api.file(file_hash(b"data")) == b"data"
        assert asked == ["2606:4700::1", "1.0.0.1", "2606:4700::2", "8.8.8.8"]
        assert await api.file(file_hash(b"data")) == b"data"
        assert asked[4:] == ["8.8.8.8"]
        found[:] = ["1.0.0.1"]
        assert await api.connects_to("other.test", 80) == ["1.0.0.1"]


async def test_no_address_of_storage_is_asked_when_one_of_them_is_private() -> None:
    asked: list[httpx.Request] = []

    async def resolver(host: str, _port: int) -> list[str]:
        return ["1.1.1.1", "10.0.0.7"] if host == "storage.test" else ["1.1.1.1"]

    async with client(elsewhere("http://storage.test/a", asked), resolver=resolver) as api:
        with pytest.raises(ApiError, match="it leads into a private network"):
            await api.file(file_hash(b"data"))
    assert [request.url.host for request in asked] == ["orchestrator.test"]


class Peer:
    """The connection of an answer."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get_extra_info(self, _info: str) -> tuple[str, int]:
        return self.address, 80


@pytest.mark.parametrize("peers", [["1.1.1.1"], ["1.1.1.1", "10.0.0.7"], ["10.0.0.7", "1.1.1.1"]])
async def test_a_public_orchestrator_does_not_move_into_our_network(peers: list[str]) -> None:
    asked: list[str] = []
    left = list(peers)

    async def resolver(_host: str, _port: int) -> list[str]:
        return ["10.0.0.7"]  # its owner answers so once the connection is made

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        peer = {"network_stream": Peer(left.pop(0))}
        if len(left):
            return httpx.Response(404, extensions=peer)
        place = {"location": "http://router.test/reboot"}
        return httpx.Response(307, headers=place, extensions=peer)

    async with client(handle, resolver=resolver) as api:
        for _ in peers:
            with pytest.raises(ApiError):
                await api.file(file_hash(b"data"))
        assert not await api.is_inside()
        with pytest.raises(ConnectionError, match="leads into a private network"):
            await api.connects_to("router.test", 80)
    assert set(asked) == {"orchestrator.test"}


async def test_an_orchestrator_that_first_resolved_to_public_addresses_stays_public() -> None:
    found = ["1.1.1.1"]

    async def resolver(_host: str, _port: int) -> list[str]:
        return found

    async with client(lambda _: httpx.Response(404), resolver=resolver) as api:
        assert not await api.is_inside()
        api._hosts._found.clear()
        found[:] = ["10.0.0.7"]
        assert not await api.is_inside()
        with pytest.raises(ConnectionError, match="leads into a private network"):
            await api.connects_to("10.0.0.7", 80)


async def test_an_orchestrator_in_our_network_may_name_others_there() -> None:
    async def resolver(_host: str, _port: int) -> list[str]:
        raise OSError("no such name")

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "storage.test":
            return httpx.Response(200, content=b"data")
        place, peer = {"location": "http://storage.test/a"}, {"network_stream": Peer("10.0.0.2")}
        return httpx.Response(307, headers=place, extensions=peer)

    async with client(handle, resolver=resolver) as api:
        assert await api.file(file_hash(b"data")) == b"data"
        assert await api.connects_to("relay.test", 80) == ["relay.test"]


async def test_names_of_strangers_that_hang_delay_no_lookup_for_an_orchestrator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks, answers, many = socket.getaddrinfo, threading.Event(), 100

    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        if host.endswith(".example"):
            answers.wait()
        return asks("127.0.0.1", port, **options)

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    async with asyncio.TaskGroup() as group, OrchestratorApi("http://orchestrator.test") as api:
        names = [f"{number}.example" for number in range(many)]
        hanging = [group.create_task(resolve(name, 80)) for name in names]
        await asyncio.sleep(0)  # all are in the queue
        try:
            async with asyncio.timeout(5):
                assert await api.is_inside()
            assert not any(task.done() for task in hanging)
        finally:
            answers.set()
    assert [task.result() for task in hanging] == [["127.0.0.1"]] * many


async def test_storage_that_has_something_else_is_noticed() -> None:
    async with client(elsewhere("https://storage.test/a", [])) as api:
        with pytest.raises(ApiError, match="hashes to something else"):
            await api.file(HASH)


@pytest.mark.parametrize(
    "location",
    ["", "/v1/files/a", "ftp://storage.test/a", "file:///etc/passwd", "https://me:word@storage.test/a",
     "https://storage.test/" + "a" * 5000, "https:///a"],
)  # fmt: skip
async def test_storage_that_is_no_place_to_fetch_from_is_refused(location: str) -> None:
    asked: list[httpx.Request] = []
    async with client(elsewhere(location, asked)) as api:
        with pytest.raises(ApiError, match="the storage is n"):
            await api.file(file_hash(b"data"))
    assert len(asked) == 1


async def test_storage_in_the_clear_is_refused_to_who_came_by_tls() -> None:
    asked: list[httpx.Request] = []
    handler = elsewhere("http://storage.test/a", asked)
    async with OrchestratorApi(
        "https://orchestrator.test", key=KEY, domain=DOMAIN, audience=AUDIENCE,
        transport=httpx.MockTransport(handler), clock=lambda: NOW,
    ) as api:  # fmt: skip
        with pytest.raises(ApiError, match="not a place to fetch from"):
            await api.file(file_hash(b"data"))


async def test_only_files_may_be_elsewhere() -> None:
    async with client(elsewhere("https://storage.test/a", [])) as api:
        with pytest.raises(ApiError) as caught:
            await api.submission_state(HASH)
    assert caught.value.status == 307
