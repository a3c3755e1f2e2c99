"""What an auditor recomputes about cases: who was drawn, what stands, and where the money went.

Pure. No event has the hash of a case's draw block: `observed` reads it with the contracts' state.
"""

from collections.abc import Iterator, Mapping, Sequence

from muster.chain import ZERO_ADDRESS, BatchView, CaseView, ClaimView
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import Observed, Parameters
from muster.client.audit.stakes import Problems
from muster.client.quantities import format_tokens
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import Ruling, draw_jury, is_same, is_unavailable, jury_seed, summons_of
from muster.protocol.messages import Verdict

MAX_CLAIMS = 17
"""Most claims of one case: 16 of anybody, and one of its worker or its node."""
REMEMBERED_HASHES = 256
"""Blocks whose hashes contracts can read."""


def cases(view: Ledger, domain: Domain) -> Check:
    """Return whether disputes are about work that exists, and end as their votes decide."""
    found = (
        _of(case, kind, detail)
        for case in view.cases.values()
        for kind, detail in (*_subject_problems(view, case, domain), *_end_problems(view, case))
    )
    still_open = sum(not case.closed for case in view.cases.values())
    return summarise(
        "disputes were decided by jurors of the network",
        found,
        f"{len(view.cases)} cases, {still_open} open",
    )


def _of(case: CaseView, kind: Kind, detail: str) -> Contradiction:
    is_end = kind in (Kind.CASE_VERDICT, Kind.CASE_MONEY)
    return Contradiction(
        kind,
        detail,
        tx=case.closed_tx if is_end else case.opened_tx,
        batch_id=case.batch_id,
        position=case.position,
    )


# Its subject


def _subject_problems(view: Ledger, case: CaseView, domain: Domain) -> Problems:
    batch = view.batches.get(case.batch_id)
    if batch is None or batch.run_id != case.run_id:
        yield Kind.CASE_UNFOUNDED, f"the case is about no batch of run {case.run_id}"
        return
    if not case.claims or len(case.claims) > MAX_CLAIMS:
        yield Kind.CASE_UNFOUNDED, f"the case has {len(case.claims)} claims"
        return
    if case.is_summons:
        work = case.claims[0].submission
        if (case.case_id, batch.count) != (summons_of(case.batch_id), 1):
            yield Kind.CASE_UNFOUNDED, "its name is not that of a batch of one submission"
        if (work.leaf(), work.worker) != (batch.root, case.worker):
            yield Kind.CASE_UNFOUNDED, "the batch is not the work that the jury was called for"
        return
    record = view.record_at(case.batch_id, case.position)
    if record is None:
        yield Kind.CASE_UNFOUNDED, "the case is about no outcome"
        return
    if record.leaf(case.batch_id, case.position) != case.case_id:
        yield Kind.CASE_UNFOUNDED, "the case's name is not the outcome's leaf"
    if Ruling(record.verdict, record.reason).number != case.recorded:
        yield Kind.CASE_UNFOUNDED, f"{case.recorded} is not what was recorded"
    if case.claims[0].submission.worker != case.worker:
        yield Kind.CASE_UNFOUNDED, f"the case is not about the work of {case.worker}"
    worker = view.worker_by_id.get(record.worker_id)
    slot = (record.step, record.index, record.policy_version, record.file_hash)
    # A later proof may come too late to count.
    is_proven = batch.is_proven(case.claims[0], case.position)
    for claim in case.claims:
        work = claim.submission
        named = (work.step, work.index, work.policy_version, work.file_hash)
        is_named = worker is not None and work.worker == worker.address and named == slot
        is_held = batch.is_proven(claim, case.position)
        # A claim shows what the record names, until one proves what the batch holds.
        if not is_held and (is_proven or not is_named):
            yield Kind.CASE_UNFOUNDED, f"{claim.claimant} claims about other work"
        elif not _is_signed(view, batch, claim, domain, is_held=is_held):
            yield Kind.CASE_UNFOUNDED, f"{claim.claimant} shows no signature of the worker's node"
        if is_same(claim.ruling, case.recorded):
            yield Kind.CASE_UNFOUNDED, f"{claim.claimant} claims what is recorded"


def _is_signed(
    view: Ledger, batch: BatchView, claim: ClaimView, domain: Domain, *, is_held: bool
) -> bool:
    """Return whether a claim shows a signature of the worker's node; of what the batch holds, also
    one of a key that was given up before, or of a worker that had left.
    """
    member = view.member(batch.run_id, claim.submission.worker)
    signer = signer_of(domain, claim.submission, claim.node_signature)
    time = 0 if is_held else batch.committed_at
    return bool(member and signer and member.answers_for(signer, time))


# Its jury


