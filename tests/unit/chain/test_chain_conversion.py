from typing import Any

import pytest
from chain_fakes import address
from hypothesis import given, strategies as st

from muster.chain import PauseCause, RunConfig, RunTerms, StandingOutcome, WorkerStatus
from muster.chain.conversion import from_abi, to_abi
from muster.chain.structs import Member
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32, PolicyVersion
from muster.protocol.messages import OutcomeRecord, Reason, Verdict

HASH = Hash32(bytes(range(32)))
TERMS = (5, 10_000, 100_000, 2)
CONFIG = (address(1), address(2), HASH, HASH, HASH, HASH, TERMS, (address(3), address(4)))
RECORD = (7, 3, 0, 2, HASH, 4, 90, 4, 30)
STANDING = (RECORD, HASH, 1, 0, 1234, False)
MEMBER = (2, 50, 60, 0, 1, 0, 1)


def test_nested_structs_become_dataclasses() -> None:
    config = from_abi(RunConfig, CONFIG)
    assert config.terms == RunTerms(5, 10_000, 100_000, 2)
    assert config.validators == (address(3), address(4))
    assert to_abi(config) == CONFIG


def test_struct_with_enums_by_number_becomes_a_dataclass() -> None:
    standing = from_abi(StandingOutcome, STANDING)
    assert standing.outcome.verdict is Verdict(4)
    assert (standing.verdict, standing.reason) == (Verdict.ACCEPTED, Reason.NONE)
    assert isinstance(standing.outcome, OutcomeRecord)
    assert to_abi(standing) == STANDING


def test_enum_of_the_contracts_is_its_place_in_solidity() -> None:
    assert from_abi(Member, MEMBER).status is WorkerStatus.JAILED
    assert [to_abi(cause) for cause in PauseCause] == [0, 1, 2]


@given(st.sampled_from(WorkerStatus))
def test_enum_is_the_same_after_both_ways(status: WorkerStatus) -> None:
    assert WorkerStatus.of(status.number) is status


def test_plain_values_stay_what_they_are() -> None:
    for kind, value in ((int, 5), (bool, True), (Address, address(1)), (PolicyVersion, 3)):
        assert from_abi(kind, value) is value  # type: ignore[arg-type]


def test_sequences_become_tuples() -> None:
    assert from_abi(tuple[RunTerms, ...], (TERMS, TERMS)) == (RunTerms(*TERMS),) * 2
    assert from_abi(tuple[int, ...], [1, 2]) == (1, 2)
    assert to_abi([RunTerms(*TERMS), [1, b"x"]]) == (TERMS, (1, b"x"))


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (RunTerms, (1, 2, 3), "RunTerms has 4 fields, got 3"),
        (RunTerms, (1, 2, 3, 4, 5), "RunTerms has 4 fields, got 5"),
        (RunConfig, (*CONFIG[:6], TERMS[:2], CONFIG[7]), "RunTerms has 4 fields, got 2"),
        (Member, (5, *MEMBER[1:]), "WorkerStatus has no number 5"),
        (Member, (*MEMBER[:6], -1), "WorkerStatus has no number -1"),
        (StandingOutcome, (*STANDING[:2], 9, 0, 1234, False), "Verdict has no number 9"),
        (tuple[RunTerms, ...], (TERMS, TERMS[:1]), "RunTerms has 4 fields, got 1"),
    ],
)
def test_values_of_another_shape_are_refused(kind: Any, values: Any, named: str) -> None:
    with pytest.raises(EncodingError, match=named):
        from_abi(kind, values)


def test_reason_that_nobody_knows_keeps_its_number() -> None:
    reason = from_abi(StandingOutcome, ((*RECORD[:8], 250), *STANDING[1:])).outcome.reason
    assert (int(reason), reason.name) == (250, "UNKNOWN_250")
    assert from_abi(StandingOutcome, STANDING).outcome.reason is Reason(30)
