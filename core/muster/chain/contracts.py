"""The nine contracts: an async method for each function that Muster calls.

Made by `python contracts/script/export_artifacts.py` from the contracts; not to be edited. Views
return Python types; the others send a transaction and return its receipt, or raise ContractRevert,
and need a chain that was connected with a key.
"""

from __future__ import annotations

from collections.abc import Sequence

from muster.chain.abi import Contract, Receipt
from muster.chain.structs import (
    Batch,
    CourtTerms,
    Funds,
    LeasedWork,
    Member,
    NodeConsent,
    OutcomeProof,
    PauseCause,
    Permit,
    PolicyCheckpoint,
    RewardClaim,
    RunConfig,
    RunTerms,
    StakeAccount,
    StandingOutcome,
)
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import Outcomes, Submission


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

    async def account_of(self, run_id: RunId, owner: Address) -> StakeAccount:
        """Returns the stake of `owner` in a run."""
        return await self._read(StakeAccount, "accountOf", run_id, owner)

    async def active_stake(self, run_id: RunId, owner: Address) -> int:
        """Returns the active stake of `owner` in a run, in token wei."""
        return await self._read(int, "activeStake", run_id, owner)

    async def deposit(self, run_id: RunId, owner: Address, amount: int) -> Receipt:
        """Adds `amount` of the caller's tokens to the active stake of `owner` in a run."""
        return await self._write("deposit", run_id, owner, amount)

    async def insurance(self) -> Address:
        """The account that receives the insured share of slashed stake."""
        return await self._read(Address, "insurance")

    async def insurance_ppm(self) -> int:
        """Millionths of slashed stake that go to `insurance`."""
        return await self._read(int, "insurancePpm")

    async def reporter_cap(self) -> int:
        """The most a reporter gets for one offence, in token wei."""
        return await self._read(int, "reporterCap")

    async def reporter_ppm(self) -> int:
        """Millionths of slashed stake that go to a reporter whom a jury confirmed."""
        return await self._read(int, "reporterPpm")

    async def request_unbond(self, run_id: RunId, amount: int) -> Receipt:
        """Starts to unbond `amount` of the caller's active stake in a run."""
        return await self._write("requestUnbond", run_id, amount)

    async def unbonding_period(self) -> int:
        """Returns the seconds between an unbond request and its withdrawal."""
        return await self._read(int, "unbondingPeriod")

    async def withdraw(self, run_id: RunId) -> Receipt:
        """Pays out the caller's unbonded stake in a run once the unbonding period is over.
        Nothing can hold it longer.
        """
        return await self._write("withdraw", run_id)


class JuryPool(Contract):
    """The network's bench: who offered itself to judge for any run."""

    async def is_juror(self, account: Address) -> bool:
        """Returns whether an account may be drawn for a case that opens now or later."""
        return await self._read(bool, "isJuror", account)

    async def join(self, stake: int) -> Receipt:
        """Offers the caller as a juror, and adds `stake` of its tokens, which StakeVault must be
        allowed to take.
        """
        return await self._write("join", stake)

    async def leave(self) -> Receipt:
        """Ends the caller's offer and unbonds all its stake. Cases that are open may still draw
        it, and it must vote.
        """
        return await self._write("leave")

    async def required_stake(self) -> int:
        """Returns the active stake a juror must hold, in token wei."""
        return await self._read(int, "requiredStake")


