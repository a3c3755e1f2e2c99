"""What the contracts themselves say at the audited block, to compare the events' sums with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from muster.chain import Chain, ChainView, Deployment, Funds, StakeAccount
from muster.chain.abi import contract_abi
from muster.protocol.encoding import hex0x
from muster.protocol.errors import EncodingError, WrongChain
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, to_address

UNDISPUTED = 0xFE
"""What is left of a commitment's last byte without the bit that tells of challenges."""
ASKED_AT_ONCE = 2_000
"""Commitments asked for before the answers are compared."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the contracts say."""

    vault_wei: int
    """Tokens of StakeVault."""
    escrow_wei: int
    """Tokens of RewardEscrow."""
    stakes: Mapping[Address, StakeAccount]
    """Stake of every account that the events tell of, and of every validator."""
    runs: int
    """Runs of RunRegistry."""
    batches: int
    """Batches of ContributionLedger."""
    funds: Mapping[RunId, Funds] = field(default_factory=dict)
    """Money of each run the events tell of."""
    versions: Mapping[RunId, PolicyVersion | None] = field(default_factory=dict)
    """Newest policy version of each."""
    strange: frozenset[int] = frozenset()
    """Batches whose header is not the one that the events add up to."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Times that the ledger was built with, in seconds."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, amounts as text."""
        return {
            "vault_wei": str(self.vault_wei),
            "escrow_wei": str(self.escrow_wei),
            "stakes": {
                owner: [str(number) for number in astuple(account)]
                for owner, account in self.stakes.items()
            },
            "runs": self.runs,
            "batches": self.batches,
            "funds": {
                str(run): [str(funds.available_wei), str(funds.reserved_wei)]
                for run, funds in self.funds.items()
            },
            "versions": {str(run): version for run, version in self.versions.items()},
            "strange": sorted(self.strange),
            "parameters": dict(self.parameters),
        }

    @classmethod
    def from_json(cls, value: Any) -> Observed:
        """Parse the JSON form; raises EncodingError on anything else."""
        try:
            return cls(
                vault_wei=int(value["vault_wei"]),
                escrow_wei=int(value["escrow_wei"]),
                stakes={
                    to_address(owner): StakeAccount(*map(int, amounts))
                    for owner, amounts in value["stakes"].items()
                },
                runs=int(value["runs"]),
                batches=int(value["batches"]),
                funds={
                    RunId(int(run)): Funds(*map(int, amounts))
                    for run, amounts in value["funds"].items()
                },
                versions={
                    RunId(int(run)): None if version is None else PolicyVersion(int(version))
                    for run, version in value["versions"].items()
                },
                strange=frozenset(map(int, value["strange"])),
                parameters={str(k): int(v) for k, v in value["parameters"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EncodingError(f"malformed answers of contracts: {error}") from error


async def observe(
    chain: Chain,
    view: ChainView,
    *,
    block: int | None = None,
    only: Collection[int] | None = None,
) -> Observed:
    """Return what the contracts say, after a block (default: the latest), about what the events
    up to there tell; of batches, about some only if so asked.
    """
    tag = "latest" if block is None else hex(block)
    chain = chain if block is None else chain.at(block)
    at = chain.deployment.contracts
    accounts = set(view.stakes).union(*(run.seats for run in view.runs.values()))
    return Observed(
        stakes={who: await chain.vault.account_of(who) for who in sorted(accounts)},
        vault_wei=await chain.token.balance_of(at["StakeVault"]),
        escrow_wei=await chain.token.balance_of(at["RewardEscrow"]),
        runs=await chain.runs.run_count(),
        batches=await chain.ledger.batch_count(),
        funds={run: await chain.escrow.funds_of(run) for run in view.runs},
        versions={run: await chain.runs.latest_version(run) for run in view.runs},
        strange=frozenset(await _strange_batches(chain, view, tag, only)),
        parameters={
            "challenge_window_s": await chain.ledger.challenge_window(),
            "outcome_deadline_s": await chain.ledger.outcome_deadline(),
        },
    )


async def _strange_batches(
    chain: Chain, view: ChainView, tag: str, only: Collection[int] | None
) -> list[int]:
    """Return the batches whose stored hash is not that of the header the events add up to."""
    strange, numbers = [], [b for b in view.batches if only is None or b in only]
    for start in range(0, len(numbers), ASKED_AT_ONCE):
        asked = numbers[start : start + ASKED_AT_ONCE]
        for number, stored in zip(asked, await _commitments(chain, asked, tag), strict=True):
            if undisputed(stored) != view.batches[number].header().commitment():
                strange.append(number)
    return strange


async def _commitments(chain: Chain, numbers: Sequence[int], tag: str) -> list[Hash32]:
    """Return what the ledger stores about batches, in one exchange."""
    abi = contract_abi("ContributionLedger").functions["commitmentOf"]
    ledger = chain.deployment.contracts["ContributionLedger"]
    answers = await chain.rpc.batch(
        [
            ("eth_call", [{"to": ledger, "data": hex0x(abi.encode([number]))}, tag])
            for number in numbers
        ]
    )
    try:
        return [Hash32(abi.decode(bytes.fromhex(answer[2:]))[0]) for answer in answers]
    except (EncodingError, ValueError, TypeError) as error:
        raise WrongChain(
            f"ContributionLedger.commitmentOf answers what it cannot: {error}",
            hint="are the contracts those in --deployments?",
        ) from error


def undisputed(commitment: Hash32) -> Hash32:
    """Return a batch's stored hash without the bit that tells of challenges."""
    return Hash32(commitment[:-1] + bytes([commitment[-1] & UNDISPUTED]))


def parameter(deployment: Deployment, observed: Observed | None, name: str) -> int | None:
    """Return a number that contracts were built with: as they say it, else as the deployment
    records it, else None.
    """
    if observed is not None and name in observed.parameters:
        return observed.parameters[name]
    value = deployment.parameters.get(name)
    return int(value) if value is not None else None
