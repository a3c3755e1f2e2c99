"""The juror, from a claim to a settled case. Its part of a rollout's way:

11. dispute    jurors of the network decide about a claimed or an unjudged outcome

  draw      once the draw block is mined; anybody may, so every juror tries and one is first
  judge     a drawn juror checks the work again, with the validators' checks
  commit    the vote is written to the journal before its hash goes on chain
  reveal    once all jurors committed, or the time to commit is over
  settle    once all revealed, or the jury's time is over; again anybody may
  collect   takes its fee if its ruling prevailed, and has those at fault fined

The next step follows from the chain and the journal alone, so a juror that was killed between any
two steps resumes. A juror that reveals no vote can be fined, by whoever asks for it (`collect` of
the others does). So if file, ticket or policy is not available in time, it votes "not seen", which
is a vote. Each case goes on by itself: one whose sources are slow, or whose transaction is not
mined for minutes, does not delay others. The sender puts the transactions in order.

A vote is decided once and never changed: another decision on the same case would leave a commitment
that nobody can reveal, which costs stake. The progress of a vote is on chain.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from muster.chain import CaseView, Chain, ChainView, CourtTerms, EventReader, apply_poll, follow
from muster.client.chain_facts import ChainClock, HistoryView
from muster.client.connections import TRANSACTIONS, EngineFactory, load_engine, make_engine
from muster.client.disputes.cases import Penalty, fees_due, penalties_of, ruling_words
from muster.client.disputes.claims import OVERTAKEN, close_case, fine
from muster.client.durable_log import Journal
from muster.client.juror.judging import TURN_S, CaseJudge
from muster.client.outage import SURVIVED, UNUSABLE, Steps
from muster.client.preflight import warn_of_gas
from muster.client.settings import JurorSettings
from muster.client.stake import FAUCET_CHAIN_ID
from muster.client.validator.decoding import FileDecoder
from muster.lifecycle import run_beside, uptime_s
from muster.lifecycle.files import write_durably
from muster.protocol.encoding import canonical_json, hex0x, keccak
from muster.protocol.errors import ChainError, ConfigError
from muster.protocol.ids import Address, Hash32, to_address, to_hash32
from muster.protocol.jury import BenchPlace, Ruling, vote_commitment
from muster.wallet import Wallet

logger = logging.getLogger(__name__)

PATIENCE_SHARE = 0.75
"""Share of the time to commit that judging may take; after it the vote is "not seen"."""
AT_ONCE = 16
"""Most cases that are judged at the same time; each may hold a few files in memory."""
RETRY_S = 2.0
"""Minimum seconds between two attempts at a step of a case."""
_OVERTAKEN = OVERTAKEN | {
    "CourtJuryDrawn",
    "CourtPhaseOpen",
    "CourtPhaseOver",
    "CourtTooEarlyToDraw",
}
"""Contract errors that mean somebody else was first, or the chain's clock differs from ours."""


# The vote


@dataclass(frozen=True, slots=True)
class Vote:
    """A juror's decision on a case, with the salt that hides it until it is revealed."""

    case_id: Hash32
    number: int
    """Number of the case: after a reorganisation another case may have the same id."""
    juror: Address
    """The juror that votes."""
    ruling: int
    """The ruling as a number; 0 when no source had the work."""
    result_hash: Hash32
    """Keccak-256 of the document about the recomputation."""
    salt: Hash32
    """Random bytes, so that others cannot find the vote by trying all rulings."""

    def __repr__(self) -> str:
        return f"Vote(0x{self.case_id.hex()}, juror={self.juror})"

    def commitment(self) -> Hash32:
        """Return the hash that goes on chain before the vote."""
        ruling = Ruling.of(self.ruling)
        return vote_commitment(self.case_id, self.juror, ruling, self.result_hash, self.salt)


class VoteJournal(Journal):
    """Stores every vote before its commitment is sent."""

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
        """Store the vote and return it; if an earlier one was recorded, return that instead."""
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
    """The next step of a juror in a case."""

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
    """Take its fee, and have those at fault fined: in a closed case, so not from `next_step`."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The chain's height and clock."""

    block_number: int
    """Its height."""
    time: float
    """Its clock, Unix seconds."""


