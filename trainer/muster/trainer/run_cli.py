"""`muster run create` and `base-model`: how a run begins.

Parses flags and prints; stdout is data. Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.protocol.errors import ConfigError
from muster.protocol.ids import to_address
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, SHARED, joined
from muster.settings.presets import RECIPE

if TYPE_CHECKING:
    from muster.protocol.ids import Address
    from muster.protocol.recipe import Recipe

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
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


@click.command()
@click.option("--keystore", type=FILE, required=True, help="Keystore of the run's owner.")
@click.option("--password-file", type=FILE, help="Its password; else MUSTER_PASSWORD.")
@click.option("--trainer", "trainer_address", metavar="ADDR", help="Trainer. [default: the owner]")
@click.option("--trainer-keystore", type=FILE, help="The trainer's key, to publish version 0 now.")
@click.option("--trainer-password-file", type=FILE, help="Its password; else the owner's.")
@click.option("--orchestrator", metavar="ADDR", required=True, help="Orchestrator account.")
@click.option("--validator", "validators", metavar="ADDR", multiple=True, required=True)
@click.option("--quorum", type=int, required=True, help="Validators that must agree.")
@click.option("--model", type=FOLDER, required=True, help="Base model folder.")
@click.option("--recipe", type=RECIPE, required=True, help="Recipe: TOML file or preset.")
@click.option("--steps", type=int, help="Training steps. [default: the recipe's]")
@click.option("--task-set", type=FILE, required=True, help="The problems.")
@click.option("--calibration", type=FILE, required=True, help="From `muster calibrate`.")
@click.option("--price", type=int, required=True, metavar="WEI", help="Token wei per unit.")
@click.option(
    "--fraud-ppm",
    type=click.IntRange(0, 10**6),
    default=100_000,
    show_default=True,
    help="Millionths of stake slashed for a first statistical fraud; doubled each time.",
)
@click.option(
    "--exact-fraud-ppm",
    type=click.IntRange(0, 10**6),
    default=500_000,
    show_default=True,
    help="Millionths of stake slashed for an exact fraud, which also bans.",
)
@click.option("--fund", type=int, default=0, metavar="WEI", help="Reward to pay in now.")
@click.option("--store", type=FOLDER, required=True, help="The trainer's chunk store.")
@click.option("--documents", type=FOLDER, required=True, help="Receives the documents, by hash.")
@click.option(
    "--admit-anyway",
    "admits_anyway",
    is_flag=True,
    help="Take a task set that `muster tasks check` refuses.",
)
@click.option(
    "--accept-unsafe-economics",
    "accepts_unsafe_economics",
    is_flag=True,
    help="Create the run although cheating pays under these terms: see `muster economics`.",
)
@click.option(
    "--rpc",
    metavar="URL",
    multiple=True,
    callback=joined,
    envvar=SHARED["rpc"],
    default=(DEFAULT_RPC,),
    help="RPC endpoint; else MUSTER_RPC, else local. Given again: compared.",
)
@click.option(
    "--deployments",
    type=FOLDER,
    envvar=SHARED["deployments"],
    default=DEPLOYMENTS,
    help="Contracts' addresses; else MUSTER_DEPLOYMENTS.",
)
@click.option("--json", "as_json", is_flag=True, help="Print ids and hashes as JSON.")
def run_create(
    keystore: Path,
    password_file: Path | None,
    trainer_address: str | None,
    trainer_keystore: Path | None,
    trainer_password_file: Path | None,
    rpc: str,
    deployments: Path,
    as_json: bool,
    **plan: Any,
) -> None:
    """Create and fund a run, and publish its base model as policy version 0. Prints the run id."""
    import asyncio

    from muster.protocol.eip712 import address_of
    from muster.telemetry import setup_logging
    from muster.trainer.config import load_recipe
    from muster.wallet import open_wallet

    setup_logging("run")
    owner = open_wallet(keystore, password_file).key
    trainer_key = (
        open_wallet(trainer_keystore, trainer_password_file or password_file).key
        if trainer_keystore
        else owner
    )
    trainer_ = to_address(trainer_address) if trainer_address else address_of(trainer_key)
    recipe = load_recipe(plan.pop("recipe"), steps=plan.pop("steps"))

    from muster.trainer.create import create_run

    created = asyncio.run(
        create_run(
            _plan(recipe, trainer_, plan),
            rpc=rpc,
            deployments=deployments,
            owner=owner,
            trainer=trainer_key if address_of(trainer_key) == trainer_ else None,
        )
    )
    click.echo(json.dumps(created) if as_json else created["run_id"])


def _plan(recipe: Recipe, trainer_: Address, flags: dict[str, Any]) -> Any:
    from muster.trainer.create import RunPlan

    validators = tuple(to_address(address) for address in flags.pop("validators"))
    if not 1 <= flags["quorum"] <= len(validators):
        raise ConfigError(
            f"a quorum of {flags['quorum']} of {len(validators)} validators cannot be",
            hint="1 to the number of --validator",
        )
    if flags["fraud_ppm"] > flags["exact_fraud_ppm"]:
        raise ConfigError(
            f"--fraud-ppm {flags['fraud_ppm']} is above --exact-fraud-ppm "
            f"{flags['exact_fraud_ppm']}: an exact fraud cannot cost less",
            hint="raise --exact-fraud-ppm",
        )
    return RunPlan(
        recipe=recipe,
        trainer=trainer_,
        orchestrator=to_address(flags.pop("orchestrator")),
        validators=validators,
        price_wei=flags.pop("price"),
        fund_wei=flags.pop("fund"),
        **flags,
    )
