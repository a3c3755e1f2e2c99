"""Calibration, top to bottom: measure the honest, choose limits, send the forgers against them.

 1. generate rollouts in every way an honest worker might, recompute each in every way an honest
    validator might, and choose limits from the worst errors;
 2. let forgers that computed nothing make proofs: one that passes refuses the model;
 3. let workers run something else (a neighbour policy, a quantised one, other seeds), for the
    record: what passes check 6 there is as good as honest, or is left to check 7;
 4. write the document.

One engine and one number format per calibration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from muster.inference import forgers, limits
from muster.inference.engine import Completion, Request
from muster.inference.measuring import (
    VALIDATORS,
    WORKERS,
    Bench,
    Errors,
    Progress,
    Work,
    changed_only,
    one_token,
)
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.encoding import abi_words, keccak
from muster.protocol.errors import EngineError, ProofError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe
from muster.toploc import Calibration, ChunkResult, split_proofs, verify_proofs_many
from muster.toploc.calibration import CalibratedModel, Measurement

_MIN_CHUNKS = 300
"""Chunks that every forger is tried on: none accepted bounds its rate below 1 % (95 %)."""


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """What a calibration found."""

    calibration: Calibration
    """The document to pin on chain."""
    table: tuple[Measurement, ...]
    """Its measurements, for people."""


def calibrate_model(
    model_dir: Path,
    prompts: Sequence[str],
    *,
    recipe: Recipe,
    seed: int = 0,
    samples: int = 320,
    dtype: Literal["float32", "bfloat16"] = "float32",
    progress: Progress | None = None,
) -> CalibrationRun:
    """Return validation limits of a base model under a recipe, and what they rest on.

    Generates about 15 times `samples` completions of the prompts, taken in turn. Raises EngineError
    when the model does not load, when prompts or chunks are too few to judge by, and when a forger
    that computed nothing passes.
    """
    tell = progress or _tell_nobody
    engine = TransformersEngine(dtype)
    engine.load_policy(model_dir, PolicyVersion(0))
    bench = Bench(engine, recipe)
    requests = _requests(engine, prompts, recipe, seed, samples)

    tell("honest workers and validators")
    honest, logit_error = _measure_honest(bench, requests)
    floors = limits.FLOORS[dtype]
    calibration = Calibration(
        model=_describe(engine, model_dir, dtype),
        proof=recipe.proof,
        temperature=recipe.sampling.temperature,
        chunk=limits.chunk_limits(
            [result for errors in honest.values() for result in errors.all_chunks()],
            recipe.proof,
            floors,
        ),
        sampler=limits.sampler_limits(
            [float(m.max()) for errors in honest.values() for m in errors.margins],
            logit_error,
            recipe.sampling.temperature,
            floors,
        ),
        fraud_strikes=limits.fraud_strikes(sum(len(e.chunks) for e in honest.values()), recipe),
    )
    table = [row for name, e in honest.items() for row in _honest_rows(calibration, name, e)]

    tell("forgers that computed nothing")
    table += _measure_nothing(bench, calibration, requests, seed)
    limits.require_no_forger(table)

    tell("workers that run something else")
    table += _measure_other(bench, calibration, requests, seed)
    return CalibrationRun(calibration.model_copy(update={"measured": tuple(table)}), tuple(table))


def _tell_nobody(_message: str) -> None:
    pass


def _requests(
    engine: TransformersEngine, prompts: Sequence[str], recipe: Recipe, seed: int, samples: int
) -> list[Request]:
    encoded = list(dict.fromkeys(engine.encode(prompt) for prompt in prompts))
    if len(encoded) < 2:
        raise EngineError(
            f"{len(encoded)} different prompts", hint="calibrate on at least 2, better 50"
        )
    sampling = recipe.sampling
    return [
        Request(
            encoded[i % len(encoded)],
            int.from_bytes(keccak(abi_words(seed, i))[:8], "big"),
            sampling.temperature,
            sampling.max_new_tokens,
        )
        for i in range(samples)
    ]


def _describe(engine: TransformersEngine, model_dir: Path, dtype: str) -> CalibratedModel:
    return CalibratedModel(
        name=model_dir.resolve().name,
        architecture=type(engine.model).__name__,
        hidden_size=engine.hidden_size,
        vocab_size=engine.vocab_size,
        engine=f"transformers {dtype}",
    )


def _measure_honest(bench: Bench, requests: list[Request]) -> tuple[dict[str, Errors], float]:
    """Return errors of every worker way under every validator way, and the largest difference
    between two validators' logits.
    """
    made = {way.name: bench.generate(requests, way) for way in WORKERS}
    made["one token only"] = bench.generate(one_token(requests))
    found: dict[str, Errors] = {}
    logit_error = 0.0
    for worker, work in made.items():
        reference = bench.recompute(work)
        for validator in VALIDATORS:
            part = work.first(validator.samples)
            prefills = bench.recompute(part, validator)
            found[f"{worker}, validated {validator.name}"] = bench.compare(part, prefills)
            differences = [
                float(np.abs(a.logits_TV - b.logits_TV).max())
                for a, b in zip(prefills, reference, strict=False)
            ]
            logit_error = max(logit_error, *differences)
    return found, logit_error


def _honest_rows(calibration: Calibration, name: str, errors: Errors) -> list[Measurement]:
    return [
        _chunk_row(calibration, name, "honest", errors.all_chunks()),
        _sample_row(calibration, name, "honest", errors.margins),
    ]


def _measure_nothing(
    bench: Bench, calibration: Calibration, requests: list[Request], seed: int
) -> list[Measurement]:
    table = []
    for label, asked in (("", requests), (", one token only", one_token(requests))):
        work = bench.generate(asked)
        shapes = bench.chunks(work, bench.recompute(work))
        total = sum(len(chunks.prompts_B) for chunks in shapes)
        if total < _MIN_CHUNKS:
            raise EngineError(
                f"{total} chunks to try forgers on, {_MIN_CHUNKS} are needed",
                hint="calibrate with more samples, on more prompts",
            )
        for name, forger in {**forgers.NOTHING, "signs turned": forgers.negated}.items():
            kind: Literal["nothing", "other"] = "nothing" if name in forgers.NOTHING else "other"
            random = np.random.default_rng(seed)
            results = [r for chunks in shapes for r in _try_forger(chunks, forger(chunks, random))]
            table.append(_forged_row(calibration, name + label, kind, results))
        table.append(_miscounted_row(bench, work, label))
    return table


def _try_forger(chunks: forgers.Chunks, attempts: list[list[bytes]]) -> list[list[ChunkResult]]:
    """Return per chunk the results of all attempts."""
    rows = list(chunks.patterns_BRH)
    proof = chunks.proof
    tried = [
        verify_proofs_many(
            rows, [[p] for p in proofs], chunk_tokens=proof.chunk_tokens, topk=proof.topk
        )
        for proofs in attempts
    ]
    return [[attempt[chunk][0] for attempt in tried] for chunk in range(len(rows))]


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


def _measure_other(
    bench: Bench, calibration: Calibration, requests: list[Request], seed: int
) -> list[Measurement]:
    honest = bench.generate(requests)
    table = []
    for name, change in _changes(bench.recipe).items():
        with forgers.running(bench.engine.model, change, seed=seed):
            work = bench.generate(requests)
        errors = bench.compare(work, bench.recompute(work))
        table.append(_chunk_row(calibration, name, "other", errors.all_chunks()))
        margins = changed_only(work, honest, errors)
        table += _sample_rows(calibration, f"{name}: tokens that differ", margins)
    for attempt in range(1, 4):
        other = [replace(r, seed=r.seed ^ attempt) for r in requests]
        work = Work(requests, bench.generate(other).completions)
        margins = changed_only(work, honest, bench.compare(work, bench.recompute(work)))
        table += _sample_rows(calibration, f"other seed {attempt}: tokens that differ", margins)
    return table


def _changes(recipe: Recipe) -> dict[str, forgers.WeightChange]:
    rate = recipe.training.learning_rate
    return {
        f"neighbour policy, one step of {rate:g}": forgers.one_step(rate),
        f"neighbour policy, ten steps of {rate:g}": forgers.one_step(10 * rate),
        "weights with 0.1 % noise": forgers.noise(0.001),
        "weights with 1 % noise": forgers.noise(0.01),
        "weights in int8": forgers.quantised(8),
        "weights in int4": forgers.quantised(4),
        "another model of this make": forgers.shuffled,
    }


def _chunk_row(
    calibration: Calibration,
    name: str,
    kind: Literal["honest", "nothing", "other"],
    results: list[ChunkResult],
) -> Measurement:
    accepted = sum(calibration.chunk_passes(result) for result in results)
    return limits.chunk_measurement(name, kind, results, accepted)


def _forged_row(
    calibration: Calibration,
    name: str,
    kind: Literal["nothing", "other"],
    attempts: list[list[ChunkResult]],
) -> Measurement:
    """Return the row of a forger that has several attempts at every chunk."""
    accepted = sum(any(map(calibration.chunk_passes, results)) for results in attempts)
    every = [result for results in attempts for result in results]
    row = limits.chunk_measurement(name, kind, every, accepted)
    return row.model_copy(update={"trials": len(attempts)})


def _sample_row(
    calibration: Calibration,
    name: str,
    kind: Literal["honest", "other"],
    margins: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float32]]],
) -> Measurement:
    largest = [float(m.max()) for m in margins]
    return Measurement(
        name=name,
        kind=kind,
        judged="sample",
        trials=len(margins),
        accepted=sum(calibration.sampler_passes(m) for m in margins),
        margin=max(largest) if kind == "honest" else min(largest),
    )


def _sample_rows(
    calibration: Calibration,
    name: str,
    margins: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float32]]],
) -> Iterable[Measurement]:
    """Return the row, or none when no sample differs from the honest one."""
    return [_sample_row(calibration, name, "other", margins)] if margins else []
