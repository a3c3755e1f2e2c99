"""Typed clients of the seven contracts: snake-case names, Solidity's argument order, Python types.

Views return frozen types of `muster.chain.structs`; writes send a transaction and return its
receipt, or raise ContractRevert. A write needs a client that was connected with a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from muster.chain.events import Event
from muster.chain.structs import (
    STATUSES,
    ZERO_ADDRESS,
    Batch,
    Case,
    Escrow,
    Funds,
    OutcomeProof,
    PolicyCheckpoint,
    Quorum,
    RunConfig,
    RunTerms,
    Seat,
    SettledOutcome,
    StakeAccount,
    StakeTotals,
    WorkerAccount,
    abi_tuple,
    version_or_none,
)
from muster.chain.view_parts import lenient_reason
from muster.protocol.errors import ChainError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import OutcomeRecord, Submission, Verdict


@dataclass(frozen=True, slots=True)
class Receipt:
    """A transaction that was mined and succeeded."""

    tx_hash: str
    """Its hash."""
    block_number: int
    """The block it is in."""
    gas_used: int
    """What it cost."""
    events: list[Event]
    """The events it emitted from our contracts, in order."""

    def event(self, name: str) -> Event:
        """Return its first event of a name; raises ChainError when there is none."""
        for event in self.events:
            if event.name == name:
                return event
        raise ChainError(f"transaction {self.tx_hash} emitted no {name}")


class Caller(Protocol):
    """What a client needs of the connection."""

    async def read(self, contract: str, function: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return what a view returns."""

    async def write(self, contract: str, function: str, args: Sequence[Any]) -> Receipt:
        """Send a transaction."""


class _Client:
    contract: str

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def _read(self, function: str, *args: Any) -> tuple[Any, ...]:
        return await self._caller.read(self.contract, function, args)

    async def _one(self, function: str, *args: Any) -> Any:
        return (await self._caller.read(self.contract, function, args))[0]

    async def _write(self, function: str, *args: Any) -> Receipt:
        return await self._caller.write(self.contract, function, args)


class MusterToken(_Client):
    """The token."""

    contract = "MusterToken"

    async def name(self) -> str:
        """Return the token's name."""
        return str(await self._one("name"))

    async def symbol(self) -> str:
        """Return the token's symbol."""
        return str(await self._one("symbol"))

    async def decimals(self) -> int:
        """Return the digits after the point of one token."""
        return int(await self._one("decimals"))

    async def total_supply(self) -> int:
        """Return all wei there are."""
        return int(await self._one("totalSupply"))

    async def balance_of(self, account: Address) -> int:
        """Return an account's wei."""
        return int(await self._one("balanceOf", account))

    async def allowance(self, owner: Address, spender: Address) -> int:
        """Return how many wei of the owner's the spender may take."""
        return int(await self._one("allowance", owner, spender))

    async def nonces(self, owner: Address) -> int:
        """Return the nonce of the owner's next permit."""
        return int(await self._one("nonces", owner))

    async def domain_separator(self) -> Hash32:
        """Return the EIP-712 domain separator of permits."""
        return Hash32(await self._one("DOMAIN_SEPARATOR"))

    async def approve(self, spender: Address, value: int) -> Receipt:
        """Let the spender take so many of our wei."""
        return await self._write("approve", spender, value)

    async def transfer(self, to: Address, value: int) -> Receipt:
        """Send wei."""
        return await self._write("transfer", to, value)

    async def transfer_from(self, from_: Address, to: Address, value: int) -> Receipt:
        """Send wei of another account that allowed it."""
        return await self._write("transferFrom", from_, to, value)

    async def permit(
        self,
        owner: Address,
        spender: Address,
        value: int,
        deadline: int,
        v: int,
        r: Hash32,
        s: Hash32,
    ) -> Receipt:
        """Set an allowance by the owner's signature."""
        return await self._write("permit", owner, spender, value, deadline, v, r, s)

    async def faucet(self, to: Address, amount: int) -> Receipt:
        """Mint test tokens; development chains only."""
        return await self._write("faucet", to, amount)

    async def burn(self, amount: int) -> Receipt:
        """Destroy our wei."""
        return await self._write("burn", amount)


