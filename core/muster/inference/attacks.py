"""Cheats that run a model, but not as asked: each is work as a dishonest worker would deliver it.

Checks 3 to 5 of docs/protocol.md are taken to be satisfied: these cheats are left to the proofs and
to the sampler's replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from muster.inference import substitutes
from muster.inference.engine import Completion, Request
from muster.inference.examining import Recomputed
from muster.inference.measuring import Bench, Work
from muster.inference.substitutes import Substitution
from muster.toploc.calibration import Kind

TRAINED_STEPS = (1, 2, 8)
"""Optimiser steps between neighbour versions."""

_NEVER_LIKELY = 0.02
"""What an adaptive cheat keeps out, because shape tests would look at it."""


@dataclass(frozen=True, slots=True)
class Attack:
    """A cheat and what it delivers."""

    name: str
    """In words."""
    kind: Kind
    """"cheap" where it saves most of the work, else "other"."""
    work: Work
    """What it delivers for the requests."""
    is_different: list[bool]
    """Per sample, whether anything in it is not what honest work would hold."""
    strength: float | None = None
    """How far its model is from the policy, in nats per token."""


class Attacker:
    """Knows the honest work, and cheats on the same requests."""

    def __init__(self, bench: Bench, requests: Sequence[Request], *, seed: int) -> None:
        self._bench = bench
        self._requests = requests
        self._seed = seed
        self.honest = bench.generate(requests)
        _, self._compared = next(bench.parts(self.honest))
        self._own = bench.recompute(self._compared)

    def quick(self) -> Iterator[Attack]:
        """Yield the cheats that tell most for little time."""
        yield self._substituted("first quarter of the layers", "cheap", substitutes.first_layers)
        yield self._substituted("weights in int4", "cheap", substitutes.quantised(4))
        yield self._substituted("weights in int8", "other", substitutes.quantised(8))
        yield self._neighbour(1)
        yield self._other_seed()

    def full(self) -> Iterator[Attack]:
        """Yield every cheat that needs no other model."""
        yield self._substituted("first quarter of the layers", "cheap", substitutes.first_layers)
        yield self._substituted("weights in int4", "cheap", substitutes.quantised(4))
        for bits in (8, 6, 5, 3):
            yield self._substituted(f"weights in int{bits}", "other", substitutes.quantised(bits))
        yield self._substituted("weights in fp8", "other", substitutes.eight_bit_floats)
        for bits in (8, 4):
            cache = substitutes.rounded_cache(bits)
            yield self._substituted(f"int{bits} key-value cache", "other", cache)
        for steps in TRAINED_STEPS:
            yield self._neighbour(steps)
        for scale in (0.0001, 0.001, 0.003, 0.01, 0.03):
            noisy = substitutes.noise(scale)
            yield self._substituted(f"weights with {scale:.2%} noise", "other", noisy)
        yield self._substituted("another model of this make", "other", substitutes.shuffled)
        yield self._altered_prompt()
        yield from self._honest_prefills()
        yield self._other_seed()
        yield self._best_of(4)
        yield self._forced_ending()

    def cheap_tokens(self) -> Attack:
        """Return the cheat that the sampler's limits are chosen against."""
        return self._honest_prefill(
            "tokens of int4, true proofs", "cheap", substitutes.quantised(4)
        )

    def other_model(self, name: str, other: Bench) -> Attack:
        """Return the cheat that runs another model of the same vocabulary."""
        work = other.generate(self._requests)
        strength = self._strength(other)
        return Attack(name, "cheap", work, [True] * len(self._requests), strength)

    def _substituted(self, name: str, kind: Kind, change: Substitution) -> Attack:
        with change(self._bench.engine.model, self._seed):
            work = self._bench.generate(self._requests)
            strength = self._strength(self._bench)
        return Attack(name, kind, work, [strength > 0] * len(self._requests), strength)

    def _neighbour(self, steps: int) -> Attack:
        rate = self._bench.recipe.training.learning_rate
        samples = [(*prompt, *completion) for prompt, completion in self.honest.pairs]
        name = f"neighbour policy, {steps} steps of {rate:g}"
        return self._substituted(name, "other", substitutes.trained(samples, steps, rate))

    def _altered_prompt(self) -> Attack:
        vocab = self._bench.engine.vocab_size
        random = np.random.default_rng(self._seed)
        altered = []
        for request in self._requests:
            tokens = list(request.prompt_tokens)
            place = int(random.integers(len(tokens)))
            tokens[place] = (tokens[place] + 1 + int(random.integers(vocab - 1))) % vocab
            altered.append(replace(request, prompt_tokens=tuple(tokens)))
        made = self._bench.generate(altered).completions
        return Attack("one prompt token altered", "other", *self._delivered(made, whole=True))

    def _honest_prefills(self) -> Iterator[Attack]:
        """Yield tokens of cheaper models, with proofs from a prefill of the policy."""
        unlikely = substitutes.without_unlikely(_NEVER_LIKELY)
        cheap: dict[str, tuple[Substitution, Kind]] = {
            "quarter of the layers": (substitutes.first_layers, "cheap"),
            "int4": (substitutes.quantised(4), "cheap"),
            "int8": (substitutes.quantised(8), "other"),
        }
        for name, (change, kind) in cheap.items():
            yield self._honest_prefill(f"tokens of {name}, true proofs", kind, change)
            adaptive = substitutes.both(change, unlikely)
            title = f"likely tokens of {name}, true proofs"
            yield self._honest_prefill(title, kind, adaptive)

    def _honest_prefill(self, name: str, kind: Kind, change: Substitution) -> Attack:
        with change(self._bench.engine.model, self._seed):
            cheap = self._bench.generate(self._requests)
            strength = self._strength(self._bench)
        made = self._bench.prove(cheap)
        return Attack(name, kind, *self._delivered(made), strength)

    def _other_seed(self) -> Attack:
        other = [replace(request, seed=request.seed ^ 1) for request in self._requests]
        made = self._bench.generate(other).completions
        return Attack("samples of another seed", "other", *self._delivered(made))

    def _best_of(self, count: int) -> Attack:
        """The likeliest of several samples, the asked one among them."""
        candidates = [list(self.honest.completions)]
        for attempt in range(1, count):
            other = [replace(r, seed=r.seed ^ attempt) for r in self._requests]
            candidates.append(list(self._bench.generate(other).completions))
        scores = np.array([self._likelihoods(made) for made in candidates])
        best = scores.argmax(axis=0)
        made = [candidates[choice][i] for i, choice in enumerate(best.tolist())]
        return Attack(f"likeliest of {count} samples", "other", *self._delivered(made))

    def _likelihoods(self, made: Sequence[Completion]) -> list[float]:
        """Return per completion the mean log-probability of its tokens."""
        found = []
        for _, part in self._bench.parts(Work(self._requests, made)):
            for computed, completion in zip(
                self._bench.recompute(part), part.completions, strict=True
            ):
                peaks = computed.logits_TV.max(axis=1, keepdims=True)
                norm = np.log(np.exp(computed.logits_TV - peaks).sum(axis=1)) + peaks[:, 0]
                chosen = computed.logits_TV[np.arange(len(norm)), list(completion.tokens)]
                found.append(float((chosen - norm).mean()))
        return found

    def _forced_ending(self) -> Attack:
        """The first half of every completion, ended by EOS."""
        eos = min(self._bench.engine.eos_token_ids)
        halves = [c.tokens[: max(1, len(c.tokens) // 2)] for c in self.honest.completions]
        tokens = [(*half[:-1], eos) for half in halves]
        made = self._bench.prove(Work(self._requests, [Completion(t, []) for t in tokens]))
        return Attack("EOS forced after half", "other", *self._delivered(made))

    def _strength(self, bench: Bench) -> float:
        changed = bench.recompute(self._compared)
        return divergence(self._own, changed, self._bench.recipe.sampling.temperature)

    def _delivered(
        self, made: Sequence[Completion], *, whole: bool = False
    ) -> tuple[Work, list[bool]]:
        """Return work for the true requests, and which samples honest work would not hold."""
        pairs = zip(made, self.honest.completions, strict=True)
        is_different = [whole or a.tokens != b.tokens for a, b in pairs]
        return Work(self._requests, made), is_different


def divergence(
    policy: Sequence[Recomputed], other: Sequence[Recomputed], temperature: float
) -> float:
    """Return the mean KL divergence of another model's next-token law from the policy's, in nats
    per token, at a temperature.
    """
    total, tokens = 0.0, 0
    for own, changed in zip(policy, other, strict=True):
        p = torch.from_numpy(own.logits_TV / temperature).log_softmax(dim=1)
        q = torch.from_numpy(changed.logits_TV / temperature).log_softmax(dim=1)
        # Tokens that the other rules out for good would make it infinite; 50 nats are enough.
        total += float((p.exp() * (p - q.clamp_min(-50))).sum())
        tokens += len(p)
    return max(0.0, total / tokens)
