"""A mixture in the training stream: the ticket gives a group's part, each with its own rules."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from trainer_fakes import EOS, FakeLedger, Feed, make_recipe, make_rollouts, no_sleep

from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.mixture import CurriculumPoint, PartFilters, PartRecipe, TasksRecipe
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout, encode_rollouts
from muster.trainer.stream.filters import DifficultyPools, Drop, PartTally, Pool, Sieve
from muster.trainer.stream.reader import Cursor, StepInput, StreamReader, parts_of, read_submission

SUMS = PartRecipe(
    name="sums", target_lengths=(4,), filters=PartFilters(pool_window=4, pool_easy=0.5)
)
SORTS = PartRecipe(name="sorts", filters=PartFilters(drop_truncated=True, pool_window=4))
LEDGER = FakeLedger()


def mixed(*parts: PartRecipe) -> Recipe:
    return make_recipe().model_copy(update={"tasks": TasksRecipe(parts=parts)})


RECIPE = mixed(SUMS, SORTS)
RECORD = LEDGER.accept(keccak(b"file"))


def names(seed: Hash32, recipe: Recipe = RECIPE) -> list[str]:
    return [part.name for part in parts_of(RECORD, recipe, seed)]


SEED = next(s for s in (keccak(bytes([n])) for n in range(99)) if names(s) == ["sums", "sorts"])


def written(targets: Sequence[int]) -> bytes:
    rows = [replace(row, target_length=targets[row.group]) for row in make_rollouts(1)]
    return encode_rollouts(rows)


def test_budgets_are_those_of_the_part_that_the_ticket_derives() -> None:
    data = written([4, -1])
    record = LEDGER.accept(file_hash(data))
    assert len(read_submission(data, record, RECIPE, 16, seed=SEED)) == 2


@pytest.mark.parametrize("targets", [[-1, -1], [4, 4], [-1, 4]])
def test_budget_of_another_part_is_refused(targets: list[int]) -> None:
    data = written(targets)
    record = LEDGER.accept(file_hash(data))
    with pytest.raises(EncodingError, match=r"has a target length of .* its ticket derives"):
        read_submission(data, record, RECIPE, 16, seed=SEED)


def test_parts_without_the_tickets_seed_are_nobodys_guess() -> None:
    with pytest.raises(EncodingError, match="the ticket is not known"):
        parts_of(RECORD, RECIPE, None)
    assert [part.name for part in parts_of(RECORD, make_recipe(), None)] == ["", ""]


def test_part_is_of_the_records_step() -> None:
    late = (CurriculumPoint(step=1, weight=0), CurriculumPoint(step=2, weight=1))
    early = (CurriculumPoint(step=1, weight=1), CurriculumPoint(step=2, weight=0))
    recipe = mixed(
        PartRecipe(name="early", curriculum=early), PartRecipe(name="late", curriculum=late)
    )
    found = {
        step: parts_of(replace(RECORD, step=step), recipe, SEED)[0].name  # type: ignore[arg-type]
        for step in (1, 2)
    }
    assert found == {1: "early", 2: "late"}


# The filters


def sieve(pools: DifficultyPools | None = None) -> Sieve:
    return Sieve(RECIPE, pools or DifficultyPools(), frozenset({EOS}))


def group(number: int = 0, **changes: object) -> list[Rollout]:
    return [replace(r, **changes) for r in make_rollouts(number)[:4]]  # type: ignore[arg-type]


def test_each_part_is_sieved_by_its_own_filters() -> None:
    full = (3, 4, 5, 6, 7, 8)
    found = sieve()
    found.take(group(1, completion_tokens=full, problem_id="a"), RECIPE.rules_of("sorts"))
    assert found.dropped == {Drop.TRUNCATED: 4}
    found.take(group(2, completion_tokens=full, problem_id="b"), RECIPE.rules_of("sums"))
    assert (len(found.kept), found.dropped) == (1, {Drop.TRUNCATED: 4})


def test_pools_have_the_bounds_of_their_part() -> None:
    pools = DifficultyPools()
    for part in ("sums", "sorts"):
        for _ in range(2):
            pools.note(part, 0.5, 4, part)
    found = sieve(pools)
    for number, part in enumerate(("sums", "sorts")):
        found.take(group(number, problem_id=part), RECIPE.rules_of(part))
    assert found.dropped == {Drop.EASY: 4}
    assert [each[0].problem_id for each in found.kept] == ["sorts"]
    assert found.pools.sizes(RECIPE.rules_of("sums"))[Pool.EASY] == 1
    assert found.pools.sizes(RECIPE.rules_of("sorts"))[Pool.EASY] == 0
    assert DifficultyPools.from_dict(found.pools.to_dict()) == found.pools


def test_parts_are_told_apart_in_what_they_brought() -> None:
    found = sieve()
    found.take(group(1), RECIPE.rules_of("sums"))
    found.take(group(2, task_reward=1.0), RECIPE.rules_of("sums"))
    tokens = sum(r.sampled for number in (1, 2) for r in group(number))
    assert found.parts == {"sums": PartTally(2, 1, 8, 6.0, tokens), "sorts": PartTally()}


async def test_step_reads_each_group_as_of_its_part() -> None:
    feed = Feed()
    recipe = mixed(PartRecipe(name="sums"), PartRecipe(name="sorts"))
    feed.submit_many(range(2))
    reader = StreamReader(
        feed.ledger, feed.files, recipe, vocab_size=16, seed_of=lambda _: SEED, sleep=no_sleep
    )
    async with asyncio.timeout(5):
        taken: StepInput = await reader.next_step(Cursor(), PolicyVersion(0))
    assert {name: tally.groups for name, tally in taken.parts.items()} == {"sums": 2, "sorts": 2}
