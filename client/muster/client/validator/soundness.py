"""Soundness: a validator tests its own engine by judging items that it knows to be good.

There are two items. It generates the first itself, for a fictitious ticket, and judges it like a
stranger's: an engine that computes differently from call to call fails. An engine that is always
wrong in the same way agrees with itself, but fails the second item: a submission that this
validator accepted earlier under the loaded policy. Nobody else chooses the items, so nobody can
make a sound validator fail. The doctor judges the first item on the worker's machine, parts of it
with another engine if possible (`prove`). An item's proofs are checked first. A grade that depends
on chance, for example a judge's, is no flaw; neither is an answer that cannot be graded.

While it fails, the validator signs nothing, logs this, and pauses slashing on chain. The test is
repeated until it passes. Knows nothing of the content of batches.
"""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from muster.chain import ZERO_ADDRESS, BatchView, Chain, PauseCause, RunView
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.client.validator.checks import (
    ClaimedWork,
    FailedCheck,
    check_file,
    check_proofs,
    check_sampling,
    conduct_of,
)
from muster.client.validator.judging import (
    Judgement,
    Rules,
    examine,
    unread,
)
from muster.client.validator.replay import Replay, Statistic, measure
from muster.client.worker.generation import Ungraded, play_ticket, replays_within, submission_of
from muster.inference import InferenceEngine
from muster.lifecycle.files import write_durably
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import canonical_json, file_hash, hex0x, keccak
from muster.protocol.errors import (
    ChainError,
    ContractRevert,
    MusterError,
    StorageError,
    TaskError,
    ValidatorDisturbed,
)
from muster.protocol.ids import Address, PolicyVersion, RunId, Step, to_address
from muster.protocol.messages import Reason, Ticket, Verdict
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout, decode_rollouts, encode_rollouts

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

REFERENCE_S = 120.0
"""Most seconds for which the self-proof's reference examines work, except for its first chunk."""
CHECK_EVERY_S = 600.0
"""Seconds for which a passed test is valid."""
BEFORE_ACCUSING_S = 60.0
"""Seconds for which it is valid before a verdict of fraud."""
PROBLEMS, SAMPLES, TOKENS = 1, 2, 64
"""Groups, samples and most tokens of the generated item."""
NO_STEP = Step((1 << 32) - 1)
"""A rollout step that no run reaches, so its slots are free."""
_LEFT_TO_CHANCE = frozenset({Reason.WRONG_REWARD, Reason.WRONG_REPLY})
"""Reasons of a rejection when a grade or reply cannot be repeated."""
TOO_SOON = "RunPauseTooSoon"
"""Contract error for a pause during another one or shortly after it."""


# The self-proof: one submission, generated and judged on this machine, with nothing at stake


@dataclass(frozen=True, slots=True)
class SelfProof:
    """Result of the self-proof."""

    finding: FailedCheck | None
    """Why a validator would not accept the work, or None."""
    statistics: list[Statistic]
    """Measurements of checks 6 and 7, by the reference."""
    strain: float
    """How close the measurements came to the limits, from 0 to 1."""
    samples: int
    """Rollouts generated."""
    referred: int
    """Those that the reference examined, the last perhaps in part."""
    units: int
    """Units that they would be paid for."""
    generate_s: float
    """Seconds to generate them."""
    check_s: float
    """Seconds that their own engine took to check them."""


def fictitious_ticket(
    run: RunView, worker: Address | None, version: PolicyVersion | None = None
) -> Ticket:
    """Return a ticket for a policy, by default the newest, and a slot that nobody can have."""
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
    ticket: Ticket,
    rules: Rules,
    engine: InferenceEngine,
    reference: InferenceEngine,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> SelfProof:
    """Return how a validator would judge the engine's work; both engines must have the policy
    loaded. The engine judges all of it, another reference as much as it can in REFERENCE_S: it may
    be a thousand times slower.
    """
    started = clock()
    played = play_ticket(ticket, rules.recipe, rules.task_set, engine)
    generated = clock()
    judgement, finding = _judge_played(ticket, played, rules, engine)
    checked = clock()
    replays: Sequence[Replay] = judgement.replays
    if reference is not engine and not finding:
        limits = rules.calibration
        *_, replays = replays_within(REFERENCE_S, played.rows, rules.recipe, reference, clock=clock)
        finding = check_proofs(replays, limits) or check_sampling(replays, limits)
    return SelfProof(
        finding=finding,
        statistics=measure(replays, rules.calibration),
        strain=conduct_of(replays, rules.calibration).strain if replays else 1.0,
        samples=len(played.rows),
        referred=len(replays),
        units=judgement.units,
        generate_s=generated - started,
        check_s=checked - generated,
    )


def _judge_played(
    ticket: Ticket, played: Ungraded, rules: Rules, engine: InferenceEngine
) -> tuple[Judgement, FailedCheck | None]:
    """Return the judgement on rows that nobody signs, and the failed check that says something
    about the machine that made them, or None.
    """
    try:
        judgement = _examine_own(ticket, played.graded(), rules, engine)
    except TaskError:
        # An answer that cannot be graded says nothing about the machine; its proofs do.
        judgement = _examine_own(ticket, played.rows, rules, engine)
        if replays := judgement.replays:
            limits = rules.calibration
            return judgement, check_proofs(replays, limits) or check_sampling(replays, limits)
    return judgement, fault_of_machine(judgement.finding)


