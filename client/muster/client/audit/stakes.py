"""What an auditor recomputes about stake: whose it is, what it was taken for, where it went. Pure.

A slash takes only stake that its owner had signed for: it is for one run and an offence there by a
member of that run, and takes the share in the terms under which the work was committed. A juror is
slashed on the bench for a vote that it did not cast.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from muster.chain import ZERO_ADDRESS, CaseView, SlashState, SlashView
from muster.chain.doubles import tag_of
from muster.chain.structs import Offence
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import Parameters
from muster.client.audit.outcome_table import OutcomeTable
from muster.client.quantities import format_tokens
from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.ids import Hash32, RunId
from muster.protocol.jury import BENCH, Ruling, is_exact, spares_signers
from muster.protocol.messages import OutcomeRecord, Verdict

PPM = 1_000_000
"""The whole, in millionths."""
FRAUDS = (Offence.FRAUD, Offence.EXACT_FRAUD)
"""Offences that an outcome proves."""
SIGNED = (Offence.DOUBLE_OUTCOME, Offence.MISRECORD)
"""Offences that what a validator signed about a batch proves: they cost all its stake."""
MAX_FOLLOWERS = 256
"""Most later offences that are counted when stake is given back."""

Problems = Iterator[tuple[Kind, str]]
"""Problems, each with its kind."""


# Roles


def roles(view: Ledger, parameters: Parameters) -> Check:
    """Return whether workers, validators and jurors hold their stake, and agreed to the terms."""
    found = [*_worker_problems(view, parameters), *_judge_problems(view, parameters)]
    members = sum(len(run.members) for run in view.runs.values())
    seats = sum(len(run.validators) for run in view.runs.values())
    return summarise(
        "workers, validators and jurors hold their stake in the run",
        found,
        f"{members} members, {seats} seats, {len(view.jurors())} jurors",
    )


def _worker_problems(view: Ledger, parameters: Parameters) -> Iterator[Contradiction]:
    required = parameters.required_worker_stake
    for run in view.runs.values():
        for member in run.members.values():
            who = f"worker {member.address} of run {run.run_id}"
            if not 0 < member.terms <= run.terms_number:
                yield _role(f"{who} agreed to terms {member.terms}, which the run never had")
            if not member.worker.nodes:
                yield _role(f"{who} has no node that signs for it")
            # A member that becomes active at a later block must hold the stake already.
            if member.is_active(member.active_from) and member.active_wei < required:
                yield _role(f"{who} is active with {format_tokens(member.active_wei)} tokens")


def _judge_problems(view: Ledger, parameters: Parameters) -> Iterator[Contradiction]:
    seated = ((run.run_id, who) for run in view.runs.values() for who in run.validators)
    for run_id, who in seated:
        stake = view.stake(run_id, who).active_wei
        if stake < parameters.required_validator_stake:
            yield _role(f"validator {who} of run {run_id} sits with {format_tokens(stake)} tokens")
    for who in view.jurors():
        stake = view.stake(RunId(BENCH), who).active_wei
        if stake < parameters.required_juror_stake:
            yield _role(f"juror {who} is on the bench with {format_tokens(stake)} tokens")


def _role(detail: str) -> Contradiction:
    return Contradiction(Kind.ROLE_STAKE, detail)


# Slashes


def slashes(view: Ledger, table: OutcomeTable, parameters: Parameters) -> Check:
    """Return whether every slash follows from an offence by the stake's owner."""
    found = [
        _of(slash, kind, problem)
        for slash in view.slashes
        for kind, problem in _slash_problems(view, table, slash, parameters)
    ]
    executed = {(slash.batch_id, slash.position) for slash in view.slashes}
    places = map(table.place, np.flatnonzero(table.is_verdict(Verdict.FRAUD)).tolist())
    waiting = sum((batch.batch_id, position) not in executed for batch, position in places)
    return summarise(
        "nobody lost what it had not signed for",
        [*found, *_conviction_problems(view), *_follow_problems(view, table, parameters)],
        f"{len(view.slashes)} slashes, {waiting} fraud verdicts not executed",
    )


def _of(slash: SlashView, kind: Kind, problem: str) -> Contradiction:
    return Contradiction(
        kind,
        f"{slash.owner}: {problem}",
        tx=slash.tx_hash,
        block=slash.block_number,
        batch_id=slash.batch_id,
        position=slash.position,
    )


