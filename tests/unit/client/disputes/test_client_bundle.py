"""Evidence bundles: every check agrees with an honest one and contradicts a mutated one."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import make_batch, make_view
from worlds.client_world import (
    BEACON,
    CALIBRATION,
    DOMAIN,
    NODE_KEY,
    NOW,
    ORCHESTRATOR_KEY,
    OTHER_KEY,
    RECIPE,
    RULES,
    RUN,
    TASK_SET,
    VALIDATOR_KEY,
    VERSION,
    HashEngine,
    as_claimed,
    make_claim,
    make_entry,
    make_submission,
    make_ticket,
)

from muster.chain import SubmissionPlace
from muster.client.audit.rerun_bundle import require_about, to_json, verify_bundle
from muster.client.disputes.bundle import (
    Bundle,
    ChainFacts,
    Contents,
    Evidence,
    PolicyFacts,
    facts_of,
    write_bundle,
)
from muster.client.disputes.bundle_checks import BundleCheck, CheckAnswer, is_borne_out
from muster.client.validator import decoding
from muster.client.worker.generation import play_ticket
from muster.inference import loading
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, EncodingError, MusterError
from muster.protocol.jury import Ruling, summons_of
from muster.protocol.messages import OutcomeRecord, Outcomes, Reason, Verdict
from muster.protocol.rollouts import Bounds, Rollout, decode_rollouts, encode_rollouts
from muster.shardcast import ChunkStore

ZERO = keccak(b"nothing of the kind")


@dataclass
class Case:
    """A submission, its evidence and the parts of its bundle."""

    evidence: Evidence
    contents: Contents
    folder: Path

    def change_facts(self, **changes: object) -> None:
        facts = self.evidence.facts.model_copy(update=changes)
        self.evidence = self.evidence.model_copy(update={"facts": facts})

    def change_record(self, **changes: Any) -> None:
        """Have validators sign another outcome, as a dishonest quorum would."""
        record = replace(OutcomeRecord.from_bytes(self.evidence.records), **changes)
        signature = sign_outcomes(self.evidence, record.to_bytes(), VALIDATOR_KEY)
        changed = {"records": record.to_bytes(), "signatures": [signature]}
        self.evidence = self.evidence.model_copy(update=changed)
        self.change_facts(records_hash=keccak(record.to_bytes()))

    def written(self) -> Path:
        path = self.folder / "bundle.zip"
        write_bundle(path, self.evidence, self.contents)
        return path

    def verify(self, chain: ChainFacts | None = None) -> dict[str, BundleCheck]:
        return self.verify_at(self.written(), chain)

    def verify_at(self, path: Path, chain: ChainFacts | None = None) -> dict[str, BundleCheck]:
        options = {"policy": None, "engine": None, "threads": None, "dtype": None, "device": None}
        unpacked = self.folder / "unpacked"
        unpacked.mkdir(exist_ok=True)
        with Bundle(path) as bundle:
            evidence = bundle.evidence()
            known = (chain or evidence.facts, chain)
            checks = asyncio.run(verify_bundle(bundle, evidence, known, unpacked, options))
        return {check.name.split(":")[0]: check for check in checks}


def sign_outcomes(evidence: Evidence, records: bytes, key: bytes) -> bytes:
    message = Outcomes(evidence.batch_id, evidence.facts.root, keccak(records))
    return sign(digest(DOMAIN, message.struct_hash()), key)


def publish(folder: Path, weights: Sequence[Path]) -> Any:
    """Put a policy where a fetcher leaves it; return its manifest."""
    policy = folder / "policies" / f"v{VERSION}"
    policy.mkdir(parents=True)
    for file in weights:
        shutil.copy(file, policy)
    manifest = ChunkStore(folder / "store").publish(
        {file.name: policy / file.name for file in weights},
        run_id=RUN,
        version=VERSION,
        stream_from=0,
        stream_to=0,
        sign=lambda _root: bytes(65),
    )
    (folder / "policies" / f"v{VERSION}.manifest").write_bytes(manifest.to_bytes())
    return manifest


def make_case(folder: Path, weights: Sequence[Path], engine: Any) -> Case:
    """Return an honest submission of an engine, judged and accepted."""
    manifest = publish(folder, weights)
    ticket = make_ticket(policy_root=manifest.root())
    rows = play_ticket(ticket, RECIPE, TASK_SET, engine).graded()
    submission = make_submission(ticket, rows)
    entry = make_entry(ticket, submission)
    record = OutcomeRecord(
        worker_id=5,
        step=ticket.step,
        index=ticket.index,
        policy_version=VERSION,
        file_hash=submission.file_hash,
        rollouts=len(rows),
        units=submission.units,
        verdict=Verdict.ACCEPTED,
        reason=Reason.NONE,
    ).to_bytes()
    facts = ChainFacts(
        chain_id=DOMAIN.chain_id,
        ledger=DOMAIN.verifying_contract,
        run_id=RUN,
        orchestrator=address_of(ORCHESTRATOR_KEY),
        recipe=RECIPE.hash(),
        calibration=CALIBRATION.hash(),
        task_set=TASK_SET.hash(),
        quorum=1,
        validators=[address_of(VALIDATOR_KEY)],
        root=submission.leaf(),
        count=1,
        committed_at=NOW + 30,
        records_hash=keccak(record),
        worker_id=5,
        node=address_of(NODE_KEY),
        is_slot_used=False,
        policy=PolicyFacts(root=manifest.root(), beacon=BEACON),
    )
    evidence = Evidence(
        batch_id=12, position=0, facts=facts, entries=[entry], records=record, signatures=[]
    )
    signature = sign_outcomes(evidence, record, VALIDATOR_KEY)
    evidence = evidence.model_copy(update={"signatures": [signature]})
    policy = folder / "policies" / f"v{VERSION}"
    return Case(evidence, Contents(encode_rollouts(rows), RULES, policy), folder)


class Decoder:
    """Decodes in the test's own process: the files here are the test's."""

    async def __aenter__(self) -> Decoder:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def decode(self, data: bytes, bounds: Bounds) -> list[Rollout]:
        return decode_rollouts(data, bounds)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(decoding, "FileDecoder", Decoder)
    monkeypatch.setattr(loading, "load_transformers", lambda *_, **__: lambda *_: HashEngine())
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return make_case(tmp_path, [tmp_path / "model.safetensors"], HashEngine(VERSION))


# Honest


def test_an_honest_verdict_is_borne_out_by_every_check(case: Case) -> None:
    checks = case.verify(case.evidence.facts)
    assert {check.answer for check in checks.values()} == {CheckAnswer.AGREE}
    assert [name[0] for name in checks if name[0].isdigit()] == list("1234567")
    assert "exponent mismatches 0 <=" in checks["6 proofs"].detail
    assert "tokens outside the margin 0 <= 0" in checks["7 sampling"].detail


def test_offline_nothing_is_said_of_the_chain_and_all_else_is_checked(case: Case) -> None:
    checks = case.verify()
    assert checks.pop("chain facts").answer is CheckAnswer.SILENT
    assert {check.answer for check in checks.values()} == {CheckAnswer.AGREE}


def test_a_true_rejection_agrees_up_to_the_check_that_failed(case: Case) -> None:
    case.change_facts(node=None)
    case.change_record(verdict=Verdict.REJECTED, reason=Reason.BAD_SIGNATURE)
    checks = case.verify()
    assert checks["1 claim"].answer is CheckAnswer.AGREE
    assert checks["2 form"].answer is CheckAnswer.SILENT
    assert checks["verdict"].answer is CheckAnswer.AGREE


def test_a_real_policy_travels_in_its_bundle_and_bears_the_verdict_out(tmp_path: Path) -> None:
    from muster.inference.transformers_engine import TransformersEngine

    sys.path.append(str(Path(__file__).parents[2] / "inference"))
    policy = importlib.import_module("inference_policy").build_policy(
        tmp_path / "built", training_steps=0
    )
    engine = TransformersEngine()
    engine.load_policy(policy, VERSION)
    case = make_case(tmp_path, sorted(policy.iterdir()), engine)
    checks = case.verify(case.evidence.facts)
    assert {check.answer for check in checks.values()} == {CheckAnswer.AGREE}


# What a jury ruled

ACCEPTED = Ruling(Verdict.ACCEPTED, Reason.NONE).number
REJECTED = Ruling(Verdict.REJECTED, Reason.SCHEMA).number


def summon(case: Case, ruling: int | None) -> None:
    """Have jurors of the network judge the work: no validator signs the outcome."""
    case.evidence = case.evidence.model_copy(update={"signatures": []})
    case.change_facts(summoned=ruling)


def test_a_verdict_of_the_network_s_jurors_on_unjudged_work_is_borne_out(case: Case) -> None:
    summon(case, ACCEPTED)
    checks = case.verify(case.evidence.facts)
    assert CheckAnswer.CONTRADICT not in {check.answer for check in checks.values()}
    for name in ("outcome signatures", "verdict"):
        assert checks[name].answer is CheckAnswer.AGREE
    assert case.verify()["outcome signatures"].answer is CheckAnswer.SILENT


@pytest.mark.parametrize(
    ("summoned", "changes"), [(None, {}), (REJECTED, {}), (ACCEPTED, {"records_hash": ZERO})]
)
def test_an_outcome_that_neither_validators_nor_jurors_gave_is_contradicted(
    case: Case, summoned: int | None, changes: dict[str, object]
) -> None:
    summon(case, summoned)
    case.change_facts(**changes)
    for chain in (case.evidence.facts, None):
        assert case.verify(chain)["outcome signatures"].answer is CheckAnswer.CONTRADICT


@pytest.mark.parametrize(
    ("ruling", "answer"), [(ACCEPTED, CheckAnswer.AGREE), (REJECTED, CheckAnswer.CONTRADICT)]
)
def test_the_ruling_of_a_jury_is_compared_in_place_of_the_record(
    case: Case, ruling: int, answer: CheckAnswer
) -> None:
    case.change_record(verdict=Verdict.FRAUD, reason=Reason.WRONG_REWARD)
    case.change_facts(ruling=ruling)
    checks = case.verify(case.evidence.facts)
    assert checks["outcome signatures"].answer is CheckAnswer.AGREE
    assert checks["verdict"].answer is answer
    assert is_borne_out(list(checks.values())) is (answer is CheckAnswer.AGREE)


@pytest.mark.parametrize(
    ("stated", "answer"),
    [
        (None, CheckAnswer.AGREE),
        (ACCEPTED, CheckAnswer.AGREE),
        (REJECTED, CheckAnswer.CONTRADICT),
    ],
)
def test_a_bundle_may_be_older_than_the_ruling(
    case: Case, stated: int | None, answer: CheckAnswer
) -> None:
    case.change_record(verdict=Verdict.REJECTED, reason=Reason.SCHEMA)
    chain = case.evidence.facts.model_copy(update={"ruling": ACCEPTED})
    case.change_facts(ruling=stated)
    checks = case.verify(chain)
    assert checks["chain facts"].answer is answer
    assert checks["verdict"].answer is CheckAnswer.AGREE


@pytest.mark.parametrize("ruling", [0, 255, 5 << 8])
def test_a_bundle_whose_ruling_has_no_verdict_is_refused(case: Case, ruling: int) -> None:
    case.change_facts(ruling=ruling)
    with pytest.raises(EncodingError, match="malformed"):
        case.verify()


def test_the_result_names_the_verdict_that_stands(case: Case) -> None:
    found = to_json(case.evidence, case.evidence.facts, [])
    assert found["verdict"] == "accepted"
    case.change_facts(ruling=REJECTED)
    assert to_json(case.evidence, case.evidence.facts, [])["verdict"] == "rejected"


# Mutated twins


@pytest.mark.parametrize(
    ("changes", "contradicted"),
    [
        ({"root": ZERO}, "batch root"),
        ({"count": 2}, "batch root"),
        ({"records_hash": ZERO}, "outcome signatures"),
        ({"quorum": 2}, "outcome signatures"),
        ({"validators": [address_of(OTHER_KEY)]}, "outcome signatures"),
        ({"recipe": ZERO}, "documents"),
        ({"calibration": ZERO}, "documents"),
        ({"task_set": ZERO}, "documents"),
        ({"policy": PolicyFacts(root=ZERO, beacon=BEACON)}, "policy"),
        ({"orchestrator": address_of(OTHER_KEY)}, "1 claim"),
        ({"node": address_of(OTHER_KEY)}, "1 claim"),
        ({"is_slot_used": True}, "1 claim"),
        ({"committed_at": NOW + 10_000}, "1 claim"),
        ({"worker_id": 6}, "verdict"),
    ],
)
def test_other_facts_of_the_chain_contradict(
    case: Case, changes: dict[str, object], contradicted: str
) -> None:
    chain = case.evidence.facts.model_copy(update=changes)
    checks = case.verify(chain)
    assert checks["chain facts"].answer is CheckAnswer.CONTRADICT
    assert checks[contradicted].answer is CheckAnswer.CONTRADICT


def test_a_fact_that_the_bundle_invents_is_named_with_both_values(case: Case) -> None:
    chain = case.evidence.facts
    case.change_facts(committed_at=1)
    check = case.verify(chain)["chain facts"]
    assert check.answer is CheckAnswer.CONTRADICT
    assert check.detail == f"committed_at: 1, on chain {NOW + 30}"


@pytest.mark.parametrize(
    ("changes", "contradicted"),
    [
        ({"verdict": Verdict.FRAUD, "reason": Reason.WRONG_REWARD}, "4 grades"),
        ({"verdict": Verdict.FRAUD, "reason": Reason.SAMPLER_MISMATCH}, "7 sampling"),
        ({"verdict": Verdict.REJECTED, "reason": Reason.LATE}, "1 claim"),
        ({"units": 1}, "verdict"),
        ({"verdict": Verdict.INCOMPLETE, "reason": Reason.FILE_INCOMPLETE}, "2 form"),
    ],
)
def test_a_false_verdict_is_contradicted_by_the_check_it_names(
    case: Case, changes: dict[str, object], contradicted: str
) -> None:
    case.change_record(**changes)
    checks = case.verify()
    assert checks["outcome signatures"].answer is CheckAnswer.AGREE
    assert checks[contradicted].answer is CheckAnswer.CONTRADICT
    assert checks["verdict"].answer is CheckAnswer.CONTRADICT


@pytest.mark.parametrize("reason", [Reason.BATCH_MISDECLARED, Reason.FILE_UNAVAILABLE])
def test_what_one_file_cannot_show_is_neither_borne_out_nor_contradicted(
    case: Case, reason: Reason
) -> None:
    case.change_record(verdict=Verdict.REJECTED, reason=reason)
    checks = case.verify()
    assert checks["verdict"].answer is CheckAnswer.SILENT
    assert is_borne_out(list(checks.values()))


def repack(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Write a bundle again with other parts."""
    changed = path.with_name("changed.zip")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return changed