def _examine_own(
    ticket: Ticket, rows: list[Rollout], rules: Rules, engine: InferenceEngine
) -> Judgement:
    data = encode_rollouts(rows)
    claim = _unsigned(ticket, rows, data, rules.recipe)
    if finding := check_file(data):
        return unread(claim, finding)
    return examine(claim, decode_rollouts(data), rules, engine, proofs_first=True)


def _unsigned(ticket: Ticket, rows: Sequence[Rollout], data: bytes, recipe: Recipe) -> ClaimedWork:
    """Return the claim that a worker would sign; it is not signed, because check 1 is skipped."""
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
    """Kind of the item: generated, or accepted earlier."""
    version: PolicyVersion
    """Policy version of the item."""
    finding: FailedCheck
    """The check that failed."""


class Soundness:
    """Decides whether the validator may sign."""

    def __init__(
        self,
        find_flaw: Callable[[BatchView], Awaitable[Flaw | None]],
        alarm: Callable[[Flaw], Awaitable[None]],
        *,
        clock: Callable[[], float],
    ) -> None:
        """`find_flaw` judges the known-good items before a batch; `alarm` pauses slashing."""
        self._find_flaw = find_flaw
        self._alarm = alarm
        self._clock = clock
        self._passed_at: float | None = None
        self.flaw: Flaw | None = None
        """Why it may not sign; None while it may."""

    async def require(self, within_s: float, batch: BatchView) -> None:
        """Return if the test passed within the last `within_s` seconds, or passes now, before the
        validator judges or signs this batch.

        Raises ValidatorDisturbed when it fails, and other errors when the test's inputs are
        unavailable.
        """
        if self._passed_at is not None and self._clock() - self._passed_at < within_s:
            return
        self._passed_at = None
        flaw = await self._find_flaw(batch)
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
            f"this validator fails its known-good items: {flaw.finding.detail}",
            hint="check driver, memory, weights and software of this machine; the validator "
            "signs again once it passes",
        )


def _say(flaw: Flaw) -> None:
    logger.error(
        "this validator fails its known-good items, it signs nothing until it passes them",
        extra={
            "item": flaw.item,
            "policy_version": flaw.version,
            "reason": flaw.finding.reason.name,
            "detail": flaw.finding.detail,
        },
    )


def small(rules: Rules) -> Rules:
    """Return the rules with fewer and shorter samples, for a small item."""
    sampling = rules.recipe.sampling
    few = {
        "problems_per_submission": min(PROBLEMS, sampling.problems_per_submission),
        "samples_per_problem": min(SAMPLES, sampling.samples_per_problem),
        "max_new_tokens": min(TOKENS, sampling.max_new_tokens),
    }
    recipe = rules.recipe.model_copy(update={"sampling": sampling.model_copy(update=few)})
    return replace(rules, recipe=recipe)


def judge_generated(ticket: Ticket, rules: Rules, engine: InferenceEngine) -> FailedCheck | None:
    """Return the failed check of an item that its engine generates, or None; the policy must be
    loaded."""
    rules = small(rules)
    played = play_ticket(ticket, rules.recipe, rules.task_set, engine)
    return _judge_played(ticket, played, rules, engine)[1]


def fault_of_machine(finding: FailedCheck | None) -> FailedCheck | None:
    """Return the finding about a known-good item, or None if it is due to chance: a grade or reply
    that is not repeatable says nothing about the machine.
    """
    if finding is None or finding.verdict is not Verdict.REJECTED:
        return finding
    return None if finding.reason in _LEFT_TO_CHANCE else finding


@contextmanager
def own_trouble() -> Iterator[None]:
    """Turn shortages of this machine (memory, files, threads) into ValidatorDisturbed."""
    try:
        yield
    except MusterError:
        raise
    except BaseException as error:
        # A panic of a Rust library, such as the tokenizer without memory, is not an Exception.
        is_panic = type(error).__module__ == "pyo3_runtime"
        if not is_panic and not isinstance(error, MemoryError | OSError | RuntimeError):
            raise
        raise ValidatorDisturbed(
            f"this machine failed while it judged: {type(error).__name__}: {error}",
            hint="check free memory, disk and processes; nothing was signed, and the "
            "validator tries again",
        ) from error


def examine_surely(
    claim: ClaimedWork,
    rows: Sequence[Rollout],
    rules: Rules,
    engine: InferenceEngine,
    seats: Sequence[Address] = (),
    *,
    proofs_first: bool = False,
) -> Judgement:
    """Return the judgement as `examine` does. NaN or infinity is blamed on the file only if the
    engine passes an item of its own between two tries.
    """
    judgement = examine(claim, rows, rules, engine, seats, proofs_first=proofs_first)
    if not judgement.is_nonsense:
        return judgement
    assert claim.ticket is not None  # check 1
    nobodys = replace(claim.ticket, step=NO_STEP)  # not the work under test
    if finding := judge_generated(nobodys, rules, engine):
        raise ValidatorDisturbed(f"the engine computes nonsense: {finding.detail}")
    return examine(claim, rows, rules, engine, seats, proofs_first=proofs_first)


def pausing(
    chain: Chain, run_id: RunId, validator: Address, folder: Path
) -> Callable[[Flaw], Awaitable[None]]:
    """Return a function that pauses slashing for a flaw, and keeps the evidence in a folder."""

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
            # Retried with the next test.
            logger.warning("slashing could not be paused", extra={"error": str(error)})
        else:
            logger.error("slashing paused", extra={"evidence": hex0x(keccak(document))})

    return pause


def evidence_of(flaw: Flaw, run_id: RunId, validator: Address) -> bytes:
    """Return the evidence as canonical JSON; the pause contains its hash."""
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
