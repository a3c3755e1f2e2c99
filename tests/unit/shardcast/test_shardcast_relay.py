"""A relay mirrors what the chain knows, whatever else an upstream announces, in virtual time."""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random

import pytest
from shardcast_policies import RUN, publish_paths, write_files

from muster.lab.simulator.clock import run_virtual
from muster.protocol.eip712 import Domain, digest, sign
from muster.protocol.encoding import keccak
from muster.protocol.errors import StorageFailed
from muster.protocol.ids import Hash32, PolicyVersion, RunId, to_address
from muster.protocol.messages import Checkpoint
from muster.shardcast import ChunkStore, Relay, TrustedRoot
from muster.shardcast.adapter import CONFIG_NAME
from muster.shardcast.chunks import VerifyingSink
from muster.shardcast.download import RelayFault, ShardClient
from muster.shardcast.relay import MAX_PAUSE_S, REFUSED_PAUSE_S, WITHDRAWN_S

HONEST, LIAR = "http://honest", "http://liar"
FILES = {"w": Random(1).randbytes(5000)}
QUERY_S, ANSWER_S = 0.02, 0.01
DOMAIN = Domain(31337, to_address(b"\x11" * 20))
KEY = bytes(31) + b"\x01"
Listing = Callable[[], list[PolicyVersion]]


class Upstreams(ShardClient):
    """Upstreams of one store; each lists what it likes, or is down while it lists nothing."""

    def __init__(self, store: ChunkStore, listings: dict[str, Listing]) -> None:
        super().__init__()
        self._store = store
        self._listings = listings
        self.polls = 0
        self.sent_bytes = 0
        """Bytes of all chunks that the relay received."""

    async def versions(
        self, url: str, _run_id: RunId, *, after: int = -1, wait_s: int = 0, **_options: bool
    ) -> list[PolicyVersion] | RelayFault:
        """Answer at once when there is news, else after the wait."""
        self.polls += 1
        await asyncio.sleep(ANSWER_S)
        listed = self._listings[url]()
        if listed and max(listed) <= after:
            await asyncio.sleep(wait_s)
        return listed or RelayFault.FAILED

    async def any_manifest(
        self, url: str, run_id: RunId, version: PolicyVersion
    ) -> bytes | RelayFault:
        """The store's manifest; the liar says nothing."""
        found = self._store.manifest_bytes(run_id, version)
        return found if url == HONEST and found else RelayFault.ABSENT

    async def signature(
        self, _url: str, run_id: RunId, version: PolicyVersion
    ) -> bytes | RelayFault:
        """The store's signature."""
        return self._store.signature(run_id, version) or RelayFault.ABSENT

    async def chunk(self, url: str, sink: VerifyingSink) -> RelayFault | None:
        """The store's chunk; the liar says nothing."""
        region = self._store.find(sink.digest)
        if url != HONEST or region is None:
            return RelayFault.ABSENT
        await asyncio.sleep(ANSWER_S)
        sink.write([region.read()])
        sink.commit()
        self.sent_bytes += region.size
        return None


class Mirror:
    """A relay beside what it does in virtual time."""

    def __init__(self, folder: Path, listings: dict[str, Listing]) -> None:
        self.origin = ChunkStore(folder / "origin", keep=64)
        self.store = ChunkStore(folder / "store")
        self.asked: list[tuple[float, PolicyVersion]] = []
        """When the chain was asked for which version."""
        self.unknown_s = (0.0, 0.0)
        """From when until when the chain knows no version."""
        self.upstreams = Upstreams(self.origin, listings)
        self.relay = Relay(list(listings), self.store, run_id=RUN, trust=self._trust, rng=Random(1))
        self.relay._client.close()
        self.relay._client = self.upstreams

    async def _trust(self, run_id: RunId, version: PolicyVersion) -> TrustedRoot | None:
        now_s = asyncio.get_running_loop().time()
        self.asked.append((now_s, version))
        await asyncio.sleep(QUERY_S)
        if self.unknown_s[0] <= now_s < self.unknown_s[1]:
            return None
        data = self.origin.manifest_bytes(run_id, version)
        return TrustedRoot(keccak(data), None, DOMAIN) if data else None

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""

        async def main() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.relay.run()

        run_virtual(main)

    @property
    def remembered(self) -> int:
        """Versions that the relay keeps something about."""
        return len({*self.relay._retry_at, *self.relay._failures})


