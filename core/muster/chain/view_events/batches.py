"""Events of batches from their commitment to their outcomes, of frauds among these, and of cases
before a jury, from the first claim to fees and fines.
"""

from muster.chain.abi import Event
from muster.chain.structs import ZERO_ADDRESS, BatchStatus, CaseStatus
from muster.chain.view_events import Arguments, ChainTables
from muster.chain.view_parts import (
    BatchView,
    CaseView,
    ClaimView,
    SlashState,
    split_signatures,
)
from muster.protocol.encoding import keccak
from muster.protocol.ids import RunId


def on_batch_committed(view: ChainTables, event: Event, args: Arguments) -> None:
    view.expect(event, "batch id", len(view.batches) + 1, args["batch_id"])
    run = view.runs.get(args["run_id"])
    if run is None:
        view.contradict(event, f"run {args['run_id']} is unknown")
    view.batches[args["batch_id"]] = BatchView(
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
    view.newest_batch[args["run_id"]] = args["batch_id"]


def on_directly_submitted(view: ChainTables, _event: Event, args: Arguments) -> None:
    batch = view.batches[args["batch_id"]]
    batch.work, batch.sources = args["work"], tuple(args["sources"])
    own = view.own_work.setdefault((batch.run_id, batch.work.submission.worker), {})
    own[batch.root] = batch


def on_batch_split(view: ChainTables, event: Event, args: Arguments) -> None:
    batch, source = view.batches[args["batch_id"]], view.batches[args["from_batch_id"]]
    on_directly_submitted(view, event, args)
    batch.split_from = source.batch_id
    # Its work is judged by the block that committed it, whoever rotated, left or signs since.
    batch.left_block, batch.orchestrator = source.block_number, source.orchestrator
    batch.status, batch.posted_at = source.status, source.posted_at
    batch.signers = source.signers
    submission = args["work"].submission
    source.units -= submission.units
    source.split_off[batch.batch_id] = submission


def on_outcomes_shown(view: ChainTables, _event: Event, args: Arguments) -> None:
    batch, shown = view.batches[args["batch_id"]], args["records_hash"]
    batch.shown.setdefault(shown, {})[args["validator"]] = args["signature"]
    if args["records"]:
        batch.shown_records[shown] = args["records"]


def on_batch_withheld(view: ChainTables, _event: Event, args: Arguments) -> None:
    batch = view.batches[args["batch_id"]]
    batch.status, batch.posted_at = BatchStatus.WITHHELD, args["posted_at"]
    batch.signers = args["signers"]


def on_batch_voided(view: ChainTables, event: Event, args: Arguments) -> None:
    batch = view.batches[args["batch_id"]]
    if batch.records is not None:
        view.contradict(event, f"batch {batch.batch_id} has outcomes")
    batch.voided_tx = event.tx_hash


def on_outcomes_posted(view: ChainTables, event: Event, args: Arguments) -> None:
    batch, records = view.batches[args["batch_id"]], view.RECORDS(args["records"])
    view.expect(event, "records", batch.count, len(records))
    if batch.records is not None:
        view.contradict(event, f"batch {batch.batch_id} has outcomes already")
        return
    run = view.runs[batch.run_id]
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
    batch.validators = tuple(run.validators)
    run.judged.append(batch)


def on_fraud_executed(view: ChainTables, event: Event, args: Arguments) -> None:
    slash = view.slash_by_id[args["escrow_id"]]
    slash.leaf = args["leaf"]
    run = view.runs[view.batches[args["batch_id"]].run_id]
    slash.priors = run.members[slash.owner].convictions - 1
    view.expect(event, "the slashed worker", slash.owner, args["worker"])
    view.expect(event, "the slashed amount", slash.amount_wei, args["amount"])
    if run.is_slashing_paused(event.block_timestamp):
        view.contradict(event, f"slashing is paused until {run.slashing_paused_until}")


def on_fraud_finalised(view: ChainTables, event: Event, args: Arguments) -> None:
    slash = view.slash_by_id[args["escrow_id"]]
    view.expect(event, "the slash", SlashState.RELEASED, slash.state)


# --------------------------------------------------------------------- cases


def on_case_opened(view: ChainTables, event: Event, args: Arguments) -> None:
    view.cases[args["case_id"]] = CaseView(
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
    view.expect(event, "places of the bench", len(view.bench), args["places"])


def on_claimed(view: ChainTables, event: Event, args: Arguments) -> None:
    view.cases[args["case_id"]].claims.append(
        ClaimView(
            claimant=args["claimant"],
            ruling=args["ruling"],
            submission=args["work"].submission,
            node_signature=args["work"].node_signature,
            proof=tuple(args["work"].proof),
            sources=tuple(args["sources"]),
            tx_hash=event.tx_hash,
            claimed_at=event.block_timestamp,
        )
    )


def on_draw_postponed(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.cases[args["case_id"]].draw_block = args["draw_block"]


def on_jury_drawn(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.cases[args["case_id"]].jurors = tuple(args["jurors"])


def on_vote_committed(view: ChainTables, event: Event, args: Arguments) -> None:
    case, juror = view.cases[args["case_id"]], args["juror"]
    if juror in case.commitments or juror not in case.jurors:
        view.contradict(event, f"{juror} is no juror, or commits twice")
    case.commitments[juror] = args["commitment"]


def on_vote_revealed(view: ChainTables, event: Event, args: Arguments) -> None:
    case, juror = view.cases[args["case_id"]], args["juror"]
    if juror in case.votes or juror not in case.commitments:
        view.contradict(event, f"{juror} did not commit, or reveals twice")
    case.votes[juror], case.results[juror] = args["ruling"], args["result_hash"]


def on_claim_settled(view: ChainTables, event: Event, args: Arguments) -> None:
    case = view.cases[args["case_id"]]
    place = len(case.returned_wei)
    case.returned_wei[place] = args["returned"]
    made = case.claims[place].claimant if place < len(case.claims) else None
    view.expect(event, "the claimant", made, args["claimant"])


def on_case_closed(view: ChainTables, event: Event, args: Arguments) -> None:
    case = view.cases[args["case_id"]]
    case.status, case.ruling = CaseStatus.of(args["status"]), args["ruling"]
    case.reporter, case.fee_wei = args["reporter"], args["fee"]
    case.closed_tx, case.closed_at = event.tx_hash, event.block_timestamp
    voted = case.leading if case.is_decided else case.recorded
    view.expect(event, "what the jury voted", voted, case.ruling)


def on_case_proven(view: ChainTables, event: Event, args: Arguments) -> None:
    case = view.cases[args["case_id"]]
    if not case.closed:
        view.contradict(event, "the case is open")
    case.is_proven = True


def on_fee_collected(view: ChainTables, event: Event, args: Arguments) -> None:
    case = view.cases[args["case_id"]]
    case.collected.add(args["juror"])
    view.expect(event, "the fee", case.fee_wei, args["amount"])


def on_fined(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.cases[args["case_id"]].fined.add(args["account"])
