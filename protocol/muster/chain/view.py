"""The chain, rebuilt from its events: pure, total, and the same for everybody who reads them.

`apply` takes events in chain order and never raises on an event of our contracts; what does not
follow from the events before it is noted in `contradictions`. `rewind` forgets what a
reorganisation made void, by building everything again from the events that stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from muster.chain.events import Event
from muster.chain.structs import (
    ZERO_ADDRESS,
    BlockId,
    Fault,
    PauseCause,
    WorkerStatus,
)
from muster.chain.view_parts import (
    BatchView,
    CaseView,
    CheckpointView,
    PauseView,
    PaymentView,
    RunView,
    SlashState,
    SlashView,
    StakeView,
    StreamItem,
    WorkerView,
    parse_records,
    split_signatures,
)
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import Verdict

NO_OFFENCE = Hash32(bytes(32))
"""What a jailing without a fraud verdict is filed under."""
REMEMBERED_BLOCKS = 256
"""Blocks whose hashes a reader gets to notice a reorganisation."""


class ChainView:
    """Everything that events say. Objects taken from it are stale after a rewind: look them up."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._reset()

    def _reset(self) -> None:
        self.workers: dict[Address, WorkerView] = {}
        """By staking wallet, in order of registration."""
        self.worker_by_id: dict[int, WorkerView] = {}
        """By number."""
        self.worker_by_node: dict[Address, WorkerView] = {}
        """By the hot key that serves now."""
        self.stakes: dict[Address, StakeView] = {}
        """By owner."""
        self.runs: dict[RunId, RunView] = {}
        """By run id."""
        self.batches: dict[int, BatchView] = {}
        """By batch id."""
        self.slashes: list[SlashView] = []
        """In chain order."""
        self.payments: list[PaymentView] = []
        """In chain order."""
        self.cases: dict[Hash32, CaseView] = {}
        """By outcome leaf."""
        self.contradictions: list[str] = []
        """Events that do not follow from those before them."""
        self._slash_by_offence: dict[Hash32, SlashView] = {}
        self._slots: set[tuple[int, int, int, int]] = set()

    # -------------------------------------------------------------------- events

    @property
    def block_number(self) -> int | None:
        """The block of the newest event."""
        return self._events[-1].block_number if self._events else None

    def apply(self, event: Event) -> None:
        """Take in the next event; one that was taken in before changes nothing."""
        if self._events:
            last = self._events[-1]
            here = (event.block_number, event.log_index)
            if here <= (last.block_number, last.log_index):
                return
        self._events.append(event)
        self._take_in(event)

    def rewind(self, block_number: int) -> None:
        """Forget everything after a block."""
        if self.block_number is None or self.block_number <= block_number:
            return
        self._events = [e for e in self._events if e.block_number <= block_number]
        self._reset()
        for event in self._events:
            self._take_in(event)

    def recent_blocks(self) -> list[BlockId]:
        """Return the newest blocks with events: where a reader can go on."""
        blocks: dict[int, Hash32] = {}
        for event in reversed(self._events):
            blocks[event.block_number] = event.block_hash
            if len(blocks) == REMEMBERED_BLOCKS:
                break
        return [BlockId(number, blocks[number]) for number in sorted(blocks)]

    def _take_in(self, event: Event) -> None:
        handler = _HANDLERS.get((event.contract, event.name))
        if handler is None:
            return
        try:
            handler(self, event, event.args)
        except (KeyError, EncodingError) as error:
            # An event about something whose own event was never seen.
            self._contradict(event, f"refers to something unknown: {error}")

    def _contradict(self, event: Event, problem: str) -> None:
        self.contradictions.append(
            f"{event.contract}.{event.name} in transaction {event.tx_hash}: {problem}"
        )

    def _expect(self, event: Event, what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            self._contradict(event, f"{what} should be {ours}, the event says {theirs}")

    # ------------------------------------------------------------------- queries

    def training_stream(self, run_id: RunId) -> list[StreamItem]:
        """Return a run's accepted records in (block, log index, position) order."""
        run = self.runs.get(run_id)
        return list(run.stream) if run else []

    def slot_used(self, run_id: RunId, worker_id: int, step: int, index: int) -> bool:
        """Return whether the slot has an outcome."""
        return (run_id, worker_id, step, index) in self._slots

    def file_hashes(self, batch: BatchView) -> Iterator[bytes]:
        """Yield the files of a batch as far as the chain tells: once judged, or submitted there."""
        if batch.records is not None:
            yield from (record.file_hash for record in batch.records)
        elif batch.direct is not None:
            yield batch.direct.file_hash

    def standing_verdict(self, batch_id: int, position: int) -> Verdict | None:
        """Return the verdict that stands for an outcome, after disputes; None without outcome."""
        batch = self.batches.get(batch_id)
        if batch is None or batch.records is None or not 0 <= position < len(batch.records):
            return None
        record = batch.records[position]
        case = self.cases.get(record.leaf(batch_id, position)) if self.cases else None
        return Verdict(case.claimed_verdict) if case and case.overturned else record.verdict

    # --------------------------------------------------------------------- stake

    def _stake(self, owner: Address) -> StakeView:
        return self.stakes.setdefault(owner, StakeView(owner))

    def _deposited(self, event: Event, args: dict[str, Any]) -> None:
        stake = self._stake(args["owner"])
        stake.active_wei += args["amount"]
        self._expect(event, "active stake", stake.active_wei, args["active"])

    def _unbond_requested(self, event: Event, args: dict[str, Any]) -> None:
        stake = self._stake(args["owner"])
        stake.active_wei -= args["amount"]
        stake.unbonding_wei += args["amount"]
        stake.withdrawable_at = args["withdrawable_at"]
        self._expect(event, "unbonding stake", stake.unbonding_wei, args["unbonding"])

    def _withdrawn(self, event: Event, args: dict[str, Any]) -> None:
        stake = self._stake(args["owner"])
        self._expect(event, "amount", stake.unbonding_wei, args["amount"])
        stake.unbonding_wei -= args["amount"]
        stake.withdrawable_at = 0

    def _slashed(self, event: Event, args: dict[str, Any]) -> None:
        stake = self._stake(args["owner"])
        taken = (args["from_active"], args["from_unbonding"])
        slash = SlashView(
            owner=args["owner"],
            offence=args["offence"],
            amount_wei=sum(taken),
            tx_hash=event.tx_hash,
            block_number=event.block_number,
            stake_before=(stake.active_wei, stake.unbonding_wei),
            taken=taken,
            reporter=args["reporter"],
        )
        if args["offence"] in self._slash_by_offence:
            self._contradict(event, f"offence 0x{args['offence'].hex()} is slashed twice")
        stake.active_wei -= taken[0]
        stake.unbonding_wei -= taken[1]
        stake.slashed_wei += slash.amount_wei
        self.slashes.append(slash)
        self._slash_by_offence[slash.offence] = slash

    def _slash_released(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._settle(event, SlashState.RELEASED)
        slash.split = (args["burned"], args["insured"], args["rewarded"])
        self._expect(event, "what is split", slash.amount_wei, sum(slash.split))

    def _slash_restored(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._settle(event, SlashState.RESTORED)
        self._expect(event, "what is given back", slash.amount_wei, args["amount"])
        stake = self._stake(args["owner"])
        stake.active_wei += args["amount"]
        stake.slashed_wei -= args["amount"]

    def _stake_held(self, _event: Event, args: dict[str, Any]) -> None:
        stake = self._stake(args["owner"])
        stake.held_until, stake.open_cases = args["held_until"], args["open_cases"]

    def _settle(self, event: Event, state: SlashState) -> SlashView:
        slash = self._slash_by_offence[event.args["offence"]]
        if slash.state is not SlashState.ESCROWED:
            self._contradict(event, f"the slash was {slash.state} before")
        slash.state, slash.settled_tx = state, event.tx_hash
        return slash

    # ------------------------------------------------------------------- workers

    def _worker_registered(self, event: Event, args: dict[str, Any]) -> None:
        worker = WorkerView(
            address=args["worker"],
            worker_id=args["worker_id"],
            node=args["node"],
            status=WorkerStatus.ACTIVE,
            active_from=args["active_from"],
            first_active_from=args["active_from"],
            stake=self._stake(args["worker"]),
            status_since=event.block_timestamp,
            registered_block=event.block_number,
            registered_tx=event.tx_hash,
            nodes=[(event.block_number, args["node"])],
            standings=[(event.block_number, WorkerStatus.ACTIVE)],
        )
        self._expect(event, "worker id", len(self.workers) + 1, worker.worker_id)
        self.workers[worker.address] = worker
        self.worker_by_id[worker.worker_id] = worker
        self.worker_by_node[worker.node] = worker

    def _node_rotated(self, event: Event, args: dict[str, Any]) -> None:
        worker = self.workers[args["worker"]]
        self._expect(event, "the old node", worker.node, args["old_node"])
        self.worker_by_node.pop(worker.node, None)
        worker.node = args["new_node"]
        worker.nodes.append((event.block_number, worker.node))
        self.worker_by_node[worker.node] = worker

    def _set_status(self, event: Event, status: WorkerStatus) -> WorkerView:
        worker = self.workers[event.args["worker"]]
        worker.status, worker.status_since = status, event.block_timestamp
        worker.standings.append((event.block_number, status))
        return worker

    def _worker_jailed(self, event: Event, args: dict[str, Any]) -> None:
        worker = self.workers[args["worker"]]
        worker.jailed_until = args["until"]
        worker.convictions += args["offence"] != NO_OFFENCE
        # Who is leaving goes on leaving.
        if worker.status is WorkerStatus.ACTIVE:
            self._set_status(event, WorkerStatus.JAILED)

    def _worker_unjailed(self, event: Event, args: dict[str, Any]) -> None:
        self._set_status(event, WorkerStatus.ACTIVE).active_from = args["active_from"]

    def _worker_exiting(self, event: Event, _args: dict[str, Any]) -> None:
        self._set_status(event, WorkerStatus.EXITING)

    def _worker_banned(self, event: Event, _args: dict[str, Any]) -> None:
        self._set_status(event, WorkerStatus.BANNED).convictions += 1

    def _worker_acquitted(self, event: Event, args: dict[str, Any]) -> None:
        self._set_status(event, WorkerStatus.of(args["status"])).convictions -= 1

    # ---------------------------------------------------------------------- runs

    def _run_created(self, event: Event, args: dict[str, Any]) -> None:
        run_id = RunId(args["run_id"])
        self._expect(event, "run id", len(self.runs) + 1, run_id)
        self.runs[run_id] = RunView(
            run_id=run_id,
            owner=args["owner"],
            config=args["config"],
            seats={},
            validators=[],
            created_block=event.block_number,
            created_tx=event.tx_hash,
        )

    def _checkpoint_published(self, event: Event, args: dict[str, Any]) -> None:
        run, version = self.runs[args["run_id"]], PolicyVersion(args["version"])
        if run.latest_version is not None and version <= run.latest_version:
            self._contradict(event, f"version {version} does not follow {run.latest_version}")
        run.latest_version = version
        run.checkpoints[version] = CheckpointView(
            version=version,
            manifest_root=args["manifest_root"],
            beacon=event.block_hash,
            block_number=event.block_number,
            timestamp=event.block_timestamp,
            tx_hash=event.tx_hash,
        )

    def _beacon_recorded(self, event: Event, args: dict[str, Any]) -> None:
        checkpoint = self.runs[args["run_id"]].checkpoints[args["version"]]
        self._expect(event, "the beacon", checkpoint.beacon.hex(), args["beacon"].hex())

    def _submissions_paused(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].paused = args["paused"]

    def _slashing_paused(self, event: Event, args: dict[str, Any]) -> None:
        run, began_at = self.runs[args["run_id"]], event.block_timestamp
        if run.is_slashing_paused(began_at):
            self._contradict(event, f"slashing is paused until {run.slashing_paused_until}")
        run.pauses.append(
            PauseView(
                by=args["by"],
                cause=PauseCause.of(args["cause"]),
                reason=args["reason"],
                evidence_hash=args["evidence_hash"],
                began_at=began_at,
                until=args["until"],
                tx_hash=event.tx_hash,
            )
        )
        entitled = {run.owner, run.config.orchestrator, *run.validators}
        if args["by"] not in entitled:
            self._contradict(event, f"{args['by']} may not pause slashing")

    def _run_closed(self, event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].closed_at = event.block_timestamp

    def _validator_seated(self, event: Event, args: dict[str, Any]) -> None:
        run, validator = self.runs[args["run_id"]], args["validator"]
        if validator in run.validators:
            self._contradict(event, f"{validator} is seated already")
        run.validators.append(validator)
        bit = run.seats.setdefault(validator, args["seat_bit"])
        self._expect(event, "the seat", bit, args["seat_bit"])

    def _validator_unseated(self, event: Event, args: dict[str, Any]) -> None:
        run, validator = self.runs[args["run_id"]], args["validator"]
        if validator not in run.validators:
            self._contradict(event, f"{validator} was no validator")
            return
        run.validators.remove(validator)

    def _trainer_rotated(self, event: Event, args: dict[str, Any]) -> None:
        run = self.runs[args["run_id"]]
        self._expect(event, "the old trainer", run.config.trainer, args["old_trainer"])
        run.config = replace(run.config, trainer=args["new_trainer"])

    def _orchestrator_rotated(self, event: Event, args: dict[str, Any]) -> None:
        run = self.runs[args["run_id"]]
        old = run.config.orchestrator
        self._expect(event, "the old orchestrator", old, args["old_orchestrator"])
        run.config = replace(run.config, orchestrator=args["new_orchestrator"])

    def _change_proposed(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].proposed = (args["terms"], args["effective_at"])

    def _change_cancelled(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].proposed = None

    def _change_applied(self, event: Event, args: dict[str, Any]) -> None:
        run = self.runs[args["run_id"]]
        announced = run.proposed[0] if run.proposed else None
        self._expect(event, "the terms", announced, args["terms"])
        run.config, run.proposed = replace(run.config, terms=args["terms"]), None

    # ------------------------------------------------------------------- batches

    def _batch_committed(self, event: Event, args: dict[str, Any]) -> None:
        self._expect(event, "batch id", len(self.batches) + 1, args["batch_id"])
        run = self.runs.get(args["run_id"])
        if run is None:
            self._contradict(event, f"run {args['run_id']} is unknown")
        self.batches[args["batch_id"]] = BatchView(
            batch_id=args["batch_id"],
            run_id=RunId(args["run_id"]),
            root=args["root"],
            count=args["count"],
            units=args["units"],
            price_per_unit=args["price_per_unit"],
            committed_at=args["committed_at"],
            block_number=event.block_number,
            tx_hash=event.tx_hash,
            beacon=event.block_hash,
            seated=tuple(run.validators) if run else (),
            orchestrator=run.config.orchestrator if run else ZERO_ADDRESS,
        )

    def _directly_submitted(self, _event: Event, args: dict[str, Any]) -> None:
        batch = self.batches[args["batch_id"]]
        batch.direct, batch.direct_signature = args["submission"], args["node_signature"]

    def _outcomes_posted(self, event: Event, args: dict[str, Any]) -> None:
        batch = self.batches[args["batch_id"]]
        records = parse_records(args["records"])
        self._expect(event, "records", batch.count, len(records))
        if batch.records is not None:
            self._contradict(event, f"batch {batch.batch_id} has outcomes already")
            return
        batch.records = records
        batch.records_hash = keccak(args["records"])
        batch.signatures = split_signatures(args["signatures"])
        batch.signers = args["signers"]
        batch.outcomes_root = args["outcomes_root"]
        batch.posted_at = args["posted_at"]
        batch.posted_block = event.block_number
        batch.posted_beacon = event.block_hash
        batch.posted_tx = event.tx_hash
        run = self.runs[batch.run_id]
        batch.validators = tuple(run.validators)
        for position, record in enumerate(records):
            self._slots.add((batch.run_id, record.worker_id, record.step, record.index))
            if record.verdict is Verdict.ACCEPTED:
                item = StreamItem(len(run.stream), batch.batch_id, position, record)
                run.stream.append(item)

    def _fraud_executed(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._slash_by_offence[args["offence"]]
        slash.batch_id, slash.position = args["batch_id"], args["position"]
        slash.leaf = args["leaf"]
        slash.priors = self.workers[slash.owner].convictions - 1
        self._expect(event, "the slashed worker", slash.owner, args["worker"])
        self._expect(event, "the slashed amount", slash.amount_wei, args["amount"])
        run = self.runs[self.batches[args["batch_id"]].run_id]
        if run.is_slashing_paused(event.block_timestamp):
            self._contradict(event, f"slashing is paused until {run.slashing_paused_until}")

    def _fraud_finalised(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._slash_by_offence[args["offence"]]
        self._expect(event, "the slash", SlashState.RELEASED, slash.state)

    # ------------------------------------------------------------ money and cases

    def _run_funded(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].funded_wei += args["amount"]

    def _reward_claimed(self, event: Event, args: dict[str, Any]) -> None:
        self.payments.append(
            PaymentView(
                run_id=RunId(args["run_id"]),
                worker=args["worker"],
                slots=args["slots"],
                units=args["units"],
                amount_wei=args["amount"],
                tx_hash=event.tx_hash,
                block_number=event.block_number,
                timestamp=event.block_timestamp,
            )
        )
        run = self.runs[args["run_id"]]
        run.paid_wei += args["amount"]
        run.reserved_wei -= args["amount"]

    def _reward_reserved(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].reserved_wei += args["amount"]

    def _reward_recovered(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].reserved_wei -= args["amount"]

    def _run_reclaimed(self, _event: Event, args: dict[str, Any]) -> None:
        run = self.runs[args["run_id"]]
        # What is free goes first; more than that means that the time to claim is over.
        if args["amount"] > run.available_wei:
            run.reserved_wei = 0
        run.reclaimed_wei += args["amount"]

    def _validator_punished(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._slash_by_offence[args["offence"]]
        slash.fault = Fault.of(args["fault"])
        self._expect(event, "the slashed validator", slash.owner, args["validator"])

    def _double_submission_proven(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._slash_by_offence[args["offence"]]
        slash.is_double_submission = True
        self._expect(event, "the slashed worker", slash.owner, args["worker"])

    def _case_opened(self, event: Event, args: dict[str, Any]) -> None:
        self.cases[args["leaf"]] = CaseView(
            leaf=args["leaf"],
            batch_id=args["batch_id"],
            position=args["position"],
            challenger=args["challenger"],
            recorded_verdict=args["recorded_verdict"],
            claimed_verdict=args["claimed_verdict"],
            draw_block=args["draw_block"],
            opened_at=event.block_timestamp,
            opened_tx=event.tx_hash,
        )

    def _draw_postponed(self, _event: Event, args: dict[str, Any]) -> None:
        self.cases[args["leaf"]].draw_block = args["draw_block"]

    def _jury_drawn(self, _event: Event, args: dict[str, Any]) -> None:
        self.cases[args["leaf"]].jurors = tuple(args["jurors"])

    def _vote_committed(self, event: Event, args: dict[str, Any]) -> None:
        case, juror = self.cases[args["leaf"]], args["juror"]
        if juror in case.commitments or juror not in case.jurors:
            self._contradict(event, f"{juror} is no juror, or commits twice")
        case.commitments[juror] = args["commitment"]

    def _vote_revealed(self, event: Event, args: dict[str, Any]) -> None:
        case, juror = self.cases[args["leaf"]], args["juror"]
        if juror in case.votes or juror not in case.commitments:
            self._contradict(event, f"{juror} did not commit, or reveals twice")
        case.votes[juror], case.results[juror] = args["overturn"], args["result_hash"]

    def _case_closed(self, event: Event, args: dict[str, Any]) -> None:
        case = self.cases[args["leaf"]]
        case.closed, case.overturned = True, args["overturned"]
        case.verdict, case.bond_returned_wei = args["verdict"], args["bond_returned"]
        case.closed_tx = event.tx_hash
        overturns = sum(case.votes.values()) > len(case.votes) / 2
        self._expect(event, "overturned", overturns, case.overturned)


_HANDLERS: dict[tuple[str, str], Callable[[ChainView, Event, dict[str, Any]], None]] = {
    ("StakeVault", "Deposited"): ChainView._deposited,
    ("StakeVault", "UnbondRequested"): ChainView._unbond_requested,
    ("StakeVault", "Withdrawn"): ChainView._withdrawn,
    ("StakeVault", "Slashed"): ChainView._slashed,
    ("StakeVault", "SlashReleased"): ChainView._slash_released,
    ("StakeVault", "SlashRestored"): ChainView._slash_restored,
    ("StakeVault", "StakeHeld"): ChainView._stake_held,
    ("WorkerRegistry", "WorkerRegistered"): ChainView._worker_registered,
    ("WorkerRegistry", "NodeRotated"): ChainView._node_rotated,
    ("WorkerRegistry", "WorkerJailed"): ChainView._worker_jailed,
    ("WorkerRegistry", "WorkerUnjailed"): ChainView._worker_unjailed,
    ("WorkerRegistry", "WorkerExiting"): ChainView._worker_exiting,
    ("WorkerRegistry", "WorkerBanned"): ChainView._worker_banned,
    ("WorkerRegistry", "WorkerAcquitted"): ChainView._worker_acquitted,
    ("WorkerRegistry", "WorkerRejoined"): ChainView._worker_unjailed,
    ("RunRegistry", "RunCreated"): ChainView._run_created,
    ("RunRegistry", "CheckpointPublished"): ChainView._checkpoint_published,
    ("RunRegistry", "BeaconRecorded"): ChainView._beacon_recorded,
    ("RunRegistry", "SubmissionsPaused"): ChainView._submissions_paused,
    ("RunRegistry", "SlashingPaused"): ChainView._slashing_paused,
    ("RunRegistry", "RunClosed"): ChainView._run_closed,
    ("RunRegistry", "ValidatorSeated"): ChainView._validator_seated,
    ("RunRegistry", "ValidatorUnseated"): ChainView._validator_unseated,
    ("RunRegistry", "TrainerRotated"): ChainView._trainer_rotated,
    ("RunRegistry", "OrchestratorRotated"): ChainView._orchestrator_rotated,
    ("RunRegistry", "ChangeProposed"): ChainView._change_proposed,
    ("RunRegistry", "ChangeCancelled"): ChainView._change_cancelled,
    ("RunRegistry", "ChangeApplied"): ChainView._change_applied,
    ("ContributionLedger", "BatchCommitted"): ChainView._batch_committed,
    ("ContributionLedger", "DirectlySubmitted"): ChainView._directly_submitted,
    ("ContributionLedger", "OutcomesPosted"): ChainView._outcomes_posted,
    ("ContributionLedger", "FraudExecuted"): ChainView._fraud_executed,
    ("ContributionLedger", "FraudFinalised"): ChainView._fraud_finalised,
    ("RewardEscrow", "RunFunded"): ChainView._run_funded,
    ("RewardEscrow", "RewardReserved"): ChainView._reward_reserved,
    ("RewardEscrow", "RewardClaimed"): ChainView._reward_claimed,
    ("RewardEscrow", "RewardRecovered"): ChainView._reward_recovered,
    ("RewardEscrow", "RunReclaimed"): ChainView._run_reclaimed,
    ("DisputeCourt", "CaseOpened"): ChainView._case_opened,
    ("DisputeCourt", "DrawPostponed"): ChainView._draw_postponed,
    ("DisputeCourt", "JuryDrawn"): ChainView._jury_drawn,
    ("DisputeCourt", "VoteCommitted"): ChainView._vote_committed,
    ("DisputeCourt", "VoteRevealed"): ChainView._vote_revealed,
    ("DisputeCourt", "CaseClosed"): ChainView._case_closed,
    ("FaultCourt", "ValidatorPunished"): ChainView._validator_punished,
    ("FaultCourt", "DoubleSubmissionProven"): ChainView._double_submission_proven,
}
