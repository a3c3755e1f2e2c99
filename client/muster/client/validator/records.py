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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.client.journal import Journal, write_durably
from muster.client.validator.checks import ClaimedWork, passes_proofs, passes_sampling
from muster.client.validator.judging import Judgement, outcome_record
from muster.client.validator.replay import Replay
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.ids import BatchName, to_hash32
from muster.protocol.messages import (
    OutcomeRecord,
    Outcomes,
    Verdict,
    pack_records,
    unpack_records,
)
from muster.toploc import Calibration

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
