"""`muster trainer` and `muster run base-model`: the trainer's command lines.

Parses flags and prints; stdout is data. Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from muster.protocol.errors import ConfigError
from muster.settings.helping import SectionedCommand
from muster.settings.options import (
    CONFIRMATIONS_HELP,
    FILE,
    FOLDER,
    ORCHESTRATOR_HELP,
    PASSWORD_HELP,
    chain_options,
)
from muster.settings.presets import RECIPE

SECTIONS = {
    "The run": [
        *("config", "run", "keystore", "password_file", "orchestrator", "documents", "model"),
        *("steps", "state_dir", "keep_checkpoints", "on_collapse"),
    ],
    "Chain": ["rpc", "deployments", "network_name", "poll_s", "confirmations"],
    "Origin, which serves policies": [
        *("host", "port", "ready_file", "store", "keep", "anchor_every", "publish_dtype"),
        "hand_over_s",
    ],
    "Computing": ["device", "threads", "micro_batch_tokens", "rank_timeout_s"],
    "Several sites": ["sites", "site", "site_address", "site_alive_s", "site_wait_s"],
    "Measuring": [
        *("eval_set", "eval_every", "eval_samples", "metrics_host", "metrics_port"),
        "wandb_project",
    ],
    "Trying, without a chain": ["dry_run", "recipe", "task_set"],
}
"""The options of `trainer run`, by what they are about."""


@click.group()
def trainer() -> None:
    """Train the policy and publish it."""


@trainer.command("run", cls=SectionedCommand, sections=SECTIONS)
@click.option("--config", type=FILE, help="TOML file with any of these settings.")
@click.option("--run", type=int, help="Run to train.")
@click.option("--keystore", type=FILE, help="Keystore of the run's trainer account.")
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@click.option("--orchestrator", metavar="URL", help=ORCHESTRATOR_HELP)
@chain_options
@click.option("--documents", type=FOLDER, help="Recipe by its hash; else it is downloaded.")
@click.option("--model", type=FOLDER, help="Base model, when the store does not hold version 0.")
@click.option("--store", type=FOLDER, help="Chunk store that is served as the origin.")
@click.option("--keep", type=int, help="Newest versions that stay.")
@click.option("--anchor-every", type=int, help="Of so many versions one is broadcast whole.")
@click.option("--state-dir", type=FOLDER, help="Checkpoint, policies and metrics.")
@click.option("--rank-timeout-s", type=float, help="Under torchrun: longest wait for other ranks.")
@click.option("--sites", type=int, help="Trainer sites with which the run begins. [default: 1]")
@click.option("--site", type=int, help="Which of them this is; 0 publishes.")
@click.option("--site-address", metavar="HOST:PORT", help="Where site 0 meets the others.")
@click.option("--site-alive-s", type=float, help="A site silent for so long is left out.")
@click.option("--site-wait-s", type=float, help="Longest wait of sites for one another.")
@click.option("--keep-checkpoints", type=int, help="Newest checkpoints that stay. [default: 2]")
@click.option("--eval-set", type=FILE, help="Task set of held-out problems.")
@click.option("--eval-every", type=int, help="Evaluate every so many steps as well.")
@click.option("--eval-samples", type=int, help="Samples per held-out problem. [default: 1]")
@click.option("--steps", type=int, help="Training steps. [default: the recipe's]")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 for any free one.")
@click.option("--ready-file", type=FILE, help="Receives the URL once it listens.")
@click.option("--hand-over-s", type=float, help="Wait so long for relays at the end.")
@click.option("--metrics-host", help="Address of the Prometheus endpoint.")
@click.option("--metrics-port", type=int, help="Its port; without one there is none.")
@click.option("--wandb-project", help="Log to this Weights & Biases project.")
@click.option("--poll-s", type=float, help="Seconds between looks at the chain.")
@click.option("--confirmations", metavar="N|safe|finalized", help=CONFIRMATIONS_HELP)
@click.option("--publish-dtype", help="Published weights: float32 or bfloat16.")
@click.option("--micro-batch-tokens", type=int, help="Tokens that are computed together.")
@click.option("--on-collapse", help="On lasting alarms: log, stop or rollback. [default: log]")
@click.option(
    "--threads", type=click.IntRange(1, 256), help="CPU threads of the model. [default: 1]"
)
@click.option("--device", help="Where the model computes. [default: cpu]")
@click.option("--dry-run", is_flag=True, help="Print settings, recipe and its hash, and stop.")
@click.option("--recipe", type=RECIPE, help="With --dry-run: the recipe, TOML file or preset.")
@click.option("--task-set", type=FILE, help="With --dry-run: the problems of the run.")
def trainer_run(
    config: Path | None,
    dry_run: bool,
    recipe: Path | None,
    task_set: Path | None,
    **flags: Any,
) -> None:
    """Train a run until its last step, or until stopped; starts again where it was.

    With --dry-run nothing is started, and neither the chain nor the keystore is touched; the hash
    is the one that `muster run create` pins for this recipe and these problems.

    \b
    Example:
      muster trainer run --run 1 --keystore trainer.json --orchestrator http://host:8600 \\
          --store ./origin --state-dir ./trainer --port 8800

    \b
    On several devices, --state-dir in a folder that all of them see:
      torchrun --nproc-per-node 8 --no-python -- muster trainer run --device cuda ...
    """
    from muster.settings import load_settings
    from muster.telemetry import setup_logging
    from muster.trainer.config import TrainerSettings
    from muster.wallet import open_wallet

    settings = load_settings(
        TrainerSettings, file=config, flags=flags, env_prefix="MUSTER_TRAINER_"
    )
    if dry_run:
        from muster.trainer.dry_run import resolve

        click.echo(json.dumps(resolve(settings, recipe, task_set), indent=2))
        return
    if recipe is not None or task_set is not None:
        raise ConfigError(
            "--recipe and --task-set are for --dry-run: a run's documents are pinned on chain",
            hint="leave them out, or add --dry-run",
        )
    setup_logging("trainer")
    key = open_wallet(settings.keystore, settings.password_file).key

    from muster.lifecycle import run_until_stopped
    from muster.trainer.process import serve

    run_until_stopped(lambda: serve(settings, key))


@click.command("base-model")
@click.option("--out", type=FOLDER, required=True, help="Receives the model folder.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--task-set", type=FILE, help="Also write the training problems here.")
@click.option("--eval-set", type=FILE, help="Also write held-out problems here.")
@click.option("--problems", type=int, default=2048, show_default=True, help="Training problems.")
@click.option("--held-out", type=int, default=256, show_default=True, help="Held-out problems.")
@click.option(
    "--lesson",
    default="sort",
    show_default=True,
    help="What it almost learns: sort, length (sort within a budget), calculator (call a tool).",
)
def run_base_model(
    out: Path,
    seed: int,
    lesson: str,
    task_set: Path | None,
    eval_set: Path | None,
    problems: int,
    held_out: int,
) -> None:
    """Build the demo's base model: 0.1M parameters that sort digits right one time in three."""
    import torch

    from muster.trainer.base_model import build_base_model
    from muster.trainer.lessons import lesson_of

    torch.set_num_threads(1)
    chosen = lesson_of(lesson)
    build_base_model(out, seed=seed, lesson=chosen)
    split = chosen.split(problems, held_out, seed)
    for path, tasks in zip((task_set, eval_set), split, strict=True):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            tasks.write(path)
    click.echo(out)
