"""Proof of checking at a validator: fingerprints kept, proofs compared, liars found."""

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.cases import make_view_batch
from worlds.client_chain import make_context
from worlds.client_world import (
    DOMAIN,
    OTHER_KEY,
    RULES,
    RUN,
    VALIDATOR_KEY,
    VERSION,
    HashEngine,
    as_claimed,
    make_claim,
    make_rollouts,
    make_submission,
    make_ticket,
)

from muster.api.answers import BatchChecking, CheckingAnswer
from muster.client.validator.checking_proofs import (
    KEPT_BATCHES,
    Checked,
    CheckingDuty,
    CheckingStore,
    Proof,
    compare,
    is_checked,
    shown_fingerprints,
    who_checked,
)
from muster.client.validator.judging import examine
from muster.protocol.checking import Checking, CheckReport, fingerprints_hash, pack_fingerprints
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError
from muster.protocol.ids import BatchName
from muster.protocol.messages import Verdict
from muster.toploc.projections import FINGERPRINT_BYTES

ME, YOU = address_of(VALIDATOR_KEY), address_of(OTHER_KEY)
TICKET = make_ticket()
ROWS = make_rollouts(TICKET)
SUBMISSION = make_submission(TICKET, ROWS)
CLAIM = make_claim(SUBMISSION, TICKET)
RECORD = as_claimed(SUBMISSION, 5)


def judged(**changes: Any) -> dict[Any, bytes]:
    claim = replace(CLAIM, **changes)
    return dict(examine(claim, ROWS, RULES, HashEngine(VERSION), (ME, YOU)).fingerprints)


MINE = judged()


# What judging yields


def test_judging_says_what_everybodys_fingerprints_must_be() -> None:
    assert set(MINE) == {ME, YOU}
    assert len(MINE[ME]) == FINGERPRINT_BYTES
    assert judged() == MINE
    assert not is_checked(MINE[YOU], MINE[ME])


def test_another_submission_or_policy_has_other_fingerprints() -> None:
    other = make_submission(TICKET, ROWS, units=SUBMISSION.units, file_hash=keccak(b"other file"))
    assert not is_checked(judged(submission=other)[ME], MINE[ME])
    engine = HashEngine(VERSION + 1)  # type: ignore[arg-type]
    stale = examine(CLAIM, ROWS, RULES, engine, (ME,)).fingerprints[ME]
    assert not is_checked(stale, MINE[ME])


def test_what_is_judged_without_a_prefill_has_none() -> None:
    claim = make_claim(make_submission(TICKET, ROWS, rollouts=3), TICKET)
    assert examine(claim, ROWS, RULES, HashEngine(VERSION), (ME,)).fingerprints == {}


# What is compared


def test_honest_validators_agree_and_a_made_up_fingerprint_fails() -> None:
    records = [RECORD, RECORD]
    assert compare([MINE[YOU]] * 2, [MINE[YOU]] * 2, records).has_checked
    found = compare([bytes(FINGERPRINT_BYTES), MINE[YOU]], [MINE[YOU]] * 2, records)
    assert (found.compared, found.failed) == (2, (0,))


@pytest.mark.parametrize("claimed", [b"", b"\1", bytes(FINGERPRINT_BYTES - 1), b"\xff" * 32])
def test_an_acceptance_without_a_fingerprint_is_unchecked(claimed: bytes) -> None:
    assert compare([claimed], [MINE[YOU]], [RECORD]).failed == (0,)


def test_what_one_side_had_no_need_to_prefill_does_not_count() -> None:
    rejected = replace(RECORD, verdict=Verdict.REJECTED)
    assert compare([b""], [MINE[YOU]], [rejected]).compared == 0
    assert compare([b""], [b""], [RECORD]).compared == 0


def test_a_tenth_of_the_blocks_may_differ_and_no_more() -> None:
    whole = MINE[ME] * 20
    wrong = bytes(FINGERPRINT_BYTES)
    assert is_checked(MINE[ME] * 18 + wrong * 2, whole)
    assert not is_checked(MINE[ME] * 17 + wrong * 3, whole)


# Whom to believe


