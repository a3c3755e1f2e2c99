"""A run small enough to compute in milliseconds, with real signatures, proofs and sampling.

The engine's policy is a hash: hidden states and logits follow from (version, tokens so far).
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from muster.api import BatchEntry
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.client.validator.checks import ClaimedWork
from muster.client.validator.judging import Rules
from muster.client.worker.generation import play_ticket
from muster.lab.simulator.machines import Hidden, SimulatedEngine
from muster.protocol.eip712 import Domain, address_of, digest, sign
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.ids import PolicyVersion, RunId, Step, to_address
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Ticket, Verdict
from muster.protocol.recipe import ProofRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout, count_units, encode_rollouts
from muster.tasks.toys import make_sort
from muster.toploc import Calibration
from muster.toploc.calibration import CalibratedModel, ChunkLimits, SamplerLimits

NODE_KEY = keccak(b"node")
ORCHESTRATOR_KEY = keccak(b"orchestrator")
VALIDATOR_KEY = keccak(b"validator")
OTHER_KEY = keccak(b"somebody else")
WORKER = to_address(keccak(b"worker")[:20])
DOMAIN = Domain(31337, to_address(keccak(b"ledger")[:20]))
RUN = RunId(7)
VERSION = PolicyVersion(3)
ROOT = keccak(b"manifest 3")
BEACON = keccak(b"block 40")
NOW = 1_000_000

RECIPE = Recipe(
    name="test",
    sampling=SamplingRecipe(
        problems_per_submission=2, samples_per_problem=2, temperature=1.0, max_new_tokens=6
    ),
    proof=ProofRecipe(chunk_tokens=4, topk=8),
    training=TrainingRecipe(submissions_per_step=1),
    min_software="0.1",
)
TASK_SET = make_sort(20, seed=1)
CALIBRATION = Calibration(
    model=CalibratedModel(
        name="hash",
        architecture="Hash",
        hidden_size=8,
        vocab_size=13,
        engine="transformers:float32",
    ),
    proof=RECIPE.proof,
    temperature=1.0,
    chunk=ChunkLimits(
        max_exponent_mismatches=1,
        max_mantissa_error_mean=4.0,
        max_mantissa_error_median=4.0,
        max_sign_mismatches=0,
    ),
    sampler=SamplerLimits(margin=0.01, max_outside_per_sample=0),
    fraud_strikes=2,
)
RULES = Rules(RECIPE, TASK_SET, CALIBRATION)


class HashEngine(SimulatedEngine):
    """The simulator's engine with another spread of logits; it records the policies it loaded."""

    def __init__(self, version: PolicyVersion | None = None) -> None:
        super().__init__()
        self.policy_version = version
        self.loaded: list[tuple[Path, PolicyVersion]] = []

    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        super().load_policy(folder, version)
        self.loaded.append((folder, version))

    def _step(self, tokens: tuple[int, ...]) -> Hidden:
        name = hashlib.sha256(repr((self.policy_version, tokens)).encode()).digest()
        random = np.random.default_rng(int.from_bytes(name[:8], "big"))
        hidden = random.normal(size=self.hidden_size).astype(np.float32)
        return (hidden.view(np.uint32) >> 16).astype(np.uint16), random.normal(
            size=self.vocab_size
        ).astype(np.float32)


def make_ticket(**changes: object) -> Ticket:
    values: dict[str, object] = {
        "run_id": RUN,
        "worker": WORKER,
        "step": Step(4),
        "index": 0,
        "policy_version": VERSION,
        "policy_root": ROOT,
        "beacon": BEACON,
        "deadline": NOW + 600,
    }
    return Ticket(**{**values, **changes})  # type: ignore[arg-type]


def make_terms(**changes: object) -> TicketTerms:
    values: dict[str, object] = {
        "domain": DOMAIN,
        "orchestrator": address_of(ORCHESTRATOR_KEY),
        "run_id": RUN,
        "worker": WORKER,
        "policies": {VERSION: KnownPolicy(ROOT, BEACON)},
    }
    return TicketTerms(**{**values, **changes})  # type: ignore[arg-type]


def sign_ticket(ticket: Ticket, key: bytes = ORCHESTRATOR_KEY) -> bytes:
    return sign(digest(DOMAIN, ticket.struct_hash()), key)


def sign_submission(submission: Submission, key: bytes = NODE_KEY) -> bytes:
    return sign(digest(DOMAIN, submission.struct_hash()), key)


def make_rollouts(ticket: Ticket, version: PolicyVersion = VERSION) -> list[Rollout]:
    return play_ticket(ticket, RECIPE, TASK_SET, HashEngine(version)).graded()


def make_submission(ticket: Ticket, rows: list[Rollout], **changes: object) -> Submission:
    values: dict[str, object] = {
        "run_id": ticket.run_id,
        "worker": ticket.worker,
        "step": ticket.step,
        "index": ticket.index,
        "policy_version": ticket.policy_version,
        "file_hash": file_hash(encode_rollouts(rows)),
        "rollouts": len(rows),
        "units": count_units(rows, RECIPE.sampling.max_new_tokens),
    }
    return Submission(**{**values, **changes})  # type: ignore[arg-type]


def make_entry(
    ticket: Ticket, submission: Submission, /, key: bytes = NODE_KEY, **changes: Any
) -> BatchEntry:
    """Return a submission as an orchestrator shows it, with everything that proves it."""
    values: dict[str, Any] = {
        "submission": submission,
        "signature": sign_submission(submission, key),
        "ticket": ticket,
        "ticket_signature": sign_ticket(ticket),
        "received_at": ticket.deadline,
    }
    return BatchEntry(**values | changes)


def make_claim(
    submission: Submission, ticket: Ticket | None, *, key: bytes = NODE_KEY, **changes: object
) -> ClaimedWork:
    values: dict[str, object] = {
        "submission": submission,
        "signature": sign_submission(submission, key),
        "ticket": ticket,
        "ticket_signature": sign_ticket(ticket) if ticket else None,
        "committed_at": NOW + 30,
        "terms": make_terms(),
        "worker_id": 5,
        "node": address_of(NODE_KEY),
        "is_slot_used": False,
    }
    return ClaimedWork(**{**values, **changes})  # type: ignore[arg-type]


def as_claimed(submission: Submission, worker_id: int) -> OutcomeRecord:
    """Return the record of a submission that is accepted with its worker's claims."""
    return OutcomeRecord(
        worker_id=worker_id,
        step=submission.step,
        index=submission.index,
        policy_version=submission.policy_version,
        file_hash=submission.file_hash,
        rollouts=submission.rollouts,
        units=submission.units,
        verdict=Verdict.ACCEPTED,
        reason=Reason.NONE,
    )
