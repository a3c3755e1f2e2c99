"""docs/runs/reasoning.md and its plots: what the last whole lesson measured, for people."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.reasoning.exercises import BUDGETS
from benchmarks.reasoning.texts import PARTS
from benchmarks.report import RESULTS, ROOT, drawing

NAME = "reasoning"
PAGE = ROOT / "docs" / "runs" / f"{NAME}.md"
STAGES = ("pretrained", "teacher", "fine-tuned", "reinforced")
"""Models that are measured, in order."""
LEARNER = ("pretrained", "fine-tuned", "reinforced")
"""The student's stages, in order."""
WAYS = {
    "sampled": "as a run samples, temperature 1",
    "greedy": "nearly greedy, temperature 0.05",
}
COLOURS = {"math": "#4c72b0", "code": "#dd8452", "words": "#55a868"}
Share = Mapping[str, float]
"""A value with its 95 % interval: value, low, high."""


def read_result() -> dict[str, Any]:
    """Return the result file of the last whole lesson."""
    return dict(json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8")))


def write_page() -> None:
    """Write page and plots of the last whole lesson."""
    result = read_result()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(result), encoding="utf-8")
    _draw_stages(result["detail"]["stages"])
    _draw_curve(result["detail"]["curve"])
    print(f"\n{PAGE.relative_to(ROOT)}")


# ---------------------------------------------------------------------------------------- text


def render(result: Mapping[str, Any]) -> str:
    """Return the page."""
    lesson = result["detail"]
    return "\n".join(
        [
            _head(result),
            "## Held-out accuracy\n",
            _accuracy_text(lesson),
            *_accuracy_tables(lesson),
            "![Held-out accuracy by stage and task](../images/reasoning-stages.svg)\n",
            "## What each stage adds\n",
            _gains_text(),
            _gains_table(lesson["stages"]),
            "![Held-out reward and distance from the budget by policy version]"
            "(../images/reasoning-curve.svg)\n",
            "## What the networks did\n",
            _networks(lesson),
            "## What it costs\n",
            _costs(lesson["costs"]),
        ]
    )


def _head(result: Mapping[str, Any]) -> str:
    lesson, plan = result["detail"], result["detail"]["plan"]
    millions = lesson["parameters"] / 1e6
    submissions, data = lesson["data_set"]["submissions"], plan["data"]
    sampled = submissions * data["problems"] * data["samples"]
    return f"""# A lesson in reasoning

Made by `make example-reasoning` of [benchmarks/reasoning](../../benchmarks/reasoning/story.py), \
seed {lesson["seed"]}, on {result["machine"]}, shared with other programs, {result["date"]}.

A Qwen3 of {millions:.1f} million parameters, with a byte-pair tokenizer of \
{lesson["vocabulary"]} tokens and a chat template that thinks, goes the way of the large ones:

1. *Read.* Two models of the same random weights read {plan["texts"]:,} generated solutions each: \
the **pretrained** student such as are right {plan["right"]:.0%} of the time, the **teacher** \
right ones.
2. *Make data.* On a network of four workers and three validators the teacher solves problems that \
no text had a solution of. What the verifiers grade as right is, without repetitions, a data set \
of {lesson["data_set"]["rows"]:,} rows of {sampled:,} samples, verified against the chain.
3. *Fine-tune.* The student learns from it: **fine-tuned**.
4. *Reinforce.* It practises the same problems on another network for {plan["steps"]} steps, with \
length budgets for mathematics: **reinforced**.

| task | verifier | a problem |
|---|---|---|
| math | `verifiable_math` | *Calculate 47+85. Put the answer in \\boxed{{}}.* Sums, differences, \
comparisons; *Think for {BUDGETS[0]} tokens before giving a response.*, or {BUDGETS[1]} |
| code | `verifiable_code`, in the sandbox | *Write a Python function f(x) that returns the sum of \
x and 7, times 12.* |
| words | `reasoning_gym` (`spell_backward`) | *Spell this word backward (example: sun -> nus): \
splat* |
"""


def _accuracy_text(lesson: Mapping[str, Any]) -> str:
    plan = lesson["plan"]
    return (
        f"{plan['held_out']} problems of each task that no stage has seen, with 95 % intervals "
        f"over problems; {plan['samples']} samples of each at temperature 1. What rises there and "
        "not in the greedy answers is certainty, not knowledge.\n"
    )


def _accuracy_tables(lesson: Mapping[str, Any]) -> Iterator[str]:
    for way, title in WAYS.items():
        rows = [
            f"| {stage} | " + " | ".join(map(_cell, _shares(lesson["stages"][stage][way]))) + " |"
            for stage in STAGES
        ]
        header = f"| {title} | {' | '.join((*PARTS, 'all'))} |\n|---|{'---|' * (len(PARTS) + 1)}"
        yield "\n".join([header, *rows, ""])


def _shares(evaluation: Mapping[str, Any]) -> list[Share]:
    """Return an evaluation's rewards by part, and that of all."""
    return [*(evaluation["parts"][part]["reward"] for part in PARTS), evaluation["reward"]]


def _cell(share: Share) -> str:
    return f"{share['value']:.2f} ({share['low']:.2f} to {share['high']:.2f})"


# --------------------------------------------------------------------------------------- gains


def _gains_text() -> str:
    return (
        "Differences of accuracy between a stage and the one before it, with 95 % intervals "
        "(Newcombe's, as if the problems were not the same). *Nothing*: the interval holds 0.\n"
    )


