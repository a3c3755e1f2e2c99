"""Plays attacks: derives every trial from its number, times it, records it, and concludes.

A trial's randomness follows from (attack, variant, number, seed), so any line can be played again.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import IO, Any, Literal

from muster.lab.redteam.stage import Stage
from muster.lab.redteam.trials import Attack, AttackResult, Outcome, Trial, Variant, conclude

Size = Literal["fast", "full"]
Progress = Callable[[Attack, int, int], None]
"""Called with an attack, its finished and its planned trials."""


def shares(attack: Attack, trials: int) -> list[tuple[Variant, int]]:
    """Return how many trials each variant gets. In a statistical attack each gets `trials`; in
    others all variants share them, at least one each. Slow variants get a tenth, and at most
    `most`.
    """
    free = [v for v in attack.variants if v.most is None and v.must_catch and not v.must_pass]
    each = trials if attack.kind == "statistical" else -(-trials // max(1, len(free)))
    return [(v, _share(v, each)) for v in attack.variants]


def _share(variant: Variant, each: int) -> int:
    if variant.most is not None:
        return min(max(1, each // 10), variant.most)
    # Variants outside the pass criterion need fewer trials.
    return each if variant.must_catch or variant.must_pass else -(-each // 3)


def planned(attack: Attack, size: Size, trials: int | None = None) -> int:
    """Return the number of trials: `trials` if given, else the attack's own for a size."""
    if trials is not None:
        return trials
    if size == "full":
        return attack.full
    # Each variant of a statistical attack gets one, if together they make at least five.
    return 1 if attack.kind == "statistical" and len(attack.variants) >= 5 else attack.fast


def play(
    stage: Stage,
    attack: Attack,
    trials: int,
    *,
    seed: int = 0,
    done: Collection[tuple[str, str, int]] = (),
) -> Iterator[Trial]:
    """Yield an attack's trials, except those (attack, variant, number) in `done`."""
    for variant, count in shares(attack, trials):
        if variant.many is not None:
            if (attack.id, variant.name, count - 1) not in done:
                made = _many(stage, attack, variant, count, seed)
                yield from (t for t in made if (t.attack, t.variant, t.number) not in done)
            continue
        assert variant.play is not None  # a variant has `play` or `many`
        for number in range(count):
            if (attack.id, variant.name, number) in done:
                continue
            started = time.process_time()
            outcome: Outcome = variant.play(stage, _random(attack, variant, number, seed))
            spent = time.process_time() - started
            yield Trial(attack.id, variant.name, number, outcome, spent)


def _many(stage: Stage, attack: Attack, variant: Variant, count: int, seed: int) -> Iterator[Trial]:
    assert variant.many is not None  # checked by the caller
    started = time.process_time()
    made = variant.many(stage, _random(attack, variant, 0, seed), count)
    each = (time.process_time() - started) / max(1, len(made))
    for number, outcome in enumerate(made):
        yield Trial(attack.id, variant.name, number, outcome, each)


def _random(attack: Attack, variant: Variant, number: int, seed: int) -> Random:
    return Random(f"{seed}/{attack.id}/{variant.name}/{number}")


def run(
    stage: Stage,
    attacks: Iterable[Attack],
    *,
    size: Size = "fast",
    trials: int | None = None,
    seed: int = 0,
    earlier: Sequence[Trial] = (),
    record: IO[str] | None = None,
    progress: Progress | None = None,
) -> list[AttackResult]:
    """Play attacks and return their results, with the trials of an earlier run; `record` gets a
    JSON line per trial.
    """
    results = []
    done = {(t.attack, t.variant, t.number) for t in earlier}
    for attack in attacks:
        made = [trial for trial in earlier if trial.attack == attack.id]
        count = planned(attack, size, trials)
        total = sum(number for _, number in shares(attack, count))
        for trial in play(stage, attack, count, seed=seed, done=done):
            made.append(trial)
            if record is not None:
                record.write(json.dumps(trial.line(), allow_nan=False) + "\n")
            if progress:
                progress(attack, len(made), max(total, len(made)))
        results.append(conclude(attack, made, stage.terms))
    return results


def read_trials(record: Path) -> list[Trial]:
    """Return the trials in a record; none when there is no such file."""
    if not record.exists():
        return []
    rows = (json.loads(line) for line in record.read_text().splitlines())
    return [_trial(row) for row in rows if "attack" in row]


def _trial(row: dict[str, Any]) -> Trial:
    head = {name: row.pop(name) for name in ("attack", "variant", "number", "cpu_s")}
    return Trial(**head, outcome=Outcome(**row))


def failures(results: Sequence[AttackResult]) -> list[str]:
    """Return the failed attacks, in words."""
    return [f"{r.attack.id}: {r.failure}" for r in results if r.failure]