class StakeVault(_Client):
    """All stake."""

    contract = "StakeVault"

    async def deposit(self, owner: Address, amount: int) -> Receipt:
        """Add our tokens to an owner's active stake."""
        return await self._write("deposit", owner, amount)

    async def deposit_with_permit(
        self, amount: int, deadline: int, v: int, r: Hash32, s: Hash32
    ) -> Receipt:
        """Add our tokens to our stake, with a permit."""
        return await self._write("depositWithPermit", amount, deadline, v, r, s)

    async def request_unbond(self, amount: int) -> Receipt:
        """Start to take back active stake."""
        return await self._write("requestUnbond", amount)

    async def withdraw(self) -> Receipt:
        """Take back unbonded stake."""
        return await self._write("withdraw")

    async def account_of(self, owner: Address) -> StakeAccount:
        """Return an account's stake."""
        return StakeAccount(*await self._one("accountOf", owner))

    async def active_stake(self, owner: Address) -> int:
        """Return an account's active stake."""
        return int(await self._one("activeStake", owner))

    async def escrow_of(self, offence: Hash32) -> Escrow:
        """Return the escrow of an offence."""
        return Escrow(*await self._one("escrowOf", offence))

    async def totals(self) -> StakeTotals:
        """Return the sums over all accounts."""
        return StakeTotals(*await self._read("totals"))

    async def unbonding_period(self) -> int:
        """Return the seconds between asking for stake and having it."""
        return int(await self._one("unbondingPeriod"))

    async def insurance(self) -> Address:
        """Return who receives the insured share of slashes."""
        return Address(await self._one("insurance"))

    async def insurance_ppm(self) -> int:
        """Return the insured share, in millionths."""
        return int(await self._one("insurancePpm"))

    async def reporter_ppm(self) -> int:
        """Return the reporter's share, in millionths."""
        return int(await self._one("reporterPpm"))

    async def reporter_cap(self) -> int:
        """Return the most a reporter gets for one offence."""
        return int(await self._one("reporterCap"))


class WorkerRegistry(_Client):
    """Workers and their nodes."""

    contract = "WorkerRegistry"

    async def register(
        self, stake: int, node: Address, node_deadline: int, node_signature: bytes
    ) -> Receipt:
        """Become a worker; needs an allowance for StakeVault."""
        return await self._write("register", stake, node, node_deadline, node_signature)

    async def register_with_permit(
        self,
        stake: int,
        node: Address,
        node_deadline: int,
        node_signature: bytes,
        permit_deadline: int,
        v: int,
        r: Hash32,
        s: Hash32,
    ) -> Receipt:
        """Become a worker in one transaction."""
        return await self._write(
            "registerWithPermit",
            stake,
            node,
            node_deadline,
            node_signature,
            permit_deadline,
            v,
            r,
            s,
        )

    async def rotate_node(
        self, node: Address, node_deadline: int, node_signature: bytes
    ) -> Receipt:
        """Replace our node key."""
        return await self._write("rotateNode", node, node_deadline, node_signature)

    async def exit(self) -> Receipt:
        """Start to leave; all stake unbonds."""
        return await self._write("exit")

    async def unjail(self) -> Receipt:
        """Become active again after the jail time."""
        return await self._write("unjail")

    async def jail_for_low_stake(self, worker: Address) -> Receipt:
        """Jail a worker whose stake is below the requirement."""
        return await self._write("jailForLowStake", worker)

    async def worker_of(self, worker: Address) -> WorkerAccount:
        """Return a worker's record."""
        node, worker_id, status, active_from, jailed_until = await self._one("workerOf", worker)
        return WorkerAccount(node, worker_id, STATUSES[status], active_from, jailed_until)

    async def worker_of_node(self, node: Address) -> Address:
        """Return the worker a node serves now, or the zero address."""
        return Address(await self._one("workerOfNode", node))

    async def was_node_of(self, node: Address, worker: Address, worker_id: int) -> bool:
        """Return whether a node is or was one of a worker with this number."""
        return bool(await self._one("wasNodeOf", node, worker, worker_id))

    async def worker_by_id(self, worker_id: int) -> Address:
        """Return the worker with a number, or the zero address."""
        return Address(await self._one("workerById", worker_id))

    async def is_active(self, worker: Address) -> bool:
        """Return whether a worker may submit in the current block."""
        return bool(await self._one("isActive", worker))

    async def nonces(self, worker: Address) -> int:
        """Return the nonce that a node must consent to next."""
        return int(await self._one("nonces", worker))

    async def required_stake(self) -> int:
        """Return the active stake a worker must hold."""
        return int(await self._one("requiredStake"))

    async def activation_delay(self) -> int:
        """Return the blocks until a new worker counts as active."""
        return int(await self._one("activationDelay"))

    async def jail_time(self) -> int:
        """Return the seconds a jailed worker must wait."""
        return int(await self._one("jailTime"))

    async def domain_separator(self) -> Hash32:
        """Return the EIP-712 domain separator."""
        return Hash32(await self._one("DOMAIN_SEPARATOR"))