class WorkerRegistry(Contract):
    """Who works for which run, and with which key."""

    async def come_back(self, run_id: RunId, terms: int) -> Receipt:
        """Makes the caller active in a run again, from jail or from leaving, if its stake
        suffices.
        """
        return await self._write("comeBack", run_id, terms)

    async def exit(self, run_id: RunId) -> Receipt:
        """Starts to leave a run: no more work, all stake in it unbonds."""
        return await self._write("exit", run_id)

    async def join(
        self, run_id: RunId, terms: int, stake: int, consent: NodeConsent, permit: Permit
    ) -> Receipt:
        """Makes the caller a worker of a run in one transaction: takes `stake` from it, and
        binds its node key if it has none or names another one.
        """
        return await self._write("join", run_id, terms, stake, consent, permit)

    async def member_of(self, run_id: RunId, worker: Address) -> Member:
        """Returns a worker as it stands in a run."""
        return await self._read(Member, "memberOf", run_id, worker)

    async def nonces(self, worker: Address) -> int:
        """Returns the next nonce a node must consent to for `worker`."""
        return await self._read(int, "nonces", worker)

    async def required_stake(self) -> int:
        """Returns the active stake a worker must hold in each of its runs, in token wei."""
        return await self._read(int, "requiredStake")

    async def rotate_node(self, consent: NodeConsent) -> Receipt:
        """Replaces the caller's node key in all runs; the old key fails at once, earned reward
        stays.
        """
        return await self._write("rotateNode", consent)

    async def worker_by_id(self, worker_id: int) -> Address:
        """Returns the worker with a number, or the zero address."""
        return await self._read(Address, "workerById", worker_id)

    async def worker_of(self, account: Address) -> tuple[int, Address]:
        """Returns a worker's number and node key; zero for nobody."""
        return await self._pair(int, Address, "workerOf", account)

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

    async def dismiss(self, run_id: RunId, validator: Address) -> Receipt:
        """Takes the seat of a validator and its invitation. Only the owner. Its stake stays its
        own, to unbond when it likes: an owner starts nobody's clock again.
        """
        return await self._write("dismiss", run_id, validator)

    async def invite(self, run_id: RunId, validator: Address, invited: bool) -> Receipt:
        """Invites an account to validate, or takes an invitation back. Only the owner."""
        return await self._write("invite", run_id, validator, invited)

    async def is_invited(self, run_id: RunId, account: Address) -> bool:
        """Returns whether the run's owner invited an account."""
        return await self._read(bool, "isInvited", run_id, account)

    async def is_validator(self, run_id: RunId, account: Address) -> bool:
        """Returns whether `account` validates for the run."""
        return await self._read(bool, "isValidator", run_id, account)

    async def latest_version(self, run_id: RunId) -> PolicyVersion | None:
        """Returns the newest published version's number, if there is one."""
        return await self._find(PolicyVersion, "latestVersion", run_id)

    async def leave_seat(self, run_id: RunId) -> Receipt:
        """Gives up the caller's seat and unbonds all its stake in the run."""
        return await self._write("leaveSeat", run_id)

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

    async def proposed_change(self, run_id: RunId) -> tuple[RunTerms, int]:
        """Returns the announced terms and when they take effect; zero when none are."""
        return await self._pair(RunTerms, int, "proposedChange", run_id)

    async def publish_checkpoint(
        self, run_id: RunId, version: PolicyVersion, manifest_root: Hash32
    ) -> Receipt:
        """Publishes a policy version. Only the run's trainer; versions increase by at least one."""
        return await self._write("publishCheckpoint", run_id, version, manifest_root)

    async def required_validator_stake(self) -> int:
        """Returns the active stake a validator must hold in the run, in token wei."""
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

    async def run_count(self) -> int:
        """Returns the number of runs."""
        return await self._read(int, "runCount")

    async def set_submissions_paused(self, run_id: RunId, paused: bool) -> Receipt:
        """Pauses or resumes submissions. Only the owner."""
        return await self._write("setSubmissionsPaused", run_id, paused)

    async def slash_cooldown(self) -> int:
        """Returns the seconds after a pause of slashing before which there is no other."""
        return await self._read(int, "slashCooldown")

    async def slash_pause(self) -> int:
        """Returns the seconds that a pause of slashing lasts."""
        return await self._read(int, "slashPause")

    async def take_seat(self, run_id: RunId, terms: int, stake: int) -> Receipt:
        """Takes a seat that the caller is invited to, and adds `stake` of its tokens, which
        StakeVault must be allowed to take.
        """
        return await self._write("takeSeat", run_id, terms, stake)

    async def terms_of(self, run_id: RunId) -> tuple[RunTerms, int]:
        """Returns the run's present terms and their number. Reverts with RunUnknown."""
        return await self._pair(RunTerms, int, "termsOf", run_id)


class ContributionLedger(Contract):
    """The ledger of contributions: what was submitted, and what validators decided."""

    async def appeal_time(self) -> int:
        """Returns the seconds from when outcomes are due, or a batch is called withheld, in
        which its workers can call judges of the network; then it can be void.
        """
        return await self._read(int, "appealTime")

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
        a pause of slashing prolongs, if it met one. A claimant whom a jury confirmed is the
        reporter.
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

    async def show_outcomes(
        self, batch: Batch, records_hash: Hash32, records: bytes, signature: bytes
    ) -> Receipt:
        """Shows on chain what a validator of the run signed about a batch, for anybody to post a
        quorum's.
        """
        return await self._write("showOutcomes", batch, records_hash, records, signature)

    async def split_off(
        self, batch: Batch, work: LeasedWork, proof: Sequence[Hash32], sources: Sequence[str]
    ) -> Receipt:
        """Takes a worker's submission out of a batch that nobody judged, into one of its own,
        which judges of the network can be called for at once (`IDisputeCourt.summon`). Only the
        worker or its node, with a bond as above, within `appealTime` from when outcomes were due
        or the batch was called withheld.
        """
        return await self._write("splitOff", batch, work, proof, sources)

    async def stake_per_unit(self) -> int:
        """Returns the token wei of stake that must stand behind one unit in flight."""
        return await self._read(int, "stakePerUnit")

    async def standing_of(self, outcome: OutcomeProof) -> StandingOutcome:
        """Returns an outcome as it stands now."""
        return await self._read(StandingOutcome, "standingOf", outcome)

    async def submit_direct(self, work: LeasedWork, sources: Sequence[str]) -> Receipt:
        """Commits one submission without the orchestrator's help. Only the worker or its node,
        at most `TICKET_GRACE` after the ticket's deadline.
        """
        return await self._write("submitDirect", work, sources)

    async def unit_cap_of(self, run_id: RunId, worker: Address) -> int:
        """Returns the units that a worker's active stake in a run covers in flight."""
        return await self._read(int, "unitCapOf", run_id, worker)

    async def void_batch(self, batch: Batch) -> Receipt:
        """Gives back to the run what was set aside for a batch that nobody judged, once its
        workers had `appealTime` to call judges of the network. Anyone.
        """
        return await self._write("voidBatch", batch)


