"""`muster explain`: one submission on one page.

Facts come from the chain. What has not reached the chain yet comes from the orchestrator, and the
page says so. With --rerun the verdict is recomputed here.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.chain import (
    BatchView,
    Chain,
    ChainView,
    NothingNamed,
    RunView,
    SubmissionPlace,
    find_outcome,
    prefix_of,
    read_view,
)
from muster.client.cli.options import (
    FILE,
    FOLDER,
    HOME,
    endpoint,
    engine_choice,
    looking_options,
    orchestrator_option,
    relay_option,
)
from muster.client.cli.printing import print_facts, print_json
from muster.client.disputes.explanation import (
    ask_money,
    describe,
    facts_of,
    rerun_facts,
    rerun_json,
)
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ApiError, ConfigError
from muster.protocol.ids import Hash32

if TYPE_CHECKING:
    from muster.api import BatchChecking, BatchEntry, OrchestratorApi, SubmissionState
    from muster.client.disputes.bundle import Contents
    from muster.client.disputes.rerun import Rerun
    from muster.client.validator.checks import ClaimedWork
    from muster.shardcast import Fetcher


@click.command()
@click.argument("submission")
@orchestrator_option
@click.option("--rerun", "file", type=FILE, help="Recompute the verdict from this file.")
@click.option("--save", type=FILE, help="Write what --rerun used as an evidence bundle.")
@relay_option
@click.option("--state-dir", type=FOLDER, help=f"Folder of policies. [default: {HOME}/doctor]")
@engine_choice
@looking_options
def explain(submission: str, as_json: bool, **options: Any) -> None:
    """Explain a submission: BATCH:POSITION, WORKER/STEP:INDEX, or a file's or transaction's hash.

    Six digits of a hash or an address are enough.

    Shows when it was committed and checked, its verdict with the reason, its payment, and until
    when and how it can be disputed. --rerun runs the validator's checks on the file on this machine
    (--orchestrator is needed).

    \b
    Examples:
      muster explain 12:3
      muster explain 0x70997970/7:0 --orchestrator http://orchestrator:8600
      muster explain 12:3 --rerun submission.parquet --orchestrator URL --save evidence.zip
    """
    found, again = asyncio.run(_explain(submission, options))
    if as_json:
        print_json(found | ({"rerun": rerun_json(again)} if again else {}))
        return
    if found["state"] == "received":
        print_facts(
            {
                "submission": found["file_hash"],
                "received": "by the orchestrator, as it says; not on chain yet",
                "next": "the orchestrator commits a batch every few seconds: ask again",
            }
        )
        return
    print_facts(facts_of(found) | (rerun_facts(again, found) if again else {}))


async def _explain(submission: str, options: dict[str, Any]) -> tuple[dict[str, Any], Rerun | None]:
    from muster.client.chain_facts import HistoryView

    if options["file"] is not None and options["orchestrator"] is None:
        raise ConfigError(
            "--rerun needs --orchestrator URL",
            hint="add --orchestrator URL: the orchestrator has the ticket and the run's documents",
        )
    if options["save"] is not None and options["file"] is None:
        raise ConfigError(
            "--save needs --rerun FILE",
            hint="give the submission's file with --rerun FILE: the bundle contains it",
        )
    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, HistoryView())
        place, state = await _find(view, submission, options)
        if place is None:
            assert state is not None  # _find
            digits = submission.removeprefix("0x").lower()
            return {"state": state.state, "file_hash": f"0x{digits}"}, None
        entries = await _entries(place.batch, options["orchestrator"])
        money = await ask_money(chain, view, place)
        found = describe(view, place, money, entries)
        if options["file"] is None:
            return found, None
        return found, await _rerun(chain, view, place, entries, options)


async def _find(
    view: ChainView, submission: str, options: dict[str, Any]
) -> tuple[SubmissionPlace | None, SubmissionState | None]:
    """Return a submission's place on chain, or its state at the orchestrator before that."""
    try:
        return find_outcome(view, submission), None
    except NothingNamed as error:
        digits = prefix_of(submission)
        if digits is None or len(digits) != 64:
            raise
        if options["orchestrator"] is None:
            error.hint = (
                "add --orchestrator URL: only the orchestrator knows submissions "
                "that are in no batch yet"
            )
            raise
        return await _ask_where(view, Hash32(bytes.fromhex(digits)), options["orchestrator"])


async def _ask_where(
    view: ChainView, file_hash: Hash32, orchestrator: str
) -> tuple[SubmissionPlace | None, SubmissionState]:
    from muster.api import OrchestratorApi

    async with OrchestratorApi(orchestrator) as api:
        try:
            state = await api.submission_state(file_hash)
        except ApiError as error:
            error.hint = error.hint or "check the hash and --orchestrator"
            raise
    if state.batch_id is None or state.position is None:
        return None, state
    return find_outcome(view, f"{state.batch_id}:{state.position}"), state


