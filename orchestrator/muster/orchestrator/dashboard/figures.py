"""The trainer's figures on the dashboard, with their captions.

Names are those of docs/reference/metrics.md. Evaluations are drawn over the policy version that
they measured, which is the training step that made it.
"""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from muster.orchestrator.dashboard.training import TrainingMetrics
from muster.protocol.ids import Address
from muster.protocol.recipe import Recipe

IDLE_STEPS = 3
"""After this many steps in a row without trained tokens the page shows a notice."""
SHOWN_POINTS = 400
"""Most points of one series; a longer one is thinned."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a training step."""

    step: int
    """Training step or policy version."""
    value: float
    """The figure."""
    low: float
    """Lower end of its interval; the value itself if it has none."""
    high: float
    """Upper end of its interval; the value itself if it has none."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or measured dots."""

    label: str
    """Name in the legend."""
    points: list[Point]
    """By step, ascending."""
    is_dots: bool = False
    """Whether it is drawn as dots with intervals instead of a line."""
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
    """Heading."""
    unit: str
    """Unit of its values."""
    meaning: str
    """One sentence for people who see it for the first time."""
    empty: str
    """Text shown while there is nothing to draw."""
    series: list[Series]
    """The series, the main one first."""
    floor: float | None = None
    """Value that the vertical axis must reach below."""
    ceiling: float | None = None
    """Value that the vertical axis must reach above."""
    decimals: int = 3
    """Decimals of its values."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(series.points for series in self.series)

    @property
    def latest(self) -> Point | None:
        """The newest point of the first series that has points."""
        return next((s.points[-1] for s in self.series if s.points), None)

    def format(self, value: float) -> str:
        """Return a value as shown."""
        return f"{value:,.{self.decimals}f}"


_AFTER_STEP = "The trainer reports this after its first step."

Columns = Callable[[str], dict[int, float]]
"""A figure by step."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The latest training steps, if they trained on nothing."""

    steps: int
    """Number of such steps in a row."""
    reasons: list[tuple[str, int]]
    """Reasons why samples of the last step were left out, with counts, the most frequent first."""


def idle(training: TrainingMetrics) -> Idle | None:
    """Return the steps that trained on nothing, once there are IDLE_STEPS in a row."""
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
    """Return the reward chart and the small charts for which the run has figures."""
    columns = training.column
    shown = [_reward(columns, training.evaluators), *_multiples(columns)]
    if recipe.longest_budget >= 0:
        shown.insert(-1, _length(columns))
    return [*shown, *(_part(columns, part.name) for part in recipe.tasks.parts)]


def _reward(columns: Columns, evaluators: Mapping[int, Address]) -> Panel:
    low, high = columns("eval_reward_low"), columns("eval_reward_high")
    return Panel(
        key="reward",
        title="Reward",
        unit="score",
        meaning="Mean task reward of what each training step consumed; dots are evaluations on "
        "held-out problems with their 95 % interval." + _signed_by(evaluators),
        empty=_AFTER_STEP,
        series=[
            Series("step", _points(columns("reward"))),
            Series("version", _points(columns("eval_reward"), low, high), is_dots=True),
        ],
        floor=0.0,
        ceiling=1.0,
    )


def _part(columns: Columns, name: str) -> Panel:
    figure = f"part_{name}_"
    low, high = columns(f"eval_{figure}reward_low"), columns(f"eval_{figure}reward_high")
    return Panel(
        key=f"part-{name}",
        title=f"Part {name}",
        unit="score; share",
        meaning="Mean task reward of what each step consumed of this part of the task set, and the "
        "share of its groups that is trained on; dots are evaluations with their 95 % interval.",
        empty=_AFTER_STEP,
        series=[
            Series("reward", _points(columns(f"{figure}reward"))),
            Series("groups kept", _points(columns(f"{figure}kept"))),
            Series("version", _points(columns(f"eval_{figure}reward"), low, high), is_dots=True),
        ],
        floor=0.0,
        ceiling=1.0,
    )


def _signed_by(evaluators: Mapping[int, Address]) -> str:
    """Return a sentence that says who signed how many evaluations."""
    signers = Counter(evaluators.values()).most_common()
    who = ", ".join(f"{address} ({count})" for address, count in signers)
    return f" Evaluations are signed by {who}." if who else ""


