"""Events of runs: their policies, seats, roles, terms and pauses, and their money."""

from dataclasses import replace

from muster.chain.abi import Event
from muster.chain.structs import PauseCause
from muster.chain.view_events import Arguments, ChainTables
from muster.chain.view_parts import CheckpointView, PauseView, PaymentView, RunView
from muster.protocol.ids import PolicyVersion, RunId


def on_run_created(view: ChainTables, event: Event, args: Arguments) -> None:
    run_id = RunId(args["run_id"])
    view.expect(event, "run id", len(view.runs) + 1, run_id)
    view.runs[run_id] = RunView(
        run_id=run_id,
        owner=args["owner"],
        config=args["config"],
        terms=[args["config"].terms],
        invited=set(),
        seats={},
        validators=[],
        created_tx=event.tx_hash,
    )


def on_checkpoint_published(view: ChainTables, event: Event, args: Arguments) -> None:
    run, version = view.runs[args["run_id"]], PolicyVersion(args["version"])
    if run.latest_version is not None and version <= run.latest_version:
        view.contradict(event, f"version {version} does not follow {run.latest_version}")
    run.latest_version = version
    run.checkpoints[version] = CheckpointView(
        version=version,
        manifest_root=args["manifest_root"],
        beacon=event.block_hash,
        block_number=event.block_number,
        timestamp=event.block_timestamp,
        tx_hash=event.tx_hash,
    )


def on_submissions_paused(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.runs[args["run_id"]].paused = args["paused"]


def on_slashing_paused(view: ChainTables, event: Event, args: Arguments) -> None:
    run, began_at = view.runs[args["run_id"]], event.block_timestamp
    if run.is_slashing_paused(began_at):
        view.contradict(event, f"slashing is paused until {run.slashing_paused_until}")
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
        view.contradict(event, f"{args['by']} may not pause slashing")


def on_run_closed(view: ChainTables, event: Event, args: Arguments) -> None:
    view.runs[args["run_id"]].closed_at = event.block_timestamp


def on_validator_invited(view: ChainTables, _event: Event, args: Arguments) -> None:
    invited = view.runs[args["run_id"]].invited
    (invited.add if args["invited"] else invited.discard)(args["validator"])


def on_validator_seated(view: ChainTables, event: Event, args: Arguments) -> None:
    run, validator = view.runs[args["run_id"]], args["validator"]
    if validator in run.validators:
        view.contradict(event, f"{validator} is seated already")
    if validator not in run.invited:
        view.contradict(event, f"{validator} was not invited")
    view.expect(event, "the run's terms", run.terms_number, args["terms"])
    run.validators.append(validator)
    bit = run.seats.setdefault(validator, args["seat_bit"])
    view.expect(event, "the seat", bit, args["seat_bit"])


def on_validator_unseated(view: ChainTables, event: Event, args: Arguments) -> None:
    run, validator = view.runs[args["run_id"]], args["validator"]
    if validator not in run.validators:
        view.contradict(event, f"{validator} was no validator")
        return
    run.validators.remove(validator)


def on_trainer_rotated(view: ChainTables, event: Event, args: Arguments) -> None:
    run = view.runs[args["run_id"]]
    view.expect(event, "the old trainer", run.config.trainer, args["old_trainer"])
    run.config = replace(run.config, trainer=args["new_trainer"])


def on_orchestrator_rotated(view: ChainTables, event: Event, args: Arguments) -> None:
    run = view.runs[args["run_id"]]
    old = run.config.orchestrator
    view.expect(event, "the old orchestrator", old, args["old_orchestrator"])
    run.config = replace(run.config, orchestrator=args["new_orchestrator"])


def on_change_proposed(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.runs[args["run_id"]].proposed = (args["terms"], args["effective_at"])


def on_change_cancelled(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.runs[args["run_id"]].proposed = None


def on_change_applied(view: ChainTables, event: Event, args: Arguments) -> None:
    run = view.runs[args["run_id"]]
    announced = run.proposed[0] if run.proposed else None
    view.expect(event, "the terms", announced, args["terms"])
    run.config, run.proposed = replace(run.config, terms=args["terms"]), None
    run.terms.append(args["terms"])
    view.expect(event, "the number of terms", run.terms_number, args["number"])


def on_run_funded(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.runs[args["run_id"]].funded_wei += args["amount"]


def on_reward_claimed(view: ChainTables, event: Event, args: Arguments) -> None:
    view.payments.append(
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
    run = view.runs[args["run_id"]]
    run.paid_wei += args["amount"]
    run.reserved_wei -= args["amount"]


def on_reward_reserved(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.runs[args["run_id"]].reserved_wei += args["amount"]


def on_reward_recovered(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.runs[args["run_id"]].reserved_wei -= args["amount"]


def on_reward_freed(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.runs[args["run_id"]].reserved_wei -= args["amount"]


def on_court_paid(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.runs[args["run_id"]].court_wei += args["amount"]


def on_run_reclaimed(view: ChainTables, _event: Event, args: Arguments) -> None:
    run = view.runs[args["run_id"]]
    # Free money is reclaimed first; a larger amount means that the time to claim is over.
    if args["amount"] > run.available_wei:
        run.reserved_wei = 0
    run.reclaimed_wei += args["amount"]
