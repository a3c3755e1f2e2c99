"""What a validator keeps: the outcomes that it signed, and the evidence behind each.

One set of records is signed for a batch, ever: two would be equivocation. A batch is a number and a
root: after a reorganisation of the chain another may have the number.

Evidence is all that a third party needs to re-run a verdict, one folder per submission file:

<state>/evidence/<file hash>/submission.parquet
<state>/evidence/<file hash>/<batch id>-<position>.json
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.client.chain_facts import OutcomePlace
from muster.client.journal import Journal, write_durably
from muster.client.validator.checks import (
    ClaimedWork,
    check_history,
    conduct_of,
    passes_proofs,
    passes_sampling,
)
from muster.client.validator.judging import Judgement, outcome_record
from muster.client.validator.replay import Replay
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
from muster.protocol.schedule import batch_seed, place_of_history
from muster.toploc import Calibration
from muster.toploc.history import WINDOW, Conduct

if TYPE_CHECKING:
    from muster.chain import BatchView, RunView

    Batches = Mapping[int, BatchView]

KEPT_ACCEPTED = 1000
"""Accepted files whose evidence is kept; of the others none is ever dropped."""


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """The outcomes of one batch that were, or may have been, signed."""

    name: BatchName
    records: tuple[OutcomeRecord, ...]
    """In batch order."""

    def packed(self) -> bytes:
        """Return the records as they go on chain."""
        return pack_records(list(self.records))

    def message(self) -> Outcomes:
        """Return what the validator signs."""
        return Outcomes(*self.name, keccak(self.packed()))


class OutcomeJournal(Journal):
    """Remembers the outcomes of every batch before they are signed."""

    def __init__(self, folder: Path) -> None:
        self._judged: dict[BatchName, JudgedBatch] = {}
        super().__init__(folder / "outcomes.jsonl")

    def take_in(self, entry: dict[str, Any]) -> None:
        """Remember the outcomes of a batch."""
        records = unpack_records(bytes.fromhex(entry["records"].removeprefix("0x")))
        name = BatchName(int(entry["batch_id"]), to_hash32(entry["root"]))
        self._judged[name] = JudgedBatch(name, tuple(records))

    def record(self, batch: JudgedBatch) -> JudgedBatch:
        """Return what may be signed for the batch: this, now durable, or what was recorded before,
        which stands whatever came later.
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
        """Return what was recorded for a batch."""
        return self._judged.get(name)

    def all(self) -> list[JudgedBatch]:
        """Return everything recorded, oldest first."""
        return list(self._judged.values())


# Evidence


class EvidenceStore:
    """Writes evidence before a verdict is signed, and bounds what accepted files take up."""

    def __init__(
        self, folder: Path, calibration: Calibration, *, kept_accepted: int = KEPT_ACCEPTED
    ) -> None:
        self._folder = folder
        self._calibration = calibration
        self._kept_accepted = kept_accepted
        self._accepted: deque[Path] = deque(self._find_accepted())

    def write(
        self,
        place: tuple[int, int],
        claim: ClaimedWork,
        data: bytes | None,
        judgement: Judgement,
    ) -> Path:
        """Store what led to a judgement and return its document; `place` is (batch, position)."""
        folder = self._folder / claim.submission.file_hash.hex()
        if data is not None:
            write_durably(folder / "submission.parquet", data)
        document = folder / f"{place[0]}-{place[1]}.json"
        content = describe(place, claim, judgement, self._calibration)
        write_durably(document, json.dumps(content, indent=1).encode() + b"\n")
        if judgement.finding is None:
            self._accepted.append(folder)
            while len(self._accepted) > self._kept_accepted:
                shutil.rmtree(self._accepted.popleft(), ignore_errors=True)
        return document

    def _find_accepted(self) -> list[Path]:
        """Return the folders whose every document is an acceptance, oldest first."""
        found = []
        for folder in self._folder.glob("*/"):
            documents = list(folder.glob("*.json"))
            if documents and all(_is_acceptance(document) for document in documents):
                found.append((folder.stat().st_mtime, folder))
        return [folder for _, folder in sorted(found)]


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


