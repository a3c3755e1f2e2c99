"""A policy version as a model folder: fetched from any relay, checked against the root on chain.

DIR/                    the version's files, as Hugging Face's libraries load them
DIR/README.md           the model card
DIR/manifest.muster     the list of files; its hash is the root on chain
DIR/submissions.json    every submission that went into it

The card names the submissions that trained the version, and the commands that verify it.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.chain import RunView
from muster.client.audit.history import ChainHistory
from muster.client.audit.lineage import TAKEN, PolicyLineage, fetch_manifests, trace
from muster.client.audit.report import RunReport
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, EncodingError, PolicyUnavailable, StorageError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.shardcast import Fetcher, Manifest
from muster.shardcast.fetcher import Progress
from muster.shardcast.http_client import ConnectsTo
from muster.shardcast.simple import check_files, read_manifest

MANIFEST, SUBMISSIONS, CARD = "manifest.muster", "submissions.json", "README.md"
OTHER_CARD = "MUSTER.md"
"""The card's name if the model has its own README."""


@dataclass(frozen=True, slots=True)
class WantedVersion:
    """Which version to fetch, from where and to where."""

    run_id: RunId
    version: PolicyVersion | None
    """The version; None for the newest."""
    relays: Sequence[str]
    """Relays to fetch it from."""
    connects_to: ConnectsTo | None
    """What to connect to for a relay's host; None for any."""
    out: Path
    """The folder that receives it, which must be empty."""


async def fetch_model(
    wish: WantedVersion, history: ChainHistory, progress: Progress | None = None
) -> Manifest:
    """Fetch a version into its folder, and write its card; returns its manifest.

    Resumes an interrupted fetch. Raises ConfigError when there is no such version or the folder is
    not empty, PolicyUnavailable when no relay delivers it.
    """
    run, version = history.version_of(wish.run_id, wish.version)
    checkpoint = run.checkpoints[version]
    require_free(wish.out)
    # Beside the folder, so that the files are renamed, not copied.
    cache = wish.out.with_name(f".{wish.out.name}.part")
    async with Fetcher(wish.relays, cache, connects_to=wish.connects_to) as fetcher:
        try:
            folder = await fetcher.fetch(
                wish.run_id, version, checkpoint.manifest_root, progress=progress
            )
        except PolicyUnavailable as error:
            if version != run.latest_version:
                error.hint = f"relays keep the newest versions; the newest is {run.latest_version}"
            raise
    manifest = read_manifest(folder)
    wanted = {c.manifest_root: v for v, c in run.checkpoints.items() if v < version}
    found = await fetch_manifests(wish.relays, wish.run_id, wanted, wish.connects_to)
    found[manifest.root()] = manifest.to_bytes()
    _describe(folder, history, run, manifest, found.get)
    try:
        if wish.out.exists():
            wish.out.rmdir()
        folder.rename(wish.out)
        shutil.rmtree(cache)
    except OSError as error:
        raise StorageError(f"cannot give {folder} its name {wish.out}: {error}") from error
    return manifest


def require_free(out: Path) -> None:
    """Raise ConfigError when a folder holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty", hint="choose another --out; nothing was touched")


def _describe(
    folder: Path,
    history: ChainHistory,
    run: RunView,
    manifest: Manifest,
    manifest_of: Callable[[Hash32], bytes | None],
) -> None:
    """Write the card, the manifest and the submissions beside the version's files."""
    lineage = trace(history.ledger, run.run_id, manifest.version, manifest_of)
    base = run.checkpoints.get(PolicyVersion(0))
    [report] = history.report(run.run_id).runs
    origin = Origin(
        chain_id=history.deployment.chain_id,
        registry=history.deployment.contracts["RunRegistry"],
        run=report,
        manifest=manifest,
        tx=run.checkpoints[manifest.version].tx_hash,
        base_root=None if base is None else hex0x(base.manifest_root),
        documents={
            "recipe": hex0x(run.config.recipe_hash),
            "problems": hex0x(run.config.task_set_hash),
            "calibration": hex0x(run.config.calibration_hash),
        },
    )
    has_own = any(file.name == CARD for file in manifest.files)
    (folder / (OTHER_CARD if has_own else CARD)).write_text(write_card(origin, lineage))
    (folder / SUBMISSIONS).write_text(json.dumps(lineage.to_json()))
    (folder / MANIFEST).write_bytes(manifest.to_bytes())


# Checking a fetched folder


