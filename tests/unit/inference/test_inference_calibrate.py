"""Calibration of a tiny policy: the honest pass, forgers do not, unsuitable models are refused."""

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from inference_policy import RECIPE, HonestWork, build_policy, plan, prompts
from scripts import load_script
from transformers import AutoModelForCausalLM

from muster.inference import calibrate, measuring, substitutes
from muster.inference.calibrate import (
    CalibrationRun,
    Course,
    calibrate_model,
    contribute,
    vllm_share,
)
from muster.inference.calibrated_limits import FLOORS, Floors
from muster.inference.calibration_plan import (
    VALIDATORS,
    WORKERS,
    MeasuringPlan,
    NumberFormat,
    Profile,
    Way,
)
from muster.inference.contributions import Signed
from muster.inference.engine import Completion, Request, Room
from muster.inference.measuring import Delivery, Errors, OwnParty, Party
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.intervals import rate_bound
from muster.protocol.recipe import ProofRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.toploc import Calibration


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def run(policy_folder: Path, told: list[str]) -> CalibrationRun:
    return calibrate_model(policy_folder, plan(), progress=told.append)


def strikes(
    calibration: Calibration,
    engine: TransformersEngine,
    requests: list[Request],
    completions: list[Completion],
) -> int:
    """Samples that a validator would strike."""
    samples = Delivery(requests, completions).samples()
    temperature = RECIPE.sampling.temperature
    found = engine.examine(samples, proof=RECIPE.proof, temperature=temperature)
    return sum(
        not (
            all(map(calibration.chunk_passes, each.chunks))
            and calibration.sampler_passes(each.replayed.margins_T)
        )
        for each in found
    )


