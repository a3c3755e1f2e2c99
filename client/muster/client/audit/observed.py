"""The contracts' state at the audited block, which is compared with the sums of the events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from muster.api.answers import AccountAddress, HexHash
from muster.chain import Chain, Funds, StakeAccount
from muster.chain.conversion import from_abi
from muster.client.audit.ledger import Ledger
from muster.protocol.errors import EncodingError, WrongChain
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, to_address, to_hash32
from muster.protocol.jury import BENCH

T = TypeVar("T")
Wei = Annotated[int, PlainSerializer(str)]
"""An amount in wei; decimal text in JSON, because it does not fit 64 bits."""
UNDISPUTED = 0xFE
"""Mask of a commitment's last byte: every bit but the one that marks a challenge."""
ASKED_AT_ONCE = 2_000
"""Number of commitments read before they are compared."""


def _stake_key(text: str) -> tuple[RunId, Address]:
    run, _, owner = text.partition(":")
    return RunId(int(run)), to_address(owner)


def _texts(amounts: StakeAccount | Funds) -> list[str]:
    return [str(number) for number in astuple(amounts)]


_StakeKey = Annotated[
    tuple[RunId, Address],
    PlainValidator(_stake_key),
    PlainSerializer(lambda key: f"{key[0]}:{key[1]}", return_type=str),
]
_Account = Annotated[
    StakeAccount,
    PlainValidator(lambda amounts: StakeAccount(*map(int, amounts))),
    PlainSerializer(_texts),
]
_Money = Annotated[
    Funds, PlainValidator(lambda amounts: Funds(*map(int, amounts))), PlainSerializer(_texts)
]


@dataclass(frozen=True, slots=True)
class Parameters:
    """The contracts' constructor parameters, named as in deployments."""

    challenge_window_s: Wei
    outcome_deadline_s: Wei
    bond: Wei
    juror_fee: Wei
    jury_size: Wei
    jury_time_s: Wei
    wrong_verdict_ppm: Wei
    absence_ppm: Wei
    insurance_ppm: Wei
    reporter_ppm: Wei
    reporter_cap: Wei
    required_worker_stake: Wei
    required_validator_stake: Wei
    required_juror_stake: Wei


@dataclass(frozen=True, slots=True)
class Observed:
    """The contracts' state at one block."""

    vault_wei: Wei
    """Tokens that StakeVault holds."""
    escrow_wei: Wei
    """Tokens that RewardEscrow holds."""
    court_wei: Wei
    """Tokens that DisputeCourt holds."""
    stakes: Mapping[_StakeKey, _Account]
    """Stake by run and owner, for every worker, validator, juror and account in stake events."""
    runs: int
    """Runs of RunRegistry."""
    batches: int
    """Batches of ContributionLedger."""
    funds: Mapping[RunId, _Money]
    """Money of each run in the events."""
    versions: Mapping[RunId, PolicyVersion | None]
    """Newest policy version of each run in the events."""
    strange: Annotated[frozenset[int], PlainSerializer(sorted)]
    """Batches whose stored header differs from the one that follows from the events."""
    parameters: Parameters
    jurors: Annotated[frozenset[AccountAddress], PlainSerializer(sorted)]
    """The jurors among the accounts with stake for the bench."""
    draw_hashes: Mapping[int, HexHash]
    """Hash of every block that a jury was drawn from."""
    announced: Mapping[HexHash, tuple[int, ...]]
    """By overturned case with several claims: the block in which each claim was announced."""
    timestamp: int
    """Unix seconds of the block."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values, amounts as text."""
        values: dict[str, Any] = _as_json().dump_python(self, mode="json")
        return values

    @classmethod
    def from_json(cls, value: Any) -> Observed:
        """Parse the JSON form; raises EncodingError on anything else."""
        try:
            return _as_json().validate_python(value)
        except (TypeError, OverflowError, ValidationError) as error:
            raise EncodingError(f"malformed answers of contracts: {error}") from error


@cache
def _as_json() -> TypeAdapter[Observed]:
    return TypeAdapter(Observed)


