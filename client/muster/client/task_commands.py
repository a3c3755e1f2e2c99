"""`muster tasks list | show | sample`: looking at task sets and at what grades them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.options import FILE, json_option
from muster.client.printing import print_facts, print_json, print_table
from muster.protocol.errors import ConfigError, MusterError

if TYPE_CHECKING:
    from muster.tasks import Problem, TaskSet

SHOWN_CHARS = 60
"""Of a prompt, in a table."""


@click.command("list")
@click.option("--families", is_flag=True, help="Try reasoning-gym's families instead: minutes.")
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
    from muster.tasks.registry import installed_verifiers
    from muster.tasks.set_makers import installed_makers

    verifiers = [
        {"task_type": name, "verifier": v.name, "version": v.version, "code_hash": v.code_hash}
        for name, v in sorted(installed_verifiers().items())
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
    from muster.telemetry.progress import progress

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
@click.option(
    "--rows", type=click.IntRange(1, 10_000), default=5, help="Most problems. [default: 5]"
)
@json_option
def tasks_show(
    task_set: Path, problem_id: str | None, proof: bool, rows: int, as_json: bool
) -> None:
    """Show a task set and some of its problems, or one problem whole, with its proof.

    \b
    Examples:
      muster tasks show tasks.jsonl
      muster tasks show tasks.jsonl sort-digits-3172 --proof --json
    """
    from muster.tasks import TaskSet

    opened = TaskSet.open(task_set)
    if problem_id is not None:
        _show_problem(opened, problem_id, proof=proof, as_json=as_json)
        return
    if proof:
        raise ConfigError("--proof is of one problem", hint="give its id as well")
    facts = facts_of(opened, task_set)
    some = [opened[i] for i in range(min(rows, len(opened)))]
    if as_json:
        print_json(facts | {"first": [p.model_dump() for p in some]})
        return
    print_facts(facts)
    click.echo()
    print_table(("problem", "type", "prompt", "gold"), [row_of(p) for p in some])


def facts_of(task_set: TaskSet, path: Path) -> dict[str, Any]:
    """Return what is known of a set without reading its problems."""
    return {
        "name": task_set.name,
        "version": task_set.version,
        "problems": len(task_set),
        "bytes": path.stat().st_size,
        "root": "0x" + task_set.hash().hex(),
    }


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
    if as_json:
        print_json(shown)
        return
    shown |= shown.pop("proof", {})
    print_facts({name: _as_lines(value) for name, value in shown.items()})


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
@click.option("--count", type=click.IntRange(1, 4096), default=8, help="Problems. [default: 8]")
@json_option
def tasks_sample(task_set: Path, seed: str, count: int, as_json: bool) -> None:
    """Show the problems that a ticket of this seed draws, in its order.

    The seed is keccak(abi.encode(run, beacon, worker, step, index)); docs/protocol.md, section 4.

    \b
    Example:
      muster tasks sample tasks.jsonl --count 4 \\
          --seed 0x00000000000000000000000000000000000000000000000000000000000000aa
    """
    from muster.protocol.ids import to_hash32
    from muster.protocol.seeds import problem_indices
    from muster.tasks import TaskSet

    opened = TaskSet.open(task_set)
    try:
        chosen = problem_indices(to_hash32(seed), count, len(opened))
    except MusterError as error:
        raise ConfigError(str(error)) from error
    if as_json:
        print_json([{"index": i, **opened[i].model_dump()} for i in chosen])
    else:
        columns = ("index", "problem", "type", "prompt", "gold")
        print_table(columns, [[str(i), *row_of(opened[i])] for i in chosen])
