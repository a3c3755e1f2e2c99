import pytest
from pydantic import ValidationError

from muster.chain.abi import contract_abi
from muster.deploy import BOUNDS, PROFILES, DeployParameters
from muster.deploy.parameters import FAUCET_CHAIN_ID
from muster.protocol.ids import to_address

ACCOUNT, OTHER = to_address(b"\x01" * 20), to_address(b"\x02" * 20)
WINDOWS = {
    "outcome_deadline_s": 60,
    "challenge_window_s": 3,
    "vote_commit_s": 6,
    "vote_reveal_s": 4,
    "slash_pause_s": 7,
}


def test_supply_and_insurance_go_to_the_deploying_account_unless_given() -> None:
    assert DeployParameters().owner_of(ACCOUNT) == ACCOUNT
    assert DeployParameters().insurance_of(ACCOUNT) == ACCOUNT
    assert DeployParameters(owner=OTHER).insurance_of(ACCOUNT) == OTHER
    assert DeployParameters(insurance=OTHER).insurance_of(ACCOUNT) == OTHER
    assert DeployParameters(insurance=OTHER).owner_of(ACCOUNT) == ACCOUNT


def test_parameters_may_be_demo_friendly() -> None:
    assert DeployParameters(**WINDOWS, unbonding_s=94).judgement_s == 93  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({**WINDOWS, "unbonding_s": 93}, "unbonding_s 93 is below 94: it must outlast"),
        ({**WINDOWS, "claim_period_s": 96}, "claim_period_s 96 is below 97: it must outlast"),
        ({**WINDOWS, "change_delay_s": 92}, "change_delay_s 92 is below 93: it must outlast"),
        ({**WINDOWS, "slash_cooldown_s": 2}, "pauses would reopen what is final"),
        ({"slash_pause_s": 0}, "slash_pause_s 0 is below 1: it must take time"),
        ({"insurance_ppm": 600_000, "reporter_ppm": 500_000}, "more than the whole"),
        ({"insurance_ppm": 1_000_001}, "insurance_ppm 1000001 is above 1000000: it is a share"),
        ({"required_worker_stake": -1}, "required_worker_stake -1 is below 0"),
        ({"initial_supply": 2**88}, "is above .*holds less than 2\\^88 wei"),
        ({"required_worker_stake": 2**88}, "is above .*holds less than 2\\^88 wei"),
        ({"jury_size": 65}, "jury_size 65 is above 64: .*a draw ends"),
        ({"jury_size": 0}, "jury_size 0 is below 1: a case without jurors"),
        ({"vote_commit_s": 1}, "vote_commit_s 1 is below 2: a jury is drawn in the first half"),
        ({"bond": 2, "juror_fee": 1}, "juror_fee 1 for 3 jurors is more than a bond of 2"),
        ({"insurance": "0x12"}, "account address"),
        ({"challenge_windows": 1}, "challenge_windows"),
    ],
)
def test_parameters_that_no_deployment_survives_are_refused(
    values: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        DeployParameters.model_validate(values)


def test_every_number_has_a_bound_and_a_reason() -> None:
    numbers = set(DeployParameters.model_fields) - {"owner", "insurance"}
    assert set(BOUNDS) == numbers
    assert all(bound.least <= bound.most and bound.reason for bound in BOUNDS.values())


@pytest.mark.parametrize("name", PROFILES)
def test_defaults_of_a_profile_are_within_its_bounds(name: str) -> None:
    profile = PROFILES[name]
    assert profile.problem(DeployParameters(**profile.defaults)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("testnet", {"challenge_window_s": 599}, "challenge_window_s 599 is below 600: people"),
        ("mainnet", {"challenge_window_s": 86_399}, "challenge_window_s 86399 is below 86400"),
        ("mainnet", {"required_worker_stake": 0}, "what is not staked cannot be slashed"),
        ("mainnet", {"unbonding_s": 61 * 86_400}, "is above 5184000: money waits for it"),
    ],
)
def test_profile_refuses_what_is_unwise_there(
    name: str, values: dict[str, int], problem: str
) -> None:
    profile = PROFILES[name]
    parameters = DeployParameters(**{**profile.defaults, **values})  # type: ignore[arg-type]
    assert problem in (profile.problem(parameters) or "")
    assert PROFILES["dev"].problem(parameters) is None


@pytest.mark.parametrize(
    ("window", "cooldown", "expected"), [(3, None, 7), (9, None, 9), (3, 3, 3), (3, 50, 50)]
)
def test_pauses_are_a_challenge_window_apart_at_least(
    window: int, cooldown: int | None, expected: int
) -> None:
    parameters = DeployParameters(
        challenge_window_s=window, slash_pause_s=7, slash_cooldown_s=cooldown
    )
    assert parameters.pause_distance_s == expected


def test_only_the_development_profile_has_a_faucet_and_only_its_chain() -> None:
    assert [name for name, profile in PROFILES.items() if profile.has_faucet] == ["dev"]
    # PUSH2 of the chain's number is in the token's code, which compares the block's with it.
    assert b"\x61" + FAUCET_CHAIN_ID.to_bytes(2, "big") in contract_abi("MusterToken").runtime
