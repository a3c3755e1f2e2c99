"""Cases before a jury: the parties, the recorded outcomes, a case and its batch."""

from typing import Any

from muster.chain import BatchView, CaseView, ClaimView, CourtTerms
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import Hash32, to_address
from muster.protocol.jury import Ruling
from muster.protocol.merkle import batch_root
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from worlds.client_world import ORCHESTRATOR_KEY, RUN, make_submission, make_ticket

ME, PEER, STRANGER = (to_address(keccak(name)[:20]) for name in (b"me", b"peer", b"stranger"))
TERMS = CourtTerms(
    bond=10 * 10**18,
    juror_fee=2 * 10**18,
    draw_delay=1,
    jury_size=3,
    commit_time=80,
    reveal_time=40,
    wrong_verdict_ppm=100_000,
    absence_ppm=20_000,
)
OPENED_AT = 5000
ACCEPTED = Ruling(Verdict.ACCEPTED, Reason.NONE)
REJECTED = Ruling(Verdict.REJECTED, Reason.SCHEMA)
FRAUD = Ruling(Verdict.FRAUD, Reason.WRONG_REWARD)
SUBMISSION = make_submission(make_ticket(), [])
RECORD = OutcomeRecord(
    5,
    SUBMISSION.step,
    SUBMISSION.index,
    SUBMISSION.policy_version,
    SUBMISSION.file_hash,
    SUBMISSION.rollouts,
    SUBMISSION.units,
    REJECTED.verdict,
    REJECTED.reason,
)
LEAF = RECORD.leaf(1, 0)


def make_case(**changes: Any) -> CaseView:
    values: dict[str, Any] = {
        "case_id": LEAF,
        "number": 4,
        "run_id": RUN,
        "batch_id": 1,
        "position": 0,
        "worker": SUBMISSION.worker,
        "recorded": REJECTED.number,
        "draw_block": 100,
        "places": 5,
        "opened_at": OPENED_AT,
        "opened_tx": "0x",
        "claims": [ClaimView(STRANGER, ACCEPTED.number, SUBMISSION, b"", (), "0x")],
    }
    return CaseView(**values | changes)


def make_view_batch(leaves: list[Hash32], records: list[OutcomeRecord] | None = None) -> BatchView:
    return BatchView(
        batch_id=1,
        run_id=RUN,
        root=batch_root(leaves),
        count=len(leaves),
        units=1,
        price_per_unit=1,
        terms=1,
        committed_at=1,
        block_number=51,
        tx_hash="0x",
        orchestrator=address_of(ORCHESTRATOR_KEY),
        records=records,
    )
