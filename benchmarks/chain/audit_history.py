"""A synthetic history of a run, valid to the last hash: what `make bench-audit` audits.

Every root is the Merkle root of its leaves, every batch is signed by two of three validators, every
slash takes the run's share of the stake, every payment is due. The dump has logs as from
`eth_getLogs`, but no headers or receipts.
"""

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from eth_abi.abi import encode
from eth_utils.abi import collapse_if_tuple

from muster.chain import (
    BlockId,
    Deployment,
    Funds,
    Offence,
    RunConfig,
    RunTerms,
    StakeAccount,
)
from muster.chain.abi import ARTIFACTS, CONTRACTS, contract_abi, snake_case
from muster.client.audit.dump import DumpedBlock, DumpEnd, writing_dump
from muster.client.audit.observed import Observed, Parameters
from muster.protocol.eip712 import Domain, address_of, digest, sign
from muster.protocol.encoding import abi_words, address_bytes, hex0x, keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step, to_address
from muster.protocol.merkle import batch_root, merkle_root
from muster.protocol.messages import (
    OutcomeRecord,
    Outcomes,
    Reason,
    Submission,
    Verdict,
    pack_records,
)
from muster.protocol.schedule import batch_seed, draw_order

RUN = RunId(1)
PRICE = 10**12
STAKE = 100 * 10**18
EXACT_PPM = 250_000
WINDOW_S, DEADLINE_S, BLOCK_S = 30, 600, 2
WORKERS, ROLLOUTS = 1_000, 128
CLAIM_EVERY = 100
"""Accepted outcomes that a worker claims together."""
STEPS_PER_VERSION = 64
"""Batches between two policy versions."""
REJECTED_SHARE, FRAUD_EVERY = 0.02, 2_000


def _account(name: str) -> Address:
    return to_address(keccak(name.encode())[:20])


def _key(name: str) -> bytes:
    return bytes(keccak(name.encode()))


VALIDATORS = sorted((_key(f"validator {i}") for i in range(3)), key=address_of)
ADDRESSES = {name: _account(name) for name in CONTRACTS}
DEPLOYMENT = Deployment(
    31337,
    1,
    ADDRESSES,
    {"challenge_window_s": WINDOW_S, "outcome_deadline_s": DEADLINE_S},
)
_PARAMETERS = Parameters(
    challenge_window_s=WINDOW_S,
    outcome_deadline_s=DEADLINE_S,
    bond=0,
    juror_fee=0,
    jury_size=0,
    jury_time_s=0,
    wrong_verdict_ppm=0,
    absence_ppm=0,
    insurance_ppm=0,
    reporter_ppm=0,
    reporter_cap=0,
    required_worker_stake=STAKE,
    required_validator_stake=STAKE,
    required_juror_stake=STAKE,
)
"""Those of an audit: the history has no cases."""
DOMAIN = Domain(31337, ADDRESSES["ContributionLedger"])
CONFIG = RunConfig(
    _account("trainer"),
    _account("orchestrator"),
    keccak(b"model"),
    keccak(b"tasks"),
    keccak(b"recipe"),
    keccak(b"calibration"),
    RunTerms(PRICE, 100_000, EXACT_PPM, 2),
    tuple(address_of(key) for key in VALIDATORS),
)


