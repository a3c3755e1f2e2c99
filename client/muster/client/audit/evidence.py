"""A copy of the evidence, and the self-proving faults that it shows.

Nothing in a copy is believed. Every file is found by the hash that the chain names, so the order of
files does not matter, and several folders add up:

    <sha256>.parquet, <sha256>.json   a submission's file; its submission, signatures and ticket,
                                      as orchestrators keep them in `--files`
    <root>.json                       a batch's composition, likewise
    <batch>-<validator>.json          the outcomes that a validator handed in, likewise
    checking-<batch>.json             its proofs of checking, as orchestrators serve them
    <keccak256>                       recipe, calibration, task set, manifests, under any name
    <run>/v<version>/                 a policy's files
    *.zip                             evidence bundles, as `muster explain --save` writes them
"""

import contextlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from muster.api import BatchChecking
from muster.api.answers import AccountAddress, BatchEntry, HexBytes, HexHash, HexSignature
from muster.chain import BatchView, Chain, WorkerStatus
from muster.chain.doubles import (
    WITHHELD,
    DoubleOutcome,
    DoubleSubmission,
    Fault,
    SignedRecords,
    SignedWork,
    each_once,
    find_misrecords,
)
from muster.client.audit.contradictions import Contradiction, Kind, at_outcomes
from muster.client.audit.ledger import Ledger
from muster.client.chain_facts import entry_of
from muster.client.disputes.bundle import (
    CALIBRATION,
    MANIFEST,
    RECIPE,
    SUBMISSION,
    TASK_SET,
    Bundle,
)
from muster.client.validator.calls import shown_by
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, ContractRevert, EncodingError, MusterError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, to_hash32
from muster.protocol.messages import OutcomeRecord, Outcomes, Submission
from muster.protocol.rollouts import MAX_FILE_BYTES
from muster.settings import read_file
from muster.tasks import document_root

MAX_ENTRIES = 1_000_000
"""Most files of a copy that are examined."""
MAX_SMALL_BYTES = 16 << 20
"""Largest recipe, calibration or manifest."""
MAX_ENTRY_BYTES = 1 << 20
"""Size limit of the JSON file beside a submission's file."""
MAX_COMPOSITION_BYTES = 1 << 20
"""Largest composition of a batch."""
MAX_CHECKING_BYTES = 64 << 20
"""Largest file with the proofs of checking of one batch."""
M = TypeVar("M", bound=BaseModel)
_OUTCOMES = re.compile(r"(\d{1,20})-0x[0-9a-f]{40}\.json")
_ENTRY = re.compile(r"[0-9a-f]{64}\.json")
_CHECKING = re.compile(r"checking-(\d{1,20})\.json")


class KnownBundle(NamedTuple):
    """A bundle, with the submission that it claims to be about."""

    path: Path
    """The file."""
    batch_id: int
    file_hash: Hash32
    """The submission's file."""


class KeptOutcomes(BaseModel):
    """One validator's outcomes of one batch, as an orchestrator keeps them."""

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)

    batch_id: int
    root: HexHash
    """The batch's root at its commitment: a restarted local chain uses batch numbers again."""
    validator: AccountAddress
    """Who signed."""
    records: HexBytes
    """The packed records."""
    signature: HexSignature
    """EIP-712 `Outcomes`."""

    def is_signed(self, domain: Domain) -> bool:
        """Return whether the validator signed these outcomes; `domain` is the ledger's."""
        message = Outcomes(self.batch_id, self.root, keccak(self.records))
        return signer_of(domain, message, self.signature) == self.validator


class Composed(BaseModel):
    """The composition of a batch, as an orchestrator keeps it."""

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)

    file_hashes: list[HexHash]
    """Files of its submissions, in batch order."""


