"""Two trainer sites far apart: bytes to reach the demo task's reward, one site killed and healed.

Both sites are real processes with the trainer's own flow, over gloo; every byte that they pass to
gloo is counted. Rollouts are sampled by the project's engine from the newest policy. The reference
is one trainer that takes the same optimiser steps on all samples: what two sites would compute if
they all-reduced every gradient in float32, 4 (K - 1) / K * 2 bytes per weight, site and optimiser
step.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.report import machine, print_table, write
from benchmarks.training.delta_steps import PROBLEMS, SAMPLES, _groups as sampled_groups
from matplotlib import pyplot

from muster.inference.transformers_engine import TransformersEngine
from muster.lifecycle import free_port
from muster.protocol.encoding import file_hash
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import encode_rollouts
from muster.trainer.base_model import build_base_model
from muster.trainer.publish.policies import BASE, PolicyShelf

SITE = "benchmarks.training.diloco_site"
PLOT = Path(__file__).parents[2] / "docs" / "images" / "diloco.svg"
SUBMISSIONS = 2
"""Accepted files that a step consumes."""
GOAL = 0.7
"""The demo's reward."""


class Result(NamedTuple):
    """Course of a run."""

    rewards: list[float]
    """Mean task reward of the samples of each step, which the policy before it made."""
    sent_bytes: list[int]
    """Bytes sent so far by all sites when the step was done, healing included."""
    healed_bytes: int
    """Bytes of these that healed the restarted site."""
    inner_steps: int
    """Optimiser steps that site 0 took while both sites were there."""
    shared: list[bool]
    """Whether both sites took part, by step."""


def recipe(steps: int, inner_steps: int) -> Recipe:
    """Return a recipe for the demo's task, with many optimiser steps between policies."""
    return Recipe(
        name="diloco",
        sampling=SamplingRecipe(
            problems_per_submission=PROBLEMS,
            samples_per_problem=SAMPLES,
            temperature=1.0,
            max_new_tokens=6,
        ),
        training=TrainingRecipe(
            steps=steps,
            submissions_per_step=SUBMISSIONS,
            optimizer_steps=inner_steps,
            learning_rate=1.5e-4,
            warmup_steps=2,
            weight_decay=0.0,
            max_grad_norm=1.0,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
            outer_learning_rate=0.7,
            outer_momentum=0.5,
        ),
    )