def shown(**changes: Any) -> BatchChecking:
    """The honest proof of YOU as the orchestrator shows it, with changes."""
    batch = batch_of()
    parts = [MINE[YOU]]
    message = Checking(1, batch.root, keccak(b"records"), fingerprints_hash(parts))
    values: dict[str, Any] = {
        "validator": YOU,
        "records_hash": message.records_hash,
        "fingerprints_hash": message.fingerprints_hash,
        "signature": sign(digest(DOMAIN, message.struct_hash()), OTHER_KEY),
        "committed_at": 5,
        "fingerprints": pack_fingerprints(parts),
    }
    answer = CheckingAnswer(**{**values, **changes})
    return BatchChecking(batch_id=1, batch_root=batch.root, commitments=[answer], reports=[])


def batch_of() -> Any:
    batch = make_view_batch([SUBMISSION.leaf()], [RECORD])
    batch.records_hash = keccak(b"records")
    return batch


def test_fingerprints_count_as_they_were_signed_with_the_outcomes() -> None:
    assert shown_fingerprints(shown(), YOU, batch_of(), DOMAIN) == [MINE[YOU]]


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprints": None},
        {"fingerprints": pack_fingerprints([MINE[ME]])},
        {"fingerprints": b"\xff\xff"},
        {"fingerprints_hash": keccak(b"another")},
        {"records_hash": keccak(b"other records")},
        {"signature": bytes(65)},
        {"signature": sign(keccak(b"else"), OTHER_KEY)},
        {"validator": ME},
    ],
)
def test_fingerprints_of_another_signature_hash_or_outcome_do_not(changes: dict[str, Any]) -> None:
    assert shown_fingerprints(shown(**changes), YOU, batch_of(), DOMAIN) is None


def test_fingerprints_that_go_with_other_outcomes_than_those_on_chain_do_not() -> None:
    batch = batch_of()
    batch.records_hash = keccak(b"what others signed")
    assert shown_fingerprints(shown(), YOU, batch, DOMAIN) is None


def test_who_re_runs_a_file_learns_who_checked_it() -> None:
    proven = who_checked(shown(), batch_of(), 0, MINE, DOMAIN)
    assert proven == {ME: Proof.NONE, YOU: Proof.CHECKED}
    made_up = dict.fromkeys(MINE, MINE[ME])
    assert who_checked(shown(), batch_of(), 0, made_up, DOMAIN)[YOU] is Proof.UNCHECKED


# The duty, with an orchestrator in memory


class Desk:
    """The orchestrator's routes for proofs of checking, as a validator sees them."""

    def __init__(self, *, refuses: str | None = None, code: str = "checking_late") -> None:
        self.refuses, self.code = refuses, code
        self.asked = 0
        self.said: list[tuple[str, Any]] = []

    def _take(self, what: str, value: Any) -> None:
        if self.refuses == what:
            raise ApiError(f"no {what}", status=409, code=self.code)
        self.said.append((what, value))

    async def post_checking(self, message: Checking, _signature: bytes) -> None:
        self._take("commitment", message)

    async def post_fingerprints(self, _batch_id: int, packed: bytes) -> None:
        self._take("fingerprints", packed)

    async def post_check_report(self, report: CheckReport, _signature: bytes) -> None:
        self._take("report", report)

    async def checking(self, _batch_id: int) -> BatchChecking:
        self.asked += 1
        return shown()

    def of(self, what: str) -> list[Any]:
        return [value for name, value in self.said if name == what]


def make_duty(folder: Path, desk: Desk, mine: dict[Any, bytes] = MINE) -> CheckingDuty:
    batch = batch_of()
    batch.signers, batch.posted_at = 0b11, 100
    run = SimpleNamespace(seats={ME: 1, YOU: 2}, validators=[ME, YOU])
    store = CheckingStore(folder)
    store.record(Checked(batch.name, (mine,)))
    clock = iter(range(100, 100_000, 100))
    view = SimpleNamespace(batches={1: batch}, runs={RUN: run})
    context = make_context(view=view, api=desk, checked=store)
    return CheckingDuty(context, store, lambda: next(clock))


async def test_duty_shows_once_compares_and_is_done(tmp_path: Path) -> None:
    desk = Desk()
    duty = make_duty(tmp_path, desk)
    for _ in range(3):
        await duty.serve()
    assert desk.of("fingerprints") == [pack_fingerprints([MINE[ME]])]
    [report] = desk.of("report")
    assert (report.validator, report.compared, report.failed) == (YOU, 1, 0)
    assert desk.asked == 1


