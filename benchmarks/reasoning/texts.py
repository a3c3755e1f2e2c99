"""The texts of the lesson's models: problem sets in three parts, and solutions of mixed quality.

Held-out problems share no prompt with what is trained on, at any stage.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reasoning.exercises import (
    BUDGETS,
    Exercise,
    draw_code,
    draw_math,
    short_words,
)

from muster.tasks import TaskSet
from muster.tasks.document import SetPart

PARTS = ("math", "code", "words")
FAMILY_SHARE = 24
"""Words of the family drawn for each short word needed."""

Exercises = Mapping[str, list[Exercise]]
"""By part."""


@dataclass(frozen=True, slots=True)
class Split:
    """Exercises by what they are for."""

    read: Exercises
    """Exercises of the texts."""
    practised: Exercises
    """Exercises of the data run and the reinforcement; no text has their solutions."""
    held_out: Exercises
    """Exercises of all measurements."""


def split_exercises(read: int, practised: int, held_out: int, seed: int) -> Split:
    """Return these numbers of exercises of each part, no prompt twice."""
    rng = random.Random(seed)
    found: dict[str, list[Exercise]] = {}
    wanted = read + practised + held_out
    drawn = {
        "math": iter(lambda: draw_math(rng), None),
        "code": iter(lambda: draw_code(rng), None),
        "words": short_words(FAMILY_SHARE * wanted, seed),
    }
    for part, source in drawn.items():
        found[part] = _different(source, wanted)
    return Split(
        {part: each[practised + held_out :] for part, each in found.items()},
        {part: each[held_out : practised + held_out] for part, each in found.items()},
        {part: each[:held_out] for part, each in found.items()},
    )


def _different(source: Iterator[Exercise], count: int) -> list[Exercise]:
    found: dict[str, Exercise] = {}
    for exercise in source:
        found.setdefault(exercise.problem.prompt, exercise)
        if len(found) == count:
            break
    return list(found.values())


def task_set(name: str, exercises: Exercises) -> TaskSet:
    """Return the exercises' problems as one task set in parts."""
    problems = [exercise.problem for part in PARTS for exercise in exercises[part]]
    parts = tuple(SetPart(part, f"{name} {part}", len(exercises[part])) for part in PARTS)
    return TaskSet.of(name, "1", problems, parts)


def write_texts(path: Path, exercises: Exercises, count: int, right: float, seed: int) -> list[str]:
    """Write `count` worked solutions as a data set, and return them as texts.

    Each is right with probability `right`. Half of the mathematics asks for a length, which says
    nothing about that of the solution.
    """
    rng = random.Random(f"texts {seed} {right}")
    texts = []
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            part = rng.choice(PARTS)
            exercise = rng.choice(exercises[part])
            completion = exercise.completion(rng, is_right=rng.random() < right)
            asks = part == "math" and rng.random() < 0.5
            row = {
                "problem_id": exercise.problem.problem_id,
                "prompt": exercise.problem.prompt,
                "completion": completion,
                "target_length": rng.choice(BUDGETS) if asks else -1,
            }
            file.write(json.dumps(row) + "\n")
            texts.append(f"{exercise.problem.prompt}\n{completion}")
    return texts
