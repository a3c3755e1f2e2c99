"""Verdicts run again from copies of the evidence, some of which somebody tampered with."""

import asyncio
import json
import shutil
import zipfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from click.testing import CliRunner, Result
from client_network import (
    RECIPE,
    VALIDATORS,
    WORKERS,
    Network,
    eventually,
    open_network,
    running,
    world,
)
from safetensors.torch import save_file

from muster.api import BatchChecking, BatchEntry, OrchestratorApi
from muster.app.cli import muster
from muster.app.demo.adversary import ForgedReward
from muster.chain import BatchView, CaseStatus, CaseView, LeasedWork
from muster.client.audit.contradictions import Check, Kind
from muster.client.audit.evidence import EvidenceFolders
from muster.client.audit.history import ChainHistory, HistorySource, read
from muster.client.audit.ledger import PackedRecords
from muster.client.audit.money import Doubts
from muster.client.audit.outcome_table import tabulate
from muster.client.audit.reexecution import (
    HOW_ENGINE,
    HOW_MACHINE,
    Copies,
    Rejudge,
    draw,
    rerun_verdicts,
)
from muster.client.chain_facts import OutcomePlace
from muster.client.validator.records import counted_before, is_drawn
from muster.protocol.checking import Checking
from muster.protocol.eip712 import Domain, digest, sign
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion, RunId
from muster.protocol.jury import Ruling
from muster.protocol.messages import OutcomeRecord, Reason, Verdict, pack_records
from muster.toploc.sequential_test import HistoryLimits, WorkerHistory

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("hash_engine")]


