"""Rows of a data set: the samples of an accepted submission, in text and in tokens.

Everything in a row follows from the submission's file, the run's pinned documents, the policy's
tokenizer and the ledger, so anybody with these makes the same row. Copies may come from anybody, in
folders or by HTTP: `open_inputs` checks them against the chain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.chain import RunView
from muster.client.audit.evidence import EvidenceFolders
from muster.client.audit.history import ChainHistory
from muster.client.model import manifest_in
from muster.client.sources import Signer, Sources
from muster.inference.prompts import after_last, encode_prompt
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import ConfigError, EncodingError, EngineError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import OutcomeRecord
from muster.protocol.prompts import Part
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Bounds, read_table, require_bounds
from muster.shardcast.simple import check_files
from muster.tasks import TaskSet
from muster.tasks.document import MAX_TASK_SET_BYTES

_TOKENS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    {
        "problem_id": pa.string(),
        "source": pa.string(),
        "part": pa.string(),
        "task_type": pa.string(),
        "problem": pa.string(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "answer": pa.string(),
        "reward": pa.float64(),
        "target_length": pa.int32(),
        "is_finished": pa.bool_(),
        "prompt_tokens": _TOKENS,
        "completion_tokens": _TOKENS,
        "replies": _TOKENS,
        "verifier": pa.string(),
        "worker": pa.string(),
        "batch_id": pa.int64(),
        "position": pa.int32(),
        "row": pa.int32(),
        "stream_position": pa.int64(),
        "policy_version": pa.int64(),
        "policy_root": pa.string(),
        "file_sha256": pa.string(),
    }
)
"""Columns of a data set, in order; docs/guides/data.md says what each holds."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted submission on the ledger."""

    stream_position: int
    """Its place in the run's training stream, from 0."""
    batch_id: int
    position: int
    """Its place in the batch, from 0."""
    worker: Address
    """The staking wallet."""
    record: OutcomeRecord
    """The outcome that was posted."""
    policy_root: Hash32
    """Root of the manifest of the policy that generated it."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLists:
    """Lists of tokens, one after the other in one array: no object per token."""

    flat: npt.NDArray[np.int32]
    """Tokens of all rows."""
    ends: npt.NDArray[np.int64]
    """Offsets of the rows' ends, after a leading 0."""

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> TokenLists:
        """Return the rows of a column of lists."""
        chunk = column.combine_chunks()
        # The arrays' own methods would import pandas.
        offsets = np.from_dlpack(chunk.offsets).astype(np.int64)
        return cls(np.from_dlpack(chunk.flatten()).astype(np.int32), offsets - offsets[0])

    def row(self, number: int) -> npt.NDArray[np.int32]:
        """Return a row."""
        return self.flat[self.ends[number] : self.ends[number + 1]]

    def rows(self) -> list[list[int]]:
        """Return all rows as lists."""
        tokens = self.flat.tolist()
        return [tokens[a:b] for a, b in pairwise(self.ends.tolist())]

    def without(self, tokens: npt.NDArray[np.int32]) -> TokenLists:
        """Return the rows without some tokens."""
        keeps = ~np.isin(self.flat, tokens)
        return TokenLists(self.flat[keeps], np.concatenate([[0], np.cumsum(keeps)])[self.ends])

    def after(self, starts: Sequence[int]) -> TokenLists:
        """Return each row without its tokens before the given start."""
        rows = [self.row(n)[start:] for n, start in enumerate(starts)]
        ends = np.cumsum([0, *map(len, rows)])
        return TokenLists(np.concatenate([self.flat[:0], *rows]), ends)


