"""Messages with values that a database, a terminal or JSON cannot hold, in every place of every
message.

They attack an orchestrator whose rows share transactions: if PostgreSQL refused one row, the whole
transaction would fail, with the rows of others.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from muster.api.answers import BatchEntry
from muster.api.routes import PARAMETERS, ROUTES, Route, example_of
from muster.api.signing import SUBMISSION_HEADER, SUBMISSION_SIGNATURE_HEADER, sign_request
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, Hash32

SPOILED: tuple[Any, ...] = (
    "\0", "a\0b", "\x07", "\x1b[2J", "\n", "\x7f", "\x85", "\x9f", "\ud800", "\udfff\ud800",
    1 << 63, -(1 << 63) - 1, 1 << 64, 10**400, float("nan"), float("inf"), float("-inf"),
    {"a": "\0"}, {"\0": 1}, ["\0"], [[["\ud800"]]],
)  # fmt: skip
"""Replacements for a value."""
HARDWARE = {"report": {"run_id": 1, "cpu_cores": 1}, "signature": "0x" + "7f" * 64 + "1b"}
"""The optional part of a heartbeat."""
ADDRESSES = (
    "/search?q=%00", "/search?q=0x%00", "/workers/%00", "/submissions?step=%00",
    "/submissions?before=18446744073709551616", "/submissions/%00", "/v1/submissions/%00",
    "/v1/documents/%00", "/v1/batches/18446744073709551616", "/v1/batches/-1/checking",
    "/v1/files/%c0%80", "/v1/batches/%00/checking", "/v1/runs/9223372036854775808",
)  # fmt: skip
"""Paths and queries with impossible values."""

Keys = Mapping[str, bytes]
"""The keys of `node`, `validator` and `trainer`."""


def spoil(value: Any) -> Iterator[Any]:
    """Yield a JSON value with each of its parts replaced by, or extended with, each of SPOILED."""
    yield from SPOILED
    if isinstance(value, str):
        yield from (value + bad for bad in SPOILED if isinstance(bad, str))
    if isinstance(value, dict):
        for name in value:
            yield from (value | {name: bad} for bad in spoil(value[name]))
        yield from (value | {bad: 1} for bad in SPOILED if isinstance(bad, str))


def spoiled_bodies(route: Route) -> Iterator[bytes]:
    """Yield the bodies that a route must refuse."""
    example = route.body_example
    if "software" in example:
        example = example | {"hardware": HARDWARE}
    yield from (json.dumps(body).encode() for body in spoil(example))


async def send_spoiled(
    http: httpx.AsyncClient,
    keys: Keys,
    domain: Domain,
    audience: Address,
    clock: Callable[[], float],
) -> Counter[tuple[str, str]]:
    """Send every spoiled message with the sender's signature; count answers by path and code."""
    counts: Counter[tuple[str, str]] = Counter()

    async def send(route: Route, path: str, body: bytes, **headers: str) -> None:
        signed = sign_request(
            keys.get(route.signer, keys["node"]), domain, audience, route.method, path, body,
            nonce=Hash32(os.urandom(32)), issued_at=int(clock()),
        )  # fmt: skip
        answer = await http.request(route.method, path, content=body, headers=signed | headers)
        counts[route.path, _code_of(answer)] += 1

    for route in ROUTES:
        path = route.path.format_map(PARAMETERS)
        if route.body is not None:
            for body in spoiled_bodies(route):
                await send(route, path, body)
        elif route.method == "PUT":
            claims = map(json.dumps, spoil(example_of(BatchEntry)["submission"]))
            for claim in (each for each in claims if len(each) < 2048):
                more = {SUBMISSION_HEADER: claim, SUBMISSION_SIGNATURE_HEADER: "0x" + "7f" * 65}
                await send(route, path, b"", **more)
    for path in ADDRESSES:
        answer = await http.get(path)
        counts[path, _code_of(answer)] += 1
    return counts


def _code_of(answer: httpx.Response) -> str:
    """Return the status, with the code if it is an error."""
    try:
        return f"{answer.status_code} {answer.json()['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(answer.status_code)
