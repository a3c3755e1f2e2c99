"""A relay that failed too often is asked again while others drip; one that lied is not."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from blake3 import blake3
from shardcast_policies import MemorySink

from muster.lab.simulator.clock import run_virtual
from muster.protocol.errors import PolicyUnavailable
from muster.protocol.ids import PolicyVersion, RunId, to_hash32
from muster.shardcast.chunks import VerifyingSink
from muster.shardcast.download import RelayFault, ShardClient
from muster.shardcast.pull import Pull
from muster.shardcast.transfer import GIVEN_UP_S, RelayScores, Transfer

DRIP, OTHER = "http://drip", "http://other"
CHUNKS, SIZE = 40, 256 << 10
DIGEST = to_hash32(blake3(bytes(SIZE)).digest())
# Of each request.
HONEST_BYTES_PER_S, DRIP_BYTES_PER_S = 512 << 10, 3200
LATENCY_S, PART_S = 0.02, 0.1
PARALLEL = 4
LONGEST_S = 3600.0


Fault = Callable[[float], RelayFault | None]
"""Gets a time and returns how requests to a relay end then; None while it works."""


class Relays(ShardClient):
    """A relay that drips and one that works except when `fault` says so, in virtual time."""

    def __init__(self, fault: Fault, *, drip_bytes_per_s: int = DRIP_BYTES_PER_S) -> None:
        super().__init__()
        self._fault = fault
        self._rates = {DRIP: drip_bytes_per_s, OTHER: HONEST_BYTES_PER_S}
        self.asked_s: list[float] = []
        """When the other relay was asked for a chunk."""

    async def chunk(self, url: str, sink: VerifyingSink) -> RelayFault | None:
        """Send a chunk in parts; like a thread's buffer, it is written once it is whole."""
        loop = asyncio.get_running_loop()
        if url == OTHER:
            self.asked_s.append(loop.time())
        await asyncio.sleep(LATENCY_S)
        while left := sink.size - sink.seen:
            if url == OTHER and (fault := self._fault(loop.time())):
                return fault
            part = min(left, round(self._rates[url] * PART_S))
            sink.saw(part)
            await asyncio.sleep(PART_S)
        sink.write([bytes(sink.size)])
        sink.commit()
        return None


def pulled_s(relays: Relays, *urls: str) -> float:
    """Return the virtual seconds that a pull of all chunks takes."""

    async def pull() -> float:
        scores = RelayScores(urls or (DRIP, OTHER), rng=Random(1))
        transfer = Transfer(relays, scores, RunId(1), PolicyVersion(0), attempts=6)
        sinks = [lambda: MemorySink(DIGEST, SIZE)] * CHUNKS
        async with asyncio.timeout(LONGEST_S):
            await Pull(transfer, sinks, parallel=PARALLEL).run()
        return asyncio.get_running_loop().time()

    try:
        return run_virtual(pull)[0]
    finally:
        relays.close()


def works(_now_s: float) -> None:
    """The relay has no fault."""


def during(fault: RelayFault, from_s: float, to_s: float) -> Fault:
    return lambda now_s: fault if from_s <= now_s < to_s else None


@pytest.mark.parametrize("drip_bytes_per_s", [DRIP_BYTES_PER_S, 6 << 10, 20 << 10])
@pytest.mark.parametrize("from_s", [0.0, 2.0, 4.9])
def test_relay_that_restarts_is_taken_back_while_another_drips(
    from_s: float, drip_bytes_per_s: int
) -> None:
    restart = during(RelayFault.FAILED, from_s, from_s + 12)
    relays = Relays(restart, drip_bytes_per_s=drip_bytes_per_s)
    whole_s = CHUNKS * SIZE / (PARALLEL * HONEST_BYTES_PER_S)
    assert pulled_s(relays) < from_s + GIVEN_UP_S + 3 * whole_s


def test_relay_that_lied_is_not_taken_back() -> None:
    relays = Relays(during(RelayFault.LIED, 2.0, 2.2))
    assert pulled_s(relays) > 5 * GIVEN_UP_S
    assert max(relays.asked_s) < 2.2


def test_relay_that_lied_and_then_failed_is_not_taken_back() -> None:
    lie, failure = during(RelayFault.LIED, 2.0, 2.05), during(RelayFault.FAILED, 2.05, 4.0)
    relays = Relays(lambda now_s: lie(now_s) or failure(now_s))
    assert pulled_s(relays) > 5 * GIVEN_UP_S
    assert max(relays.asked_s) < 2.2


def test_slow_source_alone_delivers_everything() -> None:
    # A slow relay gets few chunks at a time, but what it sends is not thrown away.
    assert pulled_s(Relays(works), DRIP) < CHUNKS * SIZE / (2 * DRIP_BYTES_PER_S)


def test_slow_source_is_hardly_disturbed_by_a_relay_that_is_down_for_good() -> None:
    alone_s = pulled_s(Relays(works), DRIP)
    relays = Relays(during(RelayFault.FAILED, 2.0, float("inf")))
    beside_s = pulled_s(relays)
    assert beside_s < alone_s * 1.1
    asked = sum(at_s > GIVEN_UP_S for at_s in relays.asked_s)
    assert 0 < asked <= PARALLEL * beside_s / GIVEN_UP_S


@pytest.mark.parametrize("fault", [RelayFault.FAILED, RelayFault.ABSENT, RelayFault.LIED])
def test_pull_ends_soon_when_no_relay_brings_bytes(fault: RelayFault) -> None:
    with pytest.raises(PolicyUnavailable):
        pulled_s(Relays(lambda _now_s: fault), OTHER)


async def test_relay_that_was_slow_a_thousand_times_gets_the_longest_pause() -> None:
    relays = Relays(works)
    scores = RelayScores([DRIP], rng=Random(1))
    transfer = Transfer(relays, scores, RunId(1), PolicyVersion(0), attempts=6)
    for _ in range(1100):
        transfer.note(DRIP, RelayFault.SLOW)
    assert transfer.awake() == []
    relays.close()
