"""The eight contracts: an async method for each function that Muster calls.

Made by `python contracts/script/export_artifacts.py` from the contracts; not to be edited. Views
return Python types; the others send a transaction and return its receipt, or raise ContractRevert,
and need a chain that was connected with a key.
"""

from __future__ import annotations

from collections.abc import Sequence

from muster.chain.calls import Contract, Receipt
from muster.chain.structs import (
    Batch,
    Claim,
    CourtTerms,
    Funds,
    OutcomeProof,
    PauseCause,
    PolicyCheckpoint,
    RunConfig,
    RunTerms,
    StakeAccount,
    Standing,
    WorkerAccount,
)
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import Submission, Verdict


class MusterToken(Contract):
    """The token that is staked, paid and slashed."""

    async def allowance(self, owner: Address, spender: Address) -> int:
        """Returns the remaining number of tokens that `spender` will be allowed to spend on
        behalf of `owner` through `transferFrom`.
        """
        return await self._read(int, "allowance", owner, spender)

    async def approve(self, spender: Address, value: int) -> Receipt:
        """Sets a `value` amount of tokens as the allowance of `spender` over the caller's
        tokens.
        """
        return await self._write("approve", spender, value)

    async def balance_of(self, account: Address) -> int:
        """Returns the value of tokens owned by `account`."""
        return await self._read(int, "balanceOf", account)

    async def domain_separator(self) -> Hash32:
        """Returns the domain separator used in the encoding of the signature for `permit`, as
        defined by `EIP712`.
        """
        return await self._read(Hash32, "DOMAIN_SEPARATOR")

    async def faucet(self, to: Address, amount: int) -> Receipt:
        """Mints test tokens to `to`. Only on chain id 31337."""
        return await self._write("faucet", to, amount)

    async def nonces(self, owner: Address) -> int:
        """Returns the current nonce for `owner`."""
        return await self._read(int, "nonces", owner)

    async def total_supply(self) -> int:
        """Returns the value of tokens in existence."""
        return await self._read(int, "totalSupply")

    async def transfer(self, to: Address, value: int) -> Receipt:
        """Moves a `value` amount of tokens from the caller's account to `to`."""
        return await self._write("transfer", to, value)


class StakeVault(Contract):
    """Holds all stake, and is the only contract that does."""

    async def account_of(self, owner: Address) -> StakeAccount:
        """Returns the stake of `owner`."""
        return await self._read(StakeAccount, "accountOf", owner)

    async def active_stake(self, owner: Address) -> int:
        """Returns the active stake of `owner`, in token wei."""
        return await self._read(int, "activeStake", owner)

    async def deposit(self, owner: Address, amount: int) -> Receipt:
        """Adds `amount` of the caller's tokens to the active stake of `owner`."""
        return await self._write("deposit", owner, amount)

    async def deposit_with_permit(
        self, amount: int, deadline: int, v: int, r: Hash32, s: Hash32
    ) -> Receipt:
        """As `deposit` for the caller, with an ERC-2612 permit for this contract."""
        return await self._write("depositWithPermit", amount, deadline, v, r, s)

    async def insurance(self) -> Address:
        """The account that receives the insured share of slashed stake."""
        return await self._read(Address, "insurance")

    async def insurance_ppm(self) -> int:
        """Millionths of a released escrow that go to `insurance`."""
        return await self._read(int, "insurancePpm")

    async def reporter_cap(self) -> int:
        """The most a reporter gets for one offence, in token wei."""
        return await self._read(int, "reporterCap")

    async def reporter_ppm(self) -> int:
        """Millionths of a released escrow that go to its reporter, if it has one."""
        return await self._read(int, "reporterPpm")

    async def request_unbond(self, amount: int) -> Receipt:
        """Starts to unbond `amount` of the caller's active stake."""
        return await self._write("requestUnbond", amount)

    async def unbonding_period(self) -> int:
        """Returns the seconds between an unbond request and its withdrawal."""
        return await self._read(int, "unbondingPeriod")

    async def withdraw(self) -> Receipt:
        """Pays out the caller's unbonded stake once the unbonding period is over and nothing
        holds it.
        """
        return await self._write("withdraw")


