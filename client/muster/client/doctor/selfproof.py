"""The self-proof: one submission as the run would ask for it, generated and judged on this machine.

 1. fetch the run's pinned documents and its newest policy, verified against the chain
 2. derive a ticket that no orchestrator will ever sign, and generate what it asks for
 3. write the file, read it back, and run the validator's own checks on it

Nothing is signed and nothing leaves the machine, so nothing is at stake. The checks recompute the
rollouts with a reference engine (float32 on the CPU) where that is another one and fits in memory:
an engine that is wrong in the same way twice would agree with itself.
"""

from __future__ import annotations

import json
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.chain import ZERO_ADDRESS, RunView
from muster.client.measured import Statistic, measure
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import file_hash
from muster.protocol.errors import EngineError
from muster.protocol.ids import Address, PolicyVersion, Step, to_address
from muster.protocol.messages import Submission, Ticket
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout, count_units, encode_rollouts

if TYPE_CHECKING:
    from muster.client.validator.checks import Claim, Finding
    from muster.client.validator.judging import Rules
    from muster.inference import InferenceEngine

NO_STEP = Step((1 << 32) - 1)
"""A rollout step that no run reaches: its slots are nobody's."""
OVERHEAD_BYTES = 768 << 20
"""What torch and one batch of logits take beside the weights."""
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1}
MAX_HEADER_BYTES = 100 << 20
"""A larger safetensors header is none."""


@dataclass(frozen=True, slots=True)
class Proven:
    """What the self-proof found."""

    finding: Finding | None
    """Why a validator would not accept it, or None."""
    statistics: list[Statistic]
    """What checks 6 and 7 measured."""
    strain: float
    """How close it came to the limits, from 0 to 1."""
    samples: int
    """Rollouts generated."""
    units: int
    """What they would be paid for."""
    generate_s: float
    """Seconds to generate them."""
    check_s: float
    """Seconds to check them."""


def fictitious_ticket(
    run: RunView, worker: Address | None, version: PolicyVersion | None = None
) -> Ticket:
    """Return a ticket for a policy, the newest unless given, and a slot that is nobody's."""
    version = run.latest_version if version is None else version
    assert version is not None  # the caller asked
    checkpoint = run.checkpoints[version]
    return Ticket(
        run_id=run.run_id,
        worker=worker or to_address(secrets.token_bytes(20)),
        step=NO_STEP,
        index=secrets.randbelow(1 << 32),
        policy_version=version,
        policy_root=checkpoint.manifest_root,
        beacon=checkpoint.beacon,
        deadline=int(time.time()) + 3600,
    )


def prove(
    ticket: Ticket, rules: Rules, engine: InferenceEngine, reference: InferenceEngine
) -> Proven:
    """Return how a validator would judge what the engine generates; both have the policy loaded."""
    from muster.client.validator.checks import check_file, strain_of
    from muster.client.validator.judging import examine
    from muster.client.worker.generation import build_submission
    from muster.protocol.rollouts import decode_rollouts

    started = time.perf_counter()
    data = encode_rollouts(build_submission(ticket, rules.recipe, rules.task_set, engine))
    generated = time.perf_counter()
    rows = decode_rollouts(data)
    claim = _claim(ticket, rows, data, rules.recipe)
    judgement = examine(claim, rows, rules, reference)
    finding = check_file(data) or judgement.finding
    replays = judgement.replays
    return Proven(
        finding=finding,
        statistics=measure(replays, rules.calibration),
        strain=strain_of(replays, rules.calibration) if replays else 1.0,
        samples=len(rows),
        units=judgement.units,
        generate_s=generated - started,
        check_s=time.perf_counter() - generated,
    )


def _claim(ticket: Ticket, rows: Sequence[Rollout], data: bytes, recipe: Recipe) -> Claim:
    """Return the claim that a worker would sign; check 1, of signatures, has no say here."""
    from muster.client.validator.checks import Claim

    submission = Submission(
        run_id=ticket.run_id,
        worker=ticket.worker,
        step=ticket.step,
        index=ticket.index,
        policy_version=ticket.policy_version,
        file_hash=file_hash(data),
        rollouts=len(rows),
        units=count_units(rows, recipe.sampling.max_new_tokens),
    )
    policy = KnownPolicy(ticket.policy_root, ticket.beacon)
    terms = TicketTerms(
        domain=Domain(1, ZERO_ADDRESS),
        orchestrator=ZERO_ADDRESS,
        run_id=ticket.run_id,
        worker=ticket.worker,
        policies={ticket.policy_version: policy},
    )
    return Claim(submission, b"", ticket, b"", 0, terms, 0, None, False)


def memory_needed(folder: Path, dtype: str) -> int:
    """Return the bytes that a policy takes once loaded; 0 when its files do not say."""
    weights = sum(_parameters(path) for path in folder.glob("*.safetensors"))
    return weights * (2 if dtype == "bfloat16" else 4) + OVERHEAD_BYTES if weights else 0


def _parameters(path: Path) -> int:
    """Return how many numbers a safetensors file holds, from its header alone."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 0 < size <= MAX_HEADER_BYTES:
            return 0
        try:
            header = json.loads(file.read(size))
            entries = [v for k, v in header.items() if k != "__metadata__"]
            return sum(
                (e["data_offsets"][1] - e["data_offsets"][0]) // _WIDTHS[e["dtype"]]
                for e in entries
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise EngineError(f"{path.name} is no safetensors file: {error}") from None


Load = Callable[[str, str], "InferenceEngine"]
"""Makes an engine of a number format and a device."""


def make_engines(
    load: Load,
    dtype: str,
    device: str,
    *,
    room_bytes: int,
    folder: Path,
    load_reference: Load | None = None,
) -> tuple[InferenceEngine, InferenceEngine, str]:
    """Return the engine, the reference that checks it, and what the reference is, in words.

    `load_reference` makes the reference where `load` makes another kind of engine.
    """
    engine = load(dtype, device)
    if load_reference is None and (dtype, device) == ("float32", "cpu"):
        return engine, engine, "prefilled at once, as validators do"
    needed = memory_needed(folder, "float32")
    if not needed or needed > room_bytes:
        return engine, engine, "checked by the same engine: float32 on the CPU does not fit"
    how = "checked by float32 on the CPU"
    if load_reference is None:
        return engine, load("float32", "cpu"), how
    return engine, load_reference("float32", "cpu"), f"{how}, with transformers"
