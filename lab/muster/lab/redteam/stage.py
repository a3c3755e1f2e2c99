"""The stage of in-process attacks: a real policy, its calibration, a run's rules, real signatures.

`Worker` does a worker's part between ticket and upload, `Stage.judge` a validator's between
commitment and verdict, with the functions of the real processes but without a network. An adversary
is a `Worker` with one hook overridden. The run is that of `make demo`: its recipe, its base model,
its stakes.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from muster.app.demo.local_network import FRAUD_PPM, PRICE_PER_UNIT, WORKER_STAKE
from muster.client.calibration import prompts_of, read_recipe
from muster.client.tickets import Assignment, KnownPolicy, TicketTerms, derive
from muster.client.validator.checks import (
    ClaimedWork,
    FailedCheck,
    check_claim,
    check_file,
    unreadable,
)
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import Judgement, Rules, examine
from muster.client.worker.generation import play_ticket
from muster.inference.calibrate import calibrate_model
from muster.inference.calibration_plan import MeasuringPlan
from muster.inference.transformers_engine import TransformersEngine
from muster.lab.redteam.gain import Terms
from muster.lab.redteam.trials import Outcome
from muster.protocol.eip712 import Domain, address_of, digest, sign
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import EncodingError, EngineError
from muster.protocol.ids import Address, PolicyVersion, RunId, Step, to_address
from muster.protocol.messages import Reason, Submission, Ticket, Verdict
from muster.protocol.rollouts import Bounds, Rollout, count_units, decode_rollouts, encode_rollouts
from muster.settings.flags import find_preset
from muster.tasks import Graded, Problem, verify
from muster.tasks.toys import make_sort
from muster.trainer.base_model import WarmStart, build_base_model

if TYPE_CHECKING:
    from muster.lab.redteam.reorg import ReorgChain

T = TypeVar("T")
NODE, THIEF, ORCHESTRATOR = keccak(b"node"), keccak(b"thief"), keccak(b"orchestrator")
WORKER = to_address(keccak(b"worker")[:20])
RUN = RunId(1)
VERSION = PolicyVersion(8)
NODE_ADDRESS = address_of(NODE)
ROOT, BEACON = keccak(b"manifest"), keccak(b"beacon")
DOMAIN = Domain(31337, to_address(keccak(b"ledger")[:20]))
NOW = 1_700_000_000
PROBLEMS = 256
SAMPLES = 320
"""Samples in the stage's calibration."""
RECIPE = "demo"
"""The preset whose rollouts are attacked."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One submission as known to chain and orchestrator."""

    submission: Submission
    """The signed claim."""
    signature: bytes
    """Its signature."""
    ticket: Ticket | None
    """The ticket shown with it."""
    data: bytes | None
    """The file, if anybody has it."""
    ticket_key: bytes = ORCHESTRATOR
    """The key that signed the ticket."""
    node: Address | None = NODE_ADDRESS
    """The node of the worker when the batch was committed."""
    committed_at: int = NOW + 30
    """Time of the commitment."""
    is_slot_used: bool = False
    """Whether an earlier submission fills the slot."""


class Worker:
    """The worker's way from a ticket to an upload; adversaries override one of its hooks."""

    def __init__(self, stage: Stage, random: Random) -> None:
        self.stage = stage
        self.random = random

    def generate(self, ticket: Ticket) -> list[Rollout]:
        """Return the ticket's rollouts."""
        stage = self.stage
        return play_ticket(ticket, stage.recipe, stage.task_set, stage.engine).graded()

    def alter(self, rows: list[Rollout]) -> list[Rollout]:
        """Return the rows to write in place of honest rollouts."""
        return rows

    def encode(self, rows: list[Rollout]) -> bytes:
        """Return the file."""
        return encode_rollouts(rows)

    def claim(self, ticket: Ticket, rows: Sequence[Rollout], data: bytes) -> Submission:
        """Return the submission to sign for the file."""
        return Submission(
            run_id=ticket.run_id,
            worker=ticket.worker,
            step=ticket.step,
            index=ticket.index,
            policy_version=ticket.policy_version,
            file_hash=file_hash(data),
            rollouts=len(rows),
            units=count_units(rows, self.stage.recipe.sampling.max_new_tokens),
        )

    def deliver(self, ticket: Ticket) -> Delivery:
        """Return the finished submission of a ticket."""
        return self.finish(ticket, self.alter(self.generate(ticket)))

    def finish(self, ticket: Ticket, rows: list[Rollout]) -> Delivery:
        """Return the submission of rows, signed."""
        data = self.encode(rows)
        submission = self.claim(ticket, rows, data)
        return Delivery(submission, self.stage.sign(submission), ticket, data)


