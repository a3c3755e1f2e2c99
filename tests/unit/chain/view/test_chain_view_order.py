import random

from chain_fakes import History
from chain_histories import RUN, WORKER, full, state, viewed
from hypothesis import given, strategies as st

from muster.chain import ChainView
from muster.chain.abi import CONTRACTS, contract_abi, snake_case
from muster.chain.view import EVENT_MODULES, handler_of


def test_event_is_taken_in_once() -> None:
    history = full()
    view = viewed(history)
    before = state(view)
    for event in history.events:
        view.apply(event)
    assert state(view) == before


def test_event_without_handler_changes_nothing(history: History) -> None:
    before = viewed(history)
    history.add("EIP712DomainChanged")
    after = viewed(history)
    assert after.batches == before.batches
    assert after.contradictions == []


WITHOUT_EFFECT = [
    *("Approval", "BondReturned", "BondTaken", "ClaimAnnounced"),
    *("DoubleOutcomeProven", "DoubleSubmissionProven", "EIP712DomainChanged", "MisrecordProven"),
    "Transfer",
]


def test_every_event_but_these_has_one_handler() -> None:
    """For each new event add a function to the view, or a name to the list above."""
    found = [event.name for contract in CONTRACTS for event in contract_abi(contract).events]
    handled = [name for name in found if handler_of(name)]
    assert sorted({*found} - {*handled}) == WITHOUT_EFFECT
    functions = [name for module in EVENT_MODULES for name in vars(module) if name[:3] == "on_"]
    assert sorted(functions) == sorted(f"on_{snake_case(name)}" for name in handled)


@given(st.integers(0, 30))
def test_rewinding_and_applying_again_gives_the_same_view(block: int) -> None:
    history = full()
    view = viewed(history)
    view.rewind(block)
    assert all(event.block_number <= block for event in view._events)
    for event in history.events:
        if event.block_number > block:
            view.apply(event)
    assert state(view) == state(viewed(history))


@given(st.integers(0, 30))
def test_rewound_view_is_the_view_of_what_stands(block: int) -> None:
    history = full()
    view = viewed(history)
    view.rewind(block)
    standing = History([event for event in history.events if event.block_number <= block])
    assert state(view) == state(viewed(standing))


def test_other_branch_replaces_what_was_rewound() -> None:
    history = full()
    view = viewed(history)
    view.rewind(2)
    standing = [event for event in history.events if event.block_number <= 2]
    branch = History(standing, block=2, log_index=standing[-1].log_index)
    more = {"run_id": RUN, "owner": WORKER, "amount": 5, "active": 1005}
    branch.add("Deposited", **more)
    view.apply(branch.events[-1])
    assert view.runs[RUN].members[WORKER].active_wei == 1005
    assert list(view.workers) == [WORKER]
    assert view.contradictions == []


@given(st.integers(0, 2**32), st.integers(0, 100))
def test_view_takes_any_subset_in_any_order_without_raising(seed: int, share: int) -> None:
    """Even a reader that starts late or an endpoint that lies never stops a follower."""
    rng = random.Random(seed)
    events = [event for event in full().events if rng.randrange(100) < share]
    rng.shuffle(events)
    view, history = ChainView(), History()
    for event in events:
        view.apply(history.add(event.name, **event.args))
    assert view.training_stream(RUN) is not None


def test_recent_blocks_are_those_with_events() -> None:
    history = full()
    blocks = viewed(history).recent_blocks()
    assert [b.number for b in blocks] == sorted({e.block_number for e in history.events})
    assert blocks[-1].hash == history.events[-1].block_hash


def test_recent_blocks_are_bounded() -> None:
    history = History()
    for i in range(300):
        deposited = {"run_id": RUN, "owner": WORKER, "amount": 1, "active": i + 1}
        history.add("Deposited", **deposited)
    blocks = viewed(history).recent_blocks()
    assert len(blocks) == 256
    assert blocks[-1].number == history.block


def test_empty_view_has_no_block() -> None:
    view = ChainView()
    assert (view.block_number, view.recent_blocks()) == (None, [])
    view.rewind(0)
    assert view.workers == {}
