"""Honest and dishonest work under chosen limits: the rows of a calibration's table.

What forgers achieve is found first, without limits, and judged afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from muster.inference import forgers, limits
from muster.inference.attacks import Attack
from muster.inference.engine import Completion
from muster.inference.measuring import Delivery, Errors, OwnParty, Survey
from muster.inference.plan import MIN_CHUNKS, few_chunks
from muster.protocol.errors import ProofError
from muster.protocol.recipe import Recipe
from muster.toploc import Calibration, ChunkResult, split_proofs, verify_proofs_many
from muster.toploc.calibration import MeasuredKind, Measurement

ONE_TOKEN = ", one token only"
"""How the names of forgeries of the smallest chunks end."""

# ------------------------------------------------------------------------------ computed nothing


@dataclass(frozen=True, slots=True)
class Forged:
    """What a forger that computed nothing achieved."""

    name: str
    """In words."""
    kind: MeasuredKind
    """"nothing", or "other" where it needs true proofs."""
    attempts: list[list[ChunkResult]]
    """Per chunk the results of all attempts; what is no proof has none."""


@dataclass(frozen=True, slots=True)
class Miscounted:
    """Proofs that are left out, doubled or null."""

    name: str
    """In words."""
    trials: int
    """How many were tried."""
    parsed: int
    """How many parse, which none should."""


def try_forgers(survey: Survey, recipe: Recipe, seed: int) -> list[Forged]:
    """Return what all forgers achieve on whole chunks and on chunks of one token.

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


def _try_forger(chunks: forgers.Chunks, attempts: list[list[bytes]]) -> list[list[ChunkResult]]:
    """Return per chunk the results of all attempts; what is no proof has none."""
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
            # Forgers make all proofs of an attempt alike: none of them parses.
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
        **limits.worst_of(every, honest=False),
    )


def miscounted_row(miscounted: Miscounted) -> Measurement:
    """Return the row of proofs that are left out, doubled or null."""
    return Measurement(
        name=miscounted.name,
        kind="nothing",
        judged="sample",
        trials=miscounted.trials,
        accepted=miscounted.parsed,
        strain=1.0,
    )


def try_miscounted(bench: OwnParty, work: Delivery, label: str) -> Miscounted:
    """Return whether wrong numbers of proofs parse."""
    tried = [
        _parses(bench, completion, forged)
        for completion in work.completions
        for forged in _miscounted(completion)
    ]
    return Miscounted(f"missing, extra or null proofs{label}", len(tried), sum(tried))


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
    """Return the row of the samples in which the cheat shows; None when there are none."""
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
    """Return the table's row for samples under both checks."""
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
        **limits.worst_of(errors.all_chunks(), honest=honest),
    )
