"""`muster data`: makes data sets of a run's accepted rollouts, and checks them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.audit.command import dump_option, evidence_option, read_history
from muster.client.audit.contradictions import Check
from muster.client.cli.options import (
    FILE,
    FOLDER,
    PASSWORD_HELP,
    json_option,
    open_keystore,
    run_option,
    together,
)
from muster.client.cli.printing import print_json, print_result, printable
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError
from muster.protocol.ids import RunId
from muster.telemetry import progress, setup_logging

if TYPE_CHECKING:
    from muster.client.audit.history import ChainHistory
    from muster.client.dataset.export import Stream
    from muster.client.dataset.folder import DataFolder
    from muster.client.dataset.rows import Places
    from muster.client.dataset.selection import HeldOut, SelectionSettings


@click.group()
def data() -> None:
    """Make data sets of verified rollouts, and check them."""


exclude_option = click.option(
    "--exclude", type=FILE, multiple=True, help="Texts that no row may repeat; repeatable."
)


file_options = together(
    evidence_option,
    click.option(
        "--source",
        multiple=True,
        metavar="URL",
        help="Server of work and files; repeatable.",
    ),
    click.option("--keystore", type=FILE, help="A trainer's or validator's, for --source."),
    click.option("--password-file", type=FILE, help=PASSWORD_HELP),
    click.option("--model", type=FOLDER, help="Model folder, for its tokenizer."),
)
"""Options that name the submissions' files, the documents and the tokenizer."""


@data.command("export")
@run_option
@click.option("--out", type=FOLDER, required=True, help="The data set's folder.")
@click.option("--part", "parts", multiple=True, help="Rows of this part only; repeatable.")
@click.option("--reward-at-least", type=click.FloatRange(0, 1), default=0.0, help="Least reward.")
@click.option("--tokens-at-least", type=click.IntRange(1), default=1, help="Shortest completion.")
@click.option(
    "--tokens-at-most", type=click.IntRange(1), default=1 << 20, help="Longest completion."
)
@click.option("--finished", is_flag=True, help="No rows that the token limit cut off.")
@click.option(
    "--agreement",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Least share of its group that agrees.",
)
@click.option("--best", is_flag=True, help="Only the best sample of each group.")
@click.option("--per-problem", type=click.IntRange(1), help="Most rows per problem.")
@click.option(
    "--test-share",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Share of problems in the split `test`.",
)
@exclude_option
@file_options
@json_option
@dump_option
def export_command(run: int, as_json: bool, **options: Any) -> None:
    """Write a run's accepted rollouts as a data set, one row a sample.

    Run the same command again to continue an interrupted one, or to add newly accepted work.
    Libraries load the folder: `datasets.load_dataset("DIR")`.

    \b
    Examples:
      muster data export --run 1 --evidence files --evidence documents --model base --out traces
      muster data export --run 1 --source http://host:8600 --keystore trainer.json --model base \\
          --reward-at-least 1 --per-problem 1 --test-share 0.02 --exclude aime.jsonl --out traces
    """
    from muster.client.dataset.export import Stream
    from muster.client.dataset.selection import HeldOut

    setup_logging("data")
    run_id, history = RunId(run), read_history(options)
    history.require_run(run_id)
    stream, held_out = Stream.of(history, run_id), HeldOut(options["exclude"])
    folder = asyncio.run(_export(history, stream, held_out, options))
    facts = {
        "data_set": str(folder.path),
        "root": hex0x(folder.export.root()),
        "rows": sum(each.rows for each in folder.export.files()),
        "submissions": folder.export.end,
        "files": len(list(folder.export.files())),
    }
    print_result(facts, as_json, {**facts, "next": f"muster data verify {folder.path}"})


async def _export(
    history: ChainHistory, stream: Stream, held_out: HeldOut, options: dict[str, Any]
) -> DataFolder:
    """Extend the folder that the flags name up to the end of the stream."""
    from muster.client.dataset.export import export_rows, origin_of, put_card
    from muster.client.dataset.folder import DataFolder
    from muster.client.dataset.rows import open_inputs
    from muster.client.dataset.selection import Selection

    settings = _settings(held_out, options)
    async with open_inputs(history, stream.run_id, _places(options)) as inputs:
        inputs.maker.require_parts(settings.parts)
        origin = origin_of(history, stream.run_id, inputs.tokenizer)
        folder = DataFolder.continue_or_begin(options["out"], origin, settings)
        selection = Selection(settings, held_out)
        try:
            with progress("submissions") as show:
                await export_rows(folder, stream, inputs.maker, selection, inputs.find_file, show)
        finally:
            # The part that was exported gets its card after an error, too.
            put_card(folder, stream)
        return folder


def _settings(held_out: HeldOut, options: dict[str, Any]) -> SelectionSettings:
    from muster.client.dataset.selection import SelectionSettings

    return SelectionSettings(
        reward_at_least=options["reward_at_least"],
        tokens_at_least=options["tokens_at_least"],
        tokens_at_most=options["tokens_at_most"],
        only_finished=options["finished"],
        agreement=options["agreement"],
        only_best=options["best"],
        per_problem=options["per_problem"] or 0,
        test_share=options["test_share"],
        parts=tuple(options["parts"]),
        held_out=tuple(held_out.hashes),
    )


