"""Workers' status in earlier blocks, and the rules for tickets."""

from typing import Any

import pytest
from worlds.client_chain import make_view
from worlds.client_world import BEACON, DOMAIN, NODE_KEY, OTHER_KEY, ROOT, RUN, VERSION, WORKER

from muster.chain import CheckpointView, Event, RunConfig, RunTerms, WorkerStatus
from muster.client.chain_facts import HistoryView, MemberAtBlock, ticket_terms
from muster.client.tickets import KnownPolicy
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, RunId

NODE, NEW_NODE = address_of(NODE_KEY), address_of(OTHER_KEY)


def make_event(name: str, block: int, contract: str = "WorkerRegistry", **args: Any) -> Event:
    return Event(
        contract=contract,
        name=name,
        args=args if contract == "RunRegistry" else {"worker": WORKER, **args},
        block_number=block,
        block_hash=keccak(bytes([block])),
        block_timestamp=block,
        log_index=len(args),
        tx_hash="0x",
    )


CONFIG = RunConfig(
    NODE, NODE, *(keccak(b"x"),) * 4, terms=RunTerms(1, 1, 1, 1), validators=(NEW_NODE,)
)
HISTORY = [
    make_event("RunCreated", 5, "RunRegistry", run_id=1, owner=NODE, config=CONFIG),
    make_event("WorkerRegistered", 10, worker_id=1),
    make_event("NodeBound", 11, node=NODE),
    make_event("WorkerJoined", 11, run_id=1, terms=1, active_from=13),
    make_event("NodeUnbound", 20, node=NODE),
    make_event("NodeBound", 20, node=NEW_NODE, extra=0),
    make_event("WorkerJailed", 30, run_id=1, escrow_id=keccak(b"o"), until=31),
    make_event("WorkerReturned", 40, run_id=1, terms=1, active_from=42),
    make_event("WorkerBanned", 50, run_id=1, escrow_id=keccak(b"p")),
]
FIRST = RunId(1)


@pytest.fixture
def view() -> HistoryView:
    filled = HistoryView()
    for event in HISTORY:
        filled.apply(event)
    return filled


@pytest.mark.parametrize(
    ("before", "standing"),
    [
        (11, None),
        (12, MemberAtBlock(1, NODE, WorkerStatus.ACTIVE, 13)),
        (20, MemberAtBlock(1, NODE, WorkerStatus.ACTIVE, 13)),
        (21, MemberAtBlock(1, NEW_NODE, WorkerStatus.ACTIVE, 13)),
        (31, MemberAtBlock(1, NEW_NODE, WorkerStatus.JAILED, 13)),
        (41, MemberAtBlock(1, NEW_NODE, WorkerStatus.ACTIVE, 42)),
        (50, MemberAtBlock(1, NEW_NODE, WorkerStatus.ACTIVE, 42)),
        (51, MemberAtBlock(1, NEW_NODE, WorkerStatus.BANNED, 42)),
    ],
)
def test_standing_is_that_of_the_block_asked_for(
    view: HistoryView, before: int, standing: MemberAtBlock | None
) -> None:
    assert view.standing(FIRST, WORKER, before=before) == standing


def test_later_events_change_nothing_about_earlier_blocks() -> None:
    view = HistoryView()
    seen: dict[int, MemberAtBlock | None] = {}
    for event in HISTORY:
        view.apply(event)
        seen[event.block_number + 1] = view.standing(FIRST, WORKER, before=event.block_number + 1)
    assert seen == {block: view.standing(FIRST, WORKER, before=block) for block in seen}


def test_rewound_events_are_forgotten(view: HistoryView) -> None:
    view.rewind(35)
    assert view.standing(FIRST, WORKER, before=99) == MemberAtBlock(
        1, NEW_NODE, WorkerStatus.JAILED, 13
    )
    view.rewind(5)
    assert view.standing(FIRST, WORKER, before=99) is None


def test_stranger_has_no_standing_and_nobody_has_one_in_another_run(view: HistoryView) -> None:
    assert view.standing(FIRST, NODE, before=99) is None
    assert view.standing(RunId(2), WORKER, before=99) is None
    assert view.contradictions == []


def test_worker_is_active_from_its_activation_block_while_its_status_is() -> None:
    active = MemberAtBlock(1, NODE, WorkerStatus.ACTIVE, 12)
    assert [active.is_active(block) for block in (11, 12, 13)] == [False, True, True]
    assert not MemberAtBlock(1, NODE, WorkerStatus.EXITING, 12).is_active(13)


def test_ticket_terms_are_the_chains() -> None:
    terms = ticket_terms(make_view(), RUN, DOMAIN, VERSION, NEW_NODE, NODE)
    assert terms.policies == {VERSION: KnownPolicy(ROOT, BEACON)}
    assert (terms.worker, terms.run_id, terms.orchestrator) == (NEW_NODE, RUN, NODE)
    unknown = ticket_terms(make_view(), RUN, DOMAIN, PolicyVersion(9), WORKER, NODE)
    assert unknown.policies == {}


@pytest.mark.parametrize(("published", "expected"), [(10, b"joined"), (12, b"published")])
def test_seeds_are_drawn_of_what_came_last(
    view: HistoryView, published: int, expected: bytes
) -> None:
    """A worker that joins after a policy was published could choose an address by its seeds."""
    member = view.member(FIRST, WORKER)
    assert member is not None
    member.joined_beacon = keccak(b"joined")
    checkpoint = CheckpointView(VERSION, ROOT, keccak(b"published"), published, 0, "0x")
    view.runs[FIRST].checkpoints[VERSION] = checkpoint
    terms = ticket_terms(view, FIRST, DOMAIN, VERSION, WORKER, NODE)
    assert terms.policies == {VERSION: KnownPolicy(ROOT, keccak(expected))}
