"""`muster dispute`: put a bond on another ruling than the recorded one, look at cases, settle them.

A claim is announced as a hash, and made in a later block: nobody who reads it can be first. Its
salt follows from the claimant's key, so a command that was killed in between goes on.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.cases import CASE_COLUMNS, describe_cases, make_row, next_of
from muster.client.options import (
    FILE,
    chain_options,
    endpoint,
    json_option,
    key_options,
    open_keystore,
    orchestrator_option,
    relay_option,
    yes_option,
)
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
from muster.protocol.errors import ConfigError, ContractRevert
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.jury import Ruling, claim_announcement
from muster.protocol.messages import Reason, Verdict

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.chain import (
        CaseView,
        Chain,
        ChainView,
        CourtTerms,
        OutcomeProof,
        Place,
        Receipt,
        Standing,
    )
    from muster.client.sources import Sources

MAX_SOURCES = 16
"""Sources that a claim may name on chain."""
ROOM_TRIES = 5
"""How often a relay's room is offered the file."""
ROOM_PAUSE_S = 2.0
"""Pause in between."""
BLOCK_PATIENCE_S = 120.0
"""How long the next block after an announcement is waited for."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a claim would do, for people to read before they agree."""

    standing: Standing
    """The outcome as it stands."""
    ruling: Ruling
    """What the claimant says it should be."""
    terms: CourtTerms
    """The court's terms."""
    bench: int
    """Jurors that could sit on the case."""
    balance_wei: int
    """What the claimant's wallet holds."""
    allowance_wei: int
    """What the court may take of it already."""
    gas_wei: int
    """What gas costs at most, in the chain's coin."""
    has_case: bool
    """Whether somebody claimed about the outcome before."""

    @property
    def recorded(self) -> Ruling:
        """What is recorded."""
        return Ruling(self.standing.outcome.verdict, self.standing.outcome.reason)

    def require(self, now: int) -> None:
        """Raise ConfigError when the claim cannot be made."""
        if self.ruling.is_same(self.recorded):
            raise ConfigError(
                f"the outcome is recorded as {self.recorded} already",
                hint="a claim is for another ruling: see --ruling",
            )
        if not self.has_case and now >= self.standing.closes_at:
            raise ConfigError(
                f"the challenge window closed at {format_time(self.standing.closes_at)}",
                hint=HINTS["CourtWindowClosed"],
            )
        if self.bench == 0:
            raise ConfigError(
                "nobody of the network's bench may judge a case of this run",
                hint="muster juror join puts an account there; see muster run show",
            )
        if self.balance_wei < self.terms.bond:
            raise ConfigError(
                f"the bond is {format_tokens(self.terms.bond)} tokens, the wallet holds "
                f"{format_tokens(self.balance_wei)}",
                hint="send tokens to it, or claim from another account: any may",
            )

    def describe(self) -> str:
        """Return what the claim costs, what it is about and until when it is possible."""
        record, terms = self.standing.outcome, self.terms
        return (
            f"outcome {self.recorded} of worker {record.worker_id}, step {record.step}, "
            f"index {record.index}, {record.units} units\n"
            f"claim   {self.ruling}\n"
            f"bond    {format_tokens(terms.bond)} of {format_tokens(self.balance_wei)} tokens; "
            "lost unless the jury finds the same, else given back\n"
            f"jury    {min(terms.jury_size, self.bench)} of the {self.bench} that may sit\n"
            f"gas     {format_coins(self.gas_wei)} of the chain's coin at most\n"
            f"open    until {format_time(self.standing.closes_at)}; the case takes "
            f"{format_duration(terms.jury_time)} at most"
        )


def parse_ruling(text: str | None, recorded: Ruling) -> Ruling:
    """Return the ruling that a text means: a verdict, or VERDICT:REASON; without one the opposite
    of what is recorded. Raises ConfigError for no ruling.
    """
    if text is None:
        if recorded.verdict is Verdict.ACCEPTED:
            return Ruling(Verdict.REJECTED, Reason.TOPLOC_MISMATCH)
        return Ruling(Verdict.ACCEPTED, Reason.NONE)
    verdict, _, reason = text.partition(":")
    default = Reason.NONE if verdict.lower() == "accepted" else Reason.TOPLOC_MISMATCH
    try:
        return Ruling(
            Verdict[verdict.upper()],
            Reason[reason.upper().replace("-", "_")] if reason else default,
        )
    except KeyError as error:
        raise ConfigError(
            f"{text} is no ruling",
            hint="one of accepted, incomplete, rejected, fraud, with a reason behind a colon, as "
            "fraud:wrong_reward",
        ) from error


