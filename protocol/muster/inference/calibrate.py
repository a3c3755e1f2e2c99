"""Calibration, top to bottom: measure the honest, choose limits, send the cheats against them.

 1. generate rollouts in every way an honest worker might, recompute each in every way an honest
    validator might, and choose limits from the worst errors;
 2. let forgers that computed nothing make proofs: one that passes refuses the model;
 3. let workers run something else (fewer layers, other weights, other seeds, another prompt): one
    that saves most of the work and passes refuses the model too, the rest is for the record;
 4. write the document.

One model and recipe per calibration, one or several number formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from muster.inference import forgers, limits
from muster.inference.attacks import Attack, Attacker
from muster.inference.engine import Completion, Request
from muster.inference.measuring import (
    Bench,
    Errors,
    Progress,
    Work,
    one_token,
    redrawn_margins,
)
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.ways import VALIDATORS, WORKERS
from muster.protocol.encoding import abi_words, keccak
from muster.protocol.errors import EngineError, ProofError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe
from muster.toploc import Calibration, ChunkResult, split_proofs, verify_proofs_many
from muster.toploc.calibration import CalibratedModel, Kind, Measurement

Profile = Literal["quick", "full"]
NumberFormat = Literal["float32", "bfloat16"]

ENGINES: dict[str, NumberFormat] = {
    "transformers:float32": "float32",
    "transformers:bfloat16": "bfloat16",
}
"""Engines that can be measured, by what `--engines` calls them, the exacter ones first."""

_MIN_CHUNKS = 300
"""Chunks that every forger is tried on: none accepted bounds its rate below 1 % (95 %)."""

_OWN_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how thoroughly."""

    recipe: Recipe
    """Sampling, proofs and learning rate."""
    prompts: Sequence[str] = ()
    """Taken in turn; none means prompts that the model makes up."""
    engines: Sequence[str] = ("transformers:float32",)
    """Whose errors must be inside the limits, each against each; cheats use the first."""
    others: Mapping[str, Path] = field(default_factory=dict)
    """Further models of the same vocabulary that a cheat could run, by name: a smaller sibling,
    the base model."""
    profile: Profile = "full"
    """"quick" is for small models and demonstrations: fewer ways, fewer cheats."""
    samples: int = 320
    """Samples of most ways and cheats."""
    seed: int = 0
    """Of everything drawn."""


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """What a calibration found."""

    calibration: Calibration
    """The document to pin on chain."""
    table: tuple[Measurement, ...]
    """Its measurements, for people."""
    refusal: EngineError | None
    """Why the model must not be used; None when it may."""


def calibrate_model(
    model_dir: Path, plan: Plan, *, progress: Progress | None = None
) -> CalibrationRun:
    """Return validation limits of a base model under a recipe, and what they rest on.

    Raises EngineError when the model does not load, and when prompts or chunks are too few to judge
    by. A model whose limits let a forger through is reported with a `refusal`.
    """
    tell = progress or _tell_nobody
    benches = [_load(model_dir, name, plan.recipe) for name in plan.engines]
    requests = _requests(benches[0].engine, plan)

    tell("honest workers and validators")
    honest = _measure_honest(benches, requests, plan)
    attacker = Attacker(benches[0], requests, seed=plan.seed)
    cheap = attacker.cheap_tokens()
    cheats = benches[0].measure(cheap.work).only(cheap.is_different).margins
    calibration = _choose(model_dir, benches, plan, honest, cheats)
    table = [sample_row(calibration, pair, "honest", e) for pair, e in honest.errors.items()]
    history = limits.history_limits(row.strain for row in table)

    tell("forgers that computed nothing")
    table += _measure_nothing(benches[0], calibration, requests, plan.seed)
    refusal = _refusal_of(lambda: limits.require_no_forger(table))

    tell("workers that run something else")
    table += _measure_other(benches[0], calibration, attacker, plan)
    refusal = refusal or _refusal_of(lambda: limits.require_separated(table, plan.recipe))
    found = {"measured": tuple(table), "history": history}
    return CalibrationRun(calibration.model_copy(update=found), tuple(table), refusal)


def _tell_nobody(_message: str) -> None:
    pass


def _refusal_of(check: Callable[[], None]) -> EngineError | None:
    try:
        check()
    except EngineError as refusal:
        return refusal
    return None


# ------------------------------------------------------------------------------------ preparing


def _load(folder: Path, engine: str, recipe: Recipe) -> Bench:
    if engine not in ENGINES:
        raise EngineError(f"no engine {engine!r}", hint=f"there are: {', '.join(ENGINES)}")
    loaded = TransformersEngine(ENGINES[engine])
    loaded.load_policy(folder, PolicyVersion(0))
    return Bench(loaded, recipe)


def _requests(engine: TransformersEngine, plan: Plan) -> list[Request]:
    encoded = list(dict.fromkeys(engine.encode(prompt) for prompt in plan.prompts))
    encoded = encoded or _own_prompts(engine, plan)
    if len(encoded) < 2:
        raise EngineError(
            f"{len(encoded)} different prompts", hint="calibrate on at least 2, better 50"
        )
    sampling = plan.recipe.sampling
    return [
        Request(
            encoded[i % len(encoded)],
            _draw(plan.seed, i),
            sampling.temperature,
            sampling.max_new_tokens,
        )
        for i in range(plan.samples)
    ]