def _multiples(columns: Columns) -> list[Panel]:
    tokens, seconds = columns("tokens"), columns("wall_s")
    empty = {step for step, count in tokens.items() if not count}
    speed = {s: tokens[s] / seconds[s] for s in tokens if seconds.get(s, 0) > 0}

    def trained(values: dict[int, float], name: str = "step") -> Series:
        """Return a per-token figure, with gaps at steps without trained tokens."""
        kept = {step: value for step, value in values.items() if step not in empty}
        return Series(name, _points(kept), gaps=_streaks(empty))

    return [
        Panel(
            "entropy", "Entropy", "nats / token",
            "How undecided the policy is. A fall to zero, or a rise together with a growing "
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
            "Trained completion tokens, divided by the step's time without waiting for work.",
            _AFTER_STEP, [trained(speed)], floor=0.0, decimals=0,
        ),
        Panel(
            "time", "Time of a step", "s",
            "How long a step computed, and how long it waited for its rollouts: more workers "
            "shorten the wait, a faster trainer the rest.",
            _AFTER_STEP,
            [
                Series("training", _points(seconds)),
                Series("waiting for rollouts", _points(columns("wait_s"))),
            ],
            floor=0.0, decimals=2,
        ),
        Panel(
            "mfu", "Model FLOPs utilisation", "share",
            "Operations that the model needs, as a share of what the trainer's machine can do in "
            "the same time.",
            _AFTER_STEP, [trained(columns("mfu"))], floor=0.0,
        ),
        Panel(
            "staleness", "Staleness", "versions",
            "How many versions old the policies were that sampled the trained rollouts: mean and "
            "largest.",
            _AFTER_STEP,
            [
                trained(columns("age_mean"), "mean"),
                trained(columns("age_max"), "largest"),
            ],
            floor=0.0, ceiling=1.0, decimals=2,
        ),
        Panel(
            "mismatch", "Mismatch", "nats / token",
            "Divergence of the policy from those that sampled, before the step: rounding that "
            "differs between machines, and old policies, raise it.",
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
    """Return the first step of each unbroken sequence."""
    return tuple(sorted(step for step in steps if step - 1 not in steps))


def thin(steps: Sequence[int]) -> list[int]:
    """Return every n-th step and the last, so that a long run's page stays small."""
    stride = len(steps) // SHOWN_POINTS + 1
    return [*steps[:-1:stride], *steps[-1:]]


_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 24


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Coordinate."""
    label: str
    """Its text."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A measured point with its interval."""

    x: float
    """Coordinate."""
    y: float
    """Coordinate."""
    low: float
    """Coordinate of the interval's lower end."""
    high: float
    """Coordinate of the interval's upper end."""
    label: str
    """Text of its tooltip."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart's geometry for the template."""

    width: int
    """Width of the box."""
    height: int
    """Height of the box."""
    left: float
    """Left edge of the plot."""
    right: float
    """Right edge of the plot."""
    bottom: float
    """Lower edge of the plot."""
    lines: list[tuple[int, str]]
    """Polylines: number of the series, and points."""
    dots: list[Dot]
    """Measured points."""
    x_ticks: list[Tick]
    """Ticks of the horizontal axis: steps."""
    y_ticks: list[Tick]
    """Ticks of the vertical axis: values."""


def draw(panel: Panel, width: int, height: int) -> Chart:
    """Return the chart of a panel with at least one point."""
    points = [point for series in panel.series for point in series.points]
    first, last = min(p.step for p in points), max(p.step for p in points)
    if first == last:
        first, last = first - 1, last + 1
    levels = y_levels(panel, points)
    low, high = levels[0], levels[-1]

    def x(step: float) -> float:
        share = (step - first) / (last - first)
        return round(_LEFT + share * (width - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        share = (high - value) / (high - low)
        return round(_TOP + share * (height - _TOP - _BOTTOM), 1)

    lines, dots = [], []
    for number, series in enumerate(panel.series):
        for segment in () if series.is_dots else series.segments:
            lines.append((number, " ".join(f"{x(p.step)},{y(p.value)}" for p in segment)))
        for p in series.points if series.is_dots else ():
            label = f"{series.label} {p.step}: {panel.format(p.value)}"
            dots.append(Dot(x(p.step), y(p.value), y(p.low), y(p.high), label))
    steps = [s for s in round_levels(first, last, 8, whole=True) if first <= s <= last]
    return Chart(
        width=width,
        height=height,
        left=_LEFT,
        right=width - _RIGHT,
        bottom=height - _BOTTOM,
        lines=lines,
        dots=dots,
        x_ticks=[Tick(x(step), f"{step:g}") for step in steps],
        y_ticks=[Tick(y(level), short(level)) for level in levels],
    )


def y_levels(panel: Panel, points: Sequence[Point]) -> list[float]:
    """Return the ticks of the vertical axis, which enclose every point and interval."""
    low, high = min(p.low for p in points), max(p.high for p in points)
    if panel.floor is not None:
        low = min(low, panel.floor)
    if panel.ceiling is not None:
        high = max(high, panel.ceiling)
    return round_levels(low, high, 4)


def round_levels(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Return about `count` round numbers from at or below `low` to at or above `high`."""
    # No axis needs finer steps than this.
    span = max(high - low, 1e-9 * max(abs(low), abs(high)), 1e-12)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    stride = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    if whole:
        stride = max(1.0, math.ceil(stride))
    start, end = math.floor(low / stride), math.ceil(high / stride)
    end = max(end, start + 1)
    return [float(f"{level * stride:.12g}") for level in range(start, end + 1)]


def short(value: float) -> str:
    """Return a number in few characters: 0.25, 12, 3.4k, 1.2e-06."""
    size = abs(value)
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{unit}"
    return f"{value:.3g}" if size < 1000 else f"{value:.0f}"