async def proven_batch(network: Network) -> BatchChecking | None:
    """The proofs of an accepted batch of which both validators showed their fingerprints."""
    batches = [batch for batch in (await network.view()).batches.values() if batch.records]
    async with OrchestratorApi(network.orchestrator) as api:
        for batch in batches:
            found = await api.checking(batch.batch_id)
            is_shown = sum(each.fingerprints is not None for each in found.commitments) == 2
            if is_shown and {r.verdict for r in batch.records or ()} == {Verdict.ACCEPTED}:
                return found
    return None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judged(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    """A network on which one worker was honest, one forged rewards, and both were judged."""
    async with open_network(tmp_path_factory.mktemp("evidence")) as opened:
        mains = (opened.worker(0), opened.worker(1, ForgedReward))

        async def are_judged() -> bool:
            view = await opened.view()
            records = [r for b in view.batches.values() for r in b.records or ()]
            accepted = sum(r.verdict is Verdict.ACCEPTED for r in records)
            if accepted < 2 or all(r.verdict is not Verdict.FRAUD for r in records):
                return False
            return await proven_batch(opened) is not None

        async with running(*mains, opened.validator(0), opened.validator(1)):
            await eventually(are_judged)
        yield opened


async def audit(network: Network, *words: str) -> Result:
    chain = ["--rpc", network.anvil.rpc_url, "--deployments", str(network.folder / "deployments")]
    return await asyncio.to_thread(CliRunner().invoke, muster, ["audit", *words, *chain])


def copy_of(network: Network, to: Path) -> Path:
    """Return a copy of an orchestrator's and a fetcher's files, policies included."""
    for name in ("files", "documents", "validator-0"):
        shutil.copytree(network.folder / name, to / name, ignore=shutil.ignore_patterns(".*"))
    return to


async def rerun(network: Network, folder: Path, *words: str) -> Result:
    words = words or ("--all",)
    return await audit(network, "run", "1", "--evidence", str(folder), *words, "--json")


async def records_of(network: Network, verdict: Verdict) -> list[OutcomeRecord]:
    view = await network.view()
    records = [record for batch in view.batches.values() for record in batch.records or ()]
    return [record for record in records if record.verdict is verdict]


def found_in(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)["contradictions"]
    return found


# Honest copies


async def test_all_verdicts_are_borne_out_by_an_honest_copy(
    judged: Network, tmp_path: Path
) -> None:
    result = await rerun(judged, copy_of(judged, tmp_path))
    assert result.exit_code == 0, result.output
    assert found_in(result) == []
    count = len(result.stderr.splitlines())
    assert count >= 3
    assert f"{count} of {count} outcomes agree, 0 contradict" in result.stdout
    assert "fraud: agrees" in result.stderr


async def test_a_sample_is_the_same_for_everybody_who_draws_alike(
    judged: Network, tmp_path: Path
) -> None:
    folder, rpc = copy_of(judged, tmp_path), judged.owner.rpc
    # Further transactions of the orchestrator would be another history.
    await rpc.batch([("evm_setAutomine", [False]), ("evm_setIntervalMining", [0])])
    drawn = [
        (await rerun(judged, folder, "--sample", "2", "--seed", seed)).stderr for seed in ("5", "5")
    ]
    await rpc.batch([("evm_setIntervalMining", [1]), ("evm_setAutomine", [True])])
    assert drawn[0] == drawn[1]
    assert all(len(each.splitlines()) == 2 for each in drawn)


def seed_in(result: Result) -> int:
    """The seed of the sample, as the report shows it."""
    (check,) = (
        check
        for check in json.loads(result.stdout)["checks"]
        if check["name"] == "verdicts are what the evidence gives"
    )
    return int(check["detail"].rpartition("; drawn with --seed ")[2])


async def test_nobody_knows_a_sample_before_it_is_drawn(judged: Network, tmp_path: Path) -> None:
    folder = copy_of(judged, tmp_path)
    first, second = [await rerun(judged, folder, "--sample", "1") for _ in range(2)]
    assert seed_in(first) != seed_in(second)
    again = await rerun(judged, folder, "--sample", "1", "--seed", str(seed_in(first)))
    assert seed_in(again) == seed_in(first)


async def bundle_of(network: Network, record: OutcomeRecord, path: Path) -> Path:
    """Return the evidence bundle of one verdict, as `muster explain --save` writes it."""
    file = next((network.folder / "files").rglob(f"{record.file_hash.hex()}.parquet"))
    saved = await asyncio.to_thread(
        CliRunner().invoke,
        muster,
        [
            *("explain", record.file_hash.hex(), "--rerun", str(file)),
            *("--orchestrator", network.orchestrator, "--save", str(path)),
            *("--state-dir", str(network.folder / "doctor"), "--rpc", network.anvil.rpc_url),
            *("--deployments", str(network.folder / "deployments")),
        ],
    )
    assert saved.exit_code == 0, saved.output
    return path


def rewritten(bundle: Path, part: str, data: bytes) -> None:
    """Replace a part of a bundle."""
    with zipfile.ZipFile(bundle) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(bundle, "w") as new:
        for name, content in {**parts, part: data}.items():
            new.writestr(name, content)


async def test_bundles_are_evidence_too(judged: Network, tmp_path: Path) -> None:
    record = (await records_of(judged, Verdict.FRAUD))[0]
    await bundle_of(judged, record, tmp_path / "one.zip")
    assert "fraud: agrees" in (await rerun(judged, tmp_path)).stderr


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("submission.parquet", "has the hash 0x"),
        ("evidence.json", "one.zip is no bundle: evidence.json is malformed"),
    ],
)
async def test_an_altered_bundle_is_caught_with_what_is_wrong(
    judged: Network, tmp_path: Path, part: str, words: str
) -> None:
    record = (await records_of(judged, Verdict.FRAUD))[0]
    rewritten(await bundle_of(judged, record, tmp_path / "one.zip"), part, b"something else")
    found = found_in(await rerun(judged, tmp_path))
    altered = [each for each in found if each["kind"] == "evidence-altered"]
    assert any(words in each["detail"] for each in altered), found


async def test_a_rerun_without_evidence_is_refused(judged: Network) -> None:
    result = await audit(judged, "run", "1", "--all")
    assert "--evidence FOLDER" in str(getattr(result.exception, "hint", ""))


