"""Which of the trainer's figures the dashboard draws, and what it says about them.

Names are those of docs/reference/metrics.md. Evaluations are drawn over the policy version that
they measured, which is the training step that made it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muster.orchestrator.services.training import TrainingMetrics
from muster.protocol.recipe import Recipe

IDLE_STEPS = 3
"""Steps in a row without anything to train on after which the page says so."""
SHOWN_POINTS = 400
"""Points of one series; a longer one is thinned."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a training step."""

    step: int
    """Training step or policy version."""
    value: float
    """The figure."""
    low: float
    """Lower end of its interval; the value itself without one."""
    high: float
    """Upper end."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or measured dots."""

    label: str
    """What it is."""
    points: list[Point]
    """By step, ascending."""
    is_dots: bool = False
    """Whether it is single measurements with intervals."""
    gaps: tuple[int, ...] = ()
    """Steps at which there is no value: the line is not drawn across them."""

    @property
    def segments(self) -> list[list[Point]]:
        """The points between gaps."""
        parts: list[list[Point]] = [[] for _ in range(len(self.gaps) + 1)]
        for point in self.points:
            parts[bisect(self.gaps, point.step)].append(point)
        return [part for part in parts if part]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart."""

    key: str
    """Its id on the page."""
    title: str
    """What it shows."""
    unit: str
    """Unit of its values."""
    meaning: str
    """One sentence for people who see it for the first time."""
    empty: str
    """What to say while there is nothing to draw."""
    series: list[Series]
    """What is drawn, the main one first."""
    floor: float | None = None
    """A value that the axis reaches down to."""
    ceiling: float | None = None
    """A value that it reaches up to."""
    decimals: int = 3
    """Decimals of its values."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(series.points for series in self.series)

    @property
    def latest(self) -> Point | None:
        """The newest point of the main series that has one."""
        return next((s.points[-1] for s in self.series if s.points), None)

    def format(self, value: float) -> str:
        """Return a value as shown."""
        return f"{value:,.{self.decimals}f}"


_AFTER_STEP = "The trainer reports this after its first step."

Columns = Callable[[str], dict[int, float]]
"""A figure by step."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Training steps at the end of a run so far in which nothing was trained on."""

    steps: int
    """How many in a row."""
    reasons: list[tuple[str, int]]
    """Why samples of the last of them were left out, the most frequent first."""


def idle(training: TrainingMetrics) -> Idle | None:
    """Return the steps that learned nothing, once there are IDLE_STEPS of them in a row."""
    series = training.series("tokens")
    last = next((n for n, (_, tokens) in enumerate(reversed(series)) if tokens), len(series))
    if last < IDLE_STEPS:
        return None
    left_out = training.at(series[-1][0])
    reasons = [
        (name.removeprefix("dropped_"), int(count))
        for name, count in left_out.items()
        if name.startswith("dropped_") and count
    ]
    return Idle(last, sorted(reasons, key=lambda reason: -reason[1]))


def panels(training: TrainingMetrics, recipe: Recipe) -> list[Panel]:
    """Return the reward and the small multiples, of what the run has."""
    columns = training.column
    shown = [_reward(columns), *_multiples(columns)]
    if recipe.sampling.target_lengths:
        shown.insert(-1, _length(columns))
    return shown


def _reward(columns: Columns) -> Panel:
    low, high = columns("eval_reward_low"), columns("eval_reward_high")
    return Panel(
        key="reward",
        title="Reward",
        unit="score",
        meaning="Mean task reward of what each training step consumed; dots are evaluations on "
        "held-out problems with their 95 % interval.",
        empty=_AFTER_STEP,
        series=[
            Series("step", _points(columns("reward"))),
            Series("version", _points(columns("eval_reward"), low, high), is_dots=True),
        ],
        floor=0.0,
        ceiling=1.0,
    )


def _multiples(columns: Columns) -> list[Panel]:
    tokens, seconds = columns("tokens"), columns("wall_s")
    empty = {step for step, count in tokens.items() if not count}
    speed = {s: tokens[s] / seconds[s] for s in tokens if seconds.get(s, 0) > 0}

    def trained(values: dict[int, float], name: str = "step") -> Series:
        """Return a figure of tokens, with gaps where none was trained on."""
        kept = {step: value for step, value in values.items() if step not in empty}
        return Series(name, _points(kept), gaps=_streaks(empty))

    return [
        Panel(
            "entropy", "Entropy", "nats / token",
            "How undecided the policy is. A fall to nothing, or a turn upwards beside a growing "
            "gradient norm, comes before a collapse.",
            _AFTER_STEP, [trained(columns("entropy"))], floor=0.0,
        ),
        Panel(
            "grad-norm", "Gradient norm", "L2",
            "Largest gradient norm of the step, before clipping.",
            _AFTER_STEP, [trained(columns("grad_norm"))], floor=0.0,
        ),
        Panel(
            "speed", "Trained tokens per second", "tokens / s",
            "Completion tokens trained on, over the time the step took without waiting for work.",
            _AFTER_STEP, [trained(speed)], floor=0.0, decimals=0,
        ),
        Panel(
            "staleness", "Staleness", "versions",
            "How many versions behind the policies were that sampled what was trained on: mean, "
            "and largest.",
            _AFTER_STEP,
            [
                trained(columns("age_mean"), "mean"),
                trained(columns("age_max"), "largest"),
            ],
            floor=0.0, ceiling=1.0, decimals=2,
        ),
        Panel(
            "mismatch", "Mismatch", "nats / token",
            "Divergence of the policy from those that sampled, before the step: numbers that "
            "differ between machines, and staleness, raise it.",
            _AFTER_STEP, [trained(columns("mismatch_kl"))], floor=0.0, decimals=5,
        ),
    ]  # fmt: skip


def _length(columns: Columns) -> Panel:
    return Panel(
        key="length",
        title="Within the length budget",
        unit="share",
        meaning="Evaluated completions that are no longer than their target.",
        empty="The trainer reports this after its first evaluation: set eval_every.",
        series=[Series("version", _points(columns("eval_within_budget")))],
        floor=0.0,
        ceiling=1.0,
        decimals=2,
    )


def _points(
    values: dict[int, float],
    low: dict[int, float] | None = None,
    high: dict[int, float] | None = None,
) -> list[Point]:
    low, high = low or {}, high or {}
    steps = thin(sorted(values))
    return [Point(s, values[s], low.get(s, values[s]), high.get(s, values[s])) for s in steps]


def _streaks(steps: set[int]) -> tuple[int, ...]:
    """Return the first of each row of neighbouring steps."""
    return tuple(sorted(step for step in steps if step - 1 not in steps))


def thin(steps: Sequence[int]) -> list[int]:
    """Return every n-th step and the last, so that a long run's page stays small."""
    stride = len(steps) // SHOWN_POINTS + 1
    return [*steps[:-1:stride], *steps[-1:]]
