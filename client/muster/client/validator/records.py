"""A validator's records: its signed outcomes, and the evidence behind each.

Only one set of records is ever signed for a batch: two would be equivocation. A batch is identified
by id and root: after a reorganisation of the chain another batch may have the same id.

Evidence is everything that a third party needs to re-run a verdict, one folder per file:

<state>/evidence/<file hash>/submission.parquet
<state>/evidence/<file hash>/<batch id>-<position>.json
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from muster.chain import BatchView, RunView
from muster.client.chain_facts import OutcomePlace
from muster.client.durable_log import Journal
from muster.client.validator.checks import (
    ClaimedWork,
    check_history,
    conduct_of,
    passes_proofs,
    passes_sampling,
)
from muster.client.validator.judging import Judgement, outcome_record
from muster.client.validator.replay import Replay
from muster.lifecycle.files import write_durably
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.ids import BatchName, to_hash32
from muster.protocol.messages import (
    OutcomeRecord,
    Outcomes,
    Reason,
    Verdict,
    pack_records,
    unpack_records,
)
from muster.protocol.schedule import place_of_history
from muster.shardcast.cache import room_in
from muster.toploc import Calibration
from muster.toploc.sequential_test import WINDOW, Conduct

Batches = Mapping[int, BatchView]

KEPT_ACCEPTED = 1000
"""Number of accepted files whose evidence is kept."""
REFUSED_BYTES = 16 << 30
"""Bytes of evidence that is kept about files that are neither accepted nor fraud."""
LEAST_BYTES = 1 << 20
"""What a smaller file counts as among them."""


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """The outcomes of one batch that were, or may have been, signed."""

    name: BatchName
    records: tuple[OutcomeRecord, ...]
    """In batch order."""

    def packed(self) -> bytes:
        """Return the records in the form posted on chain."""
        return pack_records(list(self.records))

    def message(self) -> Outcomes:
        """Return the message that the validator signs."""
        return Outcomes(*self.name, keccak(self.packed()))


class OutcomeJournal(Journal):
    """Stores the outcomes of every batch before they are signed."""

    def __init__(self, folder: Path) -> None:
        self._judged: dict[BatchName, JudgedBatch] = {}
        super().__init__(folder / "outcomes.jsonl")

    def take_in(self, entry: dict[str, Any]) -> None:
        """Remember the outcomes of a batch."""
        records = unpack_records(bytes.fromhex(entry["records"].removeprefix("0x")))
        name = BatchName(int(entry["batch_id"]), to_hash32(entry["root"]))
        self._judged[name] = JudgedBatch(name, tuple(records))

    def record(self, batch: JudgedBatch) -> JudgedBatch:
        """Store the outcomes of a batch and return them. If earlier ones were recorded, return
        those: only they may be signed.
        """
        if earlier := self.judged(batch.name):
            return earlier
        self.append(
            {
                "batch_id": batch.name.batch_id,
                "root": hex0x(batch.name.root),
                "records": hex0x(batch.packed()),
            }
        )
        self._judged[batch.name] = batch
        return batch

    def judged(self, name: BatchName) -> JudgedBatch | None:
        """Return the recorded outcomes of a batch."""
        return self._judged.get(name)

    def all(self) -> list[JudgedBatch]:
        """Return everything recorded, oldest first."""
        return list(self._judged.values())


# Evidence


class EvidenceStore:
    """Writes evidence before a verdict is signed, and limits its disk space.

    Files that are no fraud cost their workers little, so the oldest of them make way: acceptances
    by their number, the others by their bytes, and all of them where the disk is full but for the
    reserve. Evidence of fraud stays. So does the document of a file that was too large, without it.
    """

    def __init__(
        self,
        folder: Path,
        calibration: Calibration,
        *,
        kept_accepted: int = KEPT_ACCEPTED,
        refused_bytes: int = REFUSED_BYTES,
    ) -> None:
        self._folder = folder
        self._calibration = calibration
        self._kept_accepted = kept_accepted
        self._refused_bytes = refused_bytes
        self._accepted: dict[Path, int] = {}
        self._refused: dict[Path, int] = {}
        """Bytes of each folder, oldest first; a folder of a fraud is in neither."""
        for known in sorted(folder.glob("*/"), key=lambda each: each.stat().st_mtime):
            self._note(known)

    def write(
        self,
        place: tuple[int, int],
        claim: ClaimedWork,
        data: bytes | None,
        judgement: Judgement,
    ) -> Path:
        """Store the evidence of a judgement and return its document; `place` is (batch,
        position)."""
        folder = self._folder / claim.submission.file_hash.hex()
        reason = judgement.finding.reason if judgement.finding else Reason.NONE
        self._make_room(0 if data is None else len(data))
        if data is not None and reason is not Reason.FILE_TOO_LARGE:
            write_durably(folder / "submission.parquet", data)
        document = folder / f"{place[0]}-{place[1]}.json"
        content = describe(place, claim, judgement, self._calibration)
        write_durably(document, json.dumps(content, indent=1).encode() + b"\n")
        self._note(folder)
        while len(self._accepted) > self._kept_accepted:
            _drop_oldest(self._accepted)
        while len(self._refused) > 1 and sum(self._refused.values()) > self._refused_bytes:
            _drop_oldest(self._refused)
        return document

    def _make_room(self, size_bytes: int) -> None:
        """Drop the oldest evidence while the disk has no room for a file besides the reserve."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while room_in(self._folder) < size_bytes and (kept := self._refused or self._accepted):
            _drop_oldest(kept)

    def _note(self, folder: Path) -> None:
        """Take in a folder as the newest; the worst verdict about its file decides."""
        self._accepted.pop(folder, None)
        self._refused.pop(folder, None)
        verdicts = {_verdict_in(document) for document in folder.glob("*.json")}
        if not verdicts <= {each.name for each in Verdict if each is not Verdict.FRAUD}:
            return
        size = sum(path.stat().st_size for path in folder.iterdir())
        if verdicts == {Verdict.ACCEPTED.name}:
            self._accepted[folder] = size
        else:
            # Each start reads every document, so small ones are bounded, too.
            self._refused[folder] = max(size, LEAST_BYTES)


