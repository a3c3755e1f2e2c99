"""Several RPC endpoints as one: most of them must agree on every answer that matters.

    blocks, logs, receipts, code, views     most must say the same; an endpoint that says something
                                            else is named and left alone for a while
    the newest block                        the newest that most of them have
    nonces, the market's fees, gas          the middle one, unless most refuse: an endpoint may lag,
                                            or say too much
    a pool's content                        the first that answers
    a transaction to send                   goes to all, and is refused only if all refuse it: a
                                            silent endpoint may have taken it

With two endpoints, one is enough while the other does not answer; of three or more, most must
answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any

from muster.chain.outgoing import refusal_of
from muster.chain.rpc import SEND, Call, Rpc, from_hex, is_quantity, is_transaction
from muster.protocol.errors import ChainInconsistent, ChainUnreachable, RpcError
from muster.settings import urls_of

if TYPE_CHECKING:
    from web3 import AsyncWeb3

logger = logging.getLogger(__name__)

LEFT_FOR_S = 600.0
"""Seconds in which an endpoint is not asked after it contradicted the others."""
_ASIDE_S = 5.0, 120.0
"""Seconds in which an endpoint is not asked after it did not answer, at first and at most."""
_GRACE_S = 2.0
"""Seconds to wait for slower endpoints when enough have answered."""
_TAGS = frozenset({"latest", "pending", "safe", "finalized"})
_MIDDLE = frozenset({"eth_getTransactionCount", "eth_gasPrice", "eth_maxPriorityFeePerGas"})
_EXTRAS = ("blockTimestamp", "effectiveGasPrice", "l1Fee")
"""Members of logs and receipts that not every honest endpoint gives: they decide no vote."""


class _Endpoint:
    """One endpoint, and whether it is asked at present."""

    def __init__(self, rpc: Rpc) -> None:
        self.rpc = rpc
        self._failures = 0
        self._aside_until = 0.0

    def is_asked(self, now: float) -> bool:
        return now >= self._aside_until

    async def has_reached(self, block: str) -> bool:
        """Return whether the endpoint has a block of this number; no prompt answer counts as no."""
        try:
            async with asyncio.timeout(_GRACE_S):
                return from_hex(await self.rpc.call("eth_blockNumber")) >= from_hex(block)
        except (ChainUnreachable, RpcError, TimeoutError):
            return False

    def answered(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> None:
        self._aside_until = now + min(_ASIDE_S[0] * 2**self._failures, _ASIDE_S[1])
        self._failures = min(self._failures + 1, 16)

    def lied(self, now: float, method: str) -> None:
        logger.warning(
            "an RPC endpoint contradicts the others, and is left alone",
            extra={"endpoint": self.rpc.masked_url, "method": method, "seconds": LEFT_FOR_S},
        )
        self._aside_until = now + LEFT_FOR_S


class QuorumRpc(Rpc):
    """Several endpoints."""

    def __init__(self, rpcs: Sequence[Rpc]) -> None:
        """Use two or more endpoints; `close` closes them."""
        self._endpoints = [_Endpoint(rpc) for rpc in rpcs]
        self._most = len(rpcs) // 2 + 1
        self._enough = 1 if len(rpcs) == 2 else self._most
        self.masked_url = ", ".join(each.rpc.masked_url for each in self._endpoints)

    @cached_property
    def w3(self) -> AsyncWeb3[Any]:
        """web3.py over the first of them."""
        return self._endpoints[0].rpc.w3

    async def close(self) -> None:
        """Close all connections."""
        for each in self._endpoints:
            await each.rpc.close()

    async def try_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Return results in order, an RpcError in the place of each that failed.

        Raises ChainUnreachable when too few answer, ChainInconsistent when they contradict one
        another and no majority says who is right.
        """
        said = await self._hear(calls)
        return [
            await self._agreed(call, {each: outcomes[i] for each, outcomes in said.items()})
            for i, call in enumerate(calls)
        ]

    async def next_block(self) -> None:
        """Wait until the first endpoint announces a block, see `Rpc.next_block`."""
        await self._endpoints[0].rpc.next_block()

    # ---------------------------------------------------------------------- hear

    async def _hear(self, calls: Sequence[Call]) -> dict[_Endpoint, list[Any]]:
        """Return the answers of each endpoint that answers."""
        now = _now()
        asked = [each for each in self._endpoints if each.is_asked(now)]
        if len(asked) < self._enough:
            asked = self._endpoints
        tasks = {each: asyncio.ensure_future(each.rpc.try_batch(calls)) for each in asked}
        try:
            done, _ = await asyncio.wait(tasks.values(), timeout=_GRACE_S)
            heard = [task.result() for task in done if task.exception() is None]
            if len(heard) < self._needed(calls, heard, len(asked)):
                await asyncio.wait(tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        said, problem = dict[_Endpoint, list[Any]](), None
        for each, task in tasks.items():
            error = task.exception() if task.done() and not task.cancelled() else None
            if task.done() and not task.cancelled() and error is None:
                each.answered()
                said[each] = task.result()
            elif error is None or isinstance(error, ChainUnreachable):
                each.failed(_now())
                problem = error or problem
            else:
                raise error
        needed = self._needed(calls, said.values(), len(asked))
        if len(said) < needed:
            raise ChainUnreachable(
                f"{len(said)} of {len(self._endpoints)} RPC endpoints answer, "
                f"{needed} must: {problem or 'the others are silent'}",
                hint="wait a minute and try again, or give other endpoints with --rpc",
            )
        return said

    def _needed(self, calls: Sequence[Call], heard: Collection[list[Any]], asked: int) -> int:
        """Return how many of the `asked` endpoints must answer: all, to refuse a transaction."""
        if is_transaction(calls) and all(isinstance(results[0], RpcError) for results in heard):
            return asked
        return self._enough

    # --------------------------------------------------------------------- agree

    async def _agreed(self, call: Call, said: dict[_Endpoint, Any]) -> Any:
        (method, params), outcomes = call, list(said.values())
        if method == SEND:
            return min(outcomes, key=_finality)
        if method == "eth_getTransactionByHash":
            return _first(outcomes)
        if method == "eth_estimateGas":
            # Too little gas is paid for nothing, too much is not paid.
            return _middle(outcomes, of_two=max)
        if method in _MIDDLE:
            return _middle(outcomes, of_two=min)
        if method == "eth_blockNumber":
            return self._newest(outcomes)
        if _TAGS.isdisjoint(p for p in params if isinstance(p, str)):
            return await self._vote(call, said)
        essence = partial(_text, _essential, method)
        if len(set(map(essence, outcomes))) == 1:
            return outcomes[0]
        # The endpoints may simply be at different blocks.
        if method == "eth_getBlockByNumber":
            head = self._newest([o.get("number") for o in outcomes if isinstance(o, dict)])
            return head and await self.call(method, head, *params[1:])
        head = await self.call("eth_blockNumber")
        return (await self.try_batch([(method, [*params[:-1], head])]))[0]

    async def _vote(self, call: Call, said: dict[_Endpoint, Any]) -> Any:
        method, needed = call[0], min(self._most, len(said))
        essence = partial(_text, _essential, method)
        if method == "eth_getLogs" and len(set(map(essence, said.values()))) > 1:
            # Nodes answer with the blocks that they have, even if some of the range are missing.
            last = call[1][0]["toBlock"]
            said = {each: o for each, o in said.items() if await each.has_reached(last)} or said
        winners = _largest(said, essence)
        if len(winners) < needed:
            return self._undecided(method, said)
        extras = partial(_text, _extras, method)
        alike = _largest({each: said[each] for each in winners}, extras)
        outcome = said[alike[0]]
        if len(alike) < needed:
            for entry, name in product(_entries(method, outcome), _EXTRAS):
                entry.pop(name, None)
        for each, other in said.items():
            # An endpoint without a result, or with a refusal, may be lagging or allow less.
            known = outcome is not None and other is not None and not isinstance(other, RpcError)
            if each not in winners and known:
                each.lied(_now(), method)
        return outcome

    def _undecided(self, method: str, said: dict[_Endpoint, Any]) -> Any:
        outcomes = list(said.values())
        errors = [outcome for outcome in outcomes if isinstance(outcome, RpcError)]
        if errors:
            return errors[0]
        if any(outcome is None for outcome in outcomes):
            return None
        names = " and ".join(each.rpc.masked_url for each in said)
        raise ChainInconsistent(
            f"{names} contradict each other about {method}",
            hint="give a third RPC endpoint with --rpc: the majority decides",
        )

    def _newest(self, numbers: list[Any]) -> Any:
        """Return the newest block that most endpoints have reached; without any, what one said."""
        known = sorted(filter(is_quantity, numbers), key=from_hex)
        return known[-min(self._most, len(known))] if known else next(iter(numbers), None)


def open_rpc(urls: str | Sequence[str], *, timeout_s: float = 10.0) -> Rpc:
    """Return one endpoint, or several as one; URLs in a string are separated by blanks or commas.

    Raises ConfigError when a URL is no endpoint.
    """
    listed = urls_of(urls) if isinstance(urls, str) else list(urls)
    rpcs = [Rpc(url, timeout_s=timeout_s) for url in dict.fromkeys(listed)]
    return rpcs[0] if len(rpcs) == 1 else QuorumRpc(rpcs)


def _first(outcomes: list[Any]) -> Any:
    """Return the first outcome that is no error and not null, else the first."""
    known = [o for o in outcomes if o is not None and not isinstance(o, RpcError)]
    return (known or outcomes)[0]


def _finality(outcome: Any) -> int:
    """Return 0 for a transaction that was taken, and more the less a refusal leaves open."""
    return refusal_of(outcome).value if isinstance(outcome, RpcError) else 0


def _middle(outcomes: list[Any], *, of_two: Callable[..., str]) -> Any:
    """Return the middle one of the outcomes that are numbers, or what most refusals say if most are
    refusals; `of_two` chooses between the two in the middle.
    """
    refusals = [o for o in outcomes if isinstance(o, RpcError)]
    if 2 * len(refusals) > len(outcomes):
        return max(refusals, key=lambda refusal: sum(refusal.data == o.data for o in refusals))
    known = sorted(filter(is_quantity, outcomes), key=from_hex)
    if not known:
        return outcomes[0]
    return of_two(known[(len(known) - 1) // 2], known[len(known) // 2], key=from_hex)


def _largest(said: dict[_Endpoint, Any], key: Callable[[Any], str]) -> list[_Endpoint]:
    """Return the endpoints of the largest group whose outcomes have the same key."""
    groups: dict[str, list[_Endpoint]] = {}
    for each, outcome in said.items():
        groups.setdefault(key(outcome), []).append(each)
    return max(groups.values(), key=len)


def _text(part: Callable[[str, Any], Any], method: str, outcome: Any) -> str:
    """Return a part of an outcome as text; a malformed outcome has one that no other has."""
    try:
        return json.dumps(part(method, outcome), sort_keys=True)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return f"malformed: {id(outcome)}"


def _extras(method: str, outcome: Any) -> list[list[Any]]:
    """Return the members that decide no vote."""
    return [[each.get(name) for name in _EXTRAS] for each in _entries(method, outcome)]


def _entries(method: str, outcome: Any) -> list[dict[str, Any]]:
    """Return the logs and receipts of an outcome that is not malformed."""
    if outcome is None or isinstance(outcome, RpcError):
        return []
    if method == "eth_getLogs":
        return list(outcome)
    receipts = {"eth_getTransactionReceipt": [outcome], "eth_getBlockReceipts": outcome}
    of_method = receipts.get(method, [])
    return [*of_method, *(log for receipt in of_method for log in receipt["logs"])]


def _essential(method: str, outcome: Any) -> Any:
    """Return all that Muster reads of an outcome but the extras: what is left out, one endpoint
    could change.
    """
    if isinstance(outcome, RpcError):
        return ["error", outcome.data.hex()]
    if outcome is None:
        return None
    if method == "eth_getLogs":
        return sorted(_of_log(log) for log in outcome)
    if method in ("eth_getBlockByNumber", "eth_getBlockByHash"):
        place = [outcome[name] for name in ("hash", "number", "parentHash", "timestamp")]
        # Of blocks before fees were burnt, some clients say nothing and some 0.
        return [*place, int(outcome.get("baseFeePerGas") or "0x0", 16), outcome.get("logsBloom")]
    if method == "eth_getTransactionReceipt":
        return _of_receipt(outcome)
    if method == "eth_getBlockReceipts":
        return [_of_receipt(receipt) for receipt in outcome]
    return outcome.lower() if isinstance(outcome, str) else outcome


def _of_log(log: dict[str, Any]) -> list[Any]:
    place = [log[name] for name in ("blockHash", "blockNumber", "logIndex", "transactionHash")]
    return [*place, log["address"].lower(), log["topics"], log["data"]]


def _of_receipt(receipt: dict[str, Any]) -> list[Any]:
    names = ("transactionHash", "blockHash", "blockNumber", "status", "gasUsed")
    return [[receipt.get(name) for name in names], [_of_log(log) for log in receipt["logs"]]]


def _now() -> float:
    return asyncio.get_running_loop().time()
