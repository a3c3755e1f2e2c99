"""Training an adapter: moved weights, published files, and resumption."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from practice import Practice, practice_recipe
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from muster.inference import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import ConfigError, StorageError
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import AdapterRecipe, Recipe
from muster.protocol.rollouts import Rollout
from muster.shardcast.adapter import CONFIG_NAME, WEIGHTS_NAME
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.logprob import head_of, token_logprobs
from muster.trainer.learn.packing import TrainingSample, pack
from muster.trainer.learn.persistence import adapter_off, adapter_weights, is_adapted, merged_in
from muster.trainer.publish import policies

ONE, TWO = PolicyVersion(1), PolicyVersion(2)


def adapter_recipe(**training: object) -> Recipe:
    adapter = AdapterRecipe(rank=4, alpha=8.0)
    recipe = practice_recipe(learning_rate=3e-3, **training)
    return recipe.model_copy(update={"adapter": adapter})


class AdapterPractice(Practice):
    """A policy that learns as an adapter."""

    def __init__(self, model: Path, folder: Path, recipe: Recipe) -> None:
        self.model_folder = model
        super().__init__(model, folder, recipe)
        self.shelf = policies.AdapterShelf(folder, recipe.adapter)

    def rollouts(self, version: PolicyVersion) -> list[list[Rollout]]:
        """Reward completions that begin with an odd token: the model has hardly learnt its task."""
        groups = super().rollouts(version)
        return [
            [replace(row, task_reward=float(row.completion_tokens[0] % 2)) for row in group]
            for group in groups
        ]


def logits(model: Any) -> Tensor:
    """Return a model's results for a few tokens that are not packed."""
    packed = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.tensor([[3, 4, 5, 6, 13]])).logits
    model.set_attn_implementation(packed)
    return found


