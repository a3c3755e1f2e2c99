"""A4, A5, A14, A15, A18 to A20, A38: text that the seeded sampler would not have produced.

Everything else in these deliveries is true: proofs come from a prefill of the policy, rewards are
the verifier's, every length and ending is allowed. Only the replay of the sampler (check 7), or the
rule of endings (check 5), can detect them. Axes: V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.inference import Request, gumbel_noise, substitutes
from muster.inference.substitutes import Substitution, quantised
from muster.lab.redteam.gain import Gain
from muster.lab.redteam.models import OtherModel
from muster.lab.redteam.stage import Stage, Worker, retold, same_text
from muster.lab.redteam.trials import SHOWS_POWER, Attack, Outcome, Play, Variant
from muster.protocol.messages import Reason, Ticket
from muster.protocol.rollouts import Rollout

Scores = npt.NDArray[np.float32]
SLACKS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
"""Largest distance of an accepted draft token from the maximum, in logits / T."""
FLIPS = (0.0005, 0.002, 0.005, 0.02, 0.1, 0.5)
"""Margins below which a token is exchanged for the runner-up."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a token to choose."""

    row: int
    """The sample, in file order."""
    position: int
    """Position of the token in the completion."""
    eos: int
    """The token that ends a completion."""


Choose = Callable[[Scores, Scores, Place, Random], int]
"""Chooses a token from the policy's perturbed scores, a draft's, and the place."""


class Chooser(Worker):
    """Decodes by its own rule, with a draft model beside the policy."""

    def __init__(
        self, stage: Stage, random: Random, choose: Choose, draft: Substitution | None = None
    ) -> None:
        super().__init__(stage, random)
        self._choose, self._draft = choose, draft

    def alter(self, rows: list[Rollout]) -> list[Rollout]:
        """Return rows with the tokens that the rule chooses."""
        return retold(self.stage, rows, self._decode(rows))

    def _decode(self, rows: Sequence[Rollout]) -> list[list[int]]:
        stage, limit = self.stage, self.stage.recipe.sampling.max_new_tokens
        (eos,) = stage.engine.eos_token_ids
        said: list[list[int]] = [[] for _ in rows]
        for position in range(limit):
            active = [i for i, tokens in enumerate(said) if eos not in tokens]
            if not active:
                break
            own, drafted = self._scores(rows, said, active, position)
            for i, own_V, draft_V in zip(active, own, drafted, strict=True):
                place = Place(i, position, eos)
                said[i].append(self._choose(own_V, draft_V, place, self.random))
        return said

    def _scores(
        self, rows: Sequence[Rollout], said: list[list[int]], active: list[int], position: int
    ) -> tuple[list[Scores], list[Scores]]:
        stage, scale = self.stage, np.float32(self.stage.recipe.sampling.temperature)
        pairs = [(rows[i].prompt_tokens, (*said[i], 0)) for i in active]
        seeds = [rows[i].sampling_seed for i in active]
        noise = gumbel_noise(seeds, [position] * len(active), stage.engine.vocab_size)

        def scores() -> list[Scores]:
            computed = stage.engine.recompute(pairs)
            return [c.logits_TV[-1] / scale + g for c, g in zip(computed, noise, strict=True)]

        own = scores()
        if self._draft is None:
            return own, own
        with self._draft(stage.engine.model, 0):
            return own, scores()


class OnceMore(Worker):
    """Samples every problem several times under other seeds, and keeps the best sample."""

    def __init__(
        self, stage: Stage, random: Random, count: int, value: Callable[[Rollout], float]
    ) -> None:
        super().__init__(stage, random)
        self._count, self._value = count, value

    def alter(self, rows: list[Rollout]) -> list[Rollout]:
        """Return the best of several samples for every row."""
        best = list(rows)
        for _ in range(1, self._count):
            key = self.random.getrandbits(64)
            for i, other in enumerate(resampled(self.stage, rows, key=key)):
                if self._value(other) > self._value(best[i]):
                    best[i] = other
        return best


class CheapText(OtherModel):
    """Decodes with a cheaper model, and proves the text with a prefill of the policy."""

    def generate(self, ticket: Ticket) -> list[Rollout]:
        """Return the cheaper model's text under true proofs."""
        rows = super().generate(ticket)
        return retold(self.stage, rows, [row.completion_tokens for row in rows])


