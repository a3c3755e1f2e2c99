"""The nine contracts: a declaration of each function that Muster calls.

Made by `python contracts/script/export_artifacts.py` from the contracts; not to be edited. Views
return Python types; the others send a transaction and return its receipt, or raise ContractRevert,
and need a chain that was connected with a key. `Contract` calls what is declared here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from muster.chain.abi import Contract, Receipt
from muster.chain.structs import (
    Batch,
    CommittedWork,
    CourtTerms,
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

    async def approve(self, spender: Address, value: int) -> Receipt:
        """Sets a `value` amount of tokens as the allowance of `spender` over the caller's
        tokens.
        """

    async def balance_of(self, account: Address) -> int:
        """Returns the value of tokens owned by `account`."""

    async def faucet(self, to: Address, amount: int) -> Receipt:
        """Mints test tokens to `to`. Only on chain id 31337."""

    async def nonces(self, owner: Address) -> int:
        """Returns the current nonce for `owner`."""

    async def total_supply(self) -> int:
        """Returns the value of tokens in existence."""


class StakeVault(Contract):
    """Holds all stake, and is the only contract that does."""

    async def account_of(self, run_id: RunId, owner: Address) -> StakeAccount:
        """Returns the stake of `owner` in a run."""

    async def active_stake(self, run_id: RunId, owner: Address) -> int:
        """Returns the active stake of `owner` in a run, in token wei."""

    async def deposit(self, run_id: RunId, owner: Address, amount: int) -> Receipt:
        """Adds `amount` of the caller's tokens to the active stake of `owner` in a run."""

    async def insurance(self) -> Address:
        """The account that receives the insured share of slashed stake."""

    async def insurance_ppm(self) -> int:
        """Millionths of slashed stake that go to `insurance`."""

    async def reporter_cap(self) -> int:
        """The most a reporter gets for one offence, in token wei."""

    async def reporter_ppm(self) -> int:
        """Millionths of slashed stake that go to a reporter whom a jury confirmed."""

    async def request_unbond(self, run_id: RunId, amount: int) -> Receipt:
        """Starts to unbond `amount` of the caller's active stake in a run."""

    async def unbonding_period(self) -> int:
        """Returns the seconds between an unbond request and its withdrawal."""

    async def withdraw(self, run_id: RunId) -> Receipt:
        """Pays out the caller's unbonded stake in a run once the unbonding period is over.
        Nothing can hold it longer.
        """


class JuryPool(Contract):
    """The network's bench: who offered itself to judge for any run."""

    async def is_juror(self, account: Address) -> bool:
        """Returns whether an account may be drawn for a case that opens now or later."""

    async def join(self, stake: int) -> Receipt:
        """Offers the caller as a juror, and adds `stake` of its tokens, which StakeVault must be
        allowed to take.
        """

    async def leave(self) -> Receipt:
        """Ends the caller's offer and unbonds all its stake. Cases that are open may still draw
        it, and it must vote.
        """

    async def required_stake(self) -> int:
        """Returns the active stake a juror must hold, in token wei."""

    async def shorten(self, most: int) -> Receipt:
        """Makes the bench shorter: gives up the places at its end that nobody holds and no open
        case draws, then moves jurors from its end into places that were left. Looks at `most`
        places for each, from the end. Anyone.
        """


class WorkerRegistry(Contract):
    """Who works for which run, and with which key."""

    async def come_back(self, run_id: RunId, terms: int) -> Receipt:
        """Makes the caller active in a run again, from jail or from leaving, if its stake
        suffices.
        """

    async def exit(self, run_id: RunId) -> Receipt:
        """Starts to leave a run: no more work, all stake in it unbonds."""

    async def join(
        self, run_id: RunId, terms: int, stake: int, consent: NodeConsent, permit: Permit
    ) -> Receipt:
        """Makes the caller a worker of a run in one transaction: takes `stake` from it, and
        binds its node key if it has none or names another one.
        """

    async def member_of(self, run_id: RunId, worker: Address) -> Member:
        """Returns a worker as it stands in a run."""

    async def nonces(self, worker: Address) -> int:
        """Returns the next nonce a node must consent to for `worker`."""

    async def required_stake(self) -> int:
        """Returns the active stake a worker must hold in each of its runs, in token wei."""

    async def rotate_node(self, consent: NodeConsent) -> Receipt:
        """Replaces the caller's node key in all runs: the old key fails for all that is
        committed later, and answers for what was committed before. Earned reward stays.
        """

    async def worker_by_id(self, worker_id: int) -> Address:
        """Returns the worker with a number, or the zero address."""

    async def worker_of(self, account: Address) -> tuple[int, Address]:
        """Returns a worker's number and node key; zero for nobody."""

    async def worker_of_node(self, node: Address) -> Address:
        """Returns the worker that a node key serves now, or the zero address."""


