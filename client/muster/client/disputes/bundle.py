"""An evidence bundle: one zip file with everything behind a verdict on one submission.

    evidence.json             the committed batch, the posted outcomes, facts on chain
    submission.parquet        the submission's file
    recipe, calibration, task_set    the run's documents, as pinned
    manifest                  manifest of the policy that the ticket names
    policy/<file>             its weights, unless they were too large to put in

Its reader trusts nothing in it: `muster.client.disputes.bundle_checks` compares every part with the
chain. Offline it compares with the facts stated in the bundle, which people then compare with the
chain.
"""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from muster.api.answers import AccountAddress, BatchEntry, HexBytes, HexHash, HexSignature
from muster.client.chain_facts import ruled_in
from muster.lifecycle.files import whole_file
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.jury import summons_of
from muster.protocol.messages import OutcomeRecord

if TYPE_CHECKING:
    from muster.chain import BatchView, ChainView, SubmissionPlace
    from muster.client.validator.checks import ClaimedWork
    from muster.client.validator.judging import Rules
    from muster.protocol.eip712 import Domain


DOCUMENT, SUBMISSION, MANIFEST, POLICY = "evidence.json", "submission.parquet", "manifest", "policy"
RECIPE, CALIBRATION, TASK_SET = "recipe", "calibration", "task_set"
MAX_DOCUMENT_BYTES = 16 << 20
"""A batch of 4096 submissions takes about 8 MiB."""
MAX_PART_BYTES = 256 << 20
"""Largest part, except the weights."""
MAX_POLICY_BYTES = 256 << 20
"""Weights up to this size go into a bundle."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class PolicyFacts(_Part):
    """A policy version on chain."""

    root: HexHash
    """Root of its manifest."""
    beacon: HexHash
    """Beacon from which the worker's seeds under this policy are derived."""


RulingNumber = Annotated[int, Field(ge=1 << 8, lt=5 << 8)]
"""A ruling as contracts number it: one of the four verdicts, and any reason."""


class ChainFacts(_Part):
    """Facts on chain that a verdict depends on, at the batch's block."""

    chain_id: int
    """EIP-155 chain id."""
    ledger: AccountAddress
    """The ContributionLedger."""
    run_id: int
    orchestrator: AccountAddress
    """The account whose tickets count."""
    recipe: HexHash
    """The pinned recipe."""
    calibration: HexHash
    """The pinned calibration."""
    task_set: HexHash
    """The pinned task set."""
    quorum: int
    """Signatures that a verdict needs."""
    validators: list[AccountAddress]
    """The accounts that had a seat when the outcomes were posted."""
    root: HexHash
    """Root over the batch's submissions, as committed."""
    count: int
    """Submissions in the batch."""
    committed_at: int
    """Time of the commitment."""
    records_hash: HexHash
    """Keccak-256 of the posted outcomes."""
    worker_id: int
    """The worker's id; 0 if the account is no worker."""
    node: AccountAddress | None
    """The worker's node; None when it was not active."""
    is_slot_used: bool
    """Whether an earlier submission fills the slot."""
    policy: PolicyFacts | None
    """The policy version that the submission names, if it was published."""
    ruling: RulingNumber | None = None
    """The ruling that a jury put in the place of the outcome; None while there is none."""
    summoned: RulingNumber | None = None
    """The ruling of jurors who judged the work because its run did not."""

    @property
    def stands(self) -> int | None:
        """What a jury ruled about the work, as a number; None when validators' outcome stands."""
        return self.summoned if self.ruling is None else self.ruling


class Evidence(_Part):
    """The document of a bundle."""

    MAX_ENTRIES: ClassVar[int] = 4096

    schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    """Version of this document's format."""
    batch_id: Annotated[int, Field(ge=1)]
    position: Annotated[int, Field(ge=0)]
    """The submission's place in the batch."""
    facts: ChainFacts
    """Facts on chain, as stated by the bundle."""
    entries: Annotated[list[BatchEntry], Field(max_length=MAX_ENTRIES)]
    """The batch's submissions, in order."""
    records: HexBytes
    """The batch's outcome records, joined."""
    signatures: Annotated[list[HexSignature], Field(max_length=256)]
    """The validators' signatures on them."""

    @property
    def entry(self) -> BatchEntry:
        """The submission it is about."""
        return self.entries[self.position]

    @classmethod
    def from_bytes(cls, data: bytes) -> Evidence:
        """Parse a document; raises EncodingError when it does not parse."""
        try:
            found = cls.model_validate_json(data)
        except (ValidationError, RecursionError) as error:
            raise EncodingError(f"{DOCUMENT} is malformed: {error}") from error
        if found.position >= len(found.entries):
            raise EncodingError(f"{DOCUMENT} has no submission at position {found.position}")
        if len(found.records) != OutcomeRecord.SIZE * len(found.entries):
            raise EncodingError(f"{DOCUMENT} has not one outcome for each submission")
        return found


