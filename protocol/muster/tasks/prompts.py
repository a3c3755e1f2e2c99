"""The text a model is given for a problem: workers send it, validators derive it again."""

from __future__ import annotations

from muster.tasks.problem import Problem


def render_prompt(problem: Problem, target_length: int) -> str:
    """Return the prompt; a target length (in tokens, -1 for none) is asked for at its end.

    The wording of the length request is INTELLECT-2's.
    """
    if target_length < 0:
        return problem.prompt
    return f"{problem.prompt}\n\nThink for {target_length} tokens before giving a response."
