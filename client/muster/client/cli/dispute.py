"""`muster dispute`: claim another ruling than the recorded one, list cases, settle them and what
follows from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.chain import (
    BatchView,
    CaseView,
    Chain,
    ChainView,
    ClaimView,
    EventReader,
    MemberView,
    SubmissionPlace,
    apply_poll,
    find_outcome,
    read_view,
)
from muster.chain.structs import CommittedWork
from muster.client.cli.options import (
    FILE,
    FOLDER,
    acting_options,
    agree,
    endpoint,
    key_options,
    looking_options,
    open_keystore,
    orchestrator_option,
    relay_option,
    tell_what_is_sent,
)
from muster.client.cli.printing import print_json, print_table, printable
from muster.client.disputes.cases import (
    CASE_COLUMNS,
    describe_cases,
    make_row,
    next_of,
    ruling_words,
)
from muster.client.disputes.claims import (
    Settled,
    case_id_of,
    claim,
    describe_settled,
    earlier_claim,
    find_entry,
    make_offer,
    proof_of,
    settle,
    until_decided,
)
from muster.client.disputes.unsettled import (
    OpenStep,
    Unsettled,
    find_work,
    return_bond,
    send,
    told,
    told_bond,
    unsettled,
)
from muster.client.preflight import find_run
from muster.protocol.eip712 import signer_of
from muster.protocol.errors import ApiError, ConfigError, ContractRevert, NotYet
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.jury import summons_of

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.client.sources import Signer, Sources


ROOM_TRIES = 5
"""How often the file is offered to a relay's room."""
ROOM_PAUSE_S = 2.0
"""Pause between two tries."""


Read = Callable[[], Awaitable[ChainView]]
"""Updates the view of the chain and returns it."""


# The case of a command


async def _find(chain: Chain, submission: str) -> tuple[SubmissionPlace, Read]:
    """Return the submission of a command; raises ConfigError when the text names none."""
    view, reader = ChainView(), EventReader(chain)

    async def read() -> ChainView:
        apply_poll(view, await reader.poll())
        return view

    return find_outcome(await read(), submission), read


async def _follow(chain: Chain, read: Read, case_id: Hash32) -> Settled:
    """Wait until a case is decided, and settle it."""
    await until_decided(chain, read, case_id, await chain.court.terms(), _say)
    return await settle(chain, read, case_id)


def _say(line: str) -> None:
    click.echo(printable(line), err=True)


def _say_settled(settled: Settled) -> None:
    for line in describe_settled(settled):
        _say(line)


# Commands

source_option = click.option(
    "--source", multiple=True, metavar="URL", help="Server of work and files; repeatable."
)


@click.group()
def dispute() -> None:
    """Dispute outcomes before jurors of the network."""