class DisputeCourt(Contract):
    """The court of the network: jurors of no run vote a verdict."""

    async def announce(self, announcement: Hash32) -> Receipt:
        """Announces a claim, so that nobody who reads it later can be first:
        `keccak256(abi.encode(claimant, leaf, ruling, salt))`. Holds for `ANNOUNCEMENT_BLOCKS`,
        so that nobody announces everything in advance.
        """
        return await self._write("announce", announcement)

    async def claim(
        self,
        outcome: OutcomeProof,
        submission: Submission,
        node_signature: bytes,
        ruling: int,
        salt: Hash32,
        sources: Sequence[str],
    ) -> Receipt:
        """Puts a bond, which must be approved, on a ruling about an outcome; the first claim
        opens its case. Within the challenge window, or until the jury's time to commit is over.
        """
        return await self._write(
            "claim", outcome, submission, node_signature, ruling, salt, sources
        )

    async def collect_fee(self, case_id: Hash32, juror: Address) -> Receipt:
        """Pays a juror of the prevailing ruling its fee, once. Anyone."""
        return await self._write("collectFee", case_id, juror)

    async def commit_vote(self, case_id: Hash32, commitment: Hash32) -> Receipt:
        """Commits to a vote: `keccak256(abi.encode(caseId, juror, ruling, resultHash, salt))`.
        Jurors, once.
        """
        return await self._write("commitVote", case_id, commitment)

    async def draw(self, case_id: Hash32) -> Receipt:
        """Draws the jury from the hash of the case's draw block. Anyone, in the first half of
        the time to commit.
        """
        return await self._write("draw", case_id)

    async def fine_absent_juror(self, case_id: Hash32, juror: Address) -> Receipt:
        """Fines a juror that did not reveal a vote before its case closed. Anyone."""
        return await self._write("fineAbsentJuror", case_id, juror)

    async def fine_signer(self, outcome: OutcomeProof, validator: Address) -> Receipt:
        """Fines a validator that signed an outcome which a jury overturned, once a batch.
        Anyone; a claimant whom the jury confirmed is the reporter.
        """
        return await self._write("fineSigner", outcome, validator)

    async def return_bond(self, batch: Batch) -> Receipt:
        """Returns such a bond once its batch is judged or void. Anyone."""
        return await self._write("returnBond", batch)

    async def reveal_vote(
        self, case_id: Hash32, ruling: int, result_hash: Hash32, salt: Hash32
    ) -> Receipt:
        """Reveals a vote once all jurors committed or the time to commit is over."""
        return await self._write("revealVote", case_id, ruling, result_hash, salt)

    async def settle(self, outcome: OutcomeProof) -> Receipt:
        """Closes a case about an outcome once all jurors revealed or the jury's time is over.
        Anyone.
        """
        return await self._write("settle", outcome)

    async def settle_summoned(self, batch: Batch, submission: Submission) -> Receipt:
        """As `settle`, for a batch that its run left unjudged. Its worker's bond pays the jurors
        unless they accept the work; then the run does.
        """
        return await self._write("settleSummoned", batch, submission)

    async def summon(self, batch: Batch, submission: Submission, sources: Sequence[str]) -> Receipt:
        """Calls judges of the network for a batch of one submission that its run left unjudged.
        Only its worker or the worker's node; takes a bond from the caller unless one was put up.
        """
        return await self._write("summon", batch, submission, sources)

    async def terms(self) -> CourtTerms:
        """Returns what the deployment fixed."""
        return await self._read(CourtTerms, "terms")


class FaultCourt(Contract):
    """Punishes faults that prove themselves."""

    async def prove_double_outcome(
        self,
        batch: Batch,
        first: Outcomes,
        first_signature: bytes,
        second: Outcomes,
        second_signature: bytes,
    ) -> Receipt:
        """Slashes all stake in a run of a validator that signed two different outcomes of one
        batch, and takes its seat.
        """
        return await self._write(
            "proveDoubleOutcome", batch, first, first_signature, second, second_signature
        )

    async def prove_double_submission(
        self,
        outcome: OutcomeProof,
        first: Submission,
        first_signature: bytes,
        second: Submission,
        second_signature: bytes,
    ) -> Receipt:
        """Slashes and bans from a run a worker whose node signed another submission for a slot
        that was judged. It costs what an exact fraud costs by the terms of the batch.
        """
        return await self._write(
            "proveDoubleSubmission", outcome, first, first_signature, second, second_signature
        )


class RewardEscrow(Contract):
    """Pays final accepted units, and nothing else."""

    async def claim(self, claims: Sequence[RewardClaim]) -> Receipt:
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

    async def recover(self, claims: Sequence[RewardClaim]) -> Receipt:
        """Frees the money set aside for final outcomes of one run that were not accepted.
        Anyone.
        """
        return await self._write("recover", claims)
