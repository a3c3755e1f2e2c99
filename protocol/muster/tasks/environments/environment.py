"""What an environment is: a function from what a model said to what it is told next.

Workers call it while they generate, validators again while they check, so whatever it says must
follow from the problem and the model's turns alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.tasks.grades import Undecided

if TYPE_CHECKING:
    from muster.tasks.problem import Problem

logger = logging.getLogger(__name__)

MAX_REPLY_CHARS = 65_536
"""An environment that says more misbehaves."""
ATTEMPTS = 3
"""An environment that cannot decide (its machine was too busy, say) is asked this often."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The model is told something and goes on."""

    text: str
    """What it is told, with whatever marks its model needs around it; not empty."""
    is_repeatable: bool = True
    """Whether every honest machine says this; otherwise another reply is no proof of fraud."""


@dataclass(frozen=True, slots=True)
class Done:
    """The completion ends here."""

    answer: str
    """The text that the verifier grades."""


Turn = Reply | Done | Undecided
"""What an environment answers."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Answers a model between its turns."""

    turn: Callable[[Problem, tuple[str, ...]], Turn]
    """Answers the last of the model's turns so far (at least one); deterministic, without state,
    and total over any text."""
    sources: tuple[str, ...]
    """Modules and packages whose source decides replies; hashed with the verifier's."""
    machine: Callable[[], str] = str
    """What else on this machine decides replies, such as the Python that runs programs."""
    max_replies: int = 8
    """After so many the next turn is the last."""
    parallel: int = 1
    """How many turns it can answer at once, in threads."""

    def answer(self, problem: Problem, said: Sequence[str]) -> Turn:
        """Return `turn`'s answer; never raises, whatever the text or the environment does.

        What is malformed, or raised, is Undecided. Past `max_replies` the last turn is graded.
        """
        if len(said) > self.max_replies:
            return Done(said[-1])
        try:
            found = self.turn(problem, tuple(said))
        except Exception as error:  # a third party's code meets a stranger's text
            logger.warning("environment raised", extra={"task_type": problem.task_type})
            return Undecided(f"the environment raised {type(error).__name__}")
        if isinstance(found, Reply) and not 1 <= len(found.text) <= MAX_REPLY_CHARS:
            return Undecided(f"the environment's reply has {len(found.text)} characters")
        if not isinstance(found, Reply | Done | Undecided):
            return Undecided(f"the environment returned a {type(found).__name__}")
        return found


@dataclass(frozen=True, slots=True)
class Question:
    """What an environment is asked."""

    environment: Environment
    """The environment."""
    problem: Problem
    """The problem."""
    said: tuple[str, ...]
    """The model's turns so far."""


def ask_all(questions: Sequence[Question]) -> list[Turn]:
    """Return what the environments answer, in order, some at the same time.

    One that is undecided is asked again, ATTEMPTS times in all. Blocks.
    """
    parallel = max((each.environment.parallel for each in questions), default=1)
    if parallel == 1 or len(questions) < 2:
        return [_ask(each) for each in questions]
    with ThreadPoolExecutor(parallel, thread_name_prefix="environment") as executor:
        return list(executor.map(_ask, questions))


def _ask(question: Question) -> Turn:
    turn: Turn = Undecided("never asked")
    for _ in range(ATTEMPTS):
        turn = question.environment.answer(question.problem, question.said)
        if not isinstance(turn, Undecided):
            break
    return turn
