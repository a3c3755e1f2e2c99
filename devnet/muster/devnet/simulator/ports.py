"""What the production programs are given instead of HTTP, RPC, relays and a model.

Each fits a port that the programs have anyway; behind it are virtual time, a network that delays
and loses, and the services of the one orchestrator.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from muster.api import Lease, NoWork
from muster.api.answers import BatchContents, HeartbeatAnswer
from muster.chain import Batch, OutcomeProof, PauseCause
from muster.devnet.simulator.chain import Endpoint, SimulatedChain
from muster.devnet.simulator.clock import charged
from muster.devnet.simulator.contracts import claimed_of, judged_of, work
from muster.inference import Completion, Prefill, Request, gumbel_noise
from muster.orchestrator.services.context import Services
from muster.orchestrator.services.intake import AlreadyHeld
from muster.orchestrator.services.leases import SignedTicket
from muster.orchestrator.services.refusals import refuse
from muster.protocol.eip712 import Domain, address_of, digest, recover
from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError, PolicyUnavailable
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import (
    HardwareReport,
    OutcomeRecord,
    Outcomes,
    Submission,
)
from muster.protocol.recipe import ProofRecipe
from muster.protocol.rollouts import MAX_ROWS, Rollout, decode_rollouts
from muster.toploc import build_proofs

T = TypeVar("T")

CHAIN_ID = 31337
ORCHESTRATOR = "orchestrator"
ALPHABET = "0123456789= "
EOS = len(ALPHABET)
RECORD_BYTES = 56


def domain_of(contract: str) -> Domain:
    """Return the EIP-712 domain of a simulated contract."""
    return Domain(CHAIN_ID, address_of(contract.encode().rjust(32, b"\1")))


# ------------------------------------------------------------------- the network


@dataclass(slots=True)
class Link:
    """How a node's requests fare."""

    rng: random.Random
    """Decides."""
    latency_s: float
    """Mean one-way delay; each is exponential around a quarter of it."""
    loss: float
    """Share of requests, and of answers, that are lost."""
    timeout_s: float = 10.0
    """After which a node gives a lost one up."""
    is_up: bool = True
    """Whether anything passes."""

    async def passes(self) -> None:
        """Delay one message; raises ApiError when it is lost."""
        if not self.is_up or self.rng.random() < self.loss:
            await asyncio.sleep(self.timeout_s)
            raise ApiError("no answer from the orchestrator", status=503, code="unreachable")
        await asyncio.sleep(self.latency_s * (0.75 + 0.25 * self.rng.expovariate(1.0)))


class Desk:
    """Everything that reaches the orchestrator: what `muster.orchestrator.api` does for HTTP."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.requests: Counter[str] = Counter()
        """Requests that arrived, by what they ask."""

    async def heartbeat(
        self, node: Address, version: PolicyVersion | None, state: str, software: str,
        hardware: tuple[HardwareReport, bytes] | None,
    ) -> HeartbeatAnswer:  # fmt: skip
        """Note a sign of life."""
        services = self.services
        worker = services.identities.active_worker(node)
        writes = [services.heartbeats.beat(node, version, state, software)]
        if hardware is not None:
            report, signature = hardware
            writes.append(services.hardware.note(node, report.to_json(), signature))
        await services.group.add(*writes)
        return HeartbeatAnswer(
            status=worker.status.lower(),
            policy_version=services.projection.run.latest_version,
            wants_hardware=services.hardware.wants(node),
        )

    async def lease(self, node: Address) -> Lease | NoWork:
        """Return a ticket or when to ask again."""
        services = self.services
        worker = services.identities.active_worker(node)
        signed = await services.leases.lease(worker)
        if isinstance(signed, SignedTicket):
            return Lease(ticket=signed.ticket, signature=signed.signature)
        reason = None if signed is None else signed.value
        return NoWork(retry_after_s=services.settings.retry_after_s, reason=reason)

    async def submit(
        self, node: Address, submission: Submission, signature: bytes, body: bytes
    ) -> Hash32:
        """Take in a file."""
        services = self.services
        worker = services.identities.active_worker(node)
        admitted = await services.intake.admit(worker, submission, signature)
        if not isinstance(admitted, AlreadyHeld):
            await services.intake.store(admitted, _stream(body))
        return submission.file_hash

    async def called(self, validator: Address, after: int) -> dict[int, int]:
        """Return how many validators are called, by batch."""
        services = self.services
        services.identities.require_validator(validator)
        due = await services.outcomes.calls(after=after, limit=1000)
        return {batch: len(calls.called) for batch, calls in due}

    async def batch(self, batch_id: int) -> BatchContents:
        """Return a batch's submissions."""
        services = self.services
        found = services.projection.batch(batch_id)
        contents = found and await services.batching.contents(found)
        if not contents:
            raise refuse("batch_unknown", f"batch {batch_id} is not one of this orchestrator's")
        return contents

    async def file(self, reader: Address, name: Hash32) -> bytes:
        """Return a submission's file."""
        services = self.services
        services.identities.require_reader(reader)
        place = await services.files.find(name)
        if place is None:
            raise refuse("file_unknown", "no file with this hash is held")
        return Path(place).read_bytes()

    async def outcomes(
        self, validator: Address, batch_id: int, records: bytes, signature: bytes
    ) -> None:
        """Take a validator's outcomes."""
        self.services.identities.require_validator(validator)
        await self.services.outcomes.receive(validator, batch_id, records, signature)


