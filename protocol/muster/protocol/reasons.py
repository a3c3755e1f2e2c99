"""What every reason and check means, in words, and what its worker can do about it."""

from __future__ import annotations

from typing import NamedTuple

from muster.protocol.messages import Reason, Verdict

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


class Words(NamedTuple):
    """A reason for people."""

    meaning: str
    """What was found."""
    advice: str
    """What its worker can do."""


_STATISTICAL = "run muster doctor: this machine's arithmetic may be outside the calibration"
_OWN_FAULT = "the software was changed, or is another version than the run's"
WORDS = {
    Reason.NONE: Words("nothing is wrong with it", ""),
    Reason.FILE_TOO_LARGE: Words("the file or its rows exceed the caps", _OWN_FAULT),
    Reason.BAD_SIGNATURE: Words(
        "it is not signed by the node of a worker that was active when its batch was committed",
        "was the node rotated, or the worker jailed, while it was on its way? muster worker status",
    ),
    Reason.UNKNOWN_TICKET: Words(
        "there is no ticket for its slot that the orchestrator signed and the chain bears out",
        "ask the run's owner; a worker that checks its tickets, as this one does, holds the proof",
    ),
    Reason.LATE: Words(
        "its batch was committed too long after the ticket's deadline",
        "a slow machine or line: muster doctor; or a slow orchestrator, then dispute it",
    ),
    Reason.SLOT_REUSED: Words(
        "an earlier submission fills its slot", "does another process use the same node's key?"
    ),
    Reason.FILE_UNAVAILABLE: Words(
        "validators asked for the file in vain",
        "the orchestrator lost or withheld it: dispute it, and keep the state folder",
    ),
    Reason.BATCH_MISDECLARED: Words(
        "its whole batch was refused, because it declares fewer units than it holds",
        "the orchestrator's fault, not the worker's: ask the run's owner",
    ),
    Reason.SCHEMA: Words("the file is no Parquet file of the right form", _OWN_FAULT),
    Reason.PROOF_COUNT: Words("a sample has too few or too many proofs", _OWN_FAULT),
    Reason.PROOF_ENCODING: Words("a proof does not parse, or is not canonical", _OWN_FAULT),
    Reason.FILE_INCOMPLETE: Words(
        "whole groups are missing at the end: a crash, so nothing is punished",
        "look at the worker's log for what stopped it",
    ),
    Reason.WRONG_PROBLEM: Words("a problem, prompt or length is not the derived one", _OWN_FAULT),
    Reason.WRONG_SEED: Words("a sampling seed is not the derived one", _OWN_FAULT),
    Reason.WRONG_POLICY: Words("rows claim another policy version than the ticket's", _OWN_FAULT),
    Reason.WRONG_REPLY: Words(
        "within a completion something else is replied than its task's environment does",
        "a program that a model wrote may answer differently elsewhere: that is only rejected; "
        + _OWN_FAULT,
    ),
    Reason.WRONG_REWARD: Words(
        "a reward is not what the task's verifier computes, or cannot be graded",
        "if the answer could not be graded it is only rejected; else " + _OWN_FAULT,
    ),
    Reason.WRONG_UNITS: Words("the units are not what the completions add up to", _OWN_FAULT),
    Reason.WRONG_TERMINATION: Words(
        "a completion ends neither in EOS within the limit nor at the limit", _OWN_FAULT
    ),
    Reason.TOPLOC_MISMATCH: Words(
        "recomputed hidden states do not match the proofs: another policy, precision or context",
        _STATISTICAL,
    ),
    Reason.SAMPLER_MISMATCH: Words(
        "tokens are not those that the seeds yield: another sampler, model or precision",
        _STATISTICAL,
    ),
}
"""Every reason in words."""

VERDICTS = {
    Verdict.ACCEPTED: "paid, and offered to training",
    Verdict.INCOMPLETE: "not paid, not punished",
    Verdict.REJECTED: "not paid",
    Verdict.FRAUD: "not paid, and slashed",
}
"""What follows from a verdict."""


def marks_of(verdict: Verdict, reason: Reason) -> list[str]:
    """Return `passed`, `FAILED` or `-` (not reached) for each check; the first failure decides."""
    failed = len(CHECKS) + 1 if verdict is Verdict.ACCEPTED else int(reason) // 10
    return ["passed" if n < failed else "FAILED" if n == failed else "-" for n in range(1, 8)]


def checks_of(verdict: Verdict, reason: Reason) -> list[str]:
    """Return each check as a line: passed, failed or not reached."""
    marks = marks_of(verdict, reason)
    return [
        f"{n} {mark:7} {check}"
        for n, (mark, check) in enumerate(zip(marks, CHECKS, strict=True), 1)
    ]


def words_of(reason: Reason) -> Words:
    """Return a reason in words; one of a later version of the protocol gets its number."""
    return WORDS.get(reason, Words(f"reason {int(reason)}, which this version does not know", ""))
