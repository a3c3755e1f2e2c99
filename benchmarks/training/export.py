"""Additional memory and time at the end of a training step: checkpoint, policy and broadcast.

    python -m benchmarks.training.export [--shapes mid q06]

Each shape runs in a separate process: a model of that shape with a bfloat16 base, float32 master
weights and Adam's moments, after one optimiser step at a learning rate of 1e-6. Then version 1 is
written, checkpointed and published as a delta of version 0; and again during a training step, to
measure that step's delay. The peak is the growth of the largest resident size, including mapped
files.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import machine, print_table, write
from transformers import AutoModelForCausalLM, Qwen3Config

from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.shardcast import ChunkStore, Manifest
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.persistence import kept_state, named_weights
from muster.trainer.publish.policies import BASE, PolicyShelf, policy_files
from muster.trainer.recover.checkpoint import Checkpoints, Identity, TrainerState
from muster.trainer.stream.reader import Cursor

RUN, ONE = RunId(1), PolicyVersion(1)
SHAPES: dict[str, dict[str, int]] = {
    "small": {"layers": 2, "width": 128, "inner": 384, "heads": 2},
    "mid": {"layers": 8, "width": 512, "inner": 1536, "heads": 8},
    "q06": {"layers": 28, "width": 1024, "inner": 3072, "heads": 16},
}
"""Shapes with Qwen3's vocabulary; q06 is Qwen3-0.6B's."""
VOCABULARY = 151_936
RATE = 1e-6
"""Learning rate."""
WITH_STEP = {"small", "mid"}
"""Shapes that are also measured during a training step; q06's gradient alone would take 2.4 GB
more."""
SAMPLES, TOKENS = 4, 32
"""Made-up rollouts of the parallel training step."""


def resident_bytes(field: str) -> int:
    """Return a figure of this process's memory: VmRSS is now, VmHWM the largest so far."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def forget_peak() -> None:
    """Reset the largest resident size to the current one."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def build_base(folder: Path, shape: dict[str, int]) -> None:
    """Write a model of random weights in bfloat16."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape["width"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=max(1, shape["heads"] // 2),
        head_dim=128 if shape["heads"] == 16 else 64,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shelf = PolicyShelf(folder.parent / "seed", dtype="bfloat16")
    seed = folder.parent / "config"
    config.save_pretrained(seed)
    (seed / "none.safetensors").write_bytes(b"")
    shelf.adopt(seed)
    shelf.write(ONE, named_weights(model)).rename(folder)


def recipe() -> Recipe:
    """Return a recipe with the learning rate of large models."""
    return Recipe(
        name="export",
        sampling=SamplingRecipe(
            problems_per_submission=1,
            samples_per_problem=SAMPLES,
            temperature=1.0,
            max_new_tokens=TOKENS,
        ),
        training=TrainingRecipe(submissions_per_step=1, optimizer_steps=1, learning_rate=RATE),
    )


def rollouts() -> list[list[Rollout]]:
    """Return one group of made-up samples of version 0."""
    return [
        [
            Rollout(
                problem_id="p",
                group=0,
                sample=sample,
                sampling_seed=sample,
                target_length=-1,
                policy_version=0,
                prompt_tokens=(3, 4, 5),
                completion_tokens=(*range(10 + sample, 9 + sample + TOKENS), 1),
                proofs=b"unused",
                task_reward=float(sample % 2),
            )
            for sample in range(SAMPLES)
        ]
    ]


