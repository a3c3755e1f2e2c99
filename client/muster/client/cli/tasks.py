"""`muster tasks list | show | sample | check | import | pack | publish`: sets and their graders."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from muster.client.cli.options import FILE, FOLDER, json_option
from muster.client.cli.printing import print_facts, print_json, print_result, print_table, printable
from muster.protocol.errors import ConfigError, ProtocolError, TaskError
from muster.protocol.ids import Hash32, Step, to_hash32
from muster.protocol.seeds import mixed_indices
from muster.protocol.set_aside import NOTHING
from muster.settings.flags import RECIPE
from muster.tasks import Problem, TaskSet, identities
from muster.tasks.admission import Admission, Trial, admit
from muster.tasks.importing import FIELDS, Columns, Import, Imported, import_rows
from muster.tasks.registry import installed_makers, installed_verifiers, maker_of
from muster.tasks.row_files import hub_rows, read_rows, write_parquet
from muster.tasks.task_set import pack_sets
from muster.telemetry import progress, setup_logging

SHOWN_CHARS = 60
"""Length of a prompt in a table."""


@click.command("list")
@click.option(
    "--families", is_flag=True, help="Try reasoning-gym's families instead; takes minutes."
)
@json_option
def tasks_list(families: bool, as_json: bool) -> None:
    """List installed task types with their verifiers, and the sets that can be made here.

    \b
    Examples:
      muster tasks list
      muster tasks list --families --json
    """
    if families:
        _list_families(as_json)
        return
    verifiers = [
        {
            "task_type": v.task_type,
            "verifier": v.name,
            "version": v.version,
            "code_hash": v.code_hash,
        }
        for v in identities(installed_verifiers())
    ]
    makers = [
        {"set": m.name, "package": m.package, "version": m.version, "code_hash": m.code_hash}
        for m in sorted(installed_makers().values(), key=lambda m: m.name)
    ]
    if as_json:
        print_json({"verifiers": verifiers, "sets": makers})
        return
    for rows in (verifiers, makers):
        print_table(list(rows[0]), [_short(row) for row in rows])
        click.echo()


def _short(row: dict[str, str]) -> list[str]:
    return [value[:18] + "…" if name == "code_hash" else value for name, value in row.items()]


def _list_families(as_json: bool) -> None:
    from muster.tasks.reasoning_gym import families, find_fault

    found = {}
    names = families()
    with progress("families tried") as on_progress:
        for number, name in enumerate(names, start=1):
            found[name] = find_fault(name)
            on_progress(number, len(names))
    if as_json:
        print_json([{"family": name, "refused": fault} for name, fault in found.items()])
    else:
        print_table(("family", "refused"), [[name, fault or ""] for name, fault in found.items()])


@click.command("show")
@click.argument("task_set", type=FILE)
@click.argument("problem_id", required=False)
@click.option("--proof", is_flag=True, help="Also the path from the problem to the set's root.")
@click.option("--rows", type=click.IntRange(1, 10_000), default=5, help="Most problems.")
@click.option("--recipe", type=RECIPE, help="Show what a model reads: TOML file or preset.")
@click.option("--model", type=FOLDER, help="With --recipe: the model that reads it.")
@json_option
def tasks_show(
    task_set: Path,
    problem_id: str | None,
    proof: bool,
    rows: int,
    recipe: Path | None,
    model: Path | None,
    as_json: bool,
) -> None:
    """Show a task set and some of its problems, or one problem whole, with its proof; or, by
    a recipe, their prompts as a model reads them.

    \b
    Examples:
      muster tasks show tasks.jsonl
      muster tasks show tasks.jsonl sort-digits-3172 --proof --json
      muster tasks show tasks.jsonl --rows 1 --recipe recipe.toml --model ./model
    """
    opened = TaskSet.open(task_set)
    if recipe is not None or model is not None:
        if recipe is None or model is None or proof:
            raise ConfigError("prompts need both --recipe and --model, without --proof")
        first = range(min(rows, len(opened)))
        chosen = first if problem_id is None else [find(opened, problem_id)]
        _show_prompts(opened, chosen, recipe, model, as_json=as_json)
        return
    if problem_id is not None:
        _show_problem(opened, problem_id, proof=proof, as_json=as_json)
        return
    if proof:
        raise ConfigError(
            "--proof needs one problem", hint="give the problem's id after the task set"
        )
    facts = facts_of(opened, task_set)
    chosen = opened.spread(rows) if opened.parts else range(min(rows, len(opened)))
    some = [opened[i] for i in chosen]
    if as_json:
        print_json(facts | {"first": [p.model_dump() for p in some]})
        return
    print_facts(facts | {"parts": _part_lines(opened)})
    click.echo()
    print_table(("problem", "type", "prompt", "gold"), [row_of(p) for p in some])


def _show_prompts(
    opened: TaskSet, chosen: Sequence[int], recipe: Path, model: Path, *, as_json: bool
) -> None:
    from muster.client.calibration import read_recipe
    from muster.inference.framing import pin_prompt, read_tokenizer
    from muster.inference.prompts import encode_prompt
    from muster.protocol.prompts import render_prompt, text_of

    rules = pin_prompt(read_recipe(recipe), model)
    tokenizer = read_tokenizer(model)
    shown = []
    for index in chosen:
        problem, lengths = opened[index], rules.rules_of(opened.part_at(index)).target_lengths
        length = (*lengths, -1)[0]
        prompt = render_prompt(problem.prompt, length, rules.prompt)
        tokens = encode_prompt(tokenizer, prompt)
        found = {"problem": problem.problem_id, "text": text_of(prompt), "tokens": tokens}
        shown.append(found | {"read": tokenizer.convert_ids_to_tokens(tokens)})
    if as_json:
        print_json({"prompt": rules.prompt.model_dump(), "problems": shown})
        return
    print_facts(
        {
            "form": rules.prompt.form,
            "template": rules.prompt.template_hash,
            "answer": f"after {rules.prompt.answer_after}" if rules.prompt.answer_after else "",
        }
    )
    for each in shown:
        click.echo(printable(f"\n{each['problem']}, {len(each['tokens'])} tokens"))
        click.echo("\n".join(f"  {printable(line)}" for line in each["text"].splitlines()))


def facts_of(task_set: TaskSet, path: Path) -> dict[str, Any]:
    """Return the facts of a set that need no reading of its problems."""
    return {
        "name": task_set.name,
        "version": task_set.version,
        "problems": len(task_set),
        "parts": [
            {"name": part.name, "version": part.version, "problems": part.count}
            for part in task_set.parts
        ],
        "bytes": path.stat().st_size,
        "root": "0x" + task_set.hash().hex(),
    }


def _part_lines(task_set: TaskSet) -> list[str]:
    return [f"{part.name}: {part.count:,} problems of {part.version}" for part in task_set.parts]


def row_of(problem: Problem) -> list[str]:
    """Return a problem as a row: id, type, prompt and gold answer, shortened."""
    gold = problem.gold_standard_solution or ""
    texts = (problem.problem_id, problem.task_type, problem.prompt, gold)
    return [" ".join(text.split())[:SHOWN_CHARS] for text in texts]


def _show_problem(task_set: TaskSet, problem_id: str, *, proof: bool, as_json: bool) -> None:
    index = find(task_set, problem_id)
    problem = task_set[index]
    shown: dict[str, Any] = {"index": index, "hash": "0x" + problem.content_hash().hex()}
    shown |= problem.model_dump()
    if proof:
        proven = task_set.prove(index)
        assert proven.proves(problem.to_bytes(), task_set.hash())
        shown["root"] = "0x" + task_set.hash().hex()
        path = ["0x" + sibling.hex() for sibling in proven.path]
        shown["proof"] = {"position": proven.position, "path": path}
    words = {name: value for name, value in shown.items() if name != "proof"}
    words |= shown.get("proof", {})
    print_result(shown, as_json, {name: _as_lines(value) for name, value in words.items()})


def _as_lines(value: Any) -> Any:
    if isinstance(value, dict):
        return [f"{name}: {str(inner)[:200]}" for name, inner in value.items()]
    return value.splitlines() if isinstance(value, str) else value


def find(task_set: TaskSet, problem_id: str) -> int:
    """Return the index of a problem; raises ConfigError when the set does not hold it."""
    for index, problem in enumerate(task_set):
        if problem.problem_id == problem_id:
            return index
    raise ConfigError(f"{task_set.name!r} has no problem {problem_id!r}")


@click.command("sample")
@click.argument("task_set", type=FILE)
@click.option("--seed", required=True, metavar="HEX", help="A ticket's seed, 32 bytes.")
@click.option("--count", type=click.IntRange(1, 4096), help="Problems. [default: 8, or RECIPE's]")
@click.option("--recipe", type=RECIPE, help="Draw by its weights: TOML file or preset.")
@click.option(
    "--step", type=click.IntRange(1), default=1, help="The ticket's step, for a curriculum."
)
@click.option(
    "--set-aside", "policy", type=FOLDER, help="Policy folder: leave out what it sets aside."
)
@json_option
def tasks_sample(
    task_set: Path,
    seed: str,
    count: int | None,
    recipe: Path | None,
    step: int,
    policy: Path | None,
    as_json: bool,
) -> None:
    """Show the problems that a ticket of this seed draws, in its order.

    The seed is keccak(abi.encode(run, beacon, worker, step, index)); docs/protocol.md, section 4.

    \b
    Examples:
      muster tasks sample tasks.jsonl --count 4 \\
          --seed 0x00000000000000000000000000000000000000000000000000000000000000aa
      muster tasks sample mixed.jsonl --recipe recipe.toml --step 40 \\
          --seed 0x00000000000000000000000000000000000000000000000000000000000000aa
    """
    opened = TaskSet.open(task_set)
    try:
        given = to_hash32(seed)
        if recipe is not None:
            chosen = _drawn_by(opened, recipe, given, step, count, policy)
        elif policy is not None:
            raise ConfigError("--set-aside needs --recipe", hint="add --recipe FILE")
        else:
            chosen = mixed_indices(given, [opened.range_of("")] * (count or 8))
    except ProtocolError as error:
        raise ConfigError(str(error)) from error
    if as_json:
        print_json(
            [{"index": i, "part": opened.part_at(i), **opened[i].model_dump()} for i in chosen]
        )
    else:
        columns = ("index", "part", "problem", "type", "prompt", "gold")
        print_table(columns, [[str(i), opened.part_at(i), *row_of(opened[i])] for i in chosen])


def _drawn_by(
    opened: TaskSet,
    recipe: Path,
    seed: Hash32,
    step: int,
    count: int | None,
    policy: Path | None,
) -> list[int]:
    """Return the problems that a ticket draws by a recipe, without those that its policy skips."""
    from muster.client.calibration import read_recipe
    from muster.client.tickets import list_fault
    from muster.inference.engine import set_aside_in

    if count is not None:
        raise ConfigError("--recipe says how many problems a ticket has", hint="leave out --count")
    rules = read_recipe(recipe)
    opened.require_parts(rules)
    listed = set_aside_in(policy) if policy is not None else NOTHING
    if fault := list_fault(rules, opened, listed):
        raise ConfigError(
            f"the list of problems set aside in {policy} is invalid: {fault}",
            hint="give the folder of another version",
        )
    parts = rules.parts_of(seed, Step(step))
    ranges = [opened.range_of(part.name) for part in parts]
    return mixed_indices(seed, ranges, listed, [part.filters.pool_revisit for part in parts])


@click.command("check")
@click.argument("task_set", type=FILE)
@click.option(
    "--sample",
    type=click.IntRange(1, 10**9),
    default=256,
    help="Problems that are graded, spread over the set.",
)
@click.option("--all", "everything", is_flag=True, help="Grade every problem.")
@click.option(
    "--hacked",
    type=click.IntRange(0, 10**6),
    default=4,
    help="Problems of each type that meet the known hacks.",
)
@click.option("--allow-judge", is_flag=True, help="Accept grades that cannot be replayed.")
@json_option
def tasks_check(
    task_set: Path,
    sample: int,
    everything: bool,
    hacked: int,
    allow_judge: bool,
    as_json: bool,
) -> None:
    """Check a task set and its verifiers as strangers will; exit code 1: refused.

    The command reads every row. In the sample, gold answers must score 1, junk and known hacks 0,
    in two processes alike, within bounds of time and memory.

    \b
    Examples:
      muster tasks check tasks.jsonl
      muster tasks check tasks.jsonl --all --json
    """
    setup_logging("tasks")
    opened = TaskSet.open(task_set)
    trial = Trial(len(opened) if everything else sample, hacked, allow_judge)
    with progress("problems checked") as on_progress:
        found = admit(opened, trial, on_progress)
    if as_json:
        print_json(admission_json(found) | {"root": "0x" + opened.hash().hex()})
    else:
        _print_admission(found)
    if not found.is_admitted:
        sys.exit(1)


def admission_json(found: Admission) -> dict[str, Any]:
    """Return a report as JSON values."""
    return {
        "admitted": found.is_admitted,
        "problems": found.problems,
        "tried": found.tried,
        "gradings": found.gradings,
        "hacks": found.hacks,
        "without_gold": found.without_gold,
        "task_types": dict(found.task_types),
        "offences": {
            reason: {"count": o.count, "problem_ids": o.problem_ids, "detail": o.detail}
            for reason, o in found.offences.items()
        },
    }


def _print_admission(found: Admission) -> None:
    kinds = ", ".join(f"{count:,} {name}" for name, count in found.task_types.most_common())
    click.echo(printable(f"{found.problems:,} problems: {kinds}"))
    click.echo(
        f"{found.tried:,} tried by {found.gradings:,} gradings, {found.hacks:,} known hacks; "
        f"{found.without_gold:,} have no known right answer"
    )
    if found.is_admitted:
        click.echo("admitted")
        return
    click.echo()
    columns = ("refused because", "count", "first problems", "found")
    rows = [
        [reason, f"{o.count:,}", " ".join(o.problem_ids), o.detail]
        for reason, o in found.offences.items()
    ]
    print_table(columns, rows)


MADE, FAMILY, HUB = "set:", "rg:", "hf:"
"""Prefixes of sources other than files: installed maker, reasoning-gym family, Hugging Face hub."""


@click.command("import")
@click.argument("sources", nargs=-1, required=True)
@click.option("--out", type=FILE, required=True, help="Receives the task set.")
@click.option("--name", help="The set's name. [default: the first source's]")
@click.option("--version", default="1", help="The set's version.")
@click.option(
    "--count", type=click.IntRange(1), help="Problems to make; most to take of other sources."
)
@click.option("--seed", type=int, default=0, help="Seed of made sets: same seed, same rows.")
@click.option("--split", default="train", help="Split of hf: sources.")
@click.option("--task-type", help="Task type of rows that state none.")
@click.option("--map", "renamed", multiple=True, metavar="FIELD=COLUMN", help="Column of a field.")
@click.option("--skip-bad", is_flag=True, help="Leave bad rows out instead of refusing them all.")
@json_option
def tasks_import(sources: tuple[str, ...], out: Path, as_json: bool, **options: Any) -> None:
    """Make a task set of JSON lines, Parquet files, saved data sets, families or hub data sets.

    Columns are GENESYS's; dictionaries may be text. Bad rows are named by number and reason.

    \b
    Examples:
      muster tasks import train-0.parquet train-1.parquet --out tasks.jsonl --skip-bad
      muster tasks import set:reverse --count 1000 --out reverse.jsonl
      muster tasks import rg:chain_sum --count 1000 --seed 7 --out sums.jsonl
      muster tasks import hf:gsm8k:main --task-type verifiable_math --map prompt=question \\
          --map gold_standard_solution=answer --out gsm8k.jsonl
    """
    setup_logging("tasks")
    plan = Import(
        out=out,
        name=options["name"] or default_name(sources[0]),
        version=options["version"],
        columns=columns_of(options["renamed"], options["task_type"]),
        skip_bad=options["skip_bad"],
        limit=options["count"],
    )
    with progress("rows imported") as on_progress:
        rows = _rows(sources, options)
        found = import_rows(rows, plan, lambda done: on_progress(done, 0))
    if as_json:
        print_json(import_json(found))
    else:
        _print_imported(found, out)
    if found.root is None:
        raise TaskError(
            f"{found.bad} of {found.rows} rows are bad, first row {found.named[0][0]}: "
            f"{found.named[0][1]}",
            hint="correct these rows, or leave them out with --skip-bad",
        )


def default_name(source: str) -> str:
    """Return the name of a set after its first source."""
    for prefix in (MADE, FAMILY, HUB):
        if source.startswith(prefix):
            return source.removeprefix(prefix)[:128]
    return Path(source).stem[:128] or "tasks"


def columns_of(renamed: tuple[str, ...], task_type: str | None) -> Any:
    """Return the columns of the fields; raises ConfigError for a malformed mapping."""
    pairs = dict(part.partition("=")[::2] for part in renamed)
    for name, column in pairs.items():
        if name not in FIELDS or not column:
            raise ConfigError(
                f"--map {name}={column} is not FIELD=COLUMN", hint=f"fields: {', '.join(FIELDS)}"
            )
    return Columns(pairs, {"task_type": task_type} if task_type else {})


def _rows(sources: tuple[str, ...], options: dict[str, Any]) -> Iterator[Any]:
    for source in sources:
        if source.startswith(MADE):
            count, seed = _size(source, options), options["seed"]
            made = maker_of(source.removeprefix(MADE)).make(count, seed)
            yield from (problem.model_dump() for problem in made)
        elif source.startswith(FAMILY):
            from muster.tasks.reasoning_gym import make_problems

            family = source.removeprefix(FAMILY)
            problems = make_problems(family, _size(source, options), options["seed"])
            yield from (problem.model_dump() for problem in problems)
        elif source.startswith(HUB):
            yield from hub_rows(source.removeprefix(HUB), options["split"])
        else:
            yield from read_rows(Path(source))


def _size(source: str, options: dict[str, Any]) -> int:
    if options["count"] is None:
        raise ConfigError(
            f"{source} makes any number of problems", hint="give their number with --count N"
        )
    count: int = options["count"]
    return count


def import_json(found: Imported) -> dict[str, Any]:
    """Return the result of an import as JSON values."""
    return {
        "rows": found.rows,
        "problems": found.problems,
        "repeated": found.repeated,
        "bad": found.bad,
        "bad_rows": [{"row": number, "reason": reason} for number, reason in found.named],
        "reasons": dict(found.reasons),
        "unused_columns": sorted(found.unused),
        "root": None if found.root is None else "0x" + found.root.hex(),
    }


def _print_imported(found: Imported, out: Path) -> None:
    for number, reason in found.named:
        click.echo(printable(f"row {number}: {reason}"), err=True)
    if found.bad > len(found.named):
        click.echo(f"and {found.bad - len(found.named)} more", err=True)
    if found.root is None:
        return
    print_facts(
        {
            "task set": str(out),
            "problems": f"{found.problems:,} of {found.rows:,} rows",
            "repeated": f"{found.repeated:,}" if found.repeated else None,
            "bad": f"{found.bad:,} left out" if found.bad else None,
            "unused": ", ".join(sorted(found.unused)),
            "root": "0x" + found.root.hex(),
        }
    )


@click.command("pack")
@click.argument("parts", metavar="PART=FILE...", nargs=-1, required=True)
@click.option("--out", type=FILE, required=True, help="Receives the task set.")
@click.option("--name", help="The set's name. [default: OUT's]")
@click.option("--version", default="1", help="The set's version. [default: 1]")
@json_option
def tasks_pack(
    parts: tuple[str, ...], out: Path, name: str | None, version: str, as_json: bool
) -> None:
    """Make one task set of several, each of them a part that a recipe gives a weight.

    \b
    Example:
      muster tasks pack math=gsm8k.jsonl code=programs.jsonl --out mixed.jsonl
    """
    setup_logging("tasks")
    named = [part.partition("=")[::2] for part in parts]
    for part, file in named:
        if not part or not file:
            raise ConfigError(f"{part + file!r} is not PART=FILE", hint="such as math=gsm8k.jsonl")
    sets = [(part, TaskSet.open(Path(file))) for part, file in named]
    packed = pack_sets(sets, out, name or out.stem[:128], version)
    facts = facts_of(packed, out)
    print_result(facts, as_json, facts | {"parts": _part_lines(packed)})


@click.command("publish")
@click.argument("task_set", type=FILE)
@click.option("--documents", type=FOLDER, required=True, help="Receives the set, named by root.")
@click.option("--parquet", type=FILE, help="Also write it as Parquet, for other tools.")
@json_option
def tasks_publish(task_set: Path, documents: Path, parquet: Path | None, as_json: bool) -> None:
    """Write a task set as an orchestrator serves it, and say what a run pins.

    Every row is read. `muster run create --documents` writes the same file for its own run.

    \b
    Example:
      muster tasks publish tasks.jsonl --documents documents --parquet tasks.parquet
    """
    setup_logging("tasks")
    opened = TaskSet.open(task_set)
    verifiers = [v.model_dump() for v in identities({problem.task_type for problem in opened})]
    documents.mkdir(parents=True, exist_ok=True)
    document = documents / opened.hash().hex()
    opened.write(document)
    facts = facts_of(opened, document) | {"document": str(document)}
    if parquet is not None:
        write_parquet(opened, parquet)
        facts["parquet"] = str(parquet)
    named = [f"{v['task_type']}: {v['name']} {v['version']}" for v in verifiers]
    lines = {"parts": _part_lines(opened), "verifiers": named}
    print_result(facts | {"verifiers": verifiers}, as_json, facts | lines)
