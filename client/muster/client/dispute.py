"""`muster dispute`: challenge an outcome before the run's jury, look at cases, settle them.

Posted outcomes are proven from the chain alone. Of an overdue batch the orchestrator must show the
submissions, unless the worker submitted directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.cases import CASE_COLUMNS, describe_cases, make_row, name_of, next_of
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
from muster.client.quantities import format_coins, format_duration, format_time, format_tokens
from muster.client.settling import (
    HINTS,
    Settled,
    describe_settled,
    explained,
    settle,
    until_decided,
)
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import Verdict

if TYPE_CHECKING:
    from muster.chain import (
        Chain,
        ChainView,
        CourtTerms,
        OutcomeProof,
        Receipt,
        Standing,
    )

VERDICTS = {name_of(verdict): verdict for verdict in Verdict}
"""What can be claimed, by its name on the command line."""


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
    gas_wei: int
    """What gas costs at most, in the chain's coin."""

    def require(self, now: int) -> None:
        """Raise ConfigError when the challenge cannot be made."""
        if self.claimed is self.standing.outcome.verdict:
            raise ConfigError(
                f"the outcome is recorded as {name_of(self.claimed)} already",
                hint="a challenge claims another verdict: see --verdict",
            )
        if now >= self.standing.closes_at:
            raise ConfigError(
                f"the challenge window closed at {format_time(self.standing.closes_at)}",
                hint=HINTS["CourtWindowClosed"],
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
            f"outcome {name_of(record.verdict)} ({record.reason.name}) of worker "
            f"{record.worker_id}, step {record.step}, index {record.index}, {record.units} units\n"
            f"claim   {name_of(self.claimed)}\n"
            f"bond    {format_tokens(terms.challenge_bond)} of "
            f"{format_tokens(self.balance_wei)} tokens; burned if more jurors uphold "
            "the verdict than not, else given back\n"
            f"gas     {format_coins(self.gas_wei)} of the chain's coin at most\n"
            f"open    until {format_time(self.standing.closes_at)}; the case takes "
            f"{format_duration(terms.commit_time + terms.reveal_time)} at most"
        )


# Chain


async def make_offer(
    chain: Chain, challenger: Address, proof: OutcomeProof, claimed: Verdict | None
) -> Offer:
    """Return what a challenge would do; raises ConfigError when it cannot be made.

    Without a claim it is the opposite of what is recorded.
    """
    from muster.client.preflight import gas_money, require_gas

    court = chain.deployment.contracts["DisputeCourt"]
    gas = await gas_money(chain, "dispute")
    standing = await explained(chain.ledger.standing_of(proof))
    offer = Offer(
        standing=standing,
        claimed=claimed or opposite_of(standing.outcome.verdict),
        terms=await chain.court.terms(),
        balance_wei=await chain.token.balance_of(challenger),
        allowance_wei=await chain.token.allowance(challenger, court),
        gas_wei=gas.wei,
    )
    offer.require(await chain.now())
    await require_gas(chain, challenger, "dispute", gas)
    return offer


def opposite_of(verdict: Verdict) -> Verdict:
    """Return what a challenge claims unless it says otherwise."""
    return Verdict.REJECTED if verdict is Verdict.ACCEPTED else Verdict.ACCEPTED


async def open_case(chain: Chain, proof: OutcomeProof, offer: Offer) -> Receipt:
    """Challenge an outcome and return the receipt; approves the bond when that is needed."""
    if offer.allowance_wei < offer.terms.challenge_bond:
        court = chain.deployment.contracts["DisputeCourt"]
        await chain.token.approve(court, offer.terms.challenge_bond)
    return await explained(chain.court.challenge(proof, offer.claimed))


# The case of a command


@dataclass(frozen=True, slots=True)
class Matter:
    """What a command is about: an outcome, and the chain it is on."""

    chain: Chain
    """Signs with the key given."""
    view: ChainView
    """The chain as it is now; kept current by `read`."""
    read: Callable[[], Any]
    """Brings the view up to date and returns it."""
    leaf: Hash32
    """The outcome's name in cases."""
    proof: OutcomeProof
    """The outcome with its proof."""
    say: Callable[[str], None]
    """Says something to people."""

    async def follow(self, terms: CourtTerms, *, to_the_end: bool) -> Settled:
        """Settle the case, once it is decided."""
        if to_the_end:
            await until_decided(self.chain, self.read, self.leaf, terms, self.say)
        settled = await settle(self.chain, self.read, self.leaf, self.proof)
        for line in describe_settled(settled):
            self.say(line)
        return settled


