"""What the contracts themselves say at the audited block, to compare the events' sums with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from muster.chain import Chain, ChainView, Deployment, Funds, StakeAccount
from muster.chain.abi import contract_abi
from muster.protocol.encoding import hex0x
from muster.protocol.errors import EncodingError, WrongChain
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, to_address, to_hash32
from muster.protocol.jury import BENCH

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
    court_wei: int
    """Tokens of DisputeCourt."""
    stakes: Mapping[tuple[RunId, Address], StakeAccount]
    """Stake that the events tell of, and of every worker, validator and juror, by run and owner."""
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
    """What the contracts were built with, named as deployments name it."""
    jurors: frozenset[Address] = frozenset()
    """Who of those with stake for the bench is a juror."""
    draw_hashes: Mapping[int, Hash32] = field(default_factory=dict)
    """Hash of every block that a jury was drawn of."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, amounts as text."""
        return {
            "vault_wei": str(self.vault_wei),
            "escrow_wei": str(self.escrow_wei),
            "court_wei": str(self.court_wei),
            "stakes": {
                f"{run}:{owner}": [str(number) for number in astuple(account)]
                for (run, owner), account in self.stakes.items()
            },
            "runs": self.runs,
            "batches": self.batches,
            "funds": {
                str(run): [str(funds.available_wei), str(funds.reserved_wei)]
                for run, funds in self.funds.items()
            },
            "versions": {str(run): version for run, version in self.versions.items()},
            "strange": sorted(self.strange),
            "parameters": {name: str(value) for name, value in self.parameters.items()},
            "jurors": sorted(self.jurors),
            "draw_hashes": {str(at): hex0x(hashed) for at, hashed in self.draw_hashes.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> Observed:
        """Parse the JSON form; raises EncodingError on anything else."""
        try:
            return cls(
                vault_wei=int(value["vault_wei"]),
                escrow_wei=int(value["escrow_wei"]),
                court_wei=int(value["court_wei"]),
                stakes={
                    _stake_key(place): StakeAccount(*map(int, amounts))
                    for place, amounts in value["stakes"].items()
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
                jurors=frozenset(map(to_address, value["jurors"])),
                draw_hashes={int(k): to_hash32(v) for k, v in value["draw_hashes"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EncodingError(f"malformed answers of contracts: {error}") from error


def _stake_key(text: str) -> tuple[RunId, Address]:
    run, _, owner = text.partition(":")
    return RunId(int(run)), to_address(owner)


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
    at, stakes = chain.deployment.contracts, sorted(_stakes(view))
    on_bench = [who for run, who in stakes if run == BENCH and await chain.jurors.is_juror(who)]
    return Observed(
        stakes={key: await chain.vault.account_of(*key) for key in stakes},
        vault_wei=await chain.token.balance_of(at["StakeVault"]),
        escrow_wei=await chain.token.balance_of(at["RewardEscrow"]),
        court_wei=await chain.token.balance_of(at["DisputeCourt"]),
        runs=await chain.runs.run_count(),
        batches=await chain.ledger.batch_count(),
        funds={run: await chain.escrow.funds_of(run) for run in view.runs},
        versions={run: await chain.runs.latest_version(run) for run in view.runs},
        strange=frozenset(await _strange_batches(chain, view, tag, only)),
        parameters=await _parameters(chain),
        jurors=frozenset(on_bench),
        draw_hashes=await _draw_hashes(chain, view),
    )


def _stakes(view: ChainView) -> set[tuple[RunId, Address]]:
    """Return whose stake could be there, and for which run."""
    roles = {(run.run_id, who) for run in view.runs.values() for who in (*run.seats, *run.members)}
    return set(view.stakes) | roles | {(RunId(BENCH), place.juror) for place in view.bench}


async def _parameters(chain: Chain) -> dict[str, int]:
    court = await chain.court.terms()
    return {
        "challenge_window_s": await chain.ledger.challenge_window(),
        "outcome_deadline_s": await chain.ledger.outcome_deadline(),
        "bond": court.bond,
        "juror_fee": court.juror_fee,
        "jury_size": court.jury_size,
        "wrong_verdict_ppm": court.wrong_verdict_ppm,
        "absence_ppm": court.absence_ppm,
        "insurance_ppm": await chain.vault.insurance_ppm(),
        "reporter_ppm": await chain.vault.reporter_ppm(),
        "reporter_cap": await chain.vault.reporter_cap(),
        "required_worker_stake": await chain.workers.required_stake(),
        "required_validator_stake": await chain.runs.required_validator_stake(),
        "required_juror_stake": await chain.jurors.required_stake(),
    }


async def _draw_hashes(chain: Chain, view: ChainView) -> dict[int, Hash32]:
    """Return the hashes of the blocks that juries were drawn of, if the endpoint has them."""
    numbers = sorted({case.draw_block for case in view.cases.values() if case.jurors})
    calls = [("eth_getBlockByNumber", [hex(number), False]) for number in numbers]
    headers = await chain.rpc.batch(calls) if calls else []
    try:
        return {
            n: to_hash32(each["hash"]) for n, each in zip(numbers, headers, strict=True) if each
        }
    except (KeyError, TypeError) as error:
        raise WrongChain(
            f"eth_getBlockByNumber answers what it cannot: {error}", hint="another endpoint"
        ) from error


async def _strange_batches(
    chain: Chain, view: ChainView, tag: str, only: Collection[int] | None
) -> list[int]:
    """Return the batches whose stored hash is not that of the header the events add up to."""
    strange, numbers = [], [b for b in view.batches if only is None or b in only]
    for start in range(0, len(numbers), ASKED_AT_ONCE):
        asked = numbers[start : start + ASKED_AT_ONCE]
        for number, stored in zip(asked, await _commitments(chain, asked, tag), strict=True):
            batch = view.batches[number]
            due = Hash32(bytes(32)) if batch.is_void else batch.header().commitment()
            if undisputed(stored) != due:
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


def fixed(deployment: Deployment, observed: Observed | None) -> dict[str, int]:
    """Return the numbers that contracts were built with: as they say it, else as the deployment
    records it.
    """
    # Wei are decimal text there.
    recorded = {k: int(v) for k, v in deployment.parameters.items() if str(v).isdecimal()}
    return recorded | (dict(observed.parameters) if observed else {})


def parameter(deployment: Deployment, observed: Observed | None, name: str) -> int | None:
    """Return one of them; None when it is not known."""
    return fixed(deployment, observed).get(name)
