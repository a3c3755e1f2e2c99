"""`muster run create RUN.toml`: a run, checked in all its parts before anything is sent.

1. read the file, the environment and the flags
2. check documents, terms and accounts; try the base model on a sample of the problems
3. say what is spent and what is locked, and ask once
4. create the run, pay in, publish the base model as version 0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.cli.options import (
    FILE,
    FOLDER,
    PASSWORD_HELP,
    acting_options,
    agree as ask,
)

if TYPE_CHECKING:
    from muster.chain import Chain, RunConfig
    from muster.protocol.ids import Address
    from muster.trainer.create import CheckTime, RunPlan
    from muster.trainer.measure.evaluate import Evaluation

    Tried = tuple[Evaluation, CheckTime]

PUBLISH_GAS = 100_000
"""Upper bound of the gas for publishing version 0."""
SAMPLES = 4
"""Samples of the base model per problem."""


@click.command()
@click.argument("file", metavar="[RUN.toml]", type=FILE, required=False)
@click.option("--keystore", type=FILE, help="Keystore of the run's owner.")
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@click.option(
    "--trainer", metavar="ADDR", help="Trainer's account. [default: of --trainer-keystore]"
)
@click.option(
    "--trainer-keystore",
    type=FILE,
    help="Keystore that publishes version 0. [default: the owner's]",
)
@click.option(
    "--trainer-password-file",
    type=FILE,
    help="Password file of --trainer-keystore. [default: the owner's]",
)
@click.option("--orchestrator", metavar="ADDR", help="Orchestrator's account.")
@click.option(
    "--validator",
    "validators",
    metavar="ADDR",
    multiple=True,
    help="Validator's account; repeatable.",
)
@click.option("--quorum", type=int, help="Validators that must agree.")
@click.option("--model", type=FOLDER, help="Base model folder.")
@click.option("--recipe", help="TOML file or preset.")
@click.option("--steps", type=int, help="Training steps. [default: the recipe's]")
@click.option("--task-set", type=FILE, help="The problems.")
@click.option("--calibration", type=FILE, help="From `muster calibrate`.")
@click.option(
    "--engine", "engines", multiple=True, help="Engine that the calibration must cover; repeatable."
)
@click.option("--price", metavar="TOKENS", help="Pay per unit.")
@click.option(
    "--fraud-ppm",
    type=int,
    metavar="N",
    help="First fraud, in millionths. [default: 100000]",
)
@click.option(
    "--exact-fraud-ppm",
    type=int,
    metavar="N",
    help="Exact fraud, in millionths. [default: 500000]",
)
@click.option("--fund", metavar="TOKENS", help="Rewards to pay into the run now. [default: 0]")
@click.option("--store", type=FOLDER, help="The trainer's chunk store.")
@click.option(
    "--documents", type=FOLDER, help="Folder to write the run's documents to, named by hash."
)
@click.option(
    "--sample", type=int, metavar="N", help="Problems to try the base model on. [default: 16]"
)
@click.option("--device", help="Where the model computes. [default: cpu]")
@click.option("--admit-anyway", is_flag=True, help="Accept a task set that the checks refuse.")
@click.option(
    "--accept-unsafe-economics", is_flag=True, help="Create the run even if cheating pays."
)
@acting_options
def create(file: Path | None, yes: bool, as_json: bool, **flags: Any) -> None:
    """Create and fund a run, and publish its base model as version 0. Prints the run's number.

    Example: muster run create examples/run.toml --yes
    """
    import asyncio
    import json

    from muster.app.run_file import read_run, wallets_of
    from muster.client.owning import read_purse
    from muster.telemetry import setup_logging
    from muster.trainer.create import create_run, require_checkable

    switches = {name: flags.pop(name) for name in ("admit_anyway", "accept_unsafe_economics")}
    asked = read_run(file, flags)
    setup_logging("run")
    owner, trainer = wallets_of(asked)
    plan = asked.plan(trainer.address, **switches)

    async def agree(chain: Chain, config: RunConfig) -> None:
        await read_purse(chain, owner.address, plan.fund_wei)
        found = None
        if asked.sample:
            found = await asyncio.to_thread(_try_model, plan, asked.sample, asked.device)
            require_checkable(plan.recipe, found[1], await chain.ledger.outcome_deadline())
        publisher = trainer.address if trainer.address == plan.trainer else None
        await _show(chain, config, plan, (owner.address, publisher), found)
        ask("Create the run?", {"yes": yes})

    created = asyncio.run(
        create_run(
            plan,
            rpc=asked.rpc,
            deployments=asked.deployments,
            owner=owner.key,
            trainer=trainer.key if trainer.address == plan.trainer else None,
            agree=agree,
        )
    )
    click.echo(json.dumps(created) if as_json else created["run_id"])


def _try_model(plan: RunPlan, problems: int, device: str) -> Tried:
    from muster.trainer.create import ModelTrial, try_model

    return try_model(plan, ModelTrial(problems, SAMPLES, device))


async def _show(
    chain: Chain,
    config: RunConfig,
    plan: RunPlan,
    payers: tuple[Address, Address | None],
    found: Tried | None,
) -> None:
    """Print what will be created, spent and locked; raises ConfigError without gas money.

    `payers` are the owner and, if it publishes version 0 now, the trainer.
    """
    from muster.client.cli.run import lines_of
    from muster.client.owning import FUND_GAS, STEP_BYTES
    from muster.client.preflight import money_for, require_gas

    owner, publisher = payers
    creation = await chain.rehearsed_by(owner).write("RunRegistry", "createRun", [config])
    gas = creation.gas_used + (FUND_GAS if plan.fund_wei else 0)
    size = STEP_BYTES + 32 * len(plan.validators) + (2 * STEP_BYTES if plan.fund_wei else 0)
    if publisher == owner:
        gas, size = gas + PUBLISH_GAS, size + STEP_BYTES
    money = await money_for(chain, gas, size)
    facts = {
        **_parts(plan, found),
        "jurors": await _jurors(chain, {owner, *plan.validators}),
        **_terms(plan),
        "gas": f"about {gas:,} of {owner}: {money} of the chain's coin",
    }
    click.echo("\n".join(lines_of(facts)), err=True)
    await require_gas(chain, owner, "run create", money)
    if publisher not in (None, owner):
        published = await money_for(chain, PUBLISH_GAS, STEP_BYTES)
        await require_gas(chain, publisher, "run create, which publishes version 0,", published)


async def _jurors(chain: Chain, excluded: set[Address]) -> str:
    from muster.chain import ChainView, read_view
    from muster.client.disputes.cases import bench_words

    view = await read_view(chain, ChainView())
    return bench_words(sum(juror not in excluded for juror in view.jurors()))


def _parts(plan: RunPlan, found: Tried | None) -> dict[str, str]:
    from muster.client.quantities import format_size
    from muster.protocol.rollouts import MAX_FILE_BYTES
    from muster.tasks import TaskSet
    from muster.trainer.create import largest_file, read_calibration
    from muster.trainer.sft.lineage import describe_base

    made_of = describe_base(plan.model, plan.recipe.prompt)
    measured = read_calibration(plan.calibration).model
    size = largest_file(plan.recipe, measured.hidden_size)
    steps = plan.recipe.training.steps
    return {
        "recipe": f"{plan.recipe.name}; {f'{steps} steps' if steps else 'no last step'}",
        "model": f"{plan.model}, a {measured.architecture}" + ("" if found else "; not loaded"),
        **({"lineage": made_of} if made_of else {}),
        "problems": f"{len(TaskSet.open(plan.task_set)):,} in {plan.task_set}",
        "base model": "not tried" if found is None else _pass_rate(found[0]),
        "engines": f"{measured.engine}, as the calibration has it",
        "files": f"at most {format_size(size)} of {format_size(MAX_FILE_BYTES)}",
        "checks": _check_time(plan, found),
        "judges": f"{plan.quorum} of {len(plan.validators)} validators must agree; each is "
        "invited, and takes its seat with muster validator join",
    }


def _check_time(plan: RunPlan, found: Tried | None) -> str:
    from muster.client.quantities import format_duration

    if found is None:
        return "not measured"
    check = found[1]
    longest = format_duration(int(check.longest_s(plan.recipe)) + 1)
    return f"at most {longest} a submission, as measured on {check.device}"


def _pass_rate(found: Evaluation) -> str:
    if found.reward is None:
        return f"UNKNOWN: none of {found.ungraded} problems could be graded"
    right, ever = found.reward.value, found.pass_at[SAMPLES].value
    said = (
        f"{right:.0%} right on {found.problems} problems, {SAMPLES} times each; {ever:.0%} of them "
        "at least once"
    )
    if found.parts:
        parts = (f"{name} {part.reward.value:.0%}" for name, part in found.parts.items())
        said += f"; by part: {', '.join(parts)}"
    dull = [name for name, part in found.parts.items() if part.reward.value in (0, 1)]
    if ever == 0:
        return (
            f"{said}. NOTHING TO LEARN FROM in this sample: take easier problems, or a better model"
        )
    if right == 1:
        return f"{said}. NOTHING TO LEARN in this sample: take harder problems"
    if dull:
        return f"{said}. NOTHING TO LEARN in the sample of {', '.join(dull)}: change those problems"
    return said


def _terms(plan: RunPlan) -> dict[str, str]:
    from muster.client.quantities import format_slashes, format_tokens

    units = f", for {plan.fund_wei // plan.price_wei:,} units" if plan.fund_wei else ""
    return {
        "pays": f"{format_tokens(plan.price_wei)} tokens per unit (a completion token that counts)",
        "slashes": format_slashes(plan.fraud_ppm, plan.exact_fraud_ppm),
        "locked": f"{format_tokens(plan.fund_wei)} tokens{units}; what is left comes back once the "
        "run is closed",
    }
