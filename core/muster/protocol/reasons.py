"""Verdicts and their reasons: numbers, meanings, and advice for the worker.

Its number fixes what a reason can lead to, here and in contracts (`OutcomeRecordLib.isExact`,
`muster.protocol.jury`). docs/reading.md says what a new reason needs.
"""

from enum import IntEnum
from typing import NamedTuple, Self

CHECKS = (
    "claim: signature, ticket, time, slot, file",
    "form: schema, rows, proofs whole and canonical",
    "assignment: problems, prompts, lengths, seeds, policy, replies as derived",
    "grades: rewards and units recomputed",
    "endings: EOS within the limit, or at the limit",
    "proofs: hidden states match (TOPLOC)",
    "sampling: every token is the seeded choice",
)
"""The ordered checks of docs/protocol.md section 8."""


class Verdict(IntEnum):
    """The decision of validators about a submission."""

    ACCEPTED = 1
    """Paid, and offered to training, whose filters may leave it out."""
    INCOMPLETE = 2
    """Not paid, not punished: an honest crash explains it."""
    REJECTED = 3
    """Not paid."""
    FRAUD = 4
    """Slashed."""


VERDICTS = {
    Verdict.ACCEPTED: "paid, and offered to training",
    Verdict.INCOMPLETE: "not paid, not punished",
    Verdict.REJECTED: "not paid",
    Verdict.FRAUD: "not paid, and slashed",
}
"""The consequence of each verdict."""


class Words(NamedTuple):
    """A reason in words."""

    meaning: str
    """The finding."""
    advice: str
    """Advice for the worker."""


_STATISTICAL = "run muster doctor: this machine's arithmetic may be outside the calibration"
_OWN_FAULT = "install the run's version again: this software was changed, or is another version"


class Reason(IntEnum):
    """Why a submission was not accepted; the tens digit is the check of docs/protocol.md."""

    words: Words

    def __new__(cls, number: int, meaning: str = "", advice: str = "") -> Self:
        """Return a member: its number is its value."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.words = Words(meaning, advice)
        return member

    NONE = 0, "nothing is wrong with it"
    FILE_TOO_LARGE = 10, "the file or its rows exceed the caps", _OWN_FAULT
    BAD_SIGNATURE = (
        11,
        "it is not signed by the node of a worker that was active when its batch was committed",
        (
            "see muster worker status: the node may have been rotated, or the worker jailed, "
            "before the commit; if neither was, the orchestrator showed another signature: the "
            "slot is still free, and the worker submits it again by itself within 60 s of the "
            "ticket's deadline; after that, dispute it"
        ),
    )
    UNKNOWN_TICKET = (
        12,
        (
            "there is no ticket for its slot that the orchestrator signed and that agrees with "
            "the chain"
        ),
        "ask the run's owner, and keep the worker's state folder: it holds the ticket as proof",
    )
    LATE = (
        13,
        "its batch was committed too long after the ticket's deadline",
        "check machine and network with muster doctor; if the orchestrator was slow, dispute it",
    )
    """More than `muster.protocol.messages.COMMIT_GRACE_S` after it."""
    SLOT_REUSED = (
        14,
        "an earlier submission fills its slot",
        "stop any other process that uses the same node's key",
    )
    FILE_UNAVAILABLE = (
        15,
        "validators could not get the file",
        "the orchestrator lost or withheld it: dispute it, and keep the state folder",
    )
    BATCH_MISDECLARED = (
        16,
        "its whole batch was refused, because it declares fewer units than it holds",
        (
            "this is the orchestrator's fault: the slot is still free, and the worker submits "
            "it again by itself"
        ),
    )
    SCHEMA = 20, "the file is not a Parquet file of the right form", _OWN_FAULT
    PROOF_COUNT = 21, "a sample has too few or too many proofs", _OWN_FAULT
    PROOF_ENCODING = 22, "a proof does not parse, or is not canonical", _OWN_FAULT
    FILE_INCOMPLETE = (
        23,
        "whole groups are missing at the end: a crash, so nothing is punished",
        "look at the worker's log for what stopped it",
    )
    WRONG_PROBLEM = 30, "a problem, prompt or length is not the derived one", _OWN_FAULT
    WRONG_SEED = 31, "a sampling seed is not the derived one", _OWN_FAULT
    WRONG_POLICY = 32, "rows claim another policy version than the ticket's", _OWN_FAULT
    WRONG_REPLY = (
        33,
        "a completion holds a reply that its task's environment does not give",
        "a program that a model wrote may answer differently elsewhere: that is only rejected; "
        + _OWN_FAULT,
    )
    WRONG_REWARD = (
        40,
        "a reward is not what the task's verifier computes, or cannot be graded",
        "if the answer could not be graded, or the reward is too low, it is only rejected; else "
        + _OWN_FAULT,
    )
    WRONG_UNITS = 41, "the units are not what the completions add up to", _OWN_FAULT
    WRONG_TERMINATION = (
        50,
        "a completion ends neither in EOS within the limit nor at the limit",
        _OWN_FAULT,
    )
    TOPLOC_MISMATCH = (
        60,
        "recomputed hidden states do not match the proofs: another policy, precision or context",
        _STATISTICAL,
    )
    SAMPLER_MISMATCH = (
        70,
        "tokens are not those that the seeds yield: another sampler, model or precision",
        _STATISTICAL,
    )
    SAMPLER_DRIFT = (
        71,
        "close choices of its worker's last submissions all go one way, or too many are close",
        f"stop the worker, before its work is called fraud; {_STATISTICAL}",
    )

    @property
    def check(self) -> int:
        """The number of its check; 0 for no reason."""
        return int(self) // 10


GRADED = (Reason.WRONG_REPLY, Reason.WRONG_REWARD)
"""Reasons from grading: if a grade is not repeatable, the work is only rejected."""
OTHERS_FAULTS = frozenset(
    {
        Reason.UNKNOWN_TICKET,
        Reason.LATE,
        Reason.SLOT_REUSED,
        Reason.FILE_UNAVAILABLE,
        Reason.BATCH_MISDECLARED,
    }
)
"""Reasons that can be the fault of the batch's committer instead of the worker."""
NOT_OF_ONE_FILE = {
    Reason.BATCH_MISDECLARED: "the whole batch was refused: recomputing that needs all its claims",
    Reason.FILE_UNAVAILABLE: (
        "validators did not get the file: no bundle can show whether they could have"
    ),
    Reason.SAMPLER_DRIFT: "it rests on the worker's earlier submissions, too: muster audit run "
    "runs it again with them",
}
"""Reasons that one submission's evidence can neither confirm nor contradict, and why."""