@pytest.mark.parametrize(
    ("part", "data", "named"),
    [
        ("recipe", b"{}", "documents"),
        ("task_set", None, "documents"),
        ("manifest", b"{}", "policy"),
        ("manifest", None, "policy"),
        (f"policy/{'model.safetensors'}", b"Weights", "policy"),
        (f"policy/{'model.safetensors'}", b"longer weights", "policy"),
    ],
)
def test_a_part_that_is_not_the_pinned_one_contradicts(
    case: Case, part: str, data: bytes | None, named: str
) -> None:
    path = repack(case.written(), lambda name, old: data if name == part else old)
    assert case.verify_at(path)[named].answer is CheckAnswer.CONTRADICT


@pytest.mark.parametrize(
    ("part", "data", "says"),
    [
        ("evidence.json", b"{", "malformed"),
        ("evidence.json", b"[" * 100_000, "malformed"),
        ("evidence.json", None, "cannot be read"),
        ("submission.parquet", b"another", "a file of hash"),
        ("submission.parquet", None, "no file"),
        (f"policy/{'model.safetensors'}", None, "has no weights"),
    ],
)
def test_a_damaged_bundle_is_refused_with_what_is_wrong(
    case: Case, part: str, data: bytes | None, says: str
) -> None:
    path = repack(case.written(), lambda name, old: data if name == part else old)
    with pytest.raises(MusterError, match=says):
        case.verify_at(path)


