"""`muster trainer`, `muster run base-model` and `muster tasks filter`: the trainer's commands.

Parses flags and prints; stdout is data. Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.protocol.errors import ConfigError
from muster.settings.flags import (
    CONFIRMATIONS_HELP,
    FILE,
    FOLDER,
    ORCHESTRATOR_HELP,
    PASSWORD_HELP,
    RECIPE,
    SectionedCommand,
    chain_options,
    endpoint,
    engine_choice,
    orchestrator_option,
    relay_option,
)
from muster.trainer.options import context_option, dtype_option, memory_options, peak_option
from muster.trainer.sft.command import lineage, sft

if TYPE_CHECKING:
    from muster.tasks import TaskSet
    from muster.trainer.measure.evaluate import Estimate
    from muster.trainer.measure.pass_rates import Band, PassRecord

SECTIONS = {
    "The run": [
        *("config", "run", "keystore", "password_file", "orchestrator", "documents", "model"),
        *("steps", "state_dir", "keep_checkpoints", "on_collapse"),
    ],
    "Chain": ["rpc", "deployments", "network_name", "poll_s", "confirmations"],
    "Origin, which serves policies": [
        *("host", "port", "ready_file", "store", "keep", "hold_s", "anchor_every"),
        *("publish_dtype", "hand_over_s"),
    ],
    "Computing": [
        *("device", "threads", "compute_dtype", "micro_batch_tokens", "recompute"),
        *("optimizer_state", "offload", "memory_gb", "peak_tflops"),
        *("rank_timeout_s", "context_ranks"),
    ],
    "Several sites": ["sites", "site", "site_address", "site_alive_s", "site_wait_s"],
    "Measuring": [
        *("eval_set", "eval_every", "eval_samples", "metrics_host", "metrics_port"),
        "wandb_project",
    ],
    "Trying, without a chain": ["dry_run", "recipe", "task_set"],
}
"""The options of `trainer run`, grouped by subject for --help."""


@click.group()
def trainer() -> None:
    """Train the policy and publish it."""


trainer.add_command(sft)
trainer.add_command(lineage)


@trainer.command("run", cls=SectionedCommand, sections=SECTIONS)
@click.option("--config", type=FILE, help="TOML file with any of these settings.")
@click.option("--run", type=int, help="Run to train.")
@click.option("--keystore", type=FILE, help="Keystore of the run's trainer account.")
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@click.option("--orchestrator", metavar="URL", help=ORCHESTRATOR_HELP)
@chain_options
@click.option("--documents", type=FOLDER, help="Folder of the recipe. [default: downloaded]")
@click.option("--model", type=FOLDER, help="Base model, if the store lacks version 0.")
@click.option("--store", type=FOLDER, help="Chunk store that the origin serves.")
@click.option("--keep", type=int, help="Number of newest versions to keep.")
@click.option("--hold-s", type=float, help="Seconds that older ones stay. [while disputable]")
@click.option(
    "--anchor-every", type=int, help="Publish every N-th version whole, others as deltas."
)
@click.option("--state-dir", type=FOLDER, help="Folder of checkpoints, policies and metrics.")
@click.option("--rank-timeout-s", type=float, help="Under torchrun: deadline for other ranks.")
@click.option("--context-ranks", type=int, help="Ranks that share each row. [default: 1]")
@click.option("--sites", type=int, help="Trainer sites at the start of the run. [default: 1]")
@click.option("--site", type=int, help="Number of this site; site 0 publishes.")
@click.option("--site-address", metavar="HOST:PORT", help="Address of site 0 for the others.")
@click.option("--site-alive-s", type=float, help="Leave a site out after this silence.")
@click.option("--site-wait-s", type=float, help="Wait at most this long for other sites.")
@click.option("--keep-checkpoints", type=int, help="Checkpoints to keep. [default: 2]")
@click.option("--eval-set", type=FILE, help="Task set of held-out problems.")
@click.option("--eval-every", type=int, help="Also evaluate every N steps.")
@click.option("--eval-samples", type=int, help="Samples per held-out problem. [default: 1]")
@click.option("--steps", type=int, help="Training steps. [default: the recipe's]")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 for any free one.")
@click.option("--ready-file", type=FILE, help="Write the URL here once it listens.")
@click.option("--hand-over-s", type=float, help="Wait at most this long for relays at the end.")
@click.option("--metrics-host", help="Address of the Prometheus endpoint.")
@click.option("--metrics-port", type=int, help="Port of the Prometheus endpoint. [default: none]")
@click.option("--wandb-project", help="Log to this Weights & Biases project.")
@click.option("--poll-s", type=float, help="Seconds between two polls of the chain.")
@click.option("--confirmations", metavar="N|safe|finalized", help=CONFIRMATIONS_HELP)
@click.option(
    "--publish-dtype", help="Published weights: base (as in the base model), float32 or bfloat16."
)
@dtype_option
@memory_options
@peak_option
@click.option("--on-collapse", help="On lasting alarms log, stop or rollback. [default: log]")
@click.option("--threads", type=click.IntRange(1, 256), help="CPU threads. [default: 1]")
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
    """Train a run until its last step, or until stopped; a restart resumes.

    With --dry-run nothing is started, and neither the chain nor the keystore is used. The printed
    hash is the one that `muster run create` pins for this recipe and these problems.

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
        from muster.trainer.create import resolve

        click.echo(json.dumps(resolve(settings, recipe, task_set), indent=2))
        return
    if recipe is not None or task_set is not None:
        raise ConfigError(
            "--recipe and --task-set need --dry-run: a run's documents are pinned on chain",
            hint="leave them out, or add --dry-run",
        )
    setup_logging("trainer")
    # Before the process handles Ctrl-C itself: this may ask for the password.
    key = None if _is_follower() else open_wallet(settings.keystore, settings.password_file).key

    from muster.lifecycle import run_until_stopped
    from muster.trainer.process import serve

    run_until_stopped(lambda: serve(settings, key))


