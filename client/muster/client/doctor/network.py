"""The network and chain part: do orchestrator and relays answer, how fast, and do the clocks agree;
is the RPC endpoint at the chain's head, is the run open, and may this worker take part?
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from muster.api import OrchestratorApi
from muster.chain import ZERO_ADDRESS, Chain, RunView, WorkerStatus
from muster.client.cli.run import state_of, units_funded
from muster.client.doctor import Line, State, failed
from muster.client.preflight import coins_of, gas_money, node_money
from muster.client.quantities import (
    format_coins,
    format_duration,
    format_size,
    format_slashes,
    format_time,
    format_tokens,
)
from muster.client.stake import WorkersStake, stake_command, workers_stake
from muster.lifecycle import in_turn
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address, RunId
from muster.shardcast import Manifest
from muster.shardcast.download import RelayFault, ShardClient
from muster.shardcast.http_client import BadAnswer, ConnectsTo, HttpClient

SECTION = "network"
OTHER_RELAY = "try another relay with --relay URL"
SAMPLE_BYTES = 8 << 20
"""Most bytes fetched to measure one relay."""
TIMEOUT_S = 10.0
"""Seconds after which a silent address counts as unreachable."""
MAX_RELAYS = 16
"""Most relays that are measured."""
RELAY_WAIT_S = 10
"""Seconds to wait for a relay that may still be receiving the newest policy."""
SKEW_FAIL_S, SKEW_WARN_S = 30, 5
"""Clock difference for FAIL and WARN: the orchestrator refuses signed requests from more than 30 s
in the future or older than 60 s."""


@dataclass(slots=True)
class Relays:
    """Facts about the relays, for later questions."""

    manifest: Manifest | None = None
    """Manifest of the newest policy, checked against the chain."""
    bytes_per_s: float = 0.0
    """Speed of the fastest relay."""


async def examine_ports(
    urls: Sequence[str], relays: Sequence[str], connects_to: ConnectsTo | None = None
) -> Line:
    """Return whether the addresses answer; this machine needs no open port.

    All of `urls` must answer, and one of the relays: the others only make fetching faster.
    `connects_to` decides which addresses a relay has, and whether it is asked at all.
    """
    every = [*urls, *relays]
    results = await asyncio.gather(
        *(_reaches(url) for url in urls), *(_reaches(url, connects_to) for url in relays)
    )
    closed = [url for url, is_open in zip(every, results, strict=True) if not is_open]
    if closed:
        works = not set(closed) & set(urls) and not set(relays) <= set(closed)
        return Line(
            SECTION,
            "ports",
            State.WARN if works else State.FAIL,
            f"no connection to {', '.join(map(_host, closed))}",
            "check that it is up, and that no firewall blocks this machine",
        )
    figure = f"{len(every)} addresses answer; no port of this machine needs to be open"
    return Line(SECTION, "ports", State.OK, figure)


def _host(url: str) -> str:
    try:
        return urlsplit(url).netloc or url
    except ValueError:
        return url


async def _reaches(url: str, connects_to: ConnectsTo | None = None) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if parts.hostname is None:
            return False
        async with asyncio.timeout(TIMEOUT_S):
            host = parts.hostname
            found = await connects_to(host, port) if connects_to else [host]
    except (OSError, ValueError):  # ValueError: a malformed URL or host name
        return False
    for address, share_s in in_turn(found, TIMEOUT_S):
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(share_s):
                _, writer = await asyncio.open_connection(address, port)
            writer.close()
            return True
    return False


async def examine_orchestrator(
    api: OrchestratorApi, run: RunView, domain: Domain
) -> tuple[Line, tuple[str, ...]]:
    """Return whether the orchestrator is the run's, and the relays (or the origin) it names."""
    try:
        found = await api.run_info(run.run_id)
    except ApiError as error:
        return failed(SECTION, "orchestrator", error), ()
    ours = (run.config.orchestrator, domain.verifying_contract, domain.chain_id)
    if (found.orchestrator, found.ledger, found.chain_id) != ours:
        figure = f"it serves another run: account {found.orchestrator}, chain {found.chain_id}"
        advice = "check --orchestrator, --rpc and --deployments"
        return Line(SECTION, "orchestrator", State.FAIL, figure, advice), ()
    relays = found.policy_sources
    figure = f"collects step {found.step}, policy {found.policy_version}, {len(relays)} relays"
    return Line(SECTION, "orchestrator", State.OK, figure), relays


async def examine_clock(url: str) -> Line:
    """Return how far this machine's clock is from the orchestrator's."""
    try:
        async with (
            asyncio.timeout(TIMEOUT_S),
            httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http,
        ):
            asked_at = time.time()
            # The body is not read: its size is up to its sender.
            async with http.stream("GET", f"{url.rstrip('/')}/healthz") as answer:
                ours = (asked_at + time.time()) / 2
                date = answer.headers["date"]
        theirs = parsedate_to_datetime(date).timestamp() + 0.5
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        KeyError,
        ValueError,
        OverflowError,
        OSError,
    ) as error:
        return Line(SECTION, "clock", State.WARN, f"cannot be compared: {error}", "see ports")
    skew = ours - theirs
    # The header has whole seconds.
    figure = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the orchestrator's"
    if abs(skew) > SKEW_FAIL_S:
        advice = "its requests would be refused: set the clock (timedatectl set-ntp true)"
        return Line(SECTION, "clock", State.FAIL, figure, advice)
    if abs(skew) > SKEW_WARN_S:
        return Line(SECTION, "clock", State.WARN, figure, "timedatectl set-ntp true")
    return Line(SECTION, "clock", State.OK, figure)


