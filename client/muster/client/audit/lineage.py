"""A policy's ancestry: which files, workers and verdicts went into a version.

A version's manifest, whose root is on chain, says which range of the training stream its step
consumed (docs/protocol.md, sections 9.8 and 10). The stream is the run's accepted records in the
order in which they were posted. So the root of one version fixes everything that went into it and
into all earlier ones; the manifests of the earlier versions say which step consumed which records.
Nobody checks that a step consumed as many records as it should have.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from muster.chain import CheckpointView, RunView
from muster.client.audit.contradictions import Contradiction, Kind
from muster.client.audit.evidence import EvidenceFolders
from muster.client.audit.ledger import Ledger
from muster.client.audit.outcome_table import OutcomeTable, tabulate
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Verdict
from muster.protocol.recipe import Recipe
from muster.shardcast import Manifest
from muster.shardcast.download import ShardClient
from muster.shardcast.http_client import ConnectsTo, require_url

MANIFESTS_S = 600.0
"""Seconds for which a relay is asked for the manifests of earlier versions, in all."""
TAKEN = ("offered", "overturned")
"""Uses that put a record into a version's weights, as far as is known."""


@dataclass(frozen=True, slots=True)
class Ingredient:
    """A record of the training stream that a version's ancestry consumed."""

    stream_position: int
    """Its place in the training stream, from 0."""
    version: int | None
    """The version whose step consumed it; None when no available manifest says it."""
    batch_id: int
    position: int
    """Its place there."""
    file_sha256: str
    """The submission's file."""
    worker: str | None
    """The worker's staking wallet."""
    policy_version: int
    """The policy that generated it."""
    units: int
    use: str
    """offered: training consumed it, and its filters may have left out any part of it. Not
    consumed: repeated (the same file came before), stale (too old a policy). overturned: consumed
    like an offered one; later a jury ruled that it should not have been accepted."""
    samples: int
    posted_tx: str | None
    """The transaction that recorded the verdict."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A version between the base model and the traced one."""

    version: int
    """Its number."""
    manifest_root: str
    """As on chain."""
    tx: str
    """The publishing transaction."""
    stream_from: int | None
    """First position that its step consumed; None without its manifest."""
    stream_to: int | None
    """Position after the last one; None without its manifest."""


@dataclass(frozen=True, slots=True)
class PolicyLineage:
    """A version with all of its ancestry."""

    run_id: RunId
    version: int
    ancestors: tuple[Ancestor, ...]
    """From version 0 to the version itself."""
    ingredients: tuple[Ingredient, ...]
    """In the order of the stream."""
    contradictions: tuple[Contradiction, ...]
    """Contradictions in the ancestry."""
    not_taken: int
    """Number of accepted records after the version's range: later versions may consume them."""

    def by_worker(self) -> list[tuple[str, int, int]]:
        """Return each worker with how many submissions and units of it training consumed."""
        counts: Counter[str] = Counter()
        units: Counter[str] = Counter()
        for each in self.ingredients:
            if each.use in TAKEN:
                counts[each.worker or "?"] += 1
                units[each.worker or "?"] += each.units
        return [(worker, count, units[worker]) for worker, count in counts.most_common()]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            **asdict(self),
            "workers": [
                {"worker": worker, "submissions": count, "units": units}
                for worker, count, units in self.by_worker()
            ],
            "contradictions": [found.to_json() for found in self.contradictions],
        }


# Lookups


def max_async_level_of(store: EvidenceFolders, pinned: Hash32) -> int | None:
    """Return the greatest age, in versions, of a policy whose samples are trained on; None without
    the recipe.
    """
    data = store.document(pinned)
    try:
        return None if data is None else Recipe.from_bytes(data).training.max_async_level
    except EncodingError:
        return None


async def find_manifests(
    store: EvidenceFolders, relays: Sequence[str], run: RunView, version: PolicyVersion
) -> Callable[[Hash32], bytes | None]:
    """Return a function that looks up a manifest by root, in the evidence, then on relays."""
    wanted = {
        checkpoint.manifest_root: number
        for number, checkpoint in run.checkpoints.items()
        if number <= version and store.document(checkpoint.manifest_root) is None
    }
    fetched = await fetch_manifests(relays, run.run_id, wanted)
    return lambda root: store.document(root) or fetched.get(root)


