"""Checks of an evidence bundle: each statement of a verdict, compared with a recomputation.

Pure except for files. Signatures, roots and hashes are checked against the given facts: those on
chain, or those stated in the bundle. The verdict is recomputed with the validators' own checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from muster.chain.conversion import lenient_reason
from muster.client.disputes.bundle import (
    CALIBRATION,
    MANIFEST,
    RECIPE,
    TASK_SET,
    Bundle,
    ChainFacts,
    Evidence,
)
from muster.client.disputes.cases import ruling_words
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import EncodingError, TaskError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.jury import Ruling, is_same, rests_on_program
from muster.protocol.merkle import batch_root
from muster.protocol.messages import OutcomeRecord, Outcomes, Reason, Verdict
from muster.protocol.reasons import CHECKS, NOT_OF_ONE_FILE, marks_of
from muster.tasks import root_of_bytes

if TYPE_CHECKING:
    from muster.client.disputes.rerun import Rerun
    from muster.client.validator.checks import ClaimedWork
    from muster.shardcast import Manifest

OF_A_PROGRAM = "it rests on a program's answer, which another machine or time may change"
"""Why nothing is said about a verdict that differs from the recomputed one (decision 99)."""


class CheckAnswer(StrEnum):
    """Answer of a check."""

    AGREE = "agree"
    """The check confirms the statement."""
    CONTRADICT = "contradict"
    """The statement is false."""
    SILENT = "-"
    """There is no statement, or no way to check it."""


@dataclass(frozen=True, slots=True)
class BundleCheck:
    """One statement and the answer of its check."""

    name: str
    """What was stated."""
    answer: CheckAnswer
    """Whether it holds."""
    detail: str = ""
    """The values that were compared."""


def _check(name: str, holds: bool, detail: str) -> BundleCheck:
    return BundleCheck(name, CheckAnswer.AGREE if holds else CheckAnswer.CONTRADICT, detail)


# What was committed, signed and pinned


def check_facts(stated: ChainFacts, chain: ChainFacts | None) -> BundleCheck:
    """Compare the bundle's facts with the chain; SILENT without a chain."""
    name = "chain facts"
    if chain is None:
        return BundleCheck(
            name, CheckAnswer.SILENT, "offline: the bundle's own, compare them with the chain"
        )
    ours, theirs = chain.model_dump(mode="json"), stated.model_dump(mode="json")
    if stated.ruling is None:
        # A jury may have ruled after the bundle was written.
        theirs["ruling"] = ours["ruling"]
    wrong = [
        f"{field}: {theirs[field]}, on chain {ours[field]}"
        for field in ours
        if ours[field] != theirs[field]
    ]
    return _check(name, not wrong, "; ".join(wrong) or f"{len(ours)} facts are the chain's")


def check_batch(evidence: Evidence, facts: ChainFacts) -> BundleCheck:
    """Return whether the submissions shown are those that the batch was committed for."""
    leaves = [entry.submission.leaf() for entry in evidence.entries]
    holds = len(leaves) == facts.count and batch_root(leaves) == facts.root
    return _check("batch root", holds, f"{len(leaves)} submissions, root {hex0x(facts.root)}")


def check_outcomes(evidence: Evidence, facts: ChainFacts, *, is_of_chain: bool) -> BundleCheck:
    """Return whether a quorum of the run's validators signed the outcomes shown, or jurors of the
    network ruled so. Nobody signs that ruling: without facts of a chain the answer is SILENT.
    """
    name, records_hash = "outcome signatures", keccak(evidence.records)
    is_posted = records_hash == facts.records_hash
    if facts.summoned is not None:
        recorded = recorded_of(evidence)
        ruled = Ruling(recorded.verdict, recorded.reason).number == facts.summoned
        detail = f"jurors of the network ruled {ruling_words(facts.summoned)}, as nobody judged it"
        if is_posted and ruled and not is_of_chain:
            return BundleCheck(name, CheckAnswer.SILENT, f"offline: the bundle says that {detail}")
        return _check(name, is_posted and ruled, detail)
    message = Outcomes(evidence.batch_id, facts.root, records_hash)
    signers = {signer_of(domain_of(facts), message, each) for each in evidence.signatures}
    seated = signers & set(facts.validators)
    detail = f"{len(seated)} of {len(facts.validators)} validators signed, {facts.quorum} make it"
    return _check(name, is_posted and len(seated) >= facts.quorum, detail)