# Chain


async def make_offer(
    chain: Chain, view: ChainView, claimant: Address, place: Place, ruling: str | None
) -> Offer:
    """Return what a claim would do; raises ConfigError when it cannot be made."""
    from muster.client.exposure import eligible_jurors
    from muster.client.preflight import gas_money, require_gas

    court = chain.deployment.contracts["DisputeCourt"]
    gas = await gas_money(chain, "dispute")
    standing = await explained(chain.ledger.standing_of(proof_of(place)))
    recorded = Ruling(standing.outcome.verdict, standing.outcome.reason)
    worker = view.worker_by_id.get(standing.outcome.worker_id)
    run = view.runs[place.batch.run_id]
    case = view.cases.get(standing.leaf)
    offer = Offer(
        standing=standing,
        ruling=parse_ruling(ruling, recorded),
        terms=await chain.court.terms(),
        bench=len(eligible_jurors(view, run, worker.address if worker else None)),
        balance_wei=await chain.token.balance_of(claimant),
        allowance_wei=await chain.token.allowance(claimant, court),
        gas_wei=gas.wei,
        has_case=case is not None and not case.closed,
    )
    offer.require(await chain.now())
    await require_gas(chain, claimant, "dispute", gas)
    return offer


def proof_of(place: Place) -> OutcomeProof:
    """Return a judged outcome with its proof; raises ConfigError when nobody judged it."""
    if place.batch.records is None:
        raise ConfigError(
            f"nobody has judged batch {place.batch.batch_id}",
            hint="there is no verdict to dispute; its worker calls judges of the network once it "
            "is due: muster worker submit-direct",
        )
    return place.batch.prove(place.position)


async def claim(
    chain: Chain,
    proof: OutcomeProof,
    entry: BatchEntry,
    ruling: Ruling,
    sources: Sequence[str],
    *,
    key: bytes,
    patience_s: float = BLOCK_PATIENCE_S,
) -> Receipt:
    """Announce a claim, make it in a later block, and return its receipt; approves the bond."""
    court = chain.deployment.contracts["DisputeCourt"]
    assert chain.account is not None  # connected with a key
    bond = (await chain.court.terms()).bond
    if await chain.token.allowance(chain.account, court) < bond:
        await chain.token.approve(court, bond)
    leaf = (await chain.ledger.standing_of(proof)).leaf
    salt = _salt(key, leaf, ruling)
    await chain.court.announce(claim_announcement(chain.account, leaf, ruling, salt))
    return await _in_a_later_block(
        lambda: chain.court.claim(
            proof,
            entry.submission,
            entry.signature,
            ruling.number,
            salt,
            list(sources)[:MAX_SOURCES],
        ),
        patience_s,
    )


async def _in_a_later_block(make: Callable[[], Any], patience_s: float) -> Receipt:
    """Make a claim, again until the block after its announcement is there."""
    async with asyncio.timeout(patience_s):
        while True:
            try:
                receipt: Receipt = await explained(make())
                return receipt
            except ContractRevert as error:
                if error.name != "CourtNotAnnounced":
                    raise
            await asyncio.sleep(0.5)


def _salt(key: bytes, leaf: Hash32, ruling: Ruling) -> Hash32:
    """Return what hides a claim: only who has the key can make it, as often as needed."""
    message = b"muster.claim" + leaf + ruling.number.to_bytes(2, "big")
    return Hash32(hmac.digest(key, message, "sha256"))


# The case of a command


