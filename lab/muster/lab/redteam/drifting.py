"""A15 over many submissions: every choice within the margin leans the same way.

No single submission of such a worker shows it, but its judged submissions together do: the history
test (`check_history`) rejects one as a strike, and calls the following ones fraud. The stage's
float32 margin is too narrow for this attack. So the run here is calibrated for small models in
bfloat16, and samples at a temperature at which the model is unsure. If the calibration also limits
wide tokens, one submission shows a worker that uses the whole margin.
"""

import copy
from dataclasses import replace
from random import Random

from muster.client.validator.checks import FailedCheck, check_history, conduct_of
from muster.lab.redteam.sampling import Choose, Chooser, Place, Scores
from muster.lab.redteam.stage import Stage, Worker, outcome_of
from muster.lab.redteam.trials import Outcome, Play, Variant
from muster.protocol.messages import Reason, Verdict
from muster.toploc.calibration import WideLimits
from muster.toploc.sequential_test import WINDOW, HistoryLimits

MARGIN = 0.25
"""The smallest calibrated margin of small models in bfloat16, in logits / T."""
TEMPERATURE = 3.0
"""Sampling temperature. At 1 the demo's model is so sure of its EOS that leaning has no effect."""
GIVEN = 8
"""The preferred token, which is not an EOS of the demo's vocabulary."""
LIMITS = HistoryLimits(honest_strain=0.5, honest_loss=0.05)
"""History limits, wider than the calibrations of such models."""
WIDE = WideLimits(margin=MARGIN / 4, most=8, most_ends=2)
"""Limits of wide tokens as calibrations of such models set them, for a submission of this stage."""
TRIALS = 20
"""Trials of each variant; one takes seconds."""


def hesitant(stage: Stage) -> Stage:
    """Return the stage with a wide margin and an unsure policy; it shares the stage's engines."""
    wide = copy.copy(stage)
    sampling = stage.recipe.sampling.model_copy(update={"temperature": TEMPERATURE})
    wide.recipe = stage.recipe.model_copy(update={"sampling": sampling})
    sampler = stage.calibration.sampler.model_copy(update={"margin": MARGIN})
    limits = {"sampler": sampler, "history": LIMITS}
    wide.calibration = stage.calibration.model_copy(update=limits)
    wide.rules = replace(stage.rules, recipe=wide.recipe, calibration=wide.calibration)
    return wide


def narrowed(stage: Stage) -> Stage:
    """Return the hesitant stage with a calibration that limits wide tokens."""
    narrow = hesitant(stage)
    sampler = narrow.calibration.sampler.model_copy(update={"wide": WIDE})
    narrow.calibration = narrow.calibration.model_copy(update={"sampler": sampler})
    narrow.rules = replace(narrow.rules, calibration=narrow.calibration)
    return narrow


def lean(token: int | None) -> Choose:
    """Prefer a token, or EOS if it is None, by as much as the margin allows."""

    def choose(own: Scores, _draft: Scores, place: Place, _random: Random) -> int:
        wanted = place.eos if token is None else token
        best = int(own.argmax())
        return wanted if own[best] - own[wanted] < MARGIN else best

    return choose


def submit_until(
    worker: Worker, most: int, *, is_struck: bool = False
) -> tuple[FailedCheck | None, int]:
    """Submit until a submission is not accepted; return the reason and its number, from 1. The
    reason is None if `most` were accepted.
    """
    stage, conducts = worker.stage, []
    for number in range(1, most + 1):
        judgement = stage.examine(worker.deliver(stage.ticket(worker.random)))
        if judgement.finding is not None:
            return judgement.finding, number
        conducts.append(conduct_of(judgement.replays, stage.calibration))
        if finding := check_history(conducts, stage.calibration, is_struck=is_struck):
            return finding, number
    return None, most


def _leaning(token: int | None) -> Play:
    def play(stage: Stage, random: Random) -> Outcome:
        worker = Chooser(hesitant(stage), random, lean(token))
        strike, number = submit_until(worker, WINDOW)
        if strike is None or strike.verdict is not Verdict.REJECTED:
            return outcome_of(strike)
        # After a strike the evidence starts from zero.
        fraud, _ = submit_until(worker, WINDOW, is_struck=True)
        return outcome_of(fraud, Reason.SAMPLER_DRIFT, found_after=float(number))

    return play


def _widely(stage: Stage, random: Random) -> Outcome:
    worker = Chooser(narrowed(stage), random, lean(None))
    finding, number = submit_until(worker, WINDOW)
    return outcome_of(finding, Reason.SAMPLER_MISMATCH, found_after=float(number))


def _honest(stage: Stage, random: Random) -> Outcome:
    finding, _ = submit_until(Worker(narrowed(stage), random), WINDOW)
    return outcome_of(finding, Reason.SAMPLER_DRIFT)


VARIANTS: tuple[Variant, ...] = (
    Variant("within the margin, to EOS", _leaning(None), most=TRIALS),
    Variant("within the margin, to a given token", _leaning(GIVEN), most=TRIALS),
    Variant("within the margin, to EOS, wide tokens limited", _widely, most=TRIALS),
    Variant("64 honest submissions", _honest, must_pass=True, most=TRIALS),
)
"""Variants of A15 that only many submissions show."""
