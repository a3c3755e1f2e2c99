"""Typed clients of the eight contracts: snake-case names, Solidity's argument order, Python types.

Views return frozen types of `muster.chain.structs`; writes send a transaction and return its
receipt, or raise ContractRevert. A write needs a client that was connected with a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from muster.chain.conversion import from_abi
from muster.chain.events import Event
from muster.chain.structs import (
    ZERO_ADDRESS,
    Admission,
    Batch,
    Case,
    CaseStatus,
    Claim,
    CourtTerms,
    Escrow,
    EscrowStatus,
    Funds,
    OutcomeProof,
    PauseCause,
    PolicyCheckpoint,
    Quorum,
    RunConfig,
    RunTerms,
    StakeAccount,
    Standing,
    Work,
    WorkerAccount,
    WorkerStatus,
    version_or_none,
)
from muster.protocol.errors import ChainError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import Outcomes, Submission, Verdict


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
        owner, reporter, amount, status = await self._one("escrowOf", offence)
        return Escrow(owner, reporter, amount, EscrowStatus.of(status))

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

    async def rejoin(self) -> Receipt:
        """Come back after having started to leave; the stake must suffice."""
        return await self._write("rejoin")

    async def unjail(self) -> Receipt:
        """Become active again after the jail time."""
        return await self._write("unjail")

    async def jail_for_low_stake(self, worker: Address) -> Receipt:
        """Jail a worker whose stake is below the requirement."""
        return await self._write("jailForLowStake", worker)

    async def worker_of(self, worker: Address) -> WorkerAccount:
        """Return a worker's record."""
        node, worker_id, status, active_from, jailed_until, convictions = await self._one(
            "workerOf", worker
        )
        return WorkerAccount(
            node, worker_id, WorkerStatus.of(status), active_from, jailed_until, convictions
        )

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
        receipt = await self._write("createRun", config)
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

    async def pause_slashing(
        self, run_id: RunId, cause: PauseCause, reason: int, evidence_hash: Hash32
    ) -> Receipt:
        """Stop a run's fraud executions for a while; a validator, the orchestrator or the owner.

        `reason` is that of the check that failed, zero when there is none. Raises ContractRevert
        RunPauseTooSoon while a pause lasts, and for `slash_cooldown` after it.
        """
        return await self._write("pauseSlashing", run_id, cause, reason, evidence_hash)

    async def close_run(self, run_id: RunId) -> Receipt:
        """End a run for good; only the owner."""
        return await self._write("closeRun", run_id)

    async def seat_validator(self, run_id: RunId, validator: Address) -> Receipt:
        """Seat another validator; only the owner."""
        return await self._write("seatValidator", run_id, validator)

    async def rotate_validator(
        self, run_id: RunId, old_validator: Address, new_validator: Address
    ) -> Receipt:
        """Replace a validator; only the owner."""
        return await self._write("rotateValidator", run_id, old_validator, new_validator)

    async def unseat_validator(self, run_id: RunId, validator: Address) -> Receipt:
        """Take the seat of a validator whose stake is below the requirement."""
        return await self._write("unseatValidator", run_id, validator)

    async def rotate_trainer(self, run_id: RunId, old: Address, new: Address) -> Receipt:
        """Replace the trainer's key; only the owner."""
        return await self._write("rotateTrainer", run_id, old, new)

    async def rotate_orchestrator(self, run_id: RunId, old: Address, new: Address) -> Receipt:
        """Replace the orchestrator's key; only the owner."""
        return await self._write("rotateOrchestrator", run_id, old, new)

    async def propose_change(self, run_id: RunId, terms: RunTerms) -> Receipt:
        """Announce other terms; only the owner."""
        return await self._write("proposeChange", run_id, terms)

    async def cancel_change(self, run_id: RunId) -> Receipt:
        """Withdraw an announcement; only the owner."""
        return await self._write("cancelChange", run_id)

    async def apply_change(self, run_id: RunId) -> Receipt:
        """Put announced terms into effect once they are due."""
        return await self._write("applyChange", run_id)

    async def config_of(self, run_id: RunId) -> RunConfig:
        """Return a run's configuration; its validators are those seated now."""
        return from_abi(RunConfig, await self._one("configOf", run_id))

    async def terms_of(self, run_id: RunId) -> RunTerms:
        """Return what a run pays and punishes."""
        return RunTerms(*await self._one("termsOf", run_id))

    async def slashes_of(self, run_id: RunId) -> tuple[int, int, int]:
        """Return the millionths of stake that a first statistical and an exact fraud cost, and when
        the last pause of slashing ends; 0 when there was none."""
        first, exact, paused_until = await self._read("slashesOf", run_id)
        return int(first), int(exact), int(paused_until)

    async def fraud_closes_at(self, run_id: RunId, closes_at: int, window: int) -> int:
        """Return when the challenge window of a fraud verdict closes, given when it does without
        pauses."""
        return int(await self._one("fraudClosesAt", run_id, closes_at, window))

    async def slash_pause(self) -> int:
        """Return the seconds that a pause of slashing lasts."""
        return int(await self._one("slashPause"))

    async def slash_cooldown(self) -> int:
        """Return the seconds after a pause of slashing before which there is no other."""
        return int(await self._one("slashCooldown"))

    async def proposed_change(self, run_id: RunId) -> tuple[RunTerms, int] | None:
        """Return announced terms and when they take effect, or None."""
        terms, effective_at = await self._read("proposedChange", run_id)
        return (RunTerms(*terms), int(effective_at)) if effective_at else None

    async def admission_of(self, run_id: RunId) -> Admission:
        """Return what a commitment depends on."""
        return Admission(*await self._read("admissionOf", run_id))

    async def owner_of(self, run_id: RunId) -> Address:
        """Return a run's owner."""
        return Address(await self._one("ownerOf", run_id))

    async def is_paused(self, run_id: RunId) -> bool:
        """Return whether submissions are paused."""
        return bool(await self._one("isPaused", run_id))

    async def closed_at(self, run_id: RunId) -> int:
        """Return when a run ended; 0 while it is open."""
        return int(await self._one("closedAt", run_id))

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

    async def seat_bit_of(self, run_id: RunId, account: Address) -> int:
        """Return the bit of an account among the validators; 0 when it never was one."""
        return int(await self._one("seatBitOf", run_id, account))

    async def was_seated_throughout(
        self, run_id: RunId, account: Address, from_: int, to: int
    ) -> bool:
        """Return whether an account held its seat from one time to another."""
        return bool(await self._one("wasSeatedThroughout", run_id, account, from_, to))

    async def validators_of(self, run_id: RunId) -> dict[Address, int]:
        """Return the validators and the bits of their seats."""
        accounts, bits = await self._read("validatorsOf", run_id)
        return dict(zip(accounts, bits, strict=True))

    async def quorum_among(self, run_id: RunId, accounts: Sequence[Address]) -> Quorum:
        """Return the quorum and which of these accounts validate."""
        quorum, seats, stranger = await self._read("quorumAmong", run_id, list(accounts))
        return Quorum(quorum, seats, None if stranger == ZERO_ADDRESS else stranger)

    async def change_delay(self) -> int:
        """Return the seconds between announcing terms and their effect."""
        return int(await self._one("changeDelay"))

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
        receipt = await self._write("submitDirect", submission, node_signature)
        return int(receipt.event("BatchCommitted").args["batch_id"]), receipt

    async def post_outcomes(
        self, batch: Batch, records: bytes, signatures: Sequence[bytes]
    ) -> Receipt:
        """Record the outcomes of a batch; signatures ascend by signer."""
        return await self._write("postOutcomes", batch, records, b"".join(signatures))

    async def execute_fraud(
        self, outcome: OutcomeProof, submission: Submission, node_signature: bytes
    ) -> Receipt:
        """Slash, and jail or ban, the worker of a fraud outcome, on its node's own signature."""
        return await self._write("executeFraud", outcome, submission, node_signature)

    async def finalise_fraud(self, outcome: OutcomeProof) -> Receipt:
        """Release the escrow of a fraud whose challenge window is over."""
        return await self._write("finaliseFraud", outcome)

    async def standing_of(self, outcome: OutcomeProof) -> Standing:
        """Return an outcome as it stands now."""
        return from_abi(Standing, await self._one("standingOf", outcome))

    async def in_flight_until(
        self, outcome: OutcomeProof, submission: Submission, node_signature: bytes
    ) -> int:
        """Return when the challenge window of work in flight closes at the latest."""
        return int(await self._one("inFlightUntil", outcome, submission, node_signature))

    async def is_disputed(self, batch: Batch) -> bool:
        """Return whether an outcome of a batch was ever challenged."""
        return bool(await self._one("isDisputed", batch))

    async def overdue_since(self, batch: Batch) -> int:
        """Return when outcomes of a batch were due, if that is past and there are none."""
        return int(await self._one("overdueSince", batch))

    async def unit_cap_of(self, worker: Address) -> int:
        """Return the units that a worker's active stake covers in flight."""
        return int(await self._one("unitCapOf", worker))

    async def commitment_of(self, batch_id: int) -> Hash32:
        """Return the hash stored for a batch; zero when there is none."""
        return Hash32(await self._one("commitmentOf", batch_id))

    async def submission_signer(self, submission: Submission, signature: bytes) -> Address:
        """Return who signed a submission; the zero address when the signature is malformed."""
        return Address(await self._one("submissionSigner", submission, signature))

    async def outcomes_signer(self, outcomes: Outcomes, signature: bytes) -> Address:
        """Return who signed outcomes; the zero address when the signature is malformed."""
        return Address(await self._one("outcomesSigner", outcomes, signature))

    async def batch_count(self) -> int:
        """Return the number of batches."""
        return int(await self._one("batchCount"))

    async def challenge_window(self) -> int:
        """Return the seconds during which an outcome may be challenged."""
        return int(await self._one("challengeWindow"))

    async def outcome_deadline(self) -> int:
        """Return the seconds after the commitment by which outcomes are due."""
        return int(await self._one("outcomeDeadline"))

    async def judgement_time(self) -> int:
        """Return the seconds from a commitment until its fraud can be executed at the latest."""
        return int(await self._one("judgementTime"))

    async def stake_per_unit(self) -> int:
        """Return the wei of stake behind one unit in flight."""
        return int(await self._one("stakePerUnit"))

    async def domain_separator(self) -> Hash32:
        """Return the EIP-712 domain separator."""
        return Hash32(await self._one("DOMAIN_SEPARATOR"))