@data.command("verify")
@click.argument("folder", metavar="DIR", type=FOLDER)
@exclude_option
@file_options
@json_option
@dump_option
def verify_command(folder: Path, as_json: bool, **options: Any) -> None:
    """Compare a data set with the ledger, and with the submissions' files if they are at hand.

    Exits with 1 when a row, a file or the card contradicts. Names what it could not compare.

    \b
    Examples:
      muster data verify traces --dump run-1.dump.gz
      muster data verify traces --evidence files --evidence documents --model base
    """
    from muster.client.dataset.folder import DataFolder
    from muster.client.dataset.selection import HeldOut
    from muster.client.dataset.verify import check_bytes, check_folder

    setup_logging("data")
    found, held_out = DataFolder.open(folder), HeldOut(options["exclude"])
    checks = [check_bytes(found)]
    if checks[0].passed:
        history = read_history(options)
        checks += check_folder(found, history, held_out)
        if all(check.passed for check in checks):
            checks.append(asyncio.run(_check_rows(found, history, held_out, options)))
    _finish(found, checks, as_json=as_json)


@data.command("judge")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--judge", type=FOLDER, required=True, help="The judge's model.")
@click.option("--task-set", type=FILE, help="The run's task set, with its reference answers.")
@click.option("--opinions", type=FILE, help="File of the replies.  [default: DIR/opinions.jsonl]")
@click.option(
    "--check", "limits", type=FILE, help="Check the replies under this calibration of the judge."
)
@json_option
def judge_command(
    folder: Path,
    judge: Path,
    task_set: Path | None,
    opinions: Path | None,
    limits: Path | None,
    *,
    as_json: bool,
) -> None:
    """Ask a judge about the rows that a judge graded, and keep its replies with their proofs.

    --check FILE checks somebody else's replies, each by one forward pass; FILE is the judge's
    calibration. Exits with 1 when a reply is not the judge's, or a reward is not its score.

    \b
    Examples:
      muster data judge traces --judge ./judge
      muster calibrate --model ./judge --out judge.json
      muster data judge traces --judge ./judge --check judge.json
    """
    from muster.client.dataset.folder import DataFolder
    from muster.client.dataset.opinions import (
        NAME,
        check_opinions,
        header_of,
        judged_rows,
        write_opinions,
    )
    from muster.client.dataset.verify import check_bytes
    from muster.inference.contributions import weights_hash
    from muster.inference.engine_judge import EngineJudge, read_limits
    from muster.tasks import TaskSet

    setup_logging("data")
    found = DataFolder.open(folder)
    checks = [check_bytes(found)]
    if checks[0].passed:
        calibration = None if limits is None else read_limits(limits)
        rows = judged_rows(found, None if task_set is None else TaskSet.open(task_set))
        path, header = opinions or folder / NAME, header_of(found, weights_hash(judge))
        asked = EngineJudge.load(judge)
        with progress("rows") as show:
            if calibration is None:
                checks += write_opinions(path, header, asked, rows, show)
            else:
                checks += check_opinions(path, header, asked, calibration, rows, show)
    _finish(found, checks, as_json=as_json)


async def _check_rows(
    folder: DataFolder, history: ChainHistory, held_out: HeldOut, options: dict[str, Any]
) -> Check:
    """Return whether rows equal those of their files, as far as the files are available."""
    from muster.client.dataset.export import Stream
    from muster.client.dataset.rows import open_inputs
    from muster.client.dataset.verify import check_rows

    if options["model"] is None:
        what = "rows were not made again: give --model, and --evidence or --source"
        return Check("rows", passed=True, detail=what, is_open=True)
    run_id = RunId(folder.export.origin.run_id)
    async with open_inputs(history, run_id, _places(options)) as inputs:
        with progress("submissions") as on_progress:
            stream = Stream.of(history, run_id)
            return await check_rows(
                folder, stream, inputs.maker, inputs.find_file, held_out, on_progress
            )


def _places(options: dict[str, Any]) -> Places:
    """Return the places of copies that the flags name."""
    from muster.client.dataset.rows import Places

    if options["model"] is None:
        raise ConfigError(
            "--model is missing: the policy's tokenizer writes the texts",
            hint="give --model DIR, a folder that `muster model fetch --run N --out DIR` made",
        )
    key = None
    if options["keystore"] is not None:
        key = open_keystore(options["keystore"], options["password_file"]).key
    return Places(options["evidence"], options["source"], options["model"], key)


def _finish(folder: DataFolder, checks: Sequence[Check], *, as_json: bool) -> None:
    """Print the checks; exit with 1 when one fails."""
    if as_json:
        root = hex0x(folder.export.root())
        print_json({"root": root, "checks": [check.to_json() for check in checks]})
    else:
        for check in checks:
            click.echo(printable(f"{check.word:4} {check.name}: {check.detail}"))
    if not all(check.passed for check in checks):
        sys.exit(1)
