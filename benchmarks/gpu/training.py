"""Training on a device: steps with long rows, and a team of one rank.

* trainer, `gpu_train_s`, `gpu_train_tokens_per_s`, `gpu_train_gb`: time and memory of a training
  step of two optimiser steps of Qwen3-0.6B's shape, computed in bfloat16: a row of 16,384 tokens.
* host, `gpu_full_s`, `gpu_full_gb`, `gpu_host_s`, `gpu_host_gb`: the same of a row of 40,000 tokens
  with whole blocks computed again, whose inputs stay on the device or wait on the host;
  `gpu_host_difference`: norm of the difference of Adam's first moments over their norm.
* nccl, `gpu_one_rank_difference`: difference between the weights after a step of a team of one rank
  (sharded, over NCCL; over gloo on a CPU) and after the same step without a team, over the change
  that the step makes; both are norms over all weights.
* resume, `gpu_resume_difference`: the same of a step after a state was saved and read, and after it
  was restored from the host's memory, against the step that follows without a break.
* sites, `gpu_sites_difference`: largest difference between the weights of two sites after two
  steps together.
"""

import gc
import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any

import torch
from benchmarks.gpu.setup import Figures, Setup
from benchmarks.training.size import Setting, recipe, rollouts
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from muster.lifecycle import free_port
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.recipe import Recipe
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.memory_plan import MemoryChoices, Planner
from muster.trainer.learn.parallel import Team
from muster.trainer.learn.recompute import Recompute
from muster.trainer.publish.policies import MappedWeights, PolicyShelf
from muster.trainer.recover.checkpoint import Checkpoints, Identity, TrainerState
from muster.trainer.sites.meeting import Meeting, MeetingPlace
from muster.trainer.sites.site_learner import OuterStep, SiteLearner
from muster.trainer.stream.reader import Cursor

ROW = 16_384
"""Tokens of the longest row."""
LONG_ROW = 40_000
"""Tokens of a row whose blocks' inputs are in the peak of memory."""
MEET_S = 60.0
"""Seconds that ranks wait for each other."""
OWNER = Identity(RunId(1), keccak(b"recipe"), 1)
"""Whose checkpoints these are."""


def measure_trainer(setup: Setup) -> Figures:
    """Measure a training step with a long row, after one that warms up."""
    setting = Setting("q06", (setup.pick(96, ROW), 8), 2, stale=False)
    made, model = recipe(setting), setup.model("q06")
    config = AutoConfig.from_pretrained(model)
    config.max_position_embeddings = max(setting.lengths)
    plan = Planner(config, made, _choices(setup)).plan()
    learner = _learner(
        setup, made, micro_batch_tokens=plan.micro_batch_tokens, recomputed=plan.recompute
    )
    learner.step(Step(1), rollouts(setting))
    began = setup.now()
    figures = learner.step(Step(2), rollouts(setting))
    seconds = setup.now() - began
    if figures.skipped:
        raise RuntimeError("loss or gradient were not finite")
    metrics = {
        "gpu_train_s": seconds,
        "gpu_train_tokens_per_s": figures.tokens / seconds,
        "gpu_train_gb": figures.memory_bytes / 1e9,
    }
    return metrics, {
        "plan": plan.figures(),
        "phases": dict(figures.seconds),
        "tflops": figures.flops / seconds / 1e12,
        "loss": figures.loss,
        "row": max(setting.lengths),
    }


def measure_host(setup: Setup) -> Figures:
    """Take a step with a long row, blocks' inputs on the device, and one with them on the host."""
    (full_s, full_gb, full), (host_s, host_gb, host) = (
        _long_step(setup, kind) for kind in ("full", "host")
    )
    metrics = {
        "gpu_full_s": full_s,
        "gpu_full_gb": full_gb,
        "gpu_host_s": host_s,
        "gpu_host_gb": host_gb,
        "gpu_host_difference": float((host - full).norm() / full.norm()),
    }
    return metrics, {"norm": float(full.norm()), "row": setup.pick(96, LONG_ROW)}


def _long_step(setup: Setup, kind: Recompute) -> tuple[float, float, torch.Tensor]:
    """Return seconds and GB of a model's second step, and Adam's first moments of its first."""
    setting = Setting("q06", (setup.pick(96, LONG_ROW), 8), 2, stale=False)
    gc.collect()  # of the learner before
    learner = _learner(setup, recipe(setting), micro_batch_tokens=LONG_ROW, recomputed=kind)
    learner.step(Step(1), rollouts(setting))
    state = learner.optimizer.state
    moments = [state[p]["exp_avg"].flatten().cpu() for p in learner.model.parameters()]
    if setup.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(setup.device)
    began = setup.now()
    if learner.step(Step(2), rollouts(setting)).skipped:
        raise RuntimeError("loss or gradient were not finite")
    return setup.now() - began, setup.memory_gb(), torch.cat(moments)