def describe(
    place: tuple[int, int], claim: ClaimedWork, judgement: Judgement, calibration: Calibration
) -> dict[str, Any]:
    """Return the evidence document of a judgement, as JSON values."""
    finding = judgement.finding
    record = outcome_record(claim, judgement)
    policy = claim.terms.policies.get(claim.submission.policy_version)
    return {
        "batch_id": place[0],
        "position": place[1],
        "submission": claim.submission.to_json(),
        "signature": hex0x(claim.signature),
        "ticket": claim.ticket.to_json() if claim.ticket else None,
        "ticket_signature": hex0x(claim.ticket_signature) if claim.ticket_signature else None,
        "committed_at": claim.committed_at,
        "policy_root": hex0x(policy.root) if policy else None,
        "calibration_hash": hex0x(calibration.hash()),
        "outcome": {
            "verdict": record.verdict.name,
            "reason": record.reason.name,
            "detail": finding.detail if finding else "",
            "units": record.units,
            "record": hex0x(record.to_bytes()),
        },
        "earlier": [list(earlier) for earlier in judgement.earlier],
        "samples": [_describe_sample(replay, calibration) for replay in judgement.replays],
    }


def _describe_sample(replay: Replay, calibration: Calibration) -> dict[str, Any]:
    return {
        "proofs_pass": passes_proofs(replay, calibration),
        "sampling_passes": passes_sampling(replay, calibration),
        "chunks": [asdict(chunk) for chunk in replay.chunks],
        "largest_margin": float(max(replay.margins, default=0.0)),
        "tokens_below_maximum": int(sum(margin > 0 for margin in replay.margins)),
    }


def _drop_oldest(kept: dict[Path, int]) -> None:
    oldest = next(iter(kept))
    del kept[oldest]
    shutil.rmtree(oldest, ignore_errors=True)


