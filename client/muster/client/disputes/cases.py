"""Descriptions of cases: their phase, what happens next, what remains to do.

Pure. `muster.client.disputes.claims` opens and settles cases, `muster explain` shows them.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from muster.chain import CaseView, ChainView, CourtTerms, RunView
from muster.chain.frauds import awaits_execution
from muster.chain.structs import Offence
from muster.client.quantities import format_time, format_tokens
from muster.protocol.encoding import hex0x
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, RunId
from muster.protocol.jury import Ruling, spares_signers
from muster.protocol.messages import Verdict


@dataclass(frozen=True, slots=True)
class Penalty:
    """A fine that a closed case allows and nobody has claimed yet."""

    offence: Offence
    """A wrong verdict, or a vote that was not cast."""
    account: Address


def name_of(verdict: Verdict) -> str:
    """Return a verdict as commands write it."""
    return verdict.name.lower()


def ruling_words(number: int) -> str:
    """Return a ruling, as recorded, claimed or voted, in words."""
    try:
        ruling = Ruling.of(number)
    except EncodingError:
        return f"ruling {number}"
    return "not seen" if ruling is None else str(ruling)


# Where a case stands


def phase_of(case: CaseView, terms: CourtTerms, now: float) -> tuple[str, int | None]:
    """Return the phase of a case, and when it ends at the latest."""
    commit_ends_at = case.opened_at + terms.commit_time
    ends_at = commit_ends_at + terms.reveal_time
    if case.closed:
        return ("overturned" if case.overturned else "upheld"), None
    if now >= ends_at or 0 < len(case.jurors) == len(case.votes):
        return "to settle", None
    if not case.jurors:
        draw_ends_at = case.opened_at + terms.commit_time // 2
        return ("drawing", draw_ends_at) if now < draw_ends_at else ("no jury", ends_at)
    if now >= commit_ends_at or len(case.commitments) == len(case.jurors):
        return "revealing", ends_at
    return "committing", commit_ends_at


def penalties_of(view: ChainView, case: CaseView, terms: CourtTerms) -> list[Penalty]:
    """Return the fines that a closed case allows and nobody has claimed.

    They apply to signers of an overturned outcome, if a claim proved in the first half of the time
    to commit what the batch holds, unless the outcome or the votes against it depend on what the
    committer of the batch showed; and to jurors that did not reveal a vote.
    """
    if not case.closed:
        return []
    batch = view.batches[case.batch_id]
    is_spared = spares_signers(case.recorded, case.ruling, case.votes.values())
    is_proven = batch.is_proven_in(case, before=case.opened_at + terms.commit_time // 2)
    is_wrong = case.overturned and not case.is_summons and is_proven and not is_spared
    signers = batch.signed_by(view.runs[case.run_id].seats) if is_wrong else []
    fined = {(slash.offence, slash.owner, slash.tag) for slash in view.slashes}
    due = [
        Penalty(Offence.WRONG_VERDICT, who)
        for who in signers
        if (Offence.WRONG_VERDICT, who, case.batch_id) not in fined
    ]
    return due + [
        Penalty(Offence.ABSENT_JUROR, who)
        for who in case.jurors
        if who not in case.votes and (Offence.ABSENT_JUROR, who, case.number) not in fined
    ]


def awaits_proof(view: ChainView, case: CaseView, terms: CourtTerms) -> bool:
    """Return whether a jury overturned a record for which somebody would be fined or slashed if any
    claim had proved in time what the batch holds.
    """
    if not case.overturned or case.is_summons:
        return False
    is_fraud = case.ruling >> 8 == Verdict.FRAUD
    if not is_fraud and spares_signers(case.recorded, case.ruling, case.votes.values()):
        return False
    until = case.opened_at + terms.commit_time // 2
    return not view.batches[case.batch_id].is_proven_in(case, before=until)


def fees_due(case: CaseView) -> list[Address]:
    """Return the jurors with an uncollected fee of a closed case."""
    if not case.closed or not case.fee_wei:
        return []
    return [juror for juror in case.right if juror not in case.collected]


# What happens next


def settle_command(batch_id: int | None, position: int | None) -> str:
    """Return the command that sends what is due about a submission."""
    return f"muster dispute settle {batch_id}:{position} --keystore FILE"


def next_of(
    case: CaseView,
    terms: CourtTerms,
    now: float,
    *,
    remaining: int = 0,
    is_unexecuted: bool = False,
    is_unproven: bool = False,
) -> str:
    """Return what happens next in a case, who does it, and by when."""
    phase, deadline = phase_of(case, terms, now)
    settle = settle_command(case.batch_id, case.position)
    if phase in ("overturned", "upheld"):
        left = [f"{count(remaining, 'account')} can be fined for it"] if remaining else []
        if is_unexecuted:
            left.append("the stake that the fraud costs can be taken")
        if is_unproven:
            left.append("nobody is fined or slashed until it is proven what the batch holds")
        if not left:
            return "nothing: the case is over"
        return f"{'; '.join(left)}; any account may do that: {settle}"
    if phase == "to settle":
        return f"the jury is done: jurors settle the case, or you do: {settle}"
    who = {
        "drawing": "a block of the chain draws the jurors from the network's bench",
        "no jury": "nobody was drawn: what is recorded stands, and bonds go back",
        "committing": f"{_left(case, len(case.commitments))} to check the work and commit",
        "revealing": f"{_left(case, len(case.votes))} to reveal what they voted",
    }[phase]
    return f"{who}, until {format_time(deadline or 0)} at the latest"


def _left(case: CaseView, done: int) -> str:
    return f"waiting for {count(len(case.jurors) - done, 'juror')}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural except for one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def votes_of(case: CaseView) -> str:
    """Return the jurors' votes, the most frequent ruling first."""
    counted = Counter(ruling_words(vote) for vote in case.votes.values()).most_common()
    return ", ".join(f"{number} {words}" for words, number in counted) or "no votes"