@dataclass(frozen=True, slots=True)
class Matter:
    """What a command is about: a submission, and the chain it is on."""

    chain: Chain
    """Signs with the key given."""
    read: Callable[[], Any]
    """Brings the view up to date and returns it."""
    place: Place
    """The submission."""
    case_id: Hash32
    """The name that its case has, or would have."""
    say: Callable[[str], None]
    """Says something to people."""

    async def follow(self, terms: CourtTerms, *, to_the_end: bool) -> Settled:
        """Settle the case, once it is decided."""
        if to_the_end:
            await until_decided(self.chain, self.read, self.case_id, terms, self.say)
        settled = await settle(self.chain, self.read, self.case_id)
        for line in describe_settled(settled):
            self.say(line)
        return settled


async def find_matter(chain: Chain, submission: str) -> Matter:
    """Return what a command is about; raises ConfigError when the text names no submission."""
    from muster.chain import ChainView, EventReader, apply_poll, find_outcome

    view, reader = ChainView(), EventReader(chain)

    async def read() -> ChainView:
        apply_poll(view, await reader.poll())
        return view

    place = find_outcome(await read(), submission)
    return Matter(chain, read, place, case_id_of(place), lambda line: click.echo(line, err=True))


def case_id_of(place: Place) -> Hash32:
    """Return the name that the case about a submission has."""
    from muster.protocol.jury import summons_of

    batch = place.batch
    if batch.records is None:
        return summons_of(batch.batch_id)
    return batch.records[place.position].leaf(batch.batch_id, place.position)


async def find_entry(place: Place, case: CaseView | None, sources: Sources) -> BatchEntry:
    """Return a submission with its proofs: from the chain where they are there, else as a source
    shows it; raises ApiError when none does.
    """
    from muster.client.facts import entry_of

    batch = place.batch
    if batch.work is not None:
        return entry_of(batch.work, batch.committed_at)
    if case is not None and case.claims:
        made = case.claims[0]
        entry = await sources.work(made.submission.leaf())
        # The chain has seen the node's signature; what a source shows may be anything.
        return entry.model_copy(update={"signature": made.node_signature})
    return (await sources.batch(batch.batch_id, batch.root, batch.count))[place.position]


# Commands


@click.group()
def dispute() -> None:
    """Dispute outcomes before jurors of the network."""