# Tampered copies


def path_of(folder: Path, record: OutcomeRecord, suffix: str) -> Path:
    return next(folder.rglob(f"{record.file_hash.hex()}{suffix}"))


def withhold(folder: Path, record: OutcomeRecord) -> None:
    path_of(folder, record, ".parquet").unlink()


def alter_file(folder: Path, record: OutcomeRecord) -> None:
    path_of(folder, record, ".parquet").write_bytes(b"something else")


def alter_submission(folder: Path, record: OutcomeRecord) -> None:
    path = path_of(folder, record, ".json")
    value = json.loads(path.read_text())
    value["submission"]["units"] += 1
    path.write_text(json.dumps(value))


def withhold_submission(folder: Path, record: OutcomeRecord) -> None:
    path_of(folder, record, ".json").unlink()


def break_submission(folder: Path, record: OutcomeRecord) -> None:
    path_of(folder, record, ".json").write_text("{")


def alter_signature(folder: Path, record: OutcomeRecord) -> None:
    """The root covers submissions, not their signatures: the check itself must notice this."""
    path = path_of(folder, record, ".json")
    value = json.loads(path.read_text())
    value["ticket_signature"] = "0x" + "11" * 64 + "1b"
    path.write_text(json.dumps(value))


def withhold_recipe(folder: Path, _record: OutcomeRecord) -> None:
    """The run owner's copy, and those that nodes keep."""
    for copy in folder.rglob(f"{RECIPE.hash().hex()}*"):
        copy.unlink()


def alter_policy(folder: Path, _record: OutcomeRecord) -> None:
    for weights in folder.rglob("v0/model.safetensors"):
        weights.write_text("policy 9")


TAMPERINGS: list[tuple[Callable[[Path, OutcomeRecord], None], Kind, str]] = [
    (alter_file, Kind.EVIDENCE_ALTERED, "has the hash 0x"),
    (alter_submission, Kind.EVIDENCE_ALTERED, "are not those that batch"),
    (break_submission, Kind.EVIDENCE_ALTERED, "malformed"),
    (alter_signature, Kind.VERDICT_WRONG, "recomputed FAILED"),
]


@pytest.mark.parametrize(("tamper", "kind", "words"), TAMPERINGS)
async def test_a_tampered_copy_is_caught_with_what_is_wrong(
    judged: Network,
    tmp_path: Path,
    tamper: Callable[[Path, OutcomeRecord], None],
    kind: Kind,
    words: str,
) -> None:
    folder, record = copy_of(judged, tmp_path), (await records_of(judged, Verdict.ACCEPTED))[0]
    tamper(folder, record)
    result = await rerun(judged, folder)
    assert result.exit_code == 1
    found = found_in(result)
    assert {each["kind"] for each in found} == {str(kind)}
    assert any(words in each["detail"] for each in found), found
    assert all(each["batch_id"] is not None and each["tx"] for each in found)


MISSING: list[tuple[Callable[[Path, OutcomeRecord], None], str, str]] = [
    (withhold, "the file 0x", "--files"),
    (withhold_submission, "the submissions of batch", "--files"),
    (withhold_recipe, "the recipe 0x", "--documents"),
    (alter_policy, "policy 0, root 0x", "--relay URL"),
]


@pytest.mark.parametrize(("withhold", "why", "how"), MISSING)
async def test_what_is_missing_cannot_be_run_again_and_contradicts_nothing(
    judged: Network,
    tmp_path: Path,
    withhold: Callable[[Path, OutcomeRecord], None],
    why: str,
    how: str,
) -> None:
    folder, record = copy_of(judged, tmp_path), (await records_of(judged, Verdict.ACCEPTED))[0]
    withhold(folder, record)
    result = await rerun(judged, folder)
    assert found_in(result) == []
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    check = checks["verdicts are what the evidence gives"]
    missing = check["not_rerun"]
    assert any(why in each["why"] and how in each["how"] for each in missing), missing
    assert f"{len(missing)} cannot be run again" in check["detail"]
    # A check that ran no verdict again proves nothing.
    runs = len(result.stderr.splitlines())
    assert (result.exit_code == 0) is check["passed"] is (len(missing) < runs)


