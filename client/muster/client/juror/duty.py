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

A vote is drawn up once and never changed: another decision on the same case would leave a
commitment that nobody can reveal, which costs stake. How far a vote has come is on chain.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from muster.chain import CaseView, Chain, ChainView, CourtTerms, EventReader, apply_poll, follow
from muster.client.chain_facts import ChainClock, HistoryView
from muster.client.connections import TRANSACTIONS, EngineFactory, load_engine, make_engine
from muster.client.disputes.cases import fees_due, penalties_of, ruling_words
from muster.client.disputes.claims import OVERTAKEN, close_case, fine
from muster.client.journal import Journal, write_durably
from muster.client.juror.judging import CaseJudge
from muster.client.outage import SURVIVED, Steps
from muster.client.preflight import warn_of_gas
from muster.client.settings import JurorSettings
from muster.client.stake import FAUCET_CHAIN_ID
from muster.client.validator.decoding import FileDecoder
from muster.lifecycle import run_beside
from muster.protocol.encoding import canonical_json, hex0x, keccak
from muster.protocol.errors import ChainError, ConfigError
from muster.protocol.ids import Address, Hash32, to_address, to_hash32
from muster.protocol.jury import Ruling, vote_commitment
from muster.wallet import Wallet

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


# The vote


@dataclass(frozen=True, slots=True)
class Vote:
    """A juror's decision on a case, with what hides it until it is revealed."""

    case_id: Hash32
    number: int
    """Its number: a reorganised chain may have another case of that name."""
    juror: Address
    """Who votes."""
    ruling: int
    """What it found, as a number; 0 when nobody showed it the work."""
    result_hash: Hash32
    """Keccak-256 of the document about what was recomputed."""
    salt: Hash32
    """Keeps others from finding the vote by trying."""

    def __repr__(self) -> str:
        return f"Vote(0x{self.case_id.hex()}, juror={self.juror})"

    def commitment(self) -> Hash32:
        """Return what goes on chain before the vote does."""
        ruling = Ruling.of(self.ruling)
        return vote_commitment(self.case_id, self.juror, ruling, self.result_hash, self.salt)


class VoteJournal(Journal):
    """Remembers every vote before its commitment leaves."""

    def __init__(self, folder: Path) -> None:
        self._votes: dict[tuple[Hash32, Address, int], Vote] = {}
        super().__init__(folder / "votes.jsonl")

    def take_in(self, entry: dict[str, Any]) -> None:
        """Remember a vote."""
        vote = Vote(
            case_id=to_hash32(entry["case"]),
            number=int(entry["number"]),
            juror=to_address(entry["juror"]),
            ruling=int(entry["ruling"]),
            result_hash=to_hash32(entry["result_hash"]),
            salt=to_hash32(entry["salt"]),
        )
        self._votes[vote.case_id, vote.juror, vote.number] = vote

    def record(self, vote: Vote) -> Vote:
        """Return what may be voted: this, now durable, or what was recorded before."""
        if earlier := self.find(vote.case_id, vote.juror, vote.number):
            return earlier
        self.append(
            {
                "case": hex0x(vote.case_id),
                "number": vote.number,
                "juror": vote.juror,
                "ruling": vote.ruling,
                "result_hash": hex0x(vote.result_hash),
                "salt": hex0x(vote.salt),
            }
        )
        self._votes[vote.case_id, vote.juror, vote.number] = vote
        return vote

    def find(self, case_id: Hash32, juror: Address, number: int) -> Vote | None:
        """Return the vote that was recorded for a case."""
        return self._votes.get((case_id, juror, number))


# The steps


