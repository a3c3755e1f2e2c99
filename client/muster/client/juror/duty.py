"""The juror, from a claim to a settled case. Its part of a rollout's way:

11. dispute    jurors of the network decide about a claimed or an unjudged outcome

  draw      once the draw block is mined: anybody, so every juror tries and one is first
  judge     a drawn juror checks the work again, with the checks that validators use
  commit    the vote is in the journal before its hash is on chain
  reveal    once all jurors committed, or the time to commit is over
  settle    once all revealed, or the jury's time is over: anybody again
  collect   its fee, where its ruling prevailed; and fines for whom the case finds at fault

What is next follows from the chain and the journal alone, so a juror that was killed between any
two steps goes on where it was. A juror that stays away is slashed: what cannot be had in time (no
file, no ticket, no policy) it votes as not seen. Judging goes on beside the other steps, one case
at a time: a slow one makes no other late.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from muster.chain import CaseView, Chain, ChainView, CourtTerms
from muster.client.cases import fees_due, penalties_of, ruling_words
from muster.client.journal import write_durably
from muster.client.juror.votes import Vote, VoteJournal
from muster.client.outage import SURVIVED
from muster.client.settling import OVERTAKEN, close_case, fine
from muster.protocol.encoding import canonical_json, hex0x, keccak
from muster.protocol.errors import ChainError, ContractRevert, MusterError
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import Ruling

logger = logging.getLogger(__name__)

PATIENCE = 0.75
"""Share of the time to commit during which a case is judged; then it is voted as not seen."""
RETRY_S = 2.0
"""Shortest time between two tries of one step of a case."""
_OVERTAKEN = OVERTAKEN | {
    "CourtJuryDrawn",
    "CourtPhaseOpen",
    "CourtPhaseOver",
    "CourtTooEarlyToDraw",
}
"""Refusals that say somebody else was first, or that the chain's clock is not where ours is."""


class Step(StrEnum):
    """What a juror does next about a case."""

    DRAW = "draw"
    """Draw the jury."""
    JUDGE = "judge"
    """Judge the work, as a juror."""
    COMMIT = "commit"
    """Commit to the vote."""
    REVEAL = "reveal"
    """Reveal the vote."""
    SETTLE = "settle"
    """Settle the case."""
    COLLECT = "collect"
    """Take its fee, and have those fined whom the case finds at fault."""


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
    """Return what a juror can do about an open case now; None when there is nothing."""
    commit_ends_at = case.opened_at + terms.commit_time
    if case.closed:
        return None
    if at.time >= commit_ends_at + terms.reveal_time or 0 < len(case.jurors) == len(case.votes):
        return Step.SETTLE
    if not case.jurors:
        draw_ends_at = case.opened_at + terms.commit_time // 2
        can_draw = at.block_number >= case.draw_block and at.time < draw_ends_at
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
    """What judges the work of a case."""

    async def judge(self, case: CaseView) -> tuple[Ruling, dict[str, Any]]:
        """Return what it finds, and what it recomputed as JSON values.

        Raises MusterError while something is missing that may still come.
        """


@dataclass(frozen=True, slots=True)
class JurorPlace:
    """Everything a juror works with."""

    juror: Address
    """The account on the bench."""
    chain: Chain
    """Signs with its key."""
    view: ChainView
    """The chain, kept current by someone else."""
    judge: Judge
    """What judges."""
    journal: VoteJournal
    """What was decided before."""
    results: Path
    """Folder of the documents about what was recomputed."""
    terms: CourtTerms
    """How long the phases of a case are."""
    poll_s: float
    """Pause between two looks."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, for pauses, and between two blocks."""
    salt: Callable[[int], bytes] = secrets.token_bytes
    """Random bytes."""


