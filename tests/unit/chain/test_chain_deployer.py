from __future__ import annotations

import pytest
from chain_fakes import DEPLOYMENT, address
from eth_utils.address import to_checksum_address
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sender_fakes import KEY, Pool

from muster.chain import DeployParameters, deploy_contracts, deployer
from muster.chain.abi import CONTRACTS, contract_abi
from muster.chain.deployer import ORDER, constructor_arguments, created_address
from muster.protocol.errors import ChainError
from muster.protocol.ids import to_address


@pytest.mark.parametrize(
    ("nonce", "expected"),
    [
        # The example of the yellow paper's community, checked on mainnet many times.
        (0, "0xcd234a471b72ba2f1ccf0a70fcaba648a5eecd8d"),
        (1, "0x343c43a37d37dff08ae8c4a11544c718abb4fcf8"),
        (2, "0xf778b86fa74e846c4f0a1fbd1335fe81c00a0c91"),
        (3, "0xfffd933a0bc612844eaf0c6fe3e5b8e9b6c1d19c"),
    ],
)
def test_created_address_is_what_create_computes(nonce: int, expected: str) -> None:
    deployer = to_address("0x6ac7ea33f8831ea9dcc53393aaa88b25a785dbf0")
    assert created_address(deployer, nonce) == to_checksum_address(expected)


@given(st.integers(0, 2**64 - 2))
def test_created_address_agrees_with_the_rlp_library(nonce: int) -> None:
    import rlp  # type: ignore[import-untyped]

    from muster.protocol.encoding import keccak

    encoded = rlp.encode([bytes.fromhex(address(7)[2:]), nonce])
    assert created_address(address(7), nonce) == to_address(keccak(encoded)[12:])


def test_every_contract_is_deployed_once_with_the_vault_last() -> None:
    assert sorted(ORDER) == sorted(CONTRACTS)
    assert ORDER[-1] == "StakeVault"


def test_constructor_arguments_fit_the_contracts() -> None:
    arguments = constructor_arguments(DEPLOYMENT.contracts, DeployParameters(), address(1))
    for contract in CONTRACTS:
        code = contract_abi(contract).creation_code(arguments[contract])
        words = sum(len(a) if isinstance(a, tuple) else 1 for a in arguments[contract])
        assert len(code) == len(contract_abi(contract).bytecode) + 32 * words


def test_contracts_are_given_one_anothers_addresses() -> None:
    at = DEPLOYMENT.contracts
    arguments = constructor_arguments(at, DeployParameters(), address(1))
    assert arguments["RunRegistry"][0] == at["StakeVault"]
    assert arguments["WorkerRegistry"][1:5] == (
        at["StakeVault"],
        at["ContributionLedger"],
        at["DisputeCourt"],
        at["FaultCourt"],
    )
    assert arguments["RewardEscrow"][3] == at["ContributionLedger"]


@pytest.mark.parametrize(("given_", "expected"), [(None, address(1)), (address(2), address(2))])
def test_insurance_goes_to_the_deployer_unless_given(given_: str, expected: str) -> None:
    parameters = DeployParameters(insurance=given_)  # type: ignore[arg-type]
    arguments = constructor_arguments(DEPLOYMENT.contracts, parameters, address(1))
    assert arguments["StakeVault"][5] == expected


def test_parameters_may_be_demo_friendly() -> None:
    parameters = DeployParameters(
        challenge_window_s=3,
        outcome_deadline_s=60,
        vote_commit_s=6,
        vote_reveal_s=4,
        slash_pause_s=7,
        unbonding_s=81,
    )
    assert parameters.judgement_s == 80


@pytest.mark.parametrize(
    ("window", "cooldown", "expected"), [(3, None, 7), (9, None, 9), (3, 3, 3), (3, 50, 50)]
)
def test_pauses_are_a_challenge_window_apart_at_least(
    window: int, cooldown: int | None, expected: int
) -> None:
    parameters = DeployParameters(
        challenge_window_s=window, slash_pause_s=7, slash_cooldown_s=cooldown
    )
    arguments = constructor_arguments(DEPLOYMENT.contracts, parameters, address(1))
    assert arguments["RunRegistry"][4:] == (7, expected)


SHORT = {
    "outcome_deadline_s": 60,
    "challenge_window_s": 3,
    "vote_commit_s": 6,
    "vote_reveal_s": 4,
    "slash_pause_s": 7,
}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({**SHORT, "unbonding_s": 80}, "unbonding_s 80 is below 81: it must outlast"),
        ({**SHORT, "claim_period_s": 83}, "claim_period_s 83 is below 84: it must outlast"),
        ({**SHORT, "change_delay_s": 79}, "change_delay_s 79 is below 80: it must outlast"),
        ({**SHORT, "slash_cooldown_s": 2}, "pauses would reopen what is final"),
        ({"slash_pause_s": 0}, "greater than or equal"),
        ({"insurance_ppm": 600_000, "reporter_ppm": 500_000}, "more than the whole"),
        ({"insurance_ppm": 1_000_001}, "less than or equal"),
        ({"required_worker_stake": -1}, "greater than or equal"),
        ({"insurance": "0x12"}, "account address"),
        ({"challenge_windows": 1}, "challenge_windows"),
    ],
)
def test_parameters_that_no_deployment_survives_are_refused(
    values: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        DeployParameters.model_validate(values)


async def test_deployment_at_an_unexpected_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool()
    pool.methods["eth_getTransactionReceipt"] = lambda tx: {
        **pool.mined[tx],
        "contractAddress": address(99),
    }
    monkeypatch.setattr(deployer, "Rpc", lambda _url: pool.rpc)
    with pytest.raises(ChainError, match="MusterToken was deployed at") as error:
        await deploy_contracts("http://node", KEY, DeployParameters())
    assert "same key" in str(error.value.hint)