class RunRegistry(_Client):
    """Runs and their policies."""

    contract = "RunRegistry"

    async def create_run(self, config: RunConfig) -> tuple[RunId, Receipt]:
        """Create a run that we own; return its id."""
        receipt = await self._write("createRun", abi_tuple(config))
        return RunId(receipt.event("RunCreated").args["run_id"]), receipt

    async def publish_checkpoint(
        self, run_id: RunId, version: PolicyVersion, manifest_root: Hash32
    ) -> Receipt:
        """Publish a policy version; only the trainer."""
        return await self._write("publishCheckpoint", run_id, version, manifest_root)

    async def record_beacon(self, run_id: RunId, version: PolicyVersion) -> Receipt:
        """Store the hash of the publishing block; within 256 blocks."""
        return await self._write("recordBeacon", run_id, version)

    async def set_submissions_paused(self, run_id: RunId, paused: bool) -> Receipt:
        """Pause or resume submissions; only the owner."""
        return await self._write("setSubmissionsPaused", run_id, paused)

    async def rotate_validator(
        self, run_id: RunId, old_validator: Address, new_validator: Address
    ) -> Receipt:
        """Replace a validator; only the owner."""
        return await self._write("rotateValidator", run_id, old_validator, new_validator)

    async def config_of(self, run_id: RunId) -> RunConfig:
        """Return a run's configuration."""
        return RunConfig(*await self._one("configOf", run_id))

    async def owner_of(self, run_id: RunId) -> Address:
        """Return a run's owner."""
        return Address(await self._one("ownerOf", run_id))

    async def is_paused(self, run_id: RunId) -> bool:
        """Return whether submissions are paused."""
        return bool(await self._one("isPaused", run_id))

    async def is_validator(self, run_id: RunId, account: Address) -> bool:
        """Return whether an account validates for the run."""
        return bool(await self._one("isValidator", run_id, account))

    async def latest_version(self, run_id: RunId) -> PolicyVersion | None:
        """Return the newest version, or None before the first."""
        return version_or_none(*await self._read("latestVersion", run_id))

    async def checkpoint_of(self, run_id: RunId, version: PolicyVersion) -> PolicyCheckpoint:
        """Return a version; its root is zero when it was never published."""
        return PolicyCheckpoint(*await self._one("checkpointOf", run_id, version))

    async def run_count(self) -> int:
        """Return the number of runs."""
        return int(await self._one("runCount"))

    async def terms_of(self, run_id: RunId) -> RunTerms:
        """Return what other contracts ask of a run."""
        return RunTerms(*await self._read("termsOf", run_id))

    async def price_of(self, run_id: RunId) -> int:
        """Return the wei per unit."""
        return int(await self._one("priceOf", run_id))

    async def seat_of(self, run_id: RunId, account: Address) -> Seat:
        """Return an account's seat among the validators."""
        return Seat(*await self._read("seatOf", run_id, account))

    async def seats_of(self, run_id: RunId) -> int:
        """Return the seats of the current validators as a bitmap."""
        return int(await self._one("seatsOf", run_id))

    async def quorum_among(self, run_id: RunId, accounts: Sequence[Address]) -> Quorum:
        """Return the quorum and which of these accounts validate."""
        quorum, seats, stranger = await self._read("quorumAmong", run_id, list(accounts))
        return Quorum(quorum, seats, None if stranger == ZERO_ADDRESS else stranger)

    async def required_validator_stake(self) -> int:
        """Return the active stake a validator must hold."""
        return int(await self._one("requiredValidatorStake"))


class ContributionLedger(_Client):
    """Batches and outcomes."""

    contract = "ContributionLedger"

    async def commit_batch(
        self, run_id: RunId, root: Hash32, count: int, units: int
    ) -> tuple[int, Receipt]:
        """Commit submissions by their root; return the batch's id. Only the orchestrator."""
        receipt = await self._write("commitBatch", run_id, root, count, units)
        return int(receipt.event("BatchCommitted").args["batch_id"]), receipt

    async def submit_direct(
        self, submission: Submission, node_signature: bytes
    ) -> tuple[int, Receipt]:
        """Commit one submission without the orchestrator; return the batch's id."""
        receipt = await self._write("submitDirect", abi_tuple(submission), node_signature)
        return int(receipt.event("BatchCommitted").args["batch_id"]), receipt

    async def post_outcomes(
        self, batch_id: int, records: bytes, signatures: Sequence[bytes]
    ) -> Receipt:
        """Record the outcomes of a batch; signatures ascend by signer."""
        return await self._write("postOutcomes", batch_id, records, list(signatures))

    async def execute_fraud(
        self, outcome: OutcomeProof, submission: Submission, node_signature: bytes
    ) -> Receipt:
        """Slash and ban the worker of a fraud outcome, on its node's own signature."""
        return await self._write(
            "executeFraud", abi_tuple(outcome), abi_tuple(submission), node_signature
        )

    async def finalise_fraud(self, outcome: OutcomeProof) -> Receipt:
        """Release the escrow of a fraud whose challenge window is over."""
        return await self._write("finaliseFraud", abi_tuple(outcome))

    async def outcome_of(self, outcome: OutcomeProof) -> tuple[OutcomeRecord, Hash32]:
        """Return a posted outcome and its leaf."""
        record, leaf = await self._read("outcomeOf", abi_tuple(outcome))
        return _record(record), Hash32(leaf)

    async def settled_outcome(self, outcome: OutcomeProof) -> SettledOutcome:
        """Return a posted outcome with the verdict that stands."""
        run_id, record, is_final = await self._read("settledOutcome", abi_tuple(outcome))
        return SettledOutcome(RunId(run_id), _record(record), is_final)

    async def signers_of(self, batch_id: int) -> int:
        """Return the seats of a batch's signers as a bitmap."""
        return int(await self._one("signersOf", batch_id))

    async def is_final(self, batch_id: int, leaf: Hash32) -> bool:
        """Return whether an outcome is final."""
        return bool(await self._one("isFinal", batch_id, leaf))

    async def batch_of(self, batch_id: int) -> Batch:
        """Return a batch."""
        return Batch(*await self._one("batchOf", batch_id))

    async def batch_count(self) -> int:
        """Return the number of batches."""
        return int(await self._one("batchCount"))

    async def challenge_window(self) -> int:
        """Return the seconds during which an outcome may be challenged."""
        return int(await self._one("challengeWindow"))

    async def outcome_deadline(self) -> int:
        """Return the seconds after the commitment by which outcomes are due."""
        return int(await self._one("outcomeDeadline"))

    async def domain_separator(self) -> Hash32:
        """Return the EIP-712 domain separator."""
        return Hash32(await self._one("DOMAIN_SEPARATOR"))


