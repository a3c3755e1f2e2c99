"""Whether this validator can trust its own engine: it judges items that it knows to be good.

There are two. It generates one itself, for a ticket that is nobody's, and judges it as it would
judge a stranger's: an engine that computes differently from call to call fails. An engine that is
wrong in the same way each time agrees with itself: it fails the other item, a submission that this
validator accepted earlier under the policy it has loaded. Nobody else chooses either, so nobody can
make a sound validator fail. The doctor judges the first item on the worker's machine, by another
engine where it can (`prove`).

While it fails, it signs nothing, says so, and has slashing paused on chain. It is tried again until
it passes. Knows nothing of batches.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from muster.chain import ZERO_ADDRESS, Chain, PauseCause, RunView
from muster.client.journal import write_durably
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.client.validator.checks import (
    ClaimedWork,
    FailedCheck,
    check_claim,
    check_file,
    conduct_of,
    unreadable,
)
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import (
    Judgement,
    Rules,
    bounds_of,
    examine,
    say_list_fault,
    unread,
)
from muster.client.validator.replay import Statistic, measure
from muster.client.worker.generation import build_submission, submission_of
from muster.inference import InferenceEngine
from muster.inference.engine import set_aside_in
from muster.lifecycle import ComputeThread
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import canonical_json, file_hash, hex0x, keccak
from muster.protocol.errors import (
    ApiError,
    ChainError,
    ContractRevert,
    EncodingError,
    MusterError,
    StorageError,
    ValidatorDisturbed,
)
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step, to_address
from muster.protocol.messages import Ticket
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout, decode_rollouts, encode_rollouts
from muster.protocol.set_aside import NOTHING, SetAside

if TYPE_CHECKING:
    from muster.client.validator.place import ValidatorPlace

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 600.0
"""A validator that has passed is believed for this long."""
BEFORE_ACCUSING_S = 60.0
"""And for this long when it is about to call somebody a fraud."""
PROBLEMS, SAMPLES, TOKENS = 1, 2, 64
"""Groups, samples and most tokens of the item that it generates, however long the run's are."""
NO_STEP = Step((1 << 32) - 1)
"""A rollout step that no run reaches: its slots are nobody's."""
TOO_SOON = "RunPauseTooSoon"
"""The refusal of a pause while one lasts, or shortly after it."""


# The self-proof: one submission, generated and judged on this machine, with nothing at stake


@dataclass(frozen=True, slots=True)
class SelfProof:
    """What the self-proof found."""

    finding: FailedCheck | None
    """Why a validator would not accept it, or None."""
    statistics: list[Statistic]
    """What checks 6 and 7 measured."""
    strain: float
    """How close it came to the limits, from 0 to 1."""
    samples: int
    """Rollouts generated."""
    units: int
    """What they would be paid for."""
    generate_s: float
    """Seconds to generate them."""
    check_s: float
    """Seconds to check them."""


def fictitious_ticket(
    run: RunView, worker: Address | None, version: PolicyVersion | None = None
) -> Ticket:
    """Return a ticket for a policy, the newest unless given, and a slot that is nobody's."""
    version = run.latest_version if version is None else version
    assert version is not None  # the caller asked
    checkpoint = run.checkpoints[version]
    return Ticket(
        run_id=run.run_id,
        worker=worker or to_address(secrets.token_bytes(20)),
        step=NO_STEP,
        index=secrets.randbelow(1 << 32),
        policy_version=version,
        policy_root=checkpoint.manifest_root,
        beacon=checkpoint.beacon,
        deadline=int(time.time()) + 3600,
    )


def prove(
    ticket: Ticket, rules: Rules, engine: InferenceEngine, reference: InferenceEngine
) -> SelfProof:
    """Return how a validator would judge what the engine generates; both have the policy loaded."""
    started = time.perf_counter()
    data = encode_rollouts(build_submission(ticket, rules.recipe, rules.task_set, engine))
    generated = time.perf_counter()
    rows = decode_rollouts(data)
    claim = _unsigned(ticket, rows, data, rules.recipe)
    judgement = examine(claim, rows, rules, reference)
    finding = check_file(data) or judgement.finding
    replays = judgement.replays
    return SelfProof(
        finding=finding,
        statistics=measure(replays, rules.calibration),
        strain=conduct_of(replays, rules.calibration).strain if replays else 1.0,
        samples=len(rows),
        units=judgement.units,
        generate_s=generated - started,
        check_s=time.perf_counter() - generated,
    )


def _unsigned(ticket: Ticket, rows: Sequence[Rollout], data: bytes, recipe: Recipe) -> ClaimedWork:
    """Return the claim that a worker would sign; check 1, of signatures, has no say here."""
    submission = submission_of(ticket, rows, file_hash(data), recipe)
    policy = KnownPolicy(ticket.policy_root, ticket.beacon)
    terms = TicketTerms(
        domain=Domain(1, ZERO_ADDRESS),
        orchestrator=ZERO_ADDRESS,
        run_id=ticket.run_id,
        worker=ticket.worker,
        policies={ticket.policy_version: policy},
    )
    return ClaimedWork(submission, b"", ticket, b"", 0, terms, 0, None, False)