async def fetch_manifests(
    relays: Sequence[str],
    run_id: RunId,
    wanted: Mapping[Hash32, PolicyVersion],
    connects_to: ConnectsTo | None = None,
    *,
    within_s: float = MANIFESTS_S,
) -> dict[Hash32, bytes]:
    """Return the manifests that relays have; `wanted` gives versions by root.

    All relays are asked at the same time, each for at most `within_s` seconds in all.
    """
    urls = [require_url(relay) for relay in relays]
    client, found = ShardClient(connects_to=connects_to), dict[Hash32, bytes]()

    async def ask(url: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for root, version in wanted.items():
                    if root in found:
                        continue
                    data = await client.manifest(url, run_id, version, root=root)
                    if isinstance(data, bytes):
                        found[root] = data

    try:
        async with asyncio.TaskGroup() as group:
            for url in urls:
                group.create_task(ask(url))
    finally:
        client.close()
    return found


# The ancestry


def trace(
    ledger: Ledger,
    run_id: RunId,
    version: PolicyVersion,
    manifest_of: Callable[[Hash32], bytes | None],
    *,
    max_async_level: int | None = None,
) -> PolicyLineage:
    """Return a version's ancestry.

    `manifest_of` returns a manifest by root, from any source. Without `max_async_level`, which is
    in the recipe, stale records count as consumed.
    Raises ConfigError when the version does not exist or its own manifest is not found.
    """
    run = ledger.runs[run_id]
    versions = [v for v in sorted(run.checkpoints) if v <= version]
    manifests, found = _manifests(run, versions, manifest_of)
    if version not in manifests:
        raise ConfigError(
            f"nobody shows the manifest of version {version}, root "
            f"{hex0x(run.checkpoints[version].manifest_root)}",
            hint="give --evidence FOLDER with a file of that hash, or --relay URL",
        )
    table = tabulate(ledger)
    stream = stream_rows(ledger, table, run_id)
    found += _range_problems(ledger, run, manifests, table, stream)
    used = stream[: manifests[version].stream_to]
    return PolicyLineage(
        run_id=run_id,
        version=version,
        ancestors=tuple(_ancestor(run.checkpoints[v], manifests.get(v)) for v in versions),
        ingredients=tuple(_ingredients(ledger, table, used, manifests, max_async_level)),
        contradictions=tuple(found),
        not_taken=len(stream) - len(used),
    )


def stream_rows(ledger: Ledger, table: OutcomeTable, run_id: RunId) -> list[int]:
    """Return the rows of a run's training stream in order: all outcomes recorded as accepted."""
    numbers = {batch.batch_id: number for number, batch in enumerate(table.batches)}
    accepted = table.records_N["verdict"] == Verdict.ACCEPTED
    rows: list[int] = []
    for batch in ledger.runs[run_id].judged:
        number = numbers[batch.batch_id]
        start, end = int(table.starts[number]), int(table.starts[number + 1])
        rows += (start + np.flatnonzero(accepted[start:end])).tolist()
    return rows


def _manifests(
    run: RunView,
    versions: Sequence[PolicyVersion],
    manifest_of: Callable[[Hash32], bytes | None],
) -> tuple[dict[PolicyVersion, Manifest], list[Contradiction]]:
    """Return the manifests that are found, and contradictions about them."""
    manifests: dict[PolicyVersion, Manifest] = {}
    found: list[Contradiction] = []
    for version in versions:
        checkpoint = run.checkpoints[version]
        data = manifest_of(checkpoint.manifest_root)
        if data is None:
            continue
        if keccak(data) != checkpoint.manifest_root:
            what = f"the manifest shown of version {version} hashes to {hex0x(keccak(data))}"
            found.append(_wrong(checkpoint, what))
            continue
        try:
            manifest = Manifest.from_bytes(data)
        except EncodingError as error:
            found.append(_wrong(checkpoint, f"version {version} was published as none: {error}"))
            continue
        if (manifest.run_id, manifest.version) != (run.run_id, version):
            what = f"run {manifest.run_id} version {manifest.version} was published as {version}"
            found.append(_wrong(checkpoint, what))
        manifests[version] = manifest
    return manifests, found


def _range_problems(
    ledger: Ledger,
    run: RunView,
    manifests: dict[PolicyVersion, Manifest],
    table: OutcomeTable,
    stream: Sequence[int],
) -> list[Contradiction]:
    """Return problems of versions that do not start at their parent's end, or take too many
    records.
    """
    posted = [
        ledger.batches[table.batches[int(table.batch_N[row])].batch_id].posted_block or 0
        for row in stream
    ]
    found, before = [], 0
    for version, manifest in manifests.items():
        checkpoint = run.checkpoints[version]
        follows = version == 0 or PolicyVersion(version - 1) in manifests
        if manifest.stream_from < before or (follows and manifest.stream_from != before):
            what = f"version {version} goes on at {manifest.stream_from}, its parent ended at"
            found.append(_wrong(checkpoint, f"{what} {before}"))
        known = int(np.searchsorted(posted, checkpoint.block_number, side="right"))
        if manifest.stream_to > known:
            what = f"version {version} consumed {manifest.stream_to} records, {known} were posted"
            found.append(_wrong(checkpoint, what))
        before = manifest.stream_to
    return found


def _wrong(checkpoint: CheckpointView, what: str) -> Contradiction:
    return Contradiction(Kind.LINEAGE, what, checkpoint.tx_hash, checkpoint.block_number)


def _ancestor(checkpoint: CheckpointView, manifest: Manifest | None) -> Ancestor:
    return Ancestor(
        version=checkpoint.version,
        manifest_root=hex0x(checkpoint.manifest_root),
        tx=checkpoint.tx_hash,
        stream_from=None if manifest is None else manifest.stream_from,
        stream_to=None if manifest is None else manifest.stream_to,
    )


def _ingredients(
    ledger: Ledger,
    table: OutcomeTable,
    rows: Sequence[int],
    manifests: dict[PolicyVersion, Manifest],
    max_async_level: int | None,
) -> Iterator[Ingredient]:
    seen: set[Hash32] = set()
    takers = {
        place: version
        for version, manifest in manifests.items()
        for place in range(manifest.stream_from, min(manifest.stream_to, len(rows)))
    }
    for place, row in enumerate(rows):
        batch, position = table.place(row)
        record, taker = table.record(row), takers.get(place)
        worker = ledger.worker_by_id.get(record.worker_id)
        age = None if taker is None else taker - 1 - record.policy_version
        use = "offered"
        if record.file_hash in seen:
            use = "repeated"
        elif max_async_level is not None and age is not None and age > max_async_level:
            use = "stale"
        elif table.verdict_N[row] != Verdict.ACCEPTED:
            use = "overturned"
        seen.add(record.file_hash)
        yield Ingredient(
            stream_position=place,
            version=None if taker is None else int(taker),
            batch_id=batch.batch_id,
            position=position,
            file_sha256=hex0x(record.file_hash),
            worker=None if worker is None else worker.address,
            policy_version=record.policy_version,
            units=record.units,
            use=use,
            samples=record.rollouts,
            posted_tx=batch.posted_tx,
        )
