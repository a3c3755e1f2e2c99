"""The exact-match verifier: the answer is the gold standard, blanks around it aside."""

from __future__ import annotations

from muster.tasks.grades import Grade, Graded, Undecided
from muster.tasks.problem import Problem
from muster.tasks.verifier import Verifier


def grade_exact_match(problem: Problem, completion: str) -> Grade:
    """Return 1 when the completion, stripped of blanks, is the gold standard, else 0."""
    if problem.gold_standard_solution is None:
        return Undecided("the problem has no gold standard to compare with")
    is_right = completion.strip() == problem.gold_standard_solution.strip()
    return Graded(1.0 if is_right else 0.0)


VERIFIER = Verifier("exact_match", "1", grade_exact_match, sources=(__name__,))
"""The verifier of the task type `exact_match`."""
