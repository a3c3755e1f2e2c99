"""Finds what a text names on chain: a submission, batch, case, worker or transaction. Pure.

All commands and the dashboard's search parse names here, so a text means the same in all of them:

    12:3, 1/12:3         the submission at position 3 of batch 12; it is in run 1
    1/12                 batch 12, of run 1
    0x1f3a5c, 1f3a5c     a hash (file, case, transaction) or an address (worker, node), or the
                         first six digits of one at least, if nothing else begins with them
    0x7099ab/7:0         that worker's submission of step 7, index 0
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import NoReturn

from muster.chain.name_index import NameIndex, Parts, all_parts
from muster.chain.view import ChainView
from muster.chain.view_parts import BatchView, WorkerView
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Address, Hash32, to_address

MIN_DIGITS = 6
"""Fewest hexadecimal digits of an abbreviated hash or address."""
SHOWN = 5
"""Most candidates that an error lists."""
FORMS = (
    "BATCH:POSITION, RUN/BATCH, WORKER/STEP:INDEX, or the hash of a file or transaction, or "
    "a worker's address, six digits at least"
)
"""Accepted forms, for hints."""
_PLACE = re.compile(r"(?:([0-9]{1,19})/)?([0-9]{1,19}):([0-9]{1,10})")
_BATCH = re.compile(r"([0-9]{1,19})/([0-9]{1,19})")
_SLOT = re.compile(r"([^/]+)/([0-9]{1,10}):([0-9]{1,10})")
_DIGITS = re.compile(r"(?:0[xX])?([0-9a-fA-F]*)")


class NothingNamed(ConfigError):
    """A text that names nothing on chain."""


class NameKind(StrEnum):
    """Kinds of named things."""

    SUBMISSION = "submission"
    BATCH = "batch"
    CASE = "case"
    WORKER = "worker"
    TRANSACTION = "transaction"


@dataclass(frozen=True, slots=True)
class SubmissionPlace:
    """A submission's batch and position."""

    batch: BatchView
    position: int
    """Its place there."""

    def __str__(self) -> str:
        return f"{self.batch.batch_id}:{self.position}"


@dataclass(frozen=True, slots=True)
class Named:
    """Something that a text names."""

    kind: NameKind
    """What it is."""
    name: str
    """Its name in full."""
    places: tuple[SubmissionPlace, ...] = ()
    """Its submissions, in chain order; two for a file that was submitted twice. Empty for a worker,
    and for a file that was received but is not on chain.
    """
    file_hash: Hash32 | None = None
    """The file, when the text names a submission by it."""
    worker: Address | None = None
    """The worker, or the account that a transaction is about."""
    deed: str = ""
    """The effect of a transaction, in words."""

    def __str__(self) -> str:
        if self.kind is NameKind.SUBMISSION and self.file_hash is not None:
            where = str(self.places[0]) if self.places else "received, not on chain"
            return f"submission {where} (file {self.name})"
        return f"{self.kind} {self.name}" + (f", which {self.deed}" if self.deed else "")


# What a text names


def find_named(
    view: ChainView,
    text: str,
    *,
    received: Sequence[Hash32] = (),
    index: NameIndex | None = None,
) -> Named:
    """Return what a text names; `received` are files that only an orchestrator knows.

    Without an index of the view it reads the whole view.

    Raises NothingNamed when it names nothing, ConfigError when it may name several things.
    """
    text = text.strip()
    if match := _PLACE.fullmatch(text):
        place = _place(view, match[1], int(match[2]), int(match[3]))
        return Named(NameKind.SUBMISSION, str(place), (place,))
    if match := _BATCH.fullmatch(text):
        return _whole(_batch(view, match[1], int(match[2])))
    if match := _SLOT.fullmatch(text):
        place = _find_slot(view, match[1], (int(match[2]), int(match[3])), index)
        return Named(NameKind.SUBMISSION, str(place), (place,))
    digits = _digits(text)
    parts = all_parts(view) if index is None else index.parts(digits)
    found = list(_beginning_with(view, parts, digits, received))
    if not found:
        _refuse_unknown(digits)
    if len(found) > 1:
        raise ConfigError(
            f"{text} may be {_listed(found)}", hint="write more digits, until one is left"
        )
    return found[0]


def find_outcome(view: ChainView, text: str) -> SubmissionPlace:
    """Return the one submission that a text names.

    For a file that was submitted twice, it is the first submission. Raises NothingNamed, or
    ConfigError when the text names something with no submission, or with several.
    """
    named = find_named(view, text)
    places = named.places
    if named.kind is NameKind.WORKER:
        places = tuple(_places_of(view.batches.values(), view.workers[Address(named.name)]))
    if not places:
        raise ConfigError(f"{named} names no submission", hint=_instead_of(named))
    if len(places) > 1 and named.kind is not NameKind.SUBMISSION:
        raise ConfigError(
            f"{named} has {len(places)} submissions: {_listed(places)}",
            hint="give one of these as SUBMISSION",
        )
    return places[0]


