"""Runs verdicts again from a copy of the evidence: all of a run's, or a sample.

1. draw: N outcomes, each with the same chance; equal `--sample N --seed S` draw the same outcomes
2. find: submissions and tickets, the file, the pinned documents, the policy; each is compared with
   its hash on chain: another hash is a contradiction; without the file nothing can be run again
3. judge: with the validator's own checks, on the chain's state when the batch was committed
4. compare with what stands: with the recorded outcome, field by field, or with a jury's ruling, by
   its consequences; it agrees or it contradicts
5. prove: the proofs of checking of those who signed accepted outcomes must come from the same
   hidden states
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from muster.api import BatchChecking, BatchEntry, OrchestratorApi
from muster.chain import BatchView, RunView
from muster.client.audit.contradictions import (
    Check,
    Contradiction,
    Kind,
    NotRerun,
    at_outcomes,
    summarise,
)
from muster.client.audit.evidence import EvidenceFolders
from muster.client.audit.history import ChainHistory
from muster.client.audit.outcome_table import OutcomeTable, tabulate
from muster.client.chain_facts import OutcomePlace, ruled_in
from muster.client.disputes.bundle_checks import (
    BundleCheck,
    CheckAnswer,
    check_verdict,
    check_weights,
    is_borne_out,
    reason_of,
)
from muster.client.disputes.cases import ruling_words
from muster.client.disputes.rerun import (
    Rerun,
    claim_at,
    hold,
    measure_conduct,
    recompute,
    slots_of,
)
from muster.client.run_documents import require_consistent
from muster.client.validator.checking_proofs import (
    Fingerprints,
    Proof,
    shown_fingerprints,
    who_checked,
)
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import Rules
from muster.client.validator.records import counted_before, judge_again
from muster.inference import InferenceEngine
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import (
    ApiError,
    ConfigError,
    EncodingError,
    EngineError,
    EngineSilent,
    MusterError,
    PolicyBroken,
    PolicyUnavailable,
    StorageError,
)
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.jury import Ruling, summons_of
from muster.protocol.merkle import batch_root
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.reasons import NOT_OF_ONE_FILE
from muster.protocol.recipe import Recipe
from muster.shardcast import Fetcher, Manifest
from muster.tasks import TaskSet
from muster.toploc import Calibration
from muster.toploc.sequential_test import Conduct

HOW_FILES = (
    "keep the orchestrator's --files and give them as --evidence, or a bundle that "
    "muster explain BATCH:POSITION --rerun FILE --save BUNDLE wrote"
)
"""How to get submissions."""
HOW_DOCUMENTS = "give the orchestrator's --documents as --evidence"
"""How to get recipe, calibration and task set."""
HOW_POLICIES = (
    "keep: a folder vVERSION of a worker, relay or trainer as --evidence; fetch: --relay URL of "
    "one that still has it; rebuild: --relay URL of one with an earlier version and its deltas"
)
"""How to get an old policy; a fetch rebuilds it from deltas by itself."""
HOW_NONE = "nothing does: the evidence of one file neither proves nor contradicts it"
"""What can be done about an outcome that depends on more than its file."""
HOW_MACHINE = "free memory and disk on this machine, and audit it again"
"""What can be done when this machine failed, which contradicts nobody."""
HOW_ENGINE = (
    "policy {version} does not load or answer with this engine: try --engine vllm, another "
    "--device or another machine"
)
"""What can be done when an engine does not load the policy of that version, or hangs with it."""
T = TypeVar("T")
Progress = Callable[[int, int, str], None]
"""Called after each outcome: how many were run again, of how many, and the last one's result."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Sources of the evidence."""

    store: EvidenceFolders
    """Folders and bundles."""
    relays: tuple[str, ...] = ()
    """Relays from which policies are fetched that no folder has."""
    cache: Path = field(default_factory=Path)
    """Folder of fetched policies."""
    orchestrator: str | None = None
    """Orchestrator that is asked for proofs of checking that no folder has."""


def draw(table: OutcomeTable, run_id: RunId, sample: int | None, seed: int) -> list[int]:
    """Return the rows to run again by policy version; all of the run's if `sample` is None."""
    rows = np.flatnonzero(table.is_of(run_id))
    if sample is not None and sample < len(rows):
        rows = np.random.default_rng(seed).choice(rows, sample, replace=False)
    versions = table.column("policy_version")
    return sorted(rows.tolist(), key=lambda row: (int(versions[row]), row))