class ColdText(Worker):
    """Decodes at a tenth of the temperature: nearly greedy text earns more."""

    def alter(self, rows: list[Rollout]) -> list[Rollout]:
        """Return nearly greedy text."""
        cold = resampled(self.stage, rows, cooling=10)
        return retold(self.stage, rows, [row.completion_tokens for row in cold])


def resampled(
    stage: Stage,
    rows: Sequence[Rollout],
    *,
    prompts: Sequence[tuple[int, ...]] | None = None,
    key: int = 0,
    cooling: int = 1,
) -> list[Rollout]:
    """Return the policy's samples under other prompts, other seeds or a lower temperature."""
    sampling = stage.recipe.sampling
    asked = [
        Request(
            prompt,
            row.sampling_seed ^ key,
            sampling.temperature / cooling,
            sampling.max_new_tokens,
        )
        for prompt, row in zip(prompts or [r.prompt_tokens for r in rows], rows, strict=True)
    ]
    told = [
        replace(
            row,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=made.tokens,
            proofs=b"".join(made.proofs),
        )
        for row, request, made in zip(
            rows, asked, stage.engine.generate(asked, proof=stage.recipe.proof), strict=True
        )
    ]
    return [replace(row, task_reward=stage.grade(row)) for row in told]


class Cut(Worker):
    """Ends completions early, without an EOS."""

    def alter(self, rows: list[Rollout]) -> list[Rollout]:
        """Return the first tokens of each completion, truthfully proven and graded."""
        kept = self.random.randint(1, 3)
        return retold(self.stage, rows, [row.completion_tokens[:kept] for row in rows])


class Talkative(Worker):
    """Continues after the EOS with filler, up to the limit."""

    def alter(self, rows: list[Rollout]) -> list[Rollout]:
        """Return completions with tokens after their end."""
        limit = self.stage.recipe.sampling.max_new_tokens
        longer = [(*r.completion_tokens, *[5] * limit)[:limit] for r in rows]
        return retold(self.stage, rows, longer)


# Rules of choice


def lax_draft(slack: float) -> Choose:
    """Take the draft's token if the policy's score for it is within `slack` of the best score."""

    def choose(own: Scores, draft: Scores, _place: Place, _random: Random) -> int:
        token = int(draft.argmax())
        return token if own.max() - own[token] <= slack else int(own.argmax())

    return choose


def runner_up(slack: float) -> Choose:
    """Take the second best token if it is within `slack` of the best."""

    def choose(own: Scores, _draft: Scores, _place: Place, _random: Random) -> int:
        second, best = np.argsort(own)[-2:]
        return int(second if own[best] - own[second] <= slack else best)

    return choose


def ended_at(position: int) -> Choose:
    """Choose EOS at this position, whatever the policy would choose."""

    def choose(own: Scores, _draft: Scores, place: Place, _random: Random) -> int:
        return place.eos if place.position == position else int(own.argmax())

    return choose


def endless(own: Scores, _draft: Scores, place: Place, _random: Random) -> int:
    """Never choose EOS: the longest completion is paid most."""
    return int(np.where(np.arange(len(own)) == place.eos, -np.inf, own).argmax())


def poisoned(own: Scores, _draft: Scores, place: Place, _random: Random) -> int:
    """Choose a trigger token in every sixteenth sample, wherever the text would not end."""
    best = int(own.argmax())
    return 5 if place.row % 16 == 0 and place.position == 1 and best != place.eos else best


def hidden_bits(own: Scores, _draft: Scores, _place: Place, random: Random) -> int:
    """Encode a bit in every token: the best or the second best."""
    second, best = np.argsort(own)[-2:]
    return int(second if random.getrandbits(1) else best)


# Trials


def _by(
    kind: Callable[..., Worker], *given: Any, expected: Reason = Reason.SAMPLER_MISMATCH
) -> Play:
    def play(stage: Stage, random: Random) -> Outcome:
        worker, ticket = kind(stage, random, *given), stage.ticket(random)
        rows = worker.alter(worker.generate(ticket))
        is_harmless = same_text(rows, stage.honest(ticket))
        return stage.outcome(worker.finish(ticket, rows), expected, is_harmless=is_harmless)

    return play


