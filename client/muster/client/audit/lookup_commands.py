"""`muster audit worker | submission | slashes`: one thing, with what contradicts it."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from muster.client.audit.flags import read_history, source_options
from muster.client.options import json_option
from muster.client.printing import print_facts, print_table
from muster.client.quantities import format_tokens

SHOWN_OUTCOMES = 30
"""Newest outcomes of a worker that are printed; --json has all."""


@click.command("worker")
@click.argument("worker", metavar="WORKER")
@json_option
@source_options
def worker(worker: str, as_json: bool, **options: Any) -> None:
    """Show what a worker did, was paid and was slashed for, checked.

    It is named by its address, its node's, six digits of either, or its work.

    \b
    Example:
      muster audit worker 0x70997970C51812dc3A010C7d01b50e0d17dc79C8
    """
    from muster.client.audit.lookups import worker_facts

    found = worker_facts(read_history(options), worker)
    if not as_json:
        print_facts(found["worker"])
        for membership in found["memberships"]:
            click.echo()
            print_facts(dict(map(_in_tokens, membership.items())))
        _print_rows([_outcome_row(each) for each in found["outcomes"][-SHOWN_OUTCOMES:]])
        _print_rows([_payment_row(each) for each in found["payments"]])
        for slash in found["slashes"]:
            click.echo()
            print_facts(_slash_lines(slash))
    _finish(found, as_json=as_json)


@click.command("submission")
@click.argument("submission")
@json_option
@source_options
def submission(submission: str, as_json: bool, **options: Any) -> None:
    """Show what the chain proves about one outcome.

    It is named as BATCH:POSITION, by its file's hash or a transaction's, or six digits of one.

    \b
    Example:
      muster audit submission 12:3
    """
    from muster.client.audit.lookups import submission_facts

    found = submission_facts(read_history(options), submission)
    if not as_json:
        rest = {name: value for name, value in found.items() if name != "contradictions"}
        print_facts({name: _words(value) for name, value in rest.items()})
    _finish(found, as_json=as_json)


@click.command("slashes")
@json_option
@source_options
def slashes(as_json: bool, **options: Any) -> None:
    """Show every slash, with the outcome and the transactions that it rests on.

    \b
    Example:
      muster audit slashes
    """
    from muster.client.audit.lookups import slash_facts

    found = slash_facts(read_history(options))
    if not as_json:
        for slash in found["slashes"]:
            print_facts(_slash_lines(slash))
            click.echo()
    _finish(found, as_json=as_json)


def _slash_lines(slash: dict[str, Any]) -> dict[str, Any]:
    """Return a slash as names and lines of at most 80 columns; hashes stay whole."""
    place = None if slash["batch_id"] is None else f"{slash['batch_id']}:{slash['position']}"
    return {
        "slash": f"{format_tokens(int(slash['amount_wei']))} tokens for {slash['reason']}",
        "of": slash["worker"],
        "outcome": place and f"{place} of run {slash['run_id']}",
        "state": slash["state"] + ("" if slash.get("is_founded", True) else ", CONTRADICTED"),
        "slashed": slash["tx"],
        "verdict": slash["outcome_tx"],
    }


def _outcome_row(outcome: dict[str, Any]) -> dict[str, str]:
    """Return an outcome as columns that fit a screen together; --json has the rest."""
    verdict, stands = outcome["verdict"], outcome["standing_verdict"]
    reason = outcome["reason"]
    return {
        "outcome": f"{outcome['batch_id']}:{outcome['position']}",
        "run": str(outcome["run_id"]),
        "step": f"{outcome['step']}:{outcome['index']}",
        "policy": str(outcome["policy_version"]),
        "units": str(outcome["units"]),
        "verdict": verdict if reason == "none" else f"{verdict}, {reason}",
        "stands": "" if stands == verdict else stands,
        "file": outcome["file_sha256"][:12],
    }


def _payment_row(payment: dict[str, Any]) -> dict[str, str]:
    """Return a payment as columns that fit a screen together."""
    return {
        "paid": f"{format_tokens(int(payment['amount_wei']))} tokens",
        "run": str(payment["run_id"]),
        "submissions": str(payment["slots"]),
        "units": str(payment["units"]),
        "transaction": payment["tx"][:18],
    }


def _words(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return [str(each) for each in value] if isinstance(value, list) else str(value)


def _print_rows(rows: list[dict[str, str]]) -> None:
    if rows:
        click.echo()
        print_table(list(rows[0]), [list(row.values()) for row in rows])


def _in_tokens(item: tuple[str, Any]) -> tuple[str, str]:
    """Return a named value for people: amounts in tokens."""
    name, value = item
    if name.endswith("_wei") and value is not None:
        return f"{name.removesuffix('_wei')}_tokens", format_tokens(int(value))
    return name, str(value)


def _finish(found: dict[str, Any], *, as_json: bool) -> None:
    """Print JSON or the contradictions; exit 1 when there are some."""
    contradictions = found["contradictions"]
    if as_json:
        click.echo(json.dumps(found))
    else:
        for each in contradictions:
            click.echo(f"FAIL {each['kind']}: {each['detail']} (the rule: {each['rule']})")
        click.echo(f"{len(contradictions) or 'no'} contradictions")
    if contradictions:
        sys.exit(1)
