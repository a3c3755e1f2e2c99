"""Tickets: a valid one, and a hostile twin for every reason to refuse."""

import pytest
from hypothesis import given, strategies as st
from worlds.client_world import NOW, OTHER_KEY, make_terms, make_ticket, sign_ticket

from muster.client.tickets import MAX_TICKET_LIFE_S, TicketFault, lease_fault, ticket_fault
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, RunId, Step, to_address


def test_ticket_of_the_orchestrator_holds() -> None:
    ticket = make_ticket()
    assert ticket_fault(ticket, sign_ticket(ticket), make_terms()) is None
    assert lease_fault(ticket, sign_ticket(ticket), make_terms(), now=NOW, signed=None) is None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"run_id": RunId(8)}, TicketFault.RUN),
        ({"worker": to_address(bytes(19) + b"\1")}, TicketFault.WORKER),
        ({"step": Step(0)}, TicketFault.STEP),
        ({"policy_version": PolicyVersion(4)}, TicketFault.POLICY_UNKNOWN),
        ({"policy_root": keccak(b"another")}, TicketFault.POLICY_ROOT),
        ({"beacon": keccak(b"another")}, TicketFault.BEACON),
    ],
)
def test_ticket_is_refused_when_the_chain_says_otherwise(
    changes: dict[str, object], fault: TicketFault
) -> None:
    ticket = make_ticket(**changes)
    assert ticket_fault(ticket, sign_ticket(ticket), make_terms()) is fault


def test_ticket_is_refused_when_signed_by_somebody_else_or_nobody() -> None:
    ticket = make_ticket()
    for signature in (
        sign_ticket(ticket, OTHER_KEY),
        bytes(65),
        b"",
        sign_ticket(make_ticket(index=1)),
    ):
        assert ticket_fault(ticket, signature, make_terms()) is TicketFault.SIGNATURE


@pytest.mark.parametrize("offset", [-1, 0, MAX_TICKET_LIFE_S + 1, 2**62])
def test_lease_is_refused_when_its_deadline_is_over_or_absurd(offset: int) -> None:
    ticket = make_ticket(deadline=NOW + offset)
    fault = lease_fault(ticket, sign_ticket(ticket), make_terms(), now=NOW, signed=None)
    assert fault is TicketFault.DEADLINE


def test_lease_of_a_signed_slot_is_refused_on_other_terms_only() -> None:
    ticket = make_ticket(deadline=NOW + 700)
    signature = sign_ticket(ticket)
    same, other = make_ticket(), make_ticket(policy_version=PolicyVersion(2))
    assert lease_fault(ticket, signature, make_terms(), now=NOW, signed=same) is None
    fault = lease_fault(ticket, signature, make_terms(), now=NOW, signed=other)
    assert fault is TicketFault.SLOT_SIGNED


@given(st.binary(max_size=80))
def test_no_signature_bytes_raise_or_pass(signature: bytes) -> None:
    assert ticket_fault(make_ticket(), signature, make_terms()) is TicketFault.SIGNATURE