async def _stream(body: bytes) -> AsyncIterator[bytes]:
    yield body


class SimulatedApi:
    """An orchestrator as a node reaches it: fits where `OrchestratorApi` does."""

    def __init__(self, desk: Desk, account: Address, link: Link) -> None:
        self._desk, self._account, self.link = desk, account, link

    async def _ask(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self.link.passes()
        except BaseException:
            work.close()
            raise
        self._desk.requests[what] += 1
        answer = await charged(ORCHESTRATOR, work)
        await self.link.passes()
        return answer

    async def heartbeat(
        self,
        _run_id: RunId,
        *,
        policy_version: PolicyVersion | None,
        state: str,
        software: str,
        hardware: tuple[HardwareReport, bytes] | None = None,
    ) -> HeartbeatAnswer:
        """Tell that the node lives."""
        said = (policy_version, state, software, hardware)
        return await self._ask("heartbeat", self._desk.heartbeat(self._account, *said))

    async def lease(self, _run_id: RunId) -> Lease | NoWork:
        """Return a ticket, or when to ask again."""
        return await self._ask("lease", self._desk.lease(self._account))

    async def submit(self, submission: Submission, signature: bytes, body: bytes) -> Hash32:
        """Upload a file."""
        work = self._desk.submit(self._account, submission, signature, body)
        return await self._ask("submit", work)

    async def called(self, *, after: int = 0) -> dict[int, int]:
        """Return how many validators are called, by batch."""
        return await self._ask("called", self._desk.called(self._account, after))

    async def batch(self, batch_id: int) -> BatchContents:
        """Return a batch's submissions."""
        return await self._ask("batch", self._desk.batch(batch_id))

    async def file(self, name: Hash32) -> bytes:
        """Return a file."""
        return await self._ask("file", self._desk.file(self._account, name))

    async def post_outcomes(self, batch_id: int, records: bytes, signature: bytes) -> None:
        """Hand over outcomes."""
        work = self._desk.outcomes(self._account, batch_id, records, signature)
        await self._ask("outcomes", work)


# --------------------------------------------------------------------- the chain


class ChainConnection:
    """The orchestrator's connection: its transactions, and what it asks the chain."""

    def __init__(
        self, chain: SimulatedChain, endpoint: Endpoint, account: Address, label: str | None = None
    ) -> None:
        self._chain, self._endpoint, self._label = chain, endpoint, label
        self.chain_id = CHAIN_ID
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
    def escrow(self) -> ChainConnection:
        """The reward escrow."""
        return self

    def once(self, label: str) -> ChainConnection:
        """Return the same for one write of a name."""
        named = ChainConnection(self._chain, self._endpoint, Address(str(self.account)), label)
        named.composed = self.composed
        return named

    def domain(self, contract: str) -> Domain:
        """Return a contract's domain."""
        return domain_of(contract)

    async def now(self) -> int:
        """Return the latest block's time."""
        return await self._endpoint.now()

    async def pending_transactions(self) -> int:
        """Return how many transactions wait."""
        return len(self._chain.pool)

    async def challenge_window(self) -> int:
        """Return the seconds in which outcomes may be challenged."""
        return int(self._chain.fixed.challenge_window)

    async def outcome_deadline(self) -> int:
        """Return the seconds after which outcomes are overdue."""
        return int(self._chain.fixed.outcome_deadline)

    async def stake_per_unit(self) -> int:
        """Return the stake behind a unit in flight."""
        return int(self._chain.fixed.stake_per_unit)

    async def is_paid(self, run_id: RunId, worker: Address, step: Step, index: int) -> bool:
        """Return whether a slot was paid."""
        return (int(run_id), str(worker), int(step), index) in self._chain.state.paid

    async def _send(self, kind: str, call: Any, size: int = 1) -> Any:
        self._endpoint.require_up()
        return await self._chain.send(kind, call, size=size, label=self._label)

    async def commit_batch(
        self, run_id: RunId, root: Hash32, count: int, units: int
    ) -> tuple[int, object]:
        """Commit a batch."""
        claims = tuple(claimed_of(s) for s in await self.composed(root))
        assert len(claims) == count
        caller = str(self.account)

        def call(state: Any) -> int:
            state.commit(caller, int(run_id), claims, units)
            return len(state.batches)

        return int(await self._send("commit", call, count)), object()

    async def post_outcomes(
        self, batch: Batch, records: bytes, signatures: Sequence[bytes]
    ) -> object:
        """Record a batch's outcomes."""
        outcomes = Outcomes(batch.batch_id, batch.root, keccak(records))
        hashed = digest(domain_of("ContributionLedger"), outcomes.struct_hash())
        signers = [str(recover(hashed, signature)) for signature in signatures]
        parts = [records[i : i + RECORD_BYTES] for i in range(0, len(records), RECORD_BYTES)]
        judged = tuple(judged_of(OutcomeRecord.from_bytes(part)) for part in parts)
        joined = b"".join(signatures)

        def call(state: Any) -> None:
            header = self._header(state, batch)
            self._chain.words.signatures[batch.batch_id] = joined
            state.post(header, judged, signers)

        return await self._send("post", call, len(judged))

    def _header(self, state: Any, batch: Batch) -> Any:
        """Return the model's header of a batch, which must be the one that is meant."""
        held = state.batches.get(batch.batch_id)
        is_same = held is not None and self._chain.words.said(held.header.root) == batch.root
        if not is_same or held.header.posted_at != batch.posted_at:
            from muster.devnet.simulator.contracts import parties

            raise parties().Refused("LedgerBatchMismatch", batch.batch_id)
        return held.header

    def _proof(self, state: Any, outcome: OutcomeProof) -> Any:
        header = self._header(state, outcome.batch)
        record = judged_of(OutcomeRecord.from_bytes(outcome.record))
        return work().Proof(header, outcome.position, record, outcome.position, True)

    async def execute_fraud(
        self, outcome: OutcomeProof, submission: Submission, node_signature: bytes
    ) -> object:
        """Slash a worker."""
        hashed = digest(domain_of("ContributionLedger"), submission.struct_hash())
        signer, claimed = str(recover(hashed, node_signature)), claimed_of(submission)
        return await self._send(
            "execute_fraud",
            lambda state: state.execute_fraud(self._proof(state, outcome), claimed, signer),
        )

    async def finalise_fraud(self, outcome: OutcomeProof) -> object:
        """Release the escrow of a fraud."""
        return await self._send(
            "finalise_fraud", lambda state: state.finalise_fraud(self._proof(state, outcome))
        )

    async def slash_signer(self, outcome: OutcomeProof, validator: Address) -> object:
        """Punish a wrong verdict."""
        return await self._send(
            "slash_signer",
            lambda state: state.slash_signer(self._proof(state, outcome), str(validator)),
        )

    async def slash_cooldown(self) -> int:
        """Return the seconds after a pause of slashing before which there is no other."""
        return int(self._chain.fixed.slash_cooldown)

    async def pause_slashing(
        self, run_id: RunId, cause: PauseCause, reason: int, evidence_hash: Hash32
    ) -> object:
        """Stop the run's fraud executions for a while."""
        said = (str(self.account), int(run_id), list(PauseCause).index(cause), reason)
        why = evidence_hash.hex()
        return await self._send("pause_slashing", lambda state: state.pause_slashing(*said, why))

    async def slash_absent_juror(self, leaf: Hash32, juror: Address) -> object:
        """No cases are opened in the simulation."""
        raise NotImplementedError(f"no juror sits in the simulation: {leaf.hex()} {juror}")

    async def slash_overdue(self, batch: Batch, validator: Address) -> object:
        """Punish a missed deadline."""
        caller = str(self.account)
        return await self._send(
            "slash_overdue",
            lambda state: state.slash_overdue(caller, self._header(state, batch), str(validator)),
        )


# -------------------------------------------------------------- relays, machines


@dataclass(slots=True)
class SimulatedFetcher:
    """Relays: a policy takes its size over the bandwidth, and sometimes nobody has it."""

    rng: random.Random
    """Decides."""
    seconds: float
    """Mean seconds that a version takes."""
    failures: float
    """Share of tries that no relay answers."""

    async def fetch(self, _run_id: RunId, version: PolicyVersion, _root: Hash32) -> Path:
        """Return where the policy is."""
        await asyncio.sleep(self.seconds * self.rng.expovariate(1.0))
        if self.rng.random() < self.failures:
            raise PolicyUnavailable(f"no relay has version {version}")
        return Path("policy")


class InlineDecoder:
    """Parses files in this process: they were written by it."""

    async def decode(self, data: bytes, *, max_rows: int = MAX_ROWS) -> list[Rollout]:
        """Return the rows of a file; raises EncodingError."""
        return decode_rollouts(data, max_rows=max_rows)


class SimulatedEngine:
    """An engine whose policy is a hash of its name, the version and the tokens so far.

    Proofs, sampling and replay are the real ones; another name is another model.
    """

    hidden_size = 8
    vocab_size = EOS + 1
    eos_token_ids = frozenset([EOS])

    def __init__(self, name: str = "policy") -> None:
        self.name = name
        self.policy_version: PolicyVersion | None = None

    def load_policy(self, _folder: Path, version: PolicyVersion) -> None:
        """Load a version."""
        self.policy_version = version

    def generate(self, requests: Sequence[Request], *, proof: ProofRecipe) -> list[Completion]:
        """Return completions with proofs."""
        return [self._generate(request, proof) for request in requests]

    def prefill(self, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Prefill]:
        """Return what the policy computes for completions."""
        return [self._prefill(prompt, completion) for prompt, completion in samples]

    def encode(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return a text's tokens."""
        assert is_start is not None
        return tuple(ALPHABET.index(character) for character in text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return a completion's text."""
        return "".join(ALPHABET[token] for token in tokens if token != EOS)

    def _generate(self, request: Request, proof: ProofRecipe) -> Completion:
        tokens: list[int] = []
        hidden = []
        while len(tokens) < request.max_new_tokens and EOS not in tokens:
            row, logits = self._step((*request.prompt_tokens, *tokens))
            position = request.position + len(tokens)
            noise = gumbel_noise([request.seed], [position], self.vocab_size)[0]
            tokens.append(int((logits + noise).argmax()))
            hidden.append(row)
        proofs = build_proofs(np.stack(hidden), chunk_tokens=proof.chunk_tokens, topk=proof.topk)
        return Completion(tuple(tokens), proofs)

    def _prefill(self, prompt: Sequence[int], completion: Sequence[int]) -> Prefill:
        steps = [self._step((*prompt, *completion[:i])) for i in range(len(completion))]
        hidden, logits = zip(*steps, strict=True)
        return Prefill(np.stack(hidden), np.stack(logits))

    def _step(
        self, tokens: tuple[int, ...]
    ) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]:
        name = repr((self.name, self.policy_version, tokens)).encode()
        size = self.hidden_size + self.vocab_size
        drawn = np.frombuffer(hashlib.shake_128(name).digest(4 * size), "<u4")
        values = (drawn.astype(np.float32) / np.float32(2**31) - 1).astype(np.float32)
        hidden = np.ascontiguousarray(values[: self.hidden_size])
        return (hidden.view(np.uint32) >> 16).astype(np.uint16), 3 * values[self.hidden_size :]
