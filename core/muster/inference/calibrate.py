"""Calibration, top to bottom: measure honest work, choose limits, try cheats under them.

 1. generate rollouts in every way an honest worker might, recompute each and all contributed work
    in every way an honest validator might, and choose limits from the worst errors;
 2. let forgers that computed nothing make proofs: if one passes, the model is refused;
 3. let workers run something else (fewer layers, other weights, other seeds, another prompt): if
    one that saves most of the work passes, the model is refused too; the others are only recorded;
 4. write the document.

One model and recipe per calibration, one or several number formats.
"""

import time
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from muster.inference import calibrated_limits
from muster.inference.attacks import (
    ONE_TOKEN,
    Attack,
    Attacker,
    attack_row,
    forged_row,
    sample_row,
    try_forgers,
    try_miscounted,
)
from muster.inference.calibration_plan import (
    MIN_CHUNKS,
    MeasuringPlan,
    few_prompts,
    layout_of,
    require_sound,
)
from muster.inference.contributions import (
    Contribution,
    Signed,
    add_claims,
    contribution_of,
    device_class,
    machine_of,
    require_no_outlier,
    require_same,
    weights_hash,
)
from muster.inference.engine import Request, Room
from muster.inference.honest import Honest, judge, measure_honest
from muster.inference.measuring import Delivery, OwnParty, Party, Survey
from muster.inference.transformers_engine import TransformersEngine, free_bytes
from muster.inference.vllm.engine import VllmEngine
from muster.protocol.encoding import abi_words, keccak
from muster.protocol.errors import EngineError, ProofError
from muster.protocol.ids import Address, PolicyVersion
from muster.toploc import Calibration
from muster.toploc.calibration import CalibratedModel, MeasuredMachine, Measurement
from muster.toploc.sequential_test import HistoryLimits

T = TypeVar("T")
Progress = Callable[[str], None]
"""Called with what is being measured."""

_OWN_PROMPTS = 64

_CACHE_BYTES = 1 << 30
"""Room for keys and values, in bytes."""


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
    model_dir: Path,
    plan: MeasuringPlan,
    *,
    contributions: Sequence[Signed] = (),
    accepted: Collection[Address] = (),
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> CalibrationRun:
    """Return validation limits of a base model under a recipe, and what they rest on.

    Work that other machines contributed is recomputed here and counts like this machine's own.
    Raises EngineError when the model does not load, when there are too few prompts or chunks, and
    for contributions about another model or recipe. If the limits let a forger through or refuse
    honest work, or a contribution would widen them and is not `accepted`, the result has a
    `refusal`.
    """
    require_sound(model_dir, plan)
    bench, others, requests = _prepare(model_dir, plan)
    parties = [bench, *others]
    tell = Course(plan, parties, progress or _tell_nobody, clock)
    works = _works_of(contributions, model_dir, plan, requests)
    honest = measure_honest(bench, others, requests, plan, tell)
    parts = []
    for signed, work in zip(contributions, works, strict=True):
        tell(f"work of {signed.name}")
        parts.append(_recomputed(honest.survey, parties, signed, work, plan))
    for party in others:
        if isinstance(party.engine, VllmEngine):
            # Cheats need the memory.
            party.engine.close()

    tell("forgers that computed nothing")
    forged = try_forgers(honest.survey, plan.recipe, plan.seed)
    whole, shortest = honest.survey.work, honest.shortest
    uncounted = [
        try_miscounted(bench, work, label) for work, label in ((whole, ""), (shortest, ONE_TOKEN))
    ]
    attacker = Attacker(bench, honest.survey, plan.cheats, seed=plan.seed)
    tell("tokens of a cheaper model")
    cheap = attacker.cheap_tokens()
    attacks = _run_attacks(attacker, plan, tell)

    own = _choose(model_dir, bench, plan, honest, cheap.errors.margins)
    own = own.model_copy(update={"history": _history(own, honest)})
    machines = [machine_of(honest, own, device_class(plan.device), ", ".join(plan.engines))]
    for signed, part in zip(contributions, parts, strict=True):
        machines.append(_add(honest, part, signed, plan, own))
    merged = replace(plan, engines=_engines_of(plan, contributions))
    calibration = _choose(model_dir, bench, merged, honest, cheap.errors.margins)
    table = [sample_row(calibration, pair, "honest", e) for pair, e in honest.errors.items()]
    history = _history(calibration, honest)
    table += [forged_row(calibration, each) for each in forged]
    table += uncounted
    rows = [attack_row(calibration, attack) for attack in attacks]
    table += [row for row in rows if row is not None]
    refusal = (
        _refusal_of(lambda: require_no_outlier(machines, own.history, accepted))
        or _refusal_of(lambda: calibrated_limits.require_honest(table))
        or _refusal_of(lambda: calibrated_limits.require_no_forger(table))
        or _refusal_of(lambda: calibrated_limits.require_separated(table, plan.recipe))
    )
    found = {"measured": tuple(table), "history": history, "machines": tuple(machines)}
    return CalibrationRun(calibration.model_copy(update=found), tuple(table), refusal)


