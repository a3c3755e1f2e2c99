"""The corpus of known hacks: completions that earn a reward from careless verifiers.

Each must score 0 under a careful verifier, for any problem that it does not happen to answer.
`{gold}` in a completion stands for the gold answer (for programs the first expected output), in a
place where it does not count as an answer.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from muster.tasks.problem import Problem


@dataclass(frozen=True, slots=True)
class Hack:
    """One known hack."""

    name: str
    """Name of the hack."""
    task_types: tuple[str, ...]
    """Task types whose verifiers it was found for."""
    kind: str
    """extractor, candidates, runner, early exit, printing, hard-coded, look-alike, injection, or
    resources."""
    completion: str
    """The model's text."""

    def against(self, problem: Problem) -> str:
        """Return the completion for a problem."""
        return self.completion.replace("{gold}", _shown_gold(problem))


@cache
def all_hacks() -> tuple[Hack, ...]:
    """Return the corpus."""
    lines = files(__package__).joinpath("hacks.jsonl").read_text("utf-8").splitlines()
    rows = (json.loads(line) for line in lines)
    return tuple(
        Hack(row["name"], tuple(row["task_types"]), row["kind"], row["completion"]) for row in rows
    )


def hacks_for(task_type: str) -> tuple[Hack, ...]:
    """Return the hacks against verifiers of a task type; for unknown types, the general ones."""
    known = tuple(hack for hack in all_hacks() if task_type in hack.task_types)
    return known or tuple(hack for hack in all_hacks() if hack.kind in ("injection", "look-alike"))


def _shown_gold(problem: Problem) -> str:
    info = problem.verification_info
    cases = info.get("test_cases")
    if isinstance(cases, list) and cases and isinstance(cases[0], dict):
        return str(cases[0].get("output", ""))
    return str(info.get("ground_truth", info.get("output", problem.gold_standard_solution or "")))
