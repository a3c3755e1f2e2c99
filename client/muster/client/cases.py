"""Cases as people and programs read them: where one stands, what happens next, what remains to do.

Pure. `muster.client.dispute` opens and settles cases, `muster explain` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.client.quantities import format_time, format_tokens
from muster.protocol.encoding import abi_words, address_bytes, hex0x, keccak
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import Verdict

if TYPE_CHECKING:
    from muster.chain import CaseView, ChainView, CourtTerms, Fault


@dataclass(frozen=True, slots=True)
class Penalty:
    """A punishment that a closed case allows, and that nobody has asked for yet."""

    fault: Fault
    """What the validator did."""
    validator: Address
    """Who did it."""


def name_of(verdict: Verdict) -> str:
    """Return a verdict as commands write it."""
    return verdict.name.lower()


# Where a case stands


def phase_of(case: CaseView, terms: CourtTerms, now: float) -> tuple[str, int | None]:
    """Return where a case stands, and when that ends at the latest."""
    commit_ends_at = case.opened_at + terms.commit_time
    ends_at = commit_ends_at + terms.reveal_time
    if case.closed:
        return ("overturned" if case.overturned else "upheld"), None
    if now >= ends_at or 0 < len(case.jurors) == len(case.votes):
        return "to close", None
    if not case.jurors:
        return ("drawing", commit_ends_at) if now < commit_ends_at else ("no jury", ends_at)
    if now >= commit_ends_at or len(case.commitments) == len(case.jurors):
        return "revealing", ends_at
    return "committing", commit_ends_at


def penalties_of(view: ChainView, case: CaseView) -> list[Penalty]:
    """Return whom a closed case lets anybody punish, without those who were punished already.

    Signers of an overturned outcome, and jurors that did not reveal a vote.
    """
    from muster.chain import Fault

    if not case.closed:
        return []
    batch = view.batches[case.batch_id]
    seats = view.runs[batch.run_id].seats
    signers = [who for who, bit in seats.items() if case.overturned and batch.signers & bit]
    absent = [juror for juror in case.jurors if juror not in case.votes]
    due = [Penalty(Fault.WRONG_VERDICT, who) for who in signers]
    due += [Penalty(Fault.ABSENT_JUROR, who) for who in absent]
    punished = {slash.offence for slash in view.slashes}
    return [each for each in due if offence_of(each, case.leaf) not in punished]


def offence_of(penalty: Penalty, leaf: Hash32) -> Hash32:
    """Return what FaultCourt files a punishment under."""
    number = list(type(penalty.fault)).index(penalty.fault)
    return keccak(abi_words(number, leaf, address_bytes(penalty.validator)))


# What happens next


def next_of(case: CaseView, terms: CourtTerms, now: float, *, remaining: int = 0) -> str:
    """Return what happens next about a case, who does it, and by when."""
    phase, deadline = phase_of(case, terms, now)
    settle = f"muster dispute settle {case.batch_id}:{case.position} --keystore FILE"
    if phase in ("overturned", "upheld"):
        if not remaining:
            return "nothing: the case is over"
        return f"{count(remaining, 'validator')} can be slashed for it, by anybody: {settle}"
    if phase == "to close":
        return f"the jury is done: validators close the case, or you do: {settle}"
    who = {
        "drawing": "a block decides who sits on the jury",
        "no jury": "nobody was drawn: the verdict stands, and the bond goes back",
        "committing": f"{_left(case, len(case.commitments))} to check the work again and commit",
        "revealing": f"{_left(case, len(case.votes))} to reveal what they voted",
    }[phase]
    return f"{who}, until {format_time(deadline or 0)} at the latest"


def _left(case: CaseView, done: int) -> str:
    return f"waiting for {count(len(case.jurors) - done, 'juror')}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural but for one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ending_of(case: CaseView) -> str:
    """Return how a closed case ended, and what became of the bond."""
    overturn = sum(case.votes.values())
    votes = f"{overturn} to overturn, {len(case.votes) - overturn} to uphold"
    verdict = name_of(Verdict(case.verdict or case.recorded_verdict))
    bond = (
        f"the bond of {format_tokens(case.bond_returned_wei)} tokens went back to the challenger"
        if case.bond_returned_wei
        else "the challenger's bond was burned"
    )
    word = "overturned" if case.overturned else "upheld"
    return f"{word} ({votes}): the verdict is {verdict}, and {bond}"


# Listed


def describe_cases(
    view: ChainView, run_id: RunId | None, terms: CourtTerms, now: float
) -> list[dict[str, Any]]:
    """Return cases as JSON values, oldest first."""
    return [
        describe_case(view, case, terms, now)
        for case in view.cases.values()
        if run_id is None or view.batches[case.batch_id].run_id == run_id
    ]


def describe_case(view: ChainView, case: CaseView, terms: CourtTerms, now: float) -> dict[str, Any]:
    """Return a case as JSON values; its deadline is when its phase ends at the latest."""
    phase, deadline = phase_of(case, terms, now)
    overturn = sum(case.votes.values())
    penalties = penalties_of(view, case)
    return {
        "case": hex0x(case.leaf),
        "batch": case.batch_id,
        "position": case.position,
        "challenger": case.challenger,
        "recorded": name_of(Verdict(case.recorded_verdict)),
        "claimed": name_of(Verdict(case.claimed_verdict)),
        "phase": phase,
        "jurors": list(case.jurors),
        "committed": len(case.commitments),
        "votes_to_overturn": overturn,
        "votes_to_uphold": len(case.votes) - overturn,
        "deadline": deadline,
        "ending": ending_of(case) if case.closed else None,
        "next": next_of(case, terms, now, remaining=len(penalties)),
        "to_slash": [each.validator for each in penalties],
    }


CASE_COLUMNS = (
    "submission",
    "case",
    "recorded",
    "claimed",
    "phase",
    "jurors",
    "for:against",
    "deadline",
)
"""The columns of `muster dispute list`."""


def make_row(case: dict[str, Any]) -> list[str]:
    """Return a described case as a row for people."""
    return [
        f"{case['batch']}:{case['position']}",
        case["case"][:12],
        case["recorded"],
        case["claimed"],
        case["phase"],
        f"{case['committed']}/{len(case['jurors'])}",
        f"{case['votes_to_overturn']}:{case['votes_to_uphold']}",
        format_time(case["deadline"]) if case["deadline"] else "-",
    ]