class DisputeCourt(_Client):
    """Disputes."""

    contract = "DisputeCourt"

    async def challenge(self, outcome: OutcomeProof, claimed_verdict: Verdict) -> Receipt:
        """Challenge an outcome; takes the bond, which must be approved."""
        return await self._write("challenge", outcome, int(claimed_verdict))

    async def draw_jury(self, outcome: OutcomeProof) -> Receipt:
        """Draw the jury of a case, once its draw block is mined."""
        return await self._write("drawJury", outcome)

    async def commit_vote(self, leaf: Hash32, commitment: Hash32) -> Receipt:
        """Commit to a vote as a juror, see `muster.protocol.jury.vote_commitment`."""
        return await self._write("commitVote", leaf, commitment)

    async def reveal_vote(
        self, leaf: Hash32, overturn: bool, result_hash: Hash32, salt: Hash32
    ) -> Receipt:
        """Reveal a vote."""
        return await self._write("revealVote", leaf, overturn, result_hash, salt)

    async def close(self, outcome: OutcomeProof) -> Receipt:
        """Close a case that all jurors voted on, or whose time is over."""
        return await self._write("close", outcome)

    async def case_of(self, leaf: Hash32) -> Case | None:
        """Return the case about an outcome, or None."""
        values = await self._one("caseOf", leaf)
        challenger, batch_id, recorded, claimed, run_id, status, *rest = values
        if CaseStatus.of(status) is CaseStatus.NONE:
            return None
        return Case(
            challenger,
            batch_id,
            Verdict(recorded),
            Verdict(claimed),
            RunId(run_id),
            CaseStatus.of(status),
            *rest,
        )

    async def challenger_of(self, leaf: Hash32) -> Address:
        """Return who challenged an outcome, or the zero address."""
        return Address(await self._one("challengerOf", leaf))

    async def commitment_of(self, leaf: Hash32, juror: Address) -> Hash32:
        """Return what a juror committed: zero for nothing, one once revealed."""
        return Hash32(await self._one("commitmentOf", leaf, juror))

    async def is_open(self, leaf: Hash32) -> bool:
        """Return whether an outcome has an open case."""
        return bool(await self._one("isOpen", leaf))

    async def effective_verdict(self, leaf: Hash32, recorded: Verdict) -> Verdict:
        """Return the verdict that stands, given the recorded one."""
        return Verdict(await self._one("effectiveVerdict", leaf, int(recorded)))

    async def terms(self) -> CourtTerms:
        """Return what the deployment fixed."""
        return CourtTerms(*await self._one("terms"))

    async def jury_time(self) -> int:
        """Return the seconds after which a case can be closed."""
        return int(await self._one("juryTime"))