async def _entries(batch: BatchView, orchestrator: str | None) -> list[BatchEntry]:
    """Return a batch's submissions from the chain if it has them, else from the orchestrator, whose
    answer is checked; an empty list without an orchestrator.
    """
    from muster.client.chain_facts import entry_of
    from muster.client.sources import Sources

    if batch.work is not None:
        return [entry_of(batch.work, batch.committed_at)]
    if orchestrator is None:
        return []
    async with Sources([orchestrator]) as sources:
        try:
            return await sources.batch(batch.batch_id, batch.root, batch.count)
        except ApiError as error:
            whose = f"the orchestrator of run {batch.run_id}"
            error.hint = f"check --orchestrator: only {whose} shows this batch"
            raise


async def _rerun(
    chain: Chain,
    view: Any,
    place: SubmissionPlace,
    entries: Sequence[BatchEntry],
    options: dict[str, Any],
) -> Rerun:
    from muster.api import OrchestratorApi
    from muster.client.disputes.bundle import Contents
    from muster.client.disputes.rerun import SILENCE_S, claim_at, read_submission, recompute
    from muster.client.run_documents import TASK_SETS, read_rules, require_consistent
    from muster.client.validator.checking_proofs import who_checked
    from muster.client.validator.decoding import FileDecoder
    from muster.inference.loading import engine_of
    from muster.shardcast import Fetcher

    batch = place.batch
    run = view.runs[batch.run_id]
    submission = entries[place.position].submission
    data = read_submission(options["file"], submission.file_hash)
    domain = chain.domain("ContributionLedger")
    claim = claim_at(view, batch, entries, place.position, domain)
    async with OrchestratorApi(options["orchestrator"]) as api:
        rules = await read_rules(api, run.config, _state_dir(options) / TASK_SETS)
        await asyncio.to_thread(require_consistent, rules)
        named = await api.run_info(run.run_id)
        checking = await _checking(api, batch)
    relays = tuple(options["relay"]) or named.policy_sources
    engine = engine_of(options, silence_s=SILENCE_S)
    async with Fetcher(
        relays,
        _state_dir(options) / "policies",
        attempts=3,
        connects_to=None if options["relay"] else api.connects_to,
    ) as fetcher:
        folder = await _policy(run, submission.policy_version, fetcher)
    async with FileDecoder() as decoder:
        seats = batch.signed_by(run.seats)
        again = await recompute(claim, data, rules, engine, decoder, seats, folder=folder)
    if checking is not None:
        proofs = who_checked(checking, batch, place.position, again.fingerprints, domain)
        again = replace(again, proofs=proofs)
    if options["save"] is not None:
        judged = (view, place, claim, domain)
        _save(options["save"], judged, entries, Contents(data, rules, folder))
    return again


async def _checking(api: OrchestratorApi, batch: BatchView) -> BatchChecking | None:
    """Return the validators' proofs of checking of a batch; None if the orchestrator has none."""
    if batch.records is None:
        return None
    try:
        return await api.checking(batch.batch_id)
    except ApiError:
        return None


def _save(
    path: Path,
    judged: tuple[ChainView, SubmissionPlace, ClaimedWork, Domain],
    entries: Sequence[BatchEntry],
    contents: Contents,
) -> None:
    """Write an evidence bundle; raises ConfigError when there is no verdict yet."""
    from muster.client.disputes.bundle import evidence_of, facts_of, write_bundle

    _, place, _, _ = judged
    if place.batch.records is None:
        raise ConfigError(
            f"nobody has judged batch {place.batch.batch_id} yet",
            hint="without a verdict there is no evidence to save: run the command again later",
        )
    facts = facts_of(*judged)
    has_weights = write_bundle(
        path, evidence_of(place.batch, place.position, entries, facts), contents
    )
    note = (
        "" if has_weights else ("; the bundle has no policy: add --policy FOLDER to this command")
    )
    place_name = f"{place.batch.batch_id}:{place.position}"
    command = shlex.join(["muster", "audit", "verify", place_name, "--bundle", str(path)])
    click.echo(f"Saved: {command}{note}", err=True)


async def _policy(run: RunView, version: Any, fetcher: Fetcher) -> Path | None:
    """Return the folder of the policy that the submission claims; None if it was never
    published.
    """
    if version not in run.checkpoints:
        return None
    return await fetcher.fetch(run.run_id, version, run.checkpoints[version].manifest_root)


def _state_dir(options: dict[str, Any]) -> Path:
    state_dir: Path = options["state_dir"] or HOME / "doctor"
    return state_dir.expanduser()
