"""A1, A2, A22: workers that run another model than the policy, with proofs of that model.

The hook is `generate`; the models are those that calibration compares with the policy.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from muster.inference import substitutes
from muster.inference.substitutes import Substitution, quantised
from muster.lab.redteam.gain import Gain
from muster.lab.redteam.stage import Stage, Worker
from muster.lab.redteam.trials import SHOWS_POWER, Attack, Outcome, Play, Variant
from muster.protocol.messages import Reason, Ticket
from muster.protocol.rollouts import Rollout

STATISTICS = (Reason.TOPLOC_MISMATCH, Reason.SAMPLER_MISMATCH)
NOISES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Noise as a share of the weights' standard deviation."""
BITS = (10, 9, 8, 7, 6, 5, 4, 3)
"""Integer formats of the weights; for 8 bits and fewer there is faster hardware."""
RATES = ((1, 3e-7), (1, 1e-6), (1, 1e-5), (1, 1e-4), (1, 7e-4), (2, 7e-4), (8, 7e-4))
"""Optimiser steps behind, and learning rate: INTELLECT-2's is 3e-7, the demo's 7e-4."""


class OtherModel(Worker):
    """Generates with another model instead of the policy."""

    def __init__(self, stage: Stage, random: Random, change: Substitution) -> None:
        super().__init__(stage, random)
        self._change = change

    def generate(self, ticket: Ticket) -> list[Rollout]:
        """Return rollouts of the other model, as if they were the policy's."""
        with self._change(self.stage.engine.model, self.random.getrandbits(31)):
            return super().generate(ticket)


class OlderPolicy(Worker):
    """Generates with weights some optimiser steps behind or ahead."""

    def __init__(self, stage: Stage, random: Random, steps: int, rate: float) -> None:
        super().__init__(stage, random)
        self._steps, self._rate = steps, rate

    def generate(self, ticket: Ticket) -> list[Rollout]:
        """Return rollouts of a nearby version."""
        honest = super().generate(ticket)
        samples = [(*row.prompt_tokens, *row.completion_tokens) for row in honest]
        change = substitutes.trained(samples, self._steps, self._rate)
        with change(self.stage.engine.model, self.random.getrandbits(31)):
            return super().generate(ticket)


def _by(kind: Callable[..., Worker], *given: Any) -> Play:
    def play(stage: Stage, random: Random) -> Outcome:
        delivery = kind(stage, random, *given).deliver(stage.ticket(random))
        return stage.outcome(delivery, *STATISTICS)

    return play


A1 = Attack(
    "A1",
    "another model: smaller, of the same make, or the policy with disturbed weights",
    "proofs over hidden states (check 6)",
    "hard",
    (
        Variant("first quarter of the layers", _by(OtherModel, substitutes.first_layers)),
        Variant("another model of this make", _by(OtherModel, substitutes.shuffled)),
        *(
            Variant(
                f"weights with {scale:g} noise",
                _by(OtherModel, substitutes.noise(scale)),
                level=scale,
                # Smaller noise saves nothing and hardly changes the output.
                must_catch=scale >= 1e-2,
            )
            for scale in NOISES
        ),
    ),
    Gain(saved=0.75),
    knob="noise over the weights' spread",
)

A2 = Attack(
    "A2",
    "the policy with quantised weights or key-value cache",
    "proofs over hidden states inside calibrated limits (check 6)",
    "statistical",
    (
        *(
            Variant(
                f"weights in int{bits}",
                _by(OtherModel, quantised(bits)),
                bits,
                must_catch=bits <= 8,
            )
            for bits in BITS
        ),
        Variant("weights in fp8", _by(OtherModel, substitutes.eight_bit_floats)),
        Variant("int8 key-value cache", _by(OtherModel, substitutes.rounded_cache(8))),
        Variant("int4 key-value cache", _by(OtherModel, substitutes.rounded_cache(4))),
    ),
    Gain(saved=0.75),
    knob="bits per weight",
    full=SHOWS_POWER,
)

A22 = Attack(
    "A22",
    "rollouts of an older policy, declared fresh",
    "version, root and beacon in ticket and seeds; hidden states of the declared version (check 6)",
    "statistical",
    tuple(
        Variant(
            f"{steps} steps of {rate:g}",
            _by(OlderPolicy, steps, rate),
            steps * rate,
            must_catch=rate >= 1e-4,
        )
        for steps, rate in RATES
    ),
    # It saves the download of a policy, never the generation.
    Gain(saved=0.1),
    knob="optimiser steps times learning rate",
    full=SHOWS_POWER,
)

ATTACKS = (A1, A2, A22)