def find_worker(view: ChainView, text: str, *, index: NameIndex | None = None) -> WorkerView:
    """Return the one worker that a text names: by its address, its node or its work.

    Raises NothingNamed, or ConfigError when the thing belongs to no worker or to several.
    """
    named = find_named(view, text, index=index)
    if named.worker is not None:
        return view.workers[named.worker]
    makers = {maker.address: maker for place in named.places if (maker := _maker(view, place))}
    if len(makers) != 1:
        whose = f"of {len(makers)} workers: {_listed(list(makers))}" if makers else "of no worker"
        raise ConfigError(f"{named} is {whose}", hint="give the address of a worker or its node")
    return next(iter(makers.values()))


def _find_slot(
    view: ChainView, worker: str, slot: tuple[int, int], index: NameIndex | None
) -> SubmissionPlace:
    """Return the first submission of a worker's step and index; raises ConfigError without one."""
    account = find_worker(view, worker, index=index)
    batches = view.batches.values() if index is None else index.batches(account.worker_id, slot)
    found = [place for place in _places_of(batches, account) if _slot_of(place) == slot]
    if not found:
        raise NothingNamed(
            f"no outcome of step {slot[0]}, index {slot[1]} of that worker is on chain",
            hint="a submission that is not judged yet is found by its file's hash: the "
            "worker logs it",
        )
    if len({place.batch.run_id for place in found}) > 1:
        raise ConfigError(
            f"the worker has step {slot[0]}, index {slot[1]} in several runs: {_listed(found)}",
            hint="name one of them",
        )
    return found[0]


def is_named(text: str, place: tuple[int, int], file_hash: Hash32) -> bool:
    """Return whether a text names a submission, given only its place and file hash."""
    text = text.strip()
    if match := _PLACE.fullmatch(text):
        return (int(match[2]), int(match[3])) == place
    return file_hash.hex().startswith(_digits(text))


def prefix_of(text: str) -> str | None:
    """Return the first digits of a hash or address that a text gives; None if it gives none."""
    try:
        return _digits(text.strip())
    except NothingNamed:
        return None


# By number


def _place(view: ChainView, run: str | None, batch_id: int, position: int) -> SubmissionPlace:
    batch = _batch(view, run, batch_id)
    if position >= batch.count:
        raise NothingNamed(
            f"batch {batch_id} has no position {position}",
            hint=f"positions are 0 to {batch.count - 1}",
        )
    return SubmissionPlace(batch, position)


def _batch(view: ChainView, run: str | None, batch_id: int) -> BatchView:
    batch = view.batches.get(batch_id)
    if batch is None:
        raise NothingNamed(
            f"there is no batch {batch_id}, the newest is {len(view.batches)}",
            hint="muster audit lists batches and their outcomes",
        )
    if run is not None and batch.run_id != int(run):
        raise NothingNamed(
            f"batch {batch_id} is not of run {int(run)}", hint=f"it is {batch.run_id}/{batch_id}"
        )
    return batch


def _whole(batch: BatchView) -> Named:
    name = f"{batch.run_id}/{batch.batch_id}"
    return Named(NameKind.BATCH, name, _all_places(batch))


def _all_places(batch: BatchView) -> tuple[SubmissionPlace, ...]:
    return tuple(SubmissionPlace(batch, position) for position in range(batch.count))


# By digits


def _digits(text: str) -> str:
    """Return the digits of a hash or an address, in lower case; raises NothingNamed."""
    match = _DIGITS.fullmatch(text)
    if match is None or not match[1]:
        raise NothingNamed(f"{text!r} is no name and no hexadecimal number", hint=FORMS)
    digits = match[1].lower()
    if len(digits) < MIN_DIGITS:
        raise NothingNamed(f"{text!r} is too short for a hash or an address", hint=FORMS)
    if len(digits) > 64:
        raise NothingNamed(
            f"{text!r} has {len(digits)} digits", hint="an address has 40 of them, a hash 64"
        )
    if len(digits) == 40:
        try:
            to_address(text)
        except EncodingError as error:
            raise NothingNamed(
                str(error), hint="copy it again, or write it in lower case"
            ) from error
    return digits


def _refuse_unknown(digits: str) -> NoReturn:
    if len(digits) == 40:
        raise NothingNamed(
            f"{to_address(digits)} is neither a worker nor the node of one",
            hint="muster audit lists the workers; muster stake registers one",
        )
    begins = "is" if len(digits) == 64 else "begins with"
    raise NothingNamed(
        f"nothing on chain {begins} 0x{digits}: no file that was judged, no case, no worker or "
        "node, no transaction with outcomes",
        hint="check the digits and --rpc; a submission that is in no batch yet is known only "
        "to its orchestrator",
    )


def _beginning_with(
    view: ChainView, parts: Parts, digits: str, received: Sequence[Hash32]
) -> Iterator[Named]:
    yield from _files(view, parts, digits, received)
    for case in parts.cases:
        if case.case_id.hex().startswith(digits):
            place = SubmissionPlace(view.batches[case.batch_id], case.position)
            yield Named(NameKind.CASE, hex0x(case.case_id), (place,))
    for worker in parts.workers:
        served = {worker.address, worker.node, *(node for _, node in worker.nodes)}
        if any(account[2:].lower().startswith(digits) for account in served):
            yield Named(NameKind.WORKER, worker.address, worker=worker.address)
    yield from _transactions(view, parts, digits)


