"""From a case to a ruling: fetches the work from sources and recomputes it with the run's checks.

Sources are not trusted: documents, files and policies have their hashes on chain; tickets and
submissions are signed.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import httpx

from muster.api import BatchEntry
from muster.api.public_hosts import Resolve, resolve
from muster.chain import BatchView, CaseView, RunView
from muster.client.chain_facts import HistoryView, OutcomePlace, entry_of
from muster.client.disputes.rerun import (
    Rerun,
    claim_of,
    measure_conduct,
    recompute,
    recompute_broken,
)
from muster.client.finite_policies import FinitePolicies
from muster.client.preflight import installed_version, require_software
from muster.client.run_documents import (
    TASK_SETS,
    read_rules,
    require_calibrated,
    require_verifiers,
)
from muster.client.sources import Signer, Sources
from muster.client.tickets import slot_and_policy
from muster.client.validator.batches import is_misdeclared
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import MISDECLARED, Rules, outcome_record
from muster.client.validator.records import counted_before, judge_again
from muster.inference import InferenceEngine
from muster.inference.vllm.engine import ProcessEngine
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError, EngineError, PolicyBroken, PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason, Submission, Verdict
from muster.shardcast import Fetcher
from muster.shardcast.cache import discard, reserve_in, room_in
from muster.shardcast.chunks import LacksRoom
from muster.shardcast.download import finished
from muster.tasks.given_up import GIVEN_UP

logger = logging.getLogger(__name__)

T = TypeVar("T")

TURN_S = 60.0
"""Least seconds for which a case may hold the engine while other cases wait."""
LOOK_S = 0.5
"""Seconds between two looks at whether its turn is over."""
STOP_S = 10.0
"""Seconds that stopped work has to end before others get the engine; only verifiers take longer."""
POLICIES = "policies"
"""Folder of fetched policies, in the state folder."""
FETCH_TURN_S = 600.0
"""Seconds after which a case that fetches its policy makes way for others; verified chunks stay."""
BY_VERIFIERS = frozenset({Reason.NONE, Reason.WRONG_REWARD, Reason.WRONG_REPLY})
"""Reasons of rulings in which a verifier or an environment takes part; accepted work has none."""
_Version = tuple[RunId, PolicyVersion, Hash32]
"""A policy version of a run, and the root of its manifest."""


@dataclass(frozen=True, slots=True)
class _CaseAt:
    """The work of a case, and its sources."""

    case_id: Hash32
    run: RunView
    batch: BatchView
    position: int
    rules: Rules
    sources: Sources


@dataclass
class CaseJudge:
    """Judges cases of any run. It fetches the work of several cases at the same time; its engine,
    which holds one policy, takes one case after the other.
    """

    view: HistoryView
    """View of the chain, kept up to date by another task."""
    key: bytes
    """The juror's key, which signs requests: orchestrators show files only to jurors."""
    domain: Domain
    """EIP-712 domain of the ContributionLedger."""
    engine: InferenceEngine
    """Engine for the prefill."""
    decoder: FileDecoder
    """Parser of submission files."""
    folder: Path
    """Folder of documents and policies."""
    sources: Sequence[str] = ()
    """Its own sources, asked before those that a case names."""
    relays: Sequence[str] = ()
    """Its own relays."""
    allows_private: bool = False
    """Whether strangers' sources may resolve to private addresses; for a devnet."""
    transport: httpx.AsyncBaseTransport | None = None
    """HTTP transport to sources; None for the network."""
    resolver: Resolve = resolve
    """Finds the addresses of strangers' hosts."""
    turn_s: float = TURN_S
    """Seconds for which a case may hold the engine while other cases wait."""
    _rules: dict[RunId, Rules] = field(default_factory=dict)
    _by_verifiers: dict[Hash32, int] = field(default_factory=dict)
    """Cases whose rulings verifiers decide, with the number of claims looked at."""
    _graded: set[Hash32] = field(default_factory=set)
    """Cases for which a thread grades, perhaps one that was given up."""
    _loaded: _Version | None = None
    _policies: FinitePolicies = field(default_factory=FinitePolicies)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the case that uses the engine."""
    _turn_ends: float = 0.0
    """When the case that holds it makes way for others, on the event loop's clock."""
    _waiting: int = 0
    """Cases that wait for the engine."""

    async def judge(self, case: CaseView) -> tuple[Ruling, dict[str, Any]]:
        """Return the ruling on a case's work, and the recomputation.

        Raises MusterError while something is missing, and TaskError when a verifier decides the
        ruling and the run's is not here: another would find wrong rewards in honest work, or accept
        wrong ones. Other rulings need none of the run: an owner could pin one that no juror has.
        """
        if case.case_id in self._graded:
            raise EngineError(
                "a verifier has not ended since the last try",
                hint="the case is tried again once it has ended; until then it would hang again",
            )
        run, batch = self.view.runs[case.run_id], self.view.batches[case.batch_id]
        await self._tidy(case.run_id)
        # The first source of each claim, then the second: no claimant's are crowded out.
        in_turn = zip_longest(*(claim.sources for claim in case.claims))
        named = [url for urls in in_turn for url in urls if url is not None]
        signer = Signer(self.key, self.domain, run.config.orchestrator)
        async with Sources(
            self.sources,
            named=[*batch.sources, *named],
            allows_private=self.allows_private,
            signer=signer,
            transport=self.transport,
            resolver=self.resolver,
        ) as sources:
            rules = await self._read_rules(run, case, sources)
            claims = len(case.claims)
            if self._by_verifiers.get(case.case_id) == claims:
                # Recomputed already: another try must not keep the engine from other cases.
                await self._examine(case.case_id, require_verifiers, rules)
            case_at = _CaseAt(case.case_id, run, batch, case.position, rules, sources)
            recorded = batch.records[case.position].reason if batch.records else None
            if recorded is Reason.BATCH_MISDECLARED:
                found = await self._among_all(case_at)
            else:
                found = await self._recompute(case_at, await self._entry(batch, case, sources))
                if recorded is Reason.SAMPLER_DRIFT:
                    found = await self._with_history(case_at, found)
        if found.record.reason in BY_VERIFIERS:
            self._by_verifiers[case.case_id] = claims
            await self._examine(case.case_id, require_verifiers, rules)
        return Ruling(found.record.verdict, found.record.reason), _described(found)

    async def _read_rules(self, run: RunView, case: CaseView, sources: Sources) -> Rules:
        if run.run_id not in self._rules:
            # A folder of its own: two cases of a run may download from different sources.
            folder = self.folder / TASK_SETS / str(run.run_id) / case.case_id.hex()
            rules = await read_rules(sources, run.config, folder)
            require_software(rules.recipe, installed_version())
            require_calibrated(rules)
            self._rules[run.run_id] = rules
        return self._rules[run.run_id]

    async def _entry(self, batch: BatchView, case: CaseView, sources: Sources) -> BatchEntry:
        """Return the work of a case with all its proofs."""
        if batch.work is not None:
            return entry_of(batch.work, batch.committed_at)
        submission = await self._committed(batch, case, sources)

        def has_ticket(entry: BatchEntry) -> bool:
            """Require the right ticket: a source that shows another one, or none, must not harm the
            worker."""
            return (
                entry.ticket is not None
                and entry.ticket_signature is not None
                and signer_of(self.domain, entry.ticket, entry.ticket_signature)
                == batch.orchestrator
            )

        def is_signed(signature: bytes) -> bool:
            """Require the node's signature. Of a proven claim the chain knows only that some key of
            the worker's made it: whoever stole an old key must not harm the worker either."""
            standing = self.view.standing(batch.run_id, submission.worker, before=batch.work_block)
            signer = signer_of(self.domain, submission, signature)
            return standing is not None and signer == standing.node

        leaf = submission.leaf()
        own = [claim for claim in case.claims if claim.submission == submission]
        shown = [claim.node_signature for claim in own if claim.node_signature]
        signed = next(filter(is_signed, shown), None)
        if signed is not None:
            entry = await sources.work(leaf, has_ticket)
            return entry.model_copy(update={"signature": signed})
        with suppress(ApiError):
            return await sources.work(leaf, lambda e: has_ticket(e) and is_signed(e.signature))
        entry = await sources.work(leaf, has_ticket)
        return entry.model_copy(update={"signature": next(iter(shown), entry.signature)})

    async def _committed(self, batch: BatchView, case: CaseView, sources: Sources) -> Submission:
        """Return the submission that a claim proves that the batch holds, else the one that it
        holds according to a source, else the first claim's.

        A node may sign another one with the same file for a claim without proof, which differs in
        what records do not name; validators never saw that one. What a source shows counts only if
        the record names it: else a worker would lose its bond for work that is not its own.
        """
        about = batch.claim_about(case)
        if batch.is_proven(about, case.position):
            return about.submission
        try:
            entries = await sources.batch(batch.batch_id, batch.root, batch.count)
        except ApiError:
            return about.submission
        held = entries[case.position].submission
        named = about.submission
        # Without a proof the court takes only claims about the work that the record names.
        is_named = slot_and_policy(held) == slot_and_policy(named)
        return held if is_named and held.file_hash == named.file_hash else named

    async def _recompute(self, at: _CaseAt, entry: BatchEntry) -> Rerun:
        claim = claim_of(self.view, at.batch, entry, at.position, self.domain)
        data = await at.sources.file(entry.submission.file_hash)
        version = entry.submission.policy_version
        try:
            async with self._policy(at.run, version, at.sources):
                return await self._attended(
                    recompute(
                        claim,
                        data,
                        at.rules,
                        self.engine,
                        self.decoder,
                        run=partial(self._examine, at.case_id),
                    )
                )
        except PolicyBroken as fault:
            wanted = _wanted(at.run, version)
            assert wanted is not None  # it was looked at
            folder = await self._fetch(wanted, at.sources)
            return await recompute_broken(claim, data, at.rules, self.decoder, folder, fault)

    async def _examine(self, case_id: Hash32, function: Callable[..., T], *args: Any) -> T:
        """Return the result of a function that grades for a case, or tries the run's verifiers. It
        runs in a thread of its own, which a verifier that hangs takes from no others.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="grading")
        running = thread.submit(copy_context().run, function, *args)
        thread.shutdown(wait=False)
        self._graded.add(case_id)
        running.add_done_callback(lambda _: self._graded.discard(case_id))
        return await asyncio.wrap_future(running)

    async def _among_all(self, at: _CaseAt) -> Rerun:
        """Return the outcome for a batch that was refused as a whole."""
        batch = at.batch
        entries = await at.sources.batch(batch.batch_id, batch.root, batch.count)
        entry = entries[at.position]
        found = await self._recompute(at, entry)
        if not is_misdeclared(batch, [each.submission for each in entries]):
            return found
        claim = claim_of(self.view, batch, entry, at.position, self.domain)
        return replace(found, record=outcome_record(claim, MISDECLARED))

    async def _with_history(self, at: _CaseAt, alone: Rerun) -> Rerun:
        """Return the outcome of a submission, given its worker's earlier ones."""
        if alone.record.verdict is not Verdict.ACCEPTED:
            return alone
        batches, place = self.view.batches, OutcomePlace(at.batch.batch_id, at.position)
        conducts = []
        counted = (*counted_before(batches, at.run, place), (place, alone.record))
        for counted_at, record in counted:
            seed = batches[counted_at.batch_id].seed
            data = await at.sources.file(record.file_hash)
            # Validators know no conduct under a broken policy: they accept no such work.
            with suppress(PolicyBroken):
                async with self._policy(at.run, record.policy_version, at.sources):
                    conduct = await self._attended(
                        measure_conduct(data, seed, at.rules, self.engine, self.decoder)
                    )
                conducts.append(conduct)
        record, detail = judge_again(batches, place, alone.record, conducts, at.rules.calibration)
        return replace(alone, record=record, detail=detail)

    @asynccontextmanager
    async def _policy(
        self, run: RunView, version: PolicyVersion, sources: Sources
    ) -> AsyncIterator[None]:
        """Hold the engine, with the policy that the work claims if it was published. Raises
        PolicyBroken when its weights are not finite.
        """
        wanted = _wanted(run, version)
        if wanted is None:
            async with self._its_turn():
                yield
            return
        if self.engine.policy_version is None:
            # An engine in its own process loses its policy when the process dies.
            self._loaded = None
        while True:
            # Fetched before its turn, so that slow relays delay no other case.
            folder = None if self._loaded == wanted else await self._sound(wanted, sources)
            async with self._its_turn():
                if folder is not None:
                    await self._load(wanted, folder)
                if self._loaded == wanted:
                    yield
                    return

    async def _sound(self, wanted: _Version, sources: Sources) -> Path:
        """Fetch a policy; raises PolicyBroken when its weights are not finite."""
        folder = await self._fetch(wanted, sources)
        _, version, root = wanted
        await self._policies.require(root, version, folder)
        return folder

    async def _fetch(self, wanted: _Version, sources: Sources) -> Path:
        relays, connects_to = await sources.relays(wanted[0], self.relays)
        async with Fetcher(
            relays,
            self.folder / POLICIES,
            attempts=3,
            named=self._named,
            connects_to=connects_to,
        ) as fetcher:
            try:
                async with asyncio.timeout(FETCH_TURN_S):
                    return await fetcher.fetch(*wanted)
            except LacksRoom as error:
                # The next try has the room that this makes.
                await self._make_room(wanted[0], error.needed_bytes)
                raise
            except TimeoutError as error:
                raise PolicyUnavailable(
                    f"version {wanted[1]} of run {wanted[0]} did not come in {FETCH_TURN_S:g} s",
                    hint="the next try goes on where this one ended; give relays with --relay URL",
                ) from error

    def _named(self, run_id: RunId) -> set[PolicyVersion]:
        """Return the versions that open cases of a run are about."""
        cases = [c for c in list(self.view.cases.values()) if c.run_id == run_id and not c.closed]
        return {claim.submission.policy_version for case in cases for claim in case.claims}

    async def _load(self, wanted: _Version, folder: Path) -> None:
        if self._loaded == wanted:
            return
        # A failed load leaves the engine without a policy.
        self._loaded = None
        # One that goes on loading would replace the policy of the next case.
        loading = asyncio.to_thread(self.engine.load_policy, folder, wanted[1])
        await self._attended(loading, grades=False)
        self._loaded = wanted

    @asynccontextmanager
    async def _its_turn(self) -> AsyncIterator[None]:
        """Hold the engine."""
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            self._turn_ends = asyncio.get_running_loop().time() + self.turn_s
            yield
        finally:
            self._turn.release()

    async def _attended(self, work: Coroutine[Any, Any, T], *, grades: bool = True) -> T:
        """Return the result of work with the engine. The engine is stopped, and the work has ended
        or, if it `grades`, is in a verifier, when its case is given up, or when its turn is over
        and others wait: raises EngineError.
        """
        given_up, context = Event(), copy_context()
        context.run(GIVEN_UP.set, given_up)
        task = asyncio.create_task(work, context=context)
        try:
            while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                if self._waiting and asyncio.get_running_loop().time() >= self._turn_ends:
                    raise EngineError(
                        f"the policy took more than its turn of {self.turn_s:g} s",
                        hint="other cases go on; this one is tried again until a vote is due",
                    )
        except BaseException:
            given_up.set()
            patience_s = STOP_S if grades else math.inf
            await finished(asyncio.create_task(self._stop(task, patience_s)))
            raise
        return task.result()

    async def _stop(self, task: asyncio.Task[Any], patience_s: float) -> None:
        """Return once work with the engine has ended, or is in a verifier: nothing interrupts its
        thread, which grades no other answer.
        """
        self._loaded = None
        stop_ends = asyncio.get_running_loop().time() + patience_s
        while not task.done():
            if isinstance(self.engine, ProcessEngine):
                await asyncio.to_thread(self.engine.stop)
            await asyncio.wait([task], timeout=LOOK_S)
            if asyncio.get_running_loop().time() >= stop_ends:
                task.cancel()
        if not task.cancelled() and (error := task.exception()):
            logger.info("work with the engine ended", extra={"error": str(error)})

    # The disk: strangers' runs write to it

    async def _tidy(self, run_id: RunId) -> None:
        """Delete what belongs to no open case, and make room where little is left."""
        cases = list(self.view.cases.values())
        kept = {str(run_id)} | {str(case.run_id) for case in cases if not case.closed}
        held = await asyncio.to_thread(self._held)
        await self._drop(held.keys() - kept)
        # Its task set needs room, too.
        await self._make_room(run_id, reserve_in(self.folder))

    async def _make_room(self, run_id: RunId, needed_bytes: int) -> None:
        """Delete the files of the run that has most, if it has more than an equal share of the disk
        and this run asks for no more than that.
        """
        held = await asyncio.to_thread(self._held)
        room = room_in(self.folder)
        others = {name: size for name, size in held.items() if name != str(run_id)}
        share = (room + sum(held.values())) // (len(others) + 1)
        largest = max(others, key=others.__getitem__, default=None)
        if largest and room < needed_bytes <= share < others[largest]:
            await self._drop({largest})

    def _held(self) -> dict[str, int]:
        """Return the bytes on the disk by run."""
        held: dict[str, int] = {}
        for kept in (self.folder / POLICIES, self.folder / TASK_SETS):
            for entry in kept.iterdir() if kept.is_dir() else ():
                held[entry.name] = held.get(entry.name, 0) + _bytes_in(entry)
        return held

    async def _drop(self, names: Collection[str]) -> None:
        """Delete all that was fetched of these runs."""
        self._rules = {run: rules for run, rules in self._rules.items() if str(run) not in names}
        if self._loaded is not None and str(self._loaded[0]) in names:
            self._loaded = None  # the engine may have to read its folder again
        for name in names:
            logger.info("files of a run deleted", extra={"run_id": name})
            await asyncio.to_thread(discard, self.folder / POLICIES / name)
            await asyncio.to_thread(discard, self.folder / TASK_SETS / name)


def _wanted(run: RunView, version: PolicyVersion) -> _Version | None:
    """Return a version with its root; None if it was never published."""
    checkpoint = run.checkpoints.get(version)
    return None if checkpoint is None else (run.run_id, version, checkpoint.manifest_root)


def _bytes_in(entry: Path) -> int:
    """Return how much of the disk a folder takes; holes in files take nothing."""
    size = 0
    for folder, _, files in os.walk(entry):
        for name in files:
            with suppress(FileNotFoundError):
                size += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return size


def _described(found: Rerun) -> dict[str, Any]:
    """Return the recomputation as JSON values, without measurements that differ between
    machines."""
    record = found.record
    return {
        "file_hash": hex0x(record.file_hash),
        "verdict": record.verdict.name,
        "reason": record.reason.name,
        "detail": found.detail,
        "units": record.units,
        "record": hex0x(record.to_bytes()),
    }