def _choices(setup: Setup) -> MemoryChoices:
    dtype = "float32" if setup.is_tiny else "bfloat16"
    return MemoryChoices(device=setup.device, compute_dtype=dtype)  # type: ignore[arg-type]


def _learner(setup: Setup, made: Any, **options: Any) -> Learner:
    model: Path = setup.model("q06")
    base = MappedWeights(sorted(model.glob("*.safetensors")))
    return Learner(
        model,
        made,
        published=lambda _: base,
        device=setup.device,
        compute_dtype=_choices(setup).compute_dtype,
        **options,
    )


def measure_one_rank(setup: Setup) -> Figures:
    """Take the same step with a team of one rank and without one."""
    setting = Setting("small", (32,) * 4, 2, stale=False)
    made, small = _quick(recipe(setting)), Setup(setup.device, True, setup.models / "tiny")
    alone = _learner(small, made, micro_batch_tokens=256)
    before = _weights(alone)
    own = alone.step(Step(1), rollouts(setting))
    expected = _weights(alone)
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": free_port()}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    team = Team(torch.device(setup.device), MEET_S)
    try:
        together = _learner(small, made, micro_batch_tokens=256, team=team)
        figures = together.step(Step(1), rollouts(setting))
        found = _weights(together)
    finally:
        team.leave()
    metrics = {"gpu_one_rank_difference": _apart(found, expected) / _apart(expected, before)}
    return metrics, {
        "losses": [own.loss, figures.loss],
        "norms": [own.grad_norm, figures.grad_norm],
    }


def measure_resume(setup: Setup) -> Figures:
    """Take a step, and then the next one: at once, from a checkpoint, from the host's memory."""
    setting = Setting("small", (32,) * 4, 2, stale=False)
    made, small = _quick(recipe(setting)), Setup(setup.device, True, setup.models / "tiny")
    through, saved, held = (_learner(small, made, micro_batch_tokens=256) for _ in range(3))
    through.step(Step(1), rollouts(setting))
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), OWNER)
        checkpoints.save(TrainerState(PolicyVersion(1), Cursor(), 0, 0), through.state()).result()
        newest = checkpoints.newest()
        assert newest is not None  # it was written
        saved.restore(checkpoints.read(newest.folder, saved))
        checkpoints.close()
    held.restore({name: value.cpu() for name, value in through.state().items()})
    before = _weights(through)
    for learner in (through, saved, held):
        learner.step(Step(2), rollouts(setting))
    after = _weights(through)
    apart = [_apart(_weights(each), after) / _apart(after, before) for each in (saved, held)]
    return {"gpu_resume_difference": max(apart)}, {"saved": apart[0], "held": apart[1]}


def measure_sites(setup: Setup) -> Figures:
    """Take two steps at two sites."""
    setting = Setting("small", (32,) * 4, 2, stale=False)
    made, small = _quick(recipe(setting)), Setup(setup.device, True, setup.models / "tiny")
    port, training = free_port(), made.training
    # Not in the threads: transformers loads one model at a time.
    learners = [_learner(small, made, micro_batch_tokens=256) for _ in range(2)]
    # The sites ask site 0's store, which goes with its meeting.
    all_done = Barrier(len(learners))

    def site(number: int) -> dict[str, torch.Tensor]:
        place = MeetingPlace(number, "127.0.0.1", port, alive_s=5.0, wait_s=MEET_S)
        with (
            TemporaryDirectory() as folder,
            closing(Meeting(place, expected=2, secret=bytes(32))) as meeting,
            closing(Checkpoints(Path(folder), OWNER)) as checkpoints,
        ):
            learner = SiteLearner(
                learners[number],
                meeting,
                OuterStep(training.outer_learning_rate, training.outer_momentum),
                checkpoints,
                PolicyShelf(Path(folder) / "policies"),
                max_async_level=training.max_async_level,
            )
            if number:
                learner.join()
            for step in (Step(1), Step(2)):
                learner.step(step, rollouts(setting))
            all_done.wait(MEET_S)
            return {name: value.cpu() for name, value in learner.weights().items()}

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(site, range(2), timeout=MEET_S)
    apart = max(float((one[name] - other[name]).abs().max()) for name in one)
    base = MappedWeights(sorted(small.model("q06").glob("*.safetensors")))
    moved = max(float((one[name] - base[name].float()).abs().max()) for name in one)
    if not moved:
        raise RuntimeError("no weight moved")
    return {"gpu_sites_difference": apart}, {"largest_movement": moved}


def _quick(made: Recipe) -> Recipe:
    """Return a recipe with a rate at which one step moves weights."""
    training = made.training.model_copy(update={"learning_rate": 1e-3})
    return made.model_copy(update={"training": training})


def _apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of weights."""
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    """Return copies of all weights, whole and on the CPU."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()
        for name, value in learner.model.named_parameters()
    }
