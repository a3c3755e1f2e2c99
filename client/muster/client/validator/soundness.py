"""Whether this validator can trust its own engine: it judges items that it knows to be good.

Two of them. One it generates itself, for a ticket that is nobody's, and judges as it would judge a
stranger's; that shows an engine that computes differently from call to call. An engine that is
wrong in the same way each time agrees with itself: it fails the other item, a submission that this
validator accepted earlier under the policy it has loaded. Nobody else chooses either, so nobody can
make a sound validator fail.

While it fails, it signs nothing, says so, and has slashing paused on chain. It is tried again until
it passes. Knows nothing of batches.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from muster.chain import Chain, PauseCause
from muster.client.doctor.selfproof import prove
from muster.client.validator.checks import Finding
from muster.client.validator.judging import Rules
from muster.inference import InferenceEngine
from muster.protocol.encoding import canonical_json, hex0x, keccak
from muster.protocol.errors import ChainError, ContractRevert, ValidatorDisturbed
from muster.protocol.ids import Address, PolicyVersion, RunId
from muster.protocol.messages import Ticket

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 600.0
"""A validator that has passed is believed for this long."""
BEFORE_ACCUSING_S = 60.0
"""And for this long when it is about to call somebody a fraud."""
PROBLEMS, SAMPLES = 1, 2
"""Groups and samples of the item that it generates."""
TOO_SOON = "RunPauseTooSoon"
"""The refusal of a pause while one lasts, or shortly after it."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """A known-good item that this validator would not accept."""

    item: str
    """Which: one it generated, or one that it accepted earlier."""
    version: PolicyVersion
    """The policy that the item is of."""
    finding: Finding
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
    }
    recipe = rules.recipe.model_copy(update={"sampling": sampling.model_copy(update=few)})
    return replace(rules, recipe=recipe)


def judge_generated(ticket: Ticket, rules: Rules, engine: InferenceEngine) -> Finding | None:
    """Return what this validator would say of what its engine generates; the policy is loaded."""
    return prove(ticket, small(rules), engine, engine).finding


def pausing(
    chain: Chain, run_id: RunId, validator: Address, folder: Path
) -> Callable[[Flaw], Awaitable[None]]:
    """Return what has slashing paused for a flaw, and keeps the evidence in a folder."""

    async def pause(flaw: Flaw) -> None:
        document = evidence_of(flaw, run_id, validator)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{hex0x(keccak(document))}.json").write_bytes(document)
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
