"""The juror, from a challenge to a closed case. Its part of a rollout's way:

11. dispute    a jury decides about a challenged verdict

  draw      once the draw block is mined: anybody, so every validator tries and one is first
  judge     a drawn juror checks the submission again, with the checks it uses for batches
  commit    the vote is in the journal before its hash is on chain
  reveal    once all jurors committed, or the time to commit is over
  close     once all revealed, or the jury's time is over: anybody again

What is next follows from the chain and the journal alone, so a juror that was killed between any
two steps goes on where it was. A juror that stays away is slashed: what cannot be judged in time
(no batch, no file, no policy) counts for the recorded verdict.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from muster.api import BatchEntry
from muster.chain import BatchView, CaseView, Chain, CourtTerms, OutcomeProof
from muster.client.case_proofs import position_in_batch, prove_outcome
from muster.client.facts import HistoryView
from muster.client.outage import SURVIVED
from muster.client.validator.checks import Claim, passes_proofs, passes_sampling
from muster.client.validator.evidence import EvidenceStore
from muster.client.validator.judging import Judgement, outcome_record, within_declared
from muster.client.validator.votes import Vote, VoteJournal
from muster.protocol.encoding import canonical_json, hex0x, keccak
from muster.protocol.errors import ChainError, ContractRevert, MusterError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.toploc import Calibration

logger = logging.getLogger(__name__)

PATIENCE = 0.75
"""Share of the time to commit during which what is missing for a judgement is waited for."""
RETRY_S = 2.0
"""Shortest time between two tries of one step of a case."""
_OVERTAKEN = frozenset(
    {
        "CourtJuryDrawn",
        "CourtNoOpenCase",
        "CourtPhaseOpen",
        "CourtPhaseOver",
        "CourtTooEarlyToDraw",
    }
)
"""Refusals that say somebody else was first, or that the chain's clock is not where ours is."""


class Step(StrEnum):
    """What a validator does next about a case."""

    DRAW = "draw"
    """Draw the jury."""
    JUDGE = "judge"
    """Judge the submission, as a juror."""
    COMMIT = "commit"
    """Commit to the vote."""
    REVEAL = "reveal"
    """Reveal the vote."""
    CLOSE = "close"
    """Close the case."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the chain is."""

    block_number: int
    """Its height."""
    time: float
    """Its clock, Unix seconds."""


def next_step(
    case: CaseView, juror: Address, vote: Vote | None, at: Moment, terms: CourtTerms
) -> Step | None:
    """Return what a validator can do about a case now; None when there is nothing."""
    commit_ends_at = case.opened_at + terms.commit_time
    if case.closed:
        return None
    if at.time >= commit_ends_at + terms.reveal_time or 0 < len(case.jurors) == len(case.votes):
        return Step.CLOSE
    if not case.jurors:
        can_draw = at.block_number >= case.draw_block and at.time < commit_ends_at
        return Step.DRAW if can_draw else None
    if juror not in case.jurors or juror in case.votes:
        return None
    if juror in case.commitments:
        has_ended = at.time >= commit_ends_at or len(case.commitments) == len(case.jurors)
        return Step.REVEAL if has_ended else None
    if at.time >= commit_ends_at:
        return None
    return Step.JUDGE if vote is None else Step.COMMIT


class Judge(Protocol):
    """What judges again; `ValidatorLoop` does."""

    async def contents(self, batch: BatchView) -> list[BatchEntry]:
        """Return the batch's submissions, which reproduce the root on chain."""

    async def reconsider(
        self, batch: BatchView, entries: list[BatchEntry], position: int
    ) -> tuple[Claim, Judgement, bytes | None]:
        """Return the judgement on one submission, as if nobody had judged it."""


@dataclass(frozen=True, slots=True)
class JuryPlace:
    """Everything a juror works with."""

    run_id: RunId
    """The run."""
    juror: Address
    """The validator's account."""
    chain: Chain
    """Signs with the validator's key."""
    view: HistoryView
    """The chain, kept current by someone else."""
    judge: Judge
    """What judges."""
    journal: VoteJournal
    """What was decided before."""
    evidence: EvidenceStore
    """Where results go."""
    calibration: Calibration
    """The limits of checks 6 and 7, for the results."""
    terms: CourtTerms
    """How long the phases of a case are."""
    poll_s: float
    """Pause between two looks."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, for pauses, and between two blocks."""
    salt: Callable[[int], bytes] = secrets.token_bytes
    """Random bytes."""


