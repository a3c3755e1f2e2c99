"""The work that a relay's room takes: named by the chain with a bond, with valid proofs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from worlds import client_world
from worlds.client_chain import make_batch

from muster.api import BatchEntry
from muster.chain import BatchStatus, LeasedWork
from muster.client.relay import NamedWork
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import to_address
from muster.protocol.messages import Submission, Ticket

TICKET = client_world.make_ticket()
SUBMISSION = client_world.make_submission(TICKET, [], file_hash=keccak(b"file"))
OTHER = replace(SUBMISSION, index=5, file_hash=keccak(b"other"))
LEAF = SUBMISSION.leaf()


def own(**changes: Any) -> Any:
    work = LeasedWork(SUBMISSION, b"", TICKET, b"")
    return replace(make_batch(1, [SUBMISSION]), work=work, **changes)


def case(**changes: Any) -> Any:
    claim = SimpleNamespace(submission=SUBMISSION)
    values = {"run_id": client_world.RUN, "closed": False, "claims": [claim], "batch_id": 1}
    return SimpleNamespace(**values | changes)


async def guard_of(batch: Any, *cases: Any) -> NamedWork:
    nodes = [(1, address_of(client_world.NODE_KEY))]
    view: Any = SimpleNamespace(
        batches={1: batch},
        cases=dict(enumerate(cases)),
        workers={client_world.WORKER: SimpleNamespace(nodes=nodes)},
    )
    guard = NamedWork(view, client_world.RUN, client_world.DOMAIN)
    assert guard.worker_of_work(LEAF) is None
    await guard.on_change([])
    return guard


@pytest.mark.parametrize(
    ("batch", "cases", "expected"),
    [
        (own(), [], True),
        (own(status=BatchStatus.WITHHELD), [], True),
        (own(status=BatchStatus.JUDGED), [], False),
        (own(voided_tx="0x"), [], False),
        (own(run_id=client_world.RUN + 1), [], False),
        (make_batch(1, [SUBMISSION, OTHER]), [], False),
        (make_batch(1, [SUBMISSION, OTHER]), [case()], True),
        (make_batch(1, [SUBMISSION, OTHER]), [case(closed=True)], False),
        (make_batch(1, [SUBMISSION, OTHER]), [case(run_id=client_world.RUN + 1)], False),
        (own(status=BatchStatus.JUDGED), [case()], True),
    ],
)
async def test_work_is_named_while_a_bond_is_behind_it(
    batch: Any, cases: list[Any], expected: bool
) -> None:
    guard = await guard_of(batch, *cases)
    worker = client_world.WORKER if expected else None
    assert guard.worker_of_work(LEAF) == worker
    assert guard.worker_of_file(SUBMISSION.file_hash) == worker
    assert guard.worker_of_work(OTHER.leaf()) is None
    assert guard.worker_of_file(OTHER.file_hash) is None


@pytest.mark.parametrize("split_from", [None, 0])
async def test_a_file_is_of_the_worker_that_committed_it_first(split_from: int | None) -> None:
    thief = replace(SUBMISSION, worker=to_address(b"\x11" * 20))
    stolen = replace(make_batch(2, [thief]), work=LeasedWork(thief, b"", TICKET, b""))
    mine = replace(own(), batch_id=1 if split_from is None else 3, split_from=split_from)
    view: Any = SimpleNamespace(batches={0: mine, 1: stolen}, cases={}, workers={})
    guard = NamedWork(view, client_world.RUN, client_world.DOMAIN)
    await guard.on_change([])
    assert guard.worker_of_file(SUBMISSION.file_hash) == client_world.WORKER
    assert guard.worker_of_work(thief.leaf()) == thief.worker


def document(
    submission: Submission = SUBMISSION,
    ticket: Ticket | None = TICKET,
    *,
    node: bytes = client_world.NODE_KEY,
    orchestrator: bytes | None = None,
) -> bytes:
    signed = client_world.sign_ticket(ticket, orchestrator) if ticket and orchestrator else None
    entry = BatchEntry(
        submission=submission,
        signature=client_world.sign_submission(submission, node),
        ticket=ticket,
        ticket_signature=signed or (client_world.sign_ticket(ticket) if ticket else None),
        received_at=1,
    )
    return entry.model_dump_json().encode()


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        (b"{", "it does not parse"),
        (document(OTHER), "it is another submission"),
        (document(ticket=None), "there is no ticket"),
        (document(orchestrator=client_world.OTHER_KEY), "not the run's orchestrator's"),
        (document(ticket=client_world.make_ticket(index=9)), "another slot or policy"),
        (document(ticket=client_world.make_ticket(policy_version=9)), "another slot or policy"),
        (document(node=client_world.OTHER_KEY), "not signed by the worker's node"),
    ],
)
async def test_proofs_that_do_not_hold_are_refused(forged: bytes, why: str) -> None:
    fault = (await guard_of(own())).work_fault(LEAF, forged)
    assert fault is not None
    assert why in fault


async def test_work_is_not_made_late_by_an_earlier_ticket_of_its_slot() -> None:
    guard = await guard_of(own())
    later = client_world.make_ticket(deadline=TICKET.deadline + 60)
    assert guard.work_fault(LEAF, document()) is None
    assert guard.work_fault(LEAF, document(ticket=later)) is None
    assert "later deadline" in (guard.work_fault(LEAF, document()) or "")
