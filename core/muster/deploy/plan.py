"""The plan of a deployment and its transactions: addresses, creation code, code on chain.

The contracts are immutable and refer to one another. The deterministic deployment proxy creates
NetworkFactory (CREATE2), which creates them one after the other (CREATE). So on every chain every
address follows from the deploying account, the network's name, its parameters and the contracts'
code.

`send_plan` creates the contracts of a plan that are not on chain yet, each exactly once. An
interrupted deployment continues where it stopped. The sender's journal has the sent transactions,
so that a killed process sends nothing twice; without the journal, the factory refuses a repetition.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.chain.abi import CONTRACTS, FACTORY, contract_abi
from muster.chain.deployment import Deployment, save_deployment
from muster.chain.rpc import Rpc, from_hex
from muster.chain.sender import TransactionSender
from muster.deploy.parameters import DeployParameters
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import address_bytes, canonical_json, hex0x, keccak
from muster.protocol.errors import ChainError, ConfigError
from muster.protocol.ids import Address, Hash32, to_address

logger = logging.getLogger(__name__)

NAME = "muster"
"""Default name of a network."""
ORDER = (
    "MusterToken",
    "JuryPool",
    "RunRegistry",
    "WorkerRegistry",
    "ContributionLedger",
    "DisputeCourt",
    "FaultCourt",
    "RewardEscrow",
    "StakeVault",
)
"""The order of deployment. StakeVault is last: it reads the deadlines of ledger and court."""
STEPS = (FACTORY, *ORDER)
"""The transactions, in order."""
PROXY = to_address("0x4e59b44847b379578588920cA78FbF26c0B4956C")
"""The deterministic deployment proxy: github.com/Arachnid/deterministic-deployment-proxy."""
PROXY_CODE = bytes.fromhex(
    "7fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffe0"
    "3601600081602082378035828234f58015156039578182fd5b8082525050506014600cf3"
)
"""The proxy's code on chain."""


@dataclass(frozen=True)
class DeployPlan:
    """A network's contracts as one account deploys them."""

    name: str
    """The network's name."""
    account: Address
    """The deploying account."""
    parameters: DeployParameters
    """The contracts' parameters."""

    @cached_property
    def salt(self) -> Hash32:
        """The factory's salt: other parameters or other code make another network."""
        code = b"".join(keccak(contract_abi(name).bytecode) for name in ORDER)
        described = {key: str(value) for key, value in self.shown().items()}
        return keccak(canonical_json({**described, "code": keccak(code).hex()}))

    @cached_property
    def factory(self) -> Address:
        """Present or future address of the factory."""
        return factory_address(self.salt, self.account)

    @cached_property
    def addresses(self) -> dict[str, Address]:
        """Present or future address of each contract, in the order of deployment."""
        return created_addresses(self.factory)

    @property
    def factory_call(self) -> bytes:
        """Call data for the proxy that creates the factory."""
        return self.salt + _factory_code(self.account)

    def creation_code(self, name: str) -> bytes:
        """Return a contract's creation code with its arguments."""
        return contract_abi(name).creation_code(self.arguments[name])

    def creation_call(self, name: str) -> bytes:
        """Return the call data for the factory that creates a contract."""
        create = contract_abi(FACTORY).functions["create"]
        return create.encode((self.addresses[name], self.creation_code(name)))

    @cached_property
    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """Every contract's constructor arguments."""
        p, at = self.parameters, self.addresses
        token, vault, workers = at["MusterToken"], at["StakeVault"], at["WorkerRegistry"]
        runs, ledger, court = at["RunRegistry"], at["ContributionLedger"], at["DisputeCourt"]
        faults, escrow, jurors = at["FaultCourt"], at["RewardEscrow"], at["JuryPool"]
        insurance = p.insurance_of(self.account)
        cases = (
            *(p.bond, p.juror_fee, p.draw_delay_blocks, p.jury_size),
            *(p.vote_commit_s, p.vote_reveal_s, p.wrong_verdict_ppm, p.absence_ppm),
        )
        return {
            "MusterToken": (p.initial_supply, p.owner_of(self.account)),
            "JuryPool": (vault, p.required_juror_stake, p.vote_commit_s),
            "RunRegistry": (
                *(vault, workers, faults, p.required_validator_stake, p.change_delay_s),
                *(p.slash_pause_s, p.pause_distance_s),
            ),
            "WorkerRegistry": (
                *(token, vault, runs, ledger, court, faults),
                *(p.required_worker_stake, p.activation_delay_blocks, p.jail_time_s),
            ),
            "ContributionLedger": (
                (runs, workers, vault, court, escrow),
                *(p.challenge_window_s, p.outcome_deadline_s, p.stake_per_unit),
            ),
            "DisputeCourt": ((token, runs, workers, jurors, vault, ledger, escrow), cases),
            "FaultCourt": (runs, workers, vault, ledger),
            "RewardEscrow": (token, runs, workers, ledger, court, p.claim_period_s),
            "StakeVault": (
                *(token, (runs, workers, jurors, ledger, court, faults), insurance),
                *(p.unbonding_s, p.insurance_ppm, p.reporter_ppm, p.reporter_cap),
            ),
        }

    def codes_on(self, chain_id: int) -> dict[Address, bytes]:
        """Return the code at each contract's address on a chain after its creation."""
        cooldown_s = self.parameters.pause_distance_s
        given = {**self.parameters.model_dump(), "slash_cooldown_s": cooldown_s}
        values = {name: given[field].to_bytes(32, "big") for name, field in PARAMETER_OF.items()}
        values |= {name: _word(self.addresses[of]) for name, of in CONTRACT_OF.items()}
        values["insurance"] = _word(self.parameters.insurance_of(self.account))
        return {
            at: code_with(name, {**values, **domain_values(chain_id, at)})
            for name, at in self.addresses.items()
        }

    def factory_on_chain(self, start_block: int) -> bytes:
        """Return the code on chain of a factory that was created in a block."""
        start = start_block.to_bytes(32, "big")
        return code_with(FACTORY, {"account": _word(self.account), "startBlock": start})

    def shown(self) -> dict[str, int | str]:
        """Return the parameters, the deployer and the name, in the form of a deployment's file."""
        shown: dict[str, int | str] = {"name": self.name, "deployer": self.account}
        shown |= self.parameters.model_dump(exclude={"insurance", "owner"})
        shown["slash_cooldown_s"] = self.parameters.pause_distance_s
        # Many readers of JSON have exact integers only below 2^53, so wei are decimal text.
        shown = {k: str(v) if isinstance(v, int) and v >= 1 << 53 else v for k, v in shown.items()}
        owner = self.parameters.owner_of(self.account)
        return {**shown, "owner": owner, "insurance": self.parameters.insurance_of(self.account)}