def publish(
    store: ChunkStore, version: int, files: Mapping[str, bytes] = FILES, **options: int
) -> None:
    """Publish a version with a signature that can be read; `options` are those of the store."""

    def sign_root(root: Hash32) -> bytes:
        checkpoint = Checkpoint(RUN, PolicyVersion(version), root)
        return sign(digest(DOMAIN, checkpoint.struct_hash()), KEY)

    paths = write_files(store.folder.parent / f"source-{version}", files)
    publish_paths(store, paths, version, sign=sign_root, **options)


def publish_adapters(store: ChunkStore, *versions: int) -> None:
    """Publish a base model, and adapters as deltas from it."""
    publish(store, 0, anchor_every=8)
    for version in versions:
        adapter = {CONFIG_NAME: b'{"r": %d}' % version}
        publish(store, version, FILES | adapter, anchor_every=8)


def inventor(*also: int) -> Listing:
    """A listing of 15 invented versions, others at each poll, above all real ones."""
    numbers = itertools.count((1 << 32) - 1, -1)
    return lambda: [PolicyVersion(n) for n in (*itertools.islice(numbers, 15), *also)]


def listing(*versions: int) -> Listing:
    return lambda: [PolicyVersion(version) for version in versions]


def test_invented_versions_do_not_delay_an_honest_upstreams(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, {LIAR: inventor(), HONEST: listing(1, 2)})
    for version in (1, 2):
        publish(mirror.origin, version)
    mirror.run(1.0)
    assert mirror.store.versions(RUN) == [2, 1]
    assert [version for _, version in mirror.asked].index(PolicyVersion(2)) <= 2


def test_version_that_an_inventor_lists_too_is_mirrored_at_once(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, {LIAR: inventor(2), HONEST: listing(2)})
    publish(mirror.origin, 2)
    mirror.run(1.0)
    assert mirror.store.versions(RUN) == [2]


def test_invented_versions_cost_few_queries_and_no_memory(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, {LIAR: inventor(), HONEST: listing(1)})
    publish(mirror.origin, 1)
    mirror.run(300.0)
    assert mirror.remembered <= 64
    assert len(mirror.asked) < 300 * 5


@pytest.mark.parametrize("listed", [range(40), range(20, 40)], ids=["far below", "not listed"])
def test_late_relay_mirrors_what_the_newest_deltas_start_from(
    tmp_path: Path, listed: Iterable[int]
) -> None:
    mirror = Mirror(tmp_path, {HONEST: listing(*sorted(listed, reverse=True))})
    publish_adapters(mirror.origin, *range(35, 40))
    mirror.run(10.0)
    assert mirror.store.versions(RUN) == [39, 38, 37, 36, 35, 0]


def broadcast_bytes(store: ChunkStore, *versions: int) -> int:
    """Return the bytes that a relay receives for these versions."""
    manifests = [store.manifest(RUN, PolicyVersion(version)) for version in versions]
    return sum(manifest.broadcast_bytes for manifest in manifests if manifest)


@pytest.mark.parametrize("kept", [range(35, 40), range(36, 40), range(37, 40)])
def test_relay_with_bounded_disk_receives_each_version_once(
    tmp_path: Path, kept: Iterable[int]
) -> None:
    mirror = Mirror(tmp_path, {HONEST: listing(39, 38, 37, 36, 35, 0)})
    publish_adapters(mirror.origin, *range(35, 40))
    mirror.store.max_bytes = broadcast_bytes(mirror.origin, 0, *kept)
    mirror.run(3 * REFUSED_PAUSE_S)
    assert mirror.store.versions(RUN) == [*sorted(kept, reverse=True), 0]
    assert mirror.upstreams.sent_bytes == broadcast_bytes(mirror.origin, 0, *range(35, 40))


def test_relay_with_bounded_disk_drops_no_newer_version_for_an_older_one(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, {HONEST: listing(3, 2, 1)})
    mirror.store.max_bytes = 2 * 5000
    for version in (1, 2, 3):
        publish(mirror.origin, version, {"w": Random(version).randbytes(5000)})
    mirror.run(3 * REFUSED_PAUSE_S)
    assert mirror.store.versions(RUN) == [3, 2]
    assert mirror.upstreams.sent_bytes == 2 * 5000