class JuryDuty:
    """One validator's part in the cases of one run."""

    def __init__(self, place: JuryPlace) -> None:
        self.place = place
        self._head: tuple[int, int, float] | None = None
        self._not_before: dict[tuple[Hash32, Step], float] = {}
        self._reported: set[tuple[Hash32, str]] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await self.serve()
            await asyncio.sleep(self.place.poll_s)

    async def serve(self) -> None:
        """Do what can be done about every open case now."""
        cases = self.open_cases()
        if not cases:
            return
        try:
            at = await self.moment()
        except ChainError as error:
            # The view's follower reports outages; a case can wait for the next look.
            logger.debug("no look at the chain", extra={"error": str(error)})
            return
        # Judging can take long, and must not make another case's reveal late.
        steps = [(case, self.next_step(case, at)) for case in cases]
        for case, step in sorted(steps, key=lambda item: item[1] is Step.JUDGE):
            if step is not None:
                await self._try(case, step, at)
            if step is Step.JUDGE:
                return

    def open_cases(self) -> list[CaseView]:
        """Return the run's open cases, oldest first."""
        batches, run_id = self.place.view.batches, self.place.run_id
        return [
            case
            for case in self.place.view.cases.values()
            if not case.closed
            and case.batch_id in batches
            and batches[case.batch_id].run_id == run_id
        ]

    async def moment(self) -> Moment:
        """Return where the chain is; between blocks its clock goes on as ours does."""
        block, now = await self.place.chain.latest_block(), self.place.clock()
        if self._head is None or self._head[:2] != (block.number, block.timestamp):
            self._head = (block.number, block.timestamp, now)
        return Moment(block.number, block.timestamp + now - self._head[2])

    def next_step(self, case: CaseView, at: Moment) -> Step | None:
        """Return what to do about a case now, unless it was tried just before."""
        step = next_step(case, self.place.juror, self._vote(case), at, self.place.terms)
        if step is None or self.place.clock() < self._not_before.get((case.leaf, step), 0.0):
            return None
        return step

    def _vote(self, case: CaseView) -> Vote | None:
        return self.place.journal.find(case.leaf, self.place.juror, case.claimed_verdict)

    async def _try(self, case: CaseView, step: Step, at: Moment) -> None:
        """Do one step; what fails is tried again, and reported once."""
        do: dict[Step, Callable[[CaseView], Awaitable[None]]] = {
            Step.DRAW: self.draw,
            Step.COMMIT: self.commit,
            Step.REVEAL: self.reveal,
            Step.CLOSE: self.close,
        }
        # Also after success: until the event is read back, the step still looks undone.
        self._not_before[case.leaf, step] = self.place.clock() + RETRY_S
        try:
            await (self.decide(case, at) if step is Step.JUDGE else do[step](case))
        except ContractRevert as error:
            if error.name in _OVERTAKEN:
                logger.debug("step overtaken", extra=_about(case) | {"error": str(error)})
            else:
                self._report(case, f"{step} refused", error)
        except SURVIVED as error:
            self._report(case, f"{step} has to wait", error)

    def _report(self, case: CaseView, what: str, error: MusterError) -> None:
        level = logging.DEBUG if (case.leaf, what) in self._reported else logging.WARNING
        self._reported.add((case.leaf, what))
        logger.log(level, f"jury: {what}", extra=_about(case) | {"error": str(error)})

    # ---------------------------------------------------------------------- draw

    async def draw(self, case: CaseView) -> None:
        """Draw the jury, or a later block when the draw comes too late to read this one."""
        proof = await self._proof(case)
        named = f"draw the jury of {hex0x(case.leaf)} by block {case.draw_block}"
        await self.place.chain.once(named).court.draw_jury(proof)
        logger.info("jury drawn", extra=_about(case))

    async def _proof(self, case: CaseView) -> OutcomeProof:
        batch = self.place.view.batches[case.batch_id]
        submissions = []
        if batch.records is None:
            submissions = [entry.submission for entry in await self.place.judge.contents(batch)]
        position = position_in_batch(batch, case.leaf, submissions)
        return prove_outcome(self.place.view, batch, position, submissions)

    # --------------------------------------------------------------------- judge

    async def decide(self, case: CaseView, at: Moment) -> Vote:
        """Judge a case's submission again and record the vote; raises while something is missing
        that may still come in time.
        """
        try:
            name, result, overturn = await self._judge(case)
        except SURVIVED as error:
            wait_until = case.opened_at + PATIENCE * self.place.terms.commit_time
            if at.time < wait_until:
                raise
            logger.warning("case not judged in time", extra=_about(case) | {"error": str(error)})
            name, result, overturn = case.leaf, {"unavailable": str(error)}, False
        document = canonical_json(_described(case) | result | {"overturn": overturn})
        await asyncio.to_thread(self.place.evidence.write_result, name, case.leaf, document)
        vote = Vote(
            leaf=case.leaf,
            juror=self.place.juror,
            claimed=case.claimed_verdict,
            overturn=overturn,
            result_hash=keccak(document),
            salt=Hash32(self.place.salt(32)),
        )
        recorded = await asyncio.to_thread(self.place.journal.record, vote)
        logger.info("case judged", extra=_about(case))
        return recorded

    async def _judge(self, case: CaseView) -> tuple[Hash32, dict[str, Any], bool]:
        """Return the file's hash, what was recomputed, and whether the challenger is right."""
        batch = self.place.view.batches[case.batch_id]
        entries = await self.place.judge.contents(batch)
        submissions = [entry.submission for entry in entries]
        position = position_in_batch(batch, case.leaf, submissions)
        claim, judgement, _ = await self.place.judge.reconsider(batch, entries, position)
        record = outcome_record(claim, judgement)
        if batch.records and batch.records[position].reason is Reason.BATCH_MISDECLARED:
            record = await self._among_all(batch, entries, position)
        result = describe_result(claim, judgement, record, self.place.calibration)
        return claim.submission.file_hash, result, is_overturned(case, record)

    async def _among_all(
        self, batch: BatchView, entries: list[BatchEntry], position: int
    ) -> OutcomeRecord:
        """Return the outcome that follows from the whole batch: it was refused as a whole."""
        records = []
        for each in range(len(entries)):
            claim, judgement, _ = await self.place.judge.reconsider(batch, entries, each)
            records.append(outcome_record(claim, judgement))
        return within_declared(records, batch.units)[position]

    # ---------------------------------------------------------------------- vote

    async def commit(self, case: CaseView) -> None:
        """Commit to the vote that the journal has."""
        vote = self._vote(case)
        assert vote is not None  # next_step
        named = f"commit to a vote on {hex0x(case.leaf)}"
        await self.place.chain.once(named).court.commit_vote(case.leaf, vote.commitment())
        logger.info("vote committed", extra=_about(case))

    async def reveal(self, case: CaseView) -> None:
        """Reveal the vote; raises ChainError when what is on chain is not what the journal has."""
        vote = self._vote(case)
        if vote is None or vote.commitment() != case.commitments[self.place.juror]:
            raise ChainError(
                "the vote on chain is not in the journal and cannot be revealed",
                hint="was the state folder lost, or does another process vote with this key?",
            )
        named = f"reveal the vote on {hex0x(case.leaf)}"
        await self.place.chain.once(named).court.reveal_vote(
            case.leaf, vote.overturn, vote.result_hash, vote.salt
        )
        logger.info("vote revealed", extra=_about(case) | {"overturn": vote.overturn})

    # --------------------------------------------------------------------- close

    async def close(self, case: CaseView) -> None:
        """Close the case."""
        proof = await self._proof(case)
        await self.place.chain.once(f"close the case of {hex0x(case.leaf)}").court.close(proof)
        logger.info("case closed", extra=_about(case))