def next_step(
    case: CaseView,
    juror: Address,
    vote: Vote | None,
    at: Moment,
    terms: CourtTerms,
    *,
    is_proven: bool = True,
) -> DutyStep | None:
    """Return the step that a juror can take now in an open case, or None.

    Where no claim proved what the batch holds, one can do so in the first half of the time to
    commit. Nobody can commit before, and the case is judged afterwards.
    """
    half_at = case.opened_at + terms.commit_time // 2
    commit_ends_at = case.opened_at + terms.commit_time
    if case.closed:
        return None
    if at.time >= commit_ends_at + terms.reveal_time or 0 < len(case.jurors) == len(case.votes):
        return DutyStep.SETTLE
    if not case.jurors:
        can_draw = at.block_number >= case.draw_block and at.time < half_at
        return DutyStep.DRAW if can_draw else None
    if juror not in case.jurors or juror in case.votes:
        return None
    if juror in case.commitments:
        has_ended = at.time >= commit_ends_at or len(case.commitments) == len(case.jurors)
        return DutyStep.REVEAL if has_ended else None
    if at.time >= commit_ends_at or (not is_proven and at.time < half_at):
        return None
    return DutyStep.JUDGE if vote is None else DutyStep.COMMIT


class JudgePort(Protocol):
    """Judges the work of cases, of several at the same time."""

    async def judge(self, case: CaseView) -> tuple[Ruling, dict[str, Any]]:
        """Return the ruling, and the recomputation as JSON values.

        Raises MusterError while something is missing that may still become available.
        """


@dataclass(frozen=True, slots=True)
class JurorContext:
    """Everything a juror works with."""

    juror: Address
    """The account on the bench."""
    chain: Chain
    """Chain connection that signs with the juror's key."""
    view: ChainView
    """View of the chain, kept up to date by another task."""
    judge: JudgePort
    """Judges the work of cases."""
    journal: VoteJournal
    """Earlier votes."""
    results: Path
    """Folder of the documents about recomputations."""
    terms: CourtTerms
    """The court's terms, such as the lengths of phases."""
    poll_s: float
    """Seconds between two polls."""
    clock: Callable[[], float] = uptime_s
    """Clock in seconds, for pauses and for the time since the last block."""
    salt: Callable[[int], bytes] = secrets.token_bytes
    """Random bytes."""


