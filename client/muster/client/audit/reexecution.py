"""Verdicts, run again: a sample of a run's, or all, from a copy of the evidence.

1. draw: `--sample N --seed S` outcomes, each with the same chance; everybody who draws alike gets
   the same
2. find: submissions and tickets, the file, the pinned documents, the policy; each against the hash
   that the chain has; what is missing or another is a contradiction
3. judge: with the validator's own checks, as the chain stood when the batch was committed
4. compare with the recorded outcome, field by field
5. prove: what the signers of accepted ones showed as proof of checking must come from the same
   hidden states
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from muster.api import BatchEntry
from muster.chain import BatchView, RunView
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.client.audit.evidence import EvidenceStore
from muster.client.audit.history import History
from muster.client.audit.proofs import ProofBook
from muster.client.audit.table import OutcomeTable, tabulate
from muster.client.bundle_checks import NOT_OF_ONE_FILE, Answer, check_verdict, check_weights
from muster.client.rerun import Recomputed, claim_at, recompute, slots_of
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import Rules
from muster.client.validator.process import require_consistent
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import ConfigError, EncodingError, MusterError, PolicyUnavailable
from muster.protocol.ids import PolicyVersion, RunId
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import OutcomeRecord
from muster.protocol.recipe import Recipe
from muster.shardcast import Fetcher, Manifest
from muster.tasks import TaskSet
from muster.toploc import Calibration

if TYPE_CHECKING:
    from muster.inference import InferenceEngine

CHECK_1 = range(10, 20)
"""Reasons of check 1, for which no file is needed."""
T = TypeVar("T")
Progress = Callable[[int, int, str], None]
"""Hears how many outcomes were run again, of how many, and what came of the last."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Where evidence is."""

    store: EvidenceStore
    """Folders and bundles."""
    relays: tuple[str, ...] = ()
    """Where policies are fetched that no folder has."""
    cache: Path = field(default_factory=Path)
    """Where fetched policies are kept."""
    orchestrator: str | None = None
    """Who is asked for proofs of checking that no folder has."""


def draw(table: OutcomeTable, run_id: RunId, sample: int | None, seed: int) -> list[int]:
    """Return the rows to run again, by policy version; all of the run's for None."""
    rows = np.flatnonzero(table.is_of(run_id))
    if sample is not None and sample < len(rows):
        rows = np.random.default_rng(seed).choice(rows, sample, replace=False)
    versions = table.column("policy_version")
    return sorted(rows.tolist(), key=lambda row: (int(versions[row]), row))