async def test_batch_that_takes_anothers_number_is_shown_and_compared_too(tmp_path: Path) -> None:
    desk = Desk()
    duty = make_duty(tmp_path, desk)
    await duty.serve()
    batch = duty.context.view.batches[1]
    batch.root = keccak(b"another batch")
    await duty.serve()
    assert (len(desk.of("fingerprints")), desk.asked) == (1, 1)
    batch.root = keccak(b"one that was judged")
    duty.store.record(Checked(batch.name, (MINE,)))
    await duty.serve()
    assert (len(desk.of("fingerprints")), desk.asked) == (2, 2)


async def test_duty_reports_who_showed_other_states(tmp_path: Path) -> None:
    desk = Desk()
    other = {ME: MINE[ME], YOU: MINE[ME]}
    await make_duty(tmp_path, desk, other).serve()
    assert desk.of("report")[0].failed == 1


async def test_duty_commits_once_to_its_own_fingerprints(tmp_path: Path) -> None:
    desk = Desk()
    duty, root = make_duty(tmp_path, desk), batch_of().root
    for _ in range(2):
        await duty.commit(BatchName(1, root), b"records")
    [message] = desk.of("commitment")
    assert message.fingerprints_hash == fingerprints_hash([MINE[ME]])
    assert message.records_hash == keccak(b"records")
    await duty.commit(BatchName(2, root), b"records")
    assert len(desk.of("commitment")) == 1


@pytest.mark.parametrize("refuses", ["commitment", "fingerprints"])
async def test_refusal_of_a_proof_stops_nothing(tmp_path: Path, refuses: str) -> None:
    desk = Desk(refuses=refuses)
    duty = make_duty(tmp_path, desk)
    await duty.commit(batch_of().name, b"records")
    await duty.serve()
    assert len(desk.of("report")) == 1


@pytest.mark.parametrize("code", ["checking_early", "batch_unknown"])
@pytest.mark.parametrize("refuses", ["commitment", "fingerprints"])
async def test_proof_comes_again_where_the_orchestrator_had_not_read_the_chain_so_far(
    tmp_path: Path, refuses: str, code: str
) -> None:
    desk = Desk(refuses=refuses, code=code)
    duty = make_duty(tmp_path, desk)
    for _ in range(2):
        await duty.commit(batch_of().name, b"records")
        with contextlib.suppress(ApiError):
            await duty.serve()
        desk.refuses = None
    assert [len(desk.of(what)) for what in ("commitment", "fingerprints", "report")] == [1, 1, 1]


async def test_batches_without_outcomes_are_left_alone(tmp_path: Path) -> None:
    desk = Desk()
    duty = make_duty(tmp_path, desk)
    duty.context.view.batches[1].records = None
    await duty.serve()
    assert (desk.said, desk.asked) == ([], 0)


# What is kept


def checked(batch_id: int = 1) -> Checked:
    return Checked(BatchName(batch_id, keccak(b"root")), (MINE, {}))


def test_what_was_recomputed_survives_the_process(tmp_path: Path) -> None:
    CheckingStore(tmp_path).record(checked())
    found = CheckingStore(tmp_path).find(checked().name)
    assert found == checked()
    assert found is not None
    assert found.of(YOU) == [MINE[YOU], b""]


def test_a_batch_under_another_root_is_unknown(tmp_path: Path) -> None:
    store = CheckingStore(tmp_path)
    store.record(checked())
    assert store.find(BatchName(1, keccak(b"other root"))) is None
    assert store.find(BatchName(2, keccak(b"root"))) is None


def test_a_damaged_document_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"root": "0x12", "found": 7}')
    assert CheckingStore(tmp_path).find(checked().name) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckingStore(tmp_path)
    for number in range(KEPT_BATCHES + 2):
        (tmp_path / f"{number}.json").write_text("{}")
    store.record(checked(KEPT_BATCHES + 5))
    kept = store.batches()
    assert len(kept) == KEPT_BATCHES
    assert kept[-1] == KEPT_BATCHES + 5