def _files(
    view: ChainView, parts: Parts, digits: str, received: Sequence[Hash32]
) -> Iterator[Named]:
    whole = bytes.fromhex(digits[: len(digits) // 2 * 2])
    found: dict[Hash32, list[SubmissionPlace]] = {}
    for batch in parts.batches:
        for position, hashed in enumerate(view.file_hashes(batch)):
            if hashed.startswith(whole) and hashed.hex().startswith(digits):
                found.setdefault(Hash32(hashed), []).append(SubmissionPlace(batch, position))
    for hashed in received:
        if hashed.hex().startswith(digits):
            found.setdefault(hashed, [])
    for hashed, places in found.items():
        yield Named(NameKind.SUBMISSION, hex0x(hashed), tuple(places), hashed)


def _transactions(view: ChainView, parts: Parts, digits: str) -> Iterator[Named]:
    deeds: dict[str, list[tuple[str, Sequence[SubmissionPlace], Address | None]]] = defaultdict(
        list
    )
    for tx, deed, places, worker in _deeds(view, parts):
        if tx is not None and tx[2:].startswith(digits):
            deeds[tx].append((deed, places, worker))
    for tx, done in deeds.items():
        touched = {str(place): place for _, each, _ in done for place in each}
        about = {worker for _, _, worker in done}
        yield Named(
            NameKind.TRANSACTION,
            tx,
            tuple(touched.values()),
            worker=about.pop() if len(about) == 1 else None,
            deed=" and ".join(dict.fromkeys(deed for deed, _, _ in done)),
        )


def _deeds(
    view: ChainView, parts: Parts
) -> Iterator[tuple[str | None, str, Sequence[SubmissionPlace], Address | None]]:
    """Yield each known transaction with what it did, to which submissions, about which worker."""
    for batch in parts.batches:
        what = f"commits batch {batch.batch_id}"
        if batch.split_from is not None:
            what = f"takes batch {batch.batch_id} out of batch {batch.split_from}"
        yield batch.tx_hash, what, _all_places(batch), None
        yield batch.posted_tx, f"judges batch {batch.batch_id}", _all_places(batch), None
    for slash in parts.slashes:
        struck: Sequence[SubmissionPlace] = ()
        if slash.batch_id is not None and slash.position is not None:
            struck = (SubmissionPlace(view.batches[slash.batch_id], slash.position),)
        owner = slash.owner if slash.owner in view.workers else None
        yield slash.tx_hash, f"slashes {slash.owner}", struck, owner
        yield slash.settled_tx, f"settles a slash of {slash.owner}", struck, owner
    for case in parts.cases:
        place = SubmissionPlace(view.batches[case.batch_id], case.position)
        yield case.opened_tx, "opens a case", (place,), None
        yield case.closed_tx, "closes a case", (place,), None
    for paid in parts.payments:
        # The event has the number of submissions, not which ones.
        deed = f"pays {paid.worker} for {paid.slots} submissions"
        yield paid.tx_hash, deed, (), paid.worker
    for worker in parts.workers:
        yield worker.registered_tx, f"registers {worker.address}", (), worker.address
    for run in parts.runs:
        yield run.created_tx, f"creates run {run.run_id}", (), None
        for checkpoint in run.checkpoints.values():
            deed = f"publishes version {checkpoint.version} of run {run.run_id}"
            yield checkpoint.tx_hash, deed, (), None


# A worker's submissions


def _places_of(batches: Iterable[BatchView], worker: WorkerView) -> Iterator[SubmissionPlace]:
    for batch in batches:
        if batch.records is None:
            if batch.direct is not None and batch.direct.worker == worker.address:
                yield SubmissionPlace(batch, 0)
            continue
        for position, record in enumerate(batch.records):
            if record.worker_id == worker.worker_id:
                yield SubmissionPlace(batch, position)


def _slot_of(place: SubmissionPlace) -> tuple[int, int]:
    records = place.batch.records
    claimed = place.batch.direct if records is None else records[place.position]
    assert claimed is not None  # _places_of
    return claimed.step, claimed.index


def _maker(view: ChainView, place: SubmissionPlace) -> WorkerView | None:
    batch = place.batch
    if batch.records is not None:
        return view.worker_by_id.get(batch.records[place.position].worker_id)
    return None if batch.direct is None else view.workers.get(batch.direct.worker)


# Words


def _listed(found: Sequence[object]) -> str:
    more = len(found) - SHOWN
    return ", ".join(map(str, islice(found, SHOWN))) + (f" and {more} more" if more > 0 else "")


def _instead_of(named: Named) -> str:
    if named.worker is not None:
        return f"muster audit worker {named.worker} lists that worker's submissions"
    return FORMS
