"""Whether a validator would accept what is about to be signed: asked while nothing is at stake.

A signature over disturbed work costs stake, and memory, drivers and weights do get disturbed. The
worker recomputes work by prefill, as validators do, and holds it to the run's own limits: a short
item when it loads a policy, which finds an engine or weights that are wrong; and as much of each
submission as there is time for, which finds a machine that went wrong since.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from muster.client.check_statistics import measure
from muster.client.validator.checks import count_strikes
from muster.client.validator.judging import Rules
from muster.client.validator.replay import Replay, replay_rows
from muster.inference import InferenceEngine, Request
from muster.protocol.errors import EngineError, ProofError
from muster.protocol.prompts import render_prompt
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.toploc import Calibration
from muster.toploc.wire import chunk_shapes

SHARE = 0.05
"""Of the time that generating took, what the check may take."""
LEAST_S = 1.0
"""It may take this long in any case: a small submission is checked whole."""
CAREFUL = 0.7
"""Of the time that is left, what is planned: long prefills cost more a token."""
ITEM_SAMPLES = 4
"""Samples of the item that is generated when a policy is loaded, of one chunk of tokens each."""


def require_sound_policy(rules: Rules, engine: InferenceEngine) -> None:
    """Generate a short item of the loaded policy, and replay it.

    It is another one each time, so that what rounding does to one holds nobody up. Raises
    EngineError when it fails check 6 or 7 (docs/protocol.md section 7).
    """
    recipe, sampling, tasks = rules.recipe, rules.recipe.sampling, rules.task_set
    problem = tasks[random.randrange(len(tasks))]
    prompt = render_prompt(problem.prompt, -1, recipe.prompt)
    prompt_tokens = tuple(engine.encode(prompt))
    limit = min(recipe.proof.chunk_tokens, sampling.max_new_tokens)
    seeds = [random.getrandbits(64) for _ in range(ITEM_SAMPLES)]
    asked = [Request(prompt_tokens, seed, sampling.temperature, limit) for seed in seeds]
    made = engine.generate(asked, proof=recipe.proof)
    rows = [
        Rollout(
            problem_id="",
            group=0,
            sample=number,
            sampling_seed=seed,
            target_length=-1,
            policy_version=engine.policy_version or 0,
            prompt_tokens=prompt_tokens,
            completion_tokens=tuple(found.tokens),
            proofs=b"".join(found.proofs),
            task_reward=0.0,
        )
        for number, (seed, found) in enumerate(zip(seeds, made, strict=True))
    ]
    _judge(_replay(rows, engine, recipe), rules.calibration)


def require_sound(
    rows: Sequence[Rollout],
    rules: Rules,
    engine: InferenceEngine,
    generating_s: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Check rows drawn at random, as many as there is time for, the last of them in part.

    Returns how many rows; a chunk of one is always checked, and tells what the others will cost.
    Raises EngineError when one fails check 6 or 7 (docs/protocol.md section 7).
    """
    recipe, calibration = rules.recipe, rules.calibration
    budget_s, started = max(LEAST_S, SHARE * generating_s), clock()
    drawn = random.sample(rows, len(rows))
    first = _beginning(drawn[-1], 1, recipe, engine)
    replays, tokens = _replay([first], engine, recipe), _tokens(first)
    call_s = clock() - started
    _judge(replays, calibration)
    if first is drawn[-1]:
        drawn.pop()
    else:
        replays = []  # its row is drawn again, and longer
    while True:
        spent_s = clock() - started
        planned_s = CAREFUL * (budget_s - spent_s) - call_s  # a call may cost as much by itself
        room = planned_s * tokens / max(spent_s, 1e-9)
        chosen = list(_take(drawn, room, recipe, engine))
        if not chosen:
            break
        replays += _replay(chosen, engine, recipe)
        tokens += sum(map(_tokens, chosen))
    _judge(replays, calibration)
    return max(1, len(replays))


def _take(
    drawn: list[Rollout], room: float, recipe: Recipe, engine: InferenceEngine
) -> Iterator[Rollout]:
    """Take rows of at most `room` tokens together; the last one may be cut."""
    while drawn:
        chunks = (room - len(drawn[-1].prompt_tokens)) // recipe.proof.chunk_tokens
        if _tokens(drawn[-1]) > room and chunks < 1:
            return
        row = drawn.pop()
        yield row if _tokens(row) <= room else _beginning(row, int(chunks), recipe, engine)
        room -= _tokens(row)


def _beginning(row: Rollout, chunks: int, recipe: Recipe, engine: InferenceEngine) -> Rollout:
    """Return a row up to the end of a chunk, with the proofs until there."""
    proof, end = recipe.proof, chunks * recipe.proof.chunk_tokens
    if len(row.completion_tokens) <= end:
        return row
    shapes = chunk_shapes(end, engine.hidden_size, chunk_tokens=proof.chunk_tokens, topk=proof.topk)
    return replace(
        row,
        completion_tokens=row.completion_tokens[:end],
        proofs=row.proofs[: sum(shape.proof_bytes for shape in shapes)],
        replies=tuple((start, min(after, end)) for start, after in row.replies if start < end),
    )


def _tokens(row: Rollout) -> int:
    return len(row.prompt_tokens) + len(row.completion_tokens)


def _replay(rows: Sequence[Rollout], engine: InferenceEngine, recipe: Recipe) -> list[Replay]:
    try:
        return replay_rows(rows, engine, recipe)
    except ProofError as error:
        raise _disturbed(str(error)) from error


def _judge(replays: Sequence[Replay], calibration: Calibration) -> None:
    if strikes := count_strikes(replays, calibration):
        raise _disturbed(
            f"{strikes} strikes in {len(replays)} rows: {_worst(replays, calibration)}"
        )


def _disturbed(what: str) -> EngineError:
    return EngineError(
        f"this machine's own work fails its check: {what}",
        hint="nothing was signed; driver, memory, weights or software are disturbed: muster doctor",
    )


def _worst(replays: Sequence[Replay], calibration: Calibration) -> str:
    found = measure(replays, calibration)
    return ", ".join(str(statistic) for statistic in found if not statistic.passes)