# Whether a validator may sign


@dataclass(frozen=True, slots=True)
class Flaw:
    """A known-good item that this validator would not accept."""

    item: str
    """Which: one it generated, or one that it accepted earlier."""
    version: PolicyVersion
    """The policy that the item is of."""
    finding: FailedCheck
    """What it would say of it."""


class Soundness:
    """Decides whether the validator may sign."""

    def __init__(
        self,
        find_flaw: Callable[[], Awaitable[Flaw | None]],
        alarm: Callable[[Flaw], Awaitable[None]],
        *,
        clock: Callable[[], float],
    ) -> None:
        """`find_flaw` judges the known-good items; `alarm` has slashing paused."""
        self._find_flaw = find_flaw
        self._alarm = alarm
        self._clock = clock
        self._passed_at: float | None = None
        self.flaw: Flaw | None = None
        """Why it may not sign; None while it may."""

    async def require(self, within_s: float) -> None:
        """Return when it passed within so many seconds, or does now.

        Raises ValidatorDisturbed when it does not; what it needs for it may be unavailable, too.
        """
        if self._passed_at is not None and self._clock() - self._passed_at < within_s:
            return
        self._passed_at = None
        flaw = await self._find_flaw()
        if flaw is None:
            if self.flaw is not None:
                logger.warning("this validator passes its known-good items again, and signs again")
            self.flaw, self._passed_at = None, self._clock()
            return
        first, self.flaw = self.flaw is None, flaw
        if first:
            _say(flaw)
        await self._alarm(flaw)
        raise ValidatorDisturbed(
            f"this validator fails what it knows to be good: {flaw.finding.detail}",
            hint="driver, memory, weights or software are disturbed; it signs again once it passes",
        )


def _say(flaw: Flaw) -> None:
    logger.error(
        "this validator fails what it knows to be good, it signs nothing until it passes",
        extra={
            "item": flaw.item,
            "policy_version": flaw.version,
            "reason": flaw.finding.reason.name,
            "detail": flaw.finding.detail,
        },
    )


def small(rules: Rules) -> Rules:
    """Return the rules for an item of few samples, which is judged like any other."""
    sampling = rules.recipe.sampling
    few = {
        "problems_per_submission": min(PROBLEMS, sampling.problems_per_submission),
        "samples_per_problem": min(SAMPLES, sampling.samples_per_problem),
        "max_new_tokens": min(TOKENS, sampling.max_new_tokens),
    }
    recipe = rules.recipe.model_copy(update={"sampling": sampling.model_copy(update=few)})
    return replace(rules, recipe=recipe)


def judge_generated(ticket: Ticket, rules: Rules, engine: InferenceEngine) -> FailedCheck | None:
    """Return what this validator would say of what its engine generates; the policy is loaded."""
    return prove(ticket, small(rules), engine, engine).finding


@contextmanager
def own_trouble() -> Iterator[None]:
    """Turn what this machine lacks (memory, files, threads) into ValidatorDisturbed."""
    try:
        yield
    except MusterError:
        raise
    except BaseException as error:
        # A panic of a library in Rust, as the tokenizer's without memory, is no Exception.
        is_panic = type(error).__module__ == "pyo3_runtime"
        if not is_panic and not isinstance(error, MemoryError | OSError | RuntimeError):
            raise
        raise ValidatorDisturbed(
            f"this machine failed while it judged: {type(error).__name__}: {error}",
            hint="memory, disk or processes are short; nothing was signed, and it tries again",
        ) from error


def examine_surely(
    claim: ClaimedWork,
    rows: Sequence[Rollout],
    rules: Rules,
    engine: InferenceEngine,
    seats: Sequence[Address] = (),
) -> Judgement:
    """Return the judgement as `examine` does; what is no number says something about the file only
    on an engine that passes an item of its own between two tries.
    """
    judgement = examine(claim, rows, rules, engine, seats)
    if not judgement.is_nonsense:
        return judgement
    assert claim.ticket is not None  # check 1
    nobodys = replace(claim.ticket, step=NO_STEP)  # lest it generate what it was shown
    if finding := judge_generated(nobodys, rules, engine):
        raise ValidatorDisturbed(f"the engine computes nonsense: {finding.detail}")
    return examine(claim, rows, rules, engine, seats)


def pausing(
    chain: Chain, run_id: RunId, validator: Address, folder: Path
) -> Callable[[Flaw], Awaitable[None]]:
    """Return what has slashing paused for a flaw, and keeps the evidence in a folder."""

    async def pause(flaw: Flaw) -> None:
        document = evidence_of(flaw, run_id, validator)
        try:
            write_durably(folder / f"{hex0x(keccak(document))}.json", document)
        except StorageError as error:
            logger.warning("the flaw's evidence is not kept", extra={"error": str(error)})
        try:
            await chain.runs.pause_slashing(
                run_id, PauseCause.KNOWN_GOOD_ITEM, int(flaw.finding.reason), keccak(document)
            )
        except ContractRevert as error:
            if error.name != TOO_SOON:
                logger.warning("slashing could not be paused", extra={"error": str(error)})
        except ChainError as error:
            # Tried again with the next check.
            logger.warning("slashing could not be paused", extra={"error": str(error)})
        else:
            logger.error("slashing paused", extra={"evidence": hex0x(keccak(document))})

    return pause