class EvidenceFolders:
    """Folders with evidence, whose files are found by hash."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises ConfigError when one of them is not a folder."""
        self._named: dict[str, Path] = {}
        self._loose: list[Path] = []
        self._folders: list[Path] = []
        self._bundles: list[KnownBundle] = []
        self.broken: list[tuple[Path, MusterError]] = []
        """Bundles that cannot be read, each with the reason."""
        self._small: dict[Hash32, Path] | None = None
        self._outcomes: dict[int, list[Path]] = defaultdict(list)
        self._checkings: dict[int, list[Path]] = defaultdict(list)
        for place, path in enumerate(_walk(folders)):
            if place >= MAX_ENTRIES:
                raise ConfigError(f"more than {MAX_ENTRIES} files of evidence")
            self._take_in(path)

    def _take_in(self, path: Path) -> None:
        if path.is_dir():
            self._folders.append(path)
        elif path.suffix == ".zip":
            self._take_in_bundle(path)
        elif match := _OUTCOMES.fullmatch(path.name.lower()):
            self._outcomes[int(match[1])].append(path)
        elif match := _CHECKING.fullmatch(path.name.lower()):
            self._checkings[int(match[1])].append(path)
        else:
            self._named.setdefault(path.name.lower().removeprefix("0x"), path)
            self._loose.append(path)

    def _take_in_bundle(self, path: Path) -> None:
        try:
            with Bundle(path) as bundle:
                evidence = bundle.evidence()
        except MusterError as error:
            self.broken.append((path, error))
            return
        self._bundles.append(
            KnownBundle(path, evidence.batch_id, evidence.entry.submission.file_hash)
        )

    # Submissions

    def submission_file(self, file_hash: Hash32) -> bytes | None:
        """Return the file named by a submission's hash; None when there is none. The hash of its
        bytes may differ.
        """
        for name in (f"{file_hash.hex()}.parquet", file_hash.hex()):
            if (path := self._named.get(name)) is not None:
                return read_file(path, MAX_FILE_BYTES)
        for known in self._bundles:
            if known.file_hash == file_hash:
                with Bundle(known.path) as bundle:
                    return bundle.part(SUBMISSION)
        return None

    def entries(self, batch: BatchView) -> list[BatchEntry] | None:
        """Return a batch's submissions in order, as the chain has them with their proofs, else as
        stored; None when one is missing.

        The batch's outcome records, which are on chain, name the files.
        """
        if batch.work is not None:
            return [entry_of(batch.work, batch.committed_at)]
        found = [self._entry(record.file_hash) for record in batch.records or ()]
        if found and all(entry is not None for entry in found):
            return [entry for entry in found if entry is not None]
        for known in self._bundles:
            if known.batch_id == batch.batch_id:
                with Bundle(known.path) as bundle:
                    return bundle.evidence().entries
        return None

    def composition(self, batch: BatchView) -> list[BatchEntry] | None:
        """Return a batch's submissions in order, as its stored composition names them; None when
        the composition or a submission is missing.
        """
        path = self._named.get(f"{batch.root.hex()}.json")
        if path is None:
            return None
        with contextlib.suppress(ValidationError, RecursionError):
            named = Composed.model_validate_json(read_file(path, MAX_COMPOSITION_BYTES))
            found = [self._entry(file_hash) for file_hash in named.file_hashes]
            if all(entry is not None for entry in found):
                return [entry for entry in found if entry is not None]
        return None

    def _entry(self, file_hash: Hash32) -> BatchEntry | None:
        path = self._named.get(f"{file_hash.hex()}.json")
        if path is None:
            return None
        try:
            return BatchEntry.model_validate_json(read_file(path, MAX_ENTRY_BYTES))
        except (ValidationError, RecursionError) as error:
            raise EncodingError(f"{path.name} of the evidence is malformed: {error}") from error

    def all_entries(self) -> Iterator[BatchEntry]:
        """Yield every submission stored with its signature, judged or not; malformed files are
        skipped.
        """
        for name in filter(_ENTRY.fullmatch, self._named):
            with contextlib.suppress(EncodingError):
                if (entry := self._entry(to_hash32(name[:64]))) is not None:
                    yield entry
        for known in self._bundles:
            with Bundle(known.path) as bundle:
                yield from bundle.evidence().entries

    # Validators' outcomes and proofs

    def has_outcomes(self, batch_id: int) -> bool:
        """Return whether there may be validators' outcomes of a batch."""
        return batch_id in self._outcomes

    def outcomes(self, batch: BatchView, found: list[Contradiction]) -> Iterator[KeptOutcomes]:
        """Yield the outcomes that validators handed in for a batch; unreadable files are added to
        `found`.
        """
        for path in self._outcomes.get(batch.batch_id, ()):
            kept = _parsed(KeptOutcomes, path, batch, found)
            if kept is not None and (kept.batch_id, kept.root) == (batch.batch_id, batch.root):
                yield kept

    def checking(self, batch: BatchView, found: list[Contradiction]) -> BatchChecking | None:
        """Return the stored proofs of checking of a batch; an unreadable file is added to
        `found`.
        """
        for path in self._checkings.get(batch.batch_id, ()):
            kept = _parsed(BatchChecking, path, batch, found)
            if kept is not None and kept.batch_root == batch.root:
                return kept
        return None

    # Documents

    def document(self, pinned: Hash32) -> bytes | None:
        """Return a recipe, calibration or manifest by its Keccak-256."""
        path = self._documents().get(pinned)
        if path is not None:
            return read_file(path, MAX_SMALL_BYTES)
        for data in self._parts(RECIPE, CALIBRATION, MANIFEST):
            if keccak(data) == pinned:
                return data
        return None

    def task_set(self, pinned: Hash32, folder: Path) -> Path | None:
        """Return the file of a task set by its root; one from a bundle is written to `folder`."""
        for name in (pinned.hex(), f"{pinned.hex()}.jsonl"):
            path = self._named.get(name)
            if path is not None and _root_of(path) == pinned:
                return path
        for data in self._parts(TASK_SET):
            path = folder / pinned.hex()
            path.write_bytes(data)
            if _root_of(path) == pinned:
                return path
        return None

    def _documents(self) -> dict[Hash32, Path]:
        if self._small is None:
            self._small = {}
            for path in self._loose:
                if path.suffix in (".parquet", ".safetensors"):
                    continue
                # Files may vanish meanwhile: origins and relays drop old versions.
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                    data = file.read(MAX_SMALL_BYTES + 1)
                    if len(data) <= MAX_SMALL_BYTES:
                        self._small[keccak(data)] = path
        return self._small

    def _parts(self, *names: str) -> Iterator[bytes]:
        for known in self._bundles:
            with Bundle(known.path) as bundle:
                for name in names:
                    if (data := bundle.part(name)) is not None:
                        yield data

    # Policies

    def policy_folders(self, run_id: RunId, version: PolicyVersion) -> list[Path]:
        """Return folders that may hold a policy's files; only their names are compared."""
        names = {f"v{int(version)}", f"{int(run_id)}-v{int(version)}", f"policy-{int(version)}"}
        return [path for path in self._folders if path.name in names]

    def bundles_of(self, root: Hash32) -> Iterator[Bundle]:
        """Yield the bundles that hold weights and the manifest of this root."""
        for known in self._bundles:
            with Bundle(known.path) as bundle:
                data = bundle.part(MANIFEST)
                if data is not None and keccak(data) == root and bundle.has_weights():
                    yield bundle