@dataclass
class EventEncoder:
    """Writes events as JSON-RPC logs, by the committed ABI."""

    inputs: dict[tuple[str, str], tuple[str, list[dict[str, Any]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for contract in CONTRACTS:
            abi = json.loads((ARTIFACTS / f"{contract}.json").read_text())["abi"]
            inputs = {entry["name"]: entry["inputs"] for entry in abi if entry["type"] == "event"}
            for event in contract_abi(contract).events:
                self.inputs[contract, event.name] = (event.topic, inputs[event.name])

    def log(self, contract: str, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Return a log without its place in the chain."""
        topic, inputs = self.inputs[contract, name]
        values = [(part, args[snake_case(part["name"])]) for part in inputs]
        topics = [encode([collapse_if_tuple(p)], [v]) for p, v in values if p["indexed"]]
        data = [(collapse_if_tuple(p), v) for p, v in values if not p["indexed"]]
        return {
            "address": ADDRESSES[contract].lower(),
            "topics": [topic, *map(hex0x, topics)],
            "data": hex0x(encode([kind for kind, _ in data], [value for _, value in data])),
        }


@dataclass
class History:
    """A synthetic run, block by block."""

    submissions: int
    batch: int = 64
    seed: int = 0
    number: int = 1
    now: int = 1_700_000_000
    version: int = -1
    batches: int = 0
    paid_wei: int = 0
    reserved_wei: int = 0
    funded_wei: int = 0
    stakes: dict[Address, int] = field(default_factory=dict)
    """What each has staked for the run."""
    slashed_wei: int = 0
    slashed: set[int] = field(default_factory=set)
    """Numbers of the workers whose fraud was executed."""
    encoder: EventEncoder = field(default_factory=EventEncoder)
    pending: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Future claims: time, worker id, slots, units."""

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.cheaters = max(1, self.submissions // FRAUD_EVERY)
        self.earned: dict[int, list[int]] = {}
        self.slots: dict[int, int] = {}

    def write(self, path: Path) -> int:
        """Write the history as a dump; return the number of blocks."""
        with writing_dump(path, DEPLOYMENT) as dump:
            for block in self.blocks():
                dump.add(block)
            dump.end(self.end())
        return dump.blocks

    def end(self) -> DumpEnd:
        """Return the end of the dump, after all blocks."""
        head = BlockId(self.number, keccak(b"block %d" % self.number))
        return DumpEnd(head, self.observed())

    def observed(self) -> Observed:
        """Return the state that the contracts would show."""
        stake = sum(self.stakes.values()) + self.slashed_wei
        left = self.funded_wei - self.paid_wei
        return Observed(
            vault_wei=stake,
            escrow_wei=left,
            court_wei=0,
            stakes=self.accounts(),
            runs=1,
            batches=self.batches,
            funds={RUN: Funds(left - self.reserved_wei, self.reserved_wei)},
            versions={RUN: PolicyVersion(self.version)},
            strange=frozenset(),
            parameters=_PARAMETERS,
            jurors=frozenset(),
            draw_hashes={},
            announced={},
            timestamp=self.now,
        )

    def accounts(self) -> dict[tuple[RunId, Address], StakeAccount]:
        """Return the vault's accounts, with slashes that are not final yet."""
        cheaters = {_account(f"worker {number}") for number in self.slashed}
        return {
            (RUN, who): StakeAccount(wei, 0, 0, int(who in cheaters))
            for who, wei in self.stakes.items()
        }

    # Blocks

    def blocks(self) -> Iterator[DumpedBlock]:
        """Yield every block with events."""
        yield from self._opening()
        done = 0
        while done < self.submissions:
            if self.batches % STEPS_PER_VERSION == 0:
                yield self._publish()
            count = min(self.batch, self.submissions - done)
            yield from self._one_batch(done, count)
            done += count
            yield from self._claims()

    def _block(self, *events: tuple[str, str, dict[str, Any]]) -> DumpedBlock:
        self.number += 1
        self.now += BLOCK_S
        block = BlockId(self.number, _hash_of(self.number))
        logs = []
        for index, (contract, name, args) in enumerate(events):
            place = {
                "blockNumber": hex(block.number),
                "blockHash": hex0x(block.hash),
                "logIndex": hex(index),
                "transactionHash": hex0x(keccak(b"tx %d" % self.number)),
            }
            logs.append(self.encoder.log(contract, name, args) | place)
        return DumpedBlock(block, self.now, logs)

    def _opening(self) -> Iterator[DumpedBlock]:
        owner, events = _account("owner"), list[tuple[str, str, dict[str, Any]]]()
        created = {"run_id": RUN, "owner": owner, "config": astuple(CONFIG)}
        events.append(("RunRegistry", "RunCreated", created))
        for seat, validator in enumerate(CONFIG.validators):
            of_seat = {"run_id": RUN, "validator": validator}
            seated = {**of_seat, "seat_bit": 1 << seat, "terms": 1}
            events += [
                ("RunRegistry", "ValidatorInvited", {**of_seat, "invited": True}),
                ("StakeVault", "Deposited", self._deposit(validator)),
                ("RunRegistry", "ValidatorSeated", seated),
            ]
        yield self._block(*events)
        for number in range(1, WORKERS + self.cheaters + 1):
            who, node = _account(f"worker {number}"), _account(f"node {number}")
            joined = {"run_id": RUN, "worker": who, "terms": 1, "active_from": self.number + 2}
            yield self._block(
                ("WorkerRegistry", "WorkerRegistered", {"worker": who, "worker_id": number}),
                ("WorkerRegistry", "NodeBound", {"worker": who, "node": node}),
                ("StakeVault", "Deposited", self._deposit(who)),
                ("WorkerRegistry", "WorkerJoined", joined),
            )
        self.funded_wei = 10**30
        funded = {"run_id": RUN, "from": owner, "amount": self.funded_wei}
        yield self._block(("RewardEscrow", "RunFunded", funded))

    def _deposit(self, who: Address) -> dict[str, Any]:
        self.stakes[who] = STAKE
        return {"run_id": RUN, "owner": who, "amount": STAKE, "active": STAKE}

    def _publish(self) -> DumpedBlock:
        self.version += 1
        root = keccak(b"manifest %d" % self.version)
        published = {"run_id": RUN, "version": self.version, "manifest_root": root}
        return self._block(("RunRegistry", "CheckpointPublished", published))

    def _one_batch(self, first: int, count: int) -> Iterator[DumpedBlock]:
        claimed = [self._submission(first + i) for i in range(count)]
        root = batch_root([submission.leaf() for _, submission in claimed])
        units = sum(submission.units for _, submission in claimed)
        self.batches += 1
        batch_id, committed_at = self.batches, self.now + BLOCK_S
        self.reserved_wei += units * PRICE
        committed = {
            **{"batch_id": batch_id, "run_id": RUN, "root": root, "count": count, "units": units},
            **{"price_per_unit": PRICE, "terms": 1, "committed_at": committed_at},
        }
        reserved = {"run_id": RUN, "amount": units * PRICE}
        yield self._block(
            ("ContributionLedger", "BatchCommitted", committed),
            ("RewardEscrow", "RewardReserved", reserved),
        )
        records = [self._judge(*each) for each in claimed]
        yield self._post(batch_id, root, records, self._called(batch_id, root))
        for position, record in enumerate(records):
            if record.verdict is Verdict.FRAUD:
                yield self._slash(batch_id, position, record)

    def _submission(self, number: int) -> tuple[int, Submission]:
        is_cheat = number % FRAUD_EVERY == FRAUD_EVERY - 1
        cheater = WORKERS + 1 + number // FRAUD_EVERY
        worker_id = cheater if is_cheat else number % WORKERS + 1
        index = self.slots.get(worker_id, 0)
        self.slots[worker_id] = index + 1
        return worker_id, Submission(
            run_id=RUN,
            worker=_ACCOUNTS.setdefault(worker_id, _account(f"worker {worker_id}")),
            step=Step(self.version + 1),
            index=index,
            policy_version=PolicyVersion(self.version),
            file_hash=keccak(number.to_bytes(8, "big")),
            rollouts=ROLLOUTS,
            units=self.random.randrange(10_000, 100_000),
        )

    def _judge(self, worker_id: int, submission: Submission) -> OutcomeRecord:
        verdict, reason = Verdict.ACCEPTED, Reason.NONE
        if worker_id > WORKERS:
            verdict, reason = Verdict.FRAUD, Reason.WRONG_SEED
        elif self.random.random() < REJECTED_SHARE:
            verdict, reason = Verdict.REJECTED, Reason.LATE
        else:
            self.earned.setdefault(worker_id, []).append(submission.units)
        return OutcomeRecord(
            worker_id,
            submission.step,
            submission.index,
            submission.policy_version,
            submission.file_hash,
            submission.rollouts,
            submission.units,
            verdict,
            reason,
        )

    def _called(self, batch_id: int, root: Hash32) -> list[bytes]:
        """Return the keys of the validators drawn first by the newest block, ascending by
        address."""
        seed = batch_seed(_hash_of(self.number), RUN, batch_id, root)
        first = draw_order(seed, CONFIG.validators)[: CONFIG.terms.quorum]
        return [key for key in VALIDATORS if address_of(key) in first]

    def _post(
        self, batch_id: int, root: Hash32, records: list[OutcomeRecord], keys: list[bytes]
    ) -> DumpedBlock:
        packed = pack_records(records)
        hashed = digest(DOMAIN, Outcomes(batch_id, root, keccak(packed)).struct_hash())
        leaves = [record.leaf(batch_id, i) for i, record in enumerate(records)]
        posted = {
            **{"batch_id": batch_id, "run_id": RUN, "outcomes_root": merkle_root(leaves)},
            **{"posted_at": self.now + BLOCK_S, "records": packed},
            "signers": sum(1 << VALIDATORS.index(key) for key in keys),
            "signatures": b"".join(sign(hashed, key) for key in keys),
        }
        return self._block(("ContributionLedger", "OutcomesPosted", posted))

    def _slash(self, batch_id: int, position: int, record: OutcomeRecord) -> DumpedBlock:
        who = _account(f"worker {record.worker_id}")
        taken = -(-self.stakes[who] * EXACT_PPM // 10**6)
        self.stakes[who] -= taken
        self.slashed_wei += taken
        self.slashed.add(record.worker_id)
        tag = record.step << 32 | record.index
        verdict = (RUN, who, Offence.EXACT_FRAUD.number, tag, batch_id, position)
        escrow_id = keccak(abi_words(RUN, address_bytes(who), *verdict[2:4]))
        of_worker = {"run_id": RUN, "worker": who, "escrow_id": escrow_id}
        slashed = {
            **{"run_id": RUN, "owner": who, "escrow_id": escrow_id, "verdict": verdict},
            **{"from_active": taken, "from_unbonding": 0},
        }
        executed = {
            **{"batch_id": batch_id, "worker": who, "escrow_id": escrow_id, "amount": taken},
            **{"leaf": record.leaf(batch_id, position), "position": position},
        }
        return self._block(
            ("WorkerRegistry", "WorkerBanned", of_worker),
            ("StakeVault", "Slashed", slashed),
            ("ContributionLedger", "FraudExecuted", executed),
        )

    def _claims(self) -> Iterator[DumpedBlock]:
        """Yield claims of outcomes whose window is over."""
        due = [claim for claim in self.pending if claim[0] <= self.now + BLOCK_S]
        self.pending = [claim for claim in self.pending if claim not in due]
        for _, worker_id, slots, units in due:
            self.paid_wei += units * PRICE
            self.reserved_wei -= units * PRICE
            claimed = {
                **{"run_id": RUN, "worker": _account(f"worker {worker_id}"), "slots": slots},
                **{"units": units, "amount": units * PRICE},
            }
            yield self._block(("RewardEscrow", "RewardClaimed", claimed))
        for worker_id, earned in self.earned.items():
            if len(earned) >= CLAIM_EVERY:
                self.pending.append((self.now + WINDOW_S, worker_id, len(earned), sum(earned)))
        self.earned = {who: u for who, u in self.earned.items() if len(u) < CLAIM_EVERY}


_ACCOUNTS: dict[int, Address] = {}


def _hash_of(block: int) -> Hash32:
    return keccak(b"block %d" % block)
