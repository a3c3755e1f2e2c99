"""What the chain says: is it at its head, is the run open, and may this worker take part?"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

from muster.chain import ZERO_ADDRESS, Chain, RunView, WorkerStatus
from muster.client.cli.run import state_of, units_funded
from muster.client.doctor import Line, State
from muster.client.preflight import coins_of, gas_money
from muster.client.quantities import (
    format_coins,
    format_duration,
    format_slashes,
    format_time,
    format_tokens,
)
from muster.protocol.ids import Address, RunId

OLD_HEAD_S = 120
"""With an older head, the endpoint is behind or the chain stands still."""


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
    """Return whether a run takes work and can pay for it, and what it slashes."""
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
        lines.append(Line("run", "funds", State.WARN, left, "no tickets until its owner funds it"))
    slashes = format_slashes(terms.fraud_ppm, terms.exact_fraud_ppm)
    return [*lines, Line("run", "slashes", State.OK, slashes)]


async def examine_worker(chain: Chain, run_id: RunId, worker: Address) -> AsyncIterator[Line]:
    """Yield the lines about a worker's money, its stake in a run and what it is there."""
    member = await chain.workers.member_of(run_id, worker)
    active_wei = await chain.vault.active_stake(run_id, worker)
    required = await chain.workers.required_stake()
    joined = member.status is not WorkerStatus.NONE
    yield await _gas(chain, worker)
    yield await _tokens(chain, worker, 0 if joined else required)
    lacking = required - active_wei
    figure = f"{format_tokens(active_wei)} of {format_tokens(required)} tokens in run {run_id}"
    if not joined:
        advice = f"when you are ready: muster stake --run {run_id} --keystore FILE --node FILE"
        yield Line("worker", "membership", State.WARN, f"not in run {run_id}", advice)
        return
    if lacking > 0:
        missing = format_tokens(lacking)
        advice = f"muster stake --run {run_id} --keystore FILE --amount {missing}"
        yield Line("worker", "stake", State.FAIL, figure, advice)
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
        return Line("worker", "gas", State.WARN, figure, f"send {worker} some before staking")
    return Line("worker", "gas", State.OK, figure)


async def _tokens(chain: Chain, worker: Address, needed: int) -> Line:
    held = await chain.token.balance_of(worker)
    figure = f"{format_tokens(held)} tokens"
    if held < needed:
        advice = f"a new worker stakes {format_tokens(needed)} tokens"
        return Line("worker", "tokens", State.WARN, figure, advice)
    return Line("worker", "tokens", State.OK, figure)


async def examine_node(chain: Chain, keystore: Path, worker: Address | None) -> Line:
    """Return whether a keystore, which is not opened, is that of the worker's node."""
    from muster.wallet import keystore_address

    node = keystore_address(keystore)
    serves = await chain.workers.worker_of_node(node)
    if node == worker:
        advice = "that is the cold key: keep it off this machine, name node.json"
        return Line("worker", "node", State.FAIL, f"{node} is the worker itself", advice)
    if serves == ZERO_ADDRESS:
        advice = "muster stake --run N --node names it, or muster node rotate does"
        return Line("worker", "node", State.WARN, f"{node} serves no worker", advice)
    if worker is not None and serves != worker:
        return Line("worker", "node", State.FAIL, f"{node} serves {serves}", "check --worker")
    return Line("worker", "node", State.OK, f"{node} serves {serves}")