class JurorDuty:
    """One juror's part in the cases of the network."""

    def __init__(self, place: JurorPlace) -> None:
        self.place = place
        self._head: tuple[int, int, float] | None = None
        self._not_before: dict[tuple[Hash32, Step], float] = {}
        self._reported: set[tuple[Hash32, str]] = set()
        self._judging: asyncio.Task[None] | None = None
        self._over: set[Hash32] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                await self.serve()
                await asyncio.sleep(self.place.poll_s)
        finally:
            if self._judging is not None:
                self._judging.cancel()

    async def serve(self) -> None:
        """Do what can be done about every case now."""
        await self._clear_up()
        cases = [case for case in self.place.view.cases.values() if not case.closed]
        if not cases:
            return
        try:
            at = await self.moment()
        except ChainError as error:
            # The view's follower reports outages; a case can wait for the next look.
            logger.debug("no look at the chain", extra={"error": str(error)})
            return
        for case in cases:
            step = self.next_step(case, at)
            if step is Step.JUDGE:
                self._begin_to_judge(case, at)
            elif step is not None:
                await self._try(case, step, lambda case=case, step=step: self._do(case, step))  # type: ignore[misc]

    async def judged(self) -> None:
        """Wait for the case that is being judged, if one is."""
        if self._judging is not None:
            await self._judging

    def _begin_to_judge(self, case: CaseView, at: Moment) -> None:
        if self._judging is None or self._judging.done():
            self._judging = asyncio.create_task(
                self._try(case, Step.JUDGE, lambda: self.decide(case, at))
            )

    async def _clear_up(self) -> None:
        """Take the fees, and have those fined, of closed cases that it sat in."""
        for case in list(self.place.view.cases.values()):
            name, juror = case.case_id, self.place.juror
            if not case.closed or name in self._over or juror not in case.jurors:
                continue
            if juror not in fees_due(case) and not penalties_of(self.place.view, case):
                self._over.add(name)
            elif self.place.clock() >= self._not_before.get((name, Step.COLLECT), 0.0):
                await self._try(case, Step.COLLECT, lambda case=case: self.collect(case))  # type: ignore[misc]

    async def moment(self) -> Moment:
        """Return where the chain is; between blocks its clock goes on as ours does."""
        block, now = await self.place.chain.latest_block(), self.place.clock()
        if self._head is None or self._head[:2] != (block.number, block.timestamp):
            self._head = (block.number, block.timestamp, now)
        return Moment(block.number, block.timestamp + now - self._head[2])

    def next_step(self, case: CaseView, at: Moment) -> Step | None:
        """Return what to do about a case now, unless it was tried just before."""
        step = next_step(case, self.place.juror, self._vote(case), at, self.place.terms)
        if step is None or self.place.clock() < self._not_before.get((case.case_id, step), 0.0):
            return None
        return step

    def _vote(self, case: CaseView) -> Vote | None:
        return self.place.journal.find(case.case_id, self.place.juror, case.number)

    async def _do(self, case: CaseView, step: Step) -> None:
        do: dict[Step, Callable[[CaseView], Awaitable[None]]] = {
            Step.DRAW: self.draw,
            Step.COMMIT: self.commit,
            Step.REVEAL: self.reveal,
            Step.SETTLE: self.settle,
        }
        await do[step](case)

    async def _try(self, case: CaseView, step: Step, act: Callable[[], Awaitable[Any]]) -> None:
        """Do one step; what fails is tried again, and reported once."""
        # Also after success: until the event is read back, the step still looks undone.
        self._not_before[case.case_id, step] = self.place.clock() + RETRY_S
        try:
            await act()
        except ContractRevert as error:
            if error.name in _OVERTAKEN:
                logger.debug("step overtaken", extra=_about(case) | {"error": str(error)})
            else:
                self._report(case, f"{step} refused", error)
        except SURVIVED as error:
            self._report(case, f"{step} has to wait", error)

    def _report(self, case: CaseView, what: str, error: MusterError) -> None:
        level = logging.DEBUG if (case.case_id, what) in self._reported else logging.WARNING
        self._reported.add((case.case_id, what))
        logger.log(level, f"jury: {what}", extra=_about(case) | {"error": str(error)})

    # ---------------------------------------------------------------------- draw

    async def draw(self, case: CaseView) -> None:
        """Draw the jury, or a later block when the draw comes too late to read this one."""
        named = f"draw the jury of case {case.number} by block {case.draw_block}"
        await self.place.chain.once(named).court.draw(case.case_id)
        logger.info("jury drawn", extra=_about(case))

    # --------------------------------------------------------------------- judge

    async def decide(self, case: CaseView, at: Moment) -> Vote:
        """Judge a case's work and record the vote; raises while something is missing that may
        still come in time.
        """
        left_s = case.opened_at + PATIENCE * self.place.terms.commit_time - at.time
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                ruling, result = await self.place.judge.judge(case)
            number = ruling.number
        except TimeoutError:
            number, result = 0, {"unavailable": "it took too long"}
        except SURVIVED as error:
            if left_s > 0:
                raise
            number, result = 0, {"unavailable": str(error)}
        if number == 0:
            logger.warning("case not seen in time", extra=_about(case) | result)
        document = canonical_json(_described(case) | result | {"ruling": number})
        path = self.place.results / f"case-{case.number}-{case.case_id.hex()}.json"
        await asyncio.to_thread(write_durably, path, document)
        vote = Vote(
            case_id=case.case_id,
            number=case.number,
            juror=self.place.juror,
            ruling=number,
            result_hash=keccak(document),
            salt=Hash32(self.place.salt(32)),
        )
        recorded = await asyncio.to_thread(self.place.journal.record, vote)
        logger.info("case judged", extra=_about(case))
        return recorded

    # ---------------------------------------------------------------------- vote

    async def commit(self, case: CaseView) -> None:
        """Commit to the vote that the journal has."""
        vote = self._vote(case)
        assert vote is not None  # next_step
        named = f"commit to a vote in case {case.number}, {hex0x(case.case_id)}"
        await self.place.chain.once(named).court.commit_vote(case.case_id, vote.commitment())
        logger.info("vote committed", extra=_about(case))

    async def reveal(self, case: CaseView) -> None:
        """Reveal the vote; raises ChainError when what is on chain is not what the journal has."""
        vote = self._vote(case)
        if vote is None or vote.commitment() != case.commitments[self.place.juror]:
            raise ChainError(
                "the vote on chain is not in the journal and cannot be revealed",
                hint="was the state folder lost, or does another process vote with this key?",
            )
        named = f"reveal the vote in case {case.number}, {hex0x(case.case_id)}"
        await self.place.chain.once(named).court.reveal_vote(
            case.case_id, vote.ruling, vote.result_hash, vote.salt
        )
        logger.info("vote revealed", extra=_about(case) | {"ruling": ruling_words(vote.ruling)})

    # ----------------------------------------------------------------- afterwards

    async def settle(self, case: CaseView) -> None:
        """Settle the case."""
        named = f"settle case {case.number}, {hex0x(case.case_id)}"
        await close_case(self.place.chain.once(named), self.place.view, case)
        logger.info("case settled", extra=_about(case))

    async def collect(self, case: CaseView) -> None:
        """Take the fee that is due, and have those fined whom the case finds at fault."""
        chain, view, juror = self.place.chain, self.place.view, self.place.juror
        if juror in fees_due(case):
            named = f"collect the fee of case {case.number}, {hex0x(case.case_id)}"
            await chain.once(named).court.collect_fee(case.case_id, juror)
            logger.info("fee collected", extra=_about(case))
        for penalty in penalties_of(view, case):
            named = f"fine {penalty.account} for case {case.number}, {hex0x(case.case_id)}"
            await fine(chain.once(named), view, case, penalty)
            logger.info("fined", extra=_about(case) | {"account": penalty.account})


def _described(case: CaseView) -> dict[str, Any]:
    return {
        "case": hex0x(case.case_id),
        "number": case.number,
        "run_id": case.run_id,
        "batch_id": case.batch_id,
        "position": case.position,
        "recorded": case.recorded,
    }


def _about(case: CaseView) -> dict[str, Any]:
    return {"case": case.number, "batch_id": case.batch_id, "run_id": case.run_id}