class WorkerRegistry(Contract):
    """Who may work, and with which key."""

    async def exit(self) -> Receipt:
        """Starts to leave: no more work, all stake unbonds."""
        return await self._write("exit")

    async def nonces(self, worker: Address) -> int:
        """Returns the next nonce a node must consent to for `worker`."""
        return await self._read(int, "nonces", worker)

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
        """Makes the caller a worker in one transaction: as `register`, with an ERC-2612 permit
        for StakeVault.
        """
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

    async def rejoin(self) -> Receipt:
        """Makes the caller, which was leaving, active again, if its stake suffices."""
        return await self._write("rejoin")

    async def required_stake(self) -> int:
        """Returns the active stake a worker must hold, in token wei."""
        return await self._read(int, "requiredStake")

    async def rotate_node(
        self, node: Address, node_deadline: int, node_signature: bytes
    ) -> Receipt:
        """Replaces the caller's node key; the old key fails at once, earned reward stays."""
        return await self._write("rotateNode", node, node_deadline, node_signature)

    async def unjail(self) -> Receipt:
        """Makes the caller active again after its jail time, if its stake suffices."""
        return await self._write("unjail")

    async def worker_by_id(self, worker_id: int) -> Address:
        """Returns the worker with a number, or the zero address."""
        return await self._read(Address, "workerById", worker_id)

    async def worker_of(self, account: Address) -> WorkerAccount:
        """Returns a worker's record."""
        return await self._read(WorkerAccount, "workerOf", account)

    async def worker_of_node(self, node: Address) -> Address:
        """Returns the worker that a node key serves now, or the zero address."""
        return await self._read(Address, "workerOfNode", node)


class RunRegistry(Contract):
    """Runs: who trains what, with which rules, and every published policy."""

    async def apply_change(self, run_id: RunId) -> Receipt:
        """Puts announced terms into effect once they are due. Anyone."""
        return await self._write("applyChange", run_id)

    async def cancel_change(self, run_id: RunId) -> Receipt:
        """Withdraws an announcement. Only the owner."""
        return await self._write("cancelChange", run_id)

    async def change_delay(self) -> int:
        """Returns the seconds between announcing terms and their effect."""
        return await self._read(int, "changeDelay")

    async def checkpoint_of(self, run_id: RunId, version: PolicyVersion) -> PolicyCheckpoint:
        """Returns a version; its root is zero when it was never published."""
        return await self._read(PolicyCheckpoint, "checkpointOf", run_id, version)

    async def close_run(self, run_id: RunId) -> Receipt:
        """Ends a run for good: nothing more is committed or published. Only the owner."""
        return await self._write("closeRun", run_id)

    async def config_of(self, run_id: RunId) -> RunConfig:
        """Returns a run's configuration; its validators are those seated now."""
        return await self._read(RunConfig, "configOf", run_id)

    async def create_run(self, config: RunConfig) -> tuple[RunId, Receipt]:
        """Creates a run owned by the caller. Run ids count from 1."""
        receipt = await self._write("createRun", config)
        return RunId(receipt.event("RunCreated").args["run_id"]), receipt

    async def is_validator(self, run_id: RunId, account: Address) -> bool:
        """Returns whether `account` validates for the run."""
        return await self._read(bool, "isValidator", run_id, account)

    async def latest_version(self, run_id: RunId) -> PolicyVersion | None:
        """Returns the newest published version's number, if there is one."""
        return await self._find(PolicyVersion, "latestVersion", run_id)

    async def pause_slashing(
        self, run_id: RunId, cause: PauseCause, reason: int, evidence_hash: Hash32
    ) -> Receipt:
        """Stops the fraud executions of a run for `slashPause` seconds. A seated validator, the
        run's orchestrator or its owner; not while a pause lasts, nor for `slashCooldown` after
        it.
        """
        return await self._write("pauseSlashing", run_id, cause, reason, evidence_hash)

    async def propose_change(self, run_id: RunId, terms: RunTerms) -> Receipt:
        """Announces other terms, which anyone can apply `changeDelay` later. Only the owner."""
        return await self._write("proposeChange", run_id, terms)

    async def publish_checkpoint(
        self, run_id: RunId, version: PolicyVersion, manifest_root: Hash32
    ) -> Receipt:
        """Publishes a policy version. Only the run's trainer; versions increase by at least one."""
        return await self._write("publishCheckpoint", run_id, version, manifest_root)

    async def record_beacon(self, run_id: RunId, version: PolicyVersion) -> Receipt:
        """Stores the hash of the block that published a version. Anyone, within 256 blocks."""
        return await self._write("recordBeacon", run_id, version)

    async def required_validator_stake(self) -> int:
        """Returns the active stake a validator must hold, in token wei."""
        return await self._read(int, "requiredValidatorStake")

    async def rotate_orchestrator(
        self, run_id: RunId, old_orchestrator: Address, new_orchestrator: Address
    ) -> Receipt:
        """Replaces the orchestrator's key, naming the old one. Only the owner."""
        return await self._write("rotateOrchestrator", run_id, old_orchestrator, new_orchestrator)

    async def rotate_trainer(
        self, run_id: RunId, old_trainer: Address, new_trainer: Address
    ) -> Receipt:
        """Replaces the trainer's key, naming the old one. Only the owner."""
        return await self._write("rotateTrainer", run_id, old_trainer, new_trainer)

    async def rotate_validator(
        self, run_id: RunId, old_validator: Address, new_validator: Address
    ) -> Receipt:
        """Replaces a validator, naming the old one. Only the owner."""
        return await self._write("rotateValidator", run_id, old_validator, new_validator)

    async def run_count(self) -> int:
        """Returns the number of runs."""
        return await self._read(int, "runCount")

    async def seat_validator(self, run_id: RunId, validator: Address) -> Receipt:
        """Seats another validator. Only the owner."""
        return await self._write("seatValidator", run_id, validator)

    async def set_submissions_paused(self, run_id: RunId, paused: bool) -> Receipt:
        """Pauses or resumes submissions. Only the owner."""
        return await self._write("setSubmissionsPaused", run_id, paused)

    async def slash_cooldown(self) -> int:
        """Returns the seconds after a pause of slashing before which there is no other."""
        return await self._read(int, "slashCooldown")

    async def slash_pause(self) -> int:
        """Returns the seconds that a pause of slashing lasts."""
        return await self._read(int, "slashPause")

    async def terms_of(self, run_id: RunId) -> RunTerms:
        """Returns what a run pays and punishes. Reverts with RunUnknown."""
        return await self._read(RunTerms, "termsOf", run_id)

    async def unseat_validator(self, run_id: RunId, validator: Address) -> Receipt:
        """Takes the seat of a validator: FaultCourt always may, anyone once its active stake is
        below the requirement.
        """
        return await self._write("unseatValidator", run_id, validator)


