"""The history of one submission, from upload to payment, as JSON values and as text.

Pure except for queries to the contracts. It names the exact command for every next step.
`muster.client.cli.explain` is the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.chain import (
    STATE_WORDS,
    BatchView,
    Chain,
    ChainView,
    CourtTerms,
    SlashState,
    SlashView,
    StandingOutcome,
    SubmissionPlace,
    loss_of,
)
from muster.chain.conversion import lenient_reason
from muster.chain.frauds import awaits_execution
from muster.chain.structs import BatchStatus
from muster.client.disputes.cases import (
    describe_case,
    eligible_jurors,
    name_of,
    settle_command,
)
from muster.client.preflight import gas_money
from muster.client.quantities import format_coins, format_duration, format_time, format_tokens
from muster.protocol.jury import summons_of
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.reasons import VERDICTS, checks_of, words_of

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.client.disputes.rerun import Rerun


@dataclass(frozen=True, slots=True)
class OutcomeMoney:
    """Facts of the contracts about an outcome's money."""

    standing: StandingOutcome | None
    """The standing outcome; None before outcomes are posted."""
    is_paid: bool
    """Whether its slot was paid."""
    now: int
    """The chain's time."""
    due_at: int
    """Deadline of the batch's outcomes."""
    terms: CourtTerms
    """The court's terms for a dispute."""
    gas_wei: int
    """Highest cost of a dispute's gas now, in wei of the chain's coin."""
    jurors: int
    """Number of jurors on the network's bench that could judge a case about it."""
    appeal_ends_at: int
    """Deadline for its worker to appeal to judges of the network, while it is unjudged."""


# The history of a submission


async def ask_money(chain: Chain, view: ChainView, place: SubmissionPlace) -> OutcomeMoney:
    """Return the contracts' facts about an outcome and its slot."""
    batch, now = place.batch, await chain.now()
    due_at = batch.due_at(await chain.ledger.outcome_deadline())
    standing, worker, is_paid = None, None, False
    if batch.records is not None:
        standing = await chain.ledger.standing_of(batch.prove(place.position))
        record = standing.outcome
        worker = await chain.workers.worker_by_id(record.worker_id)
        is_paid = await chain.escrow.is_paid(batch.run_id, worker, record.step, record.index)
    return OutcomeMoney(
        standing=standing,
        is_paid=is_paid,
        now=now,
        due_at=due_at,
        terms=await chain.court.terms(),
        gas_wei=(await gas_money(chain, "dispute")).wei,
        jurors=len(eligible_jurors(view, view.runs[batch.run_id], worker)),
        appeal_ends_at=due_at + await chain.ledger.appeal_time(),
    )


def describe(
    view: ChainView, place: SubmissionPlace, money: OutcomeMoney, entries: Sequence[BatchEntry]
) -> dict[str, Any]:
    """Return everything known about a committed submission, as JSON values."""
    batch = place.batch
    entry = entries[place.position] if entries else None
    found: dict[str, Any] = {
        "state": "judged" if batch.records is not None else "committed",
        "run": batch.run_id,
        "batch": batch.batch_id,
        "position": place.position,
        "received_at": entry.received_at if entry else None,
        "committed": {
            "at": batch.committed_at,
            "block": batch.block_number,
            "transaction": batch.tx_hash,
            "by": "the worker itself" if batch.direct is not None else "the orchestrator",
        },
        "outcomes_due_at": money.due_at,
        "split_from": batch.split_from,
    }
    if money.standing is None:
        return found | _describe_unjudged(view, place, money)
    return found | _describe_outcome(view, place, money)


def _describe_unjudged(
    view: ChainView, place: SubmissionPlace, money: OutcomeMoney
) -> dict[str, Any]:
    """Return the state of a submission without an outcome, and what its worker can do."""
    batch, case = place.batch, view.cases.get(summons_of(place.batch.batch_id))
    if batch.is_void:
        state = "void"
    elif batch.status is BatchStatus.WITHHELD:
        state = "withheld"
    else:
        state = "due" if money.now >= money.due_at else "awaited"
    name = f"{batch.batch_id}:{place.position}"
    can_appeal = state in ("due", "withheld") and money.now < money.appeal_ends_at
    return {
        "unjudged": state,
        "void_transaction": batch.voided_tx,
        "appeal_ends_at": money.appeal_ends_at,
        "appeal": f"muster worker submit-direct {name} --keystore node.json --state-dir STATE "
        "--orchestrator URL"
        if can_appeal and case is None
        else None,
        "void": settle_command(batch.batch_id, place.position)
        if state in ("due", "withheld") and not can_appeal and (case is None or case.closed)
        else None,
        "case": None if case is None else describe_case(view, case, money.terms, money.now),
    }


