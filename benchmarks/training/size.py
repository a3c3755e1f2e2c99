"""The memory of training, measured and planned; part of `make bench-size`.

    python -m benchmarks.training.size [--settings mid q06]

Each setting runs in a separate process: a model with a bfloat16 base, float32 master weights and
existing Adam moments, and a training step of two optimiser steps on made-up rollouts. All rollouts
are of version 0, which is stale by then, and the loss has a KL term. The peak is the largest
resident size, including the process and mapped files.

* `train_bytes_per_parameter`: the peak of `mid` above the process before anything was loaded, per
  parameter, with 16 samples of 128 tokens and whole blocks computed again.
* `q06_train_gb`, `q06_train_gb_4096`: the peaks of Qwen3-0.6B's shape, with 16 samples of 128
  tokens, and with a row of 4,096.
* `policy_loads_per_step`: how often a policy is read in a step with eight optimiser steps, two
  stale versions and a reference.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from benchmarks.report import add_part, print_table
from benchmarks.training.export import (
    SHAPES,
    build_base,
    forget_peak,
    resident_bytes,
    take_step,
)
from transformers import AutoConfig

from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import AdapterRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.memory_plan import SAVING, MemoryChoices, Planner, return_freed_buffers
from muster.trainer.learn.persistence import Weights
from muster.trainer.publish.policies import BASE, PolicyShelf, open_shelf


class Setting(NamedTuple):
    """One measured training step."""

    shape: str
    """A name of `SHAPES`."""
    lengths: tuple[int, ...]
    """Tokens of each sample of a group, prompt included."""
    groups: int
    """Groups of a step."""
    rank: int = 0
    """Rank of the adapter; 0 for all weights."""
    stale: bool = True
    """Whether samples come from another version than the one in training."""
    choices: Mapping[str, Any] = MappingProxyType({})
    """Fields of `MemoryChoices`."""


FULL: dict[str, Any] = {"recompute": "full", "micro_batch_tokens": 1024}
SETTINGS: dict[str, Setting] = {
    "mid": Setting("mid", (128,) * 8, 2, choices=FULL),
    "mid, selective": Setting(
        "mid", (128,) * 8, 2, choices={"recompute": "selective", "micro_batch_tokens": 1024}
    ),
    "mid, none": Setting(
        "mid", (128,) * 8, 2, choices={"recompute": "none", "micro_batch_tokens": 1024}
    ),
    "mid, 256 tokens": Setting(
        "mid", (128,) * 8, 2, choices={"recompute": "none", "micro_batch_tokens": 256}
    ),
    "mid, adapter": Setting(
        "mid", (128,) * 8, 2, 16, choices={"recompute": "none", "micro_batch_tokens": 1024}
    ),
    "mid, adapter, full": Setting("mid", (128,) * 8, 2, 16, choices=FULL),
    "mid, short moments": Setting(
        "mid", (128,) * 8, 2, choices={**FULL, "optimizer_state": "bfloat16"}
    ),
    "mid, moments in a file": Setting("mid", (128,) * 8, 2, choices={**FULL, "offload": True}),
    "q06": Setting("q06", (128,) * 8, 2, choices=FULL),
    "q06, row of 4096": Setting("q06", (4096, 8), 2, stale=False, choices=FULL),
    "q06, adapter": Setting("q06", (128,) * 8, 2, 16, choices=FULL),
}
"""What is measured, by name; those of q06 take 12 GB and some minutes each."""
LOADS = {"optimizer_steps": 8, "kl_coefficient": 0.01}
"""Training settings of the step whose reads of policies are counted."""


def recipe(setting: Setting) -> Recipe:
    """Return a recipe of two optimiser steps, with a KL term if samples are stale."""
    return Recipe(
        name="size",
        sampling=SamplingRecipe(
            problems_per_submission=setting.groups,
            samples_per_problem=len(setting.lengths),
            temperature=1.0,
            max_new_tokens=max(setting.lengths) - 1,
        ),
        training=TrainingRecipe(
            submissions_per_step=1,
            optimizer_steps=2,
            learning_rate=1e-6,
            kl_coefficient=0.01 if setting.stale else 0.0,
        ),
        adapter=AdapterRecipe(rank=setting.rank),
    )


def rollouts(setting: Setting, versions: tuple[int, ...] = (0,)) -> list[list[Rollout]]:
    """Return groups of made-up samples, half of them right, of these versions in turn."""
    return [
        [
            Rollout(
                problem_id=f"p{group}",
                group=group,
                sample=sample,
                sampling_seed=sample,
                target_length=-1,
                policy_version=PolicyVersion(versions[group % len(versions)]),
                prompt_tokens=(3 + group,),
                completion_tokens=(*((7 * i + sample) % 1000 + 10 for i in range(length - 2)), 1),
                proofs=b"unused",
                task_reward=float(sample % 2),
            )
            for sample, length in enumerate(setting.lengths)
        ]
        for group in range(setting.groups)
    ]


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Return planned and measured memory of one setting, in bytes."""
    setting = SETTINGS[name]
    made = recipe(setting)
    shelf = open_shelf(folder / "policies", made, dtype="base")
    shelf.adopt(folder / "base")
    before = resident_bytes("VmRSS")
    config = AutoConfig.from_pretrained(shelf.path(BASE))
    # Rows are exactly as long as the samples.
    config.max_position_embeddings = max(setting.lengths)
    choices = MemoryChoices(memory_gb=1000.0, **setting.choices)
    plan = Planner(config, made, choices).plan()
    learner = Learner(
        shelf.path(BASE),
        made,
        published=lambda _: shelf.weights(BASE),
        micro_batch_tokens=plan.micro_batch_tokens,
        recomputed=plan.recompute,
        optimizer_state=choices.optimizer_state,
        offload=folder / "offload" if choices.offload else None,
    )
    take_step(learner)
    forget_peak()
    began = time.process_time()
    learner.step(Step(1), rollouts(setting))
    parts = {p.name: (p.reading, p.training) for p in plan.parts}
    return {
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "before": before,
        # Nothing is written to the disk here.
        "planned": plan.peak - parts[SAVING][0],
        "measured": resident_bytes("VmHWM"),
        "cpu_s": time.process_time() - began,
        "parts": parts,
    }


