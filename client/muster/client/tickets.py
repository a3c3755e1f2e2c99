"""Validity of tickets, and what a ticket derives: problems, prompts, lengths and sampling seeds.

Pure. Everything from an orchestrator is checked against the chain. Workers refuse an invalid ticket
before they generate, because their work would have to be rejected; validators reject submissions
with one. Workers generate what a ticket derives and validators compare with it, so neither has a
choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.errors import EngineError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import Submission, Ticket
from muster.protocol.prompts import most_tokens, render_prompt, text_of
from muster.protocol.recipe import Recipe
from muster.protocol.seeds import mixed_indices, sample_seed, target_length, ticket_seed
from muster.protocol.set_aside import NOTHING, ListFault, SetAside
from muster.tasks import Problem, TaskSet

if TYPE_CHECKING:
    from muster.inference import InferenceEngine

MAX_TICKET_LIFE_S = 24 * 3600
"""Longest time in seconds to a deadline: a later one would bind a node to one ticket for days."""


class TicketFault(StrEnum):
    """Why a ticket is invalid."""

    SIGNATURE = "it is not signed by the run's orchestrator"
    RUN = "it is for another run"
    WORKER = "it is for another worker"
    STEP = "there is no step 0"
    POLICY_UNKNOWN = "its policy version is not on chain"
    POLICY_ROOT = "its policy root is not the chain's"
    BEACON = "its beacon is not the chain's"
    DEADLINE = "its deadline is over or absurdly far"
    SLOT_SIGNED = "its slot was signed on other terms"
    SLOT_HELD = "its slot is already worked on"


@dataclass(frozen=True, slots=True)
class KnownPolicy:
    """Facts on chain about a policy version."""

    root: Hash32
    """Root of its manifest."""
    beacon: Hash32
    """The hash from which the worker's seeds under this policy are derived, see
    `MemberView.beacon_under`."""


@dataclass(frozen=True, slots=True)
class TicketTerms:
    """Requirements for a ticket, from the chain."""

    domain: Domain
    """Of the ContributionLedger."""
    orchestrator: Address
    """Account whose signature a ticket needs."""
    run_id: RunId
    worker: Address
    """The staking wallet that holds the ticket."""
    policies: Mapping[PolicyVersion, KnownPolicy]
    """The published versions."""


def ticket_fault(ticket: Ticket, signature: bytes, terms: TicketTerms) -> TicketFault | None:
    """Return why a ticket is invalid, or None."""
    if signer_of(terms.domain, ticket, signature) != terms.orchestrator:
        return TicketFault.SIGNATURE
    if ticket.run_id != terms.run_id:
        return TicketFault.RUN
    if ticket.worker != terms.worker:
        return TicketFault.WORKER
    if ticket.step < 1:
        return TicketFault.STEP
    policy = terms.policies.get(ticket.policy_version)
    if policy is None:
        return TicketFault.POLICY_UNKNOWN
    if ticket.policy_root != policy.root:
        return TicketFault.POLICY_ROOT
    if ticket.beacon != policy.beacon:
        return TicketFault.BEACON
    return None


def lease_fault(
    ticket: Ticket, signature: bytes, terms: TicketTerms, *, now: int, signed: Ticket | None
) -> TicketFault | None:
    """Return why a worker must not work on a ticket at `now` (the chain's clock), or None.

    `signed` is the ticket under which this slot was signed before, if any. The same terms may come
    again (an orchestrator that lost the upload), other terms may not.
    """
    if fault := ticket_fault(ticket, signature, terms):
        return fault
    if not now < ticket.deadline <= now + MAX_TICKET_LIFE_S:
        return TicketFault.DEADLINE
    if signed is not None and _work(signed) != _work(ticket):
        return TicketFault.SLOT_SIGNED
    return None


def slot_and_policy(message: Ticket | Submission) -> tuple[int | str, ...]:
    """Return the fields that a ticket and its submission must have in common."""
    return (
        message.run_id,
        message.worker,
        message.step,
        message.index,
        message.policy_version,
    )


def _work(ticket: Ticket) -> tuple[object, ...]:
    """Return the fields that decide the rollouts of a ticket: all except the deadline."""
    return (
        ticket.run_id,
        ticket.worker,
        ticket.step,
        ticket.index,
        ticket.policy_version,
        ticket.policy_root,
        ticket.beacon,
    )


_SPECIAL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TicketGroup:
    """One problem of a ticket and its samples."""

    problem: Problem
    target_length: int
    """Length budget in tokens; -1 if there is none."""
    prompt_tokens: tuple[int, ...]
    """The rendered prompt."""
    seeds: tuple[int, ...]
    """Sampling seed of each sample."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything that a ticket derives."""

    policy_version: PolicyVersion
    """The policy that must generate."""
    groups: tuple[TicketGroup, ...]
    """In ticket order."""


def derive(
    ticket: Ticket, recipe: Recipe, task_set: TaskSet, engine: InferenceEngine
) -> Assignment:
    """Return the assignment of a ticket; prompts are encoded by the loaded policy's tokenizer, and
    problems that the policy sets aside are skipped.

    Raises EncodingError when the task set holds fewer problems than one submission needs, TaskError
    when its parts are not the recipe's, EngineError when the recipe sets problems aside and another
    policy than the ticket's is loaded.
    """
    seed, size = _seed_of(ticket), recipe.sampling.samples_per_problem
    listed = NOTHING
    if recipe.skips_problems:
        _require_loaded(ticket, engine)
        listed = engine.set_aside
    groups = []
    for j, (problem, length) in enumerate(_chosen(ticket, recipe, task_set, listed)):
        prompt = render_prompt(problem.prompt, length, recipe.prompt)
        groups.append(
            TicketGroup(
                problem=problem,
                target_length=length,
                prompt_tokens=engine.encode(prompt),
                seeds=tuple(sample_seed(seed, j, i, size) for i in range(size)),
            )
        )
    return Assignment(ticket.policy_version, tuple(groups))


def most_prompt_tokens(ticket: Ticket, recipe: Recipe, task_set: TaskSet, listed: SetAside) -> int:
    """Return an upper bound of the tokens of a ticket's longest prompt; `listed` is the list of its
    policy.
    """
    chosen = _chosen(ticket, recipe, task_set, listed)
    return most_tokens(
        render_prompt(problem.prompt, length, recipe.prompt) for problem, length in chosen
    )


def longest_sample(recipe: Recipe, task_set: TaskSet) -> int:
    """Return the most tokens of a prompt of the set with its completion, for byte-level tokenizers:
    they make at most one token per UTF-8 byte.
    """
    length = recipe.longest_budget
    prompts = (render_prompt(problem.prompt, length, recipe.prompt) for problem in task_set)
    longest = max((len(text_of(prompt).encode()) for prompt in prompts), default=0)
    return longest + _SPECIAL_TOKENS + recipe.sampling.max_new_tokens


def list_fault(recipe: Recipe, task_set: TaskSet, listed: SetAside) -> ListFault | None:
    """Return why a policy's list of set-aside problems is invalid for the run, or None.

    Everyone treats an invalid list as empty, so a trainer that publishes one spoils no ticket.
    Recipes without skipping ignore lists.
    """
    if not recipe.skips_problems:
        return None
    needed = recipe.sampling.problems_per_submission
    return listed.fault(len(task_set), task_set.stretches(recipe), needed)


def _require_loaded(ticket: Ticket, engine: InferenceEngine) -> None:
    if engine.policy_version != ticket.policy_version:
        raise EngineError(
            f"the engine holds policy {engine.policy_version}, the ticket is of "
            f"{ticket.policy_version}, whose problems set aside are others"
        )


def _seed_of(ticket: Ticket) -> Hash32:
    return ticket_seed(ticket.run_id, ticket.beacon, ticket.worker, ticket.step, ticket.index)


def _chosen(
    ticket: Ticket, recipe: Recipe, task_set: TaskSet, listed: SetAside
) -> Iterator[tuple[Problem, int]]:
    """Yield a ticket's problems with their length budgets, in order."""
    if list_fault(recipe, task_set, listed):
        listed = NOTHING
    seed = _seed_of(ticket)
    parts = recipe.parts_of(seed, ticket.step)
    ranges = [task_set.range_of(part.name) for part in parts]
    revisit = [part.filters.pool_revisit for part in parts]
    chosen = mixed_indices(seed, ranges, listed, revisit)
    for j, (number, part) in enumerate(zip(chosen, parts, strict=True)):
        yield task_set[number], target_length(seed, j, part.target_lengths)