def _describe_outcome(
    view: ChainView, place: SubmissionPlace, money: OutcomeMoney
) -> dict[str, Any]:
    batch, standing = place.batch, money.standing
    assert standing is not None  # describe
    record = standing.outcome
    worker = view.worker_by_id.get(record.worker_id)
    run = view.runs[batch.run_id]
    outcome = (batch.batch_id, place.position)
    slash = next((s for s in view.slashes if (s.batch_id, s.position) == outcome), None)
    signers = batch.signed_by(run.seats)
    return {
        "worker": worker.address if worker else None,
        "step": record.step,
        "index": record.index,
        "policy_version": record.policy_version,
        "file_hash": "0x" + record.file_hash.hex(),
        "rollouts": record.rollouts,
        "units": record.units,
        "judged": {
            "at": batch.posted_at,
            "transaction": batch.posted_tx,
            "by": signers,
            "network": not signers,
        },
        "recorded_verdict": record.verdict.name.lower(),
        "verdict": standing.verdict.name.lower(),
        "reason": record.reason.name,
        "reason_code": int(record.reason),
        "payment": _payment(batch, record, money),
        "slash": None
        if slash is None
        else {
            "amount_wei": str(slash.amount_wei),
            "state": slash.state,
            "transaction": slash.tx_hash,
            "in_all": _in_all(view, slash),
        },
        "execute": settle_command(*outcome)
        if awaits_execution(view, *outcome, commit_time_s=money.terms.commit_time)
        else None,
    } | describe_recourse(view, place, money)


def _in_all(view: ChainView, slash: SlashView) -> dict[str, Any]:
    loss = loss_of(view, slash.run_id, slash.owner)
    assert loss is not None  # the worker was slashed
    return loss.to_json(format_tokens)


def _payment(batch: BatchView, record: OutcomeRecord, money: OutcomeMoney) -> dict[str, Any]:
    standing = money.standing
    assert standing is not None  # describe
    if standing.verdict is not Verdict.ACCEPTED:
        state = "none"
    elif money.is_paid:
        state = "paid"
    else:
        state = "claimable" if standing.is_final else "pending"
    amount = record.units * batch.price_per_unit if state != "none" else 0
    return {"state": state, "amount_wei": str(amount), "final_at": standing.closes_at}


# For people