async def rerun_verdicts(
    history: ChainHistory,
    run_id: RunId,
    rows: Sequence[int],
    copies: Copies,
    engine: InferenceEngine,
    *,
    progress: Progress | None = None,
) -> list[Check]:
    """Return whether the same checks on the same evidence give the outcomes that stand, and, with
    proofs of checking, whether the signers had recomputed them.
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
        not_rerun: list[NotRerun] = []
        contradicted = 0
        for done, row in enumerate(rows, 1):
            result = await judge.outcome(row)
            if isinstance(result, Contradiction):
                contradicted += 1
                found.append(result)
            elif result is not None:
                not_rerun.append(result)
            if progress is not None:
                progress(done, len(rows), judge.describe(row, result))
    verdicts = _sum_up(len(rows), contradicted, found, not_rerun, judge.notes)
    proofs = judge.proofs.check()
    return [verdicts] if proofs is None else [verdicts, proofs]


def _sum_up(
    count: int,
    contradicted: int,
    found: list[Contradiction],
    not_rerun: list[NotRerun],
    notes: list[str],
) -> Check:
    """Return the check of `count` outcomes; it also fails when none could be run again."""
    agreed = count - contradicted - len(not_rerun)
    figures = f"{agreed} of {count} outcomes agree, {contradicted} contradict"
    if not_rerun:
        figures += f", {len(not_rerun)} cannot be run again"
    check = summarise("verdicts are what the evidence gives", found, figures, notes=notes)
    nothing_ran = len(not_rerun) == count
    return replace(
        check,
        passed=check.passed and not nothing_ran,
        detail=figures,
        not_rerun=tuple(not_rerun),
        is_open=bool(not_rerun),
    )


class Rejudge:
    """Runs outcomes of one run again."""

    def __init__(
        self,
        history: ChainHistory,
        run: RunView,
        copies: Copies,
        engine: InferenceEngine,
        decoder: FileDecoder,
        folder: Path,
    ) -> None:
        self.table = tabulate(history.ledger)
        self.proofs = CheckingProofs(run, history.domain, copies.store, copies.orchestrator)
        self.notes: list[str] = []
        """Records that a jury replaced, as their evidence confirms."""
        self._history, self._run = history, run
        self._copies, self._engine, self._folder = copies, engine, folder
        self._decoder = decoder
        self._rules: Rules | None = None
        self._given_up: dict[PolicyVersion, tuple[str, str]] = {}
        """Policies that nobody delivers, that the engine does not load, or that it hangs with: why,
        and what can be done.
        """
        self._hung: dict[PolicyVersion, set[Hash32]] = {}
        """The files with which the engine hung, by policy."""
        self._held: tuple[PolicyVersion, Path] | None = None
        """The last policy that was needed, and its verified folder."""
        self._conducts: dict[tuple[Hash32, Hash32], Conduct] = {}
        self._slots = slots_of(history.ledger, run.run_id)

    def describe(self, row: int, result: Contradiction | NotRerun | None) -> str:
        """Return the line about an outcome's result."""
        batch, position = self.table.place(row)
        verdict = Verdict(int(self.table.verdict_N[row])).name.lower()
        if isinstance(result, NotRerun):
            word = f"cannot be run again: {result.why}"
        else:
            word = "agrees" if result is None else f"contradicts: {result.detail}"
        return f"{batch.batch_id}:{position} {verdict}: {word}"

    async def outcome(self, row: int) -> Contradiction | NotRerun | None:
        """Return what contradicts an outcome, or why it cannot be run again; None if it agrees."""
        batch, position = self.table.place(row)
        record = self.table.record(row)
        ruling = self._ruling(batch, position)
        reason = reason_of(record, ruling)
        if reason in NOT_OF_ONE_FILE and reason is not Reason.SAMPLER_DRIFT:
            return NotRerun(batch.batch_id, position, NOT_OF_ONE_FILE[reason], HOW_NONE)
        try:
            entries, data = self._evidence(batch, record.file_hash, reason)
            self._rules = self._rules or self._read_rules()
            # Compare a second time before accusing.
            checks, again = await self._compare(batch, position, entries, data)
            if not is_borne_out(checks):
                checks, again = await self._compare(batch, position, entries, data)
            await self.proofs.compare(batch, position, again.fingerprints)
        except Missing as error:
            return NotRerun(batch.batch_id, position, str(error), error.how)
        except EncodingError as error:
            return at_outcomes(batch, Kind.EVIDENCE_ALTERED, str(error), position)
        except (EngineError, StorageError) as error:
            how = self._blame(error, record.file_hash)
            return NotRerun(batch.batch_id, position, str(error), how)
        *_, verdict = checks
        if verdict.answer is CheckAnswer.SILENT:
            return NotRerun(batch.batch_id, position, verdict.detail, HOW_NONE)
        if not is_borne_out(checks):
            wrong = [f"{c.name}: {c.detail}" for c in checks if c.answer is CheckAnswer.CONTRADICT]
            return at_outcomes(batch, Kind.VERDICT_WRONG, "; ".join(wrong), position)
        recorded = Ruling(record.verdict, record.reason)
        if ruling is not None and ruling != recorded.number:
            self.notes.append(
                f"{batch.batch_id}:{position}: recorded was {recorded}, a jury ruled "
                f"{ruling_words(ruling)}, as the evidence gives"
            )
        return None

    def _blame(self, error: Exception, name: Hash32) -> str:
        """Return what can be done about an engine that failed with the file of that hash. A policy
        that hangs with two files is given up; of one, or of another failure, the file may be the
        cause.
        """
        if self._held is None or not isinstance(error, EngineSilent):
            return HOW_MACHINE
        version, _ = self._held
        files = self._hung.setdefault(version, set())
        files.add(name)
        how = HOW_ENGINE.format(version=version)
        if len(files) > 1:
            self._given_up[version] = str(error), how
        return how

    def _ruling(self, batch: BatchView, position: int) -> int | None:
        """Return the ruling of a jury that stands, as a number; None when validators' record
        does.
        """
        assert batch.records is not None  # a row is of a judged batch
        leaf = batch.records[position].leaf(batch.batch_id, position)
        ruling = ruled_in(self._history.ledger, leaf)
        summoned = ruled_in(self._history.ledger, summons_of(batch.batch_id))
        return summoned if ruling is None else ruling

    def _evidence(
        self, batch: BatchView, named: Hash32, reason: Reason
    ) -> tuple[list[BatchEntry], bytes]:
        """Return a batch's submissions and the file of that hash; empty for a reason that needs
        none and a file that is not in the evidence.
        """
        entries = self._copies.store.entries(batch)
        if entries is None:
            what = f"the submissions of batch {batch.batch_id} are not in the evidence"
            raise Missing(what, HOW_FILES)
        if batch_root([entry.submission.leaf() for entry in entries]) != batch.root:
            raise EncodingError(
                f"the submissions shown are not those that batch {batch.batch_id} was committed for"
            )
        data = self._copies.store.submission_file(named)
        if data is None and reason.check == 1:
            data = b""
        elif data is None:
            raise Missing(f"the file {hex0x(named)} is not in the evidence", HOW_FILES)
        elif file_hash(data) != named:
            found = hex0x(file_hash(data))
            raise EncodingError(f"the file kept as {hex0x(named)} has the hash {found}")
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

    async def _policy(self, version: PolicyVersion) -> Path | None:
        """Load a policy unless it is broken, and return its verified folder; None if it was never
        published.
        """
        if version not in self._run.checkpoints:
            return None
        if version in self._given_up:
            raise Missing(*self._given_up[version])
        try:
            if self._held is None or self._held[0] != version:
                self._held = version, await self._verified(version)
            _, folder = self._held
            with suppress(PolicyBroken):
                await hold(self._engine, folder, version)
        except Missing as error:
            self._given_up[version] = str(error), error.how
            raise
        except EngineError as error:
            self._given_up[version] = str(error), HOW_ENGINE.format(version=version)
            raise Missing(*self._given_up[version]) from error
        return folder

    async def _verified(self, version: PolicyVersion) -> Path:
        root = self._run.checkpoints[version].manifest_root
        store, run_id = self._copies.store, self._run.run_id
        data = store.document(root)
        manifest = None if data is None else Manifest.from_bytes(data)
        for folder in self._candidates(version, manifest):
            assert manifest is not None  # no candidates without one
            if check_weights(manifest, folder).answer is CheckAnswer.AGREE:
                return folder
        if self._copies.relays:
            async with Fetcher(self._copies.relays, self._copies.cache, attempts=2) as fetcher:
                try:
                    return await fetcher.fetch(run_id, version, root)
                except PolicyUnavailable as error:
                    what = f"policy {version} is on no relay: {error}"
                    raise Missing(what, HOW_POLICIES) from error
        raise Missing(f"policy {version}, root {hex0x(root)}, is not in the evidence", HOW_POLICIES)

    def _candidates(self, version: PolicyVersion, manifest: Manifest | None) -> Iterator[Path]:
        """Yield folders that may hold the policy; bundles are unpacked into folders."""
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
    ) -> tuple[list[BundleCheck], Rerun]:
        """Return the outcome that stands compared with the recomputed one, and the latter."""
        assert self._rules is not None  # read by the caller
        assert batch.records is not None  # a row is of a judged batch
        domain = self._history.domain
        claim = claim_at(self._history.ledger, batch, entries, position, domain, self._slots)
        seats = await self.proofs.wanted(batch)
        record = batch.records[position]
        folder = await self._policy(record.policy_version)
        again = await recompute(
            claim, data, self._rules, self._engine, self._decoder, seats, folder=folder
        )
        ruling = self._ruling(batch, position)
        has_history = Reason.SAMPLER_DRIFT in (record.reason, reason_of(record, ruling))
        if has_history and again.record.verdict is Verdict.ACCEPTED:
            again = await self._with_history(OutcomePlace(batch.batch_id, position), again)
        return check_verdict(record, again, ruling=ruling, has_history=has_history), again

    async def _with_history(self, place: OutcomePlace, alone: Rerun) -> Rerun:
        """Return the outcome of a submission after the test of its worker's history."""
        assert self._rules is not None  # read by the caller
        batches = self._history.ledger.batches
        counted = (*counted_before(batches, self._run, place), (place, alone.record))
        conducts = []
        for at, record in counted:
            # Validators know no conduct under a broken policy: they accept no such work.
            with suppress(PolicyBroken):
                conducts.append(await self._conduct(batches[at.batch_id], record))
        record, detail = judge_again(
            batches, place, alone.record, conducts, self._rules.calibration
        )
        return replace(alone, record=record, detail=detail)

    async def _conduct(self, batch: BatchView, record: OutcomeRecord) -> Conduct:
        """Return the conduct that replaying an accepted file measures; cached, as many outcomes
        depend on it.
        """
        name, seed = record.file_hash, batch.seed
        if (name, seed) not in self._conducts:
            assert self._rules is not None  # read by the caller
            data = self._copies.store.submission_file(name)
            if data is None or file_hash(data) != name:
                raise Missing(f"an earlier file, {hex0x(name)}, is not in the evidence", HOW_FILES)
            folder = await self._policy(record.policy_version)
            if folder is None:
                raise Missing(f"policy {record.policy_version} was never published", HOW_NONE)
            await hold(self._engine, folder, record.policy_version)
            self._conducts[name, seed] = await measure_conduct(
                data, seed, self._rules, self._engine, self._decoder
            )
        return self._conducts[name, seed]