class Texts:
    """Turns tokens into text as the run's engines do; knows which tokens end a completion."""

    def __init__(self, folder: Path) -> None:
        """`folder` is a policy's; its weights are not read. Raises ConfigError."""
        from muster.inference.policy_files import declared_ends, read_config, read_tokenizer

        try:
            tokenizer = read_tokenizer(folder)
            eos = declared_ends(folder, read_config(folder), tokenizer)
        except (EngineError, OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{folder} has no tokenizer that loads: {error}",
                hint="`muster model fetch --run N --out DIR` brings one",
            ) from error
        self._eos = np.array(sorted(eos), np.int32)
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer

    def mark(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a recipe's `answer_after`, none for the empty text."""
        if not text:
            return ()
        return encode_prompt(self._tokenizer, (Part(text, True),), is_start=False)

    def ends(self, lists: TokenLists) -> list[bool]:
        """Tell which rows end with an end token."""
        found: list[bool] = np.isin(lists.flat[lists.ends[1:] - 1], self._eos).tolist()
        return found

    def prompts(self, lists: TokenLists) -> list[str]:
        """Return prompts as the model reads them, special tokens included."""
        return self._decode(lists.rows(), skips_special=False)

    def completions(self, lists: TokenLists) -> list[str]:
        """Return completions without EOS and special tokens, as verifiers read them."""
        return self._decode(lists.without(self._eos).rows(), skips_special=True)

    def _decode(self, rows: list[list[int]], *, skips_special: bool) -> list[str]:
        if self._fast is not None:
            texts: list[str] = self._fast.decode_batch(rows, skip_special_tokens=skips_special)
            return texts
        return [
            self._tokenizer.decode(
                row, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False
            )
            for row in rows
        ]


class RowMaker:
    """Makes the rows of a run's submissions."""

    def __init__(self, recipe: Recipe, task_set: TaskSet, texts: Texts) -> None:
        self._recipe = recipe
        self._task_set = task_set
        self._texts = texts
        self._bounds = Bounds.of(recipe)
        self._mark = texts.mark(recipe.prompt.answer_after)
        self._places = {problem.problem_id: n for n, problem in enumerate(task_set)}
        self._verifiers = {v.task_type: f"{v.name} {v.version}" for v in recipe.verifiers}

    def require_parts(self, names: Iterable[str]) -> None:
        """Raise TaskError for a name that no part of the task set has."""
        for name in names:
            self._task_set.range_of(name)

    def rows(self, data: bytes, accepted: Accepted) -> pa.Table:
        """Return a submission's samples, in the file's order.

        Raises EncodingError when the file is not the accepted one or not what its record says.
        """
        record = accepted.record
        if file_hash(data) != record.file_hash:
            raise EncodingError(f"the file has another hash than {hex0x(record.file_hash)}")
        require_bounds(data, self._bounds)
        table = read_table(data)
        if len(table) != record.rollouts:
            raise EncodingError(f"file has {len(table)} rows, its record says {record.rollouts}")
        places = [self._place(name) for name in table["problem_id"].to_pylist()]
        problems = [self._task_set[place] for place in places]
        prompts = TokenLists.of(table["prompt_tokens"])
        completions = TokenLists.of(table["completion_tokens"])
        texts = answers = self._texts.completions(completions)
        replies: list[list[int]] = [[]] * len(table)
        if "replies" in table.column_names:
            replies = table["replies"].to_pylist()
        if "replies" in table.column_names or self._mark:
            starts = [self._answer_start(completions.row(n), replies[n]) for n in range(len(table))]
            answers = self._texts.completions(completions.after(starts))
        count = len(table)
        columns: dict[str, Any] = {
            "problem_id": table["problem_id"],
            "source": [problem.source for problem in problems],
            "part": [self._task_set.part_at(place) for place in places],
            "task_type": [problem.task_type for problem in problems],
            "problem": [problem.prompt for problem in problems],
            "prompt": self._texts.prompts(prompts),
            "completion": texts,
            "answer": answers,
            "reward": table["task_reward"],
            "target_length": table["target_length"],
            "is_finished": self._texts.ends(completions),
            "prompt_tokens": table["prompt_tokens"].cast(_TOKENS),
            "completion_tokens": table["completion_tokens"].cast(_TOKENS),
            "replies": replies,
            "verifier": [self._verifiers.get(problem.task_type, "") for problem in problems],
            "worker": [accepted.worker] * count,
            "batch_id": np.full(count, accepted.batch_id),
            "position": np.full(count, accepted.position, np.int32),
            "row": np.arange(count, dtype=np.int32),
            "stream_position": np.full(count, accepted.stream_position),
            "policy_version": np.full(count, record.policy_version),
            "policy_root": [hex0x(accepted.policy_root)] * count,
            "file_sha256": [hex0x(record.file_hash)] * count,
        }
        return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)

    def _answer_start(self, tokens: npt.NDArray[np.int32], replies: list[int]) -> int:
        """Return where the graded part of a completion begins: in its last turn, after the thought.
        If the thought never ends, return the end of the completion.
        """
        turn = replies[-1] if replies else 0
        return len(tokens) - len(after_last(tokens[turn:].tolist(), self._mark))

    def _place(self, problem_id: str) -> int:
        place = self._places.get(problem_id)
        if place is None:
            raise EncodingError(f"the run's task set has no problem {problem_id!r}")
        return place


def policy_roots(run: RunView) -> dict[int, Hash32]:
    """Return the manifest's root of every published version."""
    return {int(version): each.manifest_root for version, each in run.checkpoints.items()}


# Where a run's documents and files are found

WEIGHTS = (".safetensors", ".safetensors.index.json", ".peft")
"""Files of a policy that have no part in text."""


@dataclass(frozen=True, slots=True)
class Places:
    """Places of copies."""

    evidence: Sequence[Path]
    """Folders with files and documents."""
    sources: Sequence[str]
    """URLs that serve files and documents, such as the run's orchestrator's."""
    model: Path
    """A version of the run's policy, as `muster model fetch` writes it."""
    key: bytes | None = None
    """Signs requests to sources that answer only the run's own accounts."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs for making rows."""

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
async def open_inputs(
    history: ChainHistory, run_id: RunId, places: Places
) -> AsyncIterator[Inputs]:
    """Yield the inputs for a run's rows.

    Raises ConfigError when the model folder is not a version of the run's policy, ApiError when no
    source has a document.
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
    """Return the root of the version in a folder; hashes the files except the weights."""
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