def take_step(learner: Learner) -> None:
    """Apply Adam's first step to weights and moments, one random gradient at a time."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if not parameter.requires_grad:
                continue
            gradient = torch.empty_like(parameter).normal_(generator=generator)
            parameter.add_(gradient.sign(), alpha=-RATE)
            state = kept_state(learner.optimizer, parameter)
            state["step"].fill_(1.0)
            state["exp_avg"].copy_(gradient)
            state["exp_avg_sq"].copy_(gradient.square())


@contextmanager
def counted_waits(learner: Learner) -> Iterator[list[float]]:
    """Collect the seconds for which changes wait until the tensors are written."""
    waits: list[float] = []
    wait = learner._await_release

    def timed() -> None:
        began = time.perf_counter()
        wait()
        waits.append(time.perf_counter() - began)

    learner._await_release = timed  # type: ignore[method-assign]
    yield waits
    learner._await_release = wait  # type: ignore[method-assign]


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def publish(store: ChunkStore, shelf: PolicyShelf, version: PolicyVersion) -> Manifest:
    """Publish a version as the trainer does."""
    return store.publish(
        policy_files(shelf.path(version)),
        run_id=RUN,
        version=version,
        stream_from=0,
        stream_to=int(version),
        anchor_every=8,
        sign=lambda _: bytes(65),
    )


def measure(shape: str, folder: Path, *, is_staged: bool = False) -> dict[str, Any]:
    """Return the figures of one shape; with `is_staged`, copies of the tensors are made first."""
    build_base(folder / "base", SHAPES[shape])
    shelf, store = PolicyShelf(folder / "policies"), ChunkStore(folder / "store")
    shelf.adopt(folder / "base")
    learner = Learner(shelf.path(BASE), recipe(), published=shelf.weights)
    checkpoints = Checkpoints(folder / "checkpoints", Identity(RUN, keccak(b"export"), 1))
    take_step(learner)
    publish(store, shelf, BASE)
    # The code that writes is loaded and warm before the peak is reset.
    few = {"w": torch.ones(8)}
    checkpoints.save(TrainerState(BASE, Cursor(), 0, 0), few).result()
    tensors, weights = learner.state(), learner.weights()
    forget_peak()
    before = resident_bytes("VmRSS")
    if is_staged:
        tensors = {name: value.clone() for name, value in tensors.items()}
        weights = {name: value.clone() for name, value in weights.items()}
    writing = shelf.writing(ONE, weights, learner.pieces)
    state = TrainerState(ONE, Cursor(1), 0, 0)
    cpu_s = time.process_time()
    save_s = timed(lambda: checkpoints.save(state, tensors, first=writing).result())
    cpu_s = time.process_time() - cpu_s
    saved_peak = resident_bytes("VmHWM") - before
    publish_s = timed(lambda: publish(store, shelf, ONE))
    peak = resident_bytes("VmHWM") - before
    manifest = store.manifest(RUN, ONE)
    assert manifest is not None
    found = {
        "parameters": sum(weight.numel() for weight in weights.values()),
        "state_bytes": sum(value.nbytes for value in tensors.values()),
        "save_peak_bytes": saved_peak,
        "peak_bytes": peak,
        "save_s": save_s,
        "save_cpu_s": cpu_s,
        "publish_s": publish_s,
        "kind": manifest.kind,
        "delta_share": manifest.broadcast_bytes / manifest.total_bytes,
        "version_bytes": manifest.total_bytes,
    }
    if shape in WITH_STEP and not is_staged:
        found |= beside_a_step(learner, shelf, checkpoints)
    checkpoints.close()
    return found


def beside_a_step(
    learner: Learner, shelf: PolicyShelf, checkpoints: Checkpoints
) -> dict[str, float]:
    """Return a step's duration alone and during the writing of the step before."""
    alone_s = timed(lambda: learner.step(Step(2), rollouts()))
    two = PolicyVersion(2)
    with counted_waits(learner) as waits:
        began = time.perf_counter()
        saving = checkpoints.save(
            TrainerState(two, Cursor(2), 1, 0),
            learner.state(),
            first=shelf.writing(two, learner.weights(), learner.pieces),
            release=learner.hold(),
        )
        beside_s = timed(lambda: learner.step(Step(3), rollouts()))
        saving.result()
    return {
        "step_alone_s": alone_s,
        "step_beside_s": beside_s,
        "step_waited_s": sum(waits),
        "both_s": time.perf_counter() - began,
    }


def in_a_process(shape: str, *, is_staged: bool = False) -> dict[str, Any]:
    """Return the result of `measure` in a process of its own."""
    options = ["--child", shape, *(["--staged"] if is_staged else [])]
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.training.export", *options],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure the shapes, print, write results/export.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["mid"])
    parser.add_argument("--child", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--staged", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure(options.child, Path(name), is_staged=options.staged)))
        return
    found = {shape: in_a_process(shape) for shape in options.shapes}
    print_table(
        "Checkpoint, policy and delta of version 1, above training",
        ["shape", "state", "peak", "save", "publish", "broadcast", "step alone", "beside", "waits"],
        [
            [
                shape,
                f"{each['state_bytes'] / 1e9:.2f} GB",
                f"{each['peak_bytes'] / 1e9:.3f} GB",
                f"{each['save_s']:.1f} s",
                f"{each['publish_s']:.1f} s",
                f"{each['kind']}, {each['delta_share']:.2%}",
                *(
                    f"{each[name]:.1f} s" if name in each else ""
                    for name in ("step_alone_s", "step_beside_s", "step_waited_s")
                ),
            ]
            for shape, each in found.items()
        ],
    )
    metrics = {f"export_peak_gb_{shape}": each["peak_bytes"] / 1e9 for shape, each in found.items()}
    write("export", metrics, found, measured_on=machine())


if __name__ == "__main__":
    main()
