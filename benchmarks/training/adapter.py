"""Bytes of a policy version: all weights, broadcast whole or as deltas, or a LoRA adapter.

Real steps of the trainer's learner on random rollouts, published by the real store; a client then
rebuilds the last version from the base. The model is a Qwen3 of some million weights in bfloat16.
"""

import random
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from benchmarks.report import machine, print_table, write
from benchmarks.training.delta_steps import PROBLEMS, SAMPLES
from matplotlib import pyplot
from safetensors.torch import load_file, save_file

from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.recipe import AdapterRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.shardcast import ChunkStore, Manifest
from muster.shardcast.fetcher import DELTA_FILE, write_from_delta
from muster.trainer.base_model import ModelShape, WarmStart, build_base_model
from muster.trainer.learn.learner import Learner
from muster.trainer.publish.policies import (
    BASE,
    WEIGHTS_FILE,
    PolicyShelf,
    open_shelf,
    policy_files,
)

PLOT = Path(__file__).parents[2] / "docs" / "images" / "adapter.svg"
SHAPE = ModelShape(hidden=384, layers=6, heads=6)
RANKS = (4, 16, 64)
WAYS = {
    "all weights at 3e-7, delta": (0, 3e-7),
    "all weights at 1e-5, delta": (0, 1e-5),
    **{f"adapter of rank {rank}": (rank, 1e-4) for rank in RANKS},
}
"""Rank, 0 for all weights, and learning rate. INTELLECT-2 had 3e-7."""
VERSIONS = 3
RUN = RunId(1)


def recipe(rank: int, learning_rate: float) -> Recipe:
    """Return a recipe with as many optimiser steps per version as INTELLECT-2's."""
    return Recipe(
        name="adapter",
        sampling=SamplingRecipe(
            problems_per_submission=PROBLEMS,
            samples_per_problem=SAMPLES,
            temperature=1.0,
            max_new_tokens=6,
        ),
        training=TrainingRecipe(
            submissions_per_step=1,
            optimizer_steps=8,
            learning_rate=learning_rate,
            warmup_steps=0,
            kl_coefficient=0.0,
        ),
        adapter=AdapterRecipe(rank=rank),
    )


def rollouts(seed: int) -> list[list[Rollout]]:
    """Return groups of random digits, half of each rewarded."""
    rng = random.Random(seed)
    groups = []
    for group in range(16):
        rows = []
        for sample in range(4):
            tokens = (*(rng.randrange(3, 13) for _ in range(4)), 1)
            seeded = rng.getrandbits(64)
            row = Rollout(
                f"p{group}", group, sample, seeded, -1, 0, (3, 4, 5, 6, 13), tokens, b"p",
                float(sample % 2),
            )  # fmt: skip
            rows.append(row)
        groups.append(rows)
    return groups


def build(folder: Path) -> None:
    """Write the base model, in bfloat16."""
    build_base_model(folder, seed=0, warm_start=WarmStart(steps=2, batch=16), shape=SHAPE)
    weights = {n: w.bfloat16() for n, w in load_file(folder / WEIGHTS_FILE).items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def publish(store: ChunkStore, shelf: PolicyShelf, version: PolicyVersion) -> Manifest:
    """Return the manifest of a version on the shelf, as the trainer's publisher stores it."""
    return store.publish(
        policy_files(shelf.path(version)),
        run_id=RUN,
        version=version,
        stream_from=version,
        stream_to=version,
        anchor_every=8,
        sign=lambda _: b"s" * 65,
    )


def measure(folder: Path, model: Path, rank: int, learning_rate: float) -> dict[str, float]:
    """Return bytes of a version, and CPU seconds to write and to rebuild it."""
    wanted = recipe(rank, learning_rate)
    shelf = open_shelf(folder / "shelf", wanted, dtype="bfloat16")
    shelf.adopt(model)
    learner = Learner(model, wanted, published=shelf.weights)
    store = ChunkStore(folder / "store")
    base = publish(store, shelf, BASE)
    sizes, writing, rebuilding = [], [], []
    for number in range(1, VERSIONS + 1):
        learner.step(Step(number), rollouts(number))
        began = time.process_time()
        shelf.write(PolicyVersion(number), learner.weights())
        writing.append(time.process_time() - began)
        manifest = publish(store, shelf, PolicyVersion(number))
        assert manifest.kind == "delta", manifest.kind
        sizes.append(manifest.broadcast_bytes)
        parent = base if rank else store.manifest(RUN, PolicyVersion(number - 1))
        assert parent is not None
        rebuilding.append(rebuilt(folder / str(number), store, shelf, manifest, parent))
    found = {"bytes": median(sizes), "write_s": median(writing), "rebuild_s": median(rebuilding)}
    return found | {"full_bytes": float(base.total_bytes)}


def rebuilt(
    folder: Path, store: ChunkStore, shelf: PolicyShelf, manifest: Manifest, parent: Manifest
) -> float:
    """Return the CPU seconds in which a client makes a version's files from its delta."""
    folder.mkdir()
    regions = [store.find(span.digest) for span in manifest.delta_spans()]
    data = b"".join(bytes(region.read()) for region in regions if region is not None)
    (folder / DELTA_FILE).write_bytes(data)
    (folder / "made").mkdir()
    began = time.process_time()
    write_from_delta(manifest, folder / "made", folder, parent, shelf.path(parent.version))
    return time.process_time() - began


def main() -> None:
    """Measure, print, plot, write results/adapter.json."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder / "model")
        weights = sum(w.numel() for w in load_file(folder / "model" / WEIGHTS_FILE).values())
        found = {
            name: measure(folder / name, folder / "model", *ways) for name, ways in WAYS.items()
        }
    report(weights, found)


def report(weights: int, found: dict[str, dict[str, float]]) -> None:
    """Print, plot and write what was measured."""
    full = next(iter(found.values()))["full_bytes"]
    rows = [["all weights, whole", f"{full / 1e3:,.0f}", "1", "", ""]]
    for name, each in found.items():
        ratio = f"{full / each['bytes']:.0f}"
        times = [f"{each['write_s']:.2f}", f"{each['rebuild_s']:.2f}"]
        rows.append([name, f"{each['bytes'] / 1e3:,.0f}", ratio, *times])
    header = ["trained and broadcast", "kB per version", "ratio", "write, CPU s", "rebuild, CPU s"]
    print_table(f"A version of {weights:,} bfloat16 weights", header, rows)
    figure, axes = pyplot.subplots(figsize=(6.4, 2.8))
    values = [full, *(each["bytes"] for each in found.values())]
    bars = axes.barh([row[0] for row in rows], [value / 1e3 for value in values])
    axes.bar_label(bars, [f"{value / 1e3:,.0f} kB" for value in values], padding=3)
    axes.set(xscale="log", xlabel="kB per version", xlim=(None, full / 1e3 * 6))
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})
    ratios = {rank: full / found[f"adapter of rank {rank}"]["bytes"] for rank in RANKS}
    metrics = {f"adapter_ratio_{rank}": ratio for rank, ratio in ratios.items()}
    detail = {"weights": weights, "versions": found}
    write("adapter", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    main()