class DutyStep(StrEnum):
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
) -> DutyStep | None:
    """Return what a juror can do about an open case now; None when there is nothing."""
    commit_ends_at = case.opened_at + terms.commit_time
    if case.closed:
        return None
    if at.time >= commit_ends_at + terms.reveal_time or 0 < len(case.jurors) == len(case.votes):
        return DutyStep.SETTLE
    if not case.jurors:
        draw_ends_at = case.opened_at + terms.commit_time // 2
        can_draw = at.block_number >= case.draw_block and at.time < draw_ends_at
        return DutyStep.DRAW if can_draw else None
    if juror not in case.jurors or juror in case.votes:
        return None
    if juror in case.commitments:
        has_ended = at.time >= commit_ends_at or len(case.commitments) == len(case.jurors)
        return DutyStep.REVEAL if has_ended else None
    if at.time >= commit_ends_at:
        return None
    return DutyStep.JUDGE if vote is None else DutyStep.COMMIT


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
        self._time = ChainClock(place.chain, place.clock)
        self._steps = Steps(place.clock, retry_s=RETRY_S, overtaken=_OVERTAKEN)
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
        acts = {
            DutyStep.DRAW: self.draw,
            DutyStep.COMMIT: self.commit,
            DutyStep.REVEAL: self.reveal,
            DutyStep.SETTLE: self.settle,
        }
        for case in cases:
            step = next_step(case, self.place.juror, self._vote(case), at, self.place.terms)
            if step is DutyStep.JUDGE:
                self._begin_to_judge(case, at)
            elif step is not None:
                await self._try(case, step, partial(acts[step], case))

    async def judged(self) -> None:
        """Wait for the case that is being judged, if one is."""
        if self._judging is not None:
            await self._judging

    def _begin_to_judge(self, case: CaseView, at: Moment) -> None:
        is_busy = self._judging is not None and not self._judging.done()
        if not is_busy and self._steps.is_due(case.case_id, _named(DutyStep.JUDGE)):
            self._judging = asyncio.create_task(
                self._try(case, DutyStep.JUDGE, partial(self.decide, case, at))
            )

    async def _clear_up(self) -> None:
        """Take the fees, and have those fined, of closed cases that it sat in."""
        for case in list(self.place.view.cases.values()):
            name, juror = case.case_id, self.place.juror
            if not case.closed or name in self._over or juror not in case.jurors:
                continue
            if juror not in fees_due(case) and not penalties_of(self.place.view, case):
                self._over.add(name)
            else:
                await self._try(case, DutyStep.COLLECT, partial(self.collect, case))

    async def moment(self) -> Moment:
        """Return where the chain is; between blocks its clock goes on as ours does."""
        return Moment(*await self._time.head())

    def _vote(self, case: CaseView) -> Vote | None:
        return self.place.journal.find(case.case_id, self.place.juror, case.number)

    async def _try(self, case: CaseView, step: DutyStep, act: Callable[[], Awaitable[Any]]) -> None:
        await self._steps.take(case.case_id, _named(step), act, **_about(case))

    # draw

    async def draw(self, case: CaseView) -> None:
        """Draw the jury, or a later block when the draw comes too late to read this one."""
        named = f"draw the jury of case {case.number} by block {case.draw_block}"
        await self.place.chain.once(named).court.draw(case.case_id)
        logger.info("jury drawn", extra=_about(case))

    # judge

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
        except (*SURVIVED, ConfigError) as error:
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

    # vote

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

    # afterwards

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


def _named(step: DutyStep) -> str:
    return f"jury: {step}"


def _about(case: CaseView) -> dict[str, Any]:
    return {"case": case.number, "batch_id": case.batch_id, "run_id": case.run_id}


# The process


async def run_juror(
    settings: JurorSettings, account: Wallet, *, engine_factory: EngineFactory = make_engine
) -> None:
    """Sit in cases until cancelled; raises MusterError when this account is not on the bench."""
    # The first is held by one process at a time, and the folder with it.
    with VoteJournal(settings.state_dir) as votes:
        async with (
            await Chain.connect(
                settings.rpc,
                settings.deployments,
                key=account.key,
                journal=settings.state_dir / TRANSACTIONS,
            ) as chain,
            FileDecoder() as decoder,
        ):
            view = HistoryView()
            reader = EventReader(chain, confirmations=settings.confirmations)
            apply_poll(view, await reader.poll())
            require_place(view, account.address)
            await warn_of_gas(chain, account.address, "vote", "to vote: absent jurors are slashed")
            judge = CaseJudge(
                view=view,
                key=account.key,
                domain=chain.domain("ContributionLedger"),
                engine=await load_engine(engine_factory, settings),
                decoder=decoder,
                folder=settings.state_dir,
                sources=settings.source,
                relays=settings.relay,
                allows_private=chain.chain_id == FAUCET_CHAIN_ID,
            )
            place = JurorPlace(
                juror=account.address,
                chain=chain,
                view=view,
                judge=judge,
                journal=votes,
                results=settings.state_dir / "cases",
                terms=await chain.court.terms(),
                poll_s=settings.poll_s,
            )
            following = follow(
                chain, view, poll_s=settings.poll_s, confirmations=settings.confirmations
            )
            logger.info("on the bench", extra={"jurors": len(view.jurors())})
            await run_beside(JurorDuty(place).run(), following)


def require_place(view: HistoryView, account: Address) -> None:
    """Raise ConfigError unless an account is on the bench, or open cases may still draw it."""
    held = [place for place in view.bench if place.juror == account]
    opened = [case for case in view.cases.values() if not case.closed]
    if any(not place.left_at for place in held):
        return
    if any(place.is_eligible(case.opened_at) for place in held for case in opened):
        return
    raise ConfigError(
        f"{account} is not on the network's bench",
        hint="muster juror join puts it there; is this the right keystore?",
    )
