"""Faults of public RPC endpoints, simulated in front of a devnet's chain.

Several nodes answer behind one address, and some lag; requests are refused for their rate, batches
for their size, ranges of blocks for their length, with various messages; answers are late, cut off
or missing; the newest logs are not served yet; `pending` is ignored; fees jump; and the chain is
reorganised.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from aiohttp import web

from muster.lab.endpoints.proxy import (
    Failure,
    Lagging,
    Lie,
    RpcProxy,
    breaking_off,
    dropping,
    refusing,
    sending,
)

logger = logging.getLogger(__name__)

RANGE_WORDS = (
    "exceed maximum block range: {most}",
    "eth_getLogs is limited to a {most} range",
    "block range is too wide",
    "query exceeds max block range {most}",
)
RESULT_WORDS = (
    "query returned more than {most} results",
    "logs matched by query exceeds limit of {most}",
    "Response size exceeded",
)
RATE_WORDS = (
    (429, "Your app has exceeded its compute units per second capacity"),
    (-32005, "request rate limited"),
    (-32016, "over rate limit"),
)


@dataclass(frozen=True, slots=True)
class Faults:
    """Rates of the faults; shares are of HTTP requests."""

    rate: float = 0.02
    """Refused for the rate of requests."""
    lost: float = 0.01
    """Dropped, or cut off in the middle of the answer."""
    late: float = 0.002
    """Answered after `late_s`."""
    late_s: float = 5.0
    """Seconds that a late answer takes."""
    lag: float = 0.1
    """Answered by a node that lags behind."""
    most_lag: int = 3
    """Most blocks that such a node is behind."""
    logless: float = 0.02
    """Answered without the logs of the newest requested block."""
    pending: float = 0.3
    """Answered by a node that knows no pending transactions."""
    most_blocks: int = 500
    """Longest range of blocks in a query of logs."""
    most_logs: int = 10_000
    """Most logs in an answer."""
    most_calls: int = 10
    """Largest batch."""
    block_s: float = 0.25
    """Seconds between blocks."""
    fee_every_s: float = 30.0
    """Seconds between two triplings of the base fee."""
    reorg_every_s: float = 15.0
    """Seconds between two reorganisations."""
    deepest: int = 10
    """Most blocks of a reorganisation. Anvil loses all state in a deeper one after 1,000 blocks."""


PROFILES = {"public": Faults()}
"""Faults by profile name."""


class PublicEndpoint:
    """Decides at random about each request; `played` counts the faults."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults = faults
        self._chance = Random(seed)
        self.played: Counter[str] = Counter()

    def failure(self, calls: Sequence[Mapping[str, Any]]) -> Failure | None:
        """Return the failure of an HTTP request, or None."""
        faults, chance = self._faults, self._chance
        if len(calls) > faults.most_calls:
            return self._play("batches refused", _refused_batch(chance, faults.most_calls))
        if chance.random() < faults.rate:
            return self._play("refused for their rate", _refused_rate(chance))
        if chance.random() < faults.lost:
            return self._play("lost", chance.choice((dropping, breaking_off)))
        if chance.random() < faults.late:
            return self._play("late", self._late)
        return None

    def lies(self, head: int) -> list[Lie]:
        """Return the lies in the answer to a request."""
        faults, chance = self._faults, self._chance
        lies: list[Lie] = [_Limits(faults, chance, self.played)]
        if chance.random() < faults.lag:
            self.played["answered by a node behind"] += 1
            lies.append(Lagging(max(0, head - chance.randint(1, faults.most_lag))))
        if chance.random() < faults.logless:
            lies.append(_Logless(self.played))
        if chance.random() < faults.pending:
            lies.append(_Poolless(self.played))
        return lies

    def _play(self, name: str, failure: Failure) -> Failure:
        self.played[name] += 1
        return failure

    async def _late(self, _request: web.Request) -> None:
        await asyncio.sleep(self._faults.late_s)


async def play(proxy: RpcProxy, endpoint: PublicEndpoint, faults: Faults) -> None:
    """Mine blocks, raise fees, and reorganise, until cancelled."""
    loop, chance = asyncio.get_running_loop(), Random(endpoint.played.total())
    fees_at = loop.time() + faults.fee_every_s
    reorg_at = loop.time() + faults.reorg_every_s
    while True:
        await asyncio.sleep(faults.block_s)
        is_dearer = loop.time() >= fees_at
        await proxy.mine(base_fee_factor=3.0 if is_dearer else 1.0)
        if is_dearer:
            endpoint.played["times the base fee tripled"] += 1
            fees_at = loop.time() + faults.fee_every_s
        if loop.time() >= reorg_at:
            depth = chance.randint(1, faults.deepest)
            await proxy.reorganise(depth)
            endpoint.played["reorganisations"] += 1
            logger.info("blocks taken back", extra={"depth": depth})
            reorg_at = loop.time() + faults.reorg_every_s


class _Limits(Lie):
    def __init__(self, faults: Faults, chance: Random, played: Counter[str]) -> None:
        self._faults = faults
        self._chance = chance
        self._played = played

    def refuse(self, method: str, params: list[Any], result: Any) -> str | None:
        if method != "eth_getLogs":
            return None
        first, last = (int(params[0][name], 16) for name in ("fromBlock", "toBlock"))
        if last - first >= self._faults.most_blocks:
            self._played["ranges refused"] += 1
            return self._chance.choice(RANGE_WORDS).format(most=self._faults.most_blocks)
        if len(result) > self._faults.most_logs:
            self._played["answers refused for their size"] += 1
            return self._chance.choice(RESULT_WORDS).format(most=self._faults.most_logs)
        return None


class _Logless(Lie):
    def __init__(self, played: Counter[str]) -> None:
        self._played = played

    def answer(self, method: str, params: list[Any], result: Any) -> Any:
        if method != "eth_getLogs":
            return result
        told = [log for log in result if log["blockNumber"] != params[0]["toBlock"]]
        self._played["answered without the newest logs"] += len(told) < len(result)
        return told


class _Poolless(Lie):
    def __init__(self, played: Counter[str]) -> None:
        self._played = played

    def ask(self, method: str, params: list[Any]) -> list[Any]:
        if method != "eth_getTransactionCount" or params[-1:] != ["pending"]:
            return params
        self._played["nonces without what is pending"] += 1
        return [*params[:-1], "latest"]


def _refused_batch(chance: Random, most: int) -> Failure:
    message = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"batch of %d at most"}}'
    return chance.choice((refusing(413), refusing(400), sending(message % most)))


def _refused_rate(chance: Random) -> Failure:
    if chance.random() < 0.5:
        after = chance.choice(({}, {"retry_after": "1"}))
        return refusing(429, **after)
    code, message = chance.choice(RATE_WORDS)
    body = '{"jsonrpc":"2.0","id":null,"error":{"code":%d,"message":"%s"}}' % (code, message)  # noqa: UP031
    return sending(body.encode())