async def test_the_result_is_on_top_and_fits_a_terminal(judged: Network, tmp_path: Path) -> None:
    folder, records = copy_of(judged, tmp_path), await records_of(judged, Verdict.ACCEPTED)
    withhold(folder, records[0])
    alter_file(folder, records[1])
    result = await audit(judged, "run", "1", "--evidence", str(folder), "--all")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[1].startswith("1 contradiction: 1 of ")
    assert "1 contradict, 1 cannot be run again" in f"{lines[2]} {lines[3]}"
    at = [n for n, line in enumerate(lines) if line.startswith("evidence-altered: ")]
    checks = [n for n, line in enumerate(lines) if line.startswith(("ok  ", "open", "FAIL"))]
    assert len(at) == 1
    assert at[0] < checks[0]
    assert [line for line in lines if len(line) > 80] == []
    assert " wei" not in result.stdout.replace("amounts in wei", "")


@pytest.mark.parametrize("has_another_s", [False, True])
async def test_work_that_is_on_chain_with_its_proofs_needs_only_its_file(
    judged: Network, tmp_path: Path, has_another_s: bool
) -> None:
    """Its worker committed it, or split it off: no orchestrator keeps its ticket. Another copy of
    the file, signed for another slot, may lie there under the same name."""
    history, folder = await history_of(judged), copy_of(judged, tmp_path)
    batch, place = found_as(history, Verdict.ACCEPTED)
    record = (batch.records or ())[place]
    entry = BatchEntry.model_validate_json(path_of(folder, record, ".json").read_text())
    assert entry.ticket is not None
    assert entry.ticket_signature is not None
    of_ticket = entry.ticket, entry.ticket_signature
    batch.work = LeasedWork(entry.submission, entry.signature, *of_ticket)
    batch.root, batch.count = entry.submission.leaf(), 1
    batch.records = PackedRecords(pack_records([record]))  # type: ignore[assignment]
    (alter_submission if has_another_s else withhold_submission)(folder, record)
    check = await rejudged(history, folder)
    assert check.contradictions == ()
    assert batch.batch_id not in {each.batch_id for each in check.not_rerun}
    withhold(folder, record)
    (missing,) = [
        r for r in (await rejudged(history, folder)).not_rerun if r.batch_id == batch.batch_id
    ]
    assert missing.why.startswith("the file 0x")


# Wrong verdicts


async def history_of(network: Network) -> ChainHistory:
    return await read(HistorySource((network.anvil.rpc_url,), network.folder / "deployments"))


async def rejudged(history: ChainHistory, folder: Path, engine: Any = None) -> Check:
    """The check of all verdicts of the run, with a copy of the evidence."""
    rows = draw(tabulate(history.ledger), RunId(1), None, 0)
    copies = Copies(EvidenceFolders([folder]))
    check, *_ = await rerun_verdicts(history, RunId(1), rows, copies, engine or world.HashEngine())
    return check


def recorded_as(batch: BatchView, place: int, record: OutcomeRecord) -> None:
    records = [record if n == place else r for n, r in enumerate(batch.records or ())]
    batch.records = PackedRecords(pack_records(records))  # type: ignore[assignment]


async def test_a_verdict_that_the_evidence_does_not_give_is_contradicted(
    judged: Network, tmp_path: Path
) -> None:
    """Validators collude: the recorded outcome contradicts the file."""
    history = await history_of(judged)
    batch = next(b for b in history.ledger.batches.values() if b.records)
    record = (batch.records or ())[0]
    lie = replace(record, units=record.units - 1)
    recorded_as(batch, 0, lie)
    check = await rejudged(history, copy_of(judged, tmp_path))
    (found,) = check.contradictions
    assert (found.kind, found.batch_id, found.position) == (Kind.VERDICT_WRONG, batch.batch_id, 0)
    assert f"units: {lie.units}, recomputed {lie.units + 1}" in found.detail