def _is_acceptance(document: Path) -> bool:
    try:
        verdict = json.loads(document.read_bytes())["outcome"]["verdict"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(verdict == Verdict.ACCEPTED.name)


# Check 7 over all of a worker's submissions: which count, what a validator remembers of them.
#
#     <state>/conduct/<worker id>/<batch id>-<position>.json
#
# A finding is a function of the measurements of the submissions before it on chain, in that order,
# whenever they were made. Validators measured different ones, so near the bound they differ.
# Outcomes are signed a batch at a time; hence only one place of each batch, drawn by the block that
# committed it, is judged by history, and about one submission there are two opinions at most: a
# strike or none, or Fraud or none where an earlier strike is on chain. A validator that lacks some
# measurements has less evidence, and accepts.

# What the chain says about it


def is_drawn(batch: BatchView, position: int) -> bool:
    """Return whether a place of a batch is the one that is judged by history."""
    seed = batch_seed(batch.beacon, batch.run_id, batch.batch_id, batch.root)
    return position == place_of_history(seed, batch.count)


def struck_in(batches: Batches, place: OutcomePlace, worker_id: int) -> int | None:
    """Return the block of a worker's last strike for its history that was on chain before a
    submission's batch was; None when there is none.
    """
    batch = batches[place.batch_id]
    blocks = [
        each.posted_block
        for each in batches.values()
        if each.run_id == batch.run_id
        and each.posted_block is not None
        and each.posted_block < batch.block_number
        and any(
            record.worker_id == worker_id and record.reason is Reason.SAMPLER_DRIFT
            for record in each.records or ()
        )
    ]
    return max(blocks, default=None)


def counted_before(
    batches: Batches, run: RunView, place: OutcomePlace
) -> list[tuple[OutcomePlace, OutcomeRecord]]:
    """Return the submissions that count beside a judged one, oldest first: its worker's that passed
    every check that looks at one alone, since its last strike, as many as hold a window of each
    validator's.
    """
    batch = batches[place.batch_id]
    assert batch.records is not None  # of a judged batch
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
    most = WINDOW * max(1, len(batch.validators)) // run.terms[batch.terms - 1].quorum
    return sorted(found, key=lambda each: each[0])[-most:]


def judge_again(
    batches: Batches,
    place: OutcomePlace,
    alone: OutcomeRecord,
    conducts: Sequence[Conduct],
    calibration: Calibration,
) -> tuple[OutcomeRecord, str]:
    """Return the outcome of a submission in the light of its worker's others, and in words why;
    `alone` is its own, `conducts` are of those that count and, last, of itself.
    """  # fmt: skip
    struck = struck_in(batches, place, alone.worker_id) is not None
    finding = check_history(conducts, calibration, is_struck=struck)
    if not is_drawn(batches[place.batch_id], place.position):
        return alone, "another place of its batch is judged by history"
    if finding is None:
        return alone, f"{len(conducts)} submissions of its worker are like honest ones"
    return replace(alone, verdict=finding.verdict, reason=finding.reason), finding.detail


# What a validator remembers


@dataclass(frozen=True, slots=True)
class ConductStore:
    """The newest conducts of every worker of a run that this validator measured."""

    folder: Path
    """Where they are."""
    calibration: Calibration
    """The run's."""

    def judge(
        self, place: OutcomePlace, worker_id: int, judgement: Judgement, batches: Batches
    ) -> Judgement:
        """Return the judgement on a submission in the light of its worker's earlier ones, and
        remember the submission, durably. The finding of another check stays as it is.
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
        # Only now is it worth looking through all records for a strike.
        struck = struck_in(batches, place, worker_id)
        since = {
            n: c for n, c in earlier.items() if batches[n.batch_id].block_number > (struck or 0)
        }
        conducts = [*since.values(), own]
        finding = check_history(conducts, self.calibration, is_struck=struck is not None)
        return replace(judgement, finding=finding, earlier=tuple(since))

    def _earlier(
        self, worker_id: int, place: OutcomePlace, batches: Batches
    ) -> dict[OutcomePlace, Conduct]:
        """Return the measurements of batches that the chain still has."""
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
        """Return a measurement; None when it is damaged, or of another batch of that number."""
        try:
            document = json.loads(self._path(worker_id, place).read_bytes())
            is_same = document["root"] == hex0x(batch.root)
            return Conduct.from_json(document["conduct"]) if is_same else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _path(self, worker_id: int, place: OutcomePlace) -> Path:
        return self.folder / str(worker_id) / f"{place.batch_id}-{place.position}.json"