class Stage:
    """One policy and one run, shared by all trials."""

    def __init__(self, folder: Path, *, warm_up_steps: int = WarmStart().steps) -> None:
        preset = find_preset(RECIPE)
        assert preset is not None, "the software comes with it"
        self.recipe = read_recipe(preset)
        self.task_set = make_sort(PROBLEMS, seed=1)
        self.folder = folder
        model = folder / f"policy-{warm_up_steps}"
        if not (model / "model.safetensors").exists():
            build_base_model(model, seed=0, warm_start=WarmStart(steps=warm_up_steps))
        self.model = model
        self.engine, self.validator = self.load("float32"), self.load("float32")
        plan = MeasuringPlan(
            self.recipe, prompts_of(self.task_set, self.recipe), profile="quick", samples=SAMPLES
        )
        run = calibrate_model(model, plan)
        if run.refusal is not None:
            raise run.refusal
        self.calibration = run.calibration
        self.rules = Rules(self.recipe, self.task_set, self.calibration)
        self._loop: asyncio.AbstractEventLoop | None = None

    def load(self, dtype: Any) -> TransformersEngine:
        """Return another engine with the policy."""
        engine = TransformersEngine(dtype)
        engine.load_policy(self.model, VERSION)
        return engine

    @cached_property
    def coarse(self) -> TransformersEngine:
        """The policy in bfloat16, as another honest validator may run it."""
        return self.load("bfloat16")

    @property
    def terms(self) -> Terms:
        """The run's terms, for gain models."""
        sampling = self.recipe.sampling
        units = (
            sampling.problems_per_submission
            * sampling.samples_per_problem
            * sampling.max_new_tokens
        )
        return Terms(PRICE_PER_UNIT, WORKER_STAKE, FRAUD_PPM, units)

    # An event loop for asynchronous code

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result; all run on one loop, so that child processes stay alive."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(work)

    @cached_property
    def decoder(self) -> FileDecoder:
        """The decoder that parses hostile files in a child process."""
        return FileDecoder()

    @cached_property
    def reorg_chain(self) -> ReorgChain:
        """A chain to reorganise; started when it is first needed."""
        from muster.lab.redteam.reorg import ReorgChain

        return ReorgChain()

    def close(self) -> None:
        """End child processes and the loop."""
        if self._loop is not None:
            self._loop.run_until_complete(self.decoder.__aexit__())
            self._loop.run_until_complete(self.reorg_chain.close())
            self._loop.close()
            self._loop = None

    # Tickets and honest work

    def ticket(self, random: Random, **changes: Any) -> Ticket:
        """Return a ticket with an unused step and index."""
        values: dict[str, Any] = {
            "run_id": RUN,
            "worker": WORKER,
            "step": Step(1 + random.randrange(1 << 31)),
            "index": random.randrange(1 << 16),
            "policy_version": VERSION,
            "policy_root": ROOT,
            "beacon": BEACON,
            "deadline": NOW + 600,
        }
        return Ticket(**(values | changes))

    def honest(self, ticket: Ticket) -> list[Rollout]:
        """Return a ticket's honest rollouts."""
        return play_ticket(ticket, self.recipe, self.task_set, self.engine).graded()

    def assignment(self, ticket: Ticket) -> Assignment:
        """Return the problems and seeds that a ticket derives."""
        return derive(ticket, self.recipe, self.task_set, self.engine)

    def problem(self, name: str) -> Problem:
        """Return a problem by its id."""
        return next(problem for problem in self.task_set if problem.problem_id == name)

    def grade(self, row: Rollout) -> float:
        """Return the verifier's reward of a row's completion."""
        grade = verify(self.problem(row.problem_id), self.engine.decode(row.completion_tokens))
        return grade.score if isinstance(grade, Graded) else 0.0

    def sign(self, submission: Submission, key: bytes = NODE) -> bytes:
        """Return a node's signature of a submission."""
        return sign(digest(DOMAIN, submission.struct_hash()), key)

    # What a validator does

    def known(self, **changes: Any) -> TicketTerms:
        """Return the chain's requirements for tickets."""
        values: dict[str, Any] = {
            "domain": DOMAIN,
            "orchestrator": address_of(ORCHESTRATOR),
            "run_id": RUN,
            "worker": WORKER,
            "policies": {VERSION: KnownPolicy(ROOT, BEACON)},
        }
        return TicketTerms(**(values | changes))

    def claim(self, delivery: Delivery, terms: TicketTerms | None = None) -> ClaimedWork:
        """Return a delivery as a validator reads it from its batch."""
        ticket = delivery.ticket
        signed = digest(DOMAIN, ticket.struct_hash()) if ticket else None
        return ClaimedWork(
            submission=delivery.submission,
            signature=delivery.signature,
            ticket=ticket,
            ticket_signature=sign(signed, delivery.ticket_key) if signed else None,
            committed_at=delivery.committed_at,
            terms=terms or self.known(),
            worker_id=1,
            node=delivery.node,
            is_slot_used=delivery.is_slot_used,
        )

    def examine(
        self,
        delivery: Delivery,
        terms: TicketTerms | None = None,
        *,
        seats: Sequence[Address] = (),
        engine: TransformersEngine | None = None,
    ) -> Judgement:
        """Return the judgement of an honest validator, by the checks of docs/protocol.md, and the
        right fingerprints of the validators in `seats`.
        """
        claim = self.claim(delivery, terms)
        if finding := check_claim(claim) or check_file(delivery.data):
            return Judgement(finding, 0)
        assert delivery.data is not None  # check_file
        try:
            rows = decode_rollouts(delivery.data, Bounds.of(self.recipe))
        except EncodingError as error:
            return Judgement(unreadable(str(error)), 0)
        return examine(claim, rows, self.rules, engine or self.validator, seats)

    def judge(self, delivery: Delivery, terms: TicketTerms | None = None) -> FailedCheck | None:
        """Return why an honest validator does not accept a delivery."""
        return self.examine(delivery, terms).finding

    def outcome(self, delivery: Delivery, *expected: Reason, **found: Any) -> Outcome:
        """Return the outcome of a cheat's delivery; it counts as caught for one of the expected
        reasons."""
        return outcome_of(self.judge(delivery, found.pop("terms", None)), *expected, **found)