def juries(view: Ledger, observed: Observed) -> Check:
    """Return whether every jury follows from its draw block; notes the blocks not known, and jurors
    with an interest that the draw does not look at.
    """
    drawn = [case for case in view.cases.values() if case.jurors]
    hashes = {
        case.case_id: observed.draw_hashes[case.draw_block]
        for case in drawn
        if case.draw_block in observed.draw_hashes and _is_ours(view, case)
    }
    found = [
        _of(case, Kind.CASE_JUROR, problem)
        for case in drawn
        for problem in _jury_problems(view, case, hashes.get(case.case_id), observed.parameters)
    ]
    unseen = (
        f"the jury of case {case.number}: nobody showed the hash of block {case.draw_block}"
        for case in drawn
        if case.case_id not in hashes
    )
    interested = (
        f"the jury of case {case.number}: {juror} {interest}"
        for case in drawn
        for juror, interest in _interests(view, case)
    )
    name = "juries are drawn from the bench by a block that nobody could choose"
    summary = f"{len(hashes)} of {len(drawn)} juries drawn again"
    return summarise(name, found, summary, notes=(*interested, *unseen))


def _interests(view: Ledger, case: CaseView) -> Iterator[tuple[Address, str]]:
    """Yield the jurors with an interest in a case, and which: its worker, where a proof named it
    after the draw, a node of it, and the orchestrator that committed to the work.
    """
    batch = view.batches.get(case.batch_id)
    if batch is None or not case.claims:
        return
    worker = batch.claim_about(case).submission.worker
    account = view.workers.get(worker)
    own = {worker} | ({node for _, node in account.nodes} if account else set())
    for juror in case.jurors:
        if juror in own:
            yield juror, "judged work of its own"
        elif juror == batch.orchestrator and batch.direct is None:
            yield juror, "judged work that it committed"


def _is_ours(view: Ledger, case: CaseView) -> bool:
    """Return whether a draw block can be of this chain: contracts of some L2s see L1 numbers."""
    draw = view.draws.get(case.case_id)
    return draw is not None and 0 < draw.block_number - case.draw_block <= REMEMBERED_HASHES


def _jury_problems(
    view: Ledger, case: CaseView, block_hash: Hash32 | None, parameters: Parameters
) -> Iterator[str]:
    run = view.runs.get(case.run_id)
    if run is None:
        return
    excluded = {run.owner, view.draws[case.case_id].worker} | {
        who
        for who in run.seats
        if view.seated_at.get((run.run_id, who), case.opened_at + 1) <= case.opened_at
    }
    for juror in sorted(excluded & set(case.jurors)):
        yield f"{juror} judged a case of its own run"
    if block_hash is None:
        return
    due = draw_jury(
        view.draws[case.case_id].places,
        opened_at=case.opened_at,
        size=parameters.jury_size,
        seed=jury_seed(block_hash, case.case_id),
        excluded=excluded,
    )
    if list(case.jurors) != due:
        yield f"{', '.join(case.jurors)} sit, block {case.draw_block} drew {', '.join(due)}"


# Its end


def _end_problems(view: Ledger, case: CaseView) -> Problems:
    for voter in sorted(set(case.votes) - set(case.jurors)):
        yield Kind.CASE_JUROR, f"{voter} voted and was not drawn"
    if not case.closed:
        return
    due = case.leading if case.is_decided else case.recorded
    if (case.overturned, case.ruling) != (case.is_decided, due):
        what = f"it was closed as {case.status.lower()} with {case.ruling}, votes decide {due}"
        yield Kind.CASE_VERDICT, what
    batch = view.batches.get(case.batch_id)
    if case.is_summons and case.overturned and (batch is None or batch.records is None):
        yield Kind.CASE_VERDICT, "the jury judged the work, and it has no outcome"
    if case.is_summons and not case.overturned and batch is not None and batch.records is not None:
        yield Kind.CASE_VERDICT, "the jury did not judge the work, and it has an outcome"


# Its money


def money(view: Ledger, observed: Observed, whole: Ledger) -> Check:
    """Return whether bonds, fees and the runs' payments for cases add up, and whether the court
    holds what it owes to all runs, the `whole`.
    """
    name = "bonds and jurors' fees add up"
    bond, fee = observed.parameters.bond, observed.parameters.juror_fee
    found = [
        _of(case, Kind.CASE_MONEY, problem)
        for case in view.cases.values()
        for problem in (
            *_money_problems(view, case, bond, fee),
            *_reporter_problems(case, observed.announced),
        )
    ]
    found += [
        Contradiction(Kind.CASE_MONEY, problem, batch_id=batch_id)
        for batch_id, problem in _put_up_problems(view, bond)
    ]
    held = held_court(whole, bond)
    if observed.court_wei < held:
        what = (
            f"bonds and fees add up to {format_tokens(held)} tokens, "
            f"the court holds {format_tokens(observed.court_wei)}"
        )
        found.append(Contradiction(Kind.CONTRACT_STATE, what))
    return summarise(name, found, f"{format_tokens(held)} tokens are the court's to give back")


def _put_up_problems(view: Ledger, bond: int) -> Iterator[tuple[int, str]]:
    """Yield batches of direct work without a bond, and batches with a bond but no direct work."""
    summoned = {case.batch_id for case in view.cases.values() if case.is_summons}
    brought = {batch.batch_id for batch in view.batches.values() if batch.work is not None}
    for batch_id in sorted(brought - set(view.bonds)):
        yield batch_id, "its worker brought it without a bond"
    for batch_id, put_up in view.bonds.items():
        if batch_id not in brought | summoned:
            yield batch_id, "a bond was put up for work that nobody brought"
        is_whole = batch_id in summoned or put_up.returned_wei in (0, bond)
        if put_up.wei != bond or not is_whole:
            yield batch_id, f"a bond of {format_tokens(put_up.wei)} tokens is not the court's"