def factory_address(salt: bytes, account: Address) -> Address:
    """Return the address at which the proxy creates an account's factory (CREATE2, EIP-1014)."""
    made_of = address_bytes(PROXY) + salt + keccak(_factory_code(account))
    return to_address(keccak(b"\xff" + made_of)[12:])


def created_addresses(factory: Address) -> dict[str, Address]:
    """Return the addresses at which a factory creates the contracts (CREATE), in order."""
    from web3.utils.address import get_create_address

    return {
        name: to_address(get_create_address(factory, place))  # type: ignore[arg-type]
        for place, name in enumerate(ORDER, 1)
    }


def _factory_code(account: Address) -> bytes:
    return contract_abi(FACTORY).creation_code((account,))


# ------------------------------------------------------------------- code on chain

CONTRACT_OF = {
    "token": "MusterToken",
    "runs": "RunRegistry",
    "workers": "WorkerRegistry",
    "jurors": "JuryPool",
    "ledger": "ContributionLedger",
    "court": "DisputeCourt",
    "faults": "FaultCourt",
    "escrow": "RewardEscrow",
    "vault": "StakeVault",
}
"""Contracts whose addresses are immutables, by the immutable's name."""
PARAMETER_OF = {
    "requiredValidatorStake": "required_validator_stake",
    "changeDelay": "change_delay_s",
    "slashPause": "slash_pause_s",
    "slashCooldown": "slash_cooldown_s",
    "requiredStake": "required_worker_stake",
    "requiredJurorStake": "required_juror_stake",
    "drawTime": "vote_commit_s",
    "activationDelay": "activation_delay_blocks",
    "jailTime": "jail_time_s",
    "challengeWindow": "challenge_window_s",
    "outcomeDeadline": "outcome_deadline_s",
    "stakePerUnit": "stake_per_unit",
    "bond": "bond",
    "jurorFee": "juror_fee",
    "drawDelay": "draw_delay_blocks",
    "jurySize": "jury_size",
    "commitTime": "vote_commit_s",
    "revealTime": "vote_reveal_s",
    "wrongVerdictPpm": "wrong_verdict_ppm",
    "absencePpm": "absence_ppm",
    "claimPeriod": "claim_period_s",
    "unbondingPeriod": "unbonding_s",
    "insurancePpm": "insurance_ppm",
    "reporterPpm": "reporter_ppm",
    "reporterCap": "reporter_cap",
}
"""Parameters that are immutables, by the immutable's name."""


def domain_values(chain_id: int, at: Address) -> dict[str, bytes]:
    """Return the words that OpenZeppelin's EIP712 stores in the code of a contract."""
    return {
        "cachedDomainSeparator": Domain(chain_id, at).separator(),
        "cachedChainId": chain_id.to_bytes(32, "big"),
        "cachedThis": _word(at),
        "hashedName": keccak(b"Muster"),
        "hashedVersion": keccak(b"1"),
        # Short strings: the text, and its length in the last byte.
        "name": b"Muster".ljust(31, b"\0") + bytes([6]),
        "version": b"1".ljust(31, b"\0") + bytes([1]),
    }


