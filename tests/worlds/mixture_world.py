"""A run of two parts with the hash policy: sorting, and reversing within a length budget."""

from muster.client.tickets import derive
from muster.client.validator.judging import Rules
from muster.protocol.messages import Ticket
from muster.protocol.mixture import PartRecipe, TasksRecipe
from muster.protocol.prompts import Prompt, text_of
from muster.protocol.recipe import Recipe
from muster.tasks import TaskSet
from muster.tasks.document import SetPart
from muster.tasks.toys import make_reverse, make_sort
from worlds.client_world import CALIBRATION, RECIPE, HashEngine

PARTS = (SetPart("sorts", "sort 1", 20), SetPart("turns", "reverse 1", 12))
TASKS = TaskSet.of("mixed", "1", [*make_sort(20, seed=1), *make_reverse(12, seed=1)], PARTS)


class Engine(HashEngine):
    """Reads any text."""

    def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:
        del is_start
        return tuple(ord(character) % self.vocab_size for character in text_of(text))


def mixed(sorts: PartRecipe, turns: PartRecipe) -> Rules:
    """Return the rules of a run of these parts."""
    tasks = TasksRecipe(parts=(sorts, turns))
    return Rules(RECIPE.model_copy(update={"tasks": tasks}), TASKS, CALIBRATION)


RULES = mixed(PartRecipe(name="sorts", weight=3), PartRecipe(name="turns", target_lengths=(5,)))


def parts_of(ticket: Ticket, recipe: Recipe = RULES.recipe) -> list[str]:
    """Return the part of each problem of a ticket."""
    groups = derive(ticket, recipe, TASKS, Engine()).groups
    places = {problem.problem_id: place for place, problem in enumerate(TASKS)}
    return [TASKS.part_at(places[group.problem.problem_id]) for group in groups]


def preferring(name: str, rules: Rules = RULES) -> Rules:
    """Return the rules of a cheat that takes only one part."""
    parts = tuple(PartRecipe(name=each.name, weight=int(each.name == name)) for each in PARTS)
    tasks = TasksRecipe(parts=parts)
    return Rules(rules.recipe.model_copy(update={"tasks": tasks}), TASKS, CALIBRATION)