def overturned(history: ChainHistory, batch: BatchView, place: int, ruling: Ruling) -> CaseView:
    """Have a jury replace an outcome by a ruling."""
    record = (batch.records or ())[place]
    recorded = Ruling(record.verdict, record.reason).number
    leaf, worker = record.leaf(batch.batch_id, place), WORKERS[0].address
    case = CaseView(leaf, 1, RunId(1), batch.batch_id, place, worker, recorded, 9, 7, 100, "0xo")
    case.status, case.ruling = CaseStatus.OVERTURNED, ruling.number
    history.ledger.cases[leaf] = case
    return case


def found_as(history: ChainHistory, verdict: Verdict) -> tuple[BatchView, int]:
    """A place whose record has this verdict."""
    return next(
        (batch, place)
        for batch in history.ledger.batches.values()
        for place, record in enumerate(batch.records or ())
        if record.verdict is verdict
    )


@pytest.mark.parametrize("reason", [Reason.SCHEMA, Reason.SAMPLER_DRIFT, Reason.FILE_UNAVAILABLE])
async def test_honest_work_that_a_jury_accepted_agrees_with_what_stands(
    judged: Network, tmp_path: Path, reason: Reason
) -> None:
    """Validators rejected it, for whatever reason; the record is only a note."""
    history = await history_of(judged)
    batch, place = found_as(history, Verdict.ACCEPTED)
    wrong = replace((batch.records or ())[place], verdict=Verdict.REJECTED, reason=reason)
    recorded_as(batch, place, wrong)
    overturned(history, batch, place, Ruling(Verdict.ACCEPTED, Reason.NONE))
    check = await rejudged(history, copy_of(judged, tmp_path))
    assert (check.contradictions, check.not_rerun) == ((), ())
    name = f"{batch.batch_id}:{place}"
    assert check.notes == (
        f"{name}: recorded was rejected for {reason.name.lower()}, a jury ruled accepted, as the "
        "evidence gives",
    )
    assert Doubts.of([check]).wrong == frozenset()


async def test_a_jury_s_acceptance_cannot_be_run_again_without_the_file(
    judged: Network, tmp_path: Path
) -> None:
    """The record that it replaced was one that needs no file."""
    history = await history_of(judged)
    batch, place = found_as(history, Verdict.ACCEPTED)
    record = (batch.records or ())[place]
    recorded_as(batch, place, replace(record, verdict=Verdict.REJECTED, reason=Reason.LATE))
    overturned(history, batch, place, Ruling(Verdict.ACCEPTED, Reason.NONE))
    folder = copy_of(judged, tmp_path)
    withhold(folder, record)
    check = await rejudged(history, folder)
    assert check.contradictions == ()
    assert [(each.batch_id, each.position) for each in check.not_rerun] == [(batch.batch_id, place)]


async def test_a_jury_that_accepted_a_fraud_is_contradicted_and_its_payment_unearned(
    judged: Network, tmp_path: Path
) -> None:
    history = await history_of(judged)
    batch, place = found_as(history, Verdict.FRAUD)
    overturned(history, batch, place, Ruling(Verdict.ACCEPTED, Reason.NONE))
    check = await rejudged(history, copy_of(judged, tmp_path))
    (found,) = check.contradictions
    assert (found.kind, found.batch_id) == (Kind.VERDICT_WRONG, batch.batch_id)
    assert "a jury ruled accepted, recomputed fraud for wrong_reward" in found.detail
    assert Doubts.of([check]).wrong == {OutcomePlace(batch.batch_id, place)}


