"""`muster audit lineage`: which files, workers and verdicts went into a policy version."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.audit.flags import copy_options, read_history, source_options
from muster.client.options import FILE, json_option
from muster.client.printing import print_table
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from muster.client.audit.evidence import EvidenceStore
    from muster.client.audit.lineage import Ancestor, Lineage

USES = {
    "dropped": "paid, offered, and dropped whole by filters",
    "offered": "paid, and offered to training",
    "overturned": "offered, and taken for accepted by mistake, as a jury found",
    "repeated": "passed over: repeated",
    "stale": "passed over: stale",
    "trained": "paid, and trained on",
    "undone": "trained on, and undone by a rollback",
}
"""Uses, for people."""
MAX_MANIFEST_BYTES = 1 << 20
FETCH_TIMEOUT_S = 10.0


@click.command("lineage")
@click.option("--run", type=int, required=True, help="The run.")
@click.option("--version", type=int, required=True, help="The policy version.")
@click.option("--trainer-log", type=FILE, help="metrics.jsonl: what filters left of each file.")
@copy_options
@json_option
@source_options
def lineage(
    run: int, version: int, trainer_log: Path | None, as_json: bool, **options: Any
) -> None:
    """Show which files, workers and verdicts went into a policy version.

    Manifests may come from anybody: their roots are on chain. Without those of older versions
    their steps are shown together. --json lists every file.

    \b
    Examples:
      muster audit lineage --run 1 --version 3 --relay http://127.0.0.1:8700
      muster audit lineage --run 1 --version 3 --evidence origin --json
    """
    from muster.client.audit.evidence import EvidenceStore
    from muster.client.audit.lineage import trace
    from muster.client.audit.uses import read_trainer_log

    log = None if trainer_log is None else read_trainer_log(trainer_log)
    history = read_history(options)
    history.require_run(RunId(run))
    store = EvidenceStore(options["evidence"])
    manifest_of = _manifests(store, options["relay"], history.ledger.runs[RunId(run)], version)
    level = _max_async_level(store, history.ledger.runs[RunId(run)].config.recipe_hash)
    found = trace(
        history.ledger,
        RunId(run),
        PolicyVersion(version),
        manifest_of,
        max_async_level=level,
        log=log,
    )
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        print_lineage(found, knows_recipe=level is not None, has_log=log is not None)
    if found.contradictions or not all(check.passed for check in history.about_source):
        sys.exit(1)


def _max_async_level(store: EvidenceStore, pinned: Hash32) -> int | None:
    """Return how old a policy may be when its samples' turn comes, if the recipe is at hand."""
    from muster.protocol.recipe import Recipe

    data = store.document(pinned)
    try:
        return None if data is None else Recipe.from_bytes(data).training.max_async_level
    except EncodingError:
        return None


def _manifests(
    store: EvidenceStore, relays: Sequence[str], run: Any, version: int
) -> Callable[[Hash32], bytes | None]:
    """Return what looks a manifest up by root: in the evidence, then on relays."""
    import asyncio

    fetched: dict[Hash32, bytes] = {}
    if relays:
        wanted = {
            checkpoint.manifest_root: int(number)
            for number, checkpoint in run.checkpoints.items()
            if number <= version and store.document(checkpoint.manifest_root) is None
        }
        fetched = asyncio.run(fetch_manifests(relays, int(run.run_id), wanted))

    def manifest_of(root: Hash32) -> bytes | None:
        return store.document(root) or fetched.get(root)

    return manifest_of


async def fetch_manifests(
    relays: Sequence[str], run_id: int, wanted: dict[Hash32, int]
) -> dict[Hash32, bytes]:
    """Return those of the wanted manifests, versions by root, that relays have."""
    import aiohttp

    from muster.protocol.encoding import keccak

    found: dict[Hash32, bytes] = {}
    timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for root, version in wanted.items():
            for relay in relays:
                url = f"{relay.rstrip('/')}/v1/{run_id}/{version}/manifest"
                try:
                    async with session.get(url) as response:
                        data = await response.content.read(MAX_MANIFEST_BYTES + 1)
                except (aiohttp.ClientError, TimeoutError, ValueError):
                    continue
                if response.status == 200 and keccak(data) == root:
                    found[root] = data
                    break
    return found


def print_lineage(found: Lineage, *, knows_recipe: bool, has_log: bool = False) -> None:
    """Print a version's ancestry as a chain of versions, and who contributed."""
    click.echo(f"run {found.run_id}, policy {found.version}: {len(found.ingredients)} files\n")
    for line in _graph(found):
        click.echo(line)
    click.echo()
    rows = [[worker, str(count), str(units)] for worker, count, units in found.by_worker()]
    print_table(("worker", "files trained on" if has_log else "files offered", "units"), rows)
    for line in _uses(found):
        click.echo(line)
    if not knows_recipe:
        click.echo("the recipe is not at hand: stale files count as offered")
    if not has_log:
        click.echo(
            "Of an offered file the recipe's filters leave out groups whose rewards are all\n"
            "equal, and more: --trainer-log metrics.jsonl says what was trained on."
        )
    for each in found.contradictions:
        click.echo(f"FAIL {each.kind}: {each}")
    click.echo(f"{len(found.contradictions) or 'no'} contradictions")


def _uses(found: Lineage) -> Iterator[str]:
    """Yield what became of the files, and of their samples where the trainer's log says."""
    uses = Counter(each.use for each in found.ingredients)
    for use, count in sorted(uses.items()):
        yield f"{count:6,} {'file' if count == 1 else 'files'} {USES[use]}"
    if found.not_taken:
        yield f"{found.not_taken:6,} files paid, and not taken by this version"
    known = [each for each in found.ingredients if each.trained_samples is not None]
    if known:
        left_out: Counter[str] = Counter()
        for each in known:
            left_out.update(each.dropped)
        trained = sum(each.trained_samples or 0 for each in known)
        words = "".join(
            f", {count:,} {reason} left out" for reason, count in left_out.most_common()
        )
        yield f"{trained:,} samples trained on{words}"
    for version, dropped in found.late.items():
        words = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        yield f"version {version} left out {words} of them, the log does not say of which files"


def _graph(found: Lineage) -> list[str]:
    """Return one line per version, the base model first."""
    lines, unknown = [], 0
    for ancestor in found.ancestors:
        if ancestor.stream_to is None:
            unknown += 1
            continue
        if unknown:
            lines.append(f"  ┆  {unknown} versions whose manifests are not at hand")
        unknown = 0
        lines.append(_line(found, ancestor))
    return lines


def _line(found: Lineage, ancestor: Ancestor) -> str:
    own = [each for each in found.ingredients if each.version == ancestor.version]
    workers = len({each.worker for each in own})
    name = "base model" if ancestor.version == 0 else f"version {ancestor.version}"
    taken = f"stream {ancestor.stream_from} to {ancestor.stream_to}" if own else "nothing consumed"
    return (
        f"  ● {name:12} {taken:22} {len(own):4} files of {workers} workers  "
        f"root {ancestor.manifest_root[:18]}…  tx {ancestor.tx}"
    )
