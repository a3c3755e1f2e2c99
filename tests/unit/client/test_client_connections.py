"""What a client process is made of, and what it may connect to for its run."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from muster.api import OrchestratorApi
from muster.client import connections
from muster.client.connections import Connected, RunRelays, make_engine
from muster.client.settings import EngineSettings, NodeSettings
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import ProcessEngine
from muster.protocol.errors import ApiError

OLD, FRESH = "https://old.example", "https://fresh.example"
NOT_THERE = Path("/dev/null/relays")
"""A file that does not exist and cannot be written."""


# torch's device `meta` is there on every machine.
@pytest.mark.parametrize(("device", "kind"), [("cpu", TransformersEngine), ("meta", ProcessEngine)])
def test_only_an_engine_on_a_cpu_shares_its_clients_process(
    tmp_path: Path, device: str, kind: type
) -> None:
    assert type(make_engine(EngineSettings(state_dir=tmp_path, device=device))) is kind


def orchestrator(*addresses: str) -> OrchestratorApi:
    """An orchestrator at an address for each lookup; its name is not found at an empty one."""
    found = iter(addresses)

    async def resolver(_host: str, _port: int) -> list[str]:
        return [address for address in [next(found)] if address]

    return OrchestratorApi("http://orchestrator.example", resolver=resolver)


def connected(
    api: OrchestratorApi | None,
    urls: tuple[str, ...],
    *,
    are_ours: bool = False,
    fetcher: Any = None,
) -> Connected:
    unused: Any = None
    relays = RunRelays(urls if are_ours else (), unused, NOT_THERE)
    relays.urls = urls
    return Connected(unused, unused, unused, unused, cast(Any, api), fetcher, relays)


@pytest.mark.parametrize(
    ("address", "are_ours", "own"),
    [
        ("10.0.0.7", False, (OLD,)),
        ("1.1.1.1", False, ()),
        ("", False, ()),
        ("1.1.1.1", True, (OLD,)),
    ],
    ids=["private", "public", "not found", "chosen by us"],
)
async def test_relays_are_our_own_if_we_chose_them_or_a_private_orchestrator_did(
    address: str, are_ours: bool, own: tuple[str, ...]
) -> None:
    async with orchestrator(address) as api:
        assert await connected(api, (OLD,), are_ours=are_ours).own_relays() == own


async def test_rooms_are_those_that_may_be_given_files_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator that is not found once keeps no relay out for ever."""
    monkeypatch.setattr("muster.api.public_hosts.KEPT_S", 0.0)
    relays = ("http://10.0.0.3:8700", "http://relay.example/path", "http://relay.example")
    async with orchestrator("", "10.0.0.7", "1.1.1.1") as api:
        given = []
        for _ in range(3):
            async with await connected(api, relays).open_rooms() as rooms:
                given.append((rooms.urls, rooms.unasked))
    assert given[0] == given[2] == (["http://relay.example"], list(relays[:2]))
    assert given[1] == (list(relays), [])


async def test_rooms_are_those_of_the_relays_that_are_named_now() -> None:
    async with orchestrator("10.0.0.7") as api:
        made = connected(api, (OLD,))
        made.relays.urls = (FRESH,)
        async with await made.open_rooms() as rooms:
            assert rooms.urls == [FRESH]


class Naming:
    """An orchestrator that names relays, or fails."""

    def __init__(self, *names: str, error: Exception | None = None) -> None:
        self.names, self.error, self.asked = names, error, 0

    async def __call__(self) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return SimpleNamespace(policy_sources=self.names)


@pytest.mark.parametrize(
    ("orchestrator", "expected"),
    [
        (Naming(FRESH), FRESH),
        (Naming(), OLD),
        (Naming("ftp://fresh.example"), OLD),
        (Naming(FRESH, error=ApiError("no answer", status=503, code="away")), OLD),
    ],
)
async def test_relays_are_those_that_the_orchestrator_names_now_and_are_kept(
    tmp_path: Path, orchestrator: Naming, expected: str
) -> None:
    kept = tmp_path / "relays.txt"
    await RunRelays((), Naming(OLD), kept).renew()
    relays = RunRelays((), orchestrator, kept)
    assert relays.urls == (OLD,)
    assert await relays.renew() == relays.urls == (expected,)
    assert RunRelays((), orchestrator, kept).urls == (expected,)
    assert RunRelays(["https://ours.example"], orchestrator, kept).urls == ("https://ours.example",)


@pytest.mark.parametrize("damaged", [b"", b"ftp://old.example", b"\xff", b"\0"])
async def test_damaged_file_of_relays_counts_as_none_until_they_are_named(
    tmp_path: Path, damaged: bytes
) -> None:
    kept = tmp_path / "relays.txt"
    kept.write_bytes(damaged)
    relays = RunRelays((), Naming(FRESH), kept)
    assert relays.urls == ()
    assert await relays.renew() == RunRelays((), Naming(), kept).urls == (FRESH,)


async def test_relays_that_the_disk_does_not_keep_are_used() -> None:
    assert await RunRelays((), Naming(FRESH), NOT_THERE).renew() == (FRESH,)


async def test_orchestrator_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RENEW_WITHIN_S", 0.0)

    async def hang() -> Any:
        await asyncio.Event().wait()

    relays = RunRelays((), hang, NOT_THERE)
    relays.urls = (OLD,)
    assert await relays.renew() == (OLD,)


async def test_chosen_relays_stay() -> None:
    orchestrator = Naming(FRESH)
    assert await RunRelays([OLD], orchestrator, NOT_THERE).renew() == (OLD,)
    assert not orchestrator.asked


async def test_relays_are_asked_for_as_long_as_a_client_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "RENEW_S", 0.0)
    enough, asked = asyncio.Event(), list[int]()

    async def renew() -> bool:
        asked.append(1)
        if len(asked) == 3:
            enough.set()
        return False

    async def follow(*_: Any, **__: Any) -> None:
        await enough.wait()

    monkeypatch.setattr(connections, "follow", follow)
    settings = cast(NodeSettings, SimpleNamespace(poll_s=0.0, confirmations=0))
    made = connected(None, (OLD,), fetcher=SimpleNamespace(renew=renew))
    await made.follow(settings, lambda _: None)
    assert len(asked) == 3