class ContributionLedger(Contract):
    """The ledger of contributions: what was submitted, and what validators decided."""

    async def batch_count(self) -> int:
        """Returns the number of batches."""
        return await self._read(int, "batchCount")

    async def challenge_window(self) -> int:
        """Returns the seconds after posting during which an outcome may be challenged."""
        return await self._read(int, "challengeWindow")

    async def commit_batch(
        self, run_id: RunId, root: Hash32, count: int, units: int
    ) -> tuple[int, Receipt]:
        """Commits a batch of submissions by root, and sets aside what it can cost. Only the
        run's orchestrator.
        """
        receipt = await self._write("commitBatch", run_id, root, count, units)
        return int(receipt.event("BatchCommitted").args["batch_id"]), receipt

    async def execute_fraud(
        self, outcome: OutcomeProof, submission: Submission, node_signature: bytes
    ) -> Receipt:
        """Slashes the worker of a fraud outcome at once, and jails or bans it; the stake waits
        in escrow.
        """
        return await self._write("executeFraud", outcome, submission, node_signature)

    async def finalise_fraud(self, outcome: OutcomeProof) -> Receipt:
        """Releases the escrow of an executed fraud whose challenge window is over: the one that
        a pause of slashing prolongs, if it met one.
        """
        return await self._write("finaliseFraud", outcome)

    async def outcome_deadline(self) -> int:
        """Returns the seconds after the commitment by which outcomes are due."""
        return await self._read(int, "outcomeDeadline")

    async def post_outcomes(self, batch: Batch, records: bytes, signatures: bytes) -> Receipt:
        """Records the outcome of every submission of a batch, accepts and rejects alike.
        Signatures are joined, and ascend by signer.
        """
        return await self._write("postOutcomes", batch, records, signatures)

    async def stake_per_unit(self) -> int:
        """Returns the token wei of stake that must stand behind one unit in flight."""
        return await self._read(int, "stakePerUnit")

    async def standing_of(self, outcome: OutcomeProof) -> Standing:
        """Returns an outcome as it stands now."""
        return await self._read(Standing, "standingOf", outcome)

    async def unit_cap_of(self, worker: Address) -> int:
        """Returns the units that a worker's active stake covers in flight."""
        return await self._read(int, "unitCapOf", worker)