class RunRegistry(Contract):
    """Runs: who trains what, with which rules, and every published policy."""

    async def apply_change(self, run_id: RunId) -> Receipt:
        """Puts announced terms into effect once they are due. Anyone."""

    async def cancel_change(self, run_id: RunId) -> Receipt:
        """Withdraws an announcement. Only the owner."""

    async def change_delay(self) -> int:
        """Returns the seconds between announcing terms and their effect."""

    async def checkpoint_of(self, run_id: RunId, version: PolicyVersion) -> PolicyCheckpoint:
        """Returns a version; its root is zero when it was never published."""

    async def close_run(self, run_id: RunId) -> Receipt:
        """Ends a run for good: nothing more is committed or published. Only the owner."""

    async def config_of(self, run_id: RunId) -> RunConfig:
        """Returns a run's configuration; its validators are those seated now."""

    async def create_run(
        self, config: RunConfig
    ) -> Annotated[tuple[RunId, Receipt], "RunCreated", "run_id"]:
        """Creates a run owned by the caller. Run ids count from 1."""

    async def dismiss(self, run_id: RunId, validator: Address) -> Receipt:
        """Takes the invitation of an account, and the seat if it has one. Only the owner. Its
        stake stays its own, to unbond when it likes: an owner starts nobody's clock again.
        """

    async def invite(self, run_id: RunId, validator: Address, invited: bool) -> Receipt:
        """Invites an account to validate, or takes an invitation back. Only the owner."""

    async def is_invited(self, run_id: RunId, account: Address) -> bool:
        """Returns whether the run's owner invited an account."""

    async def is_validator(self, run_id: RunId, account: Address) -> bool:
        """Returns whether `account` validates for the run."""

    async def latest_version(self, run_id: RunId) -> PolicyVersion | None:
        """Returns the newest published version's number, if there is one."""

    async def leave_seat(self, run_id: RunId) -> Receipt:
        """Gives up the caller's seat and unbonds all its stake in the run."""

    async def pause_slashing(
        self, run_id: RunId, cause: PauseCause, reason: int, evidence_hash: Hash32
    ) -> Receipt:
        """Stops the fraud executions of a run for `slashPause` seconds. A seated validator, the
        run's orchestrator or its owner; not while a pause lasts, nor for `slashCooldown` after
        it.
        """

    async def propose_change(self, run_id: RunId, terms: RunTerms) -> Receipt:
        """Announces other terms, which anyone can apply `changeDelay` later. Only the owner."""

    async def proposed_change(self, run_id: RunId) -> tuple[RunTerms, int]:
        """Returns the announced terms and when they take effect; zero when none are."""

    async def publish_checkpoint(
        self, run_id: RunId, version: PolicyVersion, manifest_root: Hash32
    ) -> Receipt:
        """Publishes a policy version. Only the run's trainer; versions increase by at least one,
        and at most 1024.
        """

    async def required_validator_stake(self) -> int:
        """Returns the active stake a validator must hold in the run, in token wei."""

    async def rotate_orchestrator(
        self, run_id: RunId, old_orchestrator: Address, new_orchestrator: Address
    ) -> Receipt:
        """Replaces the orchestrator's key, naming the old one. Only the owner."""

    async def rotate_trainer(
        self, run_id: RunId, old_trainer: Address, new_trainer: Address
    ) -> Receipt:
        """Replaces the trainer's key, naming the old one. Only the owner."""

    async def run_count(self) -> int:
        """Returns the number of runs."""

    async def set_submissions_paused(self, run_id: RunId, paused: bool) -> Receipt:
        """Pauses or resumes submissions. Only the owner."""

    async def slash_cooldown(self) -> int:
        """Returns the seconds after a pause of slashing before which there is no other."""

    async def slash_pause(self) -> int:
        """Returns the seconds that a pause of slashing lasts."""

    async def take_seat(self, run_id: RunId, terms: int, stake: int) -> Receipt:
        """Takes a seat that the caller is invited to, and adds `stake` of its tokens, which
        StakeVault must be allowed to take.
        """

    async def terms_of(self, run_id: RunId) -> tuple[RunTerms, int]:
        """Returns the run's present terms and their number. Reverts with RunUnknown."""