def code_with(name: str, values: Mapping[str, bytes]) -> bytes:
    """Return a contract's code on chain with these words as its immutables."""
    abi = contract_abi(name)
    code = bytearray(abi.runtime)
    for immutable, places in abi.immutables.items():
        for start in places:
            code[start : start + 32] = values[immutable]
    return bytes(code)


def _word(address: Address) -> bytes:
    return address_bytes(address).rjust(32, b"\0")


# ------------------------------------------------------------------- transactions


@dataclass(frozen=True, slots=True)
class DeployStage:
    """A finished step of a deployment."""

    contract: str
    """The contract that is now on chain."""
    address: Address
    """Its address."""
    gas_used: int | None
    """Gas used; None when it was already there."""


def _log_stage(stage: DeployStage) -> None:
    logger.debug("contract deployed", extra={"contract": stage.contract, "at": stage.address})


async def deploy_contracts(
    rpc_url: str,
    key: bytes,
    parameters: DeployParameters,
    *,
    name: str = NAME,
    deployments: Path | None = None,
) -> Deployment:
    """Deploy the contracts as the key's account and return their deployment.

    The same name, parameters and account are the same deployment, which is created once. With a
    folder, also write its file there. Raises ChainError or ConfigError when anything fails.
    """
    async with Rpc(rpc_url) as rpc:
        chain_id = from_hex(await rpc.call("eth_chainId"))
        sender = TransactionSender(rpc, key, chain_id)
        deployment = await send_plan(rpc, sender, DeployPlan(name, sender.address, parameters))
    if deployments is not None:
        save_deployment(deployments, deployment)
    return deployment


async def send_plan(
    rpc: Rpc,
    sender: TransactionSender,
    plan: DeployPlan,
    report: Callable[[DeployStage], None] = _log_stage,
) -> Deployment:
    """Create what is missing, check that everything is as planned, and return the deployment."""
    chain_id = from_hex(await rpc.call("eth_chainId"))
    await require_proxy(rpc)
    # First settle the transactions of an earlier process, so that the count below is final.
    await sender.recover()
    count = await created_count(rpc, plan)
    for place, name in enumerate(STEPS):
        at = plan.addresses.get(name, plan.factory)
        gas_used = None
        if place >= count:
            to, data = call_of(plan, name)
            receipt = await sender.send(to, data, label=label_of(plan, name))
            gas_used = from_hex(receipt["gasUsed"])
        report(DeployStage(name, at, gas_used))
    block = await require_as_planned(rpc, plan, chain_id)
    made = await sender.receipt_of(label_of(plan, FACTORY))
    if made is not None:
        # On some L2s contracts see the L1's block number, which is far below their first event.
        block = from_hex(made["blockNumber"])
    logger.info("contracts deployed", extra={"chain_id": chain_id, "block": block})
    return Deployment(
        chain_id=chain_id,
        deploy_block=block,
        contracts={name: plan.addresses[name] for name in CONTRACTS},
        parameters=plan.shown(),
    )


def label_of(plan: DeployPlan, step: str) -> str:
    """Return the name of a step in the send journal."""
    return f"{hex0x(plan.salt)}:{step}"


async def created_count(rpc: Rpc, plan: DeployPlan) -> int:
    """Return how many of STEPS are on chain: a contract's nonce starts at 1."""
    return from_hex(await rpc.call("eth_getTransactionCount", plan.factory, "latest"))


async def require_proxy(rpc: Rpc) -> None:
    """Raise ConfigError on a chain without the deterministic deployment proxy."""
    code = await rpc.call("eth_getCode", PROXY, "latest")
    if code != hex0x(PROXY_CODE):
        raise ConfigError(
            f"this chain lacks the deterministic deployment proxy at {PROXY}",
            hint="anybody can put it there with one signed transaction: docs/guides/deploy.md",
        )


async def start_block(rpc: Rpc, plan: DeployPlan) -> int:
    """Return the block in which the factory was created; 0 without one."""
    data = contract_abi(FACTORY).functions["startBlock"].encode(())
    answer = await rpc.call("eth_call", {"to": plan.factory, "data": hex0x(data)}, "latest")
    return from_hex(answer) if answer != "0x" else 0


async def require_as_planned(rpc: Rpc, plan: DeployPlan, chain_id: int) -> int:
    """Return the factory's block; raises ChainError when other code than planned is on chain."""
    block = await start_block(rpc, plan)
    codes = {plan.factory: plan.factory_on_chain(block), **plan.codes_on(chain_id)}
    found = await rpc.batch([("eth_getCode", [at, "latest"]) for at in codes])
    for (at, code), on_chain in zip(codes.items(), found, strict=True):
        if on_chain != hex0x(code):
            raise ChainError(
                f"the code at {at} is not what was planned",
                hint="the endpoint may lag behind: run the same command again",
            )
    return block


def call_of(plan: DeployPlan, name: str) -> tuple[Address, bytes]:
    """Return the called address and the call data of a step's transaction."""
    if name == FACTORY:
        return PROXY, plan.factory_call
    return plan.factory, plan.creation_call(name)
