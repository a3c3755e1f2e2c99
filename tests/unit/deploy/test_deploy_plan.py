from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from muster.chain.abi import CONTRACTS, FACTORY, contract_abi
from muster.deploy import DeployParameters, DeployPlan, plan
from muster.protocol.encoding import keccak
from muster.protocol.ids import to_address

ACCOUNT, OTHER = to_address(b"\x01" * 20), to_address(b"\x02" * 20)
PLAN = DeployPlan("a network", ACCOUNT, DeployParameters())


def test_every_contract_is_deployed_once_with_the_vault_last() -> None:
    assert sorted(plan.ORDER) == sorted(CONTRACTS)
    assert plan.ORDER[-1] == "StakeVault"


def test_the_same_plan_has_the_same_addresses_however_its_owner_is_given() -> None:
    same = replace(PLAN, parameters=DeployParameters(owner=ACCOUNT, insurance=ACCOUNT))
    assert same.addresses == PLAN.addresses


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, name="another network"),
        replace(PLAN, account=OTHER),
        replace(PLAN, parameters=DeployParameters(jail_time_s=61)),
        replace(PLAN, parameters=DeployParameters(owner=OTHER)),
        replace(PLAN, parameters=DeployParameters(insurance=OTHER)),
    ],
    ids=["name", "account", "number", "owner", "insurance"],
)
def test_another_plan_has_other_addresses(other: DeployPlan) -> None:
    assert not set(other.addresses.values()) & set(PLAN.addresses.values())


def test_other_code_has_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    real, salt = contract_abi("StakeVault"), PLAN.salt
    altered = replace(real, bytecode=real.bytecode + b"\0")
    monkeypatch.setattr(
        "muster.deploy.plan.contract_abi",
        lambda name: altered if name == "StakeVault" else contract_abi(name),
    )
    assert DeployPlan("a network", ACCOUNT, DeployParameters()).salt != salt


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=20, max_size=20))
def test_addresses_agree_with_web3s(salt: bytes, account: bytes) -> None:
    from web3.utils.address import get_create2_address, get_create_address

    code = contract_abi(FACTORY).creation_code((to_address(account),))
    factory = plan.factory_address(salt, to_address(account))
    hexed = "0x" + salt.hex()
    assert factory == get_create2_address(plan.PROXY, hexed, "0x" + code.hex())  # type: ignore[arg-type]
    # A contract's nonce begins at 1.
    first = get_create_address(factory, 1)  # type: ignore[arg-type]
    assert next(iter(plan.created_addresses(factory).values())) == first


def test_creation_code_fits_the_chains_limit() -> None:
    for name in plan.ORDER:
        words = sum(len(a) if isinstance(a, tuple) else 1 for a in PLAN.arguments[name])
        code = PLAN.creation_code(name)
        assert len(code) == len(contract_abi(name).bytecode) + 32 * words
        assert len(code) <= 49_152  # EIP-3860


def test_contracts_are_given_one_anothers_addresses() -> None:
    at, arguments = PLAN.addresses, PLAN.arguments
    assert arguments["RunRegistry"][0] == at["StakeVault"]
    assert arguments["WorkerRegistry"][1:6] == (
        at["StakeVault"],
        at["RunRegistry"],
        at["ContributionLedger"],
        at["DisputeCourt"],
        at["FaultCourt"],
    )
    assert arguments["RewardEscrow"][3] == at["ContributionLedger"]
    assert arguments["DisputeCourt"][0][3] == at["JuryPool"]


def test_every_immutable_has_an_expected_value() -> None:
    expected = {*plan.CONTRACT_OF, *plan.PARAMETER_OF, "insurance", *plan.domain_values(1, ACCOUNT)}
    for name in CONTRACTS:
        assert set(contract_abi(name).immutables) <= expected, name


def test_code_on_chain_differs_by_chain_only_in_what_names_it() -> None:
    ours, theirs = PLAN.codes_on(1), PLAN.codes_on(2)
    ledger, vault = PLAN.addresses["ContributionLedger"], PLAN.addresses["StakeVault"]
    assert ours[vault] == theirs[vault]
    assert ours[ledger] != theirs[ledger]


def test_file_shows_what_the_addresses_follow_from() -> None:
    shown = PLAN.shown()
    assert (shown["name"], shown["deployer"], shown["owner"]) == ("a network", ACCOUNT, ACCOUNT)
    fields = {k: v for k, v in shown.items() if k in DeployParameters.model_fields}
    again = DeployPlan(str(shown["name"]), ACCOUNT, DeployParameters.model_validate(fields))
    assert again.addresses == PLAN.addresses


def test_short_strings_are_kept_with_their_length() -> None:
    values = plan.domain_values(1, ACCOUNT)
    assert values["name"].hex() == b"Muster".hex() + "00" * 25 + "06"
    assert values["hashedVersion"] == keccak(b"1")
