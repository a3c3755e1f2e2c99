"""A connection to the simulated chain, with the interface that the programs expect."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from muster.chain import Batch, CourtTerms, Deployment, OutcomeProof, PauseCause
from muster.chain.abi import CONTRACTS
from muster.chain.structs import CommittedWork
from muster.chain.view_parts import split_signatures
from muster.lab.simulator.chain import Block, Endpoint, SimulatedChain
from muster.lab.simulator.model.network import Network
from muster.lab.simulator.model.words import Name, Refused
from muster.lab.simulator.model.work import Header, Proof, Statement
from muster.lab.simulator.translation import claimed_of, judged_of
from muster.protocol.eip712 import Domain, address_of, digest, recover
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32, RunId, Step
from muster.protocol.merkle import verify_batch_proof
from muster.protocol.messages import OutcomeRecord, Outcomes, Submission

CHAIN_ID = 31337
RECORD_BYTES = 56


def domain_of(contract: str) -> Domain:
    """Return the EIP-712 domain of a simulated contract."""
    return Domain(CHAIN_ID, address_of(contract.encode().rjust(32, b"\1")))


@dataclass(frozen=True)
class Mined:
    """A transaction's receipt."""

    block_number: int
    """The newest block when it was known to be mined."""


class ChainConnection:
    """An account's connection: its transactions and queries."""

    def __init__(
        self, chain: SimulatedChain, endpoint: Endpoint, account: Address, label: str | None = None
    ) -> None:
        self._chain, self._endpoint, self._label = chain, endpoint, label
        self.chain_id = CHAIN_ID
        self.deployment = Deployment(
            CHAIN_ID, 0, {name: domain_of(name).verifying_contract for name in CONTRACTS}
        )
        self.account: Address | None = account
        self.composed: Any = None
        """Returns the submissions behind a root; set once the orchestrator exists."""

    @property
    def ledger(self) -> ChainConnection:
        """The contribution ledger."""
        return self

    @property
    def faults(self) -> ChainConnection:
        """The court of faults."""
        return self

    @property
    def runs(self) -> ChainConnection:
        """The run registry."""
        return self

    @property
    def court(self) -> ChainConnection:
        """The court of the network."""
        return self

    @property
    def escrow(self) -> ChainConnection:
        """The reward escrow."""
        return self

    def once(self, label: str) -> Self:
        """Return the same connection for one write under a label."""
        named = type(self)(self._chain, self._endpoint, Address(str(self.account)), label)
        named.composed = self.composed
        return named

    def domain(self, contract: str) -> Domain:
        """Return a contract's domain."""
        return domain_of(contract)

    async def now(self) -> int:
        """Return the latest block's time."""
        return await self._endpoint.now()

    async def latest_block(self) -> Block:
        """Return the newest block."""
        return await self._endpoint.latest()

    async def pending_transactions(self) -> int:
        """Return how many transactions wait."""
        return len(self._chain.pool)

    async def deploy_hash(self) -> Hash32:
        """Return the hash of the first block."""
        return self._chain.blocks[0].hash

    async def challenge_window(self) -> int:
        """Return the seconds in which outcomes may be challenged."""
        return int(self._chain.fixed.challenge_window)

    async def outcome_deadline(self) -> int:
        """Return the seconds after which outcomes are overdue."""
        return int(self._chain.fixed.outcome_deadline)

    async def appeal_time(self) -> int:
        """Return the seconds in which judges can be called for overdue work."""
        return int(self._chain.fixed.challenge_window)

    async def stake_per_unit(self) -> int:
        """Return the stake behind a unit in flight."""
        return int(self._chain.fixed.stake_per_unit)

    async def is_paid(self, run_id: RunId, worker: Address, step: Step, index: int) -> bool:
        """Return whether a slot was paid."""
        return (int(run_id), str(worker), int(step), index) in self._chain.state.paid

    async def _send(self, kind: str, call: Any, size: int = 1) -> Any:
        self._endpoint.require_up()
        # Labels are per account, because every account has its own journal.
        label = self._label and f"{self.account}: {self._label}"
        return await self._chain.send(kind, call, size=size, label=label)

    async def commit_batch(
        self, run_id: RunId, root: Hash32, count: int, units: int
    ) -> tuple[int, Mined]:
        """Commit a batch."""
        claims = tuple(claimed_of(s) for s in await self.composed(root))
        assert len(claims) == count
        caller = str(self.account)

        def call(state: Network) -> int:
            state.commit(caller, int(run_id), claims, units)
            return len(state.batches)

        batch_id = int(await self._send("commit", call, count))
        return batch_id, Mined(self._chain.head.number)

    async def post_outcomes(self, batch: Batch, records: bytes, signatures: bytes) -> object:
        """Record a batch's outcomes."""
        outcomes = Outcomes(batch.batch_id, batch.root, keccak(records))
        hashed = digest(domain_of("ContributionLedger"), outcomes.struct_hash())
        signers = [str(recover(hashed, signature)) for signature in split_signatures(signatures)]
        parts = [records[i : i + RECORD_BYTES] for i in range(0, len(records), RECORD_BYTES)]
        judged = tuple(judged_of(OutcomeRecord.from_bytes(part)) for part in parts)

        def call(state: Network) -> None:
            header = self._header(state, batch)
            self._chain.words.signatures[batch.batch_id] = signatures
            state.post(header, judged, signers)

        return await self._send("post", call, len(judged))

    def _header(self, state: Network, batch: Batch) -> Header:
        """Return the model's header of a batch; raises Refused if the given batch differs."""
        held = state.batches.get(batch.batch_id)
        if held is None or self._chain.words.said(held.header.root) != batch.root:
            raise Refused("LedgerBatchMismatch", batch.batch_id)
        if (held.header.posted_at, held.header.units) != (batch.posted_at, batch.units):
            raise Refused("LedgerBatchMismatch", batch.batch_id)
        return held.header

    def _proof(self, state: Network, outcome: OutcomeProof) -> Proof:
        header = self._header(state, outcome.batch)
        record = judged_of(OutcomeRecord.from_bytes(outcome.record))
        return Proof(header, outcome.position, record, outcome.position, True)

    async def execute_fraud(self, outcome: OutcomeProof, work: CommittedWork) -> object:
        """Slash a worker."""
        shown = self._shown(outcome, work)
        return await self._send(
            "execute_fraud",
            lambda state: state.execute_fraud(self._proof(state, outcome), *shown),
        )

    def _shown(self, outcome: OutcomeProof, work: CommittedWork) -> tuple[Any, str, bool]:
        """Return work in the model's words, its signer, and whether it is proven."""
        batch, leaf = outcome.batch, work.submission.leaf()
        held = verify_batch_proof(batch.root, batch.count, outcome.position, leaf, work.proof)
        signer = self._signer(work.submission, work.node_signature)
        return claimed_of(work.submission), signer, held

    async def finalise_fraud(self, outcome: OutcomeProof) -> object:
        """Release the escrow of a fraud."""
        return await self._send(
            "finalise_fraud", lambda state: state.finalise_fraud(self._proof(state, outcome))
        )

    async def slash_cooldown(self) -> int:
        """Return the seconds after a pause of slashing before which there is no other."""
        return int(self._chain.fixed.slash_cooldown)

    async def terms(self) -> CourtTerms:
        """Return the court's fixed rules for cases."""
        fixed = self._chain.fixed
        return CourtTerms(**{each.name: getattr(fixed, each.name) for each in fields(CourtTerms)})

    async def pause_slashing(
        self, run_id: RunId, cause: PauseCause, reason: int, evidence_hash: Hash32
    ) -> object:
        """Stop the run's fraud executions for a while."""
        said = (str(self.account), int(run_id), list(PauseCause).index(cause), reason)
        why = evidence_hash.hex()
        return await self._send("pause_slashing", lambda state: state.pause_slashing(*said, why))

    def _case(self, state: Network, leaf: Hash32) -> Name:
        """Return the model's name for a leaf, which must belong to a case."""
        for known in state.cases:
            if self._chain.words.said(known) == leaf:
                return known
        raise Refused("CourtNoOpenCase", leaf, 0)

    async def void_batch(self, batch: Batch) -> object:
        """Release the money reserved for a batch that nobody judged."""
        return await self._send("void", lambda state: state.void(self._header(state, batch)))

    async def prove_double_outcome(
        self,
        batch: Batch,
        first: Outcomes,
        first_signature: bytes,
        second: Outcomes,
        second_signature: bytes,
    ) -> object:
        """Slash a validator that signed two different outcomes of one batch."""
        signed = [
            (_statement(outcomes), self._signer(outcomes, signature))
            for outcomes, signature in ((first, first_signature), (second, second_signature))
        ]
        return await self._send(
            "prove",
            lambda state: state.prove_double_outcome(self._header(state, batch), signed),
        )

    async def prove_double_submission(
        self,
        outcome: OutcomeProof,
        work: CommittedWork,
        second: Submission,
        second_signature: bytes,
    ) -> object:
        """Slash a worker whose node signed another submission for a judged slot."""
        first, signer, held = self._shown(outcome, work)
        other = claimed_of(second), self._signer(second, second_signature)
        return await self._send(
            "prove",
            lambda state: state.prove_double_submission(
                self._proof(state, outcome), [(first, signer), other], held
            ),
        )

    async def prove_misrecord(
        self, outcome: OutcomeProof, work: CommittedWork, validator: Address
    ) -> object:
        """Slash a validator that signed a record which contradicts what the batch holds."""
        claimed, signer, held = self._shown(outcome, work)
        return await self._send(
            "prove",
            lambda state: state.prove_misrecord(
                self._proof(state, outcome), claimed, signer, str(validator), held
            ),
        )

    @staticmethod
    def _signer(message: Submission | Outcomes, signature: bytes) -> str:
        return str(
            recover(digest(domain_of("ContributionLedger"), message.struct_hash()), signature)
        )


def _statement(stated: Outcomes) -> Statement:
    """Return a statement that names its records by their hash, or none if it has no records."""
    records: Any = () if stated.records_hash == keccak(b"") else (stated.records_hash,)
    return Statement(stated.batch_id, ("root", stated.batch_root), records)