class JurorDuty:
    """One juror's part in the cases of the network."""

    def __init__(self, context: JurorContext) -> None:
        self.context = context
        self._time = ChainClock(context.chain, context.clock)
        self._steps = Steps(context.clock, retry_s=RETRY_S, overtaken=_OVERTAKEN)
        self._acting: set[asyncio.Task[None]] = set()
        self._judging: dict[Hash32, asyncio.Task[None]] = {}
        self._begun: dict[Hash32, float] = {}
        self._over: set[Hash32] = set()
        self._was_seated = True

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                await self.serve()
                await asyncio.sleep(self.context.poll_s)
        finally:
            begun = [*self._acting, *self._judging.values()]
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def serve(self) -> None:
        """Begin all steps that are possible now; raises what an earlier step did not survive."""
        for task in [each for each in self._acting if each.done()]:
            self._acting.remove(task)
            task.result()
        # Votes first: they have deadlines, and the sender takes transactions in turn.
        await self._serve_open([c for c in self.context.view.cases.values() if not c.closed])
        self._clear_up()
        self._watch_place()

    def _watch_place(self) -> None:
        """Say once that the juror's place on the bench is gone."""
        is_seated = any(
            not place.left_at for place in _places_of(self.context.view, self.context.juror)
        )
        if self._was_seated and not is_seated:
            logger.error(
                "not on the bench any more: no new case draws this account",
                extra={
                    "juror": self.context.juror,
                    "hint": "it left, or a fine took its stake below the requirement: muster juror "
                    "join stakes what is missing, muster unstake --run 0 takes back the rest",
                },
            )
        self._was_seated = is_seated

    async def _serve_open(self, cases: Sequence[CaseView]) -> None:
        if not cases:
            return
        try:
            at = await self.moment()
        except ChainError as error:
            # The view's follower reports outages; a case can wait for the next poll.
            logger.debug("no look at the chain", extra={"error": str(error)})
            return
        acts = {
            DutyStep.DRAW: self.draw,
            DutyStep.COMMIT: self.commit,
            DutyStep.REVEAL: self.reveal,
            DutyStep.SETTLE: self.settle,
        }
        unjudged = []
        for case in cases:
            step = self._next_step(case, at)
            if step is DutyStep.JUDGE:
                unjudged.append(case)
            elif step is not None:
                self._begin(case, step, partial(acts[step], case))
        self._begin_to_judge(unjudged, at)

    def _next_step(self, case: CaseView, at: Moment) -> DutyStep | None:
        batch = self.context.view.batches[case.batch_id]
        is_proven = case.is_summons or batch.is_proven_in(case)
        vote, terms = self._vote(case), self.context.terms
        return next_step(case, self.context.juror, vote, at, terms, is_proven=is_proven)

    async def acted(self) -> None:
        """Wait for the steps that were begun, except for judging."""
        await asyncio.gather(*self._acting)

    async def judged(self) -> None:
        """Wait for the cases that are being judged."""
        await asyncio.gather(*self._judging.values())

    def _begin(self, case: CaseView, step: DutyStep, act: Callable[[], Awaitable[Any]]) -> None:
        if self._steps.is_due(case.case_id, _named(step)):
            self._acting.add(asyncio.create_task(self._try(case, step, act)))

    def _begin_to_judge(self, cases: Sequence[CaseView], at: Moment) -> None:
        """Begin to judge the cases that are due, first those that were begun longest ago."""
        self._judging = {name: task for name, task in self._judging.items() if not task.done()}
        due = [
            case
            for case in cases
            if case.case_id not in self._judging
            and self._steps.is_due(case.case_id, _named(DutyStep.JUDGE))
        ]
        due.sort(key=lambda case: self._begun.get(case.case_id, -math.inf))
        for case in due[: AT_ONCE - len(self._judging)]:
            self._begun[case.case_id] = self.context.clock()
            self._judging[case.case_id] = asyncio.create_task(
                self._try(case, DutyStep.JUDGE, partial(self.decide, case, at))
            )

    def _clear_up(self) -> None:
        """In closed cases that it judged, take the fees and have those at fault fined."""
        for case in list(self.context.view.cases.values()):
            name, juror = case.case_id, self.context.juror
            if not case.closed or name in self._over or juror not in case.jurors:
                continue
            if juror not in fees_due(case) and not self._penalties_of(case):
                self._over.add(name)
            else:
                self._begin(case, DutyStep.COLLECT, partial(self.collect, case))

    def _penalties_of(self, case: CaseView) -> list[Penalty]:
        return penalties_of(self.context.view, case, self.context.terms)

    async def moment(self) -> Moment:
        """Return the chain's height and clock; between blocks the clock advances with ours."""
        return Moment(*await self._time.head())

    def _vote(self, case: CaseView) -> Vote | None:
        return self.context.journal.find(case.case_id, self.context.juror, case.number)

    async def _try(self, case: CaseView, step: DutyStep, act: Callable[[], Awaitable[Any]]) -> None:
        await self._steps.take(case.case_id, _named(step), act, **_about(case))

    # draw

    async def draw(self, case: CaseView) -> None:
        """Draw the jury; if the draw block is too old to be read, this selects a later one."""
        named = f"draw the jury of case {case.number} by block {case.draw_block}"
        await self.context.chain.once(named).court.draw(case.case_id)
        logger.info("jury drawn", extra=_about(case))

    # judge

    async def decide(self, case: CaseView, at: Moment) -> Vote:
        """Judge a case's work and record the vote; raises while something is missing that may still
        become available in time.
        """
        left_s = case.opened_at + PATIENCE_SHARE * self.context.terms.commit_time - at.time
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                ruling, result = await self.context.judge.judge(case)
            number = ruling.number
        except TimeoutError:
            number, result = 0, {"unavailable": "it took too long"}
        except (*SURVIVED, *UNUSABLE) as error:
            if left_s > 0:
                raise
            number, result = 0, {"unavailable": str(error)}
        if number == 0:
            logger.warning("case not seen in time", extra=_about(case) | result)
        document = canonical_json(_described(case) | result | {"ruling": number})
        path = self.context.results / f"case-{case.number}-{case.case_id.hex()}.json"
        await asyncio.to_thread(write_durably, path, document)
        vote = Vote(
            case_id=case.case_id,
            number=case.number,
            juror=self.context.juror,
            ruling=number,
            result_hash=keccak(document),
            salt=Hash32(self.context.salt(32)),
        )
        recorded = await asyncio.to_thread(self.context.journal.record, vote)
        logger.info("case judged", extra=_about(case))
        return recorded

    # vote

    async def commit(self, case: CaseView) -> None:
        """Commit to the vote in the journal."""
        vote = self._vote(case)
        assert vote is not None  # next_step
        named = f"commit to a vote in case {case.number}, {hex0x(case.case_id)}"
        await self.context.chain.once(named).court.commit_vote(case.case_id, vote.commitment())
        logger.info("vote committed", extra=_about(case))

    async def reveal(self, case: CaseView) -> None:
        """Reveal the vote; raises ChainError when the commitment on chain is not that of the
        journal."""
        vote = self._vote(case)
        if vote is None or vote.commitment() != case.commitments[self.context.juror]:
            raise ChainError(
                "the vote on chain is not in the journal and cannot be revealed",
                hint="give the --state-dir that the vote was made with, and let no other "
                "process vote with this key",
            )
        named = f"reveal the vote in case {case.number}, {hex0x(case.case_id)}"
        await self.context.chain.once(named).court.reveal_vote(
            case.case_id, vote.ruling, vote.result_hash, vote.salt
        )
        logger.info("vote revealed", extra=_about(case) | {"ruling": ruling_words(vote.ruling)})

    # afterwards

    async def settle(self, case: CaseView) -> None:
        """Settle the case."""
        named = f"settle case {case.number}, {hex0x(case.case_id)}"
        await close_case(self.context.chain.once(named), self.context.view, case)
        logger.info("case settled", extra=_about(case))

    async def collect(self, case: CaseView) -> None:
        """Take the due fee, and have those at fault fined."""
        chain, view, juror = self.context.chain, self.context.view, self.context.juror
        if juror in fees_due(case):
            named = f"collect the fee of case {case.number}, {hex0x(case.case_id)}"
            await chain.once(named).court.collect_fee(case.case_id, juror)
            logger.info("fee collected", extra=_about(case))
        for penalty in self._penalties_of(case):
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
    """Judge cases until cancelled; raises MusterError when this account is not on the bench."""
    # The journal's lock is taken first; it protects the whole folder from a second process.
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
            terms = await chain.court.terms()
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
                turn_s=max(TURN_S, PATIENCE_SHARE * terms.commit_time / AT_ONCE),
            )
            context = JurorContext(
                juror=account.address,
                chain=chain,
                view=view,
                judge=judge,
                journal=votes,
                results=settings.state_dir / "cases",
                terms=terms,
                poll_s=settings.poll_s,
            )
            following = follow(
                chain, view, poll_s=settings.poll_s, confirmations=settings.confirmations
            )
            logger.info("on the bench", extra={"jurors": len(view.jurors())})
            await run_beside(JurorDuty(context).run(), following)


def _places_of(view: ChainView, account: Address) -> list[BenchPlace]:
    return [place for place in view.bench if place.juror == account]


def require_place(view: HistoryView, account: Address) -> None:
    """Raise ConfigError unless an account is on the bench, or open cases may still draw it."""
    held = _places_of(view, account)
    opened = [case for case in view.cases.values() if not case.closed]
    if any(not place.left_at for place in held):
        return
    if any(place.is_eligible(case.opened_at) for place in held for case in opened):
        return
    if any(account in case.jurors for case in opened):
        return  # it must vote, though its place was given up since
    raise ConfigError(
        f"{account} is not on the network's bench",
        hint="join it with muster juror join, or give the juror's keystore with --keystore",
    )