def _gains_table(stages: Mapping[str, Any]) -> str:
    header = f"| stage | asked | {' | '.join((*PARTS, 'all'))} |\n"
    rows = [
        f"| {after}, over {before} | {way} | "
        + " | ".join(
            _gain(*pair)
            for pair in zip(_shares(stages[before][way]), _shares(stages[after][way]), strict=True)
        )
        + " |"
        for before, after in [*pairwise(LEARNER), ("teacher", LEARNER[-1])]
        for way in WAYS
    ]
    return header + f"|---|---|{'---|' * (len(PARTS) + 1)}\n" + "\n".join(rows) + "\n"


def _gain(before: Share, after: Share) -> str:
    difference, low, high = difference_of(before, after)
    said = "nothing: " if low <= 0 <= high else ""
    return f"{said}{difference:+.2f} ({low:+.2f} to {high:+.2f})"


def difference_of(before: Share, after: Share) -> tuple[float, float, float]:
    """Return after - before with its interval: Newcombe's (1998), method 10, of two intervals."""
    difference = after["value"] - before["value"]
    below = math.hypot(after["value"] - after["low"], before["high"] - before["value"])
    above = math.hypot(after["high"] - after["value"], before["value"] - before["low"])
    return difference, difference - below, difference + above


# ------------------------------------------------------------------------------------ networks


def _networks(lesson: Mapping[str, Any]) -> str:
    rows = [
        _network("data run", lesson["data_run"]),
        _network("reinforcement", lesson["practice_run"]),
    ]
    checks = lesson["data_set"]["checks"]
    held = sum(checks.values())
    failed = lesson["practice_run"]["failed_checks"]
    return "\n".join(
        [
            "| network | accepted | not accepted, by reason | slashed |",
            "|---|---|---|---|",
            *rows,
            "",
            f"In the data run the cheater claims that every answer is right; in the other it "
            f"serves a disturbed model. `muster data verify`: {held} of {len(checks)} checks hold. "
            "`muster trainer lineage`:\n",
            f"    {'    '.join(lesson['lineage'].strip().splitlines(keepends=True))}\n",
            f"Promises of `make demo` that the reinforcement broke: {', '.join(failed) or 'none'}. "
            "One worker was killed and came back:\n",
            "| worker | status | accepted | not accepted | completion tokens paid |",
            "|---|---|---|---|---|",
            *map(_worker, lesson["practice_run"]["workers"]),
            "",
        ]
    )


def _network(name: str, happened: Mapping[str, Any]) -> str:
    reasons = (f"{reason}: {count}" for reason, count in happened["reasons"].items())
    accepted = happened["verdicts"].get("accepted", 0)
    slashed = f"{happened['slashed_tokens']:g} tokens"
    return f"| {name} | {accepted} | {', '.join(reasons) or 'none'} | {slashed} |"


def _worker(worker: Mapping[str, Any]) -> str:
    refused = worker["rejected"] + worker["fraud"]
    cells = (worker["name"], worker["status"], worker["accepted"], refused, f"{worker['units']:,}")
    return "| " + " | ".join(map(str, cells)) + " |"


def _costs(costs: Mapping[str, Mapping[str, float]]) -> str:
    total = {key: sum(cost[key] for cost in costs.values()) for key in ("wall_s", "cpu_s")}
    rows = [
        f"| {step} | {cost['cpu_s'] / 60:.1f} | {cost['wall_s'] / 60:.1f} |"
        for step, cost in [*costs.items(), ("all", total)]
    ]
    return "\n".join(
        [
            "Other programs of the machine slow the clock. Two idle cores take at least half of "
            "the CPU minutes.\n",
            "| step | CPU minutes | minutes |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


# --------------------------------------------------------------------------------------- plots


def _draw_stages(stages: Mapping[str, Any]) -> None:
    with drawing(f"{NAME}-stages", panels=len(WAYS)) as panels:
        for axes, (way, title) in zip(panels, WAYS.items(), strict=True):
            for number, part in enumerate(PARTS):
                shares = [stages[name][way]["parts"][part]["reward"] for name in STAGES]
                places = [place + 0.25 * (number - 1) for place in range(len(STAGES))]
                axes.bar(
                    places, [s["value"] for s in shares], 0.25, color=COLOURS[part], label=part
                )
                axes.errorbar(
                    places, [s["value"] for s in shares], _lengths(shares),
                    fmt="none", ecolor="black", elinewidth=1,
                )  # fmt: skip
            axes.set(ylim=(0, 1), title=title, ylabel="held-out accuracy")
            axes.set_xticks(range(len(STAGES)), STAGES)
        panels[0].legend()


def _lengths(shares: Sequence[Share]) -> list[list[float]]:
    """Return how far the intervals reach below and above."""
    return [
        [share["value"] - share["low"] for share in shares],
        [share["high"] - share["value"] for share in shares],
    ]


def _draw_curve(curve: Sequence[Mapping[str, Any]]) -> None:
    versions = [entry["policy_version"] for entry in curve]
    with drawing(f"{NAME}-curve") as axes:
        for part in PARTS:
            shares = [entry["part"][part] for entry in curve]
            axes.plot(
                versions, [s["reward"] for s in shares], color=COLOURS[part], label=part
            )  # fmt: skip
            axes.fill_between(
                versions, [s["reward_low"] for s in shares], [s["reward_high"] for s in shares],
                color=COLOURS[part], alpha=0.15, linewidth=0,
            )  # fmt: skip
        axes.set(xlabel="policy version", ylabel="held-out reward, temperature 1", ylim=(0, 1))
        axes.set_title("Reinforcement on a network")
        errors = axes.twinx()
        errors.plot(
            versions, [entry["length_error"] for entry in curve],
            color="#8c8c8c", linestyle="--", label="mean |length - budget| of math",
        )  # fmt: skip
        errors.set(ylabel="tokens", ylim=(0, None))
        lines = [*axes.get_lines(), *errors.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], loc=(0.55, 0.3))
