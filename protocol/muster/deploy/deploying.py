"""Sends what a plan lacks on chain: the factory, then each contract, every one exactly once.

A deployment that ended in the middle goes on where it stands. What was sent is in the sender's
journal, so that a killed process sends nothing twice; without its journal, the factory refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muster.chain.abi import CONTRACTS, FACTORY, contract_abi
from muster.chain.deployment import Deployment, save_deployment
from muster.chain.quantities import from_hex
from muster.chain.rpc import Rpc
from muster.chain.sender import TransactionSender
from muster.deploy.parameters import DeployParameters
from muster.deploy.plan import ORDER, PROXY, PROXY_CODE, Plan
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ChainError, ConfigError
from muster.protocol.ids import Address

logger = logging.getLogger(__name__)

NAME = "muster"
"""Of a network that nobody named."""
STEPS = (FACTORY, *ORDER)
"""What is sent, in order."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a deployment that is done."""

    contract: str
    """What is on chain now."""
    address: Address
    """Where."""
    gas_used: int | None
    """What it took; None when it was there already."""


def _log_stage(stage: Stage) -> None:
    logger.debug("contract deployed", extra={"contract": stage.contract, "at": stage.address})


async def deploy_contracts(
    rpc_url: str,
    key: bytes,
    parameters: DeployParameters,
    *,
    name: str = NAME,
    deployments: Path | None = None,
) -> Deployment:
    """Deploy the contracts as the key's account and return where they are.

    The same name, parameters and account are the same deployment: it is made once. With a folder,
    also write its file there. Raises ChainError or ConfigError when anything fails.
    """
    async with Rpc(rpc_url) as rpc:
        chain_id = from_hex(await rpc.call("eth_chainId"))
        sender = TransactionSender(rpc, key, chain_id)
        deployment = await send_plan(rpc, sender, Plan(name, sender.address, parameters))
    if deployments is not None:
        save_deployment(deployments, deployment)
    return deployment


async def send_plan(
    rpc: Rpc,
    sender: TransactionSender,
    plan: Plan,
    report: Callable[[Stage], None] = _log_stage,
) -> Deployment:
    """Send what is missing, check that all of it is as planned, and return where it is."""
    chain_id = from_hex(await rpc.call("eth_chainId"))
    await require_proxy(rpc)
    # First what an earlier process sent, so that what is counted is all that there will be.
    await sender.recover()
    count = await created_count(rpc, plan)
    for place, name in enumerate(STEPS):
        at = plan.addresses.get(name, plan.factory)
        gas_used = None
        if place >= count:
            to, data = call_of(plan, name)
            receipt = await sender.send(to, data, label=label_of(plan, name))
            gas_used = from_hex(receipt["gasUsed"])
        report(Stage(name, at, gas_used))
    block = await require_as_planned(rpc, plan, chain_id)
    made = await sender.receipt_of(label_of(plan, FACTORY))
    if made is not None:
        # Contracts of some L2s are told the L1's block number, far below where their events begin.
        block = from_hex(made["blockNumber"])
    logger.info("contracts deployed", extra={"chain_id": chain_id, "block": block})
    return Deployment(
        chain_id=chain_id,
        deploy_block=block,
        contracts={name: plan.addresses[name] for name in CONTRACTS},
        parameters=plan.shown(),
    )


def label_of(plan: Plan, step: str) -> str:
    """Return the name of a step in the send journal."""
    return f"{hex0x(plan.salt)}:{step}"


async def created_count(rpc: Rpc, plan: Plan) -> int:
    """Return how many of STEPS are on chain: contracts begin to count at nonce 1."""
    return from_hex(await rpc.call("eth_getTransactionCount", plan.factory, "latest"))


async def require_proxy(rpc: Rpc) -> None:
    """Raise ConfigError on a chain without the deterministic deployment proxy."""
    code = await rpc.call("eth_getCode", PROXY, "latest")
    if code != hex0x(PROXY_CODE):
        raise ConfigError(
            f"this chain lacks the deterministic deployment proxy at {PROXY}",
            hint="anybody can put it there with one signed transaction: docs/guides/deploy.md",
        )


async def start_block(rpc: Rpc, plan: Plan) -> int:
    """Return the block in which the factory was made; 0 where there is none."""
    data = contract_abi(FACTORY).functions["startBlock"].encode(())
    answer = await rpc.call("eth_call", {"to": plan.factory, "data": hex0x(data)}, "latest")
    return from_hex(answer) if answer != "0x" else 0


async def require_as_planned(rpc: Rpc, plan: Plan, chain_id: int) -> int:
    """Return the factory's block; raises ChainError when other code than planned is on chain."""
    block = await start_block(rpc, plan)
    codes = {plan.factory: plan.factory_on_chain(block), **plan.codes_on(chain_id)}
    found = await rpc.batch([("eth_getCode", [at, "latest"]) for at in codes])
    for (at, code), on_chain in zip(codes.items(), found, strict=True):
        if on_chain != hex0x(code):
            raise ChainError(
                f"the code at {at} is not what was planned",
                hint="does the endpoint lag behind? Run the same command again",
            )
    return block


def call_of(plan: Plan, name: str) -> tuple[Address, bytes]:
    """Return whom a step's transaction calls, and with what."""
    if name == FACTORY:
        return PROXY, plan.factory_call
    return plan.factory, plan.creation_call(name)