async def rerun_verdicts(
    history: History,
    run_id: RunId,
    rows: Sequence[int],
    copies: Copies,
    engine: InferenceEngine,
    *,
    progress: Progress | None = None,
) -> list[Check]:
    """Return whether the same checks on the same evidence give the recorded outcomes, and where
    proofs of checking are to be had, whether who signed had recomputed them.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-audit-")))
        decoder = await stack.enter_async_context(FileDecoder())
        run = history.ledger.runs[run_id]
        judge = Rejudge(history, run, copies, engine, decoder, folder)
        found = [
            Contradiction(Kind.EVIDENCE_ALTERED, f"{path.name} is no bundle: {error}")
            for path, error in copies.store.broken
        ]
        silent = 0
        for done, row in enumerate(rows, 1):
            contradictions, is_silent = await judge.outcome(row)
            found += contradictions
            silent += is_silent
            if progress is not None:
                progress(done, len(rows), judge.describe(row, contradictions, is_silent))
    agreed = len(rows) - silent
    proofs = judge.proofs.check()
    verdicts = summarise(
        "verdicts are what the evidence gives",
        found,
        f"{agreed} of {len(rows)} outcomes run again agree"
        + (f", {silent} cannot be told from one file" if silent else ""),
    )
    return [verdicts] if proofs is None else [verdicts, proofs]


class Rejudge:
    """Runs outcomes of one run again."""

    def __init__(
        self,
        history: History,
        run: RunView,
        copies: Copies,
        engine: InferenceEngine,
        decoder: FileDecoder,
        folder: Path,
    ) -> None:
        self.table = tabulate(history.ledger)
        self.proofs = ProofBook(run, history.domain, copies.store, copies.orchestrator)
        self._history, self._run = history, run
        self._copies, self._engine, self._folder = copies, engine, folder
        self._decoder = decoder
        self._rules: Rules | None = None
        self._loaded: PolicyVersion | None = None
        self._slots = slots_of(history.ledger, run.run_id)

    def describe(self, row: int, found: Sequence[Contradiction], is_silent: bool) -> str:
        """Return one line on what came of an outcome."""
        batch, position = self.table.place(row)
        verdict = self.table.record(row).verdict.name.lower()
        word = "contradicted" if found else "cannot be told" if is_silent else "agrees"
        return f"{batch.batch_id}:{position} {verdict}: {word}"

    async def outcome(self, row: int) -> tuple[list[Contradiction], bool]:
        """Return what contradicts an outcome, and whether its evidence says nothing."""
        batch, position = self.table.place(row)
        record = self.table.record(row)

        def wrong(kind: Kind, detail: str) -> tuple[list[Contradiction], bool]:
            at = (batch.posted_tx, batch.posted_block, batch.batch_id, position)
            return [Contradiction(kind, detail, *at)], False

        if record.reason in NOT_OF_ONE_FILE:
            return [], True
        try:
            entries, data = self._evidence(batch, record)
            self._rules = self._rules or self._read_rules()
            await self._load(record.policy_version)
            # A busy machine may kill a decoder: who accuses looks twice.
            problems, again = await self._compare(batch, position, entries, data)
            if problems:
                problems, again = await self._compare(batch, position, entries, data)
            await self.proofs.compare(batch, position, again.fingerprints)
        except Withheld as error:
            return wrong(Kind.EVIDENCE_WITHHELD, str(error))
        except EncodingError as error:
            return wrong(Kind.EVIDENCE_ALTERED, str(error))
        return wrong(Kind.VERDICT_WRONG, problems) if problems else ([], False)

    def _evidence(self, batch: BatchView, record: OutcomeRecord) -> tuple[list[BatchEntry], bytes]:
        entries = self._copies.store.entries(batch)
        if entries is None:
            raise Withheld(f"the submissions of batch {batch.batch_id} are not in the evidence")
        if merkle_root([entry.submission.leaf() for entry in entries]) != batch.root:
            raise EncodingError(
                f"the submissions shown are not those that batch {batch.batch_id} was committed for"
            )
        name = hex0x(record.file_hash)
        data = self._copies.store.submission_file(record.file_hash)
        if data is None and record.reason in CHECK_1:
            data = b""
        elif data is None:
            raise Withheld(f"the file {name} is not in the evidence")
        elif file_hash(data) != record.file_hash:
            raise EncodingError(f"the file kept as {name} has the hash {hex0x(file_hash(data))}")
        return entries, data

    def _read_rules(self) -> Rules:
        config, store = self._run.config, self._copies.store
        recipe, calibration = (
            _present(store.document(pinned), f"{what} {hex0x(pinned)}")
            for what, pinned in (
                ("recipe", config.recipe_hash),
                ("calibration", config.calibration_hash),
            )
        )
        pinned = config.task_set_hash
        path = store.task_set(pinned, self._folder)
        rules = Rules(
            recipe=Recipe.from_bytes(recipe),
            task_set=TaskSet.open(_present(path, f"task set {hex0x(pinned)}")),
            calibration=Calibration.from_bytes(calibration),
        )
        require_consistent(rules)
        return rules

    async def _load(self, version: PolicyVersion) -> None:
        checkpoint = self._run.checkpoints.get(version)
        if checkpoint is None or self._loaded == version:
            return
        folder = await self._policy(version)
        await asyncio.to_thread(self._engine.load_policy, folder, version)
        self._loaded = version

    async def _policy(self, version: PolicyVersion) -> Path:
        root = self._run.checkpoints[version].manifest_root
        store, run_id = self._copies.store, self._run.run_id
        data = store.document(root)
        manifest = None if data is None else Manifest.from_bytes(data)
        for folder in self._candidates(version, manifest):
            assert manifest is not None  # no candidates without one
            if check_weights(manifest, folder).answer is Answer.AGREE:
                return folder
        if self._copies.relays:
            async with Fetcher(self._copies.relays, self._copies.cache, attempts=2) as fetcher:
                try:
                    return await fetcher.fetch(run_id, version, root)
                except PolicyUnavailable as error:
                    raise Withheld(f"policy {version} is on no relay: {error}") from error
        raise Withheld(f"policy {version}, root {hex0x(root)}, is not in the evidence")

    def _candidates(self, version: PolicyVersion, manifest: Manifest | None) -> Iterator[Path]:
        """Yield folders that may hold the policy; those of bundles are unpacked."""
        if manifest is None:
            return
        yield from self._copies.store.policy_folders(self._run.run_id, version)
        for bundle in self._copies.store.bundles_of(manifest.root()):
            folder = self._folder / f"policy-{int(version)}"
            folder.mkdir(exist_ok=True)
            if all(bundle.unpack(f.name, f.size, folder / f.name) for f in manifest.files):
                yield folder

    async def _compare(
        self, batch: BatchView, position: int, entries: Sequence[BatchEntry], data: bytes
    ) -> tuple[str, Recomputed]:
        """Return where the recorded outcome and the recomputed one differ, empty if nowhere, and
        the recomputed one.
        """
        assert self._rules is not None  # read by the caller
        assert batch.records is not None  # a row is of a judged batch
        domain = self._history.domain
        claim = claim_at(self._history.ledger, batch, entries, position, domain, self._slots)
        seats = await self.proofs.wanted(batch)
        again = await recompute(claim, data, self._rules, self._engine, self._decoder, seats)
        checks = check_verdict(batch.records[position], again)
        wrong = [f"{c.name}: {c.detail}" for c in checks if c.answer is Answer.CONTRADICT]
        return "; ".join(wrong), again


class Withheld(MusterError):
    """Evidence that the chain names is not in the copy."""


def _present(value: T | None, what: str) -> T:
    if value is None:
        raise Withheld(f"the {what} is not in the evidence")
    return value


def require_rows(rows: Sequence[int], run_id: RunId) -> None:
    """Raise ConfigError when there is nothing to run again."""
    if not rows:
        raise ConfigError(
            f"run {run_id} has no outcomes to run again", hint="wait for some to be posted"
        )