def _own_prompts(engine: TransformersEngine, plan: Plan) -> list[tuple[int, ...]]:
    """Return beginnings of texts that the model samples from a single random token each."""
    starts = [_draw(plan.seed, i, stream=1) % engine.vocab_size for i in range(_OWN_PROMPTS)]
    asked = [
        Request((start,), _draw(plan.seed, i, stream=2), 1.0, 8 + i % 17)
        for i, start in enumerate(starts)
        if start not in engine.eos_token_ids
    ]
    made = engine.generate(asked, proof=plan.recipe.proof)
    texts = [(*r.prompt_tokens, *c.tokens) for r, c in zip(asked, made, strict=True)]
    # What follows EOS is not a text that anyone asks to continue.
    return list(dict.fromkeys(t for t in texts if t[-1] not in engine.eos_token_ids))


def _draw(seed: int, number: int, stream: int = 0) -> int:
    words = (seed, number) if not stream else (seed, number, stream)
    return int.from_bytes(keccak(abi_words(*words))[:8], "big")


def _choose(
    model_dir: Path,
    benches: Sequence[Bench],
    plan: Plan,
    honest: Honest,
    cheats: Sequence[npt.NDArray[np.float32]],
) -> Calibration:
    """Return the limits that honest errors lead to, those of the coarsest format at least."""
    recipe, engine = plan.recipe, benches[0].engine
    coarsest = max((ENGINES[name] for name in plan.engines), key=list(limits.FLOORS).index)
    floors = limits.FLOORS[coarsest]
    samples = sum(len(errors.chunks) for errors in honest.errors.values())
    return Calibration(
        model=CalibratedModel(
            name=model_dir.resolve().name,
            architecture=type(engine.model).__name__,
            hidden_size=engine.hidden_size,
            vocab_size=engine.vocab_size,
            engine=", ".join(plan.engines),
        ),
        proof=recipe.proof,
        temperature=recipe.sampling.temperature,
        chunk=limits.chunk_limits(honest.chunks(), recipe.proof, floors),
        sampler=limits.sampler_limits(
            honest.token_margins(), recipe.sampling.max_new_tokens, floors, cheats
        ),
        fraud_strikes=limits.fraud_strikes(samples, recipe),
    )


# ------------------------------------------------------------------------------------ 1. the honest


@dataclass(slots=True)
class Honest:
    """What honest workers and validators were seen to differ by."""

    errors: dict[str, Errors] = field(default_factory=dict)
    """Per pair of ways."""
    margins: list[npt.NDArray[np.float32]] = field(default_factory=list)
    """Of single tokens, the noise drawn afresh."""

    def add(self, pair: str, errors: Errors) -> None:
        """Take some samples of a pair of ways."""
        self.errors[pair] = self.errors[pair] + errors if pair in self.errors else errors

    def chunks(self) -> list[ChunkResult]:
        """Return the chunks of all pairs."""
        return [result for errors in self.errors.values() for result in errors.all_chunks()]

    def token_margins(self) -> npt.NDArray[np.float32]:
        """Return the margins of all tokens, those of the work itself and those redrawn."""
        of_work = [margins for errors in self.errors.values() for margins in errors.margins]
        return np.concatenate([*of_work, *self.margins])


def _measure_honest(benches: Sequence[Bench], requests: list[Request], plan: Plan) -> Honest:
    """Return errors of every worker way under every validator way."""
    made = {
        f"{_label(bench, benches)}{way.name}": bench.generate(requests, way)
        for bench in benches
        for way in WORKERS[plan.profile]
    }
    made["one token only"] = benches[0].generate(one_token(requests))
    honest = Honest()
    for worker, work in made.items():
        for start, part in benches[0].parts(work):
            reference = benches[0].recompute(part)
            for bench in benches:
                for way in VALIDATORS[plan.profile]:
                    few = part if way.samples is None else part[: max(0, way.samples - start)]
                    if not few.completions:
                        continue
                    prefills = bench.recompute(few, way)
                    pair = f"{worker}, validated {_label(bench, benches)}{way.name}"
                    honest.add(pair, bench.compare(few, prefills))
                    if worker == next(iter(made)):
                        # One worker's tokens are as good as any: the margins are redrawn.
                        temperature = plan.recipe.sampling.temperature
                        honest.margins.append(
                            redrawn_margins(reference, prefills, temperature, seed=plan.seed)
                        )
    return honest


def _label(bench: Bench, benches: Sequence[Bench]) -> str:
    return "" if len(benches) == 1 else f"{bench.engine.dtype} "


# --------------------------------------------------------------------------- 2. computed nothing


def _measure_nothing(
    bench: Bench, calibration: Calibration, requests: list[Request], seed: int
) -> list[Measurement]:
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


# ---------------------------------------------------------------------------- 3. something else


def _measure_other(
    bench: Bench, calibration: Calibration, attacker: Attacker, plan: Plan
) -> list[Measurement]:
    rows = [_attack_row(bench, calibration, attack) for attack in getattr(attacker, plan.profile)()]
    for name, folder in plan.others.items():
        other = _load(folder, plan.engines[0], plan.recipe)
        rows.append(_attack_row(bench, calibration, attacker.other_model(name, other)))
    return [row for row in rows if row is not None]


def _attack_row(bench: Bench, calibration: Calibration, attack: Attack) -> Measurement | None:
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
