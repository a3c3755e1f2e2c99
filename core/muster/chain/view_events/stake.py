"""What is staked, and what is taken of it: events of the vault."""

from __future__ import annotations

from muster.chain.abi import Event
from muster.chain.structs import Offence
from muster.chain.view_events.tables import Arguments, ChainTables
from muster.chain.view_parts import SlashState, SlashView, StakeView
from muster.protocol.ids import RunId


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
