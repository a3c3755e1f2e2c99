"""Deploys the eight contracts from the committed artifacts.

They are immutable and refer to one another, so every address is computed before anything is
deployed: a contract's address follows from its deployer's account and nonce.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from eth_utils.address import to_canonical_address
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from muster.chain.abi import CONTRACTS, contract_abi
from muster.chain.deployment import Deployment, save_deployment
from muster.chain.quantities import from_hex
from muster.chain.rpc import Rpc
from muster.chain.sender import TransactionSender
from muster.protocol.encoding import keccak
from muster.protocol.errors import ChainError
from muster.protocol.ids import Address, to_address

logger = logging.getLogger(__name__)

TOKEN = 10**18
"""Wei of one token."""
PPM = 1_000_000
"""The whole, in millionths."""

ORDER = (
    "MusterToken",
    "RunRegistry",
    "WorkerRegistry",
    "ContributionLedger",
    "DisputeCourt",
    "FaultCourt",
    "RewardEscrow",
    "StakeVault",
)
"""The order of deployment. StakeVault comes last: it asks ledger and court for their deadlines."""


class DeployParameters(BaseModel):
    """What a deployment is fixed to for ever. Defaults suit development; amounts are token wei."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    initial_supply: Annotated[int, Field(ge=0)] = 1_000_000_000 * TOKEN
    """Tokens minted to the deployer."""
    required_worker_stake: Annotated[int, Field(ge=0)] = 100 * TOKEN
    """Active stake a worker must hold."""
    required_validator_stake: Annotated[int, Field(ge=0)] = 500 * TOKEN
    """Active stake a validator must hold."""
    activation_delay_blocks: Annotated[int, Field(ge=0)] = 1
    """Blocks from registration until a worker counts as active."""
    jail_time_s: Annotated[int, Field(ge=0)] = 60
    """Seconds a jailed worker must wait."""
    outcome_deadline_s: Annotated[int, Field(ge=1)] = 600
    """Seconds after the commitment by which outcomes are due."""
    challenge_window_s: Annotated[int, Field(ge=0)] = 30
    """Seconds after posting during which an outcome may be challenged."""
    vote_commit_s: Annotated[int, Field(ge=1)] = 80
    """Seconds after a challenge until which jurors may commit to a vote."""
    vote_reveal_s: Annotated[int, Field(ge=1)] = 40
    """Seconds after that until which they may reveal it."""
    draw_delay_blocks: Annotated[int, Field(ge=1)] = 1
    """Blocks after a challenge whose hash decides its jury."""
    jury_size: Annotated[int, Field(ge=1, le=88)] = 3
    """Jurors of a case, fewer when there are fewer that may sit."""
    wrong_verdict_ppm: Annotated[int, Field(ge=0, le=PPM)] = 50_000
    """Share of a signer's stake that an overturned verdict costs, in millionths."""
    absence_ppm: Annotated[int, Field(ge=0, le=PPM)] = 5_000
    """Share of a validator's stake that a missed jury or outcome deadline costs, in millionths."""
    stake_per_unit: Annotated[int, Field(ge=1)] = TOKEN // 10_000
    """Stake behind one unit in flight."""
    change_delay_s: Annotated[int, Field(ge=0)] = 3600
    """Seconds between announcing a run's terms and their effect; must outlast judgement."""
    slash_pause_s: Annotated[int, Field(ge=1)] = 30
    """Seconds that a pause of a run's slashing lasts."""
    slash_cooldown_s: Annotated[int, Field(ge=0)] | None = None
    """Seconds after a pause before which there is no other; at least the challenge window. When not
    given, the longer of challenge window and pause."""
    claim_period_s: Annotated[int, Field(ge=1)] = 90 * 24 * 3600
    """Seconds that workers of a closed run have to claim; must outlast judgement and a window."""
    unbonding_s: Annotated[int, Field(ge=1)] = 3600
    """Seconds from an unbond request to its withdrawal; must outlast judgement."""
    challenge_bond: Annotated[int, Field(ge=0)] = 10 * TOKEN
    """What a challenger puts up."""
    insurance: Annotated[Address, BeforeValidator(to_address)] | None = None
    """Receives the insured share of slashes; the deployer when not given."""
    insurance_ppm: Annotated[int, Field(ge=0, le=PPM)] = 200_000
    """Insured share of a slash, in millionths."""
    reporter_ppm: Annotated[int, Field(ge=0, le=PPM)] = 100_000
    """Reporter's share of a slash, in millionths; the rest is burned."""
    reporter_cap: Annotated[int, Field(ge=0)] = 50 * TOKEN
    """The most a reporter gets for one offence."""

    @property
    def judgement_s(self) -> int:
        """Seconds from a commitment until its fraud can be executed at the latest."""
        judged = self.outcome_deadline_s + self.challenge_window_s
        return judged + self.vote_commit_s + self.vote_reveal_s + self.slash_pause_s

    @property
    def pause_distance_s(self) -> int:
        """Seconds from the end of a pause of slashing to the earliest next one."""
        if self.slash_cooldown_s is None:
            return max(self.challenge_window_s, self.slash_pause_s)
        return self.slash_cooldown_s

    @model_validator(mode="after")
    def _judgement_is_outlasted(self) -> Self:
        judged = self.judgement_s
        # A fraud verdict that a pause met can be overturned, and its work paid, a window later.
        settled = judged + self.challenge_window_s
        least = {"unbonding_s": judged + 1, "claim_period_s": settled + 1, "change_delay_s": judged}
        for name, seconds in least.items():
            if getattr(self, name) < seconds:
                raise ValueError(
                    f"{name} {getattr(self, name)} is below {seconds}: it must outlast "
                    "outcome_deadline_s + challenge_window_s + vote_commit_s + vote_reveal_s "
                    "+ slash_pause_s"
                )
        if self.pause_distance_s < self.challenge_window_s:
            raise ValueError(
                f"slash_cooldown_s {self.slash_cooldown_s} is below the challenge window of "
                f"{self.challenge_window_s} s: pauses would reopen what is final"
            )
        if self.insurance_ppm + self.reporter_ppm > PPM:
            raise ValueError("insurance_ppm and reporter_ppm add up to more than the whole")
        return self