@pytest.fixture(scope="module")
def practice(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterPractice:
    """Two steps of an adapter, with versions 0 to 2 on the shelf."""
    made = AdapterPractice(model_folder, tmp_path_factory.mktemp("shelf"), adapter_recipe())
    for _ in made.steps(2):
        pass
    # The steps delete versions that they no longer need.
    made.shelf.write(ONE, {n: w / 2 for n, w in made.learner.weights().items()})
    return made


def test_only_the_adapter_is_trained(practice: AdapterPractice) -> None:
    base = practice.shelf.weights(policies.BASE)
    model = practice.learner.model
    kept = {n.replace(".base_layer.", "."): value for n, value in model.state_dict().items()}
    assert all(torch.equal(kept[name], value) for name, value in base.items())
    up = {n: w for n, w in practice.learner.weights().items() if "lora_B" in n}
    assert all(weight.any() for weight in up.values())
    assert {weight.dtype for weight in practice.learner.weights().values()} == {torch.float32}


def test_every_linear_layer_but_the_head_has_an_update(practice: AdapterPractice) -> None:
    layers = {n.split(".")[-3] for n in practice.learner.weights()}
    assert layers == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_adapter_learns_the_task(model_folder: Path, tmp_path: Path) -> None:
    practice = AdapterPractice(model_folder, tmp_path, adapter_recipe())
    rewards = [figures.reward for figures in practice.steps(8)]
    assert rewards[-1] > rewards[0] + 0.1


def test_same_recipe_begins_with_the_same_adapter(model_folder: Path) -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(Learner(model_folder, adapter_recipe(), published=lambda _: None).weights())
    assert all(torch.equal(made[0][name], weight) for name, weight in made[1].items())
    down = [weight for name, weight in made[0].items() if "lora_A" in name]
    assert not torch.equal(down[0], down[7])


# ----------------------------------------------------------------------------------- published


def test_published_weights_are_peft_s_own_merge(practice: AdapterPractice, tmp_path: Path) -> None:
    import peft

    folder = practice.shelf.path(TWO)
    shutil.copyfile(folder / CONFIG_NAME, tmp_path / "adapter_config.json")
    shutil.copyfile(folder / WEIGHTS_NAME, tmp_path / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(practice.model_folder, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    for name, weight in practice.shelf.weights(TWO).items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-5, atol=1e-7)


def test_published_policy_computes_what_the_learner_does(practice: AdapterPractice) -> None:
    model = AutoModelForCausalLM.from_pretrained(practice.shelf.path(TWO), dtype=torch.float32)
    torch.testing.assert_close(logits(practice.learner.model), logits(model), rtol=1e-4, atol=1e-5)


def test_engine_takes_the_next_version_in_place(practice: AdapterPractice) -> None:
    engine = TransformersEngine("float32")
    request = [Request((3, 4, 5, 6, 13), 7, 1.0, 6)]
    engine.load_policy(practice.shelf.path(ONE), ONE)
    model = engine.model
    engine.load_policy(practice.shelf.path(TWO), TWO)
    assert engine.model is model
    after = engine.generate(request, proof=adapter_recipe().proof)
    fresh = TransformersEngine("float32")
    fresh.load_policy(practice.shelf.path(TWO), TWO)
    assert fresh.generate(request, proof=adapter_recipe().proof) == after


def test_weights_in_memory_are_those_on_disk(practice: AdapterPractice) -> None:
    stored = load_file(practice.shelf.path(TWO) / policies.WEIGHTS_FILE)
    assert all(torch.equal(practice.shelf.weights(TWO)[n], w) for n, w in stored.items())


def test_base_in_bfloat16_stays_in_bfloat16(
    practice: AdapterPractice, model_folder: Path, tmp_path: Path
) -> None:
    short = tmp_path / "model"
    shutil.copytree(model_folder, short)
    weights = {n: w.bfloat16() for n, w in load_file(model_folder / policies.WEIGHTS_FILE).items()}
    save_file(weights, short / policies.WEIGHTS_FILE, metadata={"format": "pt"})
    shelf = policies.AdapterShelf(tmp_path / "shelf", adapter_recipe().adapter)
    shelf.adopt(short)
    shelf.write(ONE, practice.learner.weights())
    assert {weight.dtype for weight in shelf.weights(ONE).values()} == {torch.bfloat16}


# --------------------------------------------------------------------------------- the learner


def test_reference_is_the_base_without_a_second_model(practice: AdapterPractice) -> None:
    model = practice.learner.model
    base = AutoModelForCausalLM.from_pretrained(practice.model_folder, dtype=torch.float32)
    trained = logits(model)
    with adapter_off(model):
        reference = logits(model)
    torch.testing.assert_close(reference, logits(base), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(model), trained)
    assert not torch.allclose(trained, reference, atol=1e-3)


def test_adapter_is_on_again_after_a_failure(practice: AdapterPractice) -> None:
    model = practice.learner.model
    trained = logits(model)

    def fails() -> None:
        with adapter_off(model):
            raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        fails()
    assert torch.equal(logits(model), trained)


def test_kl_coefficient_moves_the_adapter(model_folder: Path, tmp_path: Path) -> None:
    ends = []
    for number, coefficient in enumerate((0.0, 0.5)):
        recipe = adapter_recipe(kl_coefficient=coefficient)
        practice = AdapterPractice(model_folder, tmp_path / str(number), recipe)
        figures = list(practice.steps(2))
        ends.append((practice.learner.weights(), figures[-1].kl))
    assert ends[1][1] > 0
    assert any(not torch.equal(ends[0][0][name], w) for name, w in ends[1][0].items())


def test_restored_learner_takes_the_same_step_bit_by_bit(
    model_folder: Path, tmp_path: Path
) -> None:
    practice = AdapterPractice(model_folder, tmp_path, adapter_recipe())
    assert len(list(practice.steps(1))) == 1
    saved = {name: value.clone() for name, value in practice.learner.state().items()}
    # The adapter's two moments and itself: nothing of the base is saved.
    names = {name.split(".", 1)[0] for name in saved}
    assert names == {"model", "optimizer", "random"}
    assert not any("base_layer" in name or "norm" in name for name in saved)
    engine = TransformersEngine("float32")
    engine.load_policy(practice.shelf.path(policies.BASE), policies.BASE)
    practice._engine = engine
    groups = practice.rollouts(policies.BASE)
    practice.learner.step(Step(2), groups)
    again = Learner(model_folder, adapter_recipe(), published=practice.shelf.weights)
    again.restore(saved)
    again.step(Step(2), groups)
    for name, weight in practice.learner.weights().items():
        assert torch.equal(weight, again.weights()[name]), name


def test_base_serves_all_versions_as_workers_sampled_with_them(practice: AdapterPractice) -> None:
    passes, own = practice.learner._passes, practice.learner.weights()
    own = {name: weight.clone() for name, weight in own.items()}
    samples = [
        TrainingSample((3, 4), (5, 6, 7, 1), 1.0, version) for version in (policies.BASE, ONE, TWO)
    ]
    (known,) = passes.read_policies([samples], with_reference=True)
    for sample, found in zip(samples, known, strict=True):
        folder = practice.shelf.path(PolicyVersion(sample.policy_version))
        model = AutoModelForCausalLM.from_pretrained(folder)
        (batch,) = pack([sample], 100, is_padded=True)
        with torch.no_grad():
            expected, _ = token_logprobs(batch.hidden(model), head_of(model), batch.targets_N, 1.0)
        assert found.behaviour is not None
        torch.testing.assert_close(found.behaviour, expected, rtol=1e-5, atol=1e-5)
    # Version 0's adapter adds nothing.
    for found in known:
        torch.testing.assert_close(found.reference, known[0].behaviour, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(own[n], w) for n, w in practice.learner.weights().items())
    with pytest.raises(ValueError, match="lacks weights"), merged_in(practice.learner.model, {}):
        pass


def test_bfloat16_computes_with_adapters_in_float32(model_folder: Path, tmp_path: Path) -> None:
    recipe = adapter_recipe()
    practice = AdapterPractice(model_folder, tmp_path, recipe)
    practice.learner = Learner(
        model_folder, recipe, published=practice.shelf.weights, compute_dtype="bfloat16"
    )
    (figures,) = practice.steps(1)
    model = practice.learner.model
    kinds = {p.requires_grad: p.dtype for p in model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert figures.grad_norm > 0


def test_learner_that_starts_again_forgets_its_steps(model_folder: Path, tmp_path: Path) -> None:
    practice = AdapterPractice(model_folder, tmp_path, adapter_recipe())
    learner = practice.learner
    started = {name: weight.clone() for name, weight in learner.weights().items()}
    list(practice.steps(1))
    assert not all(torch.equal(w, started[name]) for name, w in learner.weights().items())
    learner.start_again(practice.shelf.weights(policies.BASE))
    assert all(torch.equal(w, started[name]) for name, w in learner.weights().items())
    assert not learner.optimizer.state


def test_without_a_rank_all_weights_are_trained(model_folder: Path, tmp_path: Path) -> None:
    recipe = practice_recipe()
    assert recipe.adapter.rank == 0
    learner = Learner(model_folder, recipe, published=lambda _: None)
    assert not is_adapted(learner.model)
    assert adapter_weights(learner.model) == {}
    assert type(policies.open_shelf(tmp_path, recipe, dtype="float32")) is policies.PolicyShelf


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("no_such_layer",), "do not fit the model"), (("lm_head",), "lm_head cannot be adapted")],
)
def test_layers_that_cannot_be_adapted_are_named(
    model_folder: Path, targets: tuple[str, ...], message: str
) -> None:
    adapter = AdapterRecipe(rank=2, target_modules=targets)
    recipe = practice_recipe().model_copy(update={"adapter": adapter})
    with pytest.raises(ConfigError, match=message):
        Learner(model_folder, recipe, published=lambda _: None)