def _is_follower() -> bool:
    """Tell whether torchrun started this process as one of the ranks behind rank 0."""
    size, rank = (int(os.environ.get(name, "0")) for name in ("WORLD_SIZE", "RANK"))
    return size > 1 and rank > 0


@trainer.command("plan")
@click.option(
    "--model", type=FOLDER, required=True, help="Base model folder; config.json is enough."
)
@click.option("--recipe", type=RECIPE, required=True, help="The recipe: TOML file or preset.")
@click.option("--ranks", type=click.IntRange(1), default=1, help="Processes.")
@context_option
@click.option(
    "--sites", type=click.IntRange(1), help="Trainer sites at the start of the run. [default: 1]"
)
@click.option("--device", default="cpu", help="Where the model computes.")
@dtype_option
@memory_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def trainer_plan(model: Path, recipe: Path, as_json: bool, **options: Any) -> None:
    """Say how much memory training a model takes, without loading it; also for an SFT recipe.

    Options that are not given are chosen as the trainer chooses them at its start. Fails when
    nothing fits.

    \b
    Example:
      muster trainer plan --model ./model --recipe demo --memory-gb 8
    """
    from muster.trainer.config import load_either_recipe
    from muster.trainer.learn.memory_plan import MemoryChoices, plan_memory

    chosen = {name: value for name, value in options.items() if value is not None}
    plan = plan_memory(model, load_either_recipe(recipe), MemoryChoices(**chosen))
    click.echo(json.dumps(plan.figures()) if as_json else plan.table())