@pytest.mark.parametrize(
    ("ruling", "agrees"),
    [
        (Ruling(Verdict.FRAUD, Reason.WRONG_REWARD), True),
        (Ruling(Verdict.FRAUD, Reason.WRONG_SEED), True),
        (Ruling(Verdict.FRAUD, Reason.SAMPLER_MISMATCH), False),
        (Ruling(Verdict.REJECTED, Reason.WRONG_REWARD), False),
    ],
)
async def test_a_jury_is_compared_by_the_consequences_of_its_ruling(
    judged: Network, tmp_path: Path, ruling: Ruling, agrees: bool
) -> None:
    history = await history_of(judged)
    batch, place = found_as(history, Verdict.FRAUD)
    record = (batch.records or ())[place]
    recorded_as(batch, place, replace(record, verdict=Verdict.ACCEPTED, reason=Reason.NONE))
    overturned(history, batch, place, ruling)
    check = await rejudged(history, copy_of(judged, tmp_path))
    assert [found.kind for found in check.contradictions] == [Kind.VERDICT_WRONG] * (not agrees)


@pytest.mark.parametrize("is_drifting", [False, True])
async def test_a_verdict_by_history_is_run_again_with_the_worker_s_other_files(
    judged: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_drifting: bool
) -> None:
    """An honest worker was struck; borne out only where its files together give the alarm."""
    history = await history_of(judged)
    ledger = history.ledger
    batch, place = next(
        (batch, place)
        for batch in sorted(ledger.batches.values(), key=lambda b: -b.batch_id)
        for place, record in enumerate(batch.records or ())
        if record.verdict is Verdict.ACCEPTED and is_drawn(batch, place)
    )
    record = (batch.records or ())[place]
    struck = replace(record, verdict=Verdict.REJECTED, reason=Reason.SAMPLER_DRIFT)
    recorded_as(batch, place, struck)
    counted = counted_before(
        ledger.batches, ledger.runs[RunId(1)], OutcomePlace(batch.batch_id, place)
    )
    assert {record.worker_id for _, record in counted} <= {struck.worker_id}
    seen: list[int] = []

    def alarms(test: WorkerHistory, _limits: HistoryLimits) -> bool:
        seen.append(test.submissions)
        return is_drifting

    monkeypatch.setattr(WorkerHistory, "alarms", alarms)
    check = await rejudged(history, copy_of(judged, tmp_path))
    assert set(seen) == {len(counted) + 1}
    wrong = [(found.batch_id, found.position) for found in check.contradictions]
    assert wrong == ([] if is_drifting else [(batch.batch_id, place)])


async def test_a_machine_that_fails_contradicts_nobody(judged: Network, tmp_path: Path) -> None:
    class Full(world.HashEngine):
        def recompute(self, samples: Any) -> Any:
            raise MemoryError(f"{len(samples)} samples")

    history = await history_of(judged)
    check = await rejudged(history, copy_of(judged, tmp_path), Full())
    assert check.contradictions == ()
    assert {each.how for each in check.not_rerun} == {HOW_MACHINE}


class Broken(world.HashEngine):
    """Computes nonsense."""

    def recompute(self, samples: Any) -> Any:
        raise EngineError(f"nonsense in {len(samples)} samples")


