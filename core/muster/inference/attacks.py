"""Cheats that run a model, but not as asked: each is work as a dishonest worker would deliver it,
measured by the plain validator. Forgers compute nothing. Both are measured first, without limits.
Their results under the chosen limits become rows of a calibration's table, beside the rows of
honest work.

Checks 3 to 5 of docs/protocol.md are assumed to pass: only the proofs and the sampler's replay can
find these cheats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from muster.inference import calibrated_limits, forgers, substitutes
from muster.inference.calibration_plan import MIN_CHUNKS, few_chunks
from muster.inference.engine import Completion
from muster.inference.measuring import Delivery, Errors, OwnParty, Survey
from muster.inference.substitutes import Substitution
from muster.protocol.errors import ProofError
from muster.protocol.recipe import Recipe
from muster.toploc import Calibration, ChunkResult, split_proofs, verify_proofs_many
from muster.toploc.calibration import MeasuredKind, Measurement

TRAINED_STEPS = (1, 2, 8)
"""Optimiser steps between two successive policy versions."""

ONE_TOKEN = ", one token only"
"""Suffix of the names of forgeries of the smallest chunks."""

_LEAST_STRENGTH = 1e-9
"""Least divergence, in nats per token, of a model that counts as different from the policy."""

_NEVER_LIKELY = 0.02
"""An adaptive cheat never chooses tokens less likely than this: other tests would notice."""


Logits = npt.NDArray[np.float32]

_CHEAPER: dict[str, tuple[str, MeasuredKind]] = {
    "quarter of the layers": ("first quarter of the layers", "cheap"),
    "int4": ("weights in int4", "cheap"),
    "int8": ("weights in int8", "other"),
}
"""Cheaper models, by their short names: the name and kind of the cheat with the model's own
proofs."""


def _cheaper(short: str) -> Substitution:
    if short == "quarter of the layers":
        return substitutes.first_layers
    return substitutes.quantised(int(short.removeprefix("int")))


@dataclass(frozen=True, slots=True)
class Attack:
    """A cheat and the errors of its work."""

    name: str
    """In words."""
    kind: MeasuredKind
    """"cheap" where it saves most of the work, else "other"."""
    errors: Errors
    """Errors of the samples that differ in anything from honest work."""
    strength: float | None = None
    """Divergence of its model from the policy, in nats per token."""


class Attacker:
    """Knows the honest work, and cheats on the same requests."""

    def __init__(self, bench: OwnParty, survey: Survey, count: int, *, seed: int) -> None:
        self._bench, self._survey, self._seed = bench, survey, seed
        self.honest = survey.work[:count]
        self._requests = self.honest.requests
        _, compared = next(bench.parts(self.honest))
        self._compared = compared.pairs
        self._own = bench.logits(self._compared)
        self._made: dict[str, tuple[Errors, Errors, list[bool], float]] = {}

    def quick(self) -> Iterator[Attack]:
        """Yield the cheats that matter most, in little time."""
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
        return self._honest_prefill("int4")

    def other_model(self, name: str, other: OwnParty) -> Attack:
        """Return the cheat that runs another model of the same vocabulary."""
        work = other.generate(self._requests)
        return Attack(name, "cheap", self._bench.measure(work), self._strength(other))

    def _substituted(self, name: str, kind: MeasuredKind, change: Substitution) -> Attack:
        errors, _, _, strength = self._run(name, change)
        return Attack(name, kind, errors.only([strength > 0] * len(errors.chunks)), strength)

    def _run(self, name: str, change: Substitution) -> tuple[Errors, Errors, list[bool], float]:
        """Return the errors of another model's work, with its own proofs and with true ones, which
        samples differ, and the divergence of the model from the policy.

        The model generates once for both, and the policy runs one forward pass for both.
        """
        if name not in self._made:
            with change(self._bench.engine.model, self._seed):
                work = self._bench.generate(self._requests)
                strength = self._strength(self._bench)
            errors, proven = self._bench.measure_proven(work)
            self._made[name] = errors, proven, self._differs(work.completions), strength
        return self._made[name]

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
        errors = self._bench.measure(Delivery(self._requests, made))
        return Attack("one prompt token altered", "other", errors)

    def _honest_prefills(self) -> Iterator[Attack]:
        """Yield tokens of cheaper models, with proofs from a prefill of the policy."""
        unlikely = substitutes.without_unlikely(_NEVER_LIKELY)
        for short, (_, kind) in _CHEAPER.items():
            yield self._honest_prefill(short)
            change = substitutes.both(_cheaper(short), unlikely)
            _, proven, is_different, strength = self._run(f"likely tokens of {short}", change)
            name = f"likely tokens of {short}, true proofs"
            yield Attack(name, kind, proven.only(is_different), strength)

    def _honest_prefill(self, short: str) -> Attack:
        model, kind = _CHEAPER[short]
        _, proven, is_different, strength = self._run(model, _cheaper(short))
        name = f"tokens of {short}, true proofs"
        return Attack(name, kind, proven.only(is_different), strength)

    def _other_seed(self) -> Attack:
        return Attack("samples of another seed", "other", self._survey.other_seed)

    def _best_of(self, count: int) -> Attack:
        """The likeliest of several samples, one of them the sample that was asked for."""
        candidates = [list(self.honest.completions)]
        for attempt in range(1, count):
            other = [replace(r, seed=r.seed ^ attempt) for r in self._requests]
            candidates.append(list(self._bench.generate(other).completions))
        scores = np.array([self._likelihoods(made) for made in candidates])
        best = scores.argmax(axis=0)
        made = [candidates[choice][i] for i, choice in enumerate(best.tolist())]
        errors = self._bench.measure(Delivery(self._requests, made)).only(self._differs(made))
        return Attack(f"likeliest of {count} samples", "other", errors)

    def _likelihoods(self, made: Sequence[Completion]) -> list[float]:
        """Return per completion the mean log-probability of its tokens."""
        found = []
        for _, part in self._bench.parts(Delivery(self._requests, made)):
            for logits_TV, completion in zip(
                self._bench.logits(part.pairs), part.completions, strict=True
            ):
                peaks = logits_TV.max(axis=1, keepdims=True)
                norm = np.log(np.exp(logits_TV - peaks).sum(axis=1)) + peaks[:, 0]
                chosen = logits_TV[np.arange(len(norm)), list(completion.tokens)]
                found.append(float((chosen - norm).mean()))
        return found

    def _forced_ending(self) -> Attack:
        """The first half of every completion, ended by EOS."""
        eos = min(self._bench.engine.eos_token_ids)
        halves = [c.tokens[: max(1, len(c.tokens) // 2)] for c in self.honest.completions]
        tokens = [(*half[:-1], eos) for half in halves]
        made = self._bench.prove(Delivery(self._requests, [Completion(t, []) for t in tokens]))
        errors = self._bench.measure(Delivery(self._requests, made)).only(self._differs(made))
        return Attack("EOS forced after half", "other", errors)

    def _strength(self, bench: OwnParty) -> float:
        changed = bench.logits(self._compared)
        if all(map(np.array_equal, self._own, changed)):
            return 0.0
        # In a coarse format, rounding may hide that a model hardly differs.
        temperature = self._bench.recipe.sampling.temperature
        return max(_LEAST_STRENGTH, divergence(self._own, changed, temperature))

    def _differs(self, made: Sequence[Completion]) -> list[bool]:
        """Return which samples differ from honest work."""
        return [a.tokens != b.tokens for a, b in zip(made, self.honest.completions, strict=True)]


def divergence(policy: Sequence[Logits], other: Sequence[Logits], temperature: float) -> float:
    """Return the mean KL divergence of another model's next-token law from the policy's, in nats
    per token, at a temperature.
    """
    total, tokens = 0.0, 0
    for own_TV, changed_TV in zip(policy, other, strict=True):
        p = torch.from_numpy(own_TV / temperature).log_softmax(dim=1)
        q = torch.from_numpy(changed_TV / temperature).log_softmax(dim=1)
        # Tokens to which the other model gives probability 0 would make it infinite: 50 nats
        # instead.
        total += float((p.exp() * (p - q.clamp_min(-50))).sum())
        tokens += len(p)
    return max(0.0, total / tokens)


# ------------------------------------------------------------------------------ computed nothing


@dataclass(frozen=True, slots=True)
class Forged:
    """The results of a forger that computed nothing."""

    name: str
    """In words."""
    kind: MeasuredKind
    """"nothing", or "other" where it needs true proofs."""
    attempts: list[list[ChunkResult]]
    """Per chunk the results of all attempts; none for an attempt that does not parse."""


def try_forgers(survey: Survey, recipe: Recipe, seed: int) -> list[Forged]:
    """Return the results of all forgers on whole chunks and on chunks of one token.

    Raises EngineError when there are too few chunks to judge by.
    """
    found = []
    for label in ("", ONE_TOKEN):
        shapes = survey.chunks(recipe.proof, one_token=bool(label))
        total = sum(len(chunks.prompts_B) for chunks in shapes)
        if total < MIN_CHUNKS:
            raise few_chunks(total)
        for name, forger in {**forgers.NOTHING, "signs turned": forgers.negated}.items():
            kind: MeasuredKind = "nothing" if name in forgers.NOTHING else "other"
            random = np.random.default_rng(seed)
            attempts = [r for chunks in shapes for r in _try_forger(chunks, forger(chunks, random))]
            found.append(Forged(name + label, kind, attempts))
    return found


def _try_forger(
    chunks: forgers.RecomputedChunks, attempts: list[list[bytes]]
) -> list[list[ChunkResult]]:
    """Return per chunk the results of all attempts; none for an attempt that does not parse."""
    rows, proof = list(chunks.patterns_BRH), chunks.proof
    tried: list[list[list[ChunkResult]]] = []
    for proofs in attempts:
        try:
            tried.append(
                verify_proofs_many(
                    rows, [[p] for p in proofs], chunk_tokens=proof.chunk_tokens, topk=proof.topk
                )
            )
        except ProofError:
            # A forger makes all proofs of an attempt in one way: if one does not parse, none does.
            tried.append([[] for _ in rows])
    return [[r for attempt in tried for r in attempt[chunk]] for chunk in range(len(rows))]


def forged_row(calibration: Calibration, forged: Forged) -> Measurement:
    """Return the row of a forger that has several attempts at every chunk."""
    every = [result for results in forged.attempts for result in results]
    return Measurement(
        name=forged.name,
        kind=forged.kind,
        judged="chunk",
        trials=len(forged.attempts),
        accepted=sum(any(map(calibration.chunk_passes, rs)) for rs in forged.attempts),
        strain=1.0 if not every else min(calibration.sample_strain([r], []) for r in every),
        **calibrated_limits.worst_of(every, honest=False),
    )


def try_miscounted(bench: OwnParty, work: Delivery, label: str) -> Measurement:
    """Return how many parse of proofs that are left out, doubled or null: none should."""
    tried = [
        _parses(bench, completion, forged)
        for completion in work.completions
        for forged in _miscounted(completion)
    ]
    return Measurement(
        name=f"missing, extra or null proofs{label}",
        kind="nothing",
        judged="sample",
        trials=len(tried),
        accepted=sum(tried),
        strain=1.0,
    )


def _miscounted(completion: Completion) -> list[bytes]:
    proofs = completion.proofs
    null = [*proofs[:-1], bytes(len(proofs[-1]))]
    return [b"".join(p) for p in (proofs[:-1], [*proofs, proofs[-1]], null)]


def _parses(bench: OwnParty, completion: Completion, joined: bytes) -> bool:
    proof = bench.recipe.proof
    try:
        split_proofs(
            joined,
            tokens=len(completion.tokens),
            hidden_size=bench.engine.hidden_size,
            chunk_tokens=proof.chunk_tokens,
            topk=proof.topk,
        )
    except ProofError:
        return False
    return True


# ------------------------------------------------------------------------------- something else


def attack_row(calibration: Calibration, attack: Attack) -> Measurement | None:
    """Return the row of the samples that the cheat changed; None when there are none."""
    if not attack.errors.chunks:
        return None
    name, kind = attack.name, attack.kind
    return sample_row(calibration, name, kind, attack.errors, strength=attack.strength)


def sample_row(
    calibration: Calibration,
    name: str,
    kind: MeasuredKind,
    errors: Errors,
    *,
    strength: float | None = None,
) -> Measurement:
    """Return the table's row for samples under check 6 and check 7."""
    proofs = [all(map(calibration.chunk_passes, results)) for results in errors.chunks]
    sampling = [calibration.sampler_passes(margins) for margins in errors.margins]
    strains = map(calibration.sample_strain, errors.chunks, errors.margins)
    honest = kind == "honest"
    largest = [min(float(m.max()), 1e30) for m in errors.margins]
    return Measurement(
        name=name,
        kind=kind,
        judged="sample",
        trials=len(proofs),
        accepted=sum(a and b for a, b in zip(proofs, sampling, strict=True)),
        failed_proofs=len(proofs) - sum(proofs),
        failed_sampling=len(sampling) - sum(sampling),
        margin=max(largest) if honest else min(largest),
        strain=float(np.mean(list(strains))),
        strength=strength,
        **calibrated_limits.worst_of(errors.all_chunks(), honest=honest),
    )