def outcome_of(finding: FailedCheck | None, *expected: Reason, **found: Any) -> Outcome:
    """Return a finding as a trial's outcome."""
    if finding is None:
        return Outcome(False, Verdict.ACCEPTED.name, "", **found)
    caught = finding.reason in expected
    return Outcome(caught, finding.verdict.name, finding.reason.name, **found)


def same_text(a: Sequence[Rollout], b: Sequence[Rollout]) -> bool:
    """Return whether two files hold the same completions."""
    return [row.completion_tokens for row in a] == [row.completion_tokens for row in b]


def retold(stage: Stage, rows: Sequence[Rollout], tokens: Sequence[Sequence[int]]) -> list[Rollout]:
    """Return rows with other tokens, truthfully graded and proven by the policy's prefill.

    Rows longer than the policy's context cannot be proven, and keep their old proofs.
    """
    said = zip(rows, tokens, strict=True)
    changed = [replace(row, completion_tokens=tuple(tokens_T)) for row, tokens_T in said]
    pairs = [(row.prompt_tokens, row.completion_tokens) for row in changed]
    try:
        built = stage.engine.prove(pairs, proof=stage.recipe.proof)
    except EngineError:
        return changed
    return [
        replace(row, proofs=b"".join(proofs), task_reward=stage.grade(row))
        for row, proofs in zip(changed, built, strict=True)
    ]


def machine() -> str:
    """Return a description of this machine."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} shared cores, {platform.machine()}"
