"""Disputes: challenge an outcome before the run's jury, look at cases, close them.

Posted outcomes are proven from the chain alone. Of an overdue batch the orchestrator must show the
submissions, unless the worker submitted directly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.client.options import (
    chain_options,
    endpoint,
    json_option,
    key_options,
    open_keystore,
    yes_option,
)
from muster.client.overdue import submissions_of
from muster.client.printing import print_json, print_table
from muster.client.quantities import format_duration, format_time, format_tokens
from muster.protocol.errors import ConfigError, ContractRevert
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import Submission, Verdict

if TYPE_CHECKING:
    from muster.chain import (
        BatchView,
        CaseView,
        Chain,
        ChainView,
        CourtTerms,
        OutcomeProof,
        Receipt,
        Standing,
    )

T = TypeVar("T")

VERDICTS = {verdict.name.lower(): verdict for verdict in Verdict}
"""What can be claimed, by its name on the command line."""

_HINTS = {
    "CourtWindowClosed": "the outcome is final: nothing can change it any more",
    "CourtCaseExists": "an outcome has one case at most: see muster dispute list",
    "CourtNoOpenCase": "see muster dispute list for cases that are open",
    "CourtPhaseOpen": "the jury has time left: muster dispute list shows until when",
    "LedgerOutcomesPending": "outcomes are still awaited: challenge them once they are posted",
}


@dataclass(frozen=True, slots=True)
class Offer:
    """What a challenge would do, for people to read before they agree."""

    standing: Standing
    """The outcome as it stands."""
    claimed: Verdict
    """What the challenger says it should be."""
    terms: CourtTerms
    """The court's terms."""
    balance_wei: int
    """What the challenger's wallet holds."""
    allowance_wei: int
    """What the court may take of it already."""

    def require(self, now: int) -> None:
        """Raise ConfigError when the challenge cannot be made."""
        if self.claimed is self.standing.outcome.verdict:
            raise ConfigError(
                f"the outcome is recorded as {_name(self.claimed)} already",
                hint="a challenge claims another verdict: see --verdict",
            )
        if now >= self.standing.closes_at:
            raise ConfigError(
                f"the challenge window closed at {format_time(self.standing.closes_at)}",
                hint=_HINTS["CourtWindowClosed"],
            )
        if self.balance_wei < self.terms.challenge_bond:
            raise ConfigError(
                f"the bond is {format_tokens(self.terms.challenge_bond)} tokens, the wallet holds "
                f"{format_tokens(self.balance_wei)}",
                hint="send tokens to it, or challenge from another account: any may",
            )

    def describe(self) -> str:
        """Return what the challenge costs, what it is about and until when it is possible."""
        record, terms = self.standing.outcome, self.terms
        return (
            f"outcome {_name(record.verdict)} ({record.reason.name}) of worker {record.worker_id}, "
            f"step {record.step}, index {record.index}, {record.units} units\n"
            f"claim   {_name(self.claimed)}\n"
            f"bond    {format_tokens(terms.challenge_bond)} of "
            f"{format_tokens(self.balance_wei)} tokens; burned if more jurors uphold "
            "the verdict than not, else given back\n"
            f"open    until {format_time(self.standing.closes_at)}; the case takes "
            f"{format_duration(terms.commit_time + terms.reveal_time)} at most"
        )


# Chain


async def make_offer(
    chain: Chain, challenger: Address, proof: OutcomeProof, claimed: Verdict
) -> Offer:
    """Return what a challenge would do; raises ConfigError when it cannot be made."""
    court = chain.deployment.contracts["DisputeCourt"]
    offer = Offer(
        standing=await explained(chain.ledger.standing_of(proof)),
        claimed=claimed,
        terms=await chain.court.terms(),
        balance_wei=await chain.token.balance_of(challenger),
        allowance_wei=await chain.token.allowance(challenger, court),
    )
    offer.require(await chain.now())
    return offer


async def open_case(chain: Chain, proof: OutcomeProof, offer: Offer) -> Receipt:
    """Challenge an outcome and return the receipt; approves the bond when that is needed."""
    if offer.allowance_wei < offer.terms.challenge_bond:
        court = chain.deployment.contracts["DisputeCourt"]
        await chain.token.approve(court, offer.terms.challenge_bond)
    return await explained(chain.court.challenge(proof, offer.claimed))