class ContributionLedger(Contract):
    """The ledger of contributions: what was submitted, and what validators decided."""

    async def appeal_time(self) -> int:
        """Returns the seconds from when outcomes are due, or a batch is called withheld, in
        which its workers can call judges of the network; then it can be void.
        """

    async def batch_count(self) -> int:
        """Returns the number of batches."""

    async def challenge_window(self) -> int:
        """Returns the seconds after posting during which an outcome may be challenged."""

    async def commit_batch(
        self, run_id: RunId, root: Hash32, count: int, units: int
    ) -> Annotated[tuple[int, Receipt], "BatchCommitted", "batch_id"]:
        """Commits a batch of submissions by root, and sets aside what it can cost. Only the
        run's orchestrator.
        """

    async def execute_fraud(self, outcome: OutcomeProof, work: CommittedWork) -> Receipt:
        """Slashes the worker of a fraud outcome at once, and jails or bans it; the stake waits
        in escrow.
        """

    async def finalise_fraud(self, outcome: OutcomeProof) -> Receipt:
        """Releases the escrow of an executed fraud whose challenge window is over: the one that
        a pause of slashing prolongs, if it met one. A claimant whom a jury confirmed is the
        reporter.
        """

    async def outcome_deadline(self) -> int:
        """Returns the seconds after the commitment by which outcomes are due."""

    async def post_outcomes(self, batch: Batch, records: bytes, signatures: bytes) -> Receipt:
        """Records the outcome of every submission of a batch, accepts and rejects alike.
        Signatures are joined, and ascend by signer. The run gets back at once what was set aside
        for units that the records do not hold.
        """

    async def show_outcomes(
        self, batch: Batch, records_hash: Hash32, records: bytes, signature: bytes
    ) -> Receipt:
        """Shows on chain what a validator of the run signed about a batch, for anybody to post a
        quorum's.
        """

    async def split_off(
        self,
        batch: Batch,
        work: LeasedWork,
        position: int,
        proof: Sequence[Hash32],
        sources: Sequence[str],
    ) -> Receipt:
        """Takes a worker's submission out of a batch that nobody judged, into one of its own,
        which judges of the network can be called for at once (`IDisputeCourt.summon`). Only the
        worker or its node, with a bond as above, within `appealTime` from when outcomes were due
        or the batch was called withheld.
        """

    async def stake_per_unit(self) -> int:
        """Returns the token wei of stake that must stand behind one unit in flight."""

    async def standing_of(self, outcome: OutcomeProof) -> StandingOutcome:
        """Returns an outcome as it stands now."""

    async def submit_direct(self, work: LeasedWork, sources: Sequence[str]) -> Receipt:
        """Commits one submission without the orchestrator's help. Only the worker or its node,
        at most `TICKET_GRACE` after the ticket's deadline.
        """

    async def unit_cap_of(self, run_id: RunId, worker: Address) -> int:
        """Returns the units that a worker's active stake in a run covers in flight."""

    async def void_batch(self, batch: Batch) -> Receipt:
        """Gives back to the run what was set aside for a batch that nobody judged, once its
        workers had `appealTime` to call judges of the network. Anyone.
        """