async def examine_relays(
    relays: Sequence[str], run: RunView, learnt: Relays, connects_to: ConnectsTo | None = None
) -> AsyncIterator[Line]:
    """Yield each relay's speed, measured on a limited part of the newest policy."""
    assert run.latest_version is not None  # checked by the caller
    root = run.checkpoints[run.latest_version].manifest_root
    client = ShardClient(connects_to=connects_to)
    try:
        for number, url in enumerate(relays):
            name = f"relay {number}" if len(relays) > 1 else "relay"
            try:
                data = await client.manifest(
                    url, run.run_id, run.latest_version, root=root, wait_s=RELAY_WAIT_S
                )
                if isinstance(data, RelayFault):
                    yield Line(SECTION, name, State.WARN, f"{url}: {data.value}", OTHER_RELAY)
                    continue
                learnt.manifest = Manifest.from_bytes(data)
                rate = await _rate(url, learnt.manifest, connects_to)
            # ValueError: a malformed URL. Muster's own ConfigError is a ValueError too.
            except (OSError, ValueError) as error:
                why = str(error) or type(error).__name__
                yield Line(SECTION, name, State.WARN, f"{url}: {why}", OTHER_RELAY)
                continue
            learnt.bytes_per_s = max(learnt.bytes_per_s, rate)
            yield Line(SECTION, name, State.OK, f"{url}: {format_size(rate)}/s")
    finally:
        client.close()


async def _rate(relay: str, manifest: Manifest, connects_to: ConnectsTo | None) -> float:
    """Return the bytes per second at which a relay sends one chunk, or the start of it."""
    span = max(manifest.broadcast_spans(), key=lambda each: each.size)
    wanted = min(span.size, SAMPLE_BYTES)
    http = HttpClient({"Range": f"bytes=0-{wanted - 1}"}, connects_to)
    url = f"{relay.rstrip('/')}/v1/chunks/{span.digest.hex()}"
    started = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S), http.get(url) as (head, connection):
            if head.status not in (200, 206):
                raise BadAnswer(f"it answered {head.status}")
            received = min(head.length, wanted)
            await connection.read_into(memoryview(bytearray(received)))
    finally:
        http.close()
    return received / max(time.perf_counter() - started, 1e-6)


def examine_bandwidth(run: RunView, learnt: Relays) -> Line:
    """Return whether policies arrive faster than they are published."""
    if learnt.manifest is None or learnt.bytes_per_s == 0:
        advice = "the policy cannot be fetched: another --relay, or ask the run's owner"
        return Line(SECTION, "bandwidth", State.FAIL, "no relay delivers", advice)
    took = learnt.manifest.broadcast_bytes / learnt.bytes_per_s
    figure = f"{format_size(learnt.manifest.broadcast_bytes)} per policy in {format_duration(took)}"
    times = [checkpoint.timestamp for checkpoint in run.checkpoints.values()]
    if len(times) < 3:
        return Line(SECTION, "bandwidth", State.OK, figure)
    # Block times are whole seconds, so policies with the same time may be almost a second apart.
    every = (times[-1] - times[1] + 1) / (len(times) - 2)
    figure += f"; a new one every {format_duration(every)}"
    if took > every:
        return Line(SECTION, "bandwidth", State.FAIL, figure, "this line is too slow for the run")
    if took > every / 2:
        return Line(SECTION, "bandwidth", State.WARN, figure, "much of the time goes to fetching")
    return Line(SECTION, "bandwidth", State.OK, figure)


# The chain

OLD_HEAD_S = 120
"""Age in seconds of the head from which the endpoint counts as behind, or the chain as stopped."""


async def examine_chain(chain: Chain) -> Line:
    """Return whether the endpoint is at the chain's head."""
    head = await chain.latest_block()
    syncing = await chain.rpc.call("eth_syncing")
    age = time.time() - head.timestamp
    figure = f"chain {chain.chain_id}, block {head.number}, {format_duration(max(age, 0))} old"
    if syncing:
        advice = "the endpoint is still catching up: wait, or name another --rpc"
        return Line("chain", "head", State.FAIL, figure, advice)
    if age > OLD_HEAD_S:
        advice = "the endpoint is behind, or this clock is ahead: compare with a block explorer"
        return Line("chain", "head", State.WARN, figure, advice)
    return Line("chain", "head", State.OK, figure)


