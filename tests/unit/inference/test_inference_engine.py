"""The transformers engine against transformers itself, and against its own work."""

import json
import random
import shutil
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_policy import build_policy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from muster.inference import transformers_engine
from muster.inference.engine import (
    Request,
    Room,
    Sample,
    set_aside_in,
)
from muster.inference.examining import Recomputed
from muster.inference.policy_files import (
    LoadedPolicy,
    load_folder,
    read_tokenizer,
    require_supported,
)
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import EngineError, ProofError, SampleUnfit
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe
from muster.protocol.set_aside import FILE_NAME, MAX_BYTES, SetAside
from muster.toploc import build_proofs, incremental

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


def test_missing_folder_is_no_folder_without_a_list(tmp_path: Path) -> None:
    assert set_aside_in(tmp_path) == SetAside()
    with pytest.raises(EngineError, match="no policy folder at"):
        set_aside_in(tmp_path / "nowhere")


def test_tied_weights_stay_tied_after_a_swap(
    engine: TransformersEngine, policy_folder: Path, tmp_path: Path
) -> None:
    engine.load_policy(changed_copy(policy_folder, tmp_path / "next", 0.5), PolicyVersion(1))
    model = engine.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("is_usable", [True, False])
def test_former_model_makes_room_before_another_is_loaded(
    engine: TransformersEngine,
    sibling_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_usable: bool,
) -> None:
    folder = shutil.copytree(sibling_folder, tmp_path / "other")
    other = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 0.1}
    (folder / "config.json").write_text(json.dumps(other))
    if not is_usable:
        (folder / "model.safetensors").write_bytes(b"")
    former, made_room = weakref.ref(engine.model), []

    def load(*asked: Any, **options: Any) -> LoadedPolicy:
        made_room.append(former() is None)
        return load_folder(*asked, **options)

    monkeypatch.setattr(transformers_engine, "load_folder", load)
    with nullcontext() if is_usable else pytest.raises(EngineError, match="does not load"):
        engine.load_policy(folder, PolicyVersion(1))
    assert made_room == [True]
    assert engine.policy_version == (1 if is_usable else None)


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


OTHER_READINGS = [
    "adapter_config.json",
    "adapter_model.safetensors",
    "tekken.json",
    "tokenizer.model.v3",
    "params.json",
    "consolidated.safetensors",
    "hf_quant_config.json",
]


@pytest.mark.parametrize("name", OTHER_READINGS)
def test_folder_that_packages_would_load_otherwise_is_refused(
    policy_folder: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "two models")
    for harmless in (f"about-{name}.md", "adapter_config.peft", "adapter_model.peft"):
        (folder / harmless).write_text("a file that no package reads")
    TransformersEngine().load_policy(folder, PolicyVersion(0))
    (folder / name).write_text("{}")
    with pytest.raises(EngineError, match=f"holds {name}"):
        TransformersEngine().load_policy(folder, PolicyVersion(0))
    with pytest.raises(EngineError, match=f"holds {name}"):
        read_tokenizer(folder)


INDEX = "model.safetensors.index.json"