def contribute(
    model_dir: Path,
    plan: MeasuringPlan,
    *,
    contributions: Sequence[Signed] = (),
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Contribution:
    """Return this machine's contribution to a calibration: honest work only, and its recomputation
    of other contributions. Raises EngineError as `calibrate_model` does.
    """
    require_sound(model_dir, plan)
    bench, others, requests = _prepare(model_dir, plan)
    parties = [bench, *others]
    works = _works_of(contributions, model_dir, plan, requests)
    tell = Course(plan, parties, progress or _tell_nobody, clock)
    honest = measure_honest(bench, others, requests, plan, tell)
    for signed, work in zip(contributions, works, strict=True):
        judge(honest, parties, signed.name, work, plan)
    device, engine = device_class(plan.device), ", ".join(plan.engines)
    weights = weights_hash(model_dir)
    return contribution_of(honest, weights, plan.recipe, device=device, engine=engine)


def _works_of(
    contributions: Sequence[Signed],
    model_dir: Path,
    plan: MeasuringPlan,
    requests: Sequence[Request],
) -> list[Delivery]:
    if not contributions:
        return []
    weights = weights_hash(model_dir)
    return [require_same(each, weights, plan.recipe, requests) for each in contributions]


def _engines_of(plan: MeasuringPlan, contributions: Sequence[Signed]) -> tuple[str, ...]:
    said = [name.strip() for each in contributions for name in each.contribution.engine.split(",")]
    for name in said:
        layout_of(name)
    return tuple(dict.fromkeys([*plan.engines, *said]))


def _recomputed(
    survey: Survey, parties: Sequence[Party], signed: Signed, work: Delivery, plan: MeasuringPlan
) -> Honest:
    """Return what this machine finds in a contribution's work."""
    part = Honest(survey)
    try:
        judge(part, parties, signed.name, work, plan)
    except (EngineError, ProofError) as error:
        raise EngineError(f"{signed.name}: its work cannot be recomputed: {error}") from error
    return part


def _add(
    honest: Honest, part: Honest, signed: Signed, plan: MeasuringPlan, own: Calibration
) -> MeasuredMachine:
    """Add a contribution: its work as recomputed here, and the errors that it reports."""
    said, before = signed.contribution, honest.redrawn.keys() | honest.errors.keys()
    for pair, errors in part.errors.items():
        honest.add(pair, errors)
    add_claims(honest, signed, plan.recipe.proof.chunk_tokens)
    part.errors = _new(honest.errors, before)
    part.redrawn = _new(honest.redrawn, before)
    part.shifts = _new(honest.shifts, before)
    figures = machine_of(part, own, said.device, said.engine)
    return figures.model_copy(update={"name": signed.name, "contributor": signed.signer})


def _new(found: dict[str, T], before: Set[str]) -> dict[str, T]:
    return {pair: each for pair, each in found.items() if pair not in before}


def _history(calibration: Calibration, honest: Honest) -> HistoryLimits:
    strains = [
        float(np.mean(list(map(calibration.sample_strain, errors.chunks, errors.margins))))
        for errors in honest.errors.values()
    ]
    losses = map(calibration.loss, honest.margins_by_pair())
    return calibrated_limits.history_limits(strains, losses, honest.leans())


def _tell_nobody(_message: str) -> None:
    pass


def _refusal_of(check: Callable[[], None]) -> EngineError | None:
    try:
        check()
    except EngineError as refusal:
        return refusal
    return None


class Course:
    """Reports what is being measured, and about how long the rest will take."""

    def __init__(
        self,
        plan: MeasuringPlan,
        parties: Sequence[Party],
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self._effort, self._parties = plan.effort(), parties
        self._progress, self._clock, self._started = progress, clock, clock()

    def __call__(self, message: str) -> None:
        """Report the start of a step."""
        done = sum(party.done for party in self._parties)
        if done:
            left = max(0, self._effort - done) / done * (self._clock() - self._started)
            message = f"{message}; about {left / 60:.1f} min left"
        self._progress(message)


# ------------------------------------------------------------------------------------ preparing


def _prepare(folder: Path, plan: MeasuringPlan) -> tuple[OwnParty, list[Party], list[Request]]:
    """Return the plan's engines with a model, and the requests; cheats are run on the first."""
    first, *rest = plan.engines
    bench = _load(folder, first, plan)
    requests = _requests(bench.engine, plan)
    longest = max(len(each.prompt_tokens) + each.max_new_tokens for each in requests)
    others = [_load_party(folder, each, plan, bench, longest) for each in rest]
    # vLLM has taken its memory by now.
    _require_room(bench, longest, plan)
    return bench, others, requests


def _require_room(bench: OwnParty, longest: int, plan: MeasuringPlan) -> None:
    """Raise EngineError if a way of the plan cannot compute the longest sample in this memory."""
    if not any(way.attention == "eager" for way in plan.validators()):
        return
    needed, free = bench.score_bytes(longest), free_bytes(bench.engine.forward.device)
    if needed > free:
        raise EngineError(
            f"eager attention to {longest:,} tokens takes {needed / 1e9:,.1f} GB, "
            f"{free / 1e9:,.1f} GB are free",
            hint="--profile quick measures no eager attention; or a smaller "
            "sampling.max_new_tokens, or a device with more memory",
        )


def _load_party(
    folder: Path, engine: str, plan: MeasuringPlan, bench: OwnParty, longest: int
) -> Party:
    if not engine.startswith("vllm:"):
        return _load(folder, engine, plan)
    dtype, devices = layout_of(engine)
    device = "cuda" if devices > 1 else plan.device
    width = 2 if dtype == "bfloat16" else 4
    weights = sum(weight.numel() for weight in bench.engine.model.parameters()) * width // devices
    share = vllm_share(weights, free_bytes(bench.engine.forward.device))
    room = Room(context=longest, memory_share=None if device == "cpu" else share)
    vllm = VllmEngine(
        dtype, threads=plan.threads, device=device, room=room, tensor_parallel=devices
    )
    vllm.load_policy(folder, PolicyVersion(0))
    layout = f", {devices} devices" if devices > 1 else ""
    return Party(f"vLLM {dtype}{layout}", vllm, plan.recipe)


def vllm_share(weights_bytes: int, free: int) -> float:
    """Return vLLM's share of a GPU's free bytes: half, or more if its weights need it. The model
    beside it computes in the rest.
    """
    return min(0.9, max(0.5, 2 * weights_bytes / free))


def _load(folder: Path, engine: str, plan: MeasuringPlan) -> OwnParty:
    loaded = TransformersEngine(
        layout_of(engine)[0], threads=plan.threads, device=plan.device, cache_bytes=_CACHE_BYTES
    )
    loaded.load_policy(folder, PolicyVersion(0))
    return OwnParty(loaded, plan.recipe)


def _requests(engine: TransformersEngine, plan: MeasuringPlan) -> list[Request]:
    encoded = list(dict.fromkeys(engine.encode(prompt) for prompt in plan.prompts))
    encoded = encoded or _own_prompts(engine, plan)
    if len(encoded) < 2:
        raise few_prompts(len(encoded))
    sampling = plan.recipe.sampling
    return [
        Request(
            encoded[i % len(encoded)],
            _draw(plan.seed, i),
            sampling.temperature,
            sampling.max_new_tokens,
        )
        for i in range(max(plan.samples, MIN_CHUNKS))
    ]


def _own_prompts(engine: TransformersEngine, plan: MeasuringPlan) -> list[tuple[int, ...]]:
    """Return beginnings of texts that the model samples from a single random token each."""
    starts = [_draw(plan.seed, i, stream=1) % engine.vocab_size for i in range(_OWN_PROMPTS)]
    asked = [
        Request((start,), _draw(plan.seed, i, stream=2), 1.0, 8 + i % 17)
        for i, start in enumerate(starts)
        if start not in engine.eos_token_ids
    ]
    made = engine.generate(asked, proof=plan.recipe.proof)
    texts = [(*r.prompt_tokens, *c.tokens) for r, c in zip(asked, made, strict=True)]
    # Nobody asks for the continuation of a text that has ended.
    return list(dict.fromkeys(t for t in texts if t[-1] not in engine.eos_token_ids))


def _draw(seed: int, number: int, stream: int = 0) -> int:
    words = (seed, number) if not stream else (seed, number, stream)
    return int.from_bytes(keccak(abi_words(*words))[:8], "big")


def _choose(
    model_dir: Path,
    bench: OwnParty,
    plan: MeasuringPlan,
    honest: Honest,
    cheats: Sequence[npt.NDArray[np.float32]],
) -> Calibration:
    """Return the limits that follow from honest errors, with the floors of the coarsest format."""
    recipe, engine = plan.recipe, bench.engine
    coarsest = max(
        (layout_of(name)[0] for name in plan.engines), key=list(calibrated_limits.FLOORS).index
    )
    floors = calibrated_limits.FLOORS[coarsest]
    seen = [errors for pair, errors in honest.errors.items() if pair not in honest.claimed]
    samples = sum(len(errors.chunks) for errors in seen)
    sampler = calibrated_limits.choice_limits(
        honest.token_margins(), honest.drawn_apart(), recipe, floors, cheats
    )
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
        submission_samples=recipe.sampling.submission_samples,
        max_new_tokens=recipe.sampling.max_new_tokens,
        chunk=calibrated_limits.chunk_limits(honest.chunks(), recipe.proof, floors),
        sampler=sampler,
        fraud_strikes=calibrated_limits.fraud_strikes(samples, recipe),
    )


def _run_attacks(attacker: Attacker, plan: MeasuringPlan, tell: Progress) -> list[Attack]:
    found = []
    for attack in getattr(attacker, plan.profile)():
        tell(attack.name)
        found.append(attack)
    for name, folder in plan.others.items():
        tell(name)
        found.append(attacker.other_model(name, _load(folder, plan.engines[0], plan)))
    return found