def _verdict_in(document: Path) -> str:
    """Return the name of the verdict in a document; empty when it is damaged."""
    try:
        return str(json.loads(document.read_bytes())["outcome"]["verdict"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


# Check 7 over all of a worker's submissions: which of them count, and their stored measurements.
#
#     <state>/conduct/<worker id>/<batch id>-<position>.json
#
# A finding depends only on the measurements of earlier submissions on chain, in that order, not on
# when they were made. Validators have measured different submissions, so near the bound they may
# disagree. Outcomes are signed a batch at a time; therefore only one place of each batch, drawn by
# the block that committed it, is judged by history, so about one submission there are at most two
# opinions: a strike or none, or Fraud or none if an earlier strike is on chain. A validator that
# lacks some measurements has less evidence, and accepts.

# Facts on chain


def is_drawn(batch: BatchView, position: int) -> bool:
    """Return whether this place of a batch is judged by history."""
    return position == place_of_history(batch.seed, batch.count)


def struck_in(batches: Batches, place: OutcomePlace, worker_id: int) -> int | None:
    """Return the block of a worker's last strike by history before a submission's batch; None when
    there is none.
    """
    batch = batches[place.batch_id]
    blocks = [
        each.posted_block
        for each in batches.values()
        if each.run_id == batch.run_id
        and each.posted_block is not None
        and each.posted_block < batch.work_block
        and any(
            record.worker_id == worker_id and record.reason is Reason.SAMPLER_DRIFT
            for record in each.records or ()
        )
    ]
    return max(blocks, default=None)


def counted_before(
    batches: Batches, run: RunView, place: OutcomePlace
) -> list[tuple[OutcomePlace, OutcomeRecord]]:
    """Return the earlier submissions that count for a judged one, oldest first: those of its worker
    since the last strike that passed all checks of single submissions, enough of them to contain
    every validator's window.
    """
    batch = batches[place.batch_id]
    assert batch.records is not None  # the batch is judged
    worker_id = batch.records[place.position].worker_id
    since = struck_in(batches, place, worker_id) or 0
    found = [
        (at, record)
        for each in batches.values()
        if each.run_id == run.run_id and each.block_number > since
        for position, record in enumerate(each.records or ())
        if (at := OutcomePlace(each.batch_id, position)) < place
        and record.worker_id == worker_id
        and (record.verdict is Verdict.ACCEPTED or record.reason is Reason.SAMPLER_DRIFT)
    ]
    most = WINDOW * max(1, len(batch.validators)) // run.quorum_of(batch)
    return sorted(found, key=lambda each: each[0])[-most:]


def judge_again(
    batches: Batches,
    place: OutcomePlace,
    alone: OutcomeRecord,
    conducts: Sequence[Conduct],
    calibration: Calibration,
) -> tuple[OutcomeRecord, str]:
    """Return the outcome of a submission given its worker's others, with an explanation; `alone` is
    its own outcome, `conducts` are those of the counting submissions and, last, its own.
    """  # fmt: skip
    struck = struck_in(batches, place, alone.worker_id) is not None
    finding = check_history(conducts, calibration, is_struck=struck)
    if not is_drawn(batches[place.batch_id], place.position):
        return alone, "another place of its batch is judged by history"
    if finding is None:
        return alone, f"{len(conducts)} submissions of its worker are like honest ones"
    return replace(alone, verdict=finding.verdict, reason=finding.reason), finding.detail


# Stored measurements


@dataclass(frozen=True, slots=True)
class ConductStore:
    """The newest measurements of every worker of a run."""

    folder: Path
    """Folder of the measurements."""
    calibration: Calibration
    """Calibration of the run."""

    def judge(
        self, place: OutcomePlace, worker_id: int, judgement: Judgement, batches: Batches
    ) -> Judgement:
        """Return the judgement on a submission given its worker's earlier ones, and store its
        measurement durably. A failure of another check is returned unchanged.
        """
        if judgement.finding is not None or not judgement.replays:
            return judgement
        batch = batches[place.batch_id]
        own = conduct_of(judgement.replays, self.calibration)
        document = json.dumps({"root": hex0x(batch.root), "conduct": own.to_json()})
        write_durably(self._path(worker_id, place), document.encode())
        for old in self._places(worker_id)[:-WINDOW]:
            self._path(worker_id, old).unlink(missing_ok=True)
        if not is_drawn(batch, place.position):
            return judgement
        earlier = self._earlier(worker_id, place, batches)
        conducts = [*earlier.values(), own]
        if check_history(conducts, self.calibration, is_struck=False) is None:
            return judgement
        # The expensive search of all records for a strike comes last.
        struck = struck_in(batches, place, worker_id)
        since = {n: c for n, c in earlier.items() if batches[n.batch_id].work_block > (struck or 0)}
        conducts = [*since.values(), own]
        finding = check_history(conducts, self.calibration, is_struck=struck is not None)
        return replace(judgement, finding=finding, earlier=tuple(since))

    def _earlier(
        self, worker_id: int, place: OutcomePlace, batches: Batches
    ) -> dict[OutcomePlace, Conduct]:
        """Return the stored measurements of batches that are still on chain."""
        found = {}
        for known in self._places(worker_id):
            batch = batches.get(known.batch_id)
            if known < place and batch is not None:
                conduct = self._read(worker_id, known, batch)
                if conduct is not None:
                    found[known] = conduct
        return found

    def _places(self, worker_id: int) -> list[OutcomePlace]:
        names = [path.stem for path in (self.folder / str(worker_id)).glob("*.json")]
        return sorted(OutcomePlace(*map(int, name.split("-"))) for name in names)

    def _read(self, worker_id: int, place: OutcomePlace, batch: BatchView) -> Conduct | None:
        """Return a measurement; None when it is damaged, or of another batch with that id."""
        try:
            document = json.loads(self._path(worker_id, place).read_bytes())
            is_same = document["root"] == hex0x(batch.root)
            return Conduct.from_json(document["conduct"]) if is_same else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _path(self, worker_id: int, place: OutcomePlace) -> Path:
        return self.folder / str(worker_id) / f"{place.batch_id}-{place.position}.json"
