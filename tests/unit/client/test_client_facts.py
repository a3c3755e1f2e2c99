"""How workers stood in earlier blocks, and what a ticket must be."""

from __future__ import annotations

from typing import Any

import pytest
from client_chain import make_view
from client_world import BEACON, DOMAIN, NODE_KEY, OTHER_KEY, ROOT, RUN, VERSION, WORKER

from muster.chain import Event, WorkerStatus
from muster.client.facts import HistoryView, Standing, ticket_terms
from muster.client.tickets import KnownPolicy
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion

NODE, NEW_NODE = address_of(NODE_KEY), address_of(OTHER_KEY)


def make_event(name: str, block: int, **args: Any) -> Event:
    return Event(
        contract="WorkerRegistry",
        name=name,
        args={"worker": WORKER, **args},
        block_number=block,
        block_hash=keccak(bytes([block])),
        block_timestamp=block,
        log_index=0,
        tx_hash="0x",
    )


HISTORY = [
    make_event("WorkerRegistered", 10, node=NODE, worker_id=1, active_from=12),
    make_event("NodeRotated", 20, old_node=NODE, new_node=NEW_NODE),
    make_event("WorkerJailed", 30, offence=keccak(b"o"), until=31),
    make_event("WorkerUnjailed", 40, active_from=42),
    make_event("WorkerBanned", 50, offence=keccak(b"p")),
]


@pytest.fixture
def view() -> HistoryView:
    filled = HistoryView()
    for event in HISTORY:
        filled.apply(event)
    return filled


@pytest.mark.parametrize(
    ("before", "standing"),
    [
        (10, None),
        (11, Standing(1, NODE, WorkerStatus.ACTIVE, 12)),
        (20, Standing(1, NODE, WorkerStatus.ACTIVE, 12)),
        (21, Standing(1, NEW_NODE, WorkerStatus.ACTIVE, 12)),
        (31, Standing(1, NEW_NODE, WorkerStatus.JAILED, 12)),
        (41, Standing(1, NEW_NODE, WorkerStatus.ACTIVE, 42)),
        (50, Standing(1, NEW_NODE, WorkerStatus.ACTIVE, 42)),
        (51, Standing(1, NEW_NODE, WorkerStatus.BANNED, 42)),
    ],
)
def test_standing_is_that_of_the_block_asked_for(
    view: HistoryView, before: int, standing: Standing | None
) -> None:
    assert view.standing(WORKER, before=before) == standing


def test_later_events_change_nothing_about_earlier_blocks() -> None:
    view = HistoryView()
    seen: dict[int, Standing | None] = {}
    for event in HISTORY:
        view.apply(event)
        seen[event.block_number + 1] = view.standing(WORKER, before=event.block_number + 1)
    assert seen == {block: view.standing(WORKER, before=block) for block in seen}


def test_rewound_events_are_forgotten(view: HistoryView) -> None:
    view.rewind(35)
    assert view.standing(WORKER, before=99) == Standing(1, NEW_NODE, WorkerStatus.JAILED, 12)
    view.rewind(5)
    assert view.standing(WORKER, before=99) is None


def test_stranger_has_no_standing(view: HistoryView) -> None:
    assert view.standing(NODE, before=99) is None


def test_worker_is_active_from_its_activation_block_while_its_status_is() -> None:
    active = Standing(1, NODE, WorkerStatus.ACTIVE, 12)
    assert [active.is_active(block) for block in (11, 12, 13)] == [False, True, True]
    assert not Standing(1, NODE, WorkerStatus.EXITING, 12).is_active(13)


def test_ticket_terms_are_the_chains() -> None:
    terms = ticket_terms(make_view(), RUN, DOMAIN, VERSION, (WORKER, 10), NODE)
    assert terms.policies == {VERSION: KnownPolicy(ROOT, BEACON)}
    assert (terms.worker, terms.active_from, terms.run_id) == (WORKER, 10, RUN)
    assert terms.orchestrator == NODE
    unknown = ticket_terms(make_view(), RUN, DOMAIN, PolicyVersion(9), (WORKER, 10), NODE)
    assert unknown.policies == {}