async def close_case(chain: Chain, proof: OutcomeProof) -> Receipt:
    """Close a case and return the receipt; raises ContractRevert while its jury has time left."""
    return await explained(chain.court.close(proof))


async def explained(call: Awaitable[T]) -> T:
    """Return what a call returns; a refusal says what to do next."""
    try:
        return await call
    except ContractRevert as error:
        error.hint = _HINTS.get(error.name, error.hint)
        raise


def find_batch(view: ChainView, batch_id: int) -> BatchView:
    """Return a batch; raises ConfigError when there is none."""
    batch = view.batches.get(batch_id)
    if batch is None:
        raise ConfigError(
            f"there is no batch {batch_id}, the newest is {len(view.batches)}",
            hint="muster audit lists batches and their outcomes",
        )
    return batch


def prove_position(
    view: ChainView, batch: BatchView, position: int, submissions: Sequence[Submission]
) -> tuple[Hash32, OutcomeProof]:
    """Return the name and the proof of an outcome; raises ConfigError for a wrong position."""
    from muster.client.case_proofs import leaf_of, prove_outcome

    if not 0 <= position < batch.count:
        raise ConfigError(
            f"batch {batch.batch_id} has no position {position}",
            hint=f"positions are 0 to {batch.count - 1}",
        )
    proof = prove_outcome(view, batch, position, submissions)
    return leaf_of(batch, position, submissions), proof


# Report


def describe_cases(
    view: ChainView, run_id: RunId | None, terms: CourtTerms, now: int
) -> list[dict[str, Any]]:
    """Return cases as JSON values, oldest first."""
    return [
        describe_case(case, terms, now)
        for case in view.cases.values()
        if run_id is None or view.batches[case.batch_id].run_id == run_id
    ]


def describe_case(case: CaseView, terms: CourtTerms, now: int) -> dict[str, Any]:
    """Return a case as JSON values; its deadline is when its phase ends at the latest."""
    phase, deadline = phase_of(case, terms, now)
    overturn = sum(case.votes.values())
    return {
        "case": f"0x{case.leaf.hex()}",
        "batch": case.batch_id,
        "position": case.position,
        "challenger": case.challenger,
        "recorded": _name(Verdict(case.recorded_verdict)),
        "claimed": _name(Verdict(case.claimed_verdict)),
        "phase": phase,
        "jurors": list(case.jurors),
        "committed": len(case.commitments),
        "votes_to_overturn": overturn,
        "votes_to_uphold": len(case.votes) - overturn,
        "deadline": deadline,
    }


def phase_of(case: CaseView, terms: CourtTerms, now: int) -> tuple[str, int | None]:
    """Return where a case stands, and when that ends at the latest."""
    commit_ends_at = case.opened_at + terms.commit_time
    ends_at = commit_ends_at + terms.reveal_time
    if case.closed:
        return ("overturned" if case.overturned else "upheld"), None
    if now >= ends_at or 0 < len(case.jurors) == len(case.votes):
        return "to close", None
    if not case.jurors:
        return ("drawing", commit_ends_at) if now < commit_ends_at else ("no jury", ends_at)
    if now >= commit_ends_at or len(case.commitments) == len(case.jurors):
        return "revealing", ends_at
    return "committing", commit_ends_at


CASE_COLUMNS = (
    "case",
    "batch",
    "recorded",
    "claimed",
    "phase",
    "jurors",
    "for:against",
    "deadline",
)
"""The columns of `muster dispute list`."""


def make_row(case: dict[str, Any]) -> list[str]:
    """Return a described case as a row for people."""
    return [
        case["case"][:12],
        f"{case['batch']}.{case['position']}",
        case["recorded"],
        case["claimed"],
        case["phase"],
        f"{case['committed']}/{len(case['jurors'])}",
        f"{case['votes_to_overturn']}:{case['votes_to_uphold']}",
        format_time(case["deadline"]) if case["deadline"] else "-",
    ]


def _name(verdict: Verdict) -> str:
    return verdict.name.lower()


# Commands