def facts_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return a described submission as names and lines for people."""
    committed = found["committed"]
    facts: dict[str, Any] = {
        "submission": f"batch {found['batch']}, position {found['position']} (run {found['run']})",
        "received": format_time(found["received_at"]) if found["received_at"] else None,
        "committed": f"{format_time(committed['at'])} by {committed['by']}, block "
        f"{committed['block']}, {committed['transaction']}",
    }
    if found["split_from"] is not None:
        facts["taken out"] = (
            f"of batch {found['split_from']}, by its worker: nobody judged it there"
        )
    return facts | (_outcome_facts(found) if "verdict" in found else _unjudged_facts(found))


def _unjudged_facts(found: dict[str, Any]) -> dict[str, Any]:
    until, case = format_time(found["appeal_ends_at"]), found["case"]
    words = {
        "awaited": f"not yet: outcomes are due by {format_time(found['outcomes_due_at'])}",
        "due": (
            "by nobody in time: its worker may call jurors of the network until "
            f"{until}; then it is void"
        ),
        "withheld": (
            "by nobody: a quorum of validators could not get the batch; its worker "
            f"may call jurors of the network until {until}"
        ),
        "void": f"by nobody: void, pays nobody and costs nobody, {found['void_transaction']}",
    }[found["unjudged"]]
    return {
        "judged": words,
        "paid": "no: only accepted work is",
        "to do": found["appeal"]
        or (f"any account may declare it void: {found['void']}" if found["void"] else None),
        "judges": None if case is None else [case["ending"] or case["phase"], case["next"]],
    }


def _outcome_facts(found: dict[str, Any]) -> dict[str, Any]:
    judged, payment = found["judged"], found["payment"]
    code = found["reason_code"]
    reason = words_of(Reason(code)) if code in set(Reason) else None
    verdict = Verdict[found["recorded_verdict"].upper()]
    overturned = found["verdict"] != found["recorded_verdict"]
    return {
        "worker": f"{found['worker']}, step {found['step']}, index {found['index']}",
        "claims": f"{found['rollouts']} rollouts, {found['units']} units, policy "
        f"{found['policy_version']}, file {found['file_hash']}",
        "judged": f"{format_time(judged['at'])} by "
        + ("jurors of the network" if judged["network"] else f"{len(judged['by'])} validators")
        + f", {judged['transaction']}",
        "checks": checks_of(verdict, lenient_reason(code)),
        "verdict": f"{found['verdict']}: {VERDICTS[Verdict[found['verdict'].upper()]]}"
        + (f" (a jury overturned {found['recorded_verdict']})" if overturned else ""),
        "reason": f"{found['reason']} ({code}): {reason.meaning if reason else ''}"
        if code
        else None,
        "to do": reason.advice if reason and reason.advice else None,
        "slashed": _slash(found["slash"]) or _unexecuted(found["execute"]),
        "paid": _paid(payment, found["run"]),
    } | recourse_facts(found)


def _slash(slash: dict[str, Any] | None) -> list[str] | None:
    if slash is None:
        return None
    taken, tx = int(slash["amount_wei"]), slash["transaction"]
    where = STATE_WORDS[SlashState(slash["state"])]
    words = f"{format_tokens(taken)} tokens, {where}, {tx}"
    return [
        words if taken else f"nothing: no stake was left to take, {tx}",
        f"in all: {slash['in_all']['words']}",
    ]


def _unexecuted(command: str | None) -> str | None:
    if command is None:
        return None
    return f"not yet: the orchestrator takes the stake, or any account may: {command}"


def _paid(payment: dict[str, Any], run: int) -> str:
    amount = format_tokens(int(payment["amount_wei"]))
    return {
        "none": "no: only accepted work is paid",
        "paid": f"yes, {amount} tokens",
        "claimable": f"not yet: {amount} tokens, muster rewards claim --run {run}",
        "pending": f"not yet: {amount} tokens, claimable from {format_time(payment['final_at'])}",
    }[payment["state"]]


def rerun_facts(again: Rerun, found: dict[str, Any]) -> dict[str, Any]:
    """Return the recomputed verdict and its consequence for a dispute, as text."""
    record = again.record
    reason = f" {record.reason.name}: {again.detail}" if again.detail else ""
    return {
        "rerun": f"{record.verdict.name.lower()}{reason}, {record.units} units",
        "training": _training(again),
        "statistics": [str(each) for each in again.statistics],
        "checked by": [f"{who}: {proof}" for who, proof in again.proofs.items()],
        "so": advice_on(again, found) if "recorded_verdict" in found else None,
    }


def _training(again: Rerun) -> str | None:
    """Return how many samples of accepted work the trainer's filters can keep."""
    if again.preferring is None or again.record.verdict is not Verdict.ACCEPTED:
        return None
    words = f"{again.preferring} of {again.record.rollouts} samples are in groups whose rewards "
    return words + "differ; the others are left out, as are stale, repeated and filtered ones"


def rerun_json(again: Rerun) -> dict[str, Any]:
    """Return the recomputed verdict as JSON values."""
    return {
        "verdict": again.record.verdict.name.lower(),
        "reason": again.record.reason.name,
        "detail": again.detail,
        "units": again.record.units,
        "samples_with_preference": again.preferring,
        "proofs_of_checking": dict(again.proofs),
        "statistics": [
            {"name": s.name, "worst": s.worst, "limit": s.limit, "passes": s.passes}
            for s in again.statistics
        ],
    }