# ------------------------------------------------------------------------- going on from a version


def test_learner_goes_on_from_a_published_adapter(practice: AdapterPractice) -> None:
    learned = practice.shelf.learned(TWO)
    learner = Learner(practice.model_folder, adapter_recipe(), published=practice.shelf.weights)
    learner.load(learned)
    own = practice.learner.weights()
    assert all(torch.equal(weight, own[name]) for name, weight in learner.weights().items())


def _of_another_base(folder: Path) -> None:
    value = json.loads((folder / CONFIG_NAME).read_text())
    value["base_model_name_or_path"] = "0x" + "00" * 32
    (folder / CONFIG_NAME).write_text(json.dumps(value))


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    del tensors[min(tensors)]
    save_file(tensors, folder / WEIGHTS_NAME)


def _of_another_rank(folder: Path) -> None:
    tensors: dict[str, Tensor] = load_file(folder / WEIGHTS_NAME)
    name = min(tensors)
    tensors[name] = torch.cat([tensors[name], tensors[name]])
    save_file(tensors, folder / WEIGHTS_NAME)


def _with_another_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    save_file({**tensors, "lm_head.weight": torch.zeros(2, 2)}, folder / WEIGHTS_NAME)


def _without_its_description(folder: Path) -> None:
    (folder / CONFIG_NAME).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_of_another_base, "is an adapter of base 0x0000"),
        (_without_a_tensor, "half an update"),
        (_of_another_rank, "the rank is 4"),
        (_with_another_tensor, "unexpected tensor"),
        (_without_its_description, "has a file adapter_config.peft"),
    ],
)
def test_adapter_that_is_not_this_run_s_is_not_gone_on_from(
    practice: AdapterPractice, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    shelf = policies.AdapterShelf(tmp_path, adapter_recipe().adapter)
    shutil.copytree(practice.shelf.path(policies.BASE), shelf.path(policies.BASE))
    shutil.copytree(practice.shelf.path(TWO), shelf.path(TWO))
    assert shelf.learned(TWO).keys() == practice.learner.weights().keys()
    damage(shelf.path(TWO))
    with pytest.raises(StorageError, match=message):
        shelf.learned(TWO)
