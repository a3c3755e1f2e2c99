"""A row that four ranks share: its gradient beside one process's, each rank's memory beside the
plan; part of `make bench-size`.

    python -m benchmarks.training.context [--shape small] [--tokens 32768] [--ranks 4]

A model with a bfloat16 base takes two training steps with recomputation of whole blocks: a short
one, after which Adam's moments exist, and one of a group of two completions, one of which fills the
row. One process takes them, then ranks connected by gloo. The learning rate is almost zero and
Adam's beta1 is zero, so a checkpoint after the second step contains its gradient.

* `context_gradient_distance`: norm of the difference of the gradients over the norm of one
  process's.
* `context_rank_share`: peak of the largest rank above the process before anything was loaded, over
  that of one process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import add_part, print_table
from benchmarks.training.export import SHAPES, build_base, forget_peak, resident_bytes
from benchmarks.training.size import Setting, recipe, rollouts
from torch import Tensor
from transformers import AutoConfig

from muster.lifecycle import free_port
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.recipe import Recipe
from muster.trainer.learn.follow import follow
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.memory_plan import SAVING, MemoryChoices, Planner, return_freed_buffers
from muster.trainer.learn.parallel import ONE_PROCESS, Team, join
from muster.trainer.publish.policies import BASE, open_shelf
from muster.trainer.recover.checkpoint import Checkpoints, Identity, TrainerState
from muster.trainer.stream.reader import Cursor

WAIT_S = 7200.0
"""Seconds that a rank waits for others, on a shared machine."""
STILL = {"learning_rate": 1e-12, "adam_beta1": 0.0, "max_grad_norm": 1e9}
"""Training settings that change no weights and keep the last gradient."""
DEFAULT = ("small", 32_768, 4)
"""Shape, tokens and ranks whose figures become metrics."""
IDS = ("context_gradient_distance", "context_rank_share")
IDENTITY = Identity(RunId(1), keccak(b"context"), 31337)


def still(setting: Setting) -> Recipe:
    """Return a recipe of one optimiser step that changes almost nothing."""
    made = recipe(setting)
    training = made.training.model_copy(update={**STILL, "optimizer_steps": 1})
    return made.model_copy(update={"training": training})


def lead(team: Team | None, shape: str, tokens: int, folder: Path) -> dict[str, Any]:
    """Take both steps and write a checkpoint; returns planned and measured bytes."""
    ranks = team or ONE_PROCESS
    setting = Setting(shape, (tokens, 8), 1, stale=False)
    made = still(setting)
    shelf = open_shelf(folder / f"policies-{ranks.size}", made, dtype="base")
    shelf.adopt(folder / "base")
    config = AutoConfig.from_pretrained(shelf.path(BASE))
    config.max_position_embeddings = tokens
    choices = MemoryChoices(
        ranks=ranks.size,
        context_ranks=ranks.context,
        recompute="full",
        micro_batch_tokens=tokens,
        memory_gb=1000.0,
    )
    plan = Planner(config, made, choices).plan()
    learner = Learner(
        shelf.path(BASE),
        made,
        published=lambda _: shelf.weights(BASE),
        micro_batch_tokens=plan.micro_batch_tokens,
        recomputed=plan.recompute,
        team=team,
    )
    learner.step(Step(1), rollouts(Setting(shape, (8, 8), 1)))
    forget_peak()
    learner.step(Step(2), rollouts(setting))
    measured = resident_bytes("VmHWM")
    checkpoints = Checkpoints(folder / f"state-{ranks.size}", IDENTITY, ranks=ranks)
    state = TrainerState(PolicyVersion(2), Cursor(2), 0, 0)
    checkpoints.save(state, learner.state(), release=learner.hold()).result()
    checkpoints.close()
    parts = {part.name: (part.reading, part.training) for part in plan.parts}
    # Nothing of a policy is written while the step is taken.
    return {"planned": plan.peak - parts[SAVING][0], "measured": measured, "parts": parts}


def of_a_process(shape: str, tokens: int, folder: Path) -> dict[str, Any]:
    """Return one process's or rank's figures."""
    before, began = resident_bytes("VmRSS"), time.process_time()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    team = join(torch.device("cpu"), WAIT_S, ranks)
    if team is not None and team.rank:
        follow(team, "cpu")
        found: dict[str, Any] = {"measured": resident_bytes("VmHWM")}
    else:
        found = lead(team, shape, tokens, folder)
        if team is not None:
            team.lead("stop")
    if team is not None:
        team.leave()
    return {"before": before, **found, "cpu_s": time.process_time() - began}


def in_processes(ranks: int, shape: str, tokens: int, folder: Path) -> list[dict[str, Any]]:
    """Return the figures of `ranks` ranks, each in a separate process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.training.context"]
    command += ["--shape", shape, "--tokens", str(tokens), "--child", str(folder)]
    place = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **{k: str(v) for k, v in place.items()}, "RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate()[0] for process in started]
    return [json.loads(text.splitlines()[-1]) for text in said]