def fresh_requests(engine: TransformersEngine) -> list[Request]:
    drawn = random.Random(5)
    encoded = [engine.encode(prompt) for prompt in prompts(16, seed=5)]
    return [Request(encoded[i // 16], drawn.getrandbits(64), 1.0, 5) for i in range(256)]


def test_honest_work_passes_and_forgers_that_computed_nothing_do_not(run: CalibrationRun) -> None:
    honest = [row for row in run.table if row.kind == "honest"]
    nothing = [row for row in run.table if row.kind == "nothing"]
    assert run.refusal is None
    assert all(row.accepted == row.trials for row in honest)
    assert all(row.accepted == 0 and row.trials >= 300 for row in nothing)
    assert len(nothing) == 14


def test_history_allows_what_honest_ways_strain(run: CalibrationRun) -> None:
    worst = max(row.strain for row in run.table if row.kind == "honest")
    assert run.calibration.history.honest_strain >= 2 * worst
    assert run.calibration.history.honest_loss < 0.01
    assert run.calibration.history.honest_lean < 0.9
    assert all(row.strain > 0.5 for row in run.table if row.kind == "cheap")


def test_document_round_trips_with_its_measurements(run: CalibrationRun) -> None:
    assert run.calibration.measured == run.table
    assert Calibration.from_bytes(run.calibration.to_bytes()) == run.calibration


def test_document_describes_the_model(run: CalibrationRun, policy_folder: Path) -> None:
    model = run.calibration.model
    assert (model.name, model.architecture) == (policy_folder.name, "Qwen3ForCausalLM")
    assert (model.hidden_size, model.vocab_size) == (64, 19)
    assert model.engine == "transformers:float32"


def test_cheaper_models_and_other_seeds_are_detected(run: CalibrationRun) -> None:
    by_name = {row.name: row for row in run.table}
    for name in ("first quarter of the layers", "weights in int4", "signs turned"):
        assert by_name[name].accepted == 0
    assert by_name["samples of another seed"].accepted < 5
    neighbour = by_name["neighbour policy, 1 steps of 0.0005"]
    assert neighbour.accepted < neighbour.trials / 10


def test_strength_grows_with_the_cheat(run: CalibrationRun) -> None:
    strengths = {row.name: row.strength or 0.0 for row in run.table}
    assert 0 < strengths["weights in int8"] < strengths["weights in int4"] < 1
    assert strengths["first quarter of the layers"] > strengths["weights in int8"]


def test_fresh_honest_work_has_no_strikes(run: CalibrationRun, engine: TransformersEngine) -> None:
    requests = fresh_requests(engine)
    completions = engine.generate(requests, proof=ProofRecipe())
    assert strikes(run.calibration, engine, requests, completions) == 0


def test_policy_of_one_gradient_step_earlier_is_fraud(
    run: CalibrationRun, engine: TransformersEngine, policy_folder: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    tokens = torch.tensor([engine.encode("3172=1237")])
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.Adam(model.parameters(), lr=5e-4).step()
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((policy_folder / name).read_bytes())
    neighbour = TransformersEngine()
    neighbour.load_policy(tmp_path, PolicyVersion(1))
    requests = fresh_requests(engine)
    completions = neighbour.generate(requests, proof=ProofRecipe())
    assert strikes(run.calibration, engine, requests, completions) > 200


def test_samples_of_other_seeds_are_fraud_though_their_proofs_are_true(
    run: CalibrationRun, engine: TransformersEngine
) -> None:
    requests = fresh_requests(engine)
    honest = engine.generate(requests, proof=ProofRecipe())
    chosen = engine.generate([replace(r, seed=r.seed ^ 1) for r in requests], proof=ProofRecipe())
    different = sum(a.tokens != b.tokens for a, b in zip(honest, chosen, strict=True))
    struck = strikes(run.calibration, engine, requests, chosen)
    assert struck >= run.calibration.fraud_strikes
    assert struck >= different - 3


def test_progress_is_told_and_the_thread_count_left_alone(
    run: CalibrationRun, told: list[str]
) -> None:
    assert told[0] == "honest work"
    assert all(text.endswith(" min left") for text in told[1:])
    assert "neighbour policy, 1 steps of 0.0005" in "".join(told)
    assert torch.get_num_threads() == 1


def test_time_left_follows_from_the_samples_done(engine: TransformersEngine) -> None:
    told: list[str] = []
    party = Party("float32", engine, RECIPE)
    clock = iter((100.0, 160.0, 220.0))
    course = Course(plan(), [party], told.append, lambda: next(clock))
    for share in (4, 2):
        party.done = plan().effort() // share
        course("some way")
    assert told == ["some way; about 3.0 min left", "some way; about 2.0 min left"]


def test_longer_samples_are_fewer_and_have_as_many_tokens_at_least() -> None:
    def sized(tokens: int) -> tuple[int, int, list[int]]:
        sampling = RECIPE.sampling.model_copy(update={"max_new_tokens": tokens})
        found = plan(recipe=RECIPE.model_copy(update={"sampling": sampling}))
        return found.base, found.cheats, [way.samples or found.base for way in found.workers()]

    assert sized(5) == sized(32) == (320, 320, [320, 24, 96, 96, 96])
    assert sized(64) == (160, 80, [160, 12, 48, 48, 48])
    assert sized(2048) == (48, 48, [48, 4, 4, 4, 4])


def test_calibration_is_the_same_when_repeated(run: CalibrationRun, policy_folder: Path) -> None:
    again = calibrate_model(policy_folder, plan())
    assert again.calibration.chunk == run.calibration.chunk
    assert again.calibration.sampler.margin == pytest.approx(run.calibration.sampler.margin)


def test_calibration_of_chunks_with_several_per_sample(tmp_path: Path) -> None:
    folder = build_policy(tmp_path, training_steps=0)
    sampling = RECIPE.sampling.model_copy(update={"max_new_tokens": 20})
    recipe = RECIPE.model_copy(
        update={"sampling": sampling, "proof": ProofRecipe(chunk_tokens=8, topk=64)}
    )
    run = calibrate_model(folder, plan(32, recipe))
    assert run.calibration.proof.topk == 64
    assert all(row.accepted == 0 for row in run.table if row.kind == "nothing")
    # 107 samples have enough chunks if none ends early. Each further sample adds several chunks.
    plain, *_ = (row for row in run.table if row.kind == "honest")
    assert 107 < plain.trials < 160


def test_model_makes_up_its_own_prompts(policy_folder: Path) -> None:
    run = calibrate_model(policy_folder, plan(0))
    assert run.refusal is None


@pytest.mark.slow
def test_full_profile_holds_every_cheat_and_every_way(
    policy_folder: Path, sibling_folder: Path
) -> None:
    engines = ("transformers:float32", "transformers:bfloat16")
    others = {"sibling": sibling_folder}
    run = calibrate_model(policy_folder, plan(profile="full", engines=engines, others=others))
    honest = [row for row in run.table if row.kind == "honest"]
    assert len(honest) == (2 * len(WORKERS["full"]) + 1) * 2 * len(VALIDATORS["full"])
    assert all(row.accepted == row.trials for row in honest)
    assert {row.name for row in run.table} >= {"sibling", "likeliest of 4 samples"}
    assert run.calibration.model.engine == "transformers:float32, transformers:bfloat16"
    assert len(run.calibration.to_bytes()) < Calibration.MAX_BYTES


class Beside(TransformersEngine):
    """An engine in vLLM's place."""

    events: ClassVar[list[str]]
    rooms: ClassVar[list[Room]]

    def __init__(self, dtype: NumberFormat, *, room: Room, **options: Any) -> None:
        del options["tensor_parallel"]
        super().__init__(dtype, room=room, **options)
        self.rooms.append(room)

    def close(self) -> None:
        self.events.append("vLLM ends")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> type[Beside]:
    Beside.events, Beside.rooms = [], []
    monkeypatch.setattr(calibrate, "VllmEngine", Beside)
    return Beside


BOTH = ("transformers:float32", "vllm:float32")


def test_vllm_gets_room_for_the_longest_sample_and_ends_before_cheats(
    policy_folder: Path, beside: type[Beside]
) -> None:
    given = [Signed(contribute(policy_folder, plan()), address_of(keccak(b"contributor")))]
    run = calibrate_model(
        policy_folder, plan(engines=BOTH), contributions=given, progress=beside.events.append
    )
    assert run.refusal is None
    # Four digits, an equals sign, and five new tokens.
    assert beside.rooms == [Room(context=10)]
    named = [event.split(";")[0] for event in beside.events]
    end = named.index("vLLM ends")
    assert named[end - 2].startswith("honest work, vLLM float32")
    # Not after the cheats: vLLM would have to start again beside the memory that they leave.
    assert named[end - 1] == f"work of {given[0].name}"
    assert named[end + 1] == "forgers that computed nothing"


def test_vllm_on_a_gpu_leaves_memory_to_the_model_beside_it() -> None:
    assert vllm_share(1 << 30, 60 << 30) == 0.5
    assert vllm_share(18 << 30, 60 << 30) == 0.6
    assert vllm_share(60 << 30, 60 << 30) == 0.9


@pytest.mark.parametrize(("free", "profile"), [(2399, "full"), (2400, "full"), (2399, "quick")])
def test_scores_that_fit_into_no_memory_are_refused_at_the_start(
    policy_folder: Path, free: int, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 heads, 10 x 10 tokens, 4 + 4 + 4 bytes.
    monkeypatch.setattr(calibrate, "free_bytes", lambda _device: free)
    is_refused = free < 2400 and profile == "full"
    with pytest.raises(EngineError, match="eager") if is_refused else nullcontext() as refused:
        calibrate._prepare(policy_folder, plan(profile=profile))
    if refused is not None:
        assert "eager attention to 10 tokens takes 0.0 GB" in str(refused.value)
        assert "--profile quick" in (refused.value.hint or "")


@pytest.mark.parametrize("left", [1600, 2400])
def test_scores_must_fit_beside_vllm(
    policy_folder: Path, left: int, beside: type[Beside], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "free_bytes", lambda _device: left if beside.rooms else 3200)
    with pytest.raises(EngineError, match="eager") if left < 2400 else nullcontext():
        calibrate._prepare(policy_folder, plan(profile="full", engines=BOTH))


def test_eager_attention_takes_as_many_samples_at_a_time_as_there_is_room_for(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = OwnParty(engine, RECIPE)
    request = Request((1, 2, 3, 4, 5), 0, 1.0, 5)
    work = Delivery([request] * 3, [Completion((1,) * count, []) for count in (5, 2, 1)])
    eager = Way("eager", attention="eager")
    assert party._fitting(eager, work) == eager
    monkeypatch.setattr(measuring, "_SCORE_BYTES", 5000)
    assert party._fitting(eager, work).max_rows == 2
    assert party._fitting(eager, work[1:]).max_rows == 4
    assert party._fitting(Way("plain"), work) == Way("plain")
    monkeypatch.setattr(measuring, "_SCORE_BYTES", 100)
    assert party._fitting(eager, work).max_rows == 1


def test_model_is_refused_when_its_errors_let_a_forger_through(
    policy_folder: Path, honest_work: HonestWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure_honest", honest_work.measure)
    monkeypatch.setitem(FLOORS, "float32", Floors(1.0, 1.0, 127.0, 127.0, 0.001))
    run = calibrate_model(policy_folder, plan())
    assert "prove nothing" in str(run.refusal)
    assert run.refusal is not None
    assert run.refusal.hint


def test_model_is_refused_when_a_cheap_cheat_passes_as_honest(
    policy_folder: Path, honest_work: HonestWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cheat adds noise too small to be noticed, in place of int4.
    monkeypatch.setattr(calibrate, "measure_honest", honest_work.measure)
    monkeypatch.setattr(substitutes, "quantised", lambda _bits: substitutes.noise(1e-5))
    run = calibrate_model(policy_folder, plan())
    assert "'weights in int4' passes as honest: 320 of 320" in str(run.refusal)


def test_model_is_refused_when_its_limits_refuse_honest_work(
    policy_folder: Path, honest_work: HonestWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure_honest", honest_work.measure)
    monkeypatch.setattr(Calibration, "sampler_passes", lambda *_: False)
    run = calibrate_model(policy_folder, plan())
    assert "honest workers would lose stake" in str(run.refusal)


def test_model_is_refused_when_missing_proofs_parse(
    policy_folder: Path, honest_work: HonestWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure_honest", honest_work.measure)
    monkeypatch.setattr("muster.inference.attacks.split_proofs", lambda *_, **__: [])
    run = calibrate_model(policy_folder, plan())
    assert "'missing, extra or null proofs' passes 960 of 960" in str(run.refusal)


def test_model_with_constant_hidden_states_is_refused(tmp_path: Path) -> None:
    folder = build_policy(tmp_path, training_steps=0, constant_hidden_states=True)
    assert "prove nothing" in str(calibrate_model(folder, plan()).refusal)


@pytest.mark.parametrize(
    ("count", "samples", "match"), [(1, 320, "different prompts"), (8, 100, "300 are needed")]
)
def test_too_little_to_judge_by_is_refused(
    policy_folder: Path, count: int, samples: int, match: str
) -> None:
    with pytest.raises(EngineError, match=match):
        calibrate_model(policy_folder, plan(count, samples=samples))


def test_unknown_engine_is_refused_with_those_there_are(policy_folder: Path) -> None:
    with pytest.raises(EngineError, match="no engine 'abacus'") as caught:
        calibrate_model(policy_folder, plan(engines=("abacus",)))
    assert "transformers:bfloat16" in (caught.value.hint or "")


def test_limits_are_for_submissions_of_the_recipe_s_size(run: CalibrationRun) -> None:
    sampling, made = RECIPE.sampling, run.calibration
    assert made.submission_samples == sampling.submission_samples
    assert made.max_new_tokens == sampling.max_new_tokens
    assert made.misfit(RECIPE) == ""


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not load"):
        calibrate_model(tmp_path, plan(8))


def test_forged_margins_are_reported_as_finite(run: CalibrationRun) -> None:
    assert all(np.isfinite(row.margin) for row in run.table)


# Sweeps that `make test-all` runs: honest submissions by the ten thousand, and larger models.

base_models = load_script("benchmarks/proofs/base_models.py")
SUBMISSION = 8
SUBMISSIONS = 30_000
"""None rejected bounds the rate below 1e-4 with 95 % confidence."""
AT_ONCE = 4_096


def recipe(tokens: int) -> Recipe:
    return Recipe(
        name="sweep",
        sampling=SamplingRecipe(
            problems_per_submission=2,
            samples_per_problem=SUBMISSION // 2,
            temperature=1.0,
            max_new_tokens=tokens,
        ),
        training=TrainingRecipe(submissions_per_step=1),
    )


def drawn(count: int, seed: int = 0) -> list[str]:
    source = random.Random(seed)
    return ["".join(source.choices("0123456789", k=4)) + "=" for _ in range(count)]


@pytest.mark.slow
def test_honest_submissions_are_rejected_less_than_once_in_ten_thousand(
    policy_folder: Path,
) -> None:
    """Workers and validators batch differently, so their roundings differ."""
    rules = recipe(5)
    calibration = calibrate_model(
        policy_folder, MeasuringPlan(rules, drawn(64), profile="quick")
    ).calibration
    engine = TransformersEngine()
    engine.load_policy(policy_folder, PolicyVersion(0))
    bench, source = OwnParty(engine, rules), random.Random(1)
    prompts = [engine.encode(prompt) for prompt in drawn(5_000, seed=1)]
    rejected = 0
    for start in range(0, SUBMISSION * SUBMISSIONS, AT_ONCE):
        count = min(AT_ONCE, SUBMISSION * SUBMISSIONS - start)
        requests = [
            Request(source.choice(prompts), source.getrandbits(64), 1.0, 5) for _ in range(count)
        ]
        work = bench.generate(requests, Way("worker", max_rows=1_024))
        errors = Errors.of(bench.examine(work, Way("validator", max_rows=777)))
        failed = [
            not (all(map(calibration.chunk_passes, chunks)) and calibration.sampler_passes(margins))
            for chunks, margins in zip(errors.chunks, errors.margins, strict=True)
        ]
        rejected += sum(any(failed[i : i + SUBMISSION]) for i in range(0, count, SUBMISSION))
    assert rejected == 0
    assert rate_bound(SUBMISSIONS) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers:float32", "transformers:bfloat16"])
@pytest.mark.parametrize(("size", "steps"), [("4x256", 80), ("8x512", 40)])
def test_no_forgery_passes_on_larger_models(
    tmp_path_factory: pytest.TempPathFactory, size: str, steps: int, engine: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"{size}-{steps}"
    if not folder.exists():
        base_models.build(base_models.shortened(size, steps), folder)
    source = random.Random(0)
    prompts = [base_models.prompt(source) for _ in range(64)]
    run = calibrate_model(folder, MeasuringPlan(recipe(40), prompts, (engine,), profile="quick"))
    nothing = [row for row in run.table if row.kind == "nothing"]
    honest = [row for row in run.table if row.kind == "honest"]
    assert run.refusal is None
    assert all(row.accepted == 0 and row.trials >= 300 for row in nothing)
    assert all(row.accepted == row.trials for row in honest)
