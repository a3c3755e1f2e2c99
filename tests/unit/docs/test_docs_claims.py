"""docs/claims.md: every row is whole, its figure is in a result file, its command exists."""

import re
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import click
import pytest
from benchmarks.claims import page
from benchmarks.claims.rows import CLAIMS, PLOTS, TOPICS, Claim, Verdict

from muster.app.cli import muster

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
STUDIES = {path.stem for path in (ROOT / "benchmarks" / "claims").glob("*.py")} | {"page"}
NAMES = [f"{number} {claim.claim[:40]}" for number, claim in enumerate(CLAIMS)]


def fault_of(claim: Claim) -> str:
    """Return a row's fault, or an empty text."""
    for field in fields(claim):
        if not getattr(claim, field.name) and (field.name != "why" or claim.verdict != "holds"):
            return f"{field.name} is empty"
    if claim.topic not in TOPICS:
        return f"no topic {claim.topic}"
    try:
        text = page.figure_of(claim)
    except (KeyError, StopIteration) as error:
        return f"no result file holds {error}"
    if "|" in text + claim.claim + claim.measured + claim.why:
        return "a cell would end"
    if claim.figure == text and claim.verdict is not Verdict.UNTRIED:
        return "its figure is of no result file"
    return command_fault(claim.command)


def command_fault(command: str) -> str:
    """Return the reason why a command cannot run, or an empty text."""
    program, *words = shlex.split(command)
    if program == "muster":
        found: click.Command | None = muster
        while words and isinstance(found, click.Group):
            found = found.get_command(click.Context(found), words.pop(0))
        options = {option for p in (found.params if found else ()) for option in p.opts}
        unknown = {word for word in words if word.startswith("--")} - options
        return "" if found and not unknown else f"muster has no {command}"
    target, *arguments = words
    if not re.search(rf"^{target}:", MAKEFILE, re.M):
        return f"make has no {target}"
    asked = [name for each in arguments for name in each.removeprefix("ARGS=").split()]
    return f"no study {asked}" if target == "claims" and not set(asked) <= STUDIES else ""


@pytest.mark.parametrize("claim", CLAIMS, ids=NAMES)
def test_a_row_is_whole(claim: Claim) -> None:
    assert fault_of(claim) == ""


Change = Callable[[Claim], Claim]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda claim: replace(claim, source=""), "source is empty"),
        (lambda claim: replace(claim, why="", verdict=Verdict.FAILS), "why is empty"),
        (lambda claim: replace(claim, figure="{toploc[speed]:.1f}"), "no result file holds"),
        (lambda claim: replace(claim, figure="{nothing[speed]:.1f}"), "no result file holds"),
        (lambda claim: replace(claim, figure="{redteam[detail/attack=A99/caught]}"), "no result"),
        (lambda claim: replace(claim, figure="100 times"), "its figure is of no result file"),
        (lambda claim: replace(claim, command="make bench-nothing"), "make has no bench-nothing"),
        (lambda claim: replace(claim, command="make claims ARGS=dreams"), "no study"),
        (lambda claim: replace(claim, command="muster conjure"), "muster has no muster conjure"),
        (lambda claim: replace(claim, topic="astrology"), "no topic"),
    ],
)
def test_a_row_that_says_nothing_is_found(change: Change, fault: str) -> None:
    assert fault in fault_of(change(CLAIMS[0]))


def test_the_page_is_the_one_that_rows_and_figures_make() -> None:
    assert page.PAGE.read_text() == page.render(), "make claims ARGS=page"


def test_every_plot_is_there() -> None:
    names = [name for plots in PLOTS.values() for name in plots]
    assert [n for n in names if not (ROOT / "docs" / "images" / f"{n}.svg").exists()] == []


def test_verdicts_fit_the_figures_that_they_rest_on() -> None:
    found = page.results()["claims"]
    assert found["clip_norm_one_spiked"] > 10 * found["clip_norm_two_spiked"]
    assert found["clip_norm_max_two_spiked"] < 2 * found["clip_norm_max_two_calm"]
    assert found["filters_reward_online"] > found["filters_reward_none"] + 0.05
    assert found["filters_reward_offline"] > found["filters_reward_none"] + 0.1
    for budgets in ("short_joint", "short_apart", "long_joint", "long_apart"):
        assert found[f"length_error_end_{budgets}"] < found[f"length_error_start_{budgets}"]
    assert found["generating_level_2"] > found["generating_level_0"] + 0.3
    assert found["swarm_lost"] == found["layout_refused"] == 0
    assert found["hidden_over_proof_5120"] > 1000