class Missing(MusterError):
    """The copy lacks evidence that the chain names."""

    def __init__(self, message: str, how: str) -> None:
        super().__init__(message)
        self.how = how
        """How to get the evidence."""


def _present(value: T | None, what: str) -> T:
    if value is None:
        raise Missing(f"the {what} is not in the evidence", HOW_DOCUMENTS)
    return value


def require_rows(rows: Sequence[int], run_id: RunId) -> None:
    """Raise ConfigError when there is nothing to run again."""
    if not rows:
        raise ConfigError(
            f"run {run_id} has no outcomes to run again",
            hint="wait until validators have posted outcomes",
        )


# Proofs of checking


class CheckingProofs:
    """Compares the fingerprints that a run's validators show with recomputed ones, and sums up.

    A validator signs its fingerprints, so their source does not matter: a file
    `checking-<batch>.json` of the evidence, which is an orchestrator's answer about the batch, or
    the orchestrator asked now. A missing proof is a note: no rule says that it must be kept.
    """

    def __init__(
        self, run: RunView, domain: Domain, store: EvidenceFolders, orchestrator: str | None = None
    ) -> None:
        """`domain` is the ledger's; `orchestrator` is asked for proofs that `store` lacks."""
        self._run, self._domain = run, domain
        self._store, self._orchestrator = store, orchestrator
        self._known: dict[int, BatchChecking | None] = {}
        self._found: list[Contradiction] = []
        self._counts: Counter[Proof] = Counter()
        # An ordered set.
        self._notes: dict[str, None] = {}

    async def wanted(self, batch: BatchView) -> list[Address]:
        """Return the validators whose fingerprints of a batch are to be recomputed.

        These validators signed or committed to fingerprints. Empty when nobody shows any.
        """
        checking = await self._checking(batch)
        if checking is None:
            return []
        committed = {each.validator for each in checking.commitments} & set(self._run.seats)
        return sorted(committed | set(batch.signed_by(self._run.seats)))

    async def compare(self, batch: BatchView, position: int, recomputed: Fingerprints) -> None:
        """Compare the fingerprints of an accepted submission; other submissions need none."""
        checking = await self._checking(batch)
        if checking is None or not batch.records:
            return
        if batch.records[position].verdict is not Verdict.ACCEPTED:
            return
        expected = {who: of for who, of in recomputed.items() if of}
        for who, proof in who_checked(checking, batch, position, expected, self._domain).items():
            self._counts[proof] += 1
            if proof is Proof.UNCHECKED:
                what = f"{who} signed without recomputing it: its fingerprints come from other "
                what += f"hidden states{self._copied(checking, batch, position, who)}"
                self._found.append(at_outcomes(batch, Kind.OUTCOME_UNCHECKED, what, position))
            elif proof is Proof.NONE:
                self._unproven(checking, batch, who)

    def check(self) -> Check | None:
        """Return the result; None when nothing could be compared."""
        if not self._counts and not self._found:
            return None
        summary = (
            f"{self._counts[Proof.CHECKED]} proofs borne out, {self._counts[Proof.NONE]} not shown"
        )
        name = "signers of accepted outcomes had recomputed them"
        return summarise(name, self._found, summary, notes=self._notes)

    async def _checking(self, batch: BatchView) -> BatchChecking | None:
        """Return the commitments and fingerprints that validators gave for a batch; None when
        nobody has them.
        """
        if batch.batch_id not in self._known:
            found = self._store.checking(batch, self._found) or await self._asked(batch)
            self._known[batch.batch_id] = found
            if found is None:
                self._notes[f"batch {batch.batch_id}: nobody shows proofs of checking"] = None
        return self._known[batch.batch_id]

    async def _asked(self, batch: BatchView) -> BatchChecking | None:
        if self._orchestrator is None:
            return None
        try:
            async with OrchestratorApi(self._orchestrator) as api:
                found = await api.checking(batch.batch_id)
        except ApiError:
            return None
        return found if found.batch_root == batch.root else None

    def _unproven(self, checking: BatchChecking, batch: BatchView, who: Address) -> None:
        """Note that a signer shows no proof; fingerprints without its signature were altered."""
        of = next((each for each in checking.commitments if each.validator == who), None)
        if of is not None and of.fingerprints is not None and of.records_hash == batch.records_hash:
            what = f"the fingerprints kept as {who}'s are not those that it signed"
            if all(what != each.detail for each in self._found if each.batch_id == batch.batch_id):
                self._found.append(at_outcomes(batch, Kind.EVIDENCE_ALTERED, what))
        elif who in batch.signed_by(self._run.seats):
            says = "committed to no fingerprints" if of is None else "shows no fingerprints of it"
            self._notes[f"batch {batch.batch_id}: {who} signed and {says}"] = None

    def _copied(
        self, checking: BatchChecking, batch: BatchView, position: int, who: Address
    ) -> str:
        """Return in words which others show the same fingerprints; empty when none does."""
        shown = {
            each.validator: parts[position]
            for each in checking.commitments
            if (parts := shown_fingerprints(checking, each.validator, batch, self._domain))
        }
        mine = shown.pop(who)
        others = [other for other, of in shown.items() if of == mine]
        return f", the same as {others[0]} shows" if others else ""