def refusals(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    """What the relay logged as errors, each with the version that it is about."""
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    return [(record.message, record.__dict__["policy_version"]) for record in errors]


def test_relay_says_once_that_older_versions_have_no_room_and_what_to_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = Mirror(tmp_path, {HONEST: listing(4, 3, 2, 1)})
    mirror.store.max_bytes = 2 * 5000
    for version in (1, 2, 3, 4):
        publish(mirror.origin, version, {"w": Random(version).randbytes(5000)})
    mirror.run(5 * REFUSED_PAUSE_S)
    assert refusals(caplog) == [("version does not fit", 2)]
    (said,) = (record.__dict__ for record in caplog.records if record.levelname == "ERROR")
    assert "15000 bytes" in said["cause"]
    assert "the limit is 10000" in said["cause"]
    assert said["hint"] == "raise --max-bytes, or lower --keep, which is 5"


def test_relay_says_of_each_newest_version_that_it_has_no_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def grown() -> list[PolicyVersion]:
        is_later = asyncio.get_running_loop().time() > 3 * REFUSED_PAUSE_S
        return listing(2, 1)() if is_later else listing(1)()

    mirror = Mirror(tmp_path, {HONEST: grown})
    mirror.store.max_bytes = 4999
    publish(mirror.origin, 1)
    publish(mirror.origin, 2)
    mirror.run(6 * REFUSED_PAUSE_S)
    assert refusals(caplog) == [("version does not fit", 1), ("version does not fit", 2)]


def test_relay_says_each_time_that_its_disk_refuses_a_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageFailed("cannot write: No space left on device")

    mirror = Mirror(tmp_path, {HONEST: listing(1)})
    publish(mirror.origin, 1)
    monkeypatch.setattr(mirror.store, "begin", refuse)
    mirror.run(2.5 * REFUSED_PAUSE_S)
    assert refusals(caplog) == [("version cannot be stored", 1)] * 3


def test_parent_that_the_chain_does_not_have_is_asked_for_ever_more_rarely(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, {HONEST: listing(39)})
    publish_adapters(mirror.origin, 39)
    mirror.origin.remove(RUN, PolicyVersion(0))
    mirror.run(300.0)
    assert mirror.store.versions(RUN) == [39]
    assert 300 / MAX_PAUSE_S <= sum(version == 0 for _, version in mirror.asked) <= 200


def test_version_ahead_of_the_chain_is_mirrored_once_the_chain_knows_it(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, {HONEST: listing(1)})
    known_from_s = 20.0
    mirror.unknown_s = (0.0, known_from_s)
    publish(mirror.origin, 1)
    mirror.run(known_from_s + 2 * MAX_PAUSE_S)
    assert mirror.store.versions(RUN) == [1]
    assert mirror.asked[0][0] < known_from_s


@pytest.mark.parametrize(("lacked_s", "held"), [(WITHDRAWN_S, [2, 1]), (2 * WITHDRAWN_S, [])])
def test_versions_go_once_the_chain_has_lacked_them_for_minutes(
    tmp_path: Path, lacked_s: float, held: list[int]
) -> None:
    mirror = Mirror(tmp_path, {HONEST: listing(2, 1)})
    for version in (1, 2):
        publish(mirror.origin, version)
    mirror.unknown_s = (100.0, math.inf)
    mirror.run(100.0 + lacked_s)
    assert mirror.store.versions(RUN) == held


def test_version_that_the_chain_lacks_now_and_then_stays(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store")
    publish(store, 1)
    data = store.manifest_bytes(RUN, PolicyVersion(1)) or b""
    answers = itertools.cycle([None, None, TrustedRoot(keccak(data), None, DOMAIN)])

    async def trust(_run_id: RunId, _version: PolicyVersion) -> TrustedRoot | None:
        return next(answers)

    async def main() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3 * WITHDRAWN_S):
                await Relay([], store, run_id=RUN, trust=trust).run()

    run_virtual(main)
    assert store.versions(RUN) == [1]


def test_version_of_which_the_chain_has_another_root_goes_at_once(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store")
    publish(store, 1)

    async def trust(_run_id: RunId, _version: PolicyVersion) -> TrustedRoot | None:
        return TrustedRoot(keccak(b"another manifest"), None, DOMAIN)

    asyncio.run(Relay([], store, run_id=RUN, trust=trust).recheck())
    assert store.stored_versions(RUN) == []


def test_upstream_that_is_down_for_hours_is_asked_again(tmp_path: Path) -> None:
    hours_s = 3 * 3600.0
    mirror = Mirror(tmp_path, {HONEST: listing()})
    mirror.run(hours_s)
    assert mirror.upstreams.polls > hours_s / MAX_PAUSE_S