def _money_problems(view: Ledger, case: CaseView, bond: int, most_fee: int) -> Iterator[str]:
    if not case.closed:
        return
    right, lost = len(case.right), _lost_bonds(case) * bond
    paid, had = view.court_wei.get(case.case_id, (0, 0))
    # Nobody opposed what the jury found, so its run pays, and its claimant what the run lacks.
    is_unopposed = case.is_decided and not lost
    pot = most_fee * right if is_unopposed else lost
    run_owes = 0 if is_unavailable(case.recorded) or not is_unopposed else min(pot, had)
    if paid != run_owes:
        yield f"its run paid {format_tokens(paid)} tokens, and had {format_tokens(had)}"
    if not case.is_summons:
        claimant_owes = pot - run_owes if is_unopposed else 0
        due = _returns(case, bond, claimant_owes)
        if dict(case.returned_wei) != due:
            back = ", ".join(format_tokens(wei) for wei in case.returned_wei.values())
            owed = ", ".join(format_tokens(wei) for wei in due.values())
            yield f"bonds of {back} tokens went back, due were {owed}"
    fee = min(most_fee, pot // right) if right else 0
    if case.fee_wei != fee:
        yield f"jurors get {format_tokens(case.fee_wei)} tokens each, due are {format_tokens(fee)}"
    if wrong := sorted(case.collected - set(case.right)):
        yield f"{', '.join(wrong)} took a fee and voted otherwise"
    if case.is_summons:
        yield from _bond_problems(view, case, bond - (pot - run_owes))


def _lost_bonds(case: CaseView) -> int:
    """Return how many bonds a jury found wrong."""
    if case.is_summons:
        return int(_is_lost(case))
    return 0 if case.leading is None else len(case.claims) - len(_right_claims(case))


def _returns(case: CaseView, bond: int, owed: int) -> dict[int, int]:
    """Return how much of each claim's bond goes back, by place; the first right one pays `owed`."""
    if case.leading is None:
        return dict.fromkeys(range(len(case.claims)), bond)
    right = _right_claims(case)
    due = {place: bond if place in right else 0 for place in range(len(case.claims))}
    if right:
        due[right[0]] -= owed
    return due


def _right_claims(case: CaseView) -> list[int]:
    """Return the places of the claims that the jury confirmed."""
    stands = case.leading if case.is_decided else None
    return [
        place
        for place, claim in enumerate(case.claims)
        if stands is not None and is_same(claim.ruling, stands)
    ]


def _accepts(case: CaseView) -> bool:
    return case.is_decided and (case.leading or 0) >> 8 == Verdict.ACCEPTED


def _is_lost(case: CaseView) -> bool:
    """Return whether the worker that called the jury loses its bond."""
    return case.leading is not None and not _accepts(case)


def _reporter_problems(case: CaseView, announced: Mapping[Hash32, Sequence[int]]) -> Iterator[str]:
    """Yield a problem when the reporter is not the claimant that announced the jury's ruling first.

    Of two that announced in one block, it is the first to claim. Events do not hold the blocks of
    announcements: `announced` is read from the court.
    """
    if not case.closed:
        return
    right = [] if case.is_summons else _right_claims(case)
    blocks = announced.get(case.case_id, ())
    if len(blocks) == len(case.claims) and right:
        right = [min(right, key=lambda place: (blocks[place], place))]
    reporters = {case.claims[place].claimant for place in right} or {ZERO_ADDRESS}
    if case.reporter not in reporters:
        yield f"{case.reporter} is its reporter, {' or '.join(sorted(reporters))} must be"


def _bond_problems(view: Ledger, case: CaseView, back: int) -> Iterator[str]:
    bond = view.bonds.get(case.batch_id)
    if bond is None:
        yield "a jury was called without a bond"
    elif _is_lost(case) == bool(bond.returned_wei):
        yield "the bond went back, and is lost" if bond.returned_wei else "the bond is held back"
    elif bond.returned_wei and bond.returned_wei != back:
        went, due = format_tokens(bond.returned_wei), format_tokens(back)
        yield f"{went} tokens of the bond went back, due were {due}"


def held_court(view: Ledger, bond: int) -> int:
    """Return what DisputeCourt must hold, as the events give it, in wei."""
    held, gone = 0, set()
    for case in view.cases.values():
        if case.closed:
            held += case.fee_wei * (len(case.right) - len(case.collected))
        elif not case.is_summons:
            held += bond * len(case.claims)
        if case.closed and case.is_summons and case.leading is not None:
            # What did not go back is burned, or among the jurors' fees.
            gone.add(case.batch_id)
    kept = (put for batch_id, put in view.bonds.items() if batch_id not in gone)
    return held + sum(each.wei - each.returned_wei for each in kept)
