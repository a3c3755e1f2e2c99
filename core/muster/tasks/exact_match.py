"""The exact-match verifier: the answer must be the gold standard, apart from blanks around it.

The answer is the whole completion, or the text after its thought.
"""

from muster.tasks.completions import THOUGHT_END
from muster.tasks.problem import Problem
from muster.tasks.verifier import Grade, Graded, Undecided, Verifier


def grade_exact_match(problem: Problem, completion: str) -> Grade:
    """Return 1 when the answer, stripped of blanks, is the gold standard, else 0."""
    if problem.gold_standard_solution is None:
        return Undecided("the problem has no gold standard to compare with")
    answer = completion.rpartition(THOUGHT_END)[2]
    is_right = answer.strip() == problem.gold_standard_solution.strip()
    return Graded(1.0 if is_right else 0.0)


VERIFIER = Verifier(
    "exact_match",
    "2",
    grade_exact_match,
    sources=(__name__, "muster.tasks.completions"),
    machine=str,
)
"""The verifier of the task type `exact_match`."""
