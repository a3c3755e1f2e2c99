"""The trap worker: an honest, staked worker that spoils one sample in the slots of its plan.

A trap is tested with the validators' own checks before it is submitted: it must give exactly one
strike, so that the right verdict is Rejected and the worker loses only its pay. If no way of
spoiling the sample fails the checks, the file stays honest, and is noted as such.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.client.durable_log import Journal
from muster.client.validator.checks import count_strikes
from muster.client.validator.judging import Rules
from muster.client.validator.replay import replay_rows
from muster.client.worker.context import WorkerContext
from muster.client.worker.generation import generate_row
from muster.client.worker.loop import WorkerLoop
from muster.inference import InferenceEngine, Request
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32
from muster.protocol.messages import Submission, Ticket
from muster.protocol.rollouts import Rollout
from muster.protocol.traps import Trap, TrapKind, TrapPlan

logger = logging.getLogger(__name__)

Slot = tuple[int, int]
"""Step and index."""
COLDER = 10.0
"""Divisor of a cold sample's temperature."""


class TrapJournal(Journal):
    """Stores each trap before it is signed."""

    def __init__(self, folder: Path) -> None:
        self.laid: dict[Slot, dict[str, Any]] = {}
        super().__init__(folder / "traps.jsonl")

    def take_in(self, entry: dict[str, Any]) -> None:
        """Remember one slot."""
        self.laid[int(entry["step"]), int(entry["index"])] = entry

    def record(self, slot: Slot, file_hash: Hash32, kind: TrapKind | None) -> None:
        """Note the result for a planned slot: a kind of trap, or an honest file."""
        entry = {
            "step": slot[0],
            "index": slot[1],
            "file_hash": hex0x(file_hash),
            "kind": kind,
        }
        self.append(entry)
        self.take_in(entry)


class TrapWorker(WorkerLoop):
    """Follows a plan of slots for traps, and notes the traps that it lays."""

    def __init__(self, context: WorkerContext, plan: TrapPlan, traps: TrapJournal) -> None:
        super().__init__(context)
        self.plan = plan
        self.traps = traps
        if (plan.run_id, plan.worker) != (context.run_id, context.worker):
            raise ConfigError(
                f"the plan is for worker {plan.worker} of run {plan.run_id}",
                hint="check --plan, --worker and --run",
            )
        if context.rules.calibration.fraud_strikes < 2:
            raise ConfigError(
                "one strike is fraud in this run: a trap would be slashed",
                hint="traps need a calibration with fraud_strikes of 2 or more",
            )
        self._spoilt: dict[Slot, TrapKind | None] = {}

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        """Return the ticket's rollouts, with one spoilt if the plan has the slot."""
        rollouts = await super().generate(ticket)
        trap = self.plan.trap_at(ticket.step, ticket.index)
        if trap is None:
            return rollouts
        async with self.policy(ticket.policy_version, ticket.policy_root):
            kind, rollouts = await self.compute.run(
                lay, trap, ticket, rollouts, self.context.rules, self.context.engine
            )
        self._spoilt[ticket.step, ticket.index] = kind
        return rollouts

    def claim(self, ticket: Ticket, rollouts: list[Rollout], data_hash: Hash32) -> Submission:
        """Note the result for the slot, then claim as any worker does."""
        slot = (ticket.step, ticket.index)
        if slot in self._spoilt and slot not in self.traps.laid:
            kind = self._spoilt.pop(slot)
            self.traps.record(slot, data_hash, kind)
            if kind is not None:
                where = {"step": ticket.step, "index": ticket.index, "kind": kind}
                logger.info("trap laid", extra=where)
        return super().claim(ticket, rollouts, data_hash)


# Laying traps, off the event loop


def lay(
    trap: Trap,
    ticket: Ticket,
    rollouts: list[Rollout],
    rules: Rules,
    engine: InferenceEngine,
) -> tuple[TrapKind | None, list[Rollout]]:
    """Return the kind of trap and the rollouts with one spoilt sample; unchanged if no kind fails
    the checks."""
    number = trap.row % len(rollouts)
    for kind in trap.kinds():
        if kind is TrapKind.OTHER_PROOF:
            spoilt = _with_other_proof(rollouts, number)
        else:
            # Only the sampling differs: the row claims the ticket's seed, and its reward is real.
            change = _with_other_seed if kind is TrapKind.OTHER_SEED else _colder
            spoilt = generate_row(ticket, rules, engine, number, change)
        if spoilt is not None and _strikes(spoilt, rules, engine) == 1:
            return kind, [*rollouts[:number], spoilt, *rollouts[number + 1 :]]
    logger.info("no trap could be laid", extra={"step": ticket.step, "index": ticket.index})
    return None, rollouts


def _with_other_seed(request: Request) -> Request:
    return replace(request, seed=request.seed ^ 1)


def _colder(request: Request) -> Request:
    return replace(request, temperature=request.temperature / COLDER)


def _with_other_proof(rollouts: list[Rollout], number: int) -> Rollout | None:
    row = rollouts[number]
    for other in (*rollouts[number + 1 :], *rollouts[:number]):
        if len(other.proofs) == len(row.proofs) and other.proofs != row.proofs:
            return replace(row, proofs=other.proofs)
    return None


def _strikes(row: Rollout, rules: Rules, engine: InferenceEngine) -> int:
    return count_strikes(replay_rows([row], engine, rules.recipe), rules.calibration)
