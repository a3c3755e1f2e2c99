"""A model's operations equal torch's count; time is counted for the right phase."""

from pathlib import Path

import pytest
import torch
from practice import practice_recipe
from torch.utils.flop_counter import FlopCounterMode
from trainer_fakes import make_recipe, make_rollouts
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config, Qwen3MoeConfig

from muster.protocol.ids import Step
from muster.protocol.recipe import AdapterRecipe
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.packing import TrainingSample, work_of
from muster.trainer.learn.passes import Passes
from muster.trainer.learn.persistence import add_adapter
from muster.trainer.measure.figures import PHASES, Sums
from muster.trainer.measure.throughput import Stopwatch, cost_of, measure_peak_flops
from muster.trainer.publish.policies import BASE, PolicyShelf

SHAPES = {
    "qwen3": Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2,
    ),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "experts": Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=48, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1,
    ),
}  # fmt: skip
SAMPLE = TrainingSample(tuple(range(2, 9)), tuple(range(10, 25)), 1.0, 0)


def _counted(model: torch.nn.Module, *, with_gradient: bool) -> tuple[float, float]:
    """Return the operations that torch counts for one sample, and ours."""
    passes = Passes(model, lambda _: None, temperature=1.0, micro_batch_tokens=99, is_packed=False)
    (batch,) = passes.pack([SAMPLE])
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(with_gradient):
        logp_N, _ = passes.logprobs(batch)
        if with_gradient:
            logp_N.sum().backward()
    # Without a kernel that skips later positions, every position is compared with every other.
    work = batch.work._replace(pairs=(SAMPLE.length - 1) ** 2)
    return counter.get_total_flops(), cost_of(model).of(work, with_gradient=with_gradient)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_operations_are_those_that_torch_counts(shape: str) -> None:
    # torch's counter does not know the other kernels of experts.
    model = AutoModelForCausalLM.from_config(
        SHAPES[shape], attn_implementation="eager", experts_implementation="eager"
    )
    counted, own = _counted(model, with_gradient=False)
    assert own == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_gradient_takes_twice_a_forward_pass_but_for_what_is_frozen(rank: int) -> None:
    # With so many blocks, the gradient that the first one does not compute hardly matters.
    config = Qwen3Config(
        **{**SHAPES["qwen3"].to_dict(), "num_hidden_layers": 8, "layer_types": None}
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if rank:
        add_adapter(model, AdapterRecipe(rank=rank))
    counted, own = _counted(model, with_gradient=True)
    # The logits are made a second time here: computing again does not count.
    again = 2 * model.get_output_embeddings().weight.numel() * SAMPLE.sampled
    assert own == pytest.approx(counted - again, rel=0.03)


def test_a_shared_prompt_counts_once_and_a_position_meets_those_before_it() -> None:
    work = work_of([SAMPLE, SAMPLE])
    prompt, own = 7, 14
    pairs = prompt * (prompt + 1) // 2 + 2 * (own * prompt + own * (own + 1) // 2)
    assert work == (prompt + 2 * own, pairs, 30)


def test_the_peak_is_above_what_any_pass_reaches(tmp_path: Path, model_folder: Path) -> None:
    shelf = PolicyShelf(tmp_path)
    shelf.adopt(model_folder)
    recipe = practice_recipe(kl_coefficient=0.1)
    learner = Learner(model_folder, recipe, published=lambda _: shelf.weights(BASE))
    groups = [rows[i : i + 4] for rows in [make_rollouts(1, recipe=make_recipe())] for i in (0, 4)]
    learner.step(Step(1), groups)
    figures = learner.step(Step(2), groups)
    assert figures.seconds.keys() == set(PHASES)
    assert all(figures.seconds[phase] > 0 for phase in PHASES)
    passes_s = sum(figures.seconds[p] for p in ("policies_s", "forward_s", "backward_s"))
    assert 0 < figures.flops / passes_s < measure_peak_flops("cpu", "float32")
    assert figures.memory_bytes > 1e6


def test_operations_of_a_step_are_those_of_its_passes(tmp_path: Path, model_folder: Path) -> None:
    shelf = PolicyShelf(tmp_path)
    shelf.adopt(model_folder)
    groups = [rows[i : i + 4] for rows in [make_rollouts(1, recipe=make_recipe())] for i in (0, 4)]
    samples = [
        TrainingSample(r.prompt_tokens, r.completion_tokens, 0.0, 0) for g in groups for r in g
    ]
    learner = Learner(model_folder, make_recipe(), published=lambda _: shelf.weights(BASE))
    cost, work = cost_of(learner.model), work_of(samples)
    gradient = cost.of(work, with_gradient=True)
    assert learner.step(Step(1), groups).flops == pytest.approx(gradient)
    # Weights have moved: the version that sampled takes a pass of its own.
    forward = cost.of(work, with_gradient=False)
    assert learner.step(Step(2), groups).flops == pytest.approx(gradient + forward)


def test_time_goes_to_the_phase_that_took_it() -> None:
    ticks = iter([1.0, 3.0, 10.0, 10.5])
    watch, sums = Stopwatch(torch.device("cpu"), lambda: next(ticks)), Sums()
    with watch.during(sums, "forward_s"):
        pass
    with watch.during(sums, "forward_s"):
        pass
    assert (sums.forward_s, sums.backward_s) == (2.5, 0.0)