async def test_work_of_a_policy_that_is_not_finite_must_have_been_rejected(
    judged: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def verified(_self: Rejudge, _version: PolicyVersion) -> Path:
        save_file({"norm": torch.tensor([1.0, float("nan")])}, tmp_path / "m.safetensors")
        return tmp_path

    monkeypatch.setattr(Rejudge, "_verified", verified)
    history, folder = await history_of(judged), copy_of(judged, tmp_path / "copy")
    batch, place = found_as(history, Verdict.ACCEPTED)
    record = (batch.records or ())[place]
    wrong = replace(record, verdict=Verdict.REJECTED, reason=Reason.TOPLOC_MISMATCH)
    recorded_as(batch, place, wrong)
    check = await rejudged(history, folder, Broken())
    accepted = {
        OutcomePlace(batch.batch_id, place)
        for batch in history.ledger.batches.values()
        for place, record in enumerate(batch.records or ())
        if record.verdict is Verdict.ACCEPTED
    }
    assert accepted
    assert accepted <= Doubts.of([check]).wrong
    assert OutcomePlace(batch.batch_id, place) not in Doubts.of([check]).wrong
    assert check.not_rerun == ()


async def test_a_policy_that_does_not_load_is_named_and_contradicts_nobody(
    judged: Network, tmp_path: Path
) -> None:
    class Unloadable(world.HashEngine):
        def load_policy(self, folder: Path, version: PolicyVersion) -> None:
            raise EngineError(f"{folder.name} does not load as version {version}")

    history = await history_of(judged)
    check = await rejudged(history, copy_of(judged, tmp_path), Unloadable())
    assert check.contradictions == ()
    assert {each.how for each in check.not_rerun} == {HOW_ENGINE.format(version=0)}


# Who was called, and who checked


async def test_outcomes_that_were_kept_bear_out_who_was_called(
    judged: Network, tmp_path: Path
) -> None:
    folder = copy_of(judged, tmp_path)
    result = await audit(judged, "run", "1", "--evidence", str(folder), "--call-timeout-s", "7")
    assert result.exit_code == 0, result.output
    assert "ok   outcomes can be those of validators that were called: " in result.stdout
    assert "ok   outcomes have the word of the validators that the schedule called: " in (
        result.stdout
    )
    posted = min(b.batch_id for b in (await judged.view()).batches.values() if b.records)
    kept = next((folder / "files" / "outcomes").glob(f"{posted}-*.json"))
    document = json.loads(kept.read_text())
    document["records"] = "0x" + "11" * (len(document["records"]) // 2 - 1)
    kept.write_text(json.dumps(document))
    found = found_in(await audit(judged, "run", "1", "--evidence", str(folder), "--json"))
    assert {each["kind"] for each in found} == {"evidence-altered"}
    assert "did not sign the outcomes kept as its own" in found[0]["detail"]


@pytest_asyncio.fixture(loop_scope="module")
async def proven(judged: Network) -> tuple[int, BatchChecking]:
    """An accepted batch of which both validators showed their fingerprints, and those."""
    found = await proven_batch(judged)
    assert found is not None  # waited for
    return found.batch_id, found


def save_checking(folder: Path, checking: BatchChecking) -> None:
    (folder / f"checking-{checking.batch_id}.json").write_text(checking.model_dump_json())


async def test_who_checked_is_borne_out_by_the_recomputed_states(
    judged: Network, tmp_path: Path, proven: tuple[int, BatchChecking]
) -> None:
    folder, (batch_id, checking) = copy_of(judged, tmp_path), proven
    save_checking(folder, checking)
    result = await rerun(judged, folder)
    assert result.exit_code == 0, result.output
    # From two validators, for each submission of the batch.
    proofs = 2 * (await judged.view()).batches[batch_id].count
    assert f"{proofs} proofs borne out, 0 not shown" in result.stdout
    assert "nobody shows proofs of checking" in result.stdout


async def test_a_proof_that_is_not_shown_is_a_note(
    judged: Network, tmp_path: Path, proven: tuple[int, BatchChecking]
) -> None:
    folder, (batch_id, checking) = copy_of(judged, tmp_path), proven
    save_checking(folder, with_second(checking, fingerprints=None))
    # Files that the copy lacks are fetched from the orchestrator.
    result = await rerun(judged, folder, "--all", "--orchestrator", judged.orchestrator)
    assert result.exit_code == 0, result.output
    who = VALIDATORS[1].address
    assert f"batch {batch_id}: {who} signed and shows no fingerprints of it" in result.stdout


def copied(batch: BatchView, network: Network, checking: BatchChecking) -> BatchChecking:
    """The second validator commits to the first one's fingerprints, and shows them."""
    first, second = sorted(checking.commitments, key=lambda c: c.validator != VALIDATORS[0].address)
    message = Checking(batch.batch_id, batch.root, second.records_hash, first.fingerprints_hash)
    domain = Domain(31337, network.owner.deployment.contracts["ContributionLedger"])
    signature = sign(digest(domain, message.struct_hash()), VALIDATORS[1].key)
    shown = {"fingerprints": first.fingerprints, "fingerprints_hash": first.fingerprints_hash}
    changed = second.model_copy(update={**shown, "signature": signature})
    return checking.model_copy(update={"commitments": [first, changed]})


def with_second(checking: BatchChecking, **changes: Any) -> BatchChecking:
    first, second = sorted(checking.commitments, key=lambda c: c.validator != VALIDATORS[0].address)
    return checking.model_copy(update={"commitments": [first, second.model_copy(update=changes)]})


async def test_a_copied_fingerprint_is_caught_with_whose_it_is(
    judged: Network, tmp_path: Path, proven: tuple[int, BatchChecking]
) -> None:
    batch_id, checking = proven
    folder, batch = copy_of(judged, tmp_path), (await judged.view()).batches[batch_id]
    save_checking(folder, copied(batch, judged, checking))
    result = await rerun(judged, folder)
    assert result.exit_code == 1
    (found, *more) = found_in(result)
    assert {each["kind"] for each in (found, *more)} == {"outcome-unchecked"}
    assert (found["batch_id"], found["position"]) == (batch_id, 0)
    who, whose = VALIDATORS[1].address, VALIDATORS[0].address
    assert found["detail"].startswith(f"{who} signed without recomputing it")
    assert found["detail"].endswith(f"the same as {whose} shows")


async def test_fingerprints_that_their_validator_did_not_sign_were_altered(
    judged: Network, tmp_path: Path, proven: tuple[int, BatchChecking]
) -> None:
    folder, (batch_id, checking) = copy_of(judged, tmp_path), proven
    second = VALIDATORS[1].address
    of = next(each for each in checking.commitments if each.validator == second)
    assert of.fingerprints is not None
    altered = of.fingerprints[:-1] + bytes([of.fingerprints[-1] ^ 1])
    save_checking(folder, with_second(checking, fingerprints=altered))
    (found,) = found_in(await rerun(judged, folder))
    assert (found["kind"], found["batch_id"]) == ("evidence-altered", batch_id)
    assert f"kept as {second}'s are not those that it signed" in found["detail"]


# Lineage


async def test_a_version_names_the_files_and_workers_that_went_into_it(judged: Network) -> None:
    accepted = await records_of(judged, Verdict.ACCEPTED)
    await judged.publish_step(PolicyVersion(1), 0, 1)
    await judged.publish_step(PolicyVersion(2), 1, 2)
    words = ("lineage", "--run", "1", "--version", "2", "--evidence", str(judged.folder / "origin"))
    result = await audit(judged, *words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [each["version"] for each in found["ingredients"]] == [1, 2]
    assert [each["stream_to"] for each in found["ancestors"]] == [0, 1, 2]
    of_stream = {f"0x{record.file_hash.hex()}" for record in accepted}
    assert {each["file_sha256"] for each in found["ingredients"]} <= of_stream
    (worker,) = found["workers"]
    assert (worker["worker"], worker["submissions"]) == (WORKERS[0].address, 2)
    text = (await audit(judged, *words)).stdout
    assert "base model" in text
    assert "no contradictions" in text
    assert "2 files paid, and offered to training" in text
    # The newest manifest alone fixes the whole lineage, but not which step took which file.
    relay = (
        await audit(judged, *words[:5], "--evidence", str(judged.folder / "documents"))
    ).exception
    assert "nobody shows the manifest" in str(relay)
    # A range that does not continue its parent's, or was never posted, is a contradiction.
    await judged.publish_step(PolicyVersion(3), 5, 500)
    result = await audit(judged, *words[:4], "3", *words[5:], "--json")
    assert result.exit_code == 1
    kinds = {each["kind"] for each in json.loads(result.stdout)["contradictions"]}
    assert kinds == {"lineage"}
