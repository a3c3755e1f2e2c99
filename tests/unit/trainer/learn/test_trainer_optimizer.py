"""An optimiser with a short state, or one in a file: torch's AdamW in less memory."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fakes import make_recipe, make_rollouts

from muster.protocol.errors import ConfigError, StorageFailed
from muster.protocol.ids import Step
from muster.protocol.rollouts import Rollout
from muster.trainer.learn import optimizer
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.optimizer import SmallAdamW, StateFile, round_at_random
from muster.trainer.learn.parallel import Team
from muster.trainer.learn.persistence import restore_state, training_state

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def steps(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], count: int) -> torch.Tensor:
    """Return weights after some steps with made-up gradients."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator) for size in ((3, 70), (5,))]
    own = [w.requires_grad_() for w in weights]
    taken = make(own)
    for _ in range(count):
        for weight in own:
            weight.grad = torch.randn(weight.shape, generator=generator)
        taken.step()
    return torch.cat([w.detach().flatten() for w in own])


def small(**options: Any) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    return lambda own: SmallAdamW(own, **OPTIONS, **options)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split the tests' parameters into several slices."""
    monkeypatch.setattr(optimizer, "SLICE", 64)


def test_float32_state_is_torch_s_adamw(tmp_path: Path) -> None:
    expected = steps(lambda own: torch.optim.AdamW(own, **OPTIONS), 5)
    for file in (None, StateFile(tmp_path)):
        found = steps(small(dtype="float32", file=file), 5)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_state_in_a_file_changes_no_bit(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        inside = steps(small(dtype=dtype), 5)
        assert torch.equal(steps(small(dtype=dtype, file=StateFile(tmp_path)), 5), inside)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_disk_has_room_for_the_state_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    taken: list[int] = []
    fallocate = os.posix_fallocate

    def counted(fd: int, start: int, size: int) -> None:
        fallocate(fd, start, size)
        taken.append(os.fstat(fd).st_blocks * 512)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    weight = torch.zeros(100_000)
    made = small(dtype=dtype, file=StateFile(tmp_path))([weight])
    assert taken[-1] >= 2 * 100_000 * getattr(torch, dtype).itemsize
    weight.grad = torch.ones(100_000)
    made.step()
    assert len(taken) == 2


def test_full_disk_is_named_before_the_first_step(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    learn = partial(Learner, model_folder, make_recipe(), published=lambda _: None)
    with pytest.raises(StorageFailed, match=r"state in .*offload: No space left") as caught:
        learn(offload=tmp_path / "offload")
    assert "--no-offload" in (caught.value.hint or "")
    learn()


@pytest.mark.parametrize("is_in_a_file", [False, True])
def test_fresh_optimiser_takes_no_more_of_the_disk(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_a_file: bool
) -> None:
    folder = tmp_path / "offload" if is_in_a_file else None
    made = Learner(model_folder, make_recipe(), published=lambda _: None, offload=folder)
    base = {name: value.clone() for name, value in made.weights().items()}
    made.step(Step(1), groups(1))
    first = {name: value.clone() for name, value in made.weights().items()}
    monkeypatch.delattr(os, "posix_fallocate")
    made.start_again(base)
    made.step(Step(1), groups(1))
    assert all(torch.equal(made.weights()[name], value) for name, value in first.items())
    assert not torch.equal(first["model.norm.weight"], base["model.norm.weight"])


@pytest.mark.parametrize("is_in_a_file", [False, True])
def test_resuming_without_moments_takes_no_more_of_the_disk(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_a_file: bool
) -> None:
    folder = tmp_path / "offload" if is_in_a_file else None
    learn = partial(Learner, model_folder, make_recipe(), published=lambda _: None)
    untrained, made = learn().state(), learn(offload=folder)
    made.step(Step(1), groups(1))
    first = {name: value.clone() for name, value in made.weights().items()}
    monkeypatch.delattr(os, "posix_fallocate")
    made.restore(untrained)
    made.step(Step(1), groups(1))
    assert all(torch.equal(made.weights()[name], value) for name, value in first.items())


def test_bfloat16_state_stays_near() -> None:
    expected = steps(lambda own: torch.optim.AdamW(own, **OPTIONS), 200)
    begun = steps(small(dtype="bfloat16"), 0)
    found = steps(small(dtype="bfloat16"), 200)
    assert float((found - expected).norm() / (expected - begun).norm()) < 0.02


def test_rounding_at_random_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.full((100_000,), 1.0 + 2.0**-10)
    rounded = round_at_random(value, generator).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float(rounded.double().mean()) == pytest.approx(1.0 + 2.0**-10, abs=1e-4)
    exact = torch.tensor([0.0, -2.5, float("inf"), float("nan")])
    torch.testing.assert_close(
        round_at_random(exact, generator).float(), exact, equal_nan=True, rtol=0, atol=0
    )


def test_a_moment_that_bfloat16_cannot_move_moves() -> None:
    weight = torch.zeros(4096, requires_grad=True)
    made = SmallAdamW([weight], lr=0.0, betas=(0.9, 0.999), weight_decay=0.0, dtype="bfloat16")
    made.state[weight] = {
        "step": torch.tensor(1000.0),
        "exp_avg": torch.zeros(4096, dtype=torch.bfloat16),
        "exp_avg_sq": torch.ones(4096, dtype=torch.bfloat16),
    }
    for _ in range(100):
        weight.grad = torch.zeros(4096)
        made.step()
    mean = float(made.state[weight]["exp_avg_sq"].float().mean())
    assert mean == pytest.approx(0.999**100, rel=0.01)


def groups(step: int) -> list[list[Rollout]]:
    rows = make_rollouts(step)
    return [[r for r in rows if r.group == group] for group in (0, 1)]


@pytest.mark.parametrize("is_in_a_file", [False, True])
def test_resumed_bfloat16_state_gives_the_same_bits(
    model_folder: Path, tmp_path: Path, is_in_a_file: bool
) -> None:
    def learner() -> Learner:
        return Learner(
            model_folder,
            make_recipe(),
            published=lambda _: None,
            optimizer_state="bfloat16",
            offload=tmp_path / "offload" if is_in_a_file else None,
        )

    through, stopped, resumed = learner(), learner(), learner()
    for made in (through, stopped):
        made.step(Step(1), groups(1))
    saved = {name: value.clone() for name, value in stopped.state().items()}
    read = resumed.like({name: tuple(value.shape) for name, value in saved.items()})
    for name, value in read.items():
        value.copy_(saved[name])
    resumed.restore(read)
    for made in (through, resumed):
        made.step(Step(2), groups(2))
    last = training_state(resumed.model, resumed.optimizer)
    expected = training_state(through.model, through.optimizer)
    names = {name for name in expected if not name.startswith("random.")}
    assert all(torch.equal(last[name], expected[name]) for name in names)
    moments = {v.dtype for n, v in last.items() if ".exp_avg" in n}
    assert moments == {torch.bfloat16}


def test_state_of_another_format_is_taken_over(model_folder: Path) -> None:
    long, short = (
        Learner(model_folder, make_recipe(), published=lambda _: None, optimizer_state=kind)
        for kind in ("float32", "bfloat16")
    )
    long.step(Step(1), groups(1))
    short.restore(long.state())
    moments = [v for n, v in short.state().items() if n.endswith(".exp_avg")]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    long.restore(short.state())
    restore_state(long.model, long.optimizer, short.state())


def test_state_in_a_file_is_refused_under_torchrun(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one process only"):
        Learner(
            model_folder,
            make_recipe(),
            published=lambda _: None,
            offload=tmp_path,
            team=Team.__new__(Team),
        )
