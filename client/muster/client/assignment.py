"""What a ticket derives: problems, prompts, target lengths and sampling seeds, sample by sample.

Pure. Workers generate it and validators compare with it, so neither chooses anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import Ticket
from muster.protocol.recipe import SamplingRecipe
from muster.protocol.seeds import problem_indices, sample_seed, target_length, ticket_seed
from muster.tasks import Problem, TaskSet, render_prompt


@dataclass(frozen=True, slots=True)
class Group:
    """One problem of a ticket and its samples."""

    problem: Problem
    """The problem."""
    target_length: int
    """Length budget in tokens, -1 without one."""
    prompt_tokens: tuple[int, ...]
    """The rendered prompt."""
    seeds: tuple[int, ...]
    """Sampling seed of each sample."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything a ticket asks for."""

    policy_version: PolicyVersion
    """The policy that must generate."""
    groups: tuple[Group, ...]
    """In ticket order."""


def derive(
    ticket: Ticket,
    sampling: SamplingRecipe,
    task_set: TaskSet,
    encode: Callable[[str], tuple[int, ...]],
) -> Assignment:
    """Return the assignment of a ticket; `encode` turns a prompt's text into token ids.

    Raises EncodingError when the task set holds fewer problems than one submission needs.
    """
    seed = ticket_seed(ticket.run_id, ticket.beacon, ticket.worker, ticket.step, ticket.index)
    size = sampling.samples_per_problem
    groups = []
    chosen = problem_indices(seed, sampling.problems_per_submission, len(task_set))
    for j, number in enumerate(chosen):
        problem = task_set[number]
        length = target_length(seed, j, sampling.target_lengths)
        groups.append(
            Group(
                problem=problem,
                target_length=length,
                prompt_tokens=tuple(encode(render_prompt(problem, length))),
                seeds=tuple(sample_seed(seed, j, i, size) for i in range(size)),
            )
        )
    return Assignment(ticket.policy_version, tuple(groups))
