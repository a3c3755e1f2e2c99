"""A mixture: the part of each problem, by integers alone, and recipes that are refused."""

from collections import Counter
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, Step
from muster.protocol.mixture import (
    MAX_WEIGHT,
    MOST_PARTS,
    CurriculumPoint,
    PartFilters,
    PartRecipe,
    TasksRecipe,
)
from muster.protocol.recipe import FilterRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.seeds import mixed_indices, part_of, problem_indices

SEED = keccak(b"ticket")
seeds = st.binary(min_size=32, max_size=32).map(Hash32)
weights = st.lists(st.integers(0, MAX_WEIGHT), min_size=1, max_size=16).filter(any)


def recipe_of(*parts: PartRecipe, steps: int = 0, **changes: Any) -> Recipe:
    """Return a recipe of these parts with budgets and filters of its own."""
    return Recipe(
        name="mixed",
        sampling=SamplingRecipe(
            problems_per_submission=4,
            samples_per_problem=2,
            temperature=1.0,
            max_new_tokens=6,
            target_lengths=(4,),
        ),
        tasks=TasksRecipe(parts=parts),
        training=TrainingRecipe(submissions_per_step=1, steps=steps),
        **changes,
    )


def ramp(*points: tuple[int, int]) -> tuple[CurriculumPoint, ...]:
    return tuple(CurriculumPoint(step=step, weight=weight) for step, weight in points)


# Draws


@given(seeds, st.integers(0, 4095), weights)
def test_part_that_is_drawn_has_a_weight(seed: Hash32, problem: int, given: list[int]) -> None:
    assert given[part_of(seed, problem, given)] > 0


def test_shares_of_parts_are_their_weights() -> None:
    given, draws = (5, 0, 3, 2), 100_000
    counts = Counter(
        part_of(keccak(n.to_bytes(4, "big")), j, given) for n in range(12_500) for j in range(8)
    )
    assert counts[1] == 0
    # Four standard deviations of a share of one half are 0.0063.
    for part, weight in enumerate(given):
        assert abs(counts[part] / draws - weight / 10) < 0.0064


@given(seeds, st.integers(1, 20))
def test_one_part_draws_as_a_set_without_parts(seed: Hash32, count: int) -> None:
    assert mixed_indices(seed, [range(40)] * count) == problem_indices(seed, count, 40)


@given(seeds, st.lists(st.sampled_from([range(8), range(8, 20), range(20, 500)]), max_size=8))
def test_problems_of_a_mixture_are_distinct_and_of_their_parts(
    seed: Hash32, parts: list[range]
) -> None:
    chosen = mixed_indices(seed, parts)
    assert len(set(chosen)) == len(parts)
    assert all(index in part for index, part in zip(chosen, parts, strict=True))


def test_part_without_enough_problems_is_refused() -> None:
    with pytest.raises(EncodingError, match="cannot draw 3 problems from a set of 2"):
        mixed_indices(SEED, [range(2), range(2, 9), range(2), range(2)])


# Weights by step


@given(
    st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6, unique=True).map(sorted), st.data()
)
def test_curriculum_is_the_line_between_its_points(steps: list[int], data: st.DataObject) -> None:
    values = [data.draw(st.integers(0, MAX_WEIGHT)) for _ in steps]
    part = PartRecipe(name="a", curriculum=ramp(*zip(steps, values, strict=True)))
    step = data.draw(st.integers(1, steps[-1] + 5))
    below = [i for i, at in enumerate(steps) if at <= step]
    if not below:
        assert part.weight_at(step) == values[0]
    elif below[-1] == len(steps) - 1:
        assert part.weight_at(step) == values[-1]
    else:
        i = below[-1]
        share = Fraction(step - steps[i], steps[i + 1] - steps[i])
        assert part.weight_at(step) == ceil(values[i] + share * (values[i + 1] - values[i]))


def test_parts_change_over_at_the_step_that_the_ticket_names() -> None:
    recipe = recipe_of(
        PartRecipe(name="easy", curriculum=ramp((3, 1), (4, 0))),
        PartRecipe(name="late", curriculum=ramp((3, 0), (4, 1))),
    )
    assert {part.name for part in recipe.parts_of(SEED, Step(3))} == {"easy"}
    assert {part.name for part in recipe.parts_of(SEED, Step(4))} == {"late"}


def test_part_has_its_own_rules_and_else_the_recipes() -> None:
    own = PartFilters(drop_truncated=True)
    recipe = recipe_of(
        PartRecipe(name="math", target_lengths=(2, 3), filters=own),
        PartRecipe(name="code", target_lengths=()),
        PartRecipe(name="plain"),
    )
    assert recipe.rules_of("math").target_lengths == (2, 3)
    assert recipe.rules_of("math").filters == own
    assert recipe.rules_of("code").target_lengths == ()
    assert recipe.rules_of("plain").target_lengths == (4,)
    assert recipe.rules_of("plain").filters == recipe.filters
    assert recipe.longest_budget == 4


@pytest.mark.parametrize("budget", [0, (1 << 20) + 1])
def test_budgets_that_no_file_holds_are_refused(budget: int) -> None:
    with pytest.raises(ValidationError, match="target_lengths"):
        PartRecipe(name="a", target_lengths=(budget,))