def _place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--orchestrator", metavar="URL", help="Shows an overdue batch's submissions."),
        click.option("--position", type=int, required=True, help="The outcome's place there."),
        click.option("--batch", type=int, required=True, help="The outcome's batch."),
    ):
        command = option(command)
    return command


@click.group()
def dispute() -> None:
    """Challenge outcomes before a jury."""


@dispute.command("open")
@key_options
@_place_options
@click.option(
    "--verdict",
    type=click.Choice(list(VERDICTS)),
    required=True,
    help="What the outcome should be.",
)
@yes_option
@json_option
@chain_options
def dispute_open(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Challenge an outcome, with a bond. Prints the case.

    Anybody may, until the outcome's challenge window closes. The bond is approved when needed.

    \b
    Example:
      muster dispute open --batch 12 --position 3 --verdict accepted --keystore worker.json
    """
    import asyncio

    asyncio.run(_open(open_keystore(keystore, password_file).key, options))


async def _open(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain, ChainView
    from muster.client.rewards import read_view

    async with await Chain.connect(*endpoint(options), key=key) as chain:
        view = await read_view(chain, ChainView())
        batch = find_batch(view, options["batch"])
        submissions = await submissions_of(batch, options["orchestrator"])
        leaf, proof = prove_position(view, batch, options["position"], submissions)
        if leaf in view.cases:
            raise ConfigError(
                f"the outcome has the case 0x{leaf.hex()}", hint=_HINTS["CourtCaseExists"]
            )
        assert chain.account is not None  # connected with a key
        offer = await make_offer(chain, chain.account, proof, VERDICTS[options["verdict"]])
        click.echo(offer.describe(), err=True)
        if not options["yes"]:
            click.confirm("Challenge?", abort=True, err=True)
        receipt = await open_case(chain, proof, offer)
    if options["as_json"]:
        print_json({"case": f"0x{leaf.hex()}", "transaction": receipt.tx_hash})
    else:
        click.echo(f"0x{leaf.hex()}")


@dispute.command("list")
@click.option("--run", type=int, help="Only cases of this run.")
@json_option
@chain_options
def dispute_list(**options: Any) -> None:
    """List cases, oldest first: where they stand, how many jurors committed, the votes.

    \b
    Example:
      muster dispute list --run 1
    """
    import asyncio

    cases = asyncio.run(_list(options))
    if options["as_json"]:
        print_json(cases)
    else:
        print_table(CASE_COLUMNS, [make_row(case) for case in cases])


async def _list(options: dict[str, Any]) -> list[dict[str, Any]]:
    from muster.chain import Chain, ChainView
    from muster.client.rewards import read_view

    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        run_id = None if options["run"] is None else RunId(options["run"])
        if run_id is not None and run_id not in view.runs:
            raise ConfigError(f"there is no run {run_id}", hint="check --run, --rpc")
        return describe_cases(view, run_id, await chain.court.terms(), await chain.now())


@dispute.command("close")
@key_options
@_place_options
@json_option
@chain_options
def dispute_close(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Close a case that all jurors voted on, or whose time is over. Prints the transaction.

    Anybody may; validators of the run do it by themselves.

    \b
    Example:
      muster dispute close --batch 12 --position 3 --keystore worker.json
    """
    import asyncio

    asyncio.run(_close(open_keystore(keystore, password_file).key, options))


async def _close(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain, ChainView
    from muster.client.rewards import read_view

    async with await Chain.connect(*endpoint(options), key=key) as chain:
        view = await read_view(chain, ChainView())
        batch = find_batch(view, options["batch"])
        submissions = await submissions_of(batch, options["orchestrator"])
        leaf, proof = prove_position(view, batch, options["position"], submissions)
        case = view.cases.get(leaf)
        if case is None or case.closed:
            state = "no case" if case is None else "its case is closed"
            raise ConfigError(
                f"batch {batch.batch_id} position {options['position']}: {state}",
                hint=_HINTS["CourtNoOpenCase"],
            )
        receipt = await close_case(chain, proof)
    if options["as_json"]:
        print_json({"case": f"0x{leaf.hex()}", "transaction": receipt.tx_hash})
    else:
        click.echo(receipt.tx_hash)
