"""The model card: what trained a version, and how anybody checks that. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from muster.client.audit.lineage import TAKEN, Lineage
from muster.client.audit.report import RunReport
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Address
from muster.shardcast import Manifest

MOST_WORKERS = 50
"""Workers that a card names; the lineage beside it has all of them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a version comes from."""

    chain_id: int
    """EIP-155 chain id."""
    registry: Address
    """The RunRegistry that holds its root."""
    run: RunReport
    """What happened in its run."""
    manifest: Manifest
    """What the version's files are."""
    tx: str
    """The transaction that published it."""
    base_root: str | None
    """Root of version 0's manifest, the base model's."""
    documents: dict[str, str]
    """Keccak-256 of the run's documents, by what they are."""


def write_card(origin: Origin, lineage: Lineage) -> str:
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


def _figures(run: RunReport, lineage: Lineage) -> list[tuple[str, str]]:
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


def _workers(lineage: Lineage) -> list[str]:
    workers = lineage.by_worker()
    if not workers:
        return ["Nothing: this is the base model."]
    rows = [f"| `{who}` | {count:,} | {units:,} |" for who, count, units in workers[:MOST_WORKERS]]
    more = len(workers) - MOST_WORKERS
    left = ["", f"{more:,} more in `lineage.json`."] if more > 0 else []
    return ["| worker | submissions | units |", "|---|---:|---:|", *rows, *left]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