def describe_recourse(
    view: ChainView, place: SubmissionPlace, money: OutcomeMoney
) -> dict[str, Any]:
    """Return the possible actions on an outcome, and its case, as JSON values."""
    assert money.standing is not None  # there is an outcome
    case = view.cases.get(money.standing.leaf)
    return {
        "evidence": _evidence(place, money),
        "dispute": _dispute(place, money, has_case=case is not None),
        "case": None if case is None else describe_case(view, case, money.terms, money.now),
    }


def _evidence(place: SubmissionPlace, money: OutcomeMoney) -> list[str] | None:
    """Return the commands that re-run a verdict; None for accepted work."""
    standing = money.standing
    assert standing is not None  # describe_recourse
    if standing.outcome.verdict is Verdict.ACCEPTED or place.batch.records is None:
        return None
    name, where = standing.outcome.file_hash.hex(), name_of_place(place)
    return [
        f"muster explain {where} --rerun STATE/refused/{name}.parquet --orchestrator URL "
        "--save evidence.zip",
        f"muster audit verify {where} --bundle evidence.zip",
    ]


def _dispute(
    place: SubmissionPlace, money: OutcomeMoney, *, has_case: bool
) -> dict[str, Any] | None:
    """Return deadline, command and price of a dispute of the outcome; None if there can be none."""
    standing, terms = money.standing, money.terms
    assert standing is not None  # describe_recourse
    if has_case or money.now >= standing.closes_at:
        return None
    return {
        "until": standing.closes_at,
        "bond_wei": str(terms.bond),
        "jurors": money.jurors,
        "gas_wei": str(money.gas_wei),
        "takes_s": terms.jury_time,
        "command": f"muster dispute open {name_of_place(place)} --keystore FILE --orchestrator URL "
        "--wait",
    }


def name_of_place(place: SubmissionPlace) -> str:
    """Return a submission's place in the form that commands accept."""
    return f"{place.batch.batch_id}:{place.position}"


# For people


def recourse_facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return the possible actions on an outcome, as names and lines."""
    dispute, case = found["dispute"], found["case"]
    facts: dict[str, Any] = {"re-run": _rerun_lines(found["evidence"])}
    if dispute:
        return facts | {"dispute": _dispute_lines(dispute)}
    if case is None:
        return facts | {"dispute": "the challenge window is closed"}
    claims = [f"{claim['claimant']} claims {claim['ruling']}" for claim in case["claims"]]
    return facts | {"dispute": [*claims, case["ending"] or case["phase"]], "next": case["next"]}


def _rerun_lines(commands: list[str] | None) -> list[str] | None:
    if commands is None:
        return None
    return ["the worker kept its file in its state folder; check the verdict yourself:", *commands]


def _dispute_lines(dispute: dict[str, Any]) -> list[str]:
    bond, gas = format_tokens(int(dispute["bond_wei"])), format_coins(int(dispute["gas_wei"]))
    count = dispute["jurors"]
    return [
        f"possible until {format_time(dispute['until'])}:",
        dispute["command"],
        f"takes a bond of {bond} tokens, lost unless the jury finds the same; gas of {gas} at "
        f"most; the jury is done in {format_duration(dispute['takes_s'])}",
        f"{count} of the network's bench could sit on it"
        + ("" if count else ": nobody would decide, and the record stands"),
    ]


def advice_on(again: Rerun, found: dict[str, Any]) -> str:
    """Return advice on a dispute, given the recomputed verdict: it is compared with the one that
    stands, a jury's where one has overturned the record.
    """
    stands, mine, case = found["verdict"], name_of(again.record.verdict), found["case"]
    if mine == stands:
        can_claim = found["dispute"] or (case and not case["ending"])
        words = "this machine agrees with the verdict"
        return f"{words}: a claim would lose its bond" if can_claim else words
    theirs = "validators signed" if stands == found["recorded_verdict"] else "a jury ruled"
    words = f"this machine finds {mine}, {theirs} {stands}"
    if found["dispute"]:
        return (
            f"{words}: honest jurors will find what this machine finds, so dispute it (see dispute)"
        )
    return f"{words}: see dispute"
