"""Examples that are trained on a whole network: chain, orchestrator, validators, trainer, workers.

    make example-length         obey a length budget
    make example-calculator     call a tool, use its answer

Every process is real and separate, as in `make demo`; held-out problems are evaluated every few
versions. Writes results/NAME.json and docs/images/NAME.svg, unless `--steps` makes it a shorter
run.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, drawing, machine, print_table, write
from rich.console import Console

from muster.app.demo.display import DemoDisplay
from muster.app.demo.keys import cast
from muster.app.demo.local_network import Network, NetworkOptions
from muster.app.demo.story import start
from muster.chain import ChainView, read_view
from muster.protocol.messages import Verdict
from muster.trainer.config import load_recipe

EVERY = 4
"""Versions between evaluations."""
LEASE_S = 60
"""Seconds of a lease; a worker whose model calls tools is slower."""
TIMEOUT_S = 1500.0


@dataclass(frozen=True, slots=True)
class Example:
    """One of the examples."""

    lesson: str
    """The lesson on which its base model was warmed up."""
    title: str
    """Title of the plot."""
    has_budgets: bool
    """Whether the adherence to length budgets is also measured."""
    problems: int
    """Training problems; a program that was run before is not run again."""

    @property
    def recipe(self) -> Path:
        """Its recipe."""
        return ROOT / "configs" / f"example-{self.lesson}.toml"


EXAMPLES = {
    "calculator": Example("calculator", "Products by the Python tool", False, 256),
    "length": Example("length", "Length budgets of 8, 12, 16 and 20 tokens", True, 2048),
}


@dataclass(frozen=True, slots=True)
class Trained:
    """Results of a network."""

    evaluations: list[dict[str, Any]]
    """The trainer's evaluations, by version."""
    verdicts: dict[str, int]
    """Number of outcomes on chain by verdict."""
    is_audit_clean: bool
    """Whether the auditor could rebuild everything from the chain."""
    wall_s: float
    """Seconds from nothing to the last version."""


async def train(example: Example, folder: Path, steps: int, seed: int) -> Trained:
    """Train the example's model on a network of its own, on free ports."""
    began = time.monotonic()
    people = cast(seed, honest=1, cheats=())
    options = NetworkOptions(
        folder=folder,
        deployments=folder / "deployments",
        cast=people,
        recipe=example.recipe,
        steps=steps,
        seed=seed,
        rpc_port=0,
        lesson=example.lesson,
        eval_every=EVERY,
        problems=example.problems,
        lease_s=LEASE_S,
    )
    names = {member.wallet.address: member.name for member in people.members}
    async with Network(options) as network, asyncio.timeout(TIMEOUT_S):
        with DemoDisplay(Console(), names) as progress:
            run_id = await start(network, progress)
            trainer = network.processes.children["trainer"]
            shown = 0
            while trainer.exit_code is None:
                shown = _show(network, progress, shown)
                await asyncio.sleep(0.5)
        if trainer.exit_code:
            network.processes.require_running(trainer)
        wall_s = time.monotonic() - began
        async with await network.connect() as chain:
            view = await read_view(chain, ChainView())
        audit = await network.audit(run_id)
        is_clean = all(check["passed"] for check in audit["checks"])
        return Trained(_evaluations(network), _verdicts(view), is_clean, wall_s)


def _show(network: Network, progress: DemoDisplay, shown: int) -> int:
    found = _evaluations(network)
    for entry in found[shown:]:
        error = f", length error {entry['length_error']:.2f}" if "length_error" in entry else ""
        progress.say(f"policy {entry['policy_version']}: reward {entry['reward']:.3f}{error}")
    return len(found)


def _evaluations(network: Network) -> list[dict[str, Any]]:
    path = network.trainer_state / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return [entry["eval"] for entry in entries if "eval" in entry]


def _verdicts(view: ChainView) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for batch in view.batches.values():
        counts.update(Verdict(record.verdict).name.lower() for record in batch.records or ())
    return dict(counts)


def draw_plot(name: str, example: Example, evaluations: list[dict[str, Any]]) -> None:
    """Draw held-out reward by policy version, with its interval, and the mean length error."""
    versions = [entry["policy_version"] for entry in evaluations]
    with drawing(name) as axes:
        axes.plot(versions, [e["reward"] for e in evaluations], color="#4c72b0", label="reward")
        axes.fill_between(
            versions, [e["reward_low"] for e in evaluations],
            [e["reward_high"] for e in evaluations], color="#4c72b0", alpha=0.15, linewidth=0,
        )  # fmt: skip
        axes.set(xlabel="policy version", ylabel="held-out reward, temperature 1", ylim=(0, 1))
        axes.set_title(example.title)
        lines = axes.get_lines()
        if example.has_budgets:
            errors = axes.twinx()
            errors.plot(
                versions, [e["length_error"] for e in evaluations],
                color="#dd8452", label="mean |length - budget|",
            )  # fmt: skip
            errors.set(ylabel="tokens", ylim=(0, None))
            lines = [*lines, *errors.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], loc="center right")


def metrics_of(evaluations: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures that a run is judged by: first and last evaluation."""
    first, last = evaluations[0], evaluations[-1]
    found = {"reward_start": first["reward"], "reward_end": last["reward"]}
    if "length_error" in first:
        found |= {
            "length_error_start": first["length_error"],
            "length_error_end": last["length_error"],
            "length_error_fall": 1 - last["length_error"] / first["length_error"],
        }
    return found


def main() -> None:
    """Train, print, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--steps", type=int, default=0, help="training steps [the recipe's]")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    example = EXAMPLES[asked.example]
    steps = asked.steps or load_recipe(example.recipe).training.steps
    measured_on = machine()
    with tempfile.TemporaryDirectory() as name:
        trained = asyncio.run(train(example, Path(name), steps, asked.seed))
    figures = ["policy_version", "reward", "length", "length_error", "within_budget"]
    header = [figure for figure in figures if figure in trained.evaluations[0]]
    rows = [[f"{entry[figure]:.4g}" for figure in header] for entry in trained.evaluations]
    print_table(f"{example.title}, held-out problems", header, rows)
    print(f"outcomes on chain {trained.verdicts}, {trained.wall_s:.0f} s")
    if asked.steps:
        return
    detail = {
        "evaluations": [{figure: entry[figure] for figure in header} for entry in
                        trained.evaluations],
        "verdicts": trained.verdicts,
        "is_audit_clean": trained.is_audit_clean,
        "seed": asked.seed,
    }  # fmt: skip
    draw_plot(asked.example, example, trained.evaluations)
    metrics = metrics_of(trained.evaluations) | {"wall_s": trained.wall_s}
    write(asked.example, metrics, detail, measured_on=measured_on)


if __name__ == "__main__":
    main()