@trainer.command("bench")
@click.option("--model", type=FOLDER, required=True, help="Model folder that is trained.")
@click.option("--recipe", type=RECIPE, required=True, help="The recipe: TOML file or preset.")
@click.option(
    "--groups", type=click.IntRange(1), help="Groups of the measured step. [default: the recipe's]"
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1), default=64, help="Tokens of a random prompt."
)
@click.option(
    "--completion-tokens",
    type=click.IntRange(1),
    help="Mean tokens of a completion. [default: half of the limit]",
)
@click.option("--repeats", type=click.IntRange(1), default=2, help="Steps to measure.")
@click.option(
    "--worker-tokens-per-s",
    type=click.FloatRange(0, min_open=True),
    help="Speed of a worker. [default: that of this machine]",
)
@peak_option
@dtype_option
@memory_options
@click.option("--threads", type=click.IntRange(1, 256), default=1, help="CPU threads.")
@click.option("--device", default="cpu", help="Where the model computes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def trainer_bench(model: Path, recipe: Path, as_json: bool, **options: Any) -> None:
    """Measure a training step on this machine, and how many workers would keep it busy.

    The rollouts are random; nothing is published or saved. Of a large step a part may be measured.

    \b
    Example:
      muster trainer bench --model ./model --recipe demo --worker-tokens-per-s 900
    """
    import torch
    from transformers.utils import logging as transformers_logging

    from muster.trainer.config import load_recipe
    from muster.trainer.learn.memory_plan import MemoryChoices, return_freed_buffers
    from muster.trainer.measure.bench import Load, measure_step

    return_freed_buffers()
    torch.set_num_threads(options["threads"])
    transformers_logging.disable_progress_bar()
    of_memory = (
        *("device", "compute_dtype", "micro_batch_tokens", "recompute", "memory_gb"),
        *("optimizer_state", "offload"),
    )
    of_load = ("groups", "prompt_tokens", "completion_tokens", "repeats")
    peak = options["peak_tflops"]
    found = measure_step(
        model,
        load_recipe(recipe),
        MemoryChoices(**{name: options[name] for name in of_memory if options[name] is not None}),
        Load(**{name: options[name] for name in of_load}),
        peak_flops=peak and peak * 1e12,
        worker_tokens_per_s=options["worker_tokens_per_s"],
    )
    click.echo(json.dumps(found.figures()) if as_json else found.text())


@click.command("evaluate")
@click.option("--run", type=int, required=True, help="Run whose versions are evaluated.")
@orchestrator_option
@chain_options
@click.option("--eval-set", type=FILE, required=True, help="Task set of held-out problems.")
@click.option(
    "--eval-samples", type=click.IntRange(1, 1024), default=1, help="Samples per held-out problem."
)
@click.option("--every", type=click.IntRange(1), default=1, help="Evaluate every N-th version.")
@click.option("--follow", is_flag=True, help="Keep evaluating until the run is over.")
@click.option("--keystore", type=FILE, help="Keystore that signs and reports the figures.")
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@relay_option
@click.option(
    "--state-dir", type=FOLDER, default=Path("evaluator"), help="Folder for policies and figures."
)
@engine_choice
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(
    run: int, keystore: Path | None, password_file: Path | None, as_json: bool, **options: Any
) -> None:
    """Evaluate a run's versions on held-out problems, on any machine.

    The orchestrator accepts figures signed by the run's owner, its trainer or a named evaluator.
    After a kill the same command resumes. Two versions are kept on disk.

    \b
    Example:
      muster evaluate --run 1 --orchestrator http://host:8600 --eval-set held-out.jsonl \\
          --follow --keystore evaluator.json
    """
    from muster.lifecycle import run_until_stopped
    from muster.protocol.ids import RunId
    from muster.telemetry import setup_logging
    from muster.wallet import open_wallet

    if options["orchestrator"] is None:
        raise ConfigError("no orchestrator is known for this run", hint="give --orchestrator URL")
    setup_logging("evaluator")
    key = None if keystore is None else open_wallet(keystore, password_file).key

    from muster.inference.loading import engine_of
    from muster.trainer.measure.beside import Wish, evaluate_run
    from muster.trainer.measure.evaluate import Evaluation
    from muster.trainer.measure.figures import evaluation_entry

    rpc, deployments = endpoint(options)
    named = ("orchestrator", "eval_set", "every", "state_dir")
    wish = Wish(
        run=RunId(run),
        rpc=rpc,
        deployments=deployments,
        samples=options["eval_samples"],
        is_following=options["follow"],
        relays=options["relay"],
        **{name: options[name] for name in named},
    )

    def tell(found: Evaluation) -> None:
        if as_json:
            click.echo(json.dumps(evaluation_entry(found)["eval"]))
            return
        said = f"reward {_interval(found.reward)}, {found.problems} problems"
        parts = (f"{name} {_interval(part.reward)}" for name, part in found.parts.items())
        click.echo("; ".join([f"version {found.policy_version}: {said}", *parts]))

    engine = engine_of(options)
    run_until_stopped(lambda: evaluate_run(wish, engine, key, tell))


def _interval(share: Estimate | None) -> str:
    if share is None:
        return "unknown"
    return f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f})"


