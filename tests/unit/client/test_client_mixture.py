"""A run of two parts: the problems of its tickets, and the verdict on a cheat of one part."""

from dataclasses import replace

import pytest
from worlds import client_world
from worlds.mixture_world import RULES, TASKS, Engine, mixed, parts_of, preferring

from muster.client.calibration import prompts_of
from muster.client.tickets import derive, longest_sample
from muster.client.validator.judging import Judgement, Rules, examine
from muster.client.worker.generation import play_ticket
from muster.protocol.errors import TaskError
from muster.protocol.ids import Step
from muster.protocol.messages import Reason, Ticket, Verdict
from muster.protocol.mixture import CurriculumPoint, PartRecipe
from muster.protocol.prompts import text_of
from muster.protocol.rollouts import Rollout
from muster.tasks import TaskSet


def rows_of(ticket: Ticket, rules: Rules = RULES) -> list[Rollout]:
    return play_ticket(ticket, rules.recipe, rules.task_set, Engine(client_world.VERSION)).graded()


def judge(rows: list[Rollout], ticket: Ticket, rules: Rules = RULES) -> Judgement:
    claim = client_world.make_claim(client_world.make_submission(ticket, rows), ticket)
    return examine(claim, rows, rules, Engine(client_world.VERSION))


TICKETS = [client_world.make_ticket(index=index) for index in range(8)]
TICKET = next(ticket for ticket in TICKETS if "turns" in parts_of(ticket))


def test_groups_are_of_the_parts_that_the_recipe_derives() -> None:
    for ticket in TICKETS:
        groups = derive(ticket, RULES.recipe, TASKS, Engine()).groups
        budgets = {"sorts": -1, "turns": 5}
        assert [group.target_length for group in groups] == [budgets[p] for p in parts_of(ticket)]


def test_submission_of_both_parts_is_accepted() -> None:
    assert judge(rows_of(TICKET), TICKET).finding is None


@pytest.mark.parametrize("name", ["sorts", "turns"])
def test_worker_that_prefers_a_part_is_a_fraud(name: str) -> None:
    """It draws as if the other part had no weight, and is honest otherwise."""
    ticket = next(ticket for ticket in TICKETS if set(parts_of(ticket)) != {name})
    rows = rows_of(ticket, preferring(name))
    found = judge(rows, ticket).finding
    assert found is not None
    assert (found.verdict, found.reason) == (Verdict.FRAUD, Reason.WRONG_PROBLEM)


def test_budget_of_another_part_is_a_fraud() -> None:
    rows = [replace(row, target_length=-1) for row in rows_of(TICKET)]
    found = judge(rows, TICKET).finding
    assert found is not None
    assert (found.verdict, found.reason) == (Verdict.FRAUD, Reason.WRONG_PROBLEM)


def test_curriculum_goes_by_the_tickets_step_and_by_nothing_else() -> None:
    """Every validator finds the same parts at any time: the signed messages state the step."""
    down = (CurriculumPoint(step=4, weight=1), CurriculumPoint(step=5, weight=0))
    up = (CurriculumPoint(step=4, weight=0), CurriculumPoint(step=5, weight=1))
    rules = mixed(
        PartRecipe(name="sorts", curriculum=down), PartRecipe(name="turns", curriculum=up)
    )
    before, after = client_world.make_ticket(step=Step(4)), client_world.make_ticket(step=Step(5))
    assert (parts_of(before, rules.recipe), parts_of(after, rules.recipe)) == (
        ["sorts"] * 2,
        ["turns"] * 2,
    )
    assert judge(rows_of(before, rules), before, rules).finding is None
    found = judge(rows_of(before, rules), after, rules).finding
    assert found is not None
    assert found.reason is Reason.WRONG_PROBLEM


def test_documents_whose_parts_differ_are_refused_before_work() -> None:
    with pytest.raises(TaskError, match="no weight for part 'sorts'"):
        Rules(client_world.RECIPE, TASKS, client_world.CALIBRATION)
    plain = TaskSet.of("plain", "1", TASKS.problems)
    with pytest.raises(TaskError, match="has no part 'sorts'"):
        replace(RULES, task_set=plain)


def test_calibration_and_context_know_every_part() -> None:
    prompts = [text_of(prompt) for prompt in prompts_of(TASKS, RULES.recipe)]
    assert len(prompts) == len(TASKS)
    assert "5 tokens" in prompts[-1]
    assert "tokens" not in prompts[0]
    assert longest_sample(RULES.recipe, TASKS) > longest_sample(client_world.RECIPE, TASKS)
