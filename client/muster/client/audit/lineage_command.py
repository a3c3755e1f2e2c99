"""`muster audit lineage`: which files, workers and verdicts went into a policy version."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from muster.client.audit.flags import copy_options, read_history, source_options
from muster.client.options import json_option
from muster.client.printing import print_table
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muster.client.audit.evidence import EvidenceStore
    from muster.client.audit.lineage import Ancestor, Lineage

MAX_MANIFEST_BYTES = 1 << 20
FETCH_TIMEOUT_S = 10.0


@click.command("lineage")
@click.option("--run", type=int, required=True, help="The run.")
@click.option("--version", type=int, required=True, help="The policy version.")
@copy_options
@json_option
@source_options
def lineage(run: int, version: int, as_json: bool, **options: Any) -> None:
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

    history = read_history(options)
    history.require_run(RunId(run))
    store = EvidenceStore(options["evidence"])
    manifest_of = _manifests(store, options["relay"], history.ledger.runs[RunId(run)], version)
    level = _max_async_level(store, history.ledger.runs[RunId(run)].config.recipe_hash)
    found = trace(
        history.ledger, RunId(run), PolicyVersion(version), manifest_of, max_async_level=level
    )
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        print_lineage(found, knows_recipe=level is not None)
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


def print_lineage(found: Lineage, *, knows_recipe: bool) -> None:
    """Print a version's ancestry as a chain of versions, and who contributed."""
    click.echo(f"run {found.run_id}, policy {found.version}: {len(found.ingredients)} files\n")
    for line in _graph(found):
        click.echo(line)
    click.echo()
    rows = [[worker, str(count), str(units)] for worker, count, units in found.by_worker()]
    print_table(("worker", "files consumed", "units"), rows)
    left = [each for each in found.ingredients if each.use in ("repeated", "stale")]
    if left:
        click.echo(
            f"{len(left)} files were passed over: {', '.join(sorted({e.use for e in left}))}"
        )
    if not knows_recipe:
        click.echo("the recipe is not at hand: stale files count as consumed")
    click.echo(
        "Of a file that was consumed, groups whose rewards are all equal, and what else the\n"
        "recipe filters, are not trained on: muster explain FILE_HASH --rerun counts them."
    )
    for each in found.contradictions:
        click.echo(f"FAIL {each.kind}: {each}")
    click.echo(f"{len(found.contradictions) or 'no'} contradictions")


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