@click.command("base-model")
@click.option("--out", type=FOLDER, required=True, help="Receives the model folder.")
@click.option("--seed", type=int, default=0, help="Same seed, same bytes.")
@click.option("--task-set", type=FILE, help="Also write the training problems here.")
@click.option("--eval-set", type=FILE, help="Also write held-out problems here.")
@click.option("--problems", type=int, default=2048, help="Training problems.")
@click.option("--held-out", type=int, default=256, help="Held-out problems.")
@click.option(
    "--lesson",
    default="sort",
    help="Lesson it half learns: sort, length (sort within a budget), calculator (call a tool).",
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

    from muster.trainer.base_model import build_base_model, lesson_of

    torch.set_num_threads(1)
    chosen = lesson_of(lesson)
    build_base_model(out, seed=seed, lesson=chosen)
    split = chosen.split(problems, held_out, seed)
    for path, tasks in zip((task_set, eval_set), split, strict=True):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            tasks.write(path)
    click.echo(out)


@click.command("filter")
@click.option("--set", "task_set", type=FILE, required=True, help="The run's problems.")
@click.option("--model", type=FOLDER, required=True, help="Model folder that is sampled.")
@click.option(
    "--recipe", type=RECIPE, required=True, help="Sampling settings: TOML file or preset."
)
@click.option("--passes", type=click.IntRange(1, 1024), default=8, help="Samples per problem.")
@click.option("--keep", default="0.125:0.5", metavar="LOW:HIGH", help="Pass rates kept.")
@click.option("--out", type=FILE, required=True, help="Receives the problems that are kept.")
@click.option("--records", type=FILE, help="Pass rates. [default: OUT.passes.jsonl]")
@click.option("--seed", type=int, default=0, help="Same seed, same samples.")
@click.option(
    "--batch", type=click.IntRange(1, 4096), default=32, help="Problems that are sampled together."
)
@engine_choice
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tasks_filter(
    task_set: Path, model: Path, recipe: Path, out: Path, records: Path | None, **options: Any
) -> None:
    """Keep the problems that a model solves sometimes. After a kill the same command resumes.

    \b
    Example:
      muster tasks filter --set tasks.jsonl --model ./model --recipe demo \\
          --passes 8 --keep 0.125:0.5 --out kept.jsonl
    """
    from muster.inference.framing import pin_prompt
    from muster.inference.loading import engine_of
    from muster.tasks import TaskSet
    from muster.telemetry import progress, setup_logging
    from muster.trainer.config import load_recipe
    from muster.trainer.measure.pass_rates import Band, Sampling, measure

    band = Band.parse(options["keep"])
    plan = Sampling(
        pin_prompt(load_recipe(recipe), model),
        options["passes"],
        seed=options["seed"],
        batch=options["batch"],
        dtype=options["dtype"] or "float32",
    )
    problems = TaskSet.open(task_set)
    setup_logging("tasks")

    engine = engine_of(options)
    target = records or out.with_name(f"{out.name}.passes.jsonl")
    with progress("problems measured") as on_progress:
        found = measure(problems, engine, model, plan, records=target, on_progress=on_progress)
    _write_kept(problems, found, band, out, as_json=options["as_json"])


def _write_kept(
    problems: TaskSet,
    found: Sequence[PassRecord],
    band: Band,
    out: Path,
    *,
    as_json: bool,
    more: Mapping[str, int] | None = None,
) -> None:
    """Write the problems in the band; print their number, and why the others were left out."""
    from muster.trainer.measure.pass_rates import kept_set

    kept = kept_set(problems, found, band)
    kept.write(out)
    counts = {
        "problems": len(problems),
        "kept": len(kept),
        "too_hard": sum(r.rate is not None and r.rate < band.low for r in found),
        "too_easy": sum(r.rate is not None and r.rate > band.high for r in found),
        "undecided": sum(r.rate is None for r in found),
        **(more or {}),
    }
    if as_json:
        click.echo(json.dumps(counts))
        return
    click.echo(
        f"{counts['kept']} of {counts['problems']} problems kept in {out}; {counts['too_hard']} "
        f"too hard, {counts['too_easy']} too easy, {counts['undecided']} could not be graded"
    )


@click.command("filter-run")
@click.option("--run", type=int, required=True, help="Run whose accepted rollouts are counted.")
@click.option("--set", "task_set", type=FILE, required=True, help="The run's problems.")
@click.option("--files", type=FOLDER, required=True, help="The orchestrator's files folder.")
@click.option("--policy-version", type=click.IntRange(0), default=0, help="Whose rollouts.")
@click.option("--passes", type=click.IntRange(1, 1024), default=8, help="Least samples.")
@click.option("--keep", default="0.125:0.5", metavar="LOW:HIGH", help="Pass rates kept.")
@click.option("--out", type=FILE, required=True, help="Receives the problems that are kept.")
@click.option("--records", type=FILE, help="Pass rates. [default: OUT.passes.jsonl]")
@chain_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tasks_filter_run(
    task_set: Path, out: Path, records: Path | None, as_json: bool, **options: Any
) -> None:
    """Keep the problems that a run's workers solved sometimes, in rollouts that were accepted.

    The chain says which files count; every file is compared with its hash there. Problems with
    fewer samples than --passes are left out. Run it again later, when there are more files, to keep
    more.

    \b
    Example:
      muster tasks filter-run --run 1 --set tasks.jsonl --files files --out kept.jsonl
    """
    import asyncio

    from muster.protocol.ids import PolicyVersion
    from muster.tasks import TaskSet
    from muster.telemetry import progress, setup_logging
    from muster.trainer.measure.pass_rates import (
        Band,
        count_passes,
        pass_records,
        read_run,
        write_records,
    )

    band = Band.parse(options["keep"])
    version = PolicyVersion(options["policy_version"])
    problems = TaskSet.open(task_set)
    setup_logging("tasks")
    run, accepted = asyncio.run(read_run(*endpoint(options), options["run"]))
    with progress("files counted") as on_progress:
        passes = count_passes(accepted, version, options["files"], on_progress)
    found = pass_records(problems, passes, run, version, least=options["passes"])
    write_records(records or out.with_name(f"{out.name}.passes.jsonl"), found, run, version)
    files = {"files": passes.files, "missing_files": passes.missing}
    _write_kept(problems, found, band, out, as_json=as_json, more=files)