@dispute.command("open")
@key_options
@click.argument("submission", metavar="SUBMISSION")
@click.option("--ruling", metavar="RULING", help="What is right. [default: the opposite]")
@click.option("--file", type=FILE, help="The submission's file. [default: the orchestrator's]")
@orchestrator_option
@relay_option
@click.option("--source", multiple=True, metavar="URL", help="Shows work and files; repeatable.")
@click.option("--wait", is_flag=True, help="Say what happens until the end, and settle it.")
@yes_option
@json_option
@chain_options
def dispute_open(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Claim that an outcome is wrong, with a bond. Prints the case.

    Anybody but jurors may, until the outcome's challenge window closes. The file goes to the rooms
    of the run's relays, where jurors look. RULING is accepted, incomplete, rejected or fraud, with
    a reason behind a colon.

    \b
    Examples:
      muster dispute open 12:3 --keystore worker.json --orchestrator URL
      muster dispute open 12:3 --ruling fraud:wrong_reward --keystore me.json --wait --yes
    """
    asyncio.run(_open(open_keystore(keystore, password_file).key, options))


async def _open(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain
    from muster.client.sources import Signer, Sources

    async with await Chain.connect(*endpoint(options), key=key) as chain:
        matter = await find_matter(chain, options["submission"])
        assert chain.account is not None  # connected with a key
        view = await matter.read()
        proof = proof_of(matter.place)
        offer = await make_offer(chain, view, chain.account, matter.place, options["ruling"])
        click.echo(offer.describe(), err=True)
        if not options["yes"]:
            click.confirm("Claim?", abort=True, err=True)
        run = view.runs[matter.place.batch.run_id]
        signer = Signer(key, chain.domain("ContributionLedger"), run.config.orchestrator)
        own = [url for url in (options["orchestrator"],) if url]
        async with Sources([*own, *options["source"]], signer=signer) as sources:
            case = view.cases.get(matter.case_id)
            entry = await find_entry(matter.place, case, sources)
            relays = await _relays(sources, run.run_id, options)
            data = await _file(sources, entry, options["file"])
            named = [*options["source"], *relays, *own]
            receipt = await claim(chain, proof, entry, offer.ruling, named, key=key)
            await _deposit(relays, data, entry, matter.say)
        leaf = f"0x{matter.case_id.hex()}"
        if not options["as_json"]:
            click.echo(leaf)
        made = (await matter.read()).cases[matter.case_id]
        settled = None
        if options["wait"]:
            settled = await matter.follow(offer.terms, to_the_end=True)
        else:
            matter.say(f"claimed: {next_of(made, offer.terms, await chain.now())}")
            matter.say(f"later: muster dispute settle {options['submission']} --keystore FILE")
    if options["as_json"]:
        found = {"case": leaf, "transaction": receipt.tx_hash, "claimed": str(offer.ruling)}
        print_json(found | ({"settled": settled.to_json()} if settled else {}))


async def _relays(sources: Sources, run_id: RunId, options: dict[str, Any]) -> list[str]:
    """Return the relays that were named, else those that the orchestrator names."""
    if options["relay"]:
        return list(options["relay"])
    if options["orchestrator"] is None:
        return []
    found = await sources.run_info(run_id, options["orchestrator"].rstrip("/"))
    return list(found.relays) if found else []


async def _file(sources: Sources, entry: BatchEntry, path: Path | None) -> bytes | None:
    """Return the submission's file where it can be had: jurors may still find it elsewhere."""
    from muster.client.rerun import read_submission
    from muster.protocol.errors import ApiError

    if path is not None:
        return await asyncio.to_thread(read_submission, path, entry.submission.file_hash)
    try:
        return await sources.file(entry.submission.file_hash)
    except ApiError as error:
        click.echo(f"{error}: give it with --file, or jurors may not see it", err=True)
        return None


async def _deposit(
    relays: Sequence[str], data: bytes | None, entry: BatchEntry, say: Callable[[str], None]
) -> None:
    from muster.client.sources import Sources

    if data is None or not relays:
        return
    refused = dict.fromkeys(relays, "")
    for left in reversed(range(ROOM_TRIES)):
        async with Sources(list(refused)) as rooms:
            refused = await rooms.deposit(data, entry)
        if not refused or not left:
            break
        # A room takes what the chain names, and may not have read the claim yet.
        await asyncio.sleep(ROOM_PAUSE_S)
    for url, why in refused.items():
        say(f"{url} did not take the file: {why}")


@dispute.command("list")
@click.option("--run", type=int, help="Only cases of this run.")
@json_option
@chain_options
def dispute_list(**options: Any) -> None:
    """List cases, oldest first: where they stand, what was claimed, how many jurors committed.

    \b
    Example:
      muster dispute list --run 1
    """
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
@click.argument("submission", metavar="SUBMISSION")
@click.option("--wait", is_flag=True, help="Say what happens until the case is decided.")
@json_option
@chain_options
def dispute_settle(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """End a case: close it, fine whom it finds at fault, pay its jurors.

    Anybody may, once all jurors voted or their time is over. Jurors' programs do it by themselves;
    this needs none. Repeating it is harmless.

    \b
    Example:
      muster dispute settle 12:3 --keystore worker.json
    """
    asyncio.run(_settle(open_keystore(keystore, password_file).key, options))


async def _settle(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain

    async with await Chain.connect(*endpoint(options), key=key) as chain:
        matter = await find_matter(chain, options["submission"])
        case_id = _existing(await matter.read(), matter, options["submission"])
        matter = Matter(chain, matter.read, matter.place, case_id, matter.say)
        settled = await matter.follow(await chain.court.terms(), to_the_end=options["wait"])
    if options["as_json"]:
        print_json(settled.to_json())


def _existing(view: ChainView, matter: Matter, text: str) -> Hash32:
    """Return the name of a submission's case: a verdict's, or that of its summons."""
    from muster.protocol.jury import summons_of

    for case_id in (matter.case_id, summons_of(matter.place.batch.batch_id)):
        if case_id in view.cases:
            return case_id
    raise ConfigError(
        f"submission {text} has no case",
        hint="see muster dispute list; muster dispute open claims that an outcome is wrong",
    )
