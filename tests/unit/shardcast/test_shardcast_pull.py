"""Which relay continues a chunk that another left, and when an attempt counts as stalled."""

from random import Random

import pytest
from shardcast_policies import MemorySink

from muster.protocol.ids import PolicyVersion, RunId, to_hash32
from muster.shardcast.chunks import VerifyingSink
from muster.shardcast.download import ShardClient
from muster.shardcast.pull import NOTHING_BYTES_PER_S, STALL_S, Pull, _Attempt, _Chunk
from muster.shardcast.transfer import RelayScores, Transfer

TAIL, HONEST = "http://tail", "http://honest"
SIZE = 8 << 20


def open_sink() -> VerifyingSink:
    return MemorySink(to_hash32(bytes(32)), SIZE)


@pytest.mark.parametrize(
    ("left", "brought", "asked"),
    [
        (set(), set(), {TAIL, HONEST}),
        ({TAIL}, set(), {HONEST}),
        ({TAIL}, {TAIL}, {HONEST}),
        ({TAIL, HONEST}, {HONEST}, {HONEST}),
        ({TAIL, HONEST}, set(), {TAIL, HONEST}),
    ],
)
async def test_relay_that_was_left_is_asked_only_where_there_is_no_other(
    left: set[str], brought: set[str], asked: set[str]
) -> None:
    scores = RelayScores([TAIL, HONEST], rng=Random(1))
    for url in (TAIL, HONEST):
        scores.succeeded(url, SIZE, 1.0)  # both have the same average speed
    client = ShardClient()
    pull = Pull(Transfer(client, scores, RunId(1), PolicyVersion(0), attempts=5), [], parallel=4)
    pull._left, pull._brought = left, brought
    chunk = _Chunk(open_sink)
    assert {pull._relay_for(chunk, 0.0, explores=False) for _ in range(50)} == asked
    client.close()


def stalled(*arrivals: float) -> list[bool]:
    """Return after each look, one a tenth of STALL_S, whether an attempt has stalled."""
    attempt = _Attempt(_Chunk(open_sink), TAIL, open_sink(), 0.0, set(), 0)
    found = []
    for number, arrived in enumerate(arrivals):
        attempt.sink.saw(int(arrived))
        attempt.look(number * STALL_S / 10)
        found.append(attempt.has_stalled)
    return found


QUICK, DROP = 2 * NOTHING_BYTES_PER_S * STALL_S, 64


def test_attempt_that_drips_after_it_was_quick_has_stalled() -> None:
    found = stalled(*[QUICK] * 5, *[DROP] * 11)
    assert (found[13], found[15]) == (False, True)


@pytest.mark.parametrize("arrivals", [[QUICK] * 30, [0] * 30, [QUICK, *[0] * 9] * 3])
def test_attempt_that_brings_bytes_or_never_began_has_not_stalled(arrivals: list[float]) -> None:
    assert not any(stalled(*arrivals))