def in_shards(folder: Path, target: Path) -> tuple[Path, dict[str, str]]:
    """Return a copy of a folder with its weights in two files, and the index's map."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    named = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(named.values()):
        held = {name: tensor for name, tensor in weights.items() if named[name] == file}
        save_file(held, target / file, metadata={"format": "pt"})
    write_index(target, named)
    return target, named


def write_index(folder: Path, named: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))


def test_swapped_weights_are_those_that_a_new_engine_loads(
    policy_folder: Path, sibling_folder: Path, tmp_path: Path
) -> None:
    sharded, _ = in_shards(policy_folder, tmp_path / "base")
    following, _ = in_shards(sibling_folder, tmp_path / "next")
    for folder in (following, sibling_folder):
        running, fresh = TransformersEngine(), TransformersEngine()
        running.load_policy(sharded, PolicyVersion(0))
        before = running.model
        running.load_policy(folder, PolicyVersion(1))
        fresh.load_policy(folder, PolicyVersion(1))
        assert running.model is before
        assert (alone(running).logits_TV == alone(fresh).logits_TV).all()


def point_elsewhere(folder: Path, named: dict[str, str]) -> None:
    write_index(folder, dict.fromkeys(named, "../base/model-0.safetensors"))


def point_at_a_pickle(folder: Path, named: dict[str, str]) -> None:
    torch.save(load_file(folder / "model-0.safetensors"), folder / "a.dat")
    write_index(folder, named | {next(iter(named)): "a.dat"})


def point_at_the_other(folder: Path, named: dict[str, str]) -> None:
    write_index(folder, named | {next(iter(named)): "model-1.safetensors"})


def leave_out_a_name(folder: Path, named: dict[str, str]) -> None:
    write_index(folder, dict(list(named.items())[1:]))


def name_one_more(folder: Path, named: dict[str, str]) -> None:
    write_index(folder, {**named, "more": "model-0.safetensors"})


def hold_a_tensor_twice(folder: Path, _named: dict[str, str]) -> None:
    shutil.copy(folder / "model-0.safetensors", folder / "model-2.safetensors")


def hold_a_whole_one_too(folder: Path, named: dict[str, str]) -> None:
    save_file({"more": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    write_index(folder, {**named, "more": "model.safetensors"})


def have_no_index(folder: Path, _named: dict[str, str]) -> None:
    (folder / INDEX).unlink()


def name_no_map(folder: Path, _named: dict[str, str]) -> None:
    write_index(folder, 5)


@pytest.mark.parametrize(
    "spoil",
    [
        point_elsewhere,
        point_at_a_pickle,
        point_at_the_other,
        leave_out_a_name,
        name_one_more,
        hold_a_tensor_twice,
        hold_a_whole_one_too,
        have_no_index,
        name_no_map,
    ],
)
def test_weights_that_a_new_engine_would_read_otherwise_are_refused(
    policy_folder: Path, tmp_path: Path, spoil: Callable[[Path, dict[str, str]], None]
) -> None:
    base, _ = in_shards(policy_folder, tmp_path / "base")
    spoilt, named = in_shards(policy_folder, tmp_path / "next")
    spoil(spoilt, named)
    running = TransformersEngine()
    running.load_policy(base, PolicyVersion(0))
    for engine in (running, TransformersEngine()):
        with pytest.raises(EngineError, match="does not load"):
            engine.load_policy(spoilt, PolicyVersion(1))
        assert engine.policy_version is None


OTHER_SETTINGS = {
    "transformers_weights": "b.safetensors",
    "configuration_files": ["config.1.0.0.json"],
    "quantization_config": {"quant_method": "fp8"},
    "compression_config": {},
    "fusion_config": {"x": True},
    "attn_implementation": "kernels-community/flash-attn2",
    "_attn_implementation": "flash_attention_2",
    "experts_implementation": "grouped_mm",
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
@pytest.mark.parametrize("nested", [False, True])
def test_settings_that_machines_follow_differently_are_refused(
    policy_folder: Path, tmp_path: Path, name: str, nested: bool
) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    known = json.loads((folder / "config.json").read_text())
    set_too = {name: OTHER_SETTINGS[name]}
    set_too = {"text_config": [set_too]} if nested else set_too
    (folder / "config.json").write_text(json.dumps(known | set_too))
    for load in (TransformersEngine().load_policy, lambda folder, _version: read_tokenizer(folder)):
        with pytest.raises(EngineError, match=rf"config\.json sets {name}"):
            load(folder, PolicyVersion(0))


def test_settings_that_choose_what_every_machine_has_are_accepted(
    policy_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    known = json.loads((folder / "config.json").read_text())
    sure = {"quantization_config": None, "experts_implementation": None}
    for kernel in ("eager", "sdpa"):
        text = json.dumps({**known, **sure, "attn_implementation": kernel})
        (folder / "config.json").write_text(text)
        engine = TransformersEngine()
        engine.load_policy(folder, PolicyVersion(0))
        assert engine.model.config._attn_implementation == kernel


def test_tokenizer_that_depends_on_the_version_of_transformers_is_refused(
    policy_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    settings = folder / "tokenizer_config.json"
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps({**known, "fast_tokenizer_files": ["tokenizer.4.0.0.json"]}))
    with pytest.raises(EngineError, match="sets fast_tokenizer_files"):
        read_tokenizer(folder)


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "num_layers", "decoder_layers"])
def test_more_layers_than_the_weights_have_are_refused_unbuilt(
    policy_folder: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, name: 10**10}))
    with pytest.raises(EngineError, match=f"sets {name} to 10000000000, its weights have"):
        TransformersEngine().load_policy(folder, PolicyVersion(0))


def test_adapter_beside_the_weights_changes_no_engine(policy_folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    folder = shutil.copytree(policy_folder, tmp_path / "adapted")
    peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")).save_pretrained(folder)
    # What transformers does by itself where peft is installed.
    assert AutoModelForCausalLM.from_pretrained(folder)._hf_peft_config_loaded
    with pytest.raises(EngineError, match=r"holds adapter_config\.json"):
        TransformersEngine().load_policy(folder, PolicyVersion(0))


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