class DisputeCourt(Contract):
    """The court of the network: jurors of no run vote a verdict."""

    async def announce(self, announcement: Hash32) -> Receipt:
        """Announces a claim, so that nobody who reads it later can be first:
        `keccak256(abi.encode(claimant, leaf, ruling, salt))`. Holds for `ANNOUNCEMENT_BLOCKS`,
        so that nobody announces everything in advance.
        """

    async def claim(
        self,
        outcome: OutcomeProof,
        work: CommittedWork,
        ruling: int,
        salt: Hash32,
        sources: Sequence[str],
    ) -> Receipt:
        """Puts a bond, which must be approved, on a ruling about an outcome; the first claim
        opens its case. Within the challenge window, or until the jury's time to commit is over.
        """

    async def collect_fee(self, case_id: Hash32, juror: Address) -> Receipt:
        """Pays a juror of the prevailing ruling its fee, once. Anyone."""

    async def commit_vote(self, case_id: Hash32, commitment: Hash32) -> Receipt:
        """Commits to a vote: `keccak256(abi.encode(caseId, juror, ruling, resultHash, salt))`.
        Jurors, once.
        """

    async def draw(self, case_id: Hash32) -> Receipt:
        """Draws the jury from the hash of the case's draw block. Anyone, in the first half of
        the time to commit.
        """

    async def fine_absent_juror(self, case_id: Hash32, juror: Address) -> Receipt:
        """Fines a juror that did not reveal a vote before its case closed. Anyone."""

    async def fine_signer(self, outcome: OutcomeProof, validator: Address) -> Receipt:
        """Fines a validator that signed an outcome which a jury overturned, once a batch.
        Anyone; a claimant whom the jury confirmed is the reporter.
        """

    async def prove(self, outcome: OutcomeProof, work: CommittedWork) -> Receipt:
        """Proves that the batch holds the submission that opened a closed case without a proof,
        so that its signers can be fined and a fraud can be executed. Anyone, at any time: what
        the jury was shown first is what the batch holds.
        """

    async def return_bond(self, batch: Batch) -> Receipt:
        """Returns such a bond once its batch is judged or void. Anyone."""

    async def reveal_vote(
        self, case_id: Hash32, ruling: int, result_hash: Hash32, salt: Hash32
    ) -> Receipt:
        """Reveals a vote once all jurors committed or the time to commit is over."""

    async def settle(self, outcome: OutcomeProof) -> Receipt:
        """Closes a case about an outcome once all jurors revealed or the jury's time is over.
        Anyone.
        """

    async def settle_summoned(self, batch: Batch, submission: Submission) -> Receipt:
        """As `settle`, for a batch that its run left unjudged. Its worker's bond pays the jurors
        unless they accept the work; then the run does, and the bond what the run does not have.
        """

    async def summon(self, batch: Batch, submission: Submission, sources: Sequence[str]) -> Receipt:
        """Calls judges of the network for a batch of one submission that its run left unjudged.
        Only its worker or the worker's node; takes a bond from the caller unless one was put up.
        """

    async def terms(self) -> CourtTerms:
        """Returns what the deployment fixed."""


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

    async def prove_double_submission(
        self,
        outcome: OutcomeProof,
        work: CommittedWork,
        second: Submission,
        second_signature: bytes,
    ) -> Receipt:
        """Slashes and bans from a run a worker whose node signed another submission for a slot
        that was judged. It costs what an exact fraud costs by the terms of the batch, and
        nothing while the worker is banned from the run already.
        """

    async def prove_misrecord(
        self, outcome: OutcomeProof, work: CommittedWork, validator: Address
    ) -> Receipt:
        """Slashes all stake in a run of a validator that signed a record which names another
        worker, slot, policy, file or count of rollouts than the submission at its position, or
        more units; and takes its seat. Once a batch.
        """


class RewardEscrow(Contract):
    """Pays final accepted units, and nothing else."""

    async def claim(self, claims: Sequence[RewardClaim]) -> Receipt:
        """Pays one worker for many final accepted outcomes of one run. Anyone; the worker is
        paid.
        """

    async def claim_period(self) -> int:
        """Returns the seconds that workers of a closed run have to claim."""

    async def fund(self, run_id: RunId, amount: int) -> Receipt:
        """Adds the caller's tokens, which must be approved, to a run's funds. Anyone."""

    async def is_paid(self, run_id: RunId, worker: Address, step: Step, index: int) -> bool:
        """Returns whether a slot was paid."""

    async def reclaim(self, run_id: RunId) -> Receipt:
        """Returns a closed run's money to its owner: what is free at once, all of it
        `claimPeriod` later.
        """

    async def recover(self, claims: Sequence[RewardClaim]) -> Receipt:
        """Frees the money set aside for final outcomes of one run that were not accepted.
        Anyone.
        """
