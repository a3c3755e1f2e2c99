"""Events of workers and jurors: registration, membership, status and stake."""

from dataclasses import replace

from muster.chain.abi import Event
from muster.chain.structs import NO_HASH, Offence, WorkerStatus
from muster.chain.view_events import Arguments, ChainTables
from muster.chain.view_parts import MemberView, SlashState, SlashView, StakeView, WorkerView
from muster.protocol.ids import RunId
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
    # A jailing without a fraud verdict has no escrow id.
    member.convictions += args["escrow_id"] != NO_HASH
    # A member that is leaving stays in that status.
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


def on_bench_shortened(view: ChainTables, event: Event, args: Arguments) -> None:
    if not all(place.left_at for place in view.bench[args["places"] :]):
        view.contradict(event, "a juror held a place that was given up")
    del view.bench[args["places"] :]


# --------------------------------------------------------------------- stake


def _stake(view: ChainTables, args: Arguments) -> StakeView:
    key = RunId(args["run_id"]), args["owner"]
    return view.stakes.setdefault(key, StakeView(*key))


def on_deposited(view: ChainTables, event: Event, args: Arguments) -> None:
    stake = _stake(view, args)
    stake.active_wei += args["amount"]
    view.expect(event, "active stake", stake.active_wei, args["active"])


def on_unbond_requested(view: ChainTables, event: Event, args: Arguments) -> None:
    stake = _stake(view, args)
    stake.active_wei -= args["amount"]
    stake.unbonding_wei += args["amount"]
    stake.withdrawable_at = args["withdrawable_at"]
    view.expect(event, "unbonding stake", stake.unbonding_wei, args["unbonding"])


def on_withdrawn(view: ChainTables, event: Event, args: Arguments) -> None:
    stake = _stake(view, args)
    view.expect(event, "amount", stake.unbonding_wei, args["amount"])
    stake.unbonding_wei -= args["amount"]
    stake.withdrawable_at = 0


def on_slashed(view: ChainTables, event: Event, args: Arguments) -> None:
    stake, subject = _stake(view, args), args["verdict"]
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
    if slash.escrow_id in view.slash_by_id:
        view.contradict(event, f"0x{slash.escrow_id.hex()} is slashed twice")
    if subject.offence in (Offence.FRAUD, Offence.EXACT_FRAUD):
        slash.batch_id, slash.position = subject.batch_id, subject.position
    stake.active_wei -= taken[0]
    stake.unbonding_wei -= taken[1]
    stake.slashed_wei += slash.amount_wei
    view.slashes.append(slash)
    view.slash_by_id[slash.escrow_id] = slash


def on_slash_released(view: ChainTables, event: Event, args: Arguments) -> None:
    slash = view.slash_by_id[args["escrow_id"]]
    burned, insured, rewarded = args["burned"], args["insured"], args["rewarded"]
    if slash.state is SlashState.RELEASED and slash.split is not None:
        # A share taken after a final slash is split at once; nobody reported it.
        split = (slash.split[0] + burned, slash.split[1] + insured, slash.split[2])
    else:
        _settle(view, event, slash, SlashState.RELEASED)
        split, slash.reporter = (burned, insured, rewarded), args["reporter"]
    slash.split = split
    view.expect(event, "what is split", slash.amount_wei, sum(split))


def on_slash_restored(view: ChainTables, event: Event, args: Arguments) -> None:
    slash = view.slash_by_id[args["escrow_id"]]
    _settle(view, event, slash, SlashState.RESTORED)
    given = args["returned"] + args["followed"]
    view.expect(event, "what is given back", slash.amount_wei, given)
    stake = _stake(view, args)
    stake.active_wei += args["returned"]
    stake.slashed_wei -= args["returned"]


def on_slash_followed(view: ChainTables, _event: Event, args: Arguments) -> None:
    slash = view.slash_by_id[args["escrow_id"]]
    slash.amount_wei += args["amount"]


def _settle(view: ChainTables, event: Event, slash: SlashView, state: SlashState) -> None:
    if slash.state is not SlashState.ESCROWED:
        view.contradict(event, f"the slash was {slash.state} before")
    slash.state, slash.settled_tx = state, event.tx_hash