def _slash_problems(
    view: Ledger, table: OutcomeTable, slash: SlashView, parameters: Parameters
) -> Problems:
    if slash.escrow_id != escrow_of(slash):
        yield Kind.SLASH_UNFOUNDED, "it is filed under another name than its own"
    if slash.offence in FRAUDS:
        yield from _fraud_problems(view, slash)
    elif slash.offence is Offence.ABSENT_JUROR:
        yield from _absence_problems(view, slash)
    elif slash.offence is Offence.WRONG_VERDICT:
        yield from _signer_problems(view, slash)
    elif slash.offence in SIGNED:
        yield from _signed_fault_problems(view, slash)
    elif slash.offence is Offence.DOUBLE_SUBMISSION:
        yield from _double_submission_problems(view, slash)
    else:
        yield Kind.SLASH_UNFOUNDED, "there is no such offence"
    shares = due_shares(view, table, slash, parameters)
    if not any(slash.taken == _shares(slash, ppm) for ppm in shares):
        due = " or ".join(_both(_shares(slash, ppm)) for ppm in sorted(shares)) or "nothing"
        what = f"{_both(slash.taken)} tokens were taken of {_both(slash.stake_before)}, due {due}"
        yield Kind.SLASH_SHARE, what
    if slash.split is not None and slash.reporter not in _reporters(view, slash):
        yield Kind.SLASH_REPORTER, f"{slash.reporter} is its reporter, and must not be"


def escrow_of(slash: SlashView) -> Hash32:
    """Return the id of an offence's escrow."""
    number = list(Offence).index(slash.offence)
    return keccak(abi_words(slash.run_id, address_bytes(slash.owner), number, slash.tag))


def due_shares(
    view: Ledger, table: OutcomeTable, slash: SlashView, parameters: Parameters
) -> set[int]:
    """Return the share of stake that an offence costs, in millionths; several if more than one is
    possible.
    """
    if slash.offence in SIGNED:
        return {PPM}
    if slash.offence is Offence.WRONG_VERDICT:
        return {parameters.wrong_verdict_ppm}
    if slash.offence is Offence.ABSENT_JUROR:
        return {parameters.absence_ppm}
    if slash.offence is Offence.DOUBLE_SUBMISSION:
        return _exact_shares(view, table, slash)
    batch = view.batch_of(slash)
    terms = view.terms_of(batch) if batch else None
    if terms is None:
        return set()
    if slash.offence is Offence.EXACT_FRAUD:
        return {terms.exact_fraud_ppm}
    # Each earlier conviction doubles the share.
    return {min(terms.fraud_ppm << max(0, min(slash.priors, 20)), PPM)}


def _exact_shares(view: Ledger, table: OutcomeTable, slash: SlashView) -> set[int]:
    """Return the shares that a double submission may cost, by the terms of batches of its slot.

    Where no record names the slot, a batch held the work under a record that names another one.
    Events do not tell which batch: any terms of the run may apply.
    """
    worker, run = view.workers.get(slash.owner), view.runs.get(slash.run_id)
    if worker is None or run is None or not len(table):
        return set()
    is_slot = np.logical_and.reduce(
        [
            table.is_of(slash.run_id),
            table.column("worker_id") == worker.worker_id,
            table.column("step") == slash.tag >> 32,
            table.column("index") == slash.tag & 0xFFFFFFFF,
        ]
    )
    batches = (table.place(row)[0] for row in np.flatnonzero(is_slot).tolist())
    terms = map(view.terms_of, batches) if is_slot.any() else run.terms
    return {each.exact_fraud_ppm for each in terms if each is not None}