@dispute.command("open")
@key_options
@click.argument("submission", metavar="SUBMISSION")
@click.option("--ruling", metavar="RULING", help="The right outcome. [default: the opposite]")
@click.option("--file", type=FILE, help="The submission's file. [default: the orchestrator's]")
@orchestrator_option
@relay_option
@source_option
@click.option("--wait", is_flag=True, help="Wait until the jury is done, then settle the case.")
@acting_options
def dispute_open(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Claim that an outcome is wrong, with a bond. Prints the case.

    Any account but a juror's may do so until the outcome's challenge window closes. The file is
    uploaded to the run's relays, where jurors look for it. RULING is accepted, incomplete, rejected
    or fraud, with a reason after a colon. Repeating the command pays no second bond: it uploads the
    file again.

    \b
    Examples:
      muster dispute open 12:3 --keystore worker.json --orchestrator URL
      muster dispute open 12:3 --ruling fraud:wrong_reward --keystore me.json --wait --yes
    """
    asyncio.run(_open(open_keystore(keystore, password_file).key, options))


async def _open(key: bytes, options: dict[str, Any]) -> None:
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        place, read = await _find(chain, options["submission"])
        case_id = case_id_of(place)
        made, is_shown = await _claim(key, chain, await read(), place, options)
        leaf = f"0x{case_id.hex()}"
        if not options["as_json"]:
            click.echo(leaf)
        settled = None
        if options["wait"]:
            settled = await _follow(chain, read, case_id)
            _say_settled(settled)
            await _say_what_is_left(chain, await read(), options["submission"])
        else:
            case, terms = (await read()).cases[case_id], await chain.court.terms()
            _say(f"claimed: {next_of(case, terms, await chain.now())}")
            _say(f"later: muster dispute settle {options['submission']} --keystore FILE")
    if options["as_json"]:
        print_json({"case": leaf} | made | ({"settled": settled.to_json()} if settled else {}))
    if not is_shown and settled is None:
        raise NotYet(
            "the claim is on chain, but no relay took the file, and jurors may not see it",
            hint="run the same command again: it pays no second bond",
        )


async def _claim(
    key: bytes, chain: Chain, view: ChainView, place: SubmissionPlace, options: dict[str, Any]
) -> tuple[dict[str, str], bool]:
    """Make the claim unless the account has made it before, and upload the file.

    Returns the claim as JSON values, and False if every relay refused the file.
    """
    from muster.client.sources import Signer, Sources, source_fault

    for url in options["source"]:
        if fault := source_fault(url):
            raise ConfigError(
                f"jurors do not ask --source {url!r}: it {fault}",
                hint="write it like https://host:8700, without a path",
            )
    proof, case = proof_of(place), view.cases.get(case_id_of(place))
    earlier = earlier_claim(case, chain.me, options["ruling"])
    if earlier is None:
        offer = await make_offer(chain, view, chain.me, place, options["ruling"])
        click.echo(offer.describe(), err=True)
        agree("Claim?", options, is_repeatable=True)
    else:
        made = {"transaction": earlier.tx_hash, "claimed": ruling_words(earlier.ruling)}
        _say(f"claimed before, in {earlier.tx_hash}: no second bond is paid")
    run = view.runs[place.batch.run_id]
    signer = Signer(key, chain.domain("ContributionLedger"), run.config.orchestrator)
    own = [url for url in (options["orchestrator"],) if url]
    async with Sources([*own, *options["source"]], signer=signer) as sources:
        entry, siblings = await find_entry(place, case, sources)
        relays = await _relays(sources, run.run_id, options)
        data = await _file(sources, entry, options["file"])
        if earlier is None:
            named = [*options["source"], *relays, *own]
            work = CommittedWork(entry.submission, entry.signature, tuple(siblings))
            receipt = await claim(chain, proof, work, offer.ruling, named, key=key)
            made = {"transaction": receipt.tx_hash, "claimed": str(offer.ruling)}
        # Rooms keep files of open cases only.
        is_over = case is not None and case.closed
        # What a public orchestrator names may not be in our network.
        are_ours = bool(options["relay"]) or all([await sources.is_inside(url) for url in own])
        is_shown = is_over or await _deposit(relays, data, entry, are_ours=are_ours)
    return made, is_shown


async def _relays(sources: Sources, run_id: RunId, options: dict[str, Any]) -> list[str]:
    """Return the relays given by flags, else those that the orchestrator names."""
    if options["relay"]:
        return list(options["relay"])
    if options["orchestrator"] is None:
        return []
    return await sources.relays_named_by(options["orchestrator"], run_id)


async def _file(sources: Sources, entry: BatchEntry, path: Path | None) -> bytes | None:
    """Return the submission's file; None if it is not found: jurors may still find it elsewhere."""
    from muster.client.disputes.rerun import read_submission

    if path is not None:
        return await asyncio.to_thread(read_submission, path, entry.submission.file_hash)
    try:
        return await sources.file(entry.submission.file_hash)
    except ApiError as error:
        click.echo(
            printable(f"{error}: give the file with --file, or jurors may not see it"), err=True
        )
        return None


async def _deposit(
    relays: Sequence[str], data: bytes | None, entry: BatchEntry, *, are_ours: bool
) -> bool:
    """Upload the file to the relays' rooms; returns False if all refuse it."""
    from muster.client.sources import Sources

    if data is None or not relays:
        return True
    refused = dict.fromkeys(relays, "")
    for left in reversed(range(ROOM_TRIES)):
        own, named = (list(refused), []) if are_ours else ([], list(refused))
        async with Sources(own, named=named) as rooms:
            unasked = dict.fromkeys(rooms.unasked, "name it with --relay to give it the file")
            refused = unasked | await rooms.deposit(data, entry)
        if not refused or not left:
            break
        # A room takes only files that the chain names, and may not have read the claim yet.
        await asyncio.sleep(ROOM_PAUSE_S)
    for url, why in refused.items():
        _say(f"{url} did not take the file: {why}")
    return len(refused) < len(set(relays))


@dispute.command("list")
@click.option("--run", type=int, help="Only cases of this run.")
@looking_options
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
    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        run_id = None if options["run"] is None else find_run(view, options["run"]).run_id
        return describe_cases(view, run_id, await chain.court.terms(), await chain.now())


@dispute.command("settle")
@key_options
@click.argument("submission", metavar="SUBMISSION")
@click.option("--wait", is_flag=True, help="Wait until the case is decided.")
@orchestrator_option
@source_option
@click.option("--evidence", type=FOLDER, multiple=True, help="Copy of the evidence; repeatable.")
@looking_options
def dispute_settle(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Send what is due about a submission: end its case, take the stake that a fraud costs.

    A case is closed once all jurors voted or their time is over; then those at fault are fined, and
    jurors are paid. The stake of a fraud is taken at once, and burned and shared once the fraud is
    final. A batch that nobody judged in time is declared void. A bond for work that its worker
    submitted itself goes back once that is judged or void. Any account may do all of it.
    Usually jurors' processes and the orchestrator do it first. Repeating the command is harmless.

    To take stake, the command needs the work with its proof: of a fraud that no claim proved on
    chain, --orchestrator, --source or --evidence shows it.

    \b
    Examples:
      muster dispute settle 12:3 --keystore worker.json
      muster dispute settle 12:3 --keystore auditor.json --evidence files
    """
    asyncio.run(_settle(open_keystore(keystore, password_file).key, options))


async def _settle(key: bytes, options: dict[str, Any]) -> None:
    tell_what_is_sent(is_repeatable=True)
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        place, read = await _find(chain, options["submission"])
        case_id, settled, refused = _case_of(await read(), place), Settled(), None
        if case_id is not None:
            try:
                settled = await (_follow if options["wait"] else settle)(chain, read, case_id)
                _say_settled(settled)
            except ContractRevert as error:
                # The jury has time left. The stake may not wait for it: it could be withdrawn.
                refused = error
        sent, left = await _take_steps(key, chain, read, options)
        if OpenStep.PROVE in sent and case_id is not None:
            _say_settled(settled := await settle(chain, read, case_id))
    if refused is not None:
        raise refused
    if left is None and case_id is None and not sent:
        raise ConfigError(
            f"submission {options['submission']} has no case, and stands as no fraud",
            hint="see muster dispute list; muster dispute open claims that an outcome is wrong",
        )
    if left is not None and left.words:
        _say(left.words)
    elif case_id is None and not sent:
        _say("nothing was left to do")
    if options["as_json"]:
        print_json(settled.to_json() | {"sent": sent, "left": left.words if left else ""})


def _case_of(view: ChainView, place: SubmissionPlace) -> Hash32 | None:
    """Return the id of a submission's case, about its verdict or its summons."""
    named = (case_id_of(place), summons_of(place.batch.batch_id))
    return next((case_id for case_id in named if case_id in view.cases), None)


# What is due besides the case


async def _take_steps(
    key: bytes, chain: Chain, read: Read, options: dict[str, Any]
) -> tuple[dict[str, str], Unsettled | None]:
    """Take every step that is possible now for the submission; returns the transactions, and what
    is left.
    """
    from muster.client.chain_facts import read_times
    from muster.client.sources import Signer

    times, sent, tried = await read_times(chain), dict[str, str](), set[OpenStep]()
    while True:
        view = await read()
        place = find_outcome(view, options["submission"])
        left = unsettled(view, place, await chain.now(), times)
        step = None if left is None else left.step
        if step is None or step in tried:
            break
        tried.add(step)
        case = view.cases.get(case_id_of(place))
        run = view.runs[place.batch.run_id]
        signer = Signer(key, chain.domain("ContributionLedger"), run.config.orchestrator)
        find = partial(_committed_work, place, case, run.members, signer, options)
        try:
            receipt = await send(chain, step, place, find)
        except (ApiError, ContractRevert) as error:
            if step is not OpenStep.PROVE:
                raise
            # What else is due needs no proof.
            left = Unsettled(words=f"nobody is fined without a proof of what is held: {error}")
            break
        if receipt is not None:
            sent[step] = receipt.tx_hash
            _say(told(step, place, receipt))
    returned = await return_bond(chain, place.batch)
    if returned is not None:
        sent["return"] = returned.tx_hash
        _say(told_bond(returned))
    return sent, left


async def _committed_work(
    place: SubmissionPlace,
    case: CaseView | None,
    members: Mapping[Address, MemberView],
    signer: Signer,
    options: dict[str, Any],
) -> CommittedWork:
    """Return the work that a fraud is about: from the chain, copies or servers."""
    from muster.client.sources import Sources

    def is_answered(claim: ClaimView) -> bool:
        member = members.get(claim.submission.worker)
        node = signer_of(signer.domain, claim.submission, claim.node_signature)
        return bool(member and node and member.answers_for(node, place.batch.committed_at))

    own = [url for url in (options["orchestrator"],) if url]
    copied = await asyncio.to_thread(_copied, options["evidence"], place.batch)
    async with Sources([*own, *options["source"]], signer=signer) as sources:
        return await find_work(place, case, sources, copied, is_answered=is_answered)


def _copied(folders: Sequence[Path], batch: BatchView) -> list[BatchEntry] | None:
    """Return a batch's submissions from copies of the evidence; None if no copy holds them all."""
    from muster.client.audit.evidence import EvidenceFolders

    store = EvidenceFolders(folders)
    return store.composition(batch) or store.entries(batch)


async def _say_what_is_left(chain: Chain, view: ChainView, submission: str) -> None:
    """Say how the stake that a fraud costs is taken if the orchestrator does not take it."""
    from muster.client.chain_facts import read_times

    place = find_outcome(view, submission)
    left = unsettled(view, place, await chain.now(), await read_times(chain))
    if left is not None and left.step is OpenStep.EXECUTE:
        _say(
            "the orchestrator takes the stake that this fraud costs, or any account: "
            f"muster dispute settle {submission} --keystore FILE"
        )