class FaultCourt(_Client):
    """Faults that prove themselves."""

    contract = "FaultCourt"

    async def slash_signer(self, outcome: OutcomeProof, validator: Address) -> Receipt:
        """Slash a validator that signed an outcome which a jury overturned."""
        return await self._write("slashSigner", outcome, validator)

    async def slash_absent_juror(self, leaf: Hash32, juror: Address) -> Receipt:
        """Slash a juror that did not reveal a vote."""
        return await self._write("slashAbsentJuror", leaf, juror)

    async def slash_overdue(self, batch: Batch, validator: Address) -> Receipt:
        """Slash a validator of a batch that waited in vain for its outcomes."""
        return await self._write("slashOverdue", batch, validator)

    async def prove_double_outcome(
        self,
        batch: Batch,
        first: Outcomes,
        first_signature: bytes,
        second: Outcomes,
        second_signature: bytes,
    ) -> Receipt:
        """Slash and unseat a validator that signed two outcomes of one batch."""
        return await self._write(
            "proveDoubleOutcome",
            batch,
            first,
            first_signature,
            second,
            second_signature,
        )

    async def prove_double_submission(
        self,
        first: Submission,
        first_signature: bytes,
        second: Submission,
        second_signature: bytes,
    ) -> Receipt:
        """Slash and ban a worker whose nodes signed two submissions for one slot."""
        return await self._write(
            "proveDoubleSubmission",
            first,
            first_signature,
            second,
            second_signature,
        )

    async def prove_overcommit(self, works: Sequence[Work]) -> Receipt:
        """Jail a worker whose units in flight exceed what its stake covers."""
        return await self._write("proveOvercommit", works)

    async def hold_stake(self, work: Work) -> Receipt:
        """Hold a worker's stake back until work that is not final is."""
        return await self._write("holdStake", work)

    async def wrong_verdict_ppm(self) -> int:
        """Return the millionths of a signer's stake that an overturned verdict costs."""
        return int(await self._one("wrongVerdictPpm"))

    async def absence_ppm(self) -> int:
        """Return the millionths of a validator's stake that an absence costs."""
        return int(await self._one("absencePpm"))


class RewardEscrow(_Client):
    """Rewards."""

    contract = "RewardEscrow"

    async def fund(self, run_id: RunId, amount: int) -> Receipt:
        """Add our tokens to a run's funds; needs an allowance."""
        return await self._write("fund", run_id, amount)

    async def claim(self, claims: Sequence[Claim]) -> Receipt:
        """Have a worker paid for final accepted outcomes of one run."""
        return await self._write("claim", claims)

    async def recover(self, claims: Sequence[Claim]) -> Receipt:
        """Free what was set aside for final outcomes that were not accepted."""
        return await self._write("recover", claims)

    async def reclaim(self, run_id: RunId) -> Receipt:
        """Return a closed run's money to its owner."""
        return await self._write("reclaim", run_id)

    async def is_paid(self, run_id: RunId, worker: Address, step: Step, index: int) -> bool:
        """Return whether a slot was paid."""
        return bool(await self._one("isPaid", run_id, worker, step, index))

    async def funds_of(self, run_id: RunId) -> Funds:
        """Return a run's money."""
        return Funds(*await self._one("fundsOf", run_id))

    async def claim_period(self) -> int:
        """Return the seconds that workers of a closed run have to claim."""
        return int(await self._one("claimPeriod"))