_MOVED = (3, 4, 5)
"""Checks that come last, the replies of 3 among them, if a task replies to completions or runs
them."""


def verdicts_of(reason: Reason) -> set[Verdict]:
    """Return the verdicts that a reason can have: docs/protocol.md, section 8."""
    if reason is Reason.NONE:
        return {Verdict.ACCEPTED}
    if reason is Reason.FILE_INCOMPLETE:
        return {Verdict.INCOMPLETE}
    if reason < Reason.WRONG_PROBLEM:
        return {Verdict.REJECTED}
    is_exact = reason < Reason.TOPLOC_MISMATCH and reason not in GRADED
    return {Verdict.FRAUD} if is_exact else {Verdict.REJECTED, Verdict.FRAUD}


def marks_of(verdict: Verdict, reason: Reason) -> list[str]:
    """Return for each check `passed`, `FAILED`, or `-` if the reason does not tell whether it ran.

    Checks 6 and 7 come before the replies of 3, before 4 and 5 if a task replies to completions or
    runs them, and after them otherwise; 5's length then comes first. So a failure of 5, 6 or 7 does
    not tell whether all of 3, 4 and 5 ran. A reason of a later version of the
    protocol tells nothing about any check.
    """
    if verdict is Verdict.ACCEPTED:
        return ["passed"] * len(CHECKS)
    failed = reason.check if 1 <= reason.check <= len(CHECKS) else 0
    is_moved = failed > 4
    return [
        "FAILED" if n == failed else "-" if n > failed or (is_moved and n in _MOVED) else "passed"
        for n in range(1, len(CHECKS) + 1)
    ]


def checks_of(verdict: Verdict, reason: Reason) -> list[str]:
    """Return each check as a line: its number, its mark and its description."""
    marks = marks_of(verdict, reason)
    return [
        f"{n} {mark:7} {check}"
        for n, (mark, check) in enumerate(zip(marks, CHECKS, strict=True), 1)
    ]


def words_of(reason: Reason) -> Words:
    """Return a reason in words; one of a later version of the protocol gets its number."""
    unknown = Words(f"reason {int(reason)}, which this version does not know", "")
    words: Words = getattr(reason, "words", unknown)
    return words