def test_a_position_or_outcomes_that_do_not_fit_are_refused(case: Case) -> None:
    beyond = case.evidence.model_copy(update={"position": 1})
    with pytest.raises(EncodingError, match="no submission at position 1"):
        Evidence.from_bytes(beyond.model_dump_json().encode())
    short = case.evidence.model_copy(update={"records": b"x"})
    with pytest.raises(EncodingError, match="one outcome for each"):
        Evidence.from_bytes(short.model_dump_json().encode())


def test_a_file_that_is_no_bundle_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"PK")
    with pytest.raises(ConfigError, match="not an evidence bundle") as caught:
        Bundle(tmp_path / "b")
    assert "--save" in (caught.value.hint or "")


def test_a_part_that_grows_when_it_is_unpacked_is_bounded(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("evidence.json", bytes((16 << 20) + 1))
    with Bundle(path) as bundle, pytest.raises(EncodingError, match="larger than"):
        bundle.evidence()


def test_a_bundle_about_another_submission_is_refused(case: Case) -> None:
    for name in ("12:0", case.evidence.entry.submission.file_hash.hex(), "012:00"):
        require_about(case.evidence, name)
    with pytest.raises(ConfigError, match="is about submission 12:0"):
        require_about(case.evidence, "12:1")


class Judged:
    """A view with one judged submission."""

    def __init__(self) -> None:
        self.view = make_view()
        config = self.view.runs[RUN].config
        config.recipe_hash = config.calibration_hash = config.task_set_hash = ZERO
        ticket = make_ticket()
        self.claim = make_claim(make_submission(ticket, []), ticket)
        self.record = as_claimed(self.claim.submission, 5)
        made = make_batch(1, [self.claim.submission])
        self.batch = replace(made, records=[self.record], records_hash=ZERO)

    def facts(self, **changes: Any) -> ChainFacts:
        place = SubmissionPlace(replace(self.batch, **changes), 0)
        return facts_of(self.view, place, self.claim, DOMAIN)


def test_facts_have_the_quorum_of_the_terms_that_the_batch_was_committed_under() -> None:
    judged = Judged()
    run = judged.view.runs[RUN]
    run.config.terms.quorum = 3
    run.terms = [SimpleNamespace(quorum=2), run.config.terms]
    assert [judged.facts(terms=terms).quorum for terms in (1, 2)] == [2, 3]


def test_facts_have_the_orchestrator_whose_tickets_counted_then() -> None:
    judged = Judged()
    judged.view.runs[RUN].config.orchestrator = address_of(OTHER_KEY)
    assert judged.facts().orchestrator == address_of(ORCHESTRATOR_KEY)


@pytest.mark.parametrize("is_overturned", [True, False])
def test_facts_have_what_juries_ruled(is_overturned: bool) -> None:
    judged = Judged()
    case = SimpleNamespace(overturned=is_overturned, ruling=REJECTED)
    stands = REJECTED if is_overturned else None
    assert (judged.facts().ruling, judged.facts().summoned) == (None, None)
    judged.view.cases = {judged.record.leaf(1, 0): case}
    assert (judged.facts().ruling, judged.facts().summoned) == (stands, None)
    judged.view.cases = {summons_of(1): case}
    assert (judged.facts().ruling, judged.facts().summoned) == (None, stands)