def examine_run(run: RunView) -> list[Line]:
    """Return whether a run accepts work and can pay for it, and how much it slashes."""
    state, units, terms = state_of(run), units_funded(run), run.config.terms
    is_open = state in ("open", "unfunded")
    price = f"pays {format_tokens(terms.price_per_unit)} per unit"
    lines = [
        Line(
            "run",
            "state",
            State.OK if is_open else State.FAIL,
            f"{state}, {price}",
            "" if is_open else "nothing to do there now: muster run list",
        )
    ]
    left = f"{format_tokens(run.available_wei)} tokens"
    if units is None or units > 0:
        for_units = "" if units is None else f", for {units:,} units"
        lines.append(Line("run", "funds", State.OK, left + for_units))
    else:
        lines.append(
            Line(
                "run",
                "funds",
                State.WARN,
                left,
                "there are no tickets until the run's owner funds it",
            )
        )
    slashes = format_slashes(terms.fraud_ppm, terms.exact_fraud_ppm)
    return [*lines, Line("run", "slashes", State.OK, slashes)]


async def examine_worker(
    chain: Chain, run_id: RunId, worker: Address, ticket_units: int | None = None
) -> AsyncIterator[Line]:
    """Yield the lines about a worker's money, its stake and its status in a run. Its tickets are of
    up to `ticket_units`, if that is known.
    """
    member = await chain.workers.member_of(run_id, worker)
    active_wei = await chain.vault.active_stake(run_id, worker)
    needed = await workers_stake(chain, ticket_units)
    lacking = needed.wei - active_wei
    yield await _gas(chain, worker)
    yield await _tokens(chain, worker, lacking, needed)
    figure = f"{format_tokens(active_wei)} of {format_tokens(needed.wei)} tokens in run {run_id}"
    if member.status is WorkerStatus.NONE:
        advice = f"when you are ready: muster stake --run {run_id} --keystore FILE --node FILE"
        yield Line("worker", "membership", State.WARN, f"not in run {run_id}", advice)
        return
    if lacking > 0:
        yield Line("worker", "stake", State.FAIL, figure, stake_command(run_id, lacking))
    else:
        cap = await chain.ledger.unit_cap_of(run_id, worker)
        yield Line("worker", "stake", State.OK, f"{figure}, covers {cap:,} units in flight")
    if member.status is WorkerStatus.ACTIVE:
        block = await chain.block_number()
        waits = f", gets tickets from block {member.active_from}"
        figure = "active" + (waits if block < member.active_from else "")
        yield Line("worker", "membership", State.OK, figure)
        return
    until = f" until {format_time(member.jailed_until)}" if member.jailed_until else ""
    advice = f"muster worker rejoin --run {run_id}, once its time is over"
    yield Line("worker", "membership", State.FAIL, f"{member.status.lower()}{until}", advice)


async def _gas(chain: Chain, worker: Address) -> Line:
    needed = await gas_money(chain, "stake")
    held = await coins_of(chain, worker)
    figure = f"{format_coins(held)} coins for gas, a stake takes about {needed}"
    if held < needed.wei:
        advice = f"send at least {format_coins(needed.wei - held)} coins to {worker} before staking"
        return Line("worker", "gas", State.WARN, figure, advice)
    return Line("worker", "gas", State.OK, figure)


async def _tokens(chain: Chain, worker: Address, lacking: int, needed: WorkersStake) -> Line:
    held = await chain.token.balance_of(worker)
    figure = f"{format_tokens(held)} tokens"
    if held < lacking:
        advice = (
            f"send {format_tokens(lacking - held)} tokens to {worker}: a worker stakes "
            f"{format_tokens(needed.wei)} tokens"
        )
        if needed.ticket_wei is None:
            advice += ", or what a ticket takes: --orchestrator URL says how much"
        return Line("worker", "tokens", State.WARN, figure, advice)
    return Line("worker", "tokens", State.OK, figure)


async def examine_node(chain: Chain, keystore: Path, worker: Address | None) -> Line:
    """Return whether a keystore, which is not opened, is that of the worker's node."""
    from muster.wallet import keystore_address

    node = keystore_address(keystore)
    serves = await chain.workers.worker_of_node(node)
    if node == worker:
        advice = "that is the cold key: keep it off this machine, give node.json with --keystore"
        return Line("worker", "node", State.FAIL, f"{node} is the worker itself", advice)
    if serves == ZERO_ADDRESS:
        advice = "muster stake --run N --node names it, or muster node rotate does"
        return Line("worker", "node", State.WARN, f"{node} serves no worker", advice)
    if worker is not None and serves != worker:
        return Line("worker", "node", State.FAIL, f"{node} serves {serves}", "check --worker")
    return Line("worker", "node", State.OK, f"{node} serves {serves}")


async def examine_node_money(chain: Chain, node: Address) -> Line:
    """Return whether a node can submit its own work when the orchestrator ignores it."""
    money = await node_money(chain, node)
    if money.is_enough:
        return Line("worker", "bond", State.OK, f"the node holds {money.held}")
    advice = (
        f"send {money.needed} to {node}: with them it submits by itself if the orchestrator "
        "ignores its work; the bond comes back"
    )
    return Line("worker", "bond", State.WARN, f"the node holds {money.held}", advice)
