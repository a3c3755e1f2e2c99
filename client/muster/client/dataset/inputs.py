"""What rows are made of: a run's documents, its policy's tokenizer, and the submissions' files.

Copies may come from anybody, in folders or by HTTP: everything is checked against the chain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from muster.chain import RunView
from muster.client.audit.evidence import EvidenceFolders
from muster.client.audit.history import History
from muster.client.dataset.rows import RowMaker, Texts
from muster.client.model.fetch import manifest_in
from muster.client.sources import Signer, Sources
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32, RunId
from muster.protocol.recipe import Recipe
from muster.shardcast.checks import check_files
from muster.tasks import TaskSet
from muster.tasks.document import MAX_TASK_SET_BYTES

WEIGHTS = (".safetensors", ".safetensors.index.json", ".peft")
"""Files of a policy that have no part in text."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where copies are."""

    evidence: Sequence[Path]
    """Folders with files and documents."""
    sources: Sequence[str]
    """URLs that show files and documents, such as the run's orchestrator's."""
    model: Path
    """A version of the run's policy, as `muster model fetch` writes it."""
    key: bytes | None = None
    """Signs the questions to sources that answer the run's own accounts alone."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What rows are made of."""

    maker: RowMaker
    """Makes rows of files."""
    tokenizer: Hash32
    """Root of the policy whose tokenizer makes the texts."""
    evidence: EvidenceFolders
    sources: Sources

    async def find_file(self, wanted: Hash32) -> bytes:
        """Return a submission's file; raises ApiError when nobody has it."""
        data = self.evidence.submission_file(wanted)
        if data is not None and file_hash(data) == wanted:
            return data
        return await self.sources.file(wanted)


@asynccontextmanager
async def open_inputs(history: History, run_id: RunId, places: Places) -> AsyncIterator[Inputs]:
    """Yield what a run's rows are made of.

    Raises ConfigError when the model folder is no version of the run's policy, ApiError when nobody
    shows a document.
    """
    run = history.ledger.runs[run_id]
    root = _require_version(places.model, run)
    signer = None
    if places.key is not None:
        signer = Signer(places.key, history.domain, run.config.orchestrator)
    evidence = EvidenceFolders(places.evidence)
    with TemporaryDirectory(prefix="muster-") as temporary:
        async with Sources(places.sources, signer=signer) as sources:
            recipe = evidence.document(run.config.recipe_hash)
            if recipe is None:
                recipe = await sources.document(run.config.recipe_hash)
            folder = Path(temporary)
            path = evidence.task_set(run.config.task_set_hash, folder)
            if path is None:
                path = folder / "downloaded.jsonl"
                most = MAX_TASK_SET_BYTES
                await sources.download(run.config.task_set_hash, path, max_bytes=most)
            maker = RowMaker(Recipe.from_bytes(recipe), TaskSet.open(path), Texts(places.model))
            yield Inputs(maker, root, evidence, sources)


def _require_version(folder: Path, run: RunView) -> Hash32:
    """Return the root of the version in a folder; hashes the files that are no weights."""
    manifest = manifest_in(folder)
    root = manifest.root()
    checkpoint = run.checkpoints.get(manifest.version)
    if manifest.run_id != run.run_id or checkpoint is None or checkpoint.manifest_root != root:
        raise ConfigError(
            f"{folder} is version {manifest.version} of run {manifest.run_id}, root {hex0x(root)}, "
            f"which run {run.run_id} has not published",
            hint=f"muster model fetch --run {run.run_id} --out DIR",
        )
    for each in check_files(folder, manifest):
        if each.damaged and not each.name.endswith(WEIGHTS):
            raise ConfigError(f"{folder / each.name} is damaged", hint="fetch the model again")
    return root