def evidence_of(flaw: Flaw, run_id: RunId, validator: Address) -> bytes:
    """Return the canonical JSON whose hash a pause carries."""
    return canonical_json(
        {
            "cause": PauseCause.KNOWN_GOOD_ITEM.value,
            "run": run_id,
            "validator": validator,
            "item": flaw.item,
            "policy_version": flaw.version,
            "reason": flaw.finding.reason.name,
            "detail": flaw.finding.detail,
        }
    )


# One claim at a time on one engine: its file, its policy, the ordered checks.

_LASTINGLY_MISSING = frozenset({404, 410})
"""Answers that say a file is not there."""


async def read_rows(
    claim: ClaimedWork, data: bytes, rules: Rules, decoder: FileDecoder, listed: SetAside
) -> list[Rollout] | Judgement:
    """Return the rows of a claim's file, or the judgement on one that has none; `listed` is what
    the policy that it claims sets aside.
    """
    bounds = await asyncio.to_thread(bounds_of, claim, rules, listed)
    try:
        return await decoder.decode(data, bounds)
    except EncodingError as error:
        return unread(claim, unreadable(str(error)))


class Examiner:
    """Judges claims for one validator, one at a time: its engine holds one policy."""

    def __init__(self, place: ValidatorPlace, failing_since: dict[object, float]) -> None:
        """`failing_since` says by what it is, since when of the clock a thing could not be had."""
        self.place = place
        self.version: PolicyVersion | None = None
        """The policy version that is loaded."""
        self._failing_since = failing_since
        self._root: Hash32 | None = None
        self._compute = ComputeThread()
        self._turn = asyncio.Lock()

    def close(self) -> None:
        """Stop computing."""
        self._compute.close()

    async def judge(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        """Return the judgement on a claim, and its file if it was read.

        Raises ValidatorDisturbed, and judges nothing, where this machine lacks what that takes.
        """
        with own_trouble():
            return await self._judge(claim)

    async def _judge(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        if finding := check_claim(claim):
            return unread(claim, finding), None
        place, submission = self.place, claim.submission
        data = await self.file(submission.file_hash)
        if finding := check_file(data):
            return unread(claim, finding), None
        assert data is not None  # check_file
        policy = claim.terms.policies[submission.policy_version]
        listed = await self._listed(submission.policy_version, policy.root)
        rows = await read_rows(claim, data, place.rules, place.decoder, listed)
        if isinstance(rows, Judgement):
            return rows, data
        async with self._turn:
            await self.load(submission.policy_version, policy.root)
            judged = await self._compute.run(
                examine_surely, claim, rows, place.rules, place.engine, place.fingerprinted
            )
            return judged, data

    async def judge_own(self, ticket: Ticket) -> FailedCheck | None:
        """Return what it would find in work that it generates itself, see `soundness`."""
        with own_trouble():
            async with self._turn:
                await self.load(ticket.policy_version, ticket.policy_root)
                rules, engine = self.place.rules, self.place.engine
                return await self._compute.run(judge_generated, ticket, rules, engine)

    async def file(self, name: Hash32) -> bytes | None:
        """Return a submission's file; None once the orchestrator has lacked it for long enough, and
        nobody else shows it.
        """
        try:
            data = await self._shown(name)
        except ApiError as error:
            since = self._failing_since.setdefault(name, self.place.clock())
            waited_s = self.place.clock() - since
            if error.status in _LASTINGLY_MISSING and waited_s >= self.place.file_patience_s:
                return None
            raise
        self._failing_since.pop(name, None)
        return data

    async def _shown(self, name: Hash32) -> bytes:
        try:
            return await self.place.api.file(name)
        except ApiError as refused:
            if self.place.elsewhere is None:
                raise
            try:
                return await self.place.elsewhere.file(name)
            except ApiError:
                raise refused from None

    async def _listed(self, version: PolicyVersion, root: Hash32) -> SetAside:
        """Return what a policy version sets aside, which need not be loaded."""
        if not self.place.rules.recipe.skips_problems:
            return NOTHING
        folder = await self.place.fetcher.fetch(self.place.run_id, version, root)
        return await asyncio.to_thread(set_aside_in, folder)

    async def load(self, version: PolicyVersion, root: Hash32) -> None:
        """Load a policy version, verified against the root on chain."""
        if (self.version, self._root) == (version, root):
            return
        folder = await self.place.fetcher.fetch(self.place.run_id, version, root)
        # A load that fails leaves the engine without any policy.
        self.version = self._root = None
        await self._compute.run(self.place.engine.load_policy, folder, version)
        say_list_fault(self.place.rules, self.place.engine)
        self.version, self._root = version, root