def _walk(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders and the regular files of a copy: a pipe would be waited for, and a link may
    lead to a device.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder", hint="give a folder with --evidence")
        for parent, below, names in os.walk(folder):
            yield Path(parent)
            # Hidden folders hold unfinished files.
            below[:] = sorted(name for name in below if not name.startswith("."))
            yield from (path for name in sorted(names) if _is_regular(path := Path(parent) / name))


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _parsed(kind: type[M], path: Path, batch: BatchView, found: list[Contradiction]) -> M | None:
    """Return a file's content about a batch; None, and an entry in `found`, if it is malformed."""
    try:
        return kind.model_validate_json(read_file(path, MAX_CHECKING_BYTES))
    except (ValidationError, RecursionError):
        what = f"{path.name} of the evidence is malformed"
        found.append(at_outcomes(batch, Kind.EVIDENCE_ALTERED, what))
        return None


def _root_of(path: Path) -> Hash32 | None:
    try:
        return document_root(path)
    except (MusterError, OSError):
        return None


# Self-proving faults that nobody reported: found, and reported on chain.
#
# They are: a validator signed two outcomes of one batch, or a record that contradicts what its
# batch holds, or a worker signed two submissions for one slot. The signatures are on chain (posted,
# shown, in claims and direct submissions) or in a copy of the evidence; each is checked here before
# anything is sent. A report earns nothing.

SETTLED = "VaultOffenceSettled"
"""The vault's error when somebody else reported first."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A fault, and the result of its report."""

    fault: Fault
    """The fault."""
    tx: str | None = None
    """The transaction that proved it; None without one."""
    refused: str | None = None
    """Why it could not be proven; None when it was proven or not reported."""

    def to_json(self) -> dict[str, Any]:
        """Return the fault and its report as JSON values."""
        return {
            "offence": self.fault.offence.name.lower(),
            "account": self.fault.owner,
            "batch_id": self.fault.batch.batch_id,
            "words": self.fault.words,
            "tx": self.tx,
            "refused": self.refused,
        }


# Found


def find_faults(view: Ledger, domain: Domain, run_id: RunId, store: EvidenceFolders) -> list[Fault]:
    """Return the unreported faults of a run that the chain or a copy of the evidence proves;
    `domain` is the ledger's.
    """
    settled = {(s.owner, s.offence, s.tag) for s in view.slashes if s.run_id == run_id}
    found: list[Fault] = [
        *_double_outcomes(view, domain, run_id, store),
        *_double_submissions(view, domain, run_id, store),
        *_misrecords(view, domain, run_id, store),
    ]
    return each_once(f for f in found if f.filed not in settled and not _is_banned(view, run_id, f))


def _is_banned(view: Ledger, run_id: RunId, fault: Fault) -> bool:
    member = view.member(run_id, fault.owner)
    return member is not None and member.status == WorkerStatus.BANNED


def _double_outcomes(
    view: Ledger, domain: Domain, run_id: RunId, store: EvidenceFolders
) -> Iterator[DoubleOutcome]:
    seats = view.runs[run_id].seats
    for batch in view.batches.values():
        # The ledger forgets void batches: nothing can be proven about them.
        if batch.run_id != run_id or batch.is_void:
            continue
        # Posted outcomes alone prove no fault, so most signatures need not be recovered again.
        if not batch.shown and not store.has_outcomes(batch.batch_id):
            continue
        for who, said in _statements(batch, domain, store).items():
            if who in seats and len(said) > 1:
                first, second, *_ = (SignedRecords(*each) for each in said.items())
                yield DoubleOutcome(who, batch, first, second)


def _statements(
    batch: BatchView, domain: Domain, store: EvidenceFolders
) -> dict[Address, dict[Hash32, bytes]]:
    """Return the statements of each validator about a batch, by the hash of their records. An
    earlier statement that the batch is withheld contradicts nothing.
    """
    said: dict[Address, dict[Hash32, bytes]] = defaultdict(dict)
    for hashed, signed in shown_by(batch, domain).items():
        for who, signature in signed.items():
            said[who][hashed] = signature
    for kept in store.outcomes(batch, []):
        if kept.is_signed(domain):
            said[kept.validator][keccak(kept.records)] = kept.signature
    for statements in said.values():
        statements.pop(WITHHELD, None)
    return said


def _misrecords(
    view: Ledger, domain: Domain, run_id: RunId, store: EvidenceFolders
) -> Iterator[Fault]:
    run = view.runs[run_id]
    for batch in view.batches.values():
        if batch.run_id == run_id and batch.records is not None and batch.signers:
            works = _works_of(batch, store)
            yield from find_misrecords(batch, works, run, view.worker_by_id, domain)


def _works_of(batch: BatchView, store: EvidenceFolders) -> list[SignedWork]:
    """Return a batch's submissions in order, as the chain or a copy has them; none if one is
    missing or malformed, which the audit reports by itself.
    """
    if batch.work is not None:
        return [SignedWork(batch.work.submission, batch.work.node_signature)]
    with contextlib.suppress(EncodingError):
        entries = store.composition(batch) or store.entries(batch) or []
        return [SignedWork(entry.submission, entry.signature) for entry in entries]
    return []


Slot = tuple[Address, int, int]


def _double_submissions(
    view: Ledger, domain: Domain, run_id: RunId, store: EvidenceFolders
) -> Iterator[DoubleSubmission]:
    by_slot: dict[Slot, dict[Hash32, SignedWork]] = defaultdict(dict)
    for submission, signature in _signed(view, run_id, store):
        slot = (submission.worker, submission.step, submission.index)
        by_slot[slot][submission.struct_hash()] = SignedWork(submission, signature)
    doubles = {slot: signed for slot, signed in by_slot.items() if len(signed) > 1}
    if not doubles:
        return
    for batch in view.batches.values():
        if batch.run_id != run_id:
            continue
        for position, record in enumerate(batch.records or ()):
            worker = view.worker_by_id.get(record.worker_id)
            slot = (worker.address if worker else Address(""), record.step, record.index)
            pair = _pair(view, domain, batch, record, list(doubles.get(slot, {}).values()))
            if pair is not None:
                # The vault takes stake only once for a slot.
                del doubles[slot]
                yield DoubleSubmission(batch, position, *pair)


def _pair(
    view: Ledger,
    domain: Domain,
    batch: BatchView,
    record: OutcomeRecord,
    signed: Sequence[SignedWork],
) -> tuple[SignedWork, SignedWork] | None:
    """Return the judged submission and a second one, each signed by a node of the worker."""
    answered = [
        each
        for each in signed
        if view.answers_for(
            batch, each.submission.worker, signer_of(domain, each.submission, each.signature)
        )
    ]
    judged = (record.policy_version, record.file_hash)
    for first in answered:
        others = [other for other in answered if other != first]
        if (first.submission.policy_version, first.submission.file_hash) == judged and others:
            return first, others[0]
    return None


def _signed(
    view: Ledger, run_id: RunId, store: EvidenceFolders
) -> Iterator[tuple[Submission, bytes]]:
    """Yield the signed submissions of a run that are on chain or in a copy."""
    for batch in view.batches.values():
        if batch.run_id == run_id and batch.work is not None:
            yield batch.work.submission, batch.work.node_signature
    for case in view.cases.values():
        if case.run_id == run_id:
            yield from ((claim.submission, claim.node_signature) for claim in case.claims)
    for entry in store.all_entries():
        if entry.submission.run_id == run_id:
            yield entry.submission, entry.signature


# Reported


async def report_faults(chain: Chain, faults: Sequence[Fault]) -> list[Reported]:
    """Prove faults on chain, one transaction each; a refusal is noted and the rest goes on."""
    reported = []
    for fault in faults:
        try:
            reported.append(Reported(fault, tx=(await fault.prove(chain.faults)).tx_hash))
        except ContractRevert as error:
            is_late = error.name == SETTLED
            why = "somebody else reported it meanwhile" if is_late else str(error)
            reported.append(Reported(fault, refused=why))
    return reported