class Course:
    """A run in a folder: samples with each new policy for its sites, kills and restarts them."""

    def __init__(self, folder: Path, model: Path, wanted: Recipe, sites: int) -> None:
        self.folder = folder
        self.sites = sites
        self._recipe = wanted
        (folder / "files").mkdir(parents=True)
        (folder / "model").symlink_to(model)
        (folder / "recipe.json").write_bytes(wanted.to_bytes())
        self._port = free_port()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, site: int) -> None:
        """Start a site."""
        words = [sys.executable, "-m", SITE, str(self.folder), str(site), str(self.sites)]
        with (self.folder / f"site-{site}.log").open("ab") as log:
            self._processes[site] = subprocess.Popen(
                [*words, str(self._port)],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def kill(self, site: int) -> None:
        """kill -9 a site."""
        self._processes[site].send_signal(signal.SIGKILL)
        self._processes[site].wait()

    def run(self, at_step: Callable[[int], None], timeout_s: float) -> list[float]:
        """Sample for every step; returns the rewards. `at_step` is called before each."""
        engine, rng = TransformersEngine("float32"), random.Random(5)
        rewards = []
        until = time.monotonic() + timeout_s
        for number in range(self._recipe.training.steps):
            policy = self._policy(number, until)
            at_step(number)
            version = PolicyVersion(number)
            engine.load_policy(policy, version)
            files = [sampled_groups(engine, self._recipe, version, rng) for _ in range(SUBMISSIONS)]
            for groups in files:
                rows = [row for group in groups for row in group]
                self._submit(encode_rollouts(rows), number, len(rows))
            graded = [row.task_reward for groups in files for group in groups for row in group]
            rewards.append(sum(graded) / len(graded))
            print(f"step {number + 1}: reward {rewards[-1]:.3f}", file=sys.stderr)
        for process in self._processes.values():
            process.wait(max(1, until - time.monotonic()))
            assert process.returncode == 0, (self.folder / "site-0.log").read_text()[-2000:]
        return rewards

    def wait_for(self, path: Path, timeout_s: float = 300) -> None:
        """Return when a file is there."""
        until = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > until:
                raise RuntimeError(f"{path} is not there after {timeout_s} s")
            time.sleep(0.02)

    def traffic(self, site: int) -> list[dict[str, int]]:
        """Return what a site wrote about its traffic, before and after restarts."""
        path = self.folder / f"site-{site}" / "traffic.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def weights(self, site: int, version: int) -> dict[str, torch.Tensor]:
        """Return a site's weights of a version."""
        shelf = PolicyShelf(self.folder / f"site-{site}" / "policies")
        return dict(shelf.weights(PolicyVersion(version)))

    def _policy(self, number: int, until: float) -> Path:
        own = self.folder / "site-0" / "policies"
        path = own / str(number) if number else self.folder / "model"
        while not (path / "config.json").exists():
            if time.monotonic() > until or self._processes[0].poll() is not None:
                raise RuntimeError((self.folder / "site-0.log").read_text()[-2000:])
            time.sleep(0.02)
        return path

    def _submit(self, data: bytes, version: int, rollouts: int) -> None:
        name = file_hash(data).hex()
        (self.folder / "files" / name).write_bytes(data)
        with (self.folder / "stream.jsonl").open("a") as stream:
            line = {"file": name, "version": version, "rollouts": rollouts}
            stream.write(json.dumps(line) + "\n")


def alone(folder: Path, model: Path, wanted: Recipe) -> list[float]:
    """Return the rewards of one trainer that takes every step on all samples."""
    course = Course(folder, model, wanted, 1)
    course.start(0)
    return course.run(lambda _: None, timeout_s=1200)


def together(folder: Path, model: Path, wanted: Recipe) -> Result:
    """Return the course of two sites, one of which is killed after a third and restarted later."""
    course = Course(folder, model, wanted, 2)
    for site in (0, 1):
        course.start(site)
    steps = wanted.training.steps

    def disturb(number: int) -> None:
        if number == steps // 3:
            course.kill(1)
        if number == steps // 3 + 2:
            # Sampling waits while the process starts, because real steps take longer than a start.
            asks = course.folder / "site-1" / "asks"
            asks.unlink()
            course.start(1)
            course.wait_for(asks)

    rewards = course.run(disturb, timeout_s=1200)
    for version in (steps - 1, steps):
        zero, one = (course.weights(site, version) for site in (0, 1))
        assert all(torch.equal(zero[name], one[name]) for name in zero), "sites differ"
    lines = {site: course.traffic(site) for site in (0, 1)}
    sent = [sum(_sent_until(lines[site], n) for site in (0, 1)) for n in range(1, steps + 1)]
    healed = max(line["heal_bytes"] for line in lines[0])
    before = [0, *[line["inner_steps"] for line in lines[0]]]
    taken = [b - a for a, b in pairwise(before)]
    shared = [line["sites"] == 2 for line in lines[0]]
    inner_steps = sum(n for n, both in zip(taken, shared, strict=True) if both)
    return Result(rewards, sent, healed, inner_steps, shared)


def _sent_until(lines: list[dict[str, int]], step: int) -> int:
    """Return a site's bytes up to a step; its counters begin again after a restart."""
    total, last = 0, 0
    for line in lines:
        if line["step"] > step:
            break
        now = line["outer_bytes"] + line["heal_bytes"]
        total += now - last if now >= last else now
        last = now
    return total


def _reached(rewards: list[float]) -> int:
    """Return the number of steps after which the policy's samples reached the goal's reward."""
    return next((i for i, reward in enumerate(rewards) if reward >= GOAL), -1)


def main() -> None:
    """Measure, print, plot, write results/diloco.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--inner-steps", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = recipe(options.steps, options.inner_steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_base_model(folder / "model", seed=0)
        shelf = PolicyShelf(folder / "count")
        shelf.adopt(folder / "model")
        weights = sum(value.numel() for value in shelf.weights(BASE).values())
        reference = alone(folder / "alone", folder / "model", wanted)
        result = together(folder / "together", folder / "model", wanted)
    report(wanted, weights, reference, result)


def report(wanted: Recipe, weights: int, reference: list[float], result: Result) -> None:
    """Print, plot and write what was measured."""
    steps = wanted.training.steps
    # Both sites, each optimiser step of site 0 while both were there.
    full = 2 * 4 * weights * result.inner_steps
    outer = result.sent_bytes[-1] - result.healed_bytes
    reached = _reached(result.rewards)
    metrics = {
        "traffic_ratio": full / outer,
        "traffic_ratio_with_healing": full / result.sent_bytes[-1],
        "steps_to_reward": float(reached),
        "steps_to_reward_reference": float(_reached(reference)),
        "final_reward": result.rewards[-1],
    }
    rows = [
        ["all-reduce of every gradient", f"{full / 1e6:.1f}", str(_reached(reference)), "1"],
        ["outer steps", f"{outer / 1e6:.2f}", str(reached), f"{full / outer:.0f}"],
        [
            "outer steps and healing",
            f"{result.sent_bytes[-1] / 1e6:.2f}",
            str(reached),
            f"{full / result.sent_bytes[-1]:.0f}",
        ],
    ]
    header = ["two sites exchange", "MB sent", f"steps to reward {GOAL}", "ratio"]
    print_table(f"DiLoCo, {weights} weights, {steps} policies", header, rows)
    _plot(reference, result, full / result.inner_steps)
    detail: dict[str, Any] = {
        "weights": weights,
        "policies": steps,
        "optimiser_steps_of_both": result.inner_steps,
        "steps_of_both": sum(result.shared),
        "killed_before_step": steps // 3 + 1,
        "restarted_before_step": steps // 3 + 3,
        "rewards": result.rewards,
        "rewards_reference": reference,
        "sent_bytes": result.sent_bytes,
        "healed_bytes": result.healed_bytes,
    }
    write("diloco", metrics, detail, measured_on=machine())


def _plot(reference: list[float], result: Result, per_step: float) -> None:
    inner = result.inner_steps / sum(result.shared)
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    each = [max(1.0, n * inner * per_step) / 1e6 for n in range(len(reference))]
    axes.plot(each, reference, marker=".", label="all-reduce of every gradient")
    sent = [max(1.0, float(n)) / 1e6 for n in [0, *result.sent_bytes[:-1]]]
    axes.plot(sent, result.rewards, marker=".", label="outer steps, one site killed and healed")
    axes.axhline(GOAL, color="grey", linewidth=0.5)
    axes.set(xscale="log", xlim=(0.1, None), xlabel="MB sent by both sites", ylabel="reward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    main()