class DisputeCourt(Contract):
    """Bonded challenges to outcomes, decided by a jury."""

    async def challenge(self, outcome: OutcomeProof, claimed_verdict: Verdict) -> Receipt:
        """Challenges an outcome within its window; takes the bond, which must be approved, from
        the caller.
        """
        return await self._write("challenge", outcome, claimed_verdict)

    async def close(self, outcome: OutcomeProof) -> Receipt:
        """Closes a case once all jurors revealed or the jury's time is over. Anyone."""
        return await self._write("close", outcome)

    async def commit_vote(self, leaf: Hash32, commitment: Hash32) -> Receipt:
        """Commits to a vote: `keccak256(abi.encode(leaf, juror, overturn, resultHash, salt))`.
        Jurors, once.
        """
        return await self._write("commitVote", leaf, commitment)

    async def draw_jury(self, outcome: OutcomeProof) -> Receipt:
        """Draws the jury from the hash of the case's draw block, by stake, without replacement.
        Anyone, in the first half of the time to commit.
        """
        return await self._write("drawJury", outcome)

    async def reveal_vote(
        self, leaf: Hash32, overturn: bool, result_hash: Hash32, salt: Hash32
    ) -> Receipt:
        """Reveals a vote once all jurors committed or the time to commit is over."""
        return await self._write("revealVote", leaf, overturn, result_hash, salt)

    async def terms(self) -> CourtTerms:
        """Returns what the deployment fixed."""
        return await self._read(CourtTerms, "terms")


class FaultCourt(Contract):
    """Punishes faults that prove themselves."""

    async def slash_absent_juror(self, leaf: Hash32, juror: Address) -> Receipt:
        """Slashes a juror that did not reveal a vote before its case closed."""
        return await self._write("slashAbsentJuror", leaf, juror)

    async def slash_overdue(self, batch: Batch, validator: Address) -> Receipt:
        """Slashes a validator that held a seat all the time a batch waited in vain for its
        outcomes.
        """
        return await self._write("slashOverdue", batch, validator)

    async def slash_signer(self, outcome: OutcomeProof, validator: Address) -> Receipt:
        """Slashes a validator that signed an outcome which a jury overturned; the challenger is
        the reporter.
        """
        return await self._write("slashSigner", outcome, validator)

    async def wrong_verdict_ppm(self) -> int:
        """Returns the millionths of a signer's stake that an overturned verdict costs."""
        return await self._read(int, "wrongVerdictPpm")


class RewardEscrow(Contract):
    """Pays final accepted units, and nothing else."""

    async def claim(self, claims: Sequence[Claim]) -> Receipt:
        """Pays one worker for many final accepted outcomes of one run. Anyone; the worker is
        paid.
        """
        return await self._write("claim", claims)

    async def claim_period(self) -> int:
        """Returns the seconds that workers of a closed run have to claim."""
        return await self._read(int, "claimPeriod")

    async def fund(self, run_id: RunId, amount: int) -> Receipt:
        """Adds the caller's tokens, which must be approved, to a run's funds. Anyone."""
        return await self._write("fund", run_id, amount)

    async def funds_of(self, run_id: RunId) -> Funds:
        """Returns a run's money."""
        return await self._read(Funds, "fundsOf", run_id)

    async def is_paid(self, run_id: RunId, worker: Address, step: Step, index: int) -> bool:
        """Returns whether a slot was paid."""
        return await self._read(bool, "isPaid", run_id, worker, step, index)

    async def reclaim(self, run_id: RunId) -> Receipt:
        """Returns a closed run's money to its owner: what is free at once, all of it
        `claimPeriod` later.
        """
        return await self._write("reclaim", run_id)

    async def recover(self, claims: Sequence[Claim]) -> Receipt:
        """Frees the money set aside for final outcomes of one run that were not accepted.
        Anyone.
        """
        return await self._write("recover", claims)
