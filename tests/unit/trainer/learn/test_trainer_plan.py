"""The memory plan: its choices and refusals, and its agreement with measured peaks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from measured_peak import GROUP, GROUPS, groups, kept_bytes, peak_bytes, recipe
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from muster.app.cli import muster
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step
from muster.protocol.sft import SftRecipe
from muster.trainer.learn.attention import MASKED
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.memory_plan import (
    PROCESS,
    PROMPT_TOKENS,
    SAMPLES,
    SAVING,
    TOKEN_BYTES,
    MemoryChoices,
    MemoryPlan,
    MemoryShort,
    Planner,
)
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.learn.parallel import join
from muster.trainer.learn.passes import Passes
from muster.trainer.learn.recompute import Lane, Recompute
from muster.trainer.learn.rehearsal import Rehearsal
from muster.trainer.learn.sft_learner import SftLearner
from muster.trainer.publish.policies import BASE, PolicyShelf
from muster.trainer.recover.checkpoint import Checkpoints, Identity, TrainerState
from muster.trainer.sites.site_learner import (
    Mean,
    OuterStep,
    SiteLearner,
    byte_count,
    byte_size,
    joined,
)
from muster.trainer.stream.reader import Cursor

SMALL = {
    "vocab_size": 16_000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
"""A model of 8M parameters."""


@pytest.fixture(autouse=True)
def _process_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as in a new trainer: many tests have enlarged this process."""
    monkeypatch.setattr("muster.trainer.learn.memory_plan._process_bytes", lambda _: 450e6)


def config(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SMALL, **changes})


@cache
def rehearsal() -> Rehearsal:
    """The rehearsal that all plans of the model share."""
    return Rehearsal(config(), recipe(512, 0).adapter, "float32")


def planner(memory_gb: float | None, **choices: Any) -> Planner:
    given = MemoryChoices(memory_gb=memory_gb, **choices)
    return Planner(config(), recipe(512, 0), given, rehearsal())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(path)
    return path


