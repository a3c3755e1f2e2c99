"""A mixture: the parts of a run's task set, with the weights and rules of each.

For each problem of a ticket, first its part is drawn, by the weights at the ticket's step, then the
problem within the part (`muster.protocol.seeds`). Weights and everything computed from them are
integers, so every machine gets the same part.
"""

from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from muster.protocol.documents import DocumentPart, Since

MOST_PARTS = 16
MAX_WEIGHT = 1_000_000
"""Weight of a part; the sum over all parts stays below 2^24."""
PART_NAME = "[a-z][a-z0-9_]{0,31}"
"""Pattern of a part's name, which appears in names of figures."""

Lengths = tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...]
"""Length budgets in tokens."""
Weight = Annotated[int, Field(ge=0, le=MAX_WEIGHT)]


class PartFilters(DocumentPart):
    """Which accepted rollouts of a part are trained on."""

    drop_truncated: bool = False
    """Whether samples that reach the token limit without EOS are left out."""
    pool_window: Annotated[int, Field(ge=0, le=1024)] = 0
    """Groups over which a problem's pass rate is averaged; 0 for no difficulty pools."""
    pool_min_groups: Annotated[int, Field(ge=1, le=1024)] = 2
    """Least groups of a problem before it can be set aside."""
    pool_hard: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Problems are set aside as too hard while their pass rate is at most this."""
    pool_easy: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Problems are set aside as too easy while their pass rate is at least this."""
    pool_revisit: Annotated[int, Field(ge=0, le=1024), Since(4)] = 0
    """Tickets skip problems that are set aside, except for one problem in so many, which is drawn
    from all problems so that pass rates are still measured. 0 if tickets skip none."""

    @model_validator(mode="after")
    def _pools_leave_something(self) -> Self:
        if self.pool_hard >= self.pool_easy:
            raise ValueError(f"pool_hard {self.pool_hard} must be below pool_easy {self.pool_easy}")
        if self.pool_revisit == 1:
            raise ValueError("pool_revisit 1 skips nothing: 0 for that, or 2 and more")
        if self.pool_revisit and not self.pool_window:
            raise ValueError("pool_revisit needs pool_window: without pools nothing is set aside")
        return self


class CurriculumPoint(DocumentPart):
    """A part's weight at one step."""

    step: Annotated[int, Field(ge=1, lt=1 << 32)]
    """Rollout step, as in tickets."""
    weight: Weight
    """The weight there."""


class PartRecipe(DocumentPart):
    """A part of the task set, and the rules for its problems."""

    name: Annotated[str, Field(pattern=f"^{PART_NAME}$")]
    """The part's name in the task set's document."""
    weight: Weight = 1
    """Frequency of its problems, relative to the other parts' weights."""
    curriculum: Annotated[tuple[CurriculumPoint, ...], Field(max_length=64)] = ()
    """Its weight by step, in place of `weight`: linear between these points, rounded up; constant
    before the first and after the last."""
    target_lengths: Lengths | None = None
    """Its length budgets; left out for those of [sampling]."""
    filters: PartFilters | None = None
    """Its filters and pools; left out for those of [filters]."""

    @model_validator(mode="after")
    def _weight_is_said_once(self) -> Self:
        steps = [point.step for point in self.curriculum]
        if any(one >= next_one for one, next_one in pairwise(steps)):
            raise ValueError(f"the curriculum's steps {steps} must ascend")
        if steps and self.weight != type(self).model_fields["weight"].default:
            raise ValueError(f"weight {self.weight} has no effect with a curriculum: leave it out")
        return self

    def weight_at(self, step: int) -> int:
        """Return the weight at a step."""
        points = self.curriculum
        if not points:
            return self.weight
        if step <= points[0].step:
            return points[0].weight
        for one, other in pairwise(points):
            if step <= other.step:
                length = other.step - one.step
                drawn = one.weight * (other.step - step) + other.weight * (step - one.step)
                # Rounded up, so that a positive weight never becomes 0.
                return -(-drawn // length)
        return points[-1].weight

    def comes_up(self, steps: int) -> bool:
        """Tell whether the weight is above 0 at some of the first `steps` steps; 0 for any."""
        points = [point.step for point in self.curriculum if not steps or point.step <= steps]
        # A line that is 0 at both ends is 0 everywhere between.
        return any(map(self.weight_at, [1, *points, *([steps] if steps else [])]))


class TasksRecipe(DocumentPart):
    """The parts of the task set that problems come from, and how often."""

    parts: Annotated[tuple[PartRecipe, ...], Field(max_length=MOST_PARTS)] = ()
    """All parts that the task set has; none for a task set without parts."""

    def weights_at(self, step: int) -> tuple[int, ...]:
        """Return the parts' weights at a step."""
        return tuple(part.weight_at(step) for part in self.parts)

    @model_validator(mode="after")
    def _something_comes_up(self) -> Self:
        names = [part.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"part {name!r} comes {names.count(name)} times: name each once")
        # Between two points all weights are linear: their sum is 0 only if it is 0 at both ends.
        steps = sorted({1, *(point.step for part in self.parts for point in part.curriculum)})
        for step in steps if self.parts else []:
            if not any(self.weights_at(step)):
                raise ValueError(f"at step {step} every part has weight 0: nothing could be drawn")
        return self