class _Moments:
    """Template for reading only the optimiser's first moments from a checkpoint."""

    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {n: torch.zeros(size) for n, size in sizes.items() if n.endswith(".exp_avg")}


def gradient(folder: Path, ranks: int) -> Tensor:
    """Return the gradient in the checkpoint of `ranks` ranks."""
    checkpoints = Checkpoints(folder / f"state-{ranks}", IDENTITY)
    read = checkpoints.read(folder / f"state-{ranks}" / "2", _Moments())
    checkpoints.close()
    return torch.cat([value.flatten() for _, value in sorted(read.items())])


def measure(shape: str, tokens: int, ranks: int) -> dict[str, Any]:
    """Measure one process and the ranks, and put the figures into results/size.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_base(folder / "base", SHAPES[shape])
        (one,) = in_processes(1, shape, tokens, folder)
        each = in_processes(ranks, shape, tokens, folder)
        whole = gradient(folder, 1)
        distance = float((gradient(folder, ranks) - whole).norm() / whole.norm())
    share = max(e["measured"] - e["before"] for e in each) / (one["measured"] - one["before"])
    found: dict[str, Any] = {"one": one, "ranks": each, "gradient_norm": float(whole.norm())}
    found |= {"context_gradient_distance": distance, "context_rank_share": share}
    name = f"context, {shape}, {tokens} tokens, {ranks} ranks"
    metrics = {id_: found[id_] for id_ in IDS} if (shape, tokens, ranks) == DEFAULT else {}
    add_part("size", name, metrics, found)
    return found


def main() -> None:
    """Measure, print, write into results/size.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default=DEFAULT[0])
    parser.add_argument("--tokens", type=int, default=DEFAULT[1])
    parser.add_argument("--ranks", type=int, default=DEFAULT[2])
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return_freed_buffers()
    if options.child:
        print(json.dumps(of_a_process(options.shape, options.tokens, options.child)))
        return
    found = measure(options.shape, options.tokens, options.ranks)
    planned = [found["one"]["planned"], *[found["ranks"][0]["planned"]] * options.ranks]
    print_table(
        f"A row of {options.tokens} tokens, GB; gradients differ by "
        f"{found['context_gradient_distance']:.1e} of the norm",
        ["process", "planned", "measured", "ratio", "CPU s"],
        [
            [
                "one" if i == 0 else f"rank {i - 1} of {options.ranks}",
                f"{plan / 1e9:.3f}",
                f"{each['measured'] / 1e9:.3f}",
                f"{plan / each['measured']:.3f}",
                f"{each['cpu_s']:.0f}",
            ]
            for i, (plan, each) in enumerate(
                zip(planned, [found["one"], *found["ranks"]], strict=True)
            )
        ],
    )


if __name__ == "__main__":
    main()