def ending_of(case: CaseView) -> str:
    """Return how a closed case ended, and who got the bonds."""
    word = "overturned" if case.overturned else "upheld"
    if case.is_summons:
        stands = ruling_words(case.ruling) if case.overturned else "unjudged, and void"
        return f"jurors of the network ({votes_of(case)}): the work is {stands}"
    return f"{word} ({votes_of(case)}): the outcome is {ruling_words(case.ruling)}; {_bonds(case)}"


def _bonds(case: CaseView) -> str:
    lines = []
    for place, claim in enumerate(case.claims):
        back = case.returned_wei.get(place, 0)
        fate = f"{format_tokens(back)} tokens back" if back else "its bond lost"
        lines.append(f"{claim.claimant} claimed {ruling_words(claim.ruling)}, {fate}")
    return "; ".join(lines)


# Listed


def describe_cases(
    view: ChainView, run_id: RunId | None, terms: CourtTerms, now: float
) -> list[dict[str, Any]]:
    """Return cases as JSON values, oldest first."""
    return [
        describe_case(view, case, terms, now)
        for case in view.cases.values()
        if run_id is None or case.run_id == run_id
    ]


def describe_case(view: ChainView, case: CaseView, terms: CourtTerms, now: float) -> dict[str, Any]:
    """Return a case as JSON values; its deadline is when its phase ends at the latest."""
    phase, deadline = phase_of(case, terms, now)
    penalties = penalties_of(view, case, terms)
    return {
        "case": hex0x(case.case_id),
        "run": case.run_id,
        "batch": case.batch_id,
        "position": case.position,
        "summons": case.is_summons,
        "recorded": None if case.is_summons else ruling_words(case.recorded),
        "claims": [
            {"claimant": claim.claimant, "ruling": ruling_words(claim.ruling)}
            for claim in case.claims
            if not case.is_summons
        ],
        "phase": phase,
        "bench": case.places,
        "jurors": list(case.jurors),
        "committed": len(case.commitments),
        "votes": {juror: ruling_words(vote) for juror, vote in case.votes.items()},
        "deadline": deadline,
        "ending": ending_of(case) if case.closed else None,
        "next": next_of(
            case,
            terms,
            now,
            remaining=len(penalties),
            is_unexecuted=_is_unexecuted(view, case, terms),
            is_unproven=awaits_proof(view, case, terms),
        ),
        "to_fine": [each.account for each in penalties],
        "fees_due": fees_due(case),
    }


def _is_unexecuted(view: ChainView, case: CaseView, terms: CourtTerms) -> bool:
    if not case.closed or case.ruling >> 8 != Verdict.FRAUD:
        return False
    return awaits_execution(view, case.batch_id, case.position, commit_time_s=terms.commit_time)


CASE_COLUMNS = ("submission", "case", "recorded", "claimed", "phase", "jurors", "deadline")
"""The columns of `muster dispute list`."""


def make_row(case: dict[str, Any]) -> list[str]:
    """Return a described case as a row for people."""
    claimed = ", ".join(dict.fromkeys(claim["ruling"] for claim in case["claims"]))
    return [
        f"{case['batch']}:{case['position']}",
        case["case"][:12],
        case["recorded"] or "unjudged",
        claimed or "summons",
        case["phase"],
        f"{case['committed']}/{len(case['jurors'])} of {case['bench']}",
        format_time(case["deadline"]) if case["deadline"] else "-",
    ]


def eligible_jurors(view: ChainView, run: RunView, worker: Address | None = None) -> list[Address]:
    """Return the jurors that could be drawn for a case about a worker that opens now."""
    excluded: Collection[Address] = {*run.seats, run.owner, *([worker] if worker else ())}
    return [juror for juror in view.jurors() if juror not in excluded]


def bench_words(count: int) -> str:
    """Return how many jurors could judge a run's cases and, if none, the consequence."""
    words = f"{count} of the network's bench could judge a dispute"
    if count:
        return words
    return f"{words}: what the validators sign stands, and what they leave unjudged is void"
