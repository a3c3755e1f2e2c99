"""The chain, rebuilt from its events: pure, total, and the same for everybody who reads them.

`apply` takes events in chain order and never raises on an event of our contracts; what does not
follow from the events before it is noted in `contradictions`. The method `_on_worker_joined` takes
in `WorkerJoined`, and so on; an event without a method changes nothing. `rewind` forgets what a
reorganisation made void, by building everything again from the events that stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from muster.chain.abi import Event, snake_case
from muster.chain.structs import (
    NO_HASH,
    ZERO_ADDRESS,
    BatchStatus,
    BlockId,
    CaseStatus,
    Offence,
    PauseCause,
    WorkerStatus,
)
from muster.chain.view_parts import (
    BatchView,
    CaseView,
    CheckpointView,
    ClaimView,
    MemberView,
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
from muster.protocol.jury import BenchPlace, is_same, is_unavailable
from muster.protocol.messages import Verdict

REMEMBERED_BLOCKS = 256
"""Blocks whose hashes are remembered; a deeper reorganisation is read again from the start."""


class ChainView:
    """Everything that events say. Objects taken from it are stale after a rewind: look them up
    again.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._reset()

    def _reset(self) -> None:
        self.workers: dict[Address, WorkerView] = {}
        """By staking wallet, in order of registration; a run's `members` say what each is there."""
        self.worker_by_id: dict[int, WorkerView] = {}
        """By number."""
        self.worker_by_node: dict[Address, WorkerView] = {}
        """By the hot key that serves now."""
        self.stakes: dict[tuple[RunId, Address], StakeView] = {}
        """By run and owner; run 0 is the jurors' bench."""
        self.runs: dict[RunId, RunView] = {}
        """By run id."""
        self.batches: dict[int, BatchView] = {}
        """By batch id."""
        self.own_work: dict[tuple[RunId, Address], dict[Hash32, BatchView]] = {}
        """By run and worker: the batches that it committed or took out of others, by their leaf."""
        self.newest_batch: dict[RunId, int] = {}
        """By run."""
        self.slashes: list[SlashView] = []
        """In chain order."""
        self.payments: list[PaymentView] = []
        """In chain order."""
        self.cases: dict[Hash32, CaseView] = {}
        """By outcome leaf, or `summons_of` a batch that its run left unjudged."""
        self.bench: list[BenchPlace] = []
        """The places of the network's jurors."""
        self.contradictions: list[str] = []
        """Events that do not follow from those before them."""
        self._slash_by_id: dict[Hash32, SlashView] = {}
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
        handler = _handler_of(event.name)
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
        return Verdict(case.ruling >> 8) if case and case.overturned else record.verdict

    def member(self, run_id: RunId, worker: Address) -> MemberView | None:
        """Return a worker as it stands in a run; None when it never joined it."""
        run = self.runs.get(run_id)
        return None if run is None else run.members.get(worker)

    def stake(self, run_id: RunId, owner: Address) -> StakeView:
        """Return what an account staked for a run, which may be nothing."""
        return self.stakes.get((run_id, owner)) or StakeView(run_id, owner)

    def jurors(self) -> list[Address]:
        """Return who is on the network's bench now."""
        return [place.juror for place in self.bench if not place.left_at]

    # --------------------------------------------------------------------- stake

    def _stake(self, args: dict[str, Any]) -> StakeView:
        key = RunId(args["run_id"]), args["owner"]
        return self.stakes.setdefault(key, StakeView(*key))

    def _on_deposited(self, event: Event, args: dict[str, Any]) -> None:
        stake = self._stake(args)
        stake.active_wei += args["amount"]
        self._expect(event, "active stake", stake.active_wei, args["active"])

    def _on_unbond_requested(self, event: Event, args: dict[str, Any]) -> None:
        stake = self._stake(args)
        stake.active_wei -= args["amount"]
        stake.unbonding_wei += args["amount"]
        stake.withdrawable_at = args["withdrawable_at"]
        self._expect(event, "unbonding stake", stake.unbonding_wei, args["unbonding"])

    def _on_withdrawn(self, event: Event, args: dict[str, Any]) -> None:
        stake = self._stake(args)
        self._expect(event, "amount", stake.unbonding_wei, args["amount"])
        stake.unbonding_wei -= args["amount"]
        stake.withdrawable_at = 0

    def _on_slashed(self, event: Event, args: dict[str, Any]) -> None:
        stake, subject = self._stake(args), args["verdict"]
        taken = (args["from_active"], args["from_unbonding"])
        slash = SlashView(
            run_id=stake.run_id,
            owner=stake.owner,
            escrow_id=args["escrow_id"],
            offence=subject.offence,
            tag=subject.tag,
            amount_wei=sum(taken),
            tx_hash=event.tx_hash,
            block_number=event.block_number,
            stake_before=(stake.active_wei, stake.unbonding_wei),
            taken=taken,
        )
        if slash.escrow_id in self._slash_by_id:
            self._contradict(event, f"0x{slash.escrow_id.hex()} is slashed twice")
        if subject.offence in (Offence.FRAUD, Offence.EXACT_FRAUD):
            slash.batch_id, slash.position = subject.batch_id, subject.position
        stake.active_wei -= taken[0]
        stake.unbonding_wei -= taken[1]
        stake.slashed_wei += slash.amount_wei
        self.slashes.append(slash)
        self._slash_by_id[slash.escrow_id] = slash

    def _on_slash_released(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._slash_by_id[args["escrow_id"]]
        burned, insured, rewarded = args["burned"], args["insured"], args["rewarded"]
        if slash.state is SlashState.RELEASED and slash.split is not None:
            # A share taken after a final slash is split at once; nobody reported it.
            split = (slash.split[0] + burned, slash.split[1] + insured, slash.split[2])
        else:
            self._settle(event, slash, SlashState.RELEASED)
            split, slash.reporter = (burned, insured, rewarded), args["reporter"]
        slash.split = split
        self._expect(event, "what is split", slash.amount_wei, sum(split))

    def _on_slash_restored(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._slash_by_id[args["escrow_id"]]
        self._settle(event, slash, SlashState.RESTORED)
        given = args["returned"] + args["followed"]
        self._expect(event, "what is given back", slash.amount_wei, given)
        stake = self._stake(args)
        stake.active_wei += args["returned"]
        stake.slashed_wei -= args["returned"]

    def _on_slash_followed(self, _event: Event, args: dict[str, Any]) -> None:
        slash = self._slash_by_id[args["escrow_id"]]
        slash.amount_wei += args["amount"]

    def _settle(self, event: Event, slash: SlashView, state: SlashState) -> None:
        if slash.state is not SlashState.ESCROWED:
            self._contradict(event, f"the slash was {slash.state} before")
        slash.state, slash.settled_tx = state, event.tx_hash

    # -------------------------------------------------------------------- jurors

    def _on_juror_joined(self, event: Event, args: dict[str, Any]) -> None:
        place = BenchPlace(args["juror"], event.block_timestamp)
        if args["place"] < len(self.bench):
            self.bench[args["place"]] = place
            return
        self._expect(event, "the place", len(self.bench), args["place"])
        self.bench.append(place)

    def _on_juror_left(self, event: Event, args: dict[str, Any]) -> None:
        if args["place"] >= len(self.bench):
            self._contradict(event, f"there is no place {args['place']}")
            return
        place = self.bench[args["place"]]
        self._expect(event, "the juror", place.juror, args["juror"])
        self.bench[args["place"]] = replace(place, left_at=event.block_timestamp)

    # ------------------------------------------------------------------- workers

    def _on_worker_registered(self, event: Event, args: dict[str, Any]) -> None:
        worker = WorkerView(
            address=args["worker"],
            worker_id=args["worker_id"],
            registered_tx=event.tx_hash,
        )
        self._expect(event, "worker id", len(self.workers) + 1, worker.worker_id)
        self.workers[worker.address] = worker
        self.worker_by_id[worker.worker_id] = worker

    def _on_node_bound(self, event: Event, args: dict[str, Any]) -> None:
        worker = self.workers[args["worker"]]
        worker.node = args["node"]
        worker.nodes.append((event.block_number, worker.node))
        self.worker_by_node[worker.node] = worker

    def _on_node_unbound(self, event: Event, args: dict[str, Any]) -> None:
        worker = self.workers[args["worker"]]
        self._expect(event, "the old node", worker.node, args["node"])
        self.worker_by_node.pop(worker.node, None)
        worker.rotated_at[worker.node] = event.block_timestamp

    def _on_worker_joined(self, event: Event, args: dict[str, Any]) -> None:
        worker, run = self.workers[args["worker"]], self.runs[args["run_id"]]
        member = MemberView(
            run_id=run.run_id,
            worker=worker,
            stake=self.stakes.setdefault(
                (run.run_id, worker.address), StakeView(run.run_id, worker.address)
            ),
            terms=args["terms"],
            status=WorkerStatus.ACTIVE,
            active_from=args["active_from"],
            status_since=event.block_timestamp,
            joined_block=event.block_number,
            joined_tx=event.tx_hash,
            joined_beacon=event.block_hash,
            standings=[(event.block_number, WorkerStatus.ACTIVE)],
        )
        self._expect(event, "the run's terms", run.terms_number, member.terms)
        run.members[worker.address] = worker.memberships[run.run_id] = member

    def _member(self, args: dict[str, Any]) -> MemberView:
        return self.runs[args["run_id"]].members[args["worker"]]

    def _set_status(self, event: Event, status: WorkerStatus) -> MemberView:
        member = self._member(event.args)
        member.status, member.status_since = status, event.block_timestamp
        member.standings.append((event.block_number, status))
        return member

    def _on_worker_jailed(self, event: Event, args: dict[str, Any]) -> None:
        member = self._member(args)
        member.jailed_until = args["until"]
        # A jailing without a fraud verdict is filed under no hash.
        member.convictions += args["escrow_id"] != NO_HASH
        # A member that is leaving goes on leaving.
        if member.status is WorkerStatus.ACTIVE:
            self._set_status(event, WorkerStatus.JAILED)

    def _on_worker_returned(self, event: Event, args: dict[str, Any]) -> None:
        member = self._set_status(event, WorkerStatus.ACTIVE)
        member.active_from, member.terms, member.left_at = args["active_from"], args["terms"], 0

    def _on_worker_exiting(self, event: Event, _args: dict[str, Any]) -> None:
        self._set_status(event, WorkerStatus.EXITING).left_at = event.block_timestamp

    def _on_worker_banned(self, event: Event, _args: dict[str, Any]) -> None:
        self._set_status(event, WorkerStatus.BANNED).convictions += 1

    def _on_worker_acquitted(self, event: Event, args: dict[str, Any]) -> None:
        self._set_status(event, WorkerStatus.of(args["status"])).convictions -= 1

    # ---------------------------------------------------------------------- runs

    def _on_run_created(self, event: Event, args: dict[str, Any]) -> None:
        run_id = RunId(args["run_id"])
        self._expect(event, "run id", len(self.runs) + 1, run_id)
        self.runs[run_id] = RunView(
            run_id=run_id,
            owner=args["owner"],
            config=args["config"],
            terms=[args["config"].terms],
            invited=set(),
            seats={},
            validators=[],
            created_tx=event.tx_hash,
        )

    def _on_checkpoint_published(self, event: Event, args: dict[str, Any]) -> None:
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

    def _on_submissions_paused(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].paused = args["paused"]

    def _on_slashing_paused(self, event: Event, args: dict[str, Any]) -> None:
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

    def _on_run_closed(self, event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].closed_at = event.block_timestamp

    def _on_validator_invited(self, _event: Event, args: dict[str, Any]) -> None:
        invited = self.runs[args["run_id"]].invited
        (invited.add if args["invited"] else invited.discard)(args["validator"])

    def _on_validator_seated(self, event: Event, args: dict[str, Any]) -> None:
        run, validator = self.runs[args["run_id"]], args["validator"]
        if validator in run.validators:
            self._contradict(event, f"{validator} is seated already")
        if validator not in run.invited:
            self._contradict(event, f"{validator} was not invited")
        self._expect(event, "the run's terms", run.terms_number, args["terms"])
        run.validators.append(validator)
        bit = run.seats.setdefault(validator, args["seat_bit"])
        self._expect(event, "the seat", bit, args["seat_bit"])

    def _on_validator_unseated(self, event: Event, args: dict[str, Any]) -> None:
        run, validator = self.runs[args["run_id"]], args["validator"]
        if validator not in run.validators:
            self._contradict(event, f"{validator} was no validator")
            return
        run.validators.remove(validator)

    def _on_trainer_rotated(self, event: Event, args: dict[str, Any]) -> None:
        run = self.runs[args["run_id"]]
        self._expect(event, "the old trainer", run.config.trainer, args["old_trainer"])
        run.config = replace(run.config, trainer=args["new_trainer"])

    def _on_orchestrator_rotated(self, event: Event, args: dict[str, Any]) -> None:
        run = self.runs[args["run_id"]]
        old = run.config.orchestrator
        self._expect(event, "the old orchestrator", old, args["old_orchestrator"])
        run.config = replace(run.config, orchestrator=args["new_orchestrator"])

    def _on_change_proposed(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].proposed = (args["terms"], args["effective_at"])

    def _on_change_cancelled(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].proposed = None

    def _on_change_applied(self, event: Event, args: dict[str, Any]) -> None:
        run = self.runs[args["run_id"]]
        announced = run.proposed[0] if run.proposed else None
        self._expect(event, "the terms", announced, args["terms"])
        run.config, run.proposed = replace(run.config, terms=args["terms"]), None
        run.terms.append(args["terms"])
        self._expect(event, "the number of terms", run.terms_number, args["number"])

    # ------------------------------------------------------------------- batches

    def _on_batch_committed(self, event: Event, args: dict[str, Any]) -> None:
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
            terms=args["terms"],
            committed_at=args["committed_at"],
            block_number=event.block_number,
            tx_hash=event.tx_hash,
            beacon=event.block_hash,
            seated=tuple(run.validators) if run else (),
            orchestrator=run.config.orchestrator if run else ZERO_ADDRESS,
        )
        self.newest_batch[args["run_id"]] = args["batch_id"]

    def _on_directly_submitted(self, _event: Event, args: dict[str, Any]) -> None:
        batch = self.batches[args["batch_id"]]
        batch.work, batch.sources = args["work"], tuple(args["sources"])
        own = self.own_work.setdefault((batch.run_id, batch.work.submission.worker), {})
        own[batch.root] = batch

    def _on_batch_split(self, event: Event, args: dict[str, Any]) -> None:
        batch, source = self.batches[args["batch_id"]], self.batches[args["from_batch_id"]]
        self._on_directly_submitted(event, args)
        batch.split_from = source.batch_id
        batch.status, batch.posted_at = source.status, source.posted_at
        batch.signers = source.signers
        submission = args["work"].submission
        source.units -= submission.units
        source.split_off[batch.batch_id] = submission

    def _on_outcomes_shown(self, _event: Event, args: dict[str, Any]) -> None:
        batch, shown = self.batches[args["batch_id"]], args["records_hash"]
        batch.shown.setdefault(shown, {})[args["validator"]] = args["signature"]
        if args["records"]:
            batch.shown_records[shown] = args["records"]

    def _on_batch_withheld(self, _event: Event, args: dict[str, Any]) -> None:
        batch = self.batches[args["batch_id"]]
        batch.status, batch.posted_at = BatchStatus.WITHHELD, args["posted_at"]
        batch.signers = args["signers"]

    def _on_batch_voided(self, event: Event, args: dict[str, Any]) -> None:
        batch = self.batches[args["batch_id"]]
        if batch.records is not None:
            self._contradict(event, f"batch {batch.batch_id} has outcomes")
        batch.voided_tx = event.tx_hash

    def _on_outcomes_posted(self, event: Event, args: dict[str, Any]) -> None:
        batch = self.batches[args["batch_id"]]
        records = parse_records(args["records"])
        self._expect(event, "records", batch.count, len(records))
        if batch.records is not None:
            self._contradict(event, f"batch {batch.batch_id} has outcomes already")
            return
        batch.records = records
        batch.status = BatchStatus.JUDGED
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

    def _on_fraud_executed(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._slash_by_id[args["escrow_id"]]
        slash.leaf = args["leaf"]
        run = self.runs[self.batches[args["batch_id"]].run_id]
        slash.priors = run.members[slash.owner].convictions - 1
        self._expect(event, "the slashed worker", slash.owner, args["worker"])
        self._expect(event, "the slashed amount", slash.amount_wei, args["amount"])
        if run.is_slashing_paused(event.block_timestamp):
            self._contradict(event, f"slashing is paused until {run.slashing_paused_until}")

    def _on_fraud_finalised(self, event: Event, args: dict[str, Any]) -> None:
        slash = self._slash_by_id[args["escrow_id"]]
        self._expect(event, "the slash", SlashState.RELEASED, slash.state)

    # ------------------------------------------------------------ money and cases

    def _on_run_funded(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].funded_wei += args["amount"]

    def _on_reward_claimed(self, event: Event, args: dict[str, Any]) -> None:
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

    def _on_reward_reserved(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].reserved_wei += args["amount"]

    def _on_reward_recovered(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].reserved_wei -= args["amount"]

    def _on_reward_freed(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].reserved_wei -= args["amount"]

    def _on_court_paid(self, _event: Event, args: dict[str, Any]) -> None:
        self.runs[args["run_id"]].court_wei += args["amount"]

    def _on_run_reclaimed(self, _event: Event, args: dict[str, Any]) -> None:
        run = self.runs[args["run_id"]]
        # Free money goes first; a larger amount means that the time to claim is over.
        if args["amount"] > run.available_wei:
            run.reserved_wei = 0
        run.reclaimed_wei += args["amount"]

    def _on_case_opened(self, event: Event, args: dict[str, Any]) -> None:
        self.cases[args["case_id"]] = CaseView(
            case_id=args["case_id"],
            number=args["number"],
            run_id=RunId(args["run_id"]),
            batch_id=args["batch_id"],
            position=args["position"],
            worker=args["worker"],
            recorded=args["recorded"],
            draw_block=args["draw_block"],
            places=args["places"],
            opened_at=event.block_timestamp,
            opened_tx=event.tx_hash,
        )
        self._expect(event, "places of the bench", len(self.bench), args["places"])

    def _on_claimed(self, event: Event, args: dict[str, Any]) -> None:
        self.cases[args["case_id"]].claims.append(
            ClaimView(
                claimant=args["claimant"],
                ruling=args["ruling"],
                submission=args["submission"],
                node_signature=args["node_signature"],
                sources=tuple(args["sources"]),
                tx_hash=event.tx_hash,
            )
        )

    def _on_draw_postponed(self, _event: Event, args: dict[str, Any]) -> None:
        self.cases[args["case_id"]].draw_block = args["draw_block"]

    def _on_jury_drawn(self, _event: Event, args: dict[str, Any]) -> None:
        self.cases[args["case_id"]].jurors = tuple(args["jurors"])

    def _on_vote_committed(self, event: Event, args: dict[str, Any]) -> None:
        case, juror = self.cases[args["case_id"]], args["juror"]
        if juror in case.commitments or juror not in case.jurors:
            self._contradict(event, f"{juror} is no juror, or commits twice")
        case.commitments[juror] = args["commitment"]

    def _on_vote_revealed(self, event: Event, args: dict[str, Any]) -> None:
        case, juror = self.cases[args["case_id"]], args["juror"]
        if juror in case.votes or juror not in case.commitments:
            self._contradict(event, f"{juror} did not commit, or reveals twice")
        case.votes[juror], case.results[juror] = args["ruling"], args["result_hash"]

    def _on_claim_settled(self, event: Event, args: dict[str, Any]) -> None:
        case = self.cases[args["case_id"]]
        place = len(case.returned_wei)
        case.returned_wei[place] = args["returned"]
        made = case.claims[place].claimant if place < len(case.claims) else None
        self._expect(event, "the claimant", made, args["claimant"])

    def _on_case_closed(self, event: Event, args: dict[str, Any]) -> None:
        case = self.cases[args["case_id"]]
        case.status, case.ruling = CaseStatus.of(args["status"]), args["ruling"]
        case.reporter, case.fee_wei = args["reporter"], args["fee"]
        case.closed_tx = event.tx_hash
        self._expect(event, "what the jury voted", _standing(case), case.ruling)

    def _on_fee_collected(self, event: Event, args: dict[str, Any]) -> None:
        case = self.cases[args["case_id"]]
        case.collected.add(args["juror"])
        self._expect(event, "the fee", case.fee_wei, args["amount"])

    def _on_fined(self, _event: Event, args: dict[str, Any]) -> None:
        self.cases[args["case_id"]].fined.add(args["account"])


def _standing(case: CaseView) -> int:
    """Return the ruling that stands by the votes that were revealed."""
    counted = Counter(case.votes.values()).most_common(2)
    if not counted or (len(counted) == 2 and counted[0][1] == counted[1][1]):
        return case.recorded
    leading = counted[0][0]
    if leading == 0 or is_unavailable(leading) or is_same(leading, case.recorded):
        return case.recorded
    return leading


_Handler = Callable[[ChainView, Event, dict[str, Any]], None]


@cache
def _handler_of(event: str) -> _Handler | None:
    """Return the method that takes an event in; no two contracts have an event of one name."""
    handler: _Handler | None = getattr(ChainView, f"_on_{snake_case(event)}", None)
    return handler