class DisputeCourt(_Client):
    """Disputes."""

    contract = "DisputeCourt"

    async def challenge(self, outcome: OutcomeProof, claimed_verdict: Verdict) -> Receipt:
        """Challenge an outcome; takes the bond, which must be approved."""
        return await self._write("challenge", abi_tuple(outcome), int(claimed_verdict))

    async def vote(self, leaf: Hash32, overturn: bool) -> Receipt:
        """Vote on a case as a juror."""
        return await self._write("vote", leaf, overturn)

    async def close(self, outcome: OutcomeProof) -> Receipt:
        """Close a case whose voting is over."""
        return await self._write("close", abi_tuple(outcome))

    async def case_of(self, leaf: Hash32) -> Case | None:
        """Return the case about an outcome, or None."""
        values = await self._one("caseOf", leaf)
        if values[2] == 0:
            return None
        recorded, claimed = Verdict(values[5]), Verdict(values[6])
        challenger, run_id, ends_at, overturn, uphold, _, _, closed, overturned, bond = values
        return Case(
            challenger=challenger,
            run_id=run_id,
            voting_ends_at=ends_at,
            votes_to_overturn=overturn,
            votes_to_uphold=uphold,
            recorded_verdict=recorded,
            claimed_verdict=claimed,
            closed=closed,
            overturned=overturned,
            bond_wei=bond,
        )

    async def is_open(self, leaf: Hash32) -> bool:
        """Return whether an outcome has an open case."""
        return bool(await self._one("isOpen", leaf))

    async def effective_verdict(self, leaf: Hash32, recorded: Verdict) -> Verdict:
        """Return the verdict that stands, given the recorded one."""
        return Verdict(await self._one("effectiveVerdict", leaf, int(recorded)))

    async def challenge_bond(self) -> int:
        """Return the wei of a challenge's bond."""
        return int(await self._one("challengeBond"))

    async def jury_time(self) -> int:
        """Return the seconds a jury has."""
        return int(await self._one("juryTime"))


class RewardEscrow(_Client):
    """Rewards."""

    contract = "RewardEscrow"

    async def fund(self, run_id: RunId, amount: int) -> Receipt:
        """Add our tokens to a run's funds; needs an allowance."""
        return await self._write("fund", run_id, amount)

    async def claim(self, outcomes: Sequence[OutcomeProof]) -> Receipt:
        """Have a worker paid for final accepted outcomes of one run."""
        return await self._write("claim", [abi_tuple(outcome) for outcome in outcomes])

    async def is_paid(self, run_id: RunId, worker: Address, step: Step, index: int) -> bool:
        """Return whether a slot was paid."""
        return bool(await self._one("isPaid", run_id, worker, step, index))

    async def funds_of(self, run_id: RunId) -> Funds:
        """Return what a run received and paid."""
        return Funds(*await self._read("fundsOf", run_id))


def _record(values: tuple[Any, ...]) -> OutcomeRecord:
    worker_id, step, index, policy_version, file_hash, rollouts, units, verdict, reason = values
    return OutcomeRecord(
        worker_id=worker_id,
        step=step,
        index=index,
        policy_version=policy_version,
        file_hash=file_hash,
        rollouts=rollouts,
        units=units,
        verdict=Verdict(verdict),
        reason=lenient_reason(reason),
    )
