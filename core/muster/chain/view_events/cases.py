"""Cases before a jury, from the first claim to fees and fines."""

from __future__ import annotations

from collections import Counter

from muster.chain.abi import Event
from muster.chain.structs import CaseStatus
from muster.chain.view_events.tables import Arguments, ChainTables
from muster.chain.view_parts import CaseView, ClaimView
from muster.protocol.ids import RunId
from muster.protocol.jury import is_same, is_unavailable


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
            submission=args["submission"],
            node_signature=args["node_signature"],
            sources=tuple(args["sources"]),
            tx_hash=event.tx_hash,
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
    case.closed_tx = event.tx_hash
    view.expect(event, "what the jury voted", _standing(case), case.ruling)


def on_fee_collected(view: ChainTables, event: Event, args: Arguments) -> None:
    case = view.cases[args["case_id"]]
    case.collected.add(args["juror"])
    view.expect(event, "the fee", case.fee_wei, args["amount"])


def on_fined(view: ChainTables, _event: Event, args: Arguments) -> None:
    view.cases[args["case_id"]].fined.add(args["account"])


def _standing(case: CaseView) -> int:
    """Return the ruling that stands by the votes that were revealed."""
    counted = Counter(case.votes.values()).most_common(2)
    if not counted or (len(counted) == 2 and counted[0][1] == counted[1][1]):
        return case.recorded
    leading = counted[0][0]
    if leading == 0 or is_unavailable(leading) or is_same(leading, case.recorded):
        return case.recorded
    return leading