def policy_loads(folder: Path) -> int:
    """Return how often a step with eight optimiser steps, two stale versions and a reference reads
    a policy.
    """
    setting = Setting("small", (8,) * 4, 8)
    made = recipe(setting)
    made = made.model_copy(update={"training": made.training.model_copy(update=LOADS)})
    shelf = PolicyShelf(folder / "policies")
    shelf.adopt(folder / "base")
    read: list[PolicyVersion] = []

    def published(version: PolicyVersion) -> Weights:
        read.append(version)
        return shelf.weights(BASE)

    learner = Learner(shelf.path(BASE), made, published=published, micro_batch_tokens=64)
    take_step(learner)
    learner.step(Step(3), rollouts(setting, versions=(1, 2)))
    return len(read)


def in_a_process(name: str, folder: Path) -> Any:
    """Return a setting's figures, measured in a separate process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.training.size"]
    found = subprocess.run(
        [*command, "--child", name, "--folder", str(folder)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(found.stdout.splitlines()[-1])


def measure_all(names: Sequence[str]) -> dict[str, Any]:
    """Return every setting's figures; each is put into results/size.json once it is measured."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for shape in dict.fromkeys(["small", *(SETTINGS[n].shape for n in names)]):
            build_base(Path(name) / shape / "base", SHAPES[shape])
            for setting in (n for n in names if SETTINGS[n].shape == shape):
                found[setting] = in_a_process(setting, Path(name) / shape)
                metrics = metrics_of(setting, found[setting])
                add_part("size", f"training, {setting}", metrics, found[setting])
        loads = policy_loads(Path(name) / "small")
        add_part("size", "policy loads", {"policy_loads_per_step": loads}, {})
    return found


def metrics_of(setting: str, found: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that a setting's figures give."""
    if setting == "mid":
        above = found["measured"] - found["before"]
        return {"train_bytes_per_parameter": above / found["parameters"]}
    ids = {"q06": "q06_train_gb", "q06, row of 4096": "q06_train_gb_4096"}
    return {ids[setting]: found["measured"] / 1e9} if setting in ids else {}


def main() -> None:
    """Measure, print, write into results/size.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--child", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return_freed_buffers()
    if options.child:
        print(json.dumps(measure(options.child, options.folder)))
        return
    found = measure_all(options.settings)
    print_table(
        "A training step's memory, GB",
        ["setting", "planned", "measured", "ratio", "CPU s"],
        [
            [
                name,
                f"{each['planned'] / 1e9:.3f}",
                f"{each['measured'] / 1e9:.3f}",
                f"{each['planned'] / each['measured']:.3f}",
                f"{each['cpu_s']:.0f}",
            ]
            for name, each in found.items()
        ],
    )


if __name__ == "__main__":
    main()