TINY = {**SMALL, "vocab_size": 2_000, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
LENGTH = 96
"""Tokens of a sample of the measured steps."""
SETTINGS: dict[str, dict[str, Any]] = {
    "all kept": {"recompute": "none"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "small micro-batches, full": {"recompute": "full", "micro_batch_tokens": 200},
    "untied": {"recompute": "none", "tie_word_embeddings": False},
    "short, full": {"recompute": "full", "compute_dtype": "bfloat16"},
    "adapter, full": {"recompute": "full", "rank": 4},
    "adapter, short": {"recompute": "none", "rank": 4, "compute_dtype": "bfloat16"},
}
QUICK = ("all kept", "full", "adapter, short")
"""Settings that are measured every time."""
ASIDE = {PROCESS, SAVING, SAMPLES, "kept by libraries", "log-probabilities"}
"""Parts of a plan that are not tensors of a training step."""


def planned_bytes(plan: MemoryPlan) -> float:
    """Return the peak of the tensors of a training step."""
    parts = [part for part in plan.parts if part.name not in ASIDE]
    return max(sum(p.reading for p in parts), sum(p.training for p in parts))


def beside_samples(plan: MemoryPlan) -> float:
    """Return the bytes of the host's memory that all but a step's samples take."""
    return sum(part.training for part in plan.on_host if part.name != SAMPLES)


def shelf_of(config: Qwen3Config, folder: Path) -> PolicyShelf:
    """Return a shelf whose base model has random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    shelf = PolicyShelf(folder / "shelf")
    shelf.adopt(folder / "model")
    return shelf


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SETTINGS],
)
def test_peak_is_the_planned_one_within_a_tenth(tmp_path: Path, name: str) -> None:
    wanted = dict(SETTINGS[name])
    made = recipe(LENGTH, wanted.pop("rank", 0))
    tied = wanted.pop("tie_word_embeddings", True)
    own = Qwen3Config(**{**TINY, "max_position_embeddings": LENGTH, "tie_word_embeddings": tied})
    shelf = shelf_of(own, tmp_path)
    choices = MemoryChoices(memory_gb=1000.0, **{"micro_batch_tokens": 800, **wanted})
    plan = Planner(own, made, choices).plan()
    learner = Learner(
        shelf.path(BASE),
        made,
        published=lambda _: shelf.weights(BASE),
        micro_batch_tokens=plan.micro_batch_tokens,
        recomputed=plan.recompute,
        compute_dtype=choices.compute_dtype,
    )
    learner.step(Step(1), groups(LENGTH))
    measured = kept_bytes(learner) + peak_bytes(lambda: learner.step(Step(2), groups(LENGTH)))
    assert planned_bytes(plan) == pytest.approx(measured, rel=0.1)


RESUMED: dict[str, dict[str, Any]] = {
    "full": {},
    "bfloat16 moments": {"optimizer_state": "bfloat16"},
    "moments in a file": {"offload": True},
}


@pytest.mark.parametrize("name", RESUMED)
def test_resuming_takes_no_more_than_training(tmp_path: Path, name: str) -> None:
    length = 8
    made = recipe(length, 0)
    own = Qwen3Config(**{**TINY, "max_position_embeddings": length})
    shelf = shelf_of(own, tmp_path)
    given = {"micro_batch_tokens": length, "recompute": "full", **RESUMED[name]}
    choices = MemoryChoices(memory_gb=1000.0, **given)
    plan = Planner(own, made, choices).plan()

    def learner() -> Learner:
        return Learner(
            shelf.path(BASE),
            made,
            published=lambda _: shelf.weights(BASE),
            micro_batch_tokens=plan.micro_batch_tokens,
            recomputed=plan.recompute,
            optimizer_state=choices.optimizer_state,
            offload=tmp_path / "offload" if choices.offload else None,
        )

    one, two = learner(), learner()
    one.step(Step(1), groups(length))
    state = TrainerState(PolicyVersion(1), Cursor(), 0, 0)
    checkpoints = Checkpoints(tmp_path / "state", Identity(RunId(1), Hash32(bytes(32)), 1))
    checkpoints.save(state, one.state()).result()

    def restore() -> None:
        two.restore(checkpoints.read(checkpoints.folder_of(PolicyVersion(1)), two))

    for _ in ("resume", "roll back"):
        kept = byte_count([*two.weights().values()]) if choices.offload else kept_bytes(two)
        assert kept + peak_bytes(restore) <= planned_bytes(plan)
    assert all(
        torch.equal(two.state()[name], value)
        for name, value in one.state().items()
        if not name.startswith("random.")
    )
    checkpoints.close()


WINDOWED = {**TINY, "vocab_size": 200, "num_hidden_layers": 2, "max_position_embeddings": 8192}
ROWS: dict[str, tuple[PretrainedConfig, int, Recompute, str]] = {
    "window": (MistralConfig(**WINDOWED, sliding_window=256), 8192, "none", "cpu"),
    "window, again": (MistralConfig(**WINDOWED, sliding_window=256), 8192, "full", "cpu"),
    "a shorter row": (MistralConfig(**WINDOWED, sliding_window=2048), 3000, "full", "cpu"),
    "capped scores": (Gemma2Config(**WINDOWED, sliding_window=256), 4096, "full", "cpu"),
    "no kernel": (Qwen3Config(**WINDOWED), 4096, "full", "cuda"),
}
"""Models whose attention needs masks, and the length of a row."""


@pytest.mark.parametrize("name", ROWS)
def test_masked_attention_takes_what_is_planned(name: str) -> None:
    own, length, recomputed, device = ROWS[name]
    rehearsed = Rehearsal(own, recipe(length, 0).adapter, "float32", device)
    planned = rehearsed.bytes(recomputed, length)
    passes = Passes(
        AutoModelForCausalLM.from_config(own, dtype=torch.float32).train(),
        lambda _: None,
        temperature=1.0,
        micro_batch_tokens=length,
        recomputed=recomputed,
    )
    assert passes.is_packed
    if device == "cuda":
        # As on a GPU in float32, which has no kernel without masks.
        passes._computing.model.set_attn_implementation(MASKED)
    (batch,) = passes.pack([TrainingSample((0,), (1,) * (length - 1), 1.0, 0)])

    def train() -> None:
        total, *_ = passes.objective(batch, lambda logp_R, _h, _rows: logp_R / length)
        total.backward()  # type: ignore[no-untyped-call]  # torch's stub

    train()
    assert planned.training == pytest.approx(peak_bytes(train), rel=0.1)
    with torch.no_grad():
        assert planned.reading == pytest.approx(peak_bytes(lambda: passes.current(batch)), rel=0.1)


class Alone:
    """A meeting and its round: the other sites are gone."""

    rank, members, newcomers, sent_bytes = 0, (0,), (), 0

    def gather(self) -> Alone:
        return self

    def agree(self, round_: Alone, *, trained_on: str | None) -> bool:
        del round_
        return trained_on is not None


@pytest.mark.parametrize("length", [96, 8], ids=["training is the peak", "exchange is the peak"])
def test_site_takes_what_is_planned_within_a_tenth(tmp_path: Path, length: int) -> None:
    made, own = recipe(length, 0), Qwen3Config(**{**TINY, "max_position_embeddings": length})
    shelf = shelf_of(own, tmp_path)
    choices = MemoryChoices(
        memory_gb=1000.0, micro_batch_tokens=2 * length, recompute="full", sites=2
    )
    plan = Planner(own, made, choices).plan()
    learner = Learner(
        shelf.path(BASE),
        made,
        published=lambda _: shelf.weights(BASE),
        micro_batch_tokens=plan.micro_batch_tokens,
        recomputed=plan.recompute,
    )
    alone: Any = Alone()
    checkpoints = Checkpoints(tmp_path / "state", Identity(RunId(1), Hash32(bytes(32)), 1))
    site = SiteLearner(learner, alone, OuterStep(0.7, 0.9), checkpoints, shelf, max_async_level=1)
    site.step(Step(8), groups(length))
    weights = [*learner.weights().values()]
    movement = torch.zeros(byte_size(len(joined(learner.weights(), 1))), dtype=torch.uint8)
    for step in range(1, 8):
        site._history.add(
            PolicyVersion(step), "", Mean([movement]), most_bytes=2 * byte_count(weights)
        )
    kept = kept_bytes(learner) + byte_count([*site._outer.velocity.values()]) + 7 * len(movement)
    measured = kept + peak_bytes(lambda: site.step(Step(8), groups(length)))
    checkpoints.close()
    assert planned_bytes(plan) == pytest.approx(measured, rel=0.1)


def test_site_on_a_gpu_keeps_its_copies_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, site = (planner(100.0, device="cuda", sites=count).plan() for count in (1, 2))
    trained = sum(p.training for p in alone.parts if p.name == "gradients") / 4
    assert (site.parts, beside_samples(alone)) == (alone.parts, 0.0)
    assert beside_samples(site) == (24 + 17) * trained
    assert "of the host: copies of a site" in site.table()
    short = planner(100.0, device="cuda", sites=2, optimizer_state="bfloat16").plan()
    assert short.host == site.host - 4 * trained
    monkeypatch.setattr("muster.trainer.learn.memory_plan._available", lambda *_: site.host)
    assert planner(100.0, device="cuda", sites=2).plan() == replace(site, host_available=site.host)
    monkeypatch.setattr("muster.trainer.learn.memory_plan._available", lambda *_: site.host - 1)
    with pytest.raises(MemoryShort, match=r"copies of a site, exchange of sites need \d") as caught:
        planner(100.0, device="cuda", sites=2).plan()
    assert "--recompute" not in str(caught.value.hint)


def test_site_of_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="a site is one process"):
        planner(1000.0, sites=2, ranks=2)


def test_way_out_of_a_site_is_not_more_ranks() -> None:
    with pytest.raises(MemoryShort) as caught:
        planner(0.6, sites=2).plan()
    assert "ranks" not in (caught.value.hint or "")


class Uncounted(Lane):
    """A lane to a host whose memory torch's profiler does not see."""

    rooms: ClassVar[list[int]] = []

    def room(self, like: torch.Tensor) -> torch.Tensor:
        self.rooms.append(like.nbytes)
        return torch.from_numpy(np.empty(like.shape, np.float32))


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "host"])
def test_inputs_on_the_host_take_what_is_planned(
    tmp_path: Path, kind: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.trainer.learn.recompute.Lane", Uncounted)
    monkeypatch.setattr(Uncounted, "rooms", [])
    length = 200
    made = recipe(length, 0)
    own = Qwen3Config(**{**TINY, "num_hidden_layers": 20, "max_position_embeddings": length})
    shelf = shelf_of(own, tmp_path)
    given = MemoryChoices(
        memory_gb=1000.0, micro_batch_tokens=1600, recompute="host", device="cuda"
    )
    plan = Planner(own, made, given, Rehearsal(own, made.adapter, "float32")).plan()
    learner = Learner(
        shelf.path(BASE),
        made,
        published=lambda _: shelf.weights(BASE),
        micro_batch_tokens=plan.micro_batch_tokens,
        recomputed=kind,
    )
    learner.step(Step(1), groups(length))
    measured = kept_bytes(learner) + peak_bytes(lambda: learner.step(Step(2), groups(length)))
    planned = planned_bytes(plan)
    if kind == "full":
        assert measured > 1.1 * planned
    else:
        assert planned == pytest.approx(measured, rel=0.1)
        assert max(Uncounted.rooms) <= beside_samples(plan) / 19 < 2 * max(Uncounted.rooms)


def test_fine_tuning_takes_what_is_planned_and_reads_no_policies(tmp_path: Path) -> None:
    own = Qwen3Config(**{**TINY, "max_position_embeddings": LENGTH})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(own, dtype=torch.float32).save_pretrained(tmp_path / "model")
    made = SftRecipe.model_validate(
        {"name": "plan", "rows": {"max_tokens": 200}, "training": {"batch_tokens": 31 * LENGTH}}
    )
    plan = Planner(own, made, MemoryChoices(memory_gb=1000.0, micro_batch_tokens=800)).plan()
    assert "policy that stands in" not in {part.name for part in plan.parts}
    learner = SftLearner(
        tmp_path / "model",
        made,
        published=lambda _: None,
        micro_batch_tokens=plan.micro_batch_tokens,
        recomputed=plan.recompute,
    )
    samples = [
        TrainingSample(row.prompt_tokens, row.completion_tokens[sample % 3 :])
        for group in groups(LENGTH)
        for sample, row in enumerate(group)
    ]
    learner.step(Step(1), Step(2), samples)
    step = partial(learner.step, Step(2), Step(2), samples)
    measured = kept_bytes(learner) + peak_bytes(step)
    assert planned_bytes(plan) == pytest.approx(measured, rel=0.1)


def test_nothing_is_computed_again_where_there_is_room() -> None:
    plan = planner(100.0).plan()
    assert (plan.recompute, plan.micro_batch_tokens) == ("none", 16_384)


def test_less_memory_means_recomputing_before_tiny_micro_batches() -> None:
    most = planner(100.0).plan().peak / 1e9
    kinds = [planner(most * share).plan().recompute for share in (1.01, 0.85, 0.7)]
    assert kinds[0] == "none"
    assert kinds[1] in ("none", "selective")
    assert kinds[2] in ("selective", "full")


def test_a_plan_fits_its_memory() -> None:
    plan = planner(1.2).plan()
    assert plan.peak <= 1.2e9
    assert plan.available == 1.2e9
    assert plan.table().endswith(f"recompute {plan.recompute}")


def test_what_never_fits_is_refused_with_a_way_out() -> None:
    with pytest.raises(MemoryShort, match=r"but only 0\.50") as caught:
        planner(0.5).plan()
    assert "--memory-gb" in str(caught.value.hint)


def test_settings_that_do_not_fit_are_refused_with_some_that_do() -> None:
    least = planner(100.0, micro_batch_tokens=512, recompute="full").plan().peak / 1e9
    wanted = planner(least * 1.05, micro_batch_tokens=4096, recompute="none")
    with pytest.raises(MemoryShort) as caught:
        wanted.plan()
    hint = str(caught.value.hint)
    assert hint.endswith("fits")
    words = hint.split()
    fitting = planner(least * 1.05, micro_batch_tokens=int(words[1]), recompute=words[3])
    assert fitting.found() is not None


@pytest.mark.parametrize(
    ("share", "flags"), [(0.52, "--offload"), (0.7, "--offload --optimizer-state bfloat16")]
)
def test_a_shorter_or_mapped_state_is_proposed(share: float, flags: str) -> None:
    fixed: dict[str, Any] = {"micro_batch_tokens": 64, "recompute": "full"}
    whole = {p.name: p.training for p in planner(100.0, **fixed).plan().parts}
    least = (sum(whole.values()) - share * whole["optimiser"]) / 1e9
    with pytest.raises(MemoryShort) as caught:
        planner(least, **fixed).plan()
    assert str(caught.value.hint) == f"{flags} fits"


def test_optimiser_in_bfloat16_takes_half() -> None:
    four, two = (
        {p.name: p.training for p in planner(100.0, optimizer_state=kind).plan().parts}
        for kind in ("float32", "bfloat16")
    )
    assert two["optimiser"] == four["optimiser"] / 2
    mapped = {p.name: p.training for p in planner(100.0, offload=True).plan().parts}
    assert mapped["optimiser"] == 8 * 16_000 * 256


def test_ranks_share_weights_gradients_and_optimiser() -> None:
    one = {p.name: p.training for p in planner(100.0).plan().parts}
    two = {p.name: p.training for p in planner(100.0, ranks=2).plan().parts}
    for name in ("weights", "gradients", "optimiser"):
        assert two[name] == one[name] / 2
    assert two["weights gathered from ranks"] > 0


def of_long_rows(memory_gb: float, **choices: Any) -> Planner:
    given = MemoryChoices(memory_gb=memory_gb, **{"recompute": "full", **choices})
    own = config(max_position_embeddings=16_384)
    return Planner(own, recipe(16_384, 0), given, rehearsal())


def test_ranks_that_share_rows_share_the_passes() -> None:
    kept: dict[str, Any] = {"ranks": 4, "recompute": "none"}
    parts = [
        {p.name: p.training for p in of_long_rows(100.0, **kept, **context).plan().parts}
        for context in ({}, {"context_ranks": 4})
    ]
    # Keys and values of whole rows are in every rank, one block's at a time, and logits of a chunk.
    assert 0.25 * parts[0]["passes"] < parts[1]["passes"] < 0.37 * parts[0]["passes"]
    del parts[0]["passes"], parts[1]["passes"]
    assert parts[0] == parts[1]


@pytest.mark.parametrize(
    ("ranks", "hint"),
    [
        (1, "2 ranks with as much memory each and --context-ranks 2 would be enough (torchrun)"),
        (4, "--context-ranks 2 fits"),
    ],
)
def test_a_row_beyond_a_ranks_memory_is_to_be_shared(ranks: int, hint: str) -> None:
    with pytest.raises(MemoryShort) as caught:
        of_long_rows(of_long_rows(100.0, ranks=4).plan().peak / 1e9 - 0.1, ranks=ranks).plan()
    assert caught.value.hint == hint


def test_samples_beyond_the_plan_are_refused_before_they_are_computed() -> None:
    own = config(max_position_embeddings=16_384)

    def wanting(memory_gb: float, **choices: Any) -> Planner:
        return Planner(
            own, recipe(512, 0), MemoryChoices(memory_gb=memory_gb, **choices), rehearsal()
        )

    assert PROMPT_TOKENS + 512 == 1_536
    made = wanting(100.0, recompute="none", micro_batch_tokens=1_536).plan()
    own_choice = wanting(1.1 * made.peak / 1e9)
    plan = own_choice.plan()
    assert plan.recompute == "none"
    own_choice.require_room(plan, [])
    own_choice.require_room(plan, [1_536, 20])
    own_choice.require_room(plan, [1_540, 20])
    with pytest.raises(
        MemoryShort,
        match=r"a sample has 8500 tokens, and 1536 were planned: training needs .* none",
    ) as caught:
        own_choice.require_room(plan, [30, 8_500])
    hint = (caught.value.hint or "").split()
    assert (hint[0], hint[2], hint[4:]) == ("--micro-batch-tokens", "--recompute", ["fits"])
    given: dict[str, Any] = {"micro_batch_tokens": int(hint[1]), "recompute": hint[3]}
    chosen = wanting(1.1 * made.peak / 1e9, **given)
    chosen.require_room(chosen.plan(), [30, 8_500])
    with pytest.raises(MemoryShort) as caught:
        chosen.require_room(chosen.plan(), [30, 16_000])
    assert "would be enough" in (caught.value.hint or "")


def of_a_gpu(memory_gb: float, **choices: Any) -> Planner:
    """Plan rows of 16,384 tokens on a GPU."""
    own = config(max_position_embeddings=16_384)
    given = MemoryChoices(memory_gb=memory_gb, **{"device": "cuda", **choices})
    return Planner(own, recipe(16_384, 0), given, rehearsal())


INPUT_GB = 16_384 * 256 * 4 / 1e9
"""One block's input."""


def test_inputs_that_wait_on_the_host_take_two_blocks_of_the_device() -> None:
    full, host = (of_a_gpu(100.0, recompute=kind).plan() for kind in ("full", "host"))
    assert (full.peak - host.peak) / 1e9 == pytest.approx(4 * INPUT_GB, rel=1e-3)
    assert (beside_samples(full), beside_samples(host)) == (0.0, 5 * INPUT_GB * 1e9)
    assert "of the host: inputs of blocks" in host.table()
    assert "of the host: inputs of blocks" not in full.table()
    assert host.figures()["host_gb"] == pytest.approx(5 * INPUT_GB + full.host / 1e9)
    shared = of_a_gpu(100.0, recompute="host", ranks=4, context_ranks=4).plan()
    assert beside_samples(shared) == beside_samples(host) / 4


def test_samples_of_a_step_are_in_the_first_rank_s_host_memory() -> None:
    tokens = 2 * GROUPS * GROUP * 16_384
    one, four = (of_a_gpu(100.0, ranks=ranks).plan() for ranks in (1, 4))
    assert [one.host, four.host] == [TOKEN_BYTES * tokens] * 2
    assert SAMPLES not in {part.name for part in four.parts}
    (of_process,) = (p for p in of_long_rows(100.0).plan().parts if p.name == SAMPLES)
    assert (of_process.reading, of_process.training) == (one.host, one.host)
    assert not of_long_rows(100.0).plan().on_host


def test_inputs_wait_on_the_host_where_nothing_else_fits() -> None:
    full, host = (of_a_gpu(100.0, recompute=kind).plan().peak / 1e9 for kind in ("full", "host"))
    assert of_a_gpu(full + 0.001).plan().recompute == "full"
    assert of_a_gpu(full - 0.001).plan().recompute == "host"
    assert of_a_gpu(host + 0.001).plan().recompute == "host"
    with pytest.raises(MemoryShort, match="recompute host"):
        of_a_gpu(host - 0.001).plan()
    with pytest.raises(MemoryShort, match="recompute full") as caught:
        of_a_gpu(full - 0.001, recompute="full").plan()
    assert caught.value.hint == "--micro-batch-tokens 16384 --recompute host fits"
    with pytest.raises(MemoryShort, match="recompute full"):
        of_a_gpu(full - 0.001, device="cpu").plan()


def test_small_micro_batches_come_before_the_host() -> None:
    full = planner(100.0, device="cuda", recompute="full", micro_batch_tokens=512).plan().peak
    plan = planner(full / 1e9 + 0.001, device="cuda").plan()
    assert (plan.recompute, plan.micro_batch_tokens) == ("full", 512)


def test_inputs_wait_only_where_the_host_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    full, host = (of_a_gpu(100.0, recompute=kind).plan() for kind in ("full", "host"))
    monkeypatch.setattr("muster.trainer.learn.memory_plan._available", lambda *_: host.host)
    assert of_a_gpu(host.peak / 1e9 + 0.001).plan().recompute == "host"
    monkeypatch.setattr("muster.trainer.learn.memory_plan._available", lambda *_: host.host - 1)
    with pytest.raises(MemoryShort, match="recompute full") as caught:
        of_a_gpu(full.peak / 1e9 - 0.001).plan()
    assert "host" not in str(caught.value.hint)
    with pytest.raises(MemoryShort, match=r"need 0\.09 GB of the host's memory, but only 0\.09"):
        of_a_gpu(full.peak / 1e9, recompute="host").plan()


def test_a_cpu_has_no_other_memory_for_inputs_to_wait_in() -> None:
    with pytest.raises(ConfigError, match="but --device is cpu") as caught:
        planner(100.0, recompute="host")
    assert caught.value.hint == "use --recompute full"
    assert planner(100.0, recompute="host", device="cuda").plan().recompute == "host"


def test_ranks_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks cannot be divided into groups of 3") as caught:
        planner(100.0, ranks=4, context_ranks=3)
    assert (
        caught.value.hint == "start 3, 6 or more processes with torchrun, or use --context-ranks 1"
    )
    with pytest.raises(ConfigError, match="1 rank cannot be divided into groups of 2"):
        join(torch.device("cpu"), 1.0, 2)


def test_an_adapter_takes_no_gradients_of_the_base() -> None:
    made = recipe(512, 8)
    plan = Planner(config(), made, MemoryChoices(memory_gb=100.0)).plan()
    parts = {p.name: p for p in plan.parts}
    size = Rehearsal(config(), made.adapter, "float32").size
    # One layer's merged weight at a time, as stored in the file and as used in computation.
    assert parts["policy that stands in"].reading == 8 * 256 * 768
    assert parts["optimiser"].training == 8 * size.trained
    assert size.trained < 0.1 * size.parameters


def test_tied_weights_are_counted_once() -> None:
    tied, apart = (
        Rehearsal(config(tie_word_embeddings=tie), recipe(512, 0).adapter, "float32").size
        for tie in (True, False)
    )
    assert apart.parameters - tied.parameters == 16_000 * 256
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    assert tied.parameters == sum(p.numel() for p in model.parameters())


def test_memory_that_is_there_is_found() -> None:
    plan = planner(None).plan()
    assert plan.peak <= plan.available < 1e14


def test_command_prints_the_plan_and_loads_no_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    words = ["trainer", "plan", "--model", str(tmp_path), "--recipe", "demo"]
    text = CliRunner().invoke(muster, [*words, "--memory-gb", "50"]).stdout
    assert "optimiser steps" in text
    assert "recompute none" in text
    found = json.loads(CliRunner().invoke(muster, [*words, "--json"]).stdout)
    assert found["peak_gb"] <= found["available_gb"]
    refused = CliRunner().invoke(muster, [*words, "--memory-gb", "0.1"])
    assert refused.exit_code != 0
    assert "training needs" in f"{refused.exception} {refused.output}"


def test_passes_are_rehearsed_only_if_the_other_parts_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rehearsed(Exception):
        pass

    def rehearse(*_: object, **__: object) -> None:
        raise Rehearsed

    monkeypatch.setattr(Rehearsal, "bytes", rehearse)

    def found(memory_gb: float) -> object:
        return Planner(
            config(), recipe(512, 0), MemoryChoices(memory_gb=memory_gb), rehearsal()
        ).found()

    assert found(0.1) is None
    with pytest.raises(Rehearsed):
        found(9.0)