def check_documents(bundle: Bundle, facts: ChainFacts) -> BundleCheck:
    """Return whether recipe, calibration and task set are the pinned ones."""
    pinned = {RECIPE: facts.recipe, CALIBRATION: facts.calibration, TASK_SET: facts.task_set}
    hashes = {name: keccak(bundle.part(name) or b"") for name in (RECIPE, CALIBRATION)}
    hashes[TASK_SET] = _task_set_hash(bundle.part(TASK_SET) or b"")
    wrong = [name for name, pin in pinned.items() if hashes[name] != pin]
    detail = f"not the pinned one: {', '.join(wrong)}" if wrong else "as pinned"
    return _check("documents", not wrong, detail)


def _task_set_hash(data: bytes) -> Hash32:
    """Return a task set's root; zero, which nobody pins, when the bytes are not a task set."""
    try:
        return root_of_bytes(data)
    except (EncodingError, TaskError):
        return Hash32(bytes(32))


def read_manifest(bundle: Bundle, facts: ChainFacts) -> Manifest | None:
    """Return the policy's manifest; None when the bundle has none with the chain's root."""
    from muster.shardcast import Manifest

    data = bundle.part(MANIFEST)
    if data is None or facts.policy is None or keccak(data) != facts.policy.root:
        return None
    return Manifest.from_bytes(data)


def check_weights(manifest: Manifest, folder: Path) -> BundleCheck:
    """Return whether a folder's files match the manifest, by hashing them. The folder must hold no
    others, but hidden ones: engines read settings, weights and lists that a version may lack.
    """
    from muster.shardcast import state_hash

    try:
        if misfit := _misfit_in(folder, manifest):
            return BundleCheck("policy", CheckAnswer.CONTRADICT, misfit)
        files = {file.name: folder / file.name for file in manifest.files}
        holds = state_hash(files) == manifest.state_hash
    except OSError as error:
        return BundleCheck("policy", CheckAnswer.CONTRADICT, f"{error.filename}: {error.strerror}")
    root = hex0x(manifest.root())
    detail = f"version {manifest.version}, {manifest.total_bytes} bytes, root {root}"
    return _check("policy", holds, detail)


def _misfit_in(folder: Path, manifest: Manifest) -> str | None:
    """Return what of a folder cannot be of a version, before any file is read; raises OSError."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    for name in sorted(names - {file.name for file in manifest.files}):
        return f"{name} lies beside the files of version {manifest.version}, and is not its"
    for file in manifest.files:
        path = folder / file.name
        if path.stat().st_size != file.size or not path.is_file():
            return f"{file.name} is not as its manifest says"
    return None


def domain_of(facts: ChainFacts) -> Domain:
    """Return the EIP-712 domain of tickets, submissions and outcomes."""
    return Domain(facts.chain_id, facts.ledger)


# The verdict


def recorded_of(evidence: Evidence) -> OutcomeRecord:
    """Return the outcome that was posted; raises EncodingError when it does not parse."""
    size = OutcomeRecord.SIZE
    return OutcomeRecord.from_bytes(evidence.records[size * evidence.position :][:size])


def claim_of(evidence: Evidence, facts: ChainFacts) -> ClaimedWork:
    """Return the submission as validators saw it, under the given facts."""
    from muster.client.validator.checks import ClaimedWork

    entry = evidence.entry
    policies = {}
    if facts.policy is not None:
        policies[PolicyVersion(entry.submission.policy_version)] = KnownPolicy(
            facts.policy.root, facts.policy.beacon
        )
    terms = TicketTerms(
        domain=domain_of(facts),
        orchestrator=facts.orchestrator,
        run_id=RunId(facts.run_id),
        worker=entry.submission.worker,
        policies=policies,
    )
    return ClaimedWork(
        submission=entry.submission,
        signature=entry.signature,
        ticket=entry.ticket,
        ticket_signature=entry.ticket_signature,
        committed_at=facts.committed_at,
        terms=terms,
        worker_id=facts.worker_id,
        node=facts.node,
        is_slot_used=facts.is_slot_used,
    )


def reason_of(recorded: OutcomeRecord, ruling: int | None) -> Reason:
    """Return the reason that stands: a jury's, if it ruled, else the recorded one."""
    return recorded.reason if ruling is None else lenient_reason(ruling & 0xFF)