async def observe(chain: Chain, view: Ledger, *, block: int | None = None) -> Observed:
    """Return the contracts' state after a block (default: the latest) for everything in the events
    up to it.
    """
    tag = "latest" if block is None else hex(block)
    chain = chain if block is None else chain.at(block)
    draws = sorted({case.draw_block for case in view.cases.values() if case.jurors})
    here, *drawn = await _headers(chain, [tag, *map(hex, draws)])
    at, stakes, runs = chain.deployment.contracts, sorted(_stakes(view)), list(view.runs)
    bench = [who for run, who in stakes if run == BENCH]
    return Observed(
        # Anyone can deposit for any account: whatever grows with accounts is asked in batches.
        stakes={
            key: from_abi(StakeAccount, account)
            for key, (account,) in await _all(chain, "StakeVault", "accountOf", stakes)
        },
        vault_wei=await chain.token.balance_of(at["StakeVault"]),
        escrow_wei=await chain.token.balance_of(at["RewardEscrow"]),
        court_wei=await chain.token.balance_of(at["DisputeCourt"]),
        runs=await chain.runs.run_count(),
        batches=await chain.ledger.batch_count(),
        funds={
            run: from_abi(Funds, funds)
            for run, (funds,) in await _all(chain, "RewardEscrow", "fundsOf", runs)
        },
        versions={
            run: PolicyVersion(version) if exists else None
            for run, (version, exists) in await _all(chain, "RunRegistry", "latestVersion", runs)
        },
        strange=frozenset(await _strange_batches(chain, view)),
        parameters=await _parameters(chain),
        jurors=frozenset(
            who for who, (is_juror,) in await _all(chain, "JuryPool", "isJuror", bench) if is_juror
        ),
        draw_hashes={
            number: _part(header, "hash", to_hash32)
            for number, header in zip(draws, drawn, strict=True)
            if header is not None
        },
        announced=await _announced(chain, view),
        timestamp=_part(here, "timestamp", lambda text: int(text, 16)),
    )


async def _all(
    chain: Chain, contract: str, function: str, keys: Sequence[T]
) -> list[tuple[T, tuple[Any, ...]]]:
    """Return the results of a view, each with its key: its argument or its tuple of arguments."""
    calls = [key if isinstance(key, tuple) else (key,) for key in keys]
    return list(zip(keys, await chain.read_all(contract, function, calls), strict=True))


def _stakes(view: Ledger) -> set[tuple[RunId, Address]]:
    """Return the accounts that can have stake, each with its run."""
    roles = {(run.run_id, who) for run in view.runs.values() for who in (*run.seats, *run.members)}
    return set(view.stakes) | roles | {(RunId(BENCH), place.juror) for place in view.bench}


async def _parameters(chain: Chain) -> Parameters:
    court = await chain.court.terms()
    return Parameters(
        challenge_window_s=await chain.ledger.challenge_window(),
        outcome_deadline_s=await chain.ledger.outcome_deadline(),
        bond=court.bond,
        juror_fee=court.juror_fee,
        jury_size=court.jury_size,
        jury_time_s=court.jury_time,
        wrong_verdict_ppm=court.wrong_verdict_ppm,
        absence_ppm=court.absence_ppm,
        insurance_ppm=await chain.vault.insurance_ppm(),
        reporter_ppm=await chain.vault.reporter_ppm(),
        reporter_cap=await chain.vault.reporter_cap(),
        required_worker_stake=await chain.workers.required_stake(),
        required_validator_stake=await chain.runs.required_validator_stake(),
        required_juror_stake=await chain.jurors.required_stake(),
    )


async def _announced(chain: Chain, view: Ledger) -> dict[Hash32, tuple[int, ...]]:
    """Return the blocks of claims' announcements, for cases with several possible reporters."""
    several = [
        case.case_id for case in view.cases.values() if case.overturned and len(case.claims) > 1
    ]
    return {
        case_id: tuple(int(each[2]) for each in claims)
        for case_id, (claims,) in await _all(chain, "DisputeCourt", "claimsOf", several)
    }


async def _headers(chain: Chain, tags: Sequence[str]) -> list[dict[str, Any] | None]:
    """Return headers; None for each that the endpoint no longer has."""
    answers = await chain.rpc.batch([("eth_getBlockByNumber", [tag, False]) for tag in tags])
    return [answer if isinstance(answer, dict) else None for answer in answers]


def _part(header: Mapping[str, Any] | None, name: str, parse: Callable[[str], T]) -> T:
    try:
        return parse((header or {})[name])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WrongChain(
            f"eth_getBlockByNumber gave an impossible answer: {error}",
            hint="give another endpoint with --rpc",
        ) from error


async def _strange_batches(chain: Chain, view: Ledger) -> list[int]:
    """Return the batches whose stored hash differs from that of the header in the events."""
    strange, numbers = [], list(view.batches)
    for start in range(0, len(numbers), ASKED_AT_ONCE):
        asked = numbers[start : start + ASKED_AT_ONCE]
        for number, (stored,) in await _all(chain, "ContributionLedger", "commitmentOf", asked):
            batch = view.batches[number]
            due = Hash32(bytes(32)) if batch.is_void else batch.header().commitment()
            if stored[:-1] + bytes([stored[-1] & UNDISPUTED]) != due:
                strange.append(number)
    return strange
