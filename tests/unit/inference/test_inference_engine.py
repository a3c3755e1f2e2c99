"""The transformers engine against transformers itself, and against its own work."""

import json
import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_policy import EOS, build_policy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from muster.inference.engine import (
    Completion,
    Examined,
    InferenceEngine,
    Request,
    Room,
    Sample,
    set_aside_in,
)
from muster.inference.examining import Recomputed
from muster.inference.policy_files import require_supported
from muster.inference.sampling import gumbel_noise
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import EngineError, ProofError, SampleUnfit
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe
from muster.protocol.set_aside import FILE_NAME, MAX_BYTES, SetAside
from muster.toploc import build_proofs, incremental, verify_proofs_many

PROOF = ProofRecipe()


def requests(
    engine: TransformersEngine, lengths: Sequence[int] = (4,), limit: int = 5, count: int = 32
) -> list[Request]:
    drawn = random.Random(0)
    prompts = [
        engine.encode("".join(drawn.choices("0123456789", k=lengths[i % len(lengths)])) + "=")
        for i in range(count // 4)
    ]
    return [Request(prompts[i // 4], drawn.getrandbits(64), 1.0, limit) for i in range(count)]


def samples_of(asked: list[Request], made: list[Completion]) -> list[Sample]:
    return [
        Sample(r.prompt_tokens, c.tokens, r.seed, c.proofs)
        for r, c in zip(asked, made, strict=True)
    ]


def examined(
    engine: TransformersEngine, asked: list[Request], made: list[Completion]
) -> list[Examined]:
    return engine.examine(samples_of(asked, made), proof=PROOF, temperature=1.0)


def slow_completion(folder: Path, request: Request) -> tuple[list[int], torch.Tensor]:
    """One sample by whole forward passes, without cache, batch or our loop."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens: list[int] = []
    rows = []
    for position in range(request.max_new_tokens):
        ids = torch.tensor([[*request.prompt_tokens, *tokens]])
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[0, -1]
            logits = model.lm_head(hidden).numpy()
        scores = logits / np.float32(request.temperature)
        tokens.append(
            int((scores + gumbel_noise([request.seed], [position], len(scores))[0]).argmax())
        )
        rows.append(hidden)
        if tokens[-1] == EOS:
            break
    return tokens, torch.stack(rows)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_completion_equals_whole_forward_passes(
    engine: TransformersEngine, policy_folder: Path, temperature: float
) -> None:
    request = Request(engine.encode("3172="), 77, temperature, 9)
    (completion,) = engine.generate([request], proof=PROOF)
    tokens, hidden = slow_completion(policy_folder, request)
    assert list(completion.tokens) == tokens
    (results,) = verify_proofs_many([hidden], [completion.proofs])
    assert all(r.exponent_mismatches <= 1 and r.mantissa_error_mean < 0.1 for r in results)


@pytest.mark.parametrize("lengths", [(4,), (1, 2, 7, 9)])
@pytest.mark.parametrize("max_rows", [1, 3, 256])
def test_tokens_do_not_depend_on_the_batch(
    engine: TransformersEngine, lengths: Sequence[int], max_rows: int
) -> None:
    asked = requests(engine, lengths)
    expected = [completion.tokens for completion in engine.generate(asked, proof=PROOF)]
    engine.max_rows = max_rows
    assert [c.tokens for c in engine.generate(asked, proof=PROOF)] == expected
    assert [c.tokens for c in engine.generate(asked[::-1], proof=PROOF)] == expected[::-1]


@pytest.mark.parametrize("lengths", [(4,), (1, 2, 7, 9)])
@pytest.mark.parametrize("max_rows", [1, 3, 256])
def test_examining_agrees_with_decoding(
    engine: TransformersEngine, lengths: Sequence[int], max_rows: int
) -> None:
    asked = requests(engine, lengths, limit=40)
    made = engine.generate(asked, proof=PROOF)
    engine.max_rows = max_rows
    for found in examined(engine, asked, made):
        assert all(r.exponent_mismatches <= 2 and r.mantissa_error_mean < 0.1 for r in found.chunks)
        assert found.replayed.margins_T.max() < 1e-4


def test_a_completion_goes_on_from_any_position(engine: TransformersEngine) -> None:
    asked = requests(engine, (4, 7), limit=12)
    wholes = [completion.tokens for completion in engine.generate(asked, proof=PROOF)]
    assert max(map(len, wholes)) > 3
    parts = [
        replace(
            request,
            prompt_tokens=(*request.prompt_tokens, *whole[:cut]),
            position=cut,
            max_new_tokens=request.max_new_tokens - cut,
        )
        for request, whole in zip(asked, wholes, strict=True)
        for cut in range(len(whole))
    ]
    expected = [whole[cut:] for whole in wholes for cut in range(len(whole))]
    assert [c.tokens for c in engine.generate(parts, proof=PROOF)] == expected


def test_text_within_a_sequence_has_nothing_around_it(engine: TransformersEngine) -> None:
    assert engine.encode("31=13")[-3:] == engine.encode("=13", is_start=False)


def test_recomputed_rows_predict_the_completion_tokens(
    engine: TransformersEngine, policy_folder: Path
) -> None:
    samples = [((1, 2, 3), (4, 5)), ((6,), (7, 8, 9, 1))]
    found = engine.recompute(samples)
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    for (prompt, completion), computed in zip(samples, found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, *completion]])).logits[0]
        rows = expected[len(prompt) - 1 : -1].numpy()
        assert computed.logits_TV == pytest.approx(rows, abs=1e-5)
        assert computed.hidden_TH.shape == (len(completion), engine.hidden_size)


def test_replay_catches_tokens_of_another_seed(engine: TransformersEngine) -> None:
    asked = requests(engine, count=64)
    made = engine.generate(asked, proof=PROOF)
    others = [replace(request, seed=request.seed ^ 1) for request in asked]
    found = examined(engine, others, made)
    assert sum(each.replayed.margins_T.max() > 0.001 for each in found) > len(asked) / 4


def test_completion_ends_with_the_first_eos_or_at_the_limit(engine: TransformersEngine) -> None:
    made = engine.generate(requests(engine, limit=12, count=64), proof=PROOF)
    assert {c.tokens[-1] == EOS for c in made} == {True} or any(len(c.tokens) == 12 for c in made)
    for completion in made:
        assert EOS not in completion.tokens[:-1]
        assert completion.tokens[-1] == EOS or len(completion.tokens) == 12


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_completion_stops_at_its_own_limit(engine: TransformersEngine, limit: int) -> None:
    asked = requests(engine, count=8)
    mixed = [*asked[:4], *[Request(r.prompt_tokens, r.seed, 1.0, limit) for r in asked[4:]]]
    made = engine.generate(mixed, proof=PROOF)
    assert [len(c.tokens) for c in made[4:]] == [limit] * 4
    whole = engine.generate(asked, proof=PROOF)
    assert [c.tokens for c in made[4:]] == [c.tokens[:limit] for c in whole[4:]]


def test_one_token_completion_has_a_proof(engine: TransformersEngine) -> None:
    request = Request(engine.encode("3172="), 1, 1.0, 1)
    (completion,) = engine.generate([request], proof=PROOF)
    pair = (request.prompt_tokens, completion.tokens)
    (computed,) = engine.recompute([pair])
    assert completion.proofs == build_proofs(computed.hidden_TH)
    assert engine.prove([pair], proof=PROOF) == [completion.proofs]
    assert len(completion.proofs[0]) == 2 + 2 * 64


def test_temperatures_may_differ_in_a_batch(engine: TransformersEngine) -> None:
    prompt = engine.encode("3172=")
    asked = [Request(prompt, 9, t, 5) for t in (0.01, 1.0, 5.0)]
    together = engine.generate(asked, proof=PROOF)
    apart = [engine.generate([request], proof=PROOF)[0].tokens for request in asked]
    assert [c.tokens for c in together] == apart


def test_text_round_trips_without_eos(engine: TransformersEngine) -> None:
    assert engine.decode((*engine.encode("3172="), EOS)) == "3172="
    assert engine.eos_token_ids == frozenset({EOS})


def test_nothing_asked_gives_nothing(engine: TransformersEngine) -> None:
    assert engine.generate([], proof=PROOF) == []
    assert engine.examine([], proof=PROOF, temperature=1.0) == []
    assert engine.prove([], proof=PROOF) == engine.recompute([]) == []


def test_bfloat16_engine_agrees_with_what_it_examines(policy_folder: Path) -> None:
    engine = TransformersEngine("bfloat16")
    engine.load_policy(policy_folder, PolicyVersion(0))
    asked = requests(engine)
    made = engine.generate(asked, proof=PROOF)
    for found in examined(engine, asked, made):
        assert all(r.exponent_mismatches <= 16 and r.mantissa_error_mean < 4 for r in found.chunks)


def test_engine_satisfies_the_protocol(engine: TransformersEngine) -> None:
    as_seam: InferenceEngine = engine
    assert (as_seam.hidden_size, as_seam.vocab_size) == (64, 19)


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (Request((), 1, 1.0, 5), "empty"),
        (Request((1,), 1, 1.0, 0), "empty"),
        (Request((19,), 1, 1.0, 5), "outside the vocabulary"),
        (Request((-1,), 1, 1.0, 5), "outside the vocabulary"),
        (Request((1,) * 120, 1, 1.0, 9), "exceed the context of 128"),
        (Request((1,), 1, 0.0, 5), "cannot sample"),
        (Request((1,), 1, float("nan"), 5), "cannot sample"),
        (Request((1,), -1, 1.0, 5), "cannot sample"),
        (Request((1,), 2**64, 1.0, 5), "cannot sample"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    engine: TransformersEngine, request_: Request, match: str
) -> None:
    with pytest.raises(EngineError, match=match):
        engine.generate([request_], proof=PROOF)


@pytest.mark.parametrize(
    "sample", [((), (1,)), ((1,), ()), ((1,), (19,)), ((1,), (-1,)), ((1,) * 100, (1,) * 29)]
)
def test_examining_refuses_what_the_policy_cannot_compute(
    engine: TransformersEngine, sample: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    with pytest.raises(EngineError):
        engine.prove([sample], proof=PROOF)
    with pytest.raises(SampleUnfit):
        engine.examine([Sample(*sample, 1, [])], proof=PROOF, temperature=1.0)


def test_a_sample_beyond_the_room_is_the_machines_fault_and_beyond_the_model_its_own(
    policy_folder: Path,
) -> None:
    engine = TransformersEngine(room=Room(context=10))
    engine.load_policy(policy_folder, PolicyVersion(0))
    sample = Sample((1, 2), (3,) * 8, 1, [])
    assert len(engine.generate([Request((1, 2), 1, 1.0, 8)], proof=ProofRecipe())) == 1
    with pytest.raises(EngineError, match="3 prompt and 8 new tokens exceed the 10") as caught:
        engine.generate([Request((1, 2, 3), 1, 1.0, 8)], proof=ProofRecipe())
    assert "--context 11" in (caught.value.hint or "")
    longer = replace(sample, completion_tokens=(3,) * 9)
    with pytest.raises(EngineError, match="exceed the 10") as caught:
        engine.examine([longer], proof=ProofRecipe(), temperature=1.0)
    assert not isinstance(caught.value, SampleUnfit)
    beyond = replace(sample, completion_tokens=(3,) * 10_000)
    with pytest.raises(SampleUnfit, match="exceed the context"):
        engine.examine([beyond], proof=ProofRecipe(), temperature=1.0)


def test_weights_and_samples_share_the_memory(policy_folder: Path) -> None:
    roomy, narrow = TransformersEngine(), TransformersEngine(room=Room(memory_share=1e-9))
    for engine, rows in ((roomy, 6), (narrow, 1)):
        engine.load_policy(policy_folder, PolicyVersion(0))
        assert engine._rows_for(6, 6).room() == rows


def test_engine_without_policy_refuses() -> None:
    with pytest.raises(EngineError, match="no policy is loaded"):
        TransformersEngine().generate([], proof=PROOF)


def changed_copy(folder: Path, target: Path, factor: float) -> Path:
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    scaled = {name: tensor * factor for name, tensor in weights.items()}
    save_file(scaled, target / "model.safetensors", metadata={"format": "pt"})
    return target


def alone(engine: TransformersEngine) -> Recomputed:
    return engine.recompute([((1, 2, 3), (4, 5))])[0]


def test_next_version_is_swapped_in_place(
    engine: TransformersEngine, policy_folder: Path, tmp_path: Path
) -> None:
    folder = changed_copy(policy_folder, tmp_path / "next", 1.1)
    before = engine.model
    engine.load_policy(folder, PolicyVersion(1))
    fresh = TransformersEngine()
    fresh.load_policy(folder, PolicyVersion(1))
    assert engine.model is before
    assert engine.policy_version == 1
    assert (alone(engine).logits_TV == alone(fresh).logits_TV).all()


def test_list_of_problems_set_aside_is_the_loaded_folder_s(
    engine: TransformersEngine, policy_folder: Path, tmp_path: Path
) -> None:
    """The list comes and goes with versions, and does not prevent swapping weights."""
    before = engine.model
    assert engine.set_aside == SetAside()
    listed = changed_copy(policy_folder, tmp_path / "listed", 1.1)
    (listed / FILE_NAME).write_bytes(b"\x05")
    engine.load_policy(listed, PolicyVersion(1))
    assert engine.set_aside == SetAside(b"\x05")
    engine.load_policy(policy_folder, PolicyVersion(2))
    assert engine.set_aside == SetAside()
    assert engine.model is before
    with pytest.raises(EngineError, match="no policy is loaded"):
        _ = TransformersEngine().set_aside


def test_list_larger_than_any_task_set_is_read_no_further(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(bytes(MAX_BYTES + 100))
    assert len(set_aside_in(tmp_path).bits) == MAX_BYTES + 1
    assert set_aside_in(tmp_path / "nowhere") == SetAside()


def test_tied_weights_stay_tied_after_a_swap(
    engine: TransformersEngine, policy_folder: Path, tmp_path: Path
) -> None:
    engine.load_policy(changed_copy(policy_folder, tmp_path / "next", 0.5), PolicyVersion(1))
    model = engine.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_other_configuration_is_loaded_anew(
    engine: TransformersEngine, policy_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "other")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
    before, logits = engine.model, alone(engine).logits_TV
    engine.load_policy(folder, PolicyVersion(1))
    assert engine.model is not before
    assert not np.allclose(alone(engine).logits_TV, logits)


def break_weights(folder: Path, how: str) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    if how == "missing":
        del weights[name]
    elif how == "unexpected":
        weights["model.layers.7.extra"] = torch.zeros(3)
    elif how == "mismatched":
        weights[name] = torch.zeros(3, 3)
    save_file(weights, path, metadata={"format": "pt"})
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("how", ["missing", "unexpected", "mismatched", "truncated"])
@pytest.mark.parametrize("is_first", [True, False])
def test_damaged_weights_are_refused_and_nothing_stays_loaded(
    policy_folder: Path, tmp_path: Path, how: str, is_first: bool
) -> None:
    engine = TransformersEngine()
    if not is_first:
        engine.load_policy(policy_folder, PolicyVersion(0))
    folder = shutil.copytree(policy_folder, tmp_path / "broken")
    break_weights(folder, how)
    with pytest.raises(EngineError):
        engine.load_policy(folder, PolicyVersion(1))
    assert engine.policy_version is None
    with pytest.raises(EngineError, match="no policy is loaded"):
        engine.prove([((1,), (2,))], proof=PROOF)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_incomplete_folder_is_refused(policy_folder: Path, tmp_path: Path, missing: str) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "incomplete")
    (folder / missing).unlink()
    with pytest.raises(EngineError, match="does not load"):
        TransformersEngine().load_policy(folder, PolicyVersion(0))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        ("config.json", {"hidden_size": "64"}),
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"rope_parameters": "x"}),
        ("config.json", {"eos_token_id": "x"}),
        ("config.json", []),
        ("tokenizer_config.json", []),
    ],
)
def test_settings_that_libraries_dislike_are_refused(
    policy_folder: Path, tmp_path: Path, name: str, settings: dict[str, object] | list[object]
) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "odd")
    known = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**known, **settings} if settings else settings))
    engine = TransformersEngine()
    with pytest.raises(EngineError, match=r"does not load|is unusable"):
        engine.load_policy(folder, PolicyVersion(0))
    assert engine.policy_version is None


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no policy folder"):
        TransformersEngine().load_policy(tmp_path / "nowhere", PolicyVersion(0))


def test_policy_that_computes_nan_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    engine = TransformersEngine()
    engine.load_policy(
        changed_copy(policy_folder, tmp_path / "nan", float("nan")), PolicyVersion(0)
    )
    with pytest.raises(EngineError, match="computes nonsense"):
        engine.generate([Request((1, 2), 1, 1.0, 3)], proof=PROOF)
    with pytest.raises(EngineError, match="computes nonsense"):
        engine.prove([((1, 2), (3,))], proof=PROOF)
    # For a stranger's sample the engine cannot know whose fault it is.
    sample = Sample((1, 2), (3,), 1, build_proofs(np.ones((1, 64), np.float32)))
    with pytest.raises(ProofError, match="NaN"):
        engine.examine([sample], proof=PROOF, temperature=1.0)


def test_untied_head_is_supported(tmp_path: Path) -> None:
    folder = build_policy(tmp_path / "untied", training_steps=0, tied=False)
    engine = TransformersEngine()
    engine.load_policy(folder, PolicyVersion(0))
    engine.load_policy(folder, PolicyVersion(1))
    assert engine.policy_version == 1


def test_failure_inside_the_model_is_an_engine_error(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(**_arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.model, "forward", explode)
    with pytest.raises(EngineError, match="inference failed: out of memory"):
        engine.prove([((1,), (2,))], proof=PROOF)


def test_lack_of_memory_for_proofs_ends_one_call(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_chunks: object, **_sizes: object) -> None:
        raise MemoryError("no room for a chunk")

    asked = requests(engine, count=4, limit=8)
    with monkeypatch.context() as short:
        short.setattr(incremental, "build_proofs_many", fail)
        with pytest.raises(EngineError, match="inference failed: no room for a chunk"):
            engine.generate(asked, proof=PROOF)
    assert len(engine.generate(asked, proof=PROOF)) == 4


def test_model_without_a_head_is_refused() -> None:
    class Encoder(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(EngineError, match="Encoder is not a causal language model"):
        require_supported(Encoder())


def test_policy_files_never_run_code_or_unpickle(policy_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "pickled")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(EngineError, match="does not load"):
        TransformersEngine().load_policy(folder, PolicyVersion(0))


def test_generation_and_loading_exclude_each_other(
    engine: TransformersEngine, policy_folder: Path
) -> None:
    asked = requests(engine, count=64, limit=40)
    expected = engine.generate(asked, proof=PROOF)
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(engine.generate, asked, proof=PROOF) for _ in range(4)]
        loads = [pool.submit(engine.load_policy, policy_folder, PolicyVersion(i)) for i in range(4)]
        assert all(m.result() == expected for m in made)
        assert [load.result() for load in loads] == [None] * 4


def test_engines_that_load_at_the_same_time_load_the_same(policy_folder: Path) -> None:
    engines = [TransformersEngine("float32") for _ in range(6)]
    with ThreadPoolExecutor(len(engines)) as pool:
        loads = [pool.submit(e.load_policy, policy_folder, PolicyVersion(0)) for e in engines]
        assert [load.result() for load in loads] == [None] * len(engines)
    asked = requests(engines[0])
    first, *others = [engine.generate(asked, proof=PROOF) for engine in engines]
    assert all(made == first for made in others)
