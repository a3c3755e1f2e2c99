"""Who sat on a jury and had an interest in its case that the contracts' draw does not look at."""

from types import SimpleNamespace
from typing import Any

import pytest

from muster.chain import BatchView, CaseView, ClaimView
from muster.client.audit.disputes import juries
from muster.client.audit.ledger import Draw, Ledger
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, PolicyVersion, RunId, Step, to_address
from muster.protocol.messages import Submission

RUN = RunId(1)
NAMED, HOLDER, NODE, EARLIER_NODE, COMMITTER, STRANGER, OWNER = (
    to_address(bytes([number]) * 20) for number in range(1, 8)
)
UNSEEN: Any = SimpleNamespace(draw_hashes={}, parameters=None)


def work_of(worker: Address) -> Submission:
    return Submission(RUN, worker, Step(1), 0, PolicyVersion(0), keccak(b"file"), 8, 100)


def judged_by(*jurors: Address) -> Ledger:
    """A case that opened about the work of NAMED; once its jury was drawn, a claim proved that the
    batch holds the work of HOLDER.
    """
    held = work_of(HOLDER)
    batch = BatchView(1, RUN, held.leaf(), 1, 100, 1, 1, 1, 1, "0x", orchestrator=COMMITTER)
    claims = [
        ClaimView(STRANGER, 1, work, b"", (), "0x", claimed_at=at)
        for at, work in [(10, work_of(NAMED)), (20, held)]
    ]
    case = CaseView(keccak(b"case"), 7, RUN, 1, 0, NAMED, 1, 5, 3, 10, "0x", claims, jurors)
    ledger = Ledger()
    known: Any = {
        NAMED: SimpleNamespace(nodes=[]),
        HOLDER: SimpleNamespace(nodes=[(1, EARLIER_NODE), (2, NODE)]),
    }
    runs: Any = {RUN: SimpleNamespace(run_id=RUN, owner=OWNER, seats={})}
    ledger.workers, ledger.runs = known, runs
    ledger.batches, ledger.cases = {1: batch}, {case.case_id: case}
    ledger.draws[case.case_id] = Draw((), 5, NAMED)
    return ledger


@pytest.mark.parametrize(
    ("juror", "interest"),
    [
        (HOLDER, "judged work of its own"),
        (NODE, "judged work of its own"),
        (EARLIER_NODE, "judged work of its own"),
        (COMMITTER, "judged work that it committed"),
    ],
)
def test_juror_with_an_interest_that_no_draw_looks_at_is_noted(
    juror: Address, interest: str
) -> None:
    check = juries(judged_by(STRANGER, juror), UNSEEN)
    assert check.passed
    assert f"the jury of case 7: {juror} {interest}" in check.notes
    assert not any(STRANGER in note for note in check.notes)


def test_juror_that_the_draw_had_to_pass_over_is_a_contradiction() -> None:
    check = juries(judged_by(STRANGER, NAMED), UNSEEN)
    assert [each.detail for each in check.contradictions] == [
        f"{NAMED} judged a case of its own run"
    ]