def check_verdict(
    recorded: OutcomeRecord, again: Rerun, *, ruling: int | None = None, has_history: bool = False
) -> list[BundleCheck]:
    """Compare each of the ordered checks, and the whole record, with the verdict. A jury's `ruling`
    stands in place of the record; its consequences are compared, as its reason is one juror's.
    `has_history` tells that the worker's earlier submissions were taken into account.
    """
    ours = Ruling(again.record.verdict, again.record.reason)
    silent = _silence(recorded, ruling, ours, has_history)
    stated = marks_of(recorded.verdict, recorded.reason) if ruling is None else "-" * len(CHECKS)
    found = marks_of(again.record.verdict, again.record.reason)
    checks = [
        _compare(f"{n} {name}", mark, ours, silent, _details(n, again))
        for n, (name, mark, ours) in enumerate(zip(CHECKS, stated, found, strict=True), 1)
    ]
    if silent:
        return [*checks, BundleCheck("verdict", CheckAnswer.SILENT, silent)]
    if ruling is not None:
        detail = f"a jury ruled {ruling_words(ruling)}, recomputed {ours}"
        return [*checks, _check("verdict", is_same(ruling, ours.number), detail)]
    wrong = [
        f"{field}: {getattr(recorded, field)!s}, recomputed {getattr(again.record, field)!s}"
        for field in OutcomeRecord.__dataclass_fields__
        if getattr(recorded, field) != getattr(again.record, field)
    ]
    as_recorded = f"{recorded.verdict.name.lower()}, {recorded.reason.name}, {recorded.units} units"
    return [*checks, _check("verdict", not wrong, "; ".join(wrong) or as_recorded)]


def _silence(
    recorded: OutcomeRecord, ruling: int | None, ours: Ruling, has_history: bool
) -> str | None:
    """Return why the evidence of one file tells nothing about what stands; None if it tells
    something.
    """
    reason = reason_of(recorded, ruling)
    if ruling is None:
        standing = Ruling(recorded.verdict, recorded.reason).number
        differs = standing != ours.number
    else:
        standing, differs = ruling, not is_same(ruling, ours.number)
    if rests_on_program(ours.number):
        # Checks 1 and 2 run no program, and come before all that do.
        is_open = differs and reason.check not in (1, 2)
    else:
        is_open = rests_on_program(standing) and ours.verdict is Verdict.ACCEPTED
    if is_open:
        return OF_A_PROGRAM
    return None if has_history else NOT_OF_ONE_FILE.get(reason)


def _compare(name: str, stated: str, found: str, silent: str | None, detail: str) -> BundleCheck:
    if silent or "-" in (stated, found):
        return BundleCheck(
            name, CheckAnswer.SILENT, detail if found != "-" else "another check decided"
        )
    suffix = f": {detail}" if detail else ""
    if stated == found:
        return BundleCheck(name, CheckAnswer.AGREE, f"{found}{suffix}")
    return BundleCheck(
        name, CheckAnswer.CONTRADICT, f"recorded {stated}, recomputed {found}{suffix}"
    )


def _details(number: int, again: Rerun) -> str:
    """Return the measurements of a check in the recomputation, or where it failed."""
    if again.detail and int(again.record.reason) // 10 == number:
        return again.detail
    of_proofs = [s for s in again.statistics if "margin" not in s.name]
    of_sampling = [s for s in again.statistics if "margin" in s.name]
    return ", ".join(map(str, {6: of_proofs, 7: of_sampling}.get(number, [])))


def is_borne_out(checks: list[BundleCheck]) -> bool:
    """Return whether no check contradicts."""
    return all(check.answer is not CheckAnswer.CONTRADICT for check in checks)
