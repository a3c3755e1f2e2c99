"""What can be done about an outcome: re-run it, dispute it, follow and settle its case.

Pure. Every line names the exact command; `muster explain` shows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muster.client.cases import describe_case, name_of
from muster.client.quantities import format_coins, format_duration, format_time, format_tokens
from muster.protocol.messages import Verdict

if TYPE_CHECKING:
    from muster.chain import ChainView, Place
    from muster.client.explain import Money
    from muster.client.rerun import Recomputed


def describe_recourse(view: ChainView, place: Place, money: Money) -> dict[str, Any]:
    """Return what can be done about an outcome, and its case, as JSON values."""
    assert money.standing is not None  # there is an outcome
    case = view.cases.get(money.standing.leaf)
    return {
        "evidence": _evidence(place, money),
        "dispute": _dispute(place, money, has_case=case is not None),
        "case": None if case is None else describe_case(view, case, money.terms, money.now),
    }


def _evidence(place: Place, money: Money) -> list[str] | None:
    """Return the commands that re-run a verdict; None of work that was accepted."""
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


def _dispute(place: Place, money: Money, *, has_case: bool) -> dict[str, Any] | None:
    """Return until when, how and at what price the outcome can be disputed, if it can be."""
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


def name_of_place(place: Place) -> str:
    """Return a submission's place as commands take it."""
    return f"{place.batch.batch_id}:{place.position}"


# For people


def recourse_facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return what can be done about an outcome, as names and lines."""
    dispute, case = found["dispute"], found["case"]
    facts: dict[str, Any] = {"re-run": _rerun_lines(found["evidence"])}
    if dispute:
        return facts | {"dispute": _dispute_lines(dispute)}
    if case is None:
        return facts | {"dispute": "the window is closed"}
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


def advice_on(again: Recomputed, found: dict[str, Any]) -> str:
    """Return what a recomputed verdict says about a challenge."""
    recorded, mine = found["recorded_verdict"], name_of(again.record.verdict)
    if mine == recorded:
        return "this machine agrees with the verdict: a claim would lose its bond"
    if found["dispute"]:
        return (
            f"this machine finds {mine}, validators signed {recorded}: honest jurors will find "
            "what this machine finds, so dispute it (see dispute)"
        )
    return f"this machine finds {mine}, validators signed {recorded}: see dispute"