def is_overturned(case: CaseView, record: OutcomeRecord) -> bool:
    """Return whether a juror votes for the challenger: its own verdict is the claimed one.

    That a file is missing now says nothing about when it was judged: it counts for the record.
    """
    is_missing = record.reason is Reason.FILE_UNAVAILABLE
    return not is_missing and record.verdict == case.claimed_verdict


def describe_result(
    claim: Claim, judgement: Judgement, record: OutcomeRecord, calibration: Calibration
) -> dict[str, Any]:
    """Return what a juror recomputed, as JSON values; no measurement that machines differ in."""
    policy = claim.terms.policies.get(claim.submission.policy_version)
    return {
        "file_hash": hex0x(claim.submission.file_hash),
        "verdict": record.verdict.name,
        "reason": record.reason.name,
        "detail": judgement.finding.detail if judgement.finding else "",
        "units": record.units,
        "record": hex0x(record.to_bytes()),
        "policy_root": hex0x(policy.root) if policy else None,
        "calibration_hash": hex0x(calibration.hash()),
        "samples": [
            {
                "proofs_pass": passes_proofs(replay, calibration),
                "sampling_passes": passes_sampling(replay, calibration),
            }
            for replay in judgement.replays
        ],
    }


def _described(case: CaseView) -> dict[str, Any]:
    return {
        "case": hex0x(case.leaf),
        "batch_id": case.batch_id,
        "recorded_verdict": Verdict(case.recorded_verdict).name,
        "claimed_verdict": Verdict(case.claimed_verdict).name,
    }


def _about(case: CaseView) -> dict[str, Any]:
    return {"case": hex0x(case.leaf), "batch_id": case.batch_id}