def facts_of(
    view: ChainView, place: SubmissionPlace, claim: ClaimedWork, domain: Domain
) -> ChainFacts:
    """Return the facts on chain about a judged submission."""
    policy = claim.terms.policies.get(claim.submission.policy_version)
    batch = place.batch
    run = view.runs[batch.run_id]
    config = run.config
    # The caller asks about judged batches.
    assert batch.records is not None
    assert batch.records_hash is not None
    leaf = batch.records[place.position].leaf(batch.batch_id, place.position)
    return ChainFacts(
        chain_id=domain.chain_id,
        ledger=domain.verifying_contract,
        run_id=run.run_id,
        orchestrator=claim.terms.orchestrator,
        recipe=config.recipe_hash,
        calibration=config.calibration_hash,
        task_set=config.task_set_hash,
        quorum=run.quorum_of(batch),
        validators=list(batch.validators),
        root=batch.root,
        count=batch.count,
        committed_at=batch.committed_at,
        records_hash=batch.records_hash,
        worker_id=claim.worker_id,
        node=claim.node,
        is_slot_used=claim.is_slot_used,
        policy=PolicyFacts(root=policy.root, beacon=policy.beacon) if policy else None,
        ruling=ruled_in(view, leaf),
        summoned=ruled_in(view, summons_of(batch.batch_id)),
    )


def evidence_of(
    batch: BatchView, position: int, entries: Sequence[BatchEntry], facts: ChainFacts
) -> Evidence:
    """Return the document of a judged submission."""
    return Evidence(
        batch_id=batch.batch_id,
        position=position,
        facts=facts,
        entries=list(entries),
        records=b"".join(record.to_bytes() for record in batch.records or ()),
        signatures=batch.signatures,
    )


@dataclass(frozen=True, slots=True)
class Contents:
    """Parts of a bundle besides its document."""

    data: bytes
    """The submission's file."""
    rules: Rules
    """The run's documents."""
    policy: Path | None
    """Folder of the fetched policy, its manifest beside it; None when there is none."""


def write_bundle(path: Path, evidence: Evidence, contents: Contents) -> bool:
    """Write a bundle atomically; returns whether the weights are in it."""
    rules = contents.rules
    with (
        whole_file(path) as partial,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        archive.writestr(DOCUMENT, evidence.model_dump_json(indent=1))
        archive.writestr(SUBMISSION, contents.data)
        for name, document in (
            (RECIPE, rules.recipe.to_bytes()),
            (CALIBRATION, rules.calibration.to_bytes()),
            (TASK_SET, rules.task_set.to_bytes()),
        ):
            archive.writestr(name, document)
        return contents.policy is not None and _add_policy(archive, contents.policy)


def _add_policy(archive: zipfile.ZipFile, folder: Path) -> bool:
    archive.write(folder.with_name(f"{folder.name}.manifest"), MANIFEST)
    files = sorted(folder.iterdir())
    if sum(file.stat().st_size for file in files) > MAX_POLICY_BYTES:
        return False
    for file in files:
        archive.write(file, f"{POLICY}/{file.name}", zipfile.ZIP_STORED)
    return True


class Bundle:
    """A reader of a bundle; a context manager. It trusts nothing, and unpacks only what is
    requested.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._archive = zipfile.ZipFile(path)
            names = self._archive.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{path} is not an evidence bundle: {error}",
                hint="muster explain SUBMISSION --rerun FILE --save BUNDLE writes one",
            ) from error
        if len(set(names)) != len(names):
            raise EncodingError("the bundle has a part twice")
        self._names = frozenset(names)

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def evidence(self) -> Evidence:
        """Return the document; raises EncodingError when it is malformed."""
        return Evidence.from_bytes(self._read(DOCUMENT, MAX_DOCUMENT_BYTES))

    def part(self, name: str) -> bytes | None:
        """Return a part, or None when it is not there."""
        return self._read(name, MAX_PART_BYTES) if name in self._names else None

    def has_weights(self) -> bool:
        """Return whether the policy's files are in it."""
        return any(name.startswith(f"{POLICY}/") for name in self._names)

    def unpack(self, name: str, size: int, to: Path) -> bool:
        """Write the policy file of that name, if it has the size in its manifest."""
        member = f"{POLICY}/{name}"
        if member not in self._names or self._archive.getinfo(member).file_size != size:
            return False
        try:
            with self._archive.open(member) as source, to.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        except _DAMAGED as error:
            raise EncodingError(f"{member} of the bundle is damaged: {error}") from error
        return True

    def _read(self, name: str, most: int) -> bytes:
        try:
            with self._archive.open(name) as part:
                data = part.read(most + 1)
        except (KeyError, *_DAMAGED) as error:
            raise EncodingError(f"{name} of the bundle cannot be read: {error}") from error
        # The size in the archive may be false, so the unpacked bytes are counted.
        if len(data) > most:
            raise EncodingError(f"{name} of the bundle is larger than {most} bytes")
        return data


_DAMAGED = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
)
"""Exceptions on reading a hostile archive: bad checksums, unknown methods, passwords."""