def _shares(slash: SlashView, ppm: int) -> tuple[int, ...]:
    return tuple(-(-stake * ppm // PPM) for stake in slash.stake_before)


def _fraud_problems(view: Ledger, slash: SlashView) -> Problems:
    batch = view.batch_of(slash)
    if batch is None or batch.records is None or slash.position is None:
        yield Kind.SLASH_UNFOUNDED, "slashed without a posted outcome"
        return
    if not 0 <= slash.position < len(batch.records):
        yield Kind.SLASH_UNFOUNDED, f"batch {batch.batch_id} has no position {slash.position}"
        return
    if batch.run_id != slash.run_id:
        yield Kind.SLASH_OTHER_RUN, f"stake for run {slash.run_id}, work of run {batch.run_id}"
    record = batch.records[slash.position]
    leaf = record.leaf(batch.batch_id, slash.position)
    case = view.cases.get(leaf)
    worker = view.worker_by_id.get(record.worker_id)
    subject = (worker.address if worker else None, record.step << 32 | record.index)
    if case is not None and case.overturned and slash.state is not SlashState.RESTORED:
        # A jury's verdict is about what the batch holds, whatever the record names.
        about = batch.claim_about(case).submission
        subject = (about.worker, tag_of(about))
    if slash.tag != subject[1]:
        yield Kind.SLASH_UNFOUNDED, "the offence does not name the slot of its outcome"
    if slash.owner != subject[0]:
        yield Kind.SLASH_UNFOUNDED, f"the outcome is about worker {record.worker_id}"
    member = view.member(slash.run_id, slash.owner)
    if member is None or member.joined_block > slash.block_number:
        yield Kind.SLASH_OTHER_RUN, f"it had not joined run {slash.run_id}"
    if slash.leaf != leaf:
        yield Kind.SLASH_UNFOUNDED, "no execution of a fraud names its outcome"
    for problem in _verdict_problems(slash, record, case):
        yield Kind.SLASH_VERDICT, problem


def _verdict_problems(
    slash: SlashView, record: OutcomeRecord, case: CaseView | None
) -> Iterator[str]:
    is_restored, is_overturned = slash.state is SlashState.RESTORED, bool(case and case.overturned)
    if is_restored and not is_overturned:
        yield "the stake was given back though the verdict stands"
    # Stake that was given back had been taken for the recorded verdict.
    ruling = _stands(record, None if is_restored else case)
    if ruling >> 8 != Verdict.FRAUD:
        yield "the verdict that stands is not fraud"
    elif is_exact(ruling) != (slash.offence is Offence.EXACT_FRAUD):
        yield f"it is filed as {slash.offence.lower()}, what stands is reason {ruling & 0xFF}"


def _stands(record: OutcomeRecord, case: CaseView | None) -> int:
    if case is not None and case.overturned:
        return case.ruling
    return Ruling(record.verdict, record.reason).number


def _conviction_problems(view: Ledger) -> Iterator[Contradiction]:
    """Yield the members whose convictions differ from the offences that stand against them."""
    convicting = (*FRAUDS, Offence.DOUBLE_SUBMISSION)
    standing = Counter(
        (slash.run_id, slash.owner)
        for slash in view.slashes
        if slash.offence in convicting and slash.state is not SlashState.RESTORED
    )
    for run in view.runs.values():
        for member in run.members.values():
            count = standing[run.run_id, member.address]
            if member.convictions != count:
                what = f"{member.address}: {member.convictions} convictions, {count} offences stand"
                yield Contradiction(Kind.SLASH_VERDICT, what)


def _absence_problems(view: Ledger, slash: SlashView) -> Problems:
    if slash.run_id != BENCH:
        yield Kind.SLASH_OTHER_RUN, f"a juror's duty, and stake for run {slash.run_id}"
    case = next((case for case in view.cases.values() if case.number == slash.tag), None)
    if case is None or slash.owner not in case.jurors:
        yield Kind.SLASH_UNFOUNDED, f"it is no juror of case {slash.tag}"
    elif not case.closed or slash.owner in case.votes or slash.owner not in case.fined:
        yield Kind.SLASH_UNFOUNDED, f"case {slash.tag} did not find that it was absent"


def _signer_problems(view: Ledger, slash: SlashView) -> Problems:
    batch, run = view.batches.get(slash.tag), view.runs.get(slash.run_id)
    if batch is None or run is None or batch.run_id != slash.run_id:
        yield Kind.SLASH_OTHER_RUN, f"batch {slash.tag} is none of run {slash.run_id}"
        return
    if slash.owner not in batch.signed_by(run.seats):
        yield Kind.SLASH_UNFOUNDED, f"it did not sign the outcomes of batch {slash.tag}"
    if not any(slash.owner in case.fined for case in _lost_cases(view, slash.tag)):
        yield Kind.SLASH_UNFOUNDED, f"no jury overturned what it signed in batch {slash.tag}"


def _lost_cases(view: Ledger, batch_id: int) -> Iterator[CaseView]:
    """Yield the cases for which a batch's signers are slashed; not those that depend on what the
    committer of the batch showed.
    """
    for case in view.cases.values():
        is_spared = spares_signers(case.recorded, case.ruling, case.votes.values())
        if case.batch_id == batch_id and case.overturned and not (is_spared or case.is_summons):
            yield case


def _signed_fault_problems(view: Ledger, slash: SlashView) -> Problems:
    batch, run = view.batches.get(slash.tag), view.runs.get(slash.run_id)
    if batch is None or run is None or batch.run_id != slash.run_id:
        yield Kind.SLASH_OTHER_RUN, f"batch {slash.tag} is none of run {slash.run_id}"
    elif slash.owner not in run.seats:
        yield Kind.SLASH_OTHER_RUN, f"it never sat in run {slash.run_id}"
    elif slash.offence is Offence.MISRECORD and slash.owner not in batch.signed_by(run.seats):
        yield Kind.SLASH_UNFOUNDED, f"it did not sign the outcomes of batch {slash.tag}"
    yield from _unproven(view, slash)


def _double_submission_problems(view: Ledger, slash: SlashView) -> Problems:
    member = view.member(slash.run_id, slash.owner)
    if member is None or member.joined_block > slash.block_number:
        yield Kind.SLASH_OTHER_RUN, f"it had not joined run {slash.run_id}"
    yield from _unproven(view, slash)


def _unproven(view: Ledger, slash: SlashView) -> Problems:
    # The event does not repeat the two signatures, which the fault court checked.
    if slash.escrow_id not in view.proven:
        yield Kind.SLASH_UNFOUNDED, "the fault court proved nothing of it"


def _reporters(view: Ledger, slash: SlashView) -> set[str]:
    """Return the accounts that may be the rewarded reporter; the zero address stands for nobody."""
    if slash.offence is Offence.WRONG_VERDICT:
        return {case.reporter for case in _lost_cases(view, slash.tag)}
    record = view.record_at(slash.batch_id, slash.position)
    if slash.offence not in FRAUDS or record is None or record.verdict is Verdict.FRAUD:
        return {ZERO_ADDRESS}
    case = view.cases.get(record.leaf(slash.batch_id or 0, slash.position or 0))
    return {case.reporter if case is not None and case.overturned else ZERO_ADDRESS}


# Stake that was given back


def _follow_problems(
    view: Ledger, table: OutcomeTable, parameters: Parameters
) -> Iterator[Contradiction]:
    """Yield problems with the shares that later offences took of stake that was given back."""
    told: dict[Hash32, list[tuple[Hash32, int]]] = {}
    for each in view.followed:
        told.setdefault(each.earlier, []).append((each.later, each.wei))
    for place, slash in enumerate(view.slashes):
        if slash.state is SlashState.RESTORED:
            due = _followers(view, table, place, parameters)
            if due is not None and told.pop(slash.escrow_id, []) != due:
                yield _of(slash, Kind.SLASH_FOLLOWED, "its stake did not go where it was due")
    yield from (
        Contradiction(Kind.SLASH_FOLLOWED, f"0x{earlier.hex()} gave no stake back")
        for earlier in told
        if earlier not in {s.escrow_id for s in view.slashes if s.state is SlashState.RESTORED}
    )


def _followers(
    view: Ledger, table: OutcomeTable, place: int, parameters: Parameters
) -> list[tuple[Hash32, int]] | None:
    """Return the shares of a restored slash that later offences must take; None if not known."""
    restored = view.slashes[place]
    left = restored.amount_wei
    until = view.restored_after.get(restored.escrow_id, len(view.slashes))
    account = (restored.run_id, restored.owner)
    later = [s for s in view.slashes[place + 1 : until] if (s.run_id, s.owner) == account]
    due: list[tuple[Hash32, int]] = []
    for slash in later[:MAX_FOLLOWERS]:
        shares = due_shares(view, table, slash, parameters)
        if not left or slash.escrow_id in view.restored_before.get(restored.escrow_id, ()):
            continue
        if len(shares) != 1:
            return None
        share = -(-left * min(shares) // PPM)
        due.append((slash.escrow_id, share))
        left -= share
    return due


# Where the slashed stake went


def slash_splits(view: Ledger, parameters: Parameters) -> Check:
    """Return whether released slashes were burned, insured and rewarded as they must."""
    released = [slash for slash in view.slashes if slash.split is not None]
    found = (
        Contradiction(Kind.SLASH_SPLIT, f"{slash.owner}: {problem}", tx=slash.settled_tx)
        for slash in released
        for problem in _split_problems(view, slash, parameters)
    )
    return summarise(
        "released slashes are split without profit for judges", found, f"{len(released)} released"
    )


def _split_problems(view: Ledger, slash: SlashView, parameters: Parameters) -> Iterator[str]:
    assert slash.split is not None  # the caller's filter
    if sum(slash.split) != slash.amount_wei:
        split = ", ".join(map(format_tokens, slash.split))
        yield f"{split} tokens do not add up to {format_tokens(slash.amount_wei)}"
    # A share taken after the slash was final is split separately, without a reporter.
    parts = view.splits.get(slash.escrow_id, [])
    for number, (burned, insured, rewarded) in enumerate(parts):
        amount = burned + insured + rewarded
        if insured != amount * parameters.insurance_ppm // PPM:
            yield f"{format_tokens(insured)} tokens were insured of {format_tokens(amount)}"
        is_reported = slash.reporter != ZERO_ADDRESS and number == 0
        most = min(amount * parameters.reporter_ppm // PPM, parameters.reporter_cap)
        if rewarded > (most if is_reported else 0):
            yield (
                f"{format_tokens(rewarded)} tokens went to the reporter {slash.reporter}, "
                f"at most {format_tokens(most if is_reported else 0)} may"
            )


def _both(wei: Iterable[int]) -> str:
    """Return active and unbonding stake in tokens, as text."""
    return " + ".join(map(format_tokens, wei))
