"""What operations cost as transactions on Anvil: the goals that issue and design set."""

import asyncio

import pytest
from scripts import load_script

LIMITS = {
    "onboard": 260_000,
    "commit_batch": 85_000,
    "post_outcomes_1": 85_000,
    "per_rollout_1024": 250,
    "per_rollout_256": 800,
    "execute_fraud": 140_000,
    "commit_vote": 60_000,
    "reveal_vote": 70_000,
    "claim_first": 97_000,
    "claim_one": 96_000,
    "claim_further": 20_000,
    "request_unbond": 75_000,
    "withdraw": 60_000,
}


@pytest.fixture(scope="module")
def gas() -> dict[str, int]:
    measured, _ = asyncio.run(load_script("benchmarks/chain/gas_network.py").measure())
    return dict(measured)


def test_operations_cost_no_more_than_their_goals(gas: dict[str, int]) -> None:
    dear = {name: gas[name] for name, limit in LIMITS.items() if gas[name] > limit}
    assert dear == {}
