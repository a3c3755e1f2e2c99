"""Check 7 over all of a worker's submissions: which count, what a validator remembers of them.

    <state>/conduct/<worker id>/<batch id>-<position>.json

A finding is a function of the measurements of the submissions before it on chain, in that order,
whenever they were made. Validators measured different ones, so near the bound they differ. Outcomes
are signed a batch at a time; hence only one place of each batch, drawn by the block that committed
it, is judged by history, and about one submission there are two opinions at most: a strike or none,
or Fraud or none where an earlier strike is on chain. A validator that lacks some measurements has
less evidence, and accepts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from muster.client.chain_facts import OutcomePlace
from muster.client.journal import write_durably
from muster.client.validator.checks import check_history, conduct_of
from muster.client.validator.judging import Judgement
from muster.protocol.encoding import hex0x
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.schedule import batch_seed, place_of_history
from muster.toploc import Calibration
from muster.toploc.history import WINDOW, Conduct

if TYPE_CHECKING:
    from muster.chain import BatchView, RunView

    Batches = Mapping[int, BatchView]


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
