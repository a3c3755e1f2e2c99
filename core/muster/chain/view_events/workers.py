"""Workers with their nodes, what each is in a run, and who is on the jurors' bench."""

from __future__ import annotations

from dataclasses import replace

from muster.chain.abi import Event
from muster.chain.structs import NO_HASH, WorkerStatus
from muster.chain.view_events.tables import Arguments, ChainTables
from muster.chain.view_parts import MemberView, StakeView, WorkerView
from muster.protocol.jury import BenchPlace


def on_worker_registered(view: ChainTables, event: Event, args: Arguments) -> None:
    worker = WorkerView(
        address=args["worker"],
        worker_id=args["worker_id"],
        registered_tx=event.tx_hash,
    )
    view.expect(event, "worker id", len(view.workers) + 1, worker.worker_id)
    view.workers[worker.address] = worker
    view.worker_by_id[worker.worker_id] = worker


def on_node_bound(view: ChainTables, event: Event, args: Arguments) -> None:
    worker = view.workers[args["worker"]]
    worker.node = args["node"]
    worker.nodes.append((event.block_number, worker.node))
    view.worker_by_node[worker.node] = worker


def on_node_unbound(view: ChainTables, event: Event, args: Arguments) -> None:
    worker = view.workers[args["worker"]]
    view.expect(event, "the old node", worker.node, args["node"])
    view.worker_by_node.pop(worker.node, None)
    worker.rotated_at[worker.node] = event.block_timestamp


def on_worker_joined(view: ChainTables, event: Event, args: Arguments) -> None:
    worker, run = view.workers[args["worker"]], view.runs[args["run_id"]]
    member = MemberView(
        run_id=run.run_id,
        worker=worker,
        stake=view.stakes.setdefault(
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
    view.expect(event, "the run's terms", run.terms_number, member.terms)
    run.members[worker.address] = worker.memberships[run.run_id] = member


def _member(view: ChainTables, args: Arguments) -> MemberView:
    return view.runs[args["run_id"]].members[args["worker"]]


def _set_status(view: ChainTables, event: Event, status: WorkerStatus) -> MemberView:
    member = _member(view, event.args)
    member.status, member.status_since = status, event.block_timestamp
    member.standings.append((event.block_number, status))
    return member


def on_worker_jailed(view: ChainTables, event: Event, args: Arguments) -> None:
    member = _member(view, args)
    member.jailed_until = args["until"]
    # A jailing without a fraud verdict is filed under no hash.
    member.convictions += args["escrow_id"] != NO_HASH
    # A member that is leaving goes on leaving.
    if member.status is WorkerStatus.ACTIVE:
        _set_status(view, event, WorkerStatus.JAILED)


def on_worker_returned(view: ChainTables, event: Event, args: Arguments) -> None:
    member = _set_status(view, event, WorkerStatus.ACTIVE)
    member.active_from, member.terms, member.left_at = args["active_from"], args["terms"], 0


def on_worker_exiting(view: ChainTables, event: Event, _args: Arguments) -> None:
    _set_status(view, event, WorkerStatus.EXITING).left_at = event.block_timestamp


def on_worker_banned(view: ChainTables, event: Event, _args: Arguments) -> None:
    _set_status(view, event, WorkerStatus.BANNED).convictions += 1


def on_worker_acquitted(view: ChainTables, event: Event, args: Arguments) -> None:
    _set_status(view, event, WorkerStatus.of(args["status"])).convictions -= 1


def on_juror_joined(view: ChainTables, event: Event, args: Arguments) -> None:
    place = BenchPlace(args["juror"], event.block_timestamp)
    if args["place"] < len(view.bench):
        view.bench[args["place"]] = place
        return
    view.expect(event, "the place", len(view.bench), args["place"])
    view.bench.append(place)


def on_juror_left(view: ChainTables, event: Event, args: Arguments) -> None:
    if args["place"] >= len(view.bench):
        view.contradict(event, f"there is no place {args['place']}")
        return
    place = view.bench[args["place"]]
    view.expect(event, "the juror", place.juror, args["juror"])
    view.bench[args["place"]] = replace(place, left_at=event.block_timestamp)