def manifest_in(folder: Path) -> Manifest:
    """Return the manifest that a fetched model folder holds; raises ConfigError."""
    try:
        return Manifest.from_bytes((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"there is no {MANIFEST} in {folder}", hint="`muster model fetch` makes such folders"
        ) from error
    except EncodingError as error:
        raise ConfigError(
            f"{folder / MANIFEST} is damaged: {error}", hint="fetch the model again"
        ) from error


def faults_of(folder: Path, run: RunView | None) -> list[str]:
    """Return how a fetched model folder differs from the chain; hashes every file."""
    manifest = manifest_in(folder)
    name = f"run {manifest.run_id} version {manifest.version}"
    checkpoint = run.checkpoints.get(manifest.version) if run else None
    if checkpoint is None:
        return [f"the chain knows no {name}"]
    if checkpoint.manifest_root != keccak(manifest.to_bytes()):
        return [f"the chain has {name} as {hex0x(checkpoint.manifest_root)}"]
    return [f"{each.name} is damaged" for each in check_files(folder, manifest) if each.damaged]


MOST_WORKERS = 50
"""Most workers named in a card; submissions.json has all of them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a version."""

    chain_id: int
    """EIP-155 chain id."""
    registry: Address
    """The RunRegistry that holds its root."""
    run: RunReport
    """Report about its run."""
    manifest: Manifest
    """Manifest of the version's files."""
    tx: str
    """The transaction that published it."""
    base_root: str | None
    """Root of version 0's manifest, the base model's."""
    documents: dict[str, str]
    """Keccak-256 of the run's documents, by kind."""


def write_card(origin: Origin, lineage: PolicyLineage) -> str:
    """Return the card as Markdown with the front matter of Hugging Face's model cards."""
    manifest, run = origin.manifest, origin.run
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [muster, reinforcement-learning]",
            "---",
            "",
            f"# Run {manifest.run_id}, version {manifest.version}",
            "",
            f"Trained by strangers' machines: every sample was checked by {run.quorum} of "
            f"{len(run.validators)} validators before it was learned from.",
            "",
            *_table(_where(origin)),
            "",
            "## What trained it",
            "",
            *_table(_figures(run, lineage)),
            "",
            *_workers(lineage),
            "",
            "## How to check that",
            "",
            "The root is on chain, and fixes every file and every submission that went into this "
            "version and all before it.",
            "",
            "```sh",
            "muster model verify .",
            f"muster audit lineage --run {manifest.run_id} --version {manifest.version} "
            "--evidence .",
            f"muster audit --run {manifest.run_id}",
            "```",
            "",
        ]
    )


def _where(origin: Origin) -> list[tuple[str, str]]:
    manifest = origin.manifest
    return [
        ("chain", f"{origin.chain_id}, RunRegistry `{origin.registry}`"),
        ("root (lineage)", f"`{hex0x(manifest.root())}`"),
        ("published by", f"`{origin.tx}`"),
        ("base model", "itself" if manifest.version == 0 else f"`{origin.base_root}`"),
        ("size", f"{manifest.total_bytes:,} bytes in {len(manifest.files)} files"),
        *((what, f"`{found}`") for what, found in origin.documents.items()),
    ]


def _figures(run: RunReport, lineage: PolicyLineage) -> list[tuple[str, str]]:
    uses = Counter(each.use for each in lineage.ingredients)
    passed = ", ".join(f"{uses[use]} {use}" for use in ("repeated", "stale") if uses[use])
    taken = sum(uses[use] for use in TAKEN)
    return [
        ("versions before it", str(lineage.version)),
        (
            "submissions offered to training",
            f"{taken:,}" + (f" (passed over: {passed})" * bool(passed)),
        ),
        ("units in them", f"{sum(units for _, _, units in lineage.by_worker()):,}"),
        ("workers", f"{len(lineage.by_worker()):,}"),
        (
            "verdicts in the run",
            f"{run.accepted:,} accepted, {run.rejected:,} rejected, {run.fraud:,} fraud",
        ),
        ("accepted by mistake, as a jury found", f"{uses['overturned']:,}"),
    ]


def _workers(lineage: PolicyLineage) -> list[str]:
    workers = lineage.by_worker()
    if not workers:
        return ["Nothing: this is the base model."]
    rows = [f"| `{who}` | {count:,} | {units:,} |" for who, count, units in workers[:MOST_WORKERS]]
    more = len(workers) - MOST_WORKERS
    left = ["", f"{more:,} more in `submissions.json`."] if more > 0 else []
    return ["| worker | submissions | units |", "|---|---:|---:|", *rows, *left]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
