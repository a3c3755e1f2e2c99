"""Honest and dishonest work under chosen limits: the rows of a calibration's table."""

from __future__ import annotations

import numpy as np

from muster.inference import forgers, limits
from muster.inference.attacks import Attack
from muster.inference.engine import Completion, Request
from muster.inference.measuring import Bench, Errors, Work, one_token
from muster.protocol.errors import EngineError, ProofError
from muster.toploc import Calibration, ChunkResult, split_proofs, verify_proofs_many
from muster.toploc.calibration import Kind, Measurement

_MIN_CHUNKS = 300
"""Chunks that every forger is tried on: none accepted bounds its rate below 1 % (95 %)."""


# ------------------------------------------------------------------------------ computed nothing


def try_nothing(
    bench: Bench, calibration: Calibration, requests: list[Request], seed: int
) -> list[Measurement]:
    """Return the rows of all forgers that computed nothing, on whole chunks and on one-token ones.

    Raises EngineError when there are too few chunks to judge by.
    """
    table = []
    for label, asked in (("", requests), (", one token only", one_token(requests))):
        work = bench.generate(asked)
        shapes = bench.chunks(work)
        total = sum(len(chunks.prompts_B) for chunks in shapes)
        if total < _MIN_CHUNKS:
            raise EngineError(
                f"{total} chunks to try forgers on, {_MIN_CHUNKS} are needed",
                hint="calibrate with more samples, on more prompts",
            )
        for name, forger in {**forgers.NOTHING, "signs turned": forgers.negated}.items():
            kind: Kind = "nothing" if name in forgers.NOTHING else "other"
            random = np.random.default_rng(seed)
            results = [r for chunks in shapes for r in _try_forger(chunks, forger(chunks, random))]
            table.append(_forged_row(calibration, name + label, kind, results))
        table.append(_miscounted_row(bench, work, label))
    return table


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


def _forged_row(
    calibration: Calibration, name: str, kind: Kind, attempts: list[list[ChunkResult]]
) -> Measurement:
    """Return the row of a forger that has several attempts at every chunk."""
    every = [result for results in attempts for result in results]
    return Measurement(
        name=name,
        kind=kind,
        judged="chunk",
        trials=len(attempts),
        accepted=sum(any(map(calibration.chunk_passes, results)) for results in attempts),
        strain=1.0 if not every else min(calibration.sample_strain([r], []) for r in every),
        **limits.worst_of(every, honest=False),
    )


def _miscounted_row(bench: Bench, work: Work, label: str) -> Measurement:
    """Return the row of proofs that are left out, doubled or null."""
    accepted = trials = 0
    for completion in work.completions:
        for forged in _miscounted(completion):
            trials += 1
            accepted += _parses(bench, completion, forged)
    return Measurement(
        name=f"missing, extra or null proofs{label}",
        kind="nothing",
        judged="sample",
        trials=trials,
        accepted=accepted,
        strain=1.0,
    )


def _miscounted(completion: Completion) -> list[bytes]:
    proofs = completion.proofs
    null = [*proofs[:-1], bytes(len(proofs[-1]))]
    return [b"".join(p) for p in (proofs[:-1], [*proofs, proofs[-1]], null)]


def _parses(bench: Bench, completion: Completion, joined: bytes) -> bool:
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


def attack_row(bench: Bench, calibration: Calibration, attack: Attack) -> Measurement | None:
    """Return the row of the samples in which the cheat shows; None when there are none."""
    errors = bench.measure(attack.work).only(attack.is_different)
    if not errors.chunks:
        return None
    return sample_row(calibration, attack.name, attack.kind, errors, strength=attack.strength)


def sample_row(
    calibration: Calibration,
    name: str,
    kind: Kind,
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