def test_recipe_without_parts_has_one_that_is_the_whole() -> None:
    assert recipe_of().parts_of(SEED, Step(1)) == [recipe_of().rules_of()] * 4


def test_recipe_with_parts_survives_a_round_trip() -> None:
    part = PartRecipe(name="a", curriculum=ramp((1, 2), (9, 0)), target_lengths=(3,))
    recipe = recipe_of(part, PartRecipe(name="b", filters=PartFilters(pool_window=3)))
    assert Recipe.from_bytes(recipe.to_bytes()) == recipe


def test_parts_came_with_schema_version_3() -> None:
    data = recipe_of(PartRecipe(name="a")).to_bytes()
    with pytest.raises(EncodingError, match="tasks came with schema version 3, this is 2"):
        Recipe.from_bytes(data.replace(b'"schema_version":4', b'"schema_version":2'))


def skipping(**changes: Any) -> PartFilters:
    return PartFilters(**{"pool_window": 3, "pool_revisit": 8, **changes})


def test_tickets_skip_problems_since_schema_version_4() -> None:
    """Filters of the run or of a part may skip problems; other recipes keep version 3."""
    own = recipe_of(PartRecipe(name="a"), PartRecipe(name="b", filters=skipping()))
    whole = recipe_of(filters=FilterRecipe(pool_window=3, pool_revisit=8))
    for recipe in (own, whole):
        assert recipe.skips_problems
        assert Recipe.from_bytes(recipe.to_bytes()) == recipe
        with pytest.raises(EncodingError, match="pool_revisit came with schema version 4"):
            Recipe.from_bytes(recipe.to_bytes().replace(b'version":4', b'version":3'))
    plain = recipe_of(PartRecipe(name="a", filters=PartFilters(pool_window=3)))
    before = plain.model_copy(update={"schema_version": 3})
    assert not plain.skips_problems
    assert b"pool_revisit" in plain.to_bytes()
    assert b"pool_revisit" not in before.to_bytes()
    assert Recipe.from_bytes(before.to_bytes()) == before


def test_rules_are_those_of_each_part_in_order() -> None:
    own = recipe_of(PartRecipe(name="a"), PartRecipe(name="b", filters=skipping()))
    found = [(rules.name, rules.filters.pool_revisit) for rules in own.rules]
    assert found == [("a", 0), ("b", 8)]
    assert recipe_of().rules == [recipe_of().rules_of()]


# Recipes that are refused


def names(count: int) -> list[PartRecipe]:
    return [PartRecipe(name=f"p{number}") for number in range(count)]


def test_most_parts_of_largest_weights_still_add_up() -> None:
    given = [PartRecipe(name=f"p{n}", weight=MAX_WEIGHT) for n in range(MOST_PARTS)]
    assert sum(recipe_of(*given).tasks.weights_at(1)) < 1 << 24


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: PartRecipe(name="a", weight=-1), "greater than or equal to 0"),
        (lambda: skipping(pool_revisit=1), "pool_revisit 1 skips nothing"),
        (lambda: skipping(pool_revisit=1025), "less than or equal to 1024"),
        (lambda: skipping(pool_window=0), "pool_revisit needs pool_window"),
        (lambda: PartRecipe(name="a", weight=MAX_WEIGHT + 1), "less than or equal to 1000000"),
        (lambda: PartRecipe(name="a", weight=1 << 64), "less than or equal to 1000000"),
        (lambda: ramp((1 << 32, 1)), "less than 4294967296"),
        (lambda: PartRecipe(name="Math"), "match pattern"),
        (lambda: PartRecipe(name="a", curriculum=ramp((5, 1), (5, 2))), "must ascend"),
        (lambda: PartRecipe(name="a", weight=2, curriculum=ramp((5, 1))), "no effect with a curr"),
        (lambda: recipe_of(*names(MOST_PARTS + 1)), "at most 16"),
        (lambda: recipe_of(*names(2), *names(1)), "part 'p0' comes 2 times"),
        (lambda: recipe_of(PartRecipe(name="a", weight=0)), "at step 1 every part has weight 0"),
        (lambda: recipe_of(PartRecipe(name="a", curriculum=ramp((1, 1), (9, 0)))), "at step 9"),
        (lambda: recipe_of(*names(1), PartRecipe(name="b", weight=0)), "'b' has weight 0 at every"),
    ],
)
def test_mixture_that_cannot_be_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        make()


def test_curriculum_that_starves_a_part_until_the_run_is_over_is_refused() -> None:
    late = PartRecipe(name="late", curriculum=ramp((10, 0), (20, 5)))
    assert recipe_of(*names(1), late, steps=11).tasks.weights_at(11) == (1, 1)
    with pytest.raises(ValidationError, match="part 'late' has weight 0 at every step"):
        recipe_of(*names(1), late, steps=10)


def test_crossing_lines_never_leave_a_step_without_a_part() -> None:
    recipe = recipe_of(
        PartRecipe(name="down", curriculum=ramp((1, 1), (11, 0))),
        PartRecipe(name="up", curriculum=ramp((1, 0), (11, 1))),
    )
    assert all(any(recipe.tasks.weights_at(step)) for step in range(1, 13))