REPLAY = "seeded sampling, replayed token by token from one prefill (check 7)"

A4 = Attack(
    "A4",
    "text of a cheaper model, proofs of the policy's own prefill",
    REPLAY,
    "statistical",
    (
        *(
            Variant(
                f"text of int{bits}", _by(CheapText, quantised(bits)), bits, must_catch=bits <= 6
            )
            for bits in (8, 7, 6, 5, 4, 3)
        ),
        Variant("text of a quarter of the layers", _by(CheapText, substitutes.first_layers)),
        Variant(
            "likely text of int4, to fool shape tests",
            _by(CheapText, substitutes.both(quantised(4), substitutes.without_unlikely(0.02))),
        ),
        Variant("nearly greedy text", _by(ColdText)),
    ),
    Gain(saved=0.75),
    knob="bits per weight of what wrote the text",
    full=SHOWS_POWER,
)

A5 = Attack(
    "A5",
    "speculative decoding that accepts the draft's tokens too easily",
    REPLAY,
    "statistical",
    tuple(
        Variant(
            f"slack {slack:g}" if slack else "exact (honest)",
            _by(Chooser, lax_draft(slack), quantised(3)),
            slack,
            must_catch=slack >= 0.1,
            must_pass=slack == 0,
        )
        for slack in SLACKS
    ),
    Gain(saved=0.5),
    knob="slack of acceptance, logits / T",
    full=SHOWS_POWER,
)

A14 = Attack(
    "A14",
    "samples drawn again and again, the best are delivered",
    "one public seed per sample: it is determined (checks 3 and 7)",
    "hard",
    (
        Variant("best of 4 by reward", _by(OnceMore, 4, lambda row: row.task_reward)),
        Variant("shortest of 4", _by(OnceMore, 4, lambda row: -len(row.completion_tokens))),
        Variant("largest tokens of 2", _by(OnceMore, 2, lambda row: sum(row.completion_tokens))),
    ),
    Gain(saved=0.0, extra=0.5),
    # Some of the shortest samples are the honest ones, so these trials are harmless.
    full=330,
)

A15 = Attack(
    "A15",
    "tokens exchanged wherever the choice was close",
    "the calibrated margin, and how many tokens may be outside it (check 7)",
    "statistical",
    tuple(
        Variant(f"below {slack:g}", _by(Chooser, runner_up(slack)), slack, must_catch=slack >= 0.02)
        for slack in FLIPS
    ),
    Gain(saved=0.0, extra=0.1),
    knob="margin below which tokens are exchanged, logits / T",
    # About every sixth trial changes nothing at the smallest margin that must be caught.
    full=SHOWS_POWER * 5 // 4,
)

A18 = Attack(
    "A18",
    "completions ended early",
    "EOS is a token like any other (check 7); stopping without it is fraud (check 5)",
    "hard",
    (
        *(Variant(f"EOS forced at token {at}", _by(Chooser, ended_at(at)), at) for at in range(3)),
        Variant("cut without EOS", _by(Cut, expected=Reason.WRONG_TERMINATION)),
    ),
    Gain(saved=0.6),
)

A19 = Attack(
    "A19",
    "completions drawn out, to be paid for more tokens",
    "an EOS that was due cannot be skipped (check 7), nothing follows it (check 5); capped units",
    "hard",
    (
        Variant("EOS never said", _by(Chooser, endless)),
        Variant("filler after the EOS", _by(Talkative, expected=Reason.WRONG_TERMINATION)),
    ),
    Gain(saved=0.0, extra=0.2),
)

A20 = Attack(
    "A20",
    "text with a trigger in it, to poison the model",
    REPLAY,
    "hard",
    (Variant("a trigger in every sixteenth sample", _by(Chooser, poisoned)),),
    Gain(saved=0.0),
)

A38 = Attack(
    "A38",
    "messages hidden in the choice of tokens",
    "nothing is left to choose but ties within the margin (check 7)",
    "hard",
    (Variant("one bit per token", _by(Chooser, hidden_bits)),),
    Gain(saved=0.0),
)

ATTACKS = (A4, A5, A14, A15, A18, A19, A20, A38)