async def deploy_contracts(
    rpc_url: str,
    key: bytes,
    parameters: DeployParameters,
    *,
    deployments: Path | None = None,
) -> Deployment:
    """Deploy the contracts as the key's account and return where they are.

    With a folder, also write the deployment there. Raises ChainError when anything fails; nothing
    of a broken deployment is ever used, since no file names it.
    """
    async with Rpc(rpc_url) as rpc:
        chain_id = from_hex(await rpc.call("eth_chainId"))
        sender = TransactionSender(rpc, key, chain_id)
        nonce = from_hex(await rpc.call("eth_getTransactionCount", sender.address, "pending"))
        addresses = {
            name: created_address(sender.address, nonce + i) for i, name in enumerate(ORDER)
        }
        arguments = constructor_arguments(addresses, parameters, sender.address)
        blocks = [await _deploy(sender, name, arguments[name], addresses[name]) for name in ORDER]
    deployment = Deployment(
        chain_id=chain_id,
        deploy_block=min(blocks),
        contracts={name: addresses[name] for name in CONTRACTS},
        parameters=_shown(parameters, sender.address),
    )
    logger.info("contracts deployed", extra={"chain_id": chain_id, "block": min(blocks)})
    if deployments is not None:
        save_deployment(deployments, deployment)
    return deployment


def created_address(deployer: Address, nonce: int) -> Address:
    """Return the address of the contract that an account creates with a nonce.

    `keccak(rlp([account, nonce]))[12:]`, as CREATE computes it.
    """
    account = to_canonical_address(deployer)
    number = nonce.to_bytes((nonce.bit_length() + 7) // 8, "big")
    if len(number) == 1 and number[0] < 0x80:
        encoded = number
    else:
        encoded = bytes([0x80 + len(number)]) + number
    body = bytes([0x80 + len(account)]) + account + encoded
    return to_address(keccak(bytes([0xC0 + len(body)]) + body)[12:])


def constructor_arguments(
    addresses: Mapping[str, Address], parameters: DeployParameters, deployer: Address
) -> dict[str, tuple[Any, ...]]:
    """Return every contract's constructor arguments."""
    p, at = parameters, addresses
    token, vault, workers = at["MusterToken"], at["StakeVault"], at["WorkerRegistry"]
    runs, ledger, court = at["RunRegistry"], at["ContributionLedger"], at["DisputeCourt"]
    faults, escrow = at["FaultCourt"], at["RewardEscrow"]
    disputes = (
        *(p.challenge_bond, p.draw_delay_blocks, p.jury_size),
        *(p.vote_commit_s, p.vote_reveal_s),
    )
    return {
        "MusterToken": (p.initial_supply,),
        "RunRegistry": (
            *(vault, faults, p.required_validator_stake, p.change_delay_s),
            *(p.slash_pause_s, p.pause_distance_s),
        ),
        "WorkerRegistry": (
            *(token, vault, ledger, court, faults),
            *(p.required_worker_stake, p.activation_delay_blocks, p.jail_time_s),
        ),
        "ContributionLedger": (
            (runs, workers, vault, court, escrow),
            *(p.challenge_window_s, p.outcome_deadline_s, p.stake_per_unit),
        ),
        "DisputeCourt": (token, runs, workers, vault, ledger, disputes),
        "FaultCourt": (
            *(runs, workers, vault, ledger, court),
            *(p.wrong_verdict_ppm, p.absence_ppm),
        ),
        "RewardEscrow": (token, runs, workers, ledger, court, p.claim_period_s),
        "StakeVault": (
            *(token, workers, ledger, court, faults, p.insurance or deployer),
            *(p.unbonding_s, p.insurance_ppm, p.reporter_ppm, p.reporter_cap),
        ),
    }


async def _deploy(
    sender: TransactionSender, name: str, arguments: tuple[Any, ...], expected: Address
) -> int:
    """Deploy one contract and return its block."""
    receipt = await sender.send(None, contract_abi(name).creation_code(arguments))
    address = to_address(receipt["contractAddress"])
    if address != expected:
        raise ChainError(
            f"{name} was deployed at {address} instead of {expected}",
            hint="another program sent with the same key meanwhile: deploy again",
        )
    return from_hex(receipt["blockNumber"])


def _shown(parameters: DeployParameters, deployer: Address) -> dict[str, int | str]:
    shown: dict[str, int | str] = parameters.model_dump(exclude={"insurance"})
    shown["slash_cooldown_s"] = parameters.pause_distance_s
    # JSON's integers are exact below 2^53 only in many readers, so wei are decimal text.
    shown = {k: str(v) if isinstance(v, int) and v >= 1 << 53 else v for k, v in shown.items()}
    return {**shown, "insurance": parameters.insurance or deployer}
