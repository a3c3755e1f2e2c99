"""Which problems a policy version sets aside, by the difficulty pools after its step.

A list is a pure function of recipe, task set and pools, so a version that is made again has the
same list. Tickets of the version skip listed problems except in some draws (`pool_revisit`), which
keep their pass rates up to date. When the pools set aside more problems than a list may hold, the
problems with the fewest groups are not listed: least is known about them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from muster.protocol.recipe import PartRules, Recipe
from muster.protocol.set_aside import NOTHING, SetAside, most_listed
from muster.tasks import TaskSet
from muster.trainer.stream.filters import DifficultyPools, Pool


@dataclass(frozen=True, slots=True)
class Lists:
    """Makes a run's lists; with the default values, lists nothing."""

    skipping: Sequence[tuple[PartRules, range]] = ()
    """The parts whose problems may be set aside, and where they are in the task set."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Index of every problem, by its id."""
    needed: int = 0
    """Number of problems in a submission."""

    @classmethod
    def over(cls, recipe: Recipe, task_set: TaskSet) -> Self:
        """Return the maker of a run's lists; reads the whole task set. Raises TaskError when its
        parts are not those of the recipe.
        """
        task_set.require_parts(recipe)
        skipping = [
            (rules, task_set.range_of(rules.name))
            for rules in recipe.rules
            if rules.filters.pool_revisit
        ]
        places = {problem.problem_id: index for index, problem in enumerate(task_set)}
        return cls(skipping, places, recipe.sampling.problems_per_submission)

    def of(self, pools: DifficultyPools) -> SetAside:
        """Return the list for these pools; problems outside the task set are not listed."""
        listed = [
            index
            for rules, problems in self.skipping
            for index in self._of_part(pools, rules, problems)
        ]
        return SetAside.of(listed, len(self.places)) if listed else NOTHING

    def _of_part(self, pools: DifficultyPools, rules: PartRules, problems: range) -> list[int]:
        """Return the problems of a part to list, those with the most groups first."""
        found = [
            (-known.groups, self.places.get(problem_id, -1))
            for problem_id, known in pools.rates.items()
            if pools.pool_of(problem_id, rules.filters) is not Pool.ACTIVE
        ]
        best_known = sorted((groups, index) for groups, index in found if index in problems)
        return [index for _, index in best_known[: most_listed(len(problems), self.needed)]]