async def find_matter(chain: Chain, submission: str, orchestrator: str | None) -> Matter:
    """Return what a command is about; raises ConfigError when the text names no submission."""
    from muster.chain import ChainView, EventReader, apply_poll, find_outcome
    from muster.client.case_proofs import leaf_of, prove_outcome

    view, reader = ChainView(), EventReader(chain)

    async def read() -> ChainView:
        apply_poll(view, await reader.poll())
        return view

    place = find_outcome(await read(), submission)
    submissions = await submissions_of(place.batch, orchestrator)
    leaf = leaf_of(place.batch, place.position, submissions)
    proof = prove_outcome(view, place.batch, place.position, submissions)
    return Matter(chain, view, read, leaf, proof, lambda line: click.echo(line, err=True))


# Commands


def _place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--orchestrator", metavar="URL", help="Shows an overdue batch's submissions."),
        click.argument("submission", metavar="SUBMISSION"),
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
    help="What the outcome should be. [default: accepted; of an accepted one: rejected]",
)
@click.option("--wait", is_flag=True, help="Say what happens until the end, and settle it.")
@yes_option
@json_option
@chain_options
def dispute_open(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Challenge an outcome, with a bond. Prints the case.

    Anybody may, until the outcome's challenge window closes. The bond is approved when needed.

    \b
    Examples:
      muster dispute open 12:3 --keystore worker.json
      muster dispute open 12:3 --keystore worker.json --wait --yes
    """
    import asyncio

    asyncio.run(_open(open_keystore(keystore, password_file).key, options))


async def _open(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain

    async with await Chain.connect(*endpoint(options), key=key) as chain:
        matter = await find_matter(chain, options["submission"], options["orchestrator"])
        leaf = f"0x{matter.leaf.hex()}"
        if matter.leaf in matter.view.cases:
            raise ConfigError(
                f"the outcome has the case {leaf}",
                hint=f"see muster explain {options['submission']}: an outcome has one case at most",
            )
        assert chain.account is not None  # connected with a key
        claimed = VERDICTS[options["verdict"]] if options["verdict"] else None
        offer = await make_offer(chain, chain.account, matter.proof, claimed)
        click.echo(offer.describe(), err=True)
        if not options["yes"]:
            click.confirm("Challenge?", abort=True, err=True)
        receipt = await open_case(chain, matter.proof, offer)
        if not options["as_json"]:
            click.echo(leaf)
        case = (await matter.read()).cases[matter.leaf]
        settled = None
        if options["wait"]:
            settled = await matter.follow(offer.terms, to_the_end=True)
        else:
            matter.say(f"opened: {next_of(case, offer.terms, await chain.now())}")
            matter.say(f"later: muster dispute settle {options['submission']} --keystore FILE")
    if options["as_json"]:
        found = {"case": leaf, "transaction": receipt.tx_hash}
        print_json(found | ({"settled": settled.to_json()} if settled else {}))


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
    from muster.chain import Chain, ChainView, read_view

    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        run_id = None if options["run"] is None else RunId(options["run"])
        if run_id is not None and run_id not in view.runs:
            raise ConfigError(f"there is no run {run_id}", hint="check --run, --rpc")
        return describe_cases(view, run_id, await chain.court.terms(), await chain.now())


@dispute.command("settle")
@key_options
@_place_options
@click.option("--wait", is_flag=True, help="Say what happens until the case is decided.")
@json_option
@chain_options
def dispute_settle(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """End a case: close it, and slash the validators that it finds at fault.

    Anybody may, once all jurors voted or their time is over. Validators close cases by themselves,
    and orchestrators ask for the slashes; this needs neither. Repeating it is harmless.

    \b
    Example:
      muster dispute settle 12:3 --keystore worker.json
    """
    import asyncio

    asyncio.run(_settle(open_keystore(keystore, password_file).key, options))


async def _settle(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain

    async with await Chain.connect(*endpoint(options), key=key) as chain:
        matter = await find_matter(chain, options["submission"], options["orchestrator"])
        if matter.leaf not in matter.view.cases:
            raise ConfigError(
                f"submission {options['submission']} has no case",
                hint="see muster dispute list; muster dispute open challenges an outcome",
            )
        settled = await matter.follow(await chain.court.terms(), to_the_end=options["wait"])
    if options["as_json"]:
        print_json(settled.to_json())
