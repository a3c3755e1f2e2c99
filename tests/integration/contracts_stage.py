"""The chain's side of the differential test: Anvil, and the model's words in the chain's terms.

`Stage` sends one transaction per block at a time of our choosing, from any account, and returns
events or the revert. `Words` turns names into addresses, tuples into hashes and signatures.
"""

import asyncio
import struct
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from muster.chain import Deployment, contracts, structs as chain
from muster.chain.abi import Event, EventTable, contract_abi, decode_revert
from muster.chain.conversion import to_abi
from muster.chain.rpc import Rpc, from_hex
from muster.lab.simulator.model.words import NO_OFFENCE, NOBODY, Name, Place, Run, Terms
from muster.lab.simulator.model.work import (
    Claim,
    Header,
    Leased,
    Proof,
    Record,
    Statement,
    Submission,
    Ticket,
)
from muster.protocol import jury, merkle, messages
from muster.protocol.eip712 import Domain, address_of, digest, sign, struct_hash
from muster.protocol.encoding import abi_words, address_bytes, hex0x, keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import NodeRegistration

GAS = 10_000_000
MINED_S = 20.0
ZERO = Hash32(bytes(32))
PERMIT = "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
SOURCES = ["https://one.example", "https://two.example"]
CONTRACTS = ("StakeVault", "DisputeCourt", "RewardEscrow")
"""Contracts that hold tokens."""


@cache
def key_of(name: str) -> bytes:
    return keccak(b"differential test: " + name.encode())


class Words:
    """Translates the model's words into the chain's."""

    def __init__(self, names: Sequence[str], deployment: Deployment) -> None:
        self.deployment = deployment
        self.address = {name: address_of(key_of(name)) for name in names}
        self.address |= {name: deployment.contracts[name] for name in CONTRACTS}
        self.address[NOBODY] = chain.ZERO_ADDRESS
        self.rank = {name: int(address, 16) for name, address in self.address.items()}
        self.blocks: dict[int, Hash32] = {}

    def sign(self, contract: str, struct: Hash32, signer: str) -> bytes:
        """Return a signature, of the wrong length by nobody."""
        if signer == NOBODY:
            return b"nobody"
        domain = Domain(self.deployment.chain_id, self.deployment.contracts[contract])
        return sign(digest(domain, struct), key_of(signer))

    def consent(self, worker: str, node: str, nonce: int, deadline: int) -> bytes:
        message = NodeRegistration(self.address[worker], self.address[node], nonce, deadline)
        return self.sign("WorkerRegistry", message.struct_hash(), node)

    def permit(
        self, owner: str, wei: int, nonce: int, separator: Hash32
    ) -> tuple[int, Hash32, Hash32]:
        vault = address_bytes(self.address["StakeVault"])
        owner_bytes = address_bytes(self.address[owner])
        hashed = struct_hash(PERMIT, owner_bytes, vault, wei, nonce, 2**64)
        signature = sign(keccak(b"\x19\x01" + separator + hashed), key_of(owner))
        return signature[64], Hash32(signature[:32]), Hash32(signature[32:64])

    # ------------------------------------------------------------------- messages

    def submission(self, work: Submission) -> messages.Submission:
        return messages.Submission(
            run_id=RunId(work.run),
            worker=self.address[work.worker],
            step=Step(work.step),
            index=work.index,
            policy_version=PolicyVersion(work.version),
            file_hash=_file(work.file),
            rollouts=work.rollouts,
            units=work.units,
        )

    def signed(self, work: Submission, signer: str) -> bytes:
        return self.sign("ContributionLedger", self.submission(work).struct_hash(), signer)

    def ticket(self, ticket: Ticket) -> messages.Ticket:
        return messages.Ticket(
            run_id=RunId(ticket.run),
            worker=self.address[ticket.worker],
            step=Step(ticket.step),
            index=ticket.index,
            policy_version=PolicyVersion(ticket.version),
            policy_root=keccak(b"policy"),
            beacon=keccak(b"beacon"),
            deadline=ticket.deadline,
        )

    def leased(self, work: Leased) -> chain.LeasedWork:
        ticket = self.ticket(work.ticket)
        return chain.LeasedWork(
            self.submission(work.submission),
            self.signed(work.submission, work.signer),
            ticket,
            self.sign("ContributionLedger", ticket.struct_hash(), work.issuer),
        )

    def record(self, record: Record) -> bytes:
        number, step, index, version, file, *rest = record
        return struct.pack(">IIII32sHIBB", number, step, index, version, _file(file), *rest)

    def said_record(self, record: Record) -> tuple[Any, ...]:
        """Return a record as views decode it."""
        number, step, index, version, file, *rest = record
        return (number, step, index, version, _file(file), *rest)

    def joined(self, records: Sequence[Record]) -> bytes:
        return b"".join(self.record(record) for record in records)

    def statement(self, stated: Statement) -> messages.Outcomes:
        return messages.Outcomes(
            stated.batch, self.word(stated.root), keccak(self.joined(stated.records))
        )

    def stated(self, stated: Statement, signer: str) -> bytes:
        return self.sign("ContributionLedger", self.statement(stated).struct_hash(), signer)

    def leaves(self, root: Name) -> list[Hash32]:
        """Return the leaves of the tree that a root is of; none of one that is not there yet."""
        if root == NO_OFFENCE:
            return []
        if root[0] == "submissions":
            return [self.submission(work).leaf() for work in root[1]]
        return [
            self.word(("outcome", root[1], place, record)) for place, record in enumerate(root[2])
        ]

    # --------------------------------------------------------------------- proofs

    def header(self, header: Header) -> chain.Batch:
        batch, run, root, *rest, status, outcomes = header
        stands = chain.BatchStatus.of(status)
        roots = self.word(root), self.word(outcomes)
        return chain.Batch(batch, RunId(run), *roots, *rest, status=stands)

    def held(self, proof: Proof, work: Submission, signer: str, held: bool) -> chain.CommittedWork:
        """Return work with the siblings of the outcome's place, or without any."""
        siblings = self.siblings(proof.header.root, proof.position, True) if held else []
        signature = self.signed(work, signer)
        return chain.CommittedWork(self.submission(work), signature, tuple(siblings))

    def proof(self, proof: Proof) -> chain.OutcomeProof:
        siblings = self.siblings(proof.header.outcomes, proof.path, proof.intact)
        return chain.OutcomeProof(
            self.header(proof.header), proof.position, self.record(proof.record), siblings
        )

    def claim(self, claim: Claim) -> chain.RewardClaim:
        leaves = self.leaves(claim.header.outcomes)
        places = sorted({place for place in claim.positions if place < len(leaves)})
        siblings = merkle.merkle_multi_proof(leaves, places) if places else []
        if not claim.intact:
            siblings = [*siblings, keccak(b"too much")]
        return chain.RewardClaim(
            self.header(claim.header), claim.positions, self.joined(claim.records), siblings
        )

    def siblings(self, root: Name, place: int, intact: bool) -> list[Hash32]:
        """Return the proof of a leaf, or of none; one that is not intact is too long."""
        leaves = self.leaves(root)
        prove = merkle.batch_proof if root[0] == "submissions" else merkle.merkle_proof
        siblings = list(prove(leaves, place)) if place < len(leaves) else []
        return siblings if intact else [*siblings, keccak(b"too much")]

    def config(self, run: Run) -> chain.RunConfig:
        return chain.RunConfig(
            self.address[run.trainer],
            self.address[run.orchestrator],
            *(keccak(name.encode()) for name in ("model", "tasks", "recipe", "calibration")),
            terms=chain.RunTerms(*run.terms),
            validators=tuple(self.address[validator] for validator in run.validators),
        )

    # ---------------------------------------------------------------------- words

    def word(self, name: Name) -> Hash32:
        """Return the hash that a name stands for."""
        if name == NO_OFFENCE:
            return ZERO
        tag, *rest = name
        return Hash32(getattr(self, "_" + tag)(*rest))

    def _submissions(self, works: Sequence[Submission]) -> Hash32:
        return merkle.batch_root(self.leaves(("submissions", works))) if works else ZERO

    def _outcomes(self, batch: int, records: Sequence[Record]) -> Hash32:
        return merkle.merkle_root(self.leaves(("outcomes", batch, records)))

    def _outcome(self, batch: int, position: int, record: Record) -> Hash32:
        return keccak(batch.to_bytes(8, "big") + position.to_bytes(4, "big") + self.record(record))

    def _summons(self, batch: int) -> Hash32:
        return jury.summons_of(batch)

    def _escrow(self, run: int, owner: str, offence: int, tag: int) -> Hash32:
        return keccak(abi_words(run, address_bytes(self.address[owner]), offence, tag))

    def _announcement(self, claimant: str, leaf: Name, ruling: int, salt: int) -> Hash32:
        who = address_bytes(self.address[claimant])
        return keccak(abi_words(who, self.word(leaf), ruling, self._number(salt)))

    def _recordshash(self, records: Sequence[Record]) -> Hash32:
        return keccak(self.joined(records))

    def _number(self, number: int) -> Hash32:
        return Hash32(number.to_bytes(32, "big"))

    def _text(self, text: str) -> Hash32:
        return Hash32(text.encode().ljust(32, b"\0"))

    def _manifest(self, manifest: str) -> Hash32:
        return keccak(manifest.encode())

    def _result(self, result: int) -> Hash32:
        return keccak(bytes([result]))

    def _vote(self, case: Name, juror: str, ruling: int, result: int, salt: int) -> Hash32:
        named = self.word(case), address_bytes(self.address[juror]), ruling
        return keccak(abi_words(*named, self._result(result), self._number(salt)))

    def draw(
        self,
        places: Sequence[Place],
        case: Name,
        draw_block: int,
        opened_at: int,
        size: int,
        excluded: Collection[str],
    ) -> list[str]:
        bench = [jury.BenchPlace(self.address[p.juror], p.joined_at, p.left_at) for p in places]
        drawn = jury.draw_jury(
            bench,
            opened_at=opened_at,
            size=size,
            seed=jury.jury_seed(self.blocks[draw_block], self.word(case)),
            excluded=[self.address[name] for name in excluded],
        )
        names = {address: name for name, address in self.address.items()}
        return [names[address] for address in drawn]

    # --------------------------------------------------------------------- events

    def said(self, value: Any) -> Any:
        """Return a value of the model's as the chain's decoders return it."""
        if isinstance(value, Submission):
            return to_abi(self.submission(value))
        if isinstance(value, Terms):
            return tuple(value)
        if isinstance(value, Run):
            return to_abi(self.config(value))
        if isinstance(value, str):
            return ZERO if value == NO_OFFENCE else self.address[value]
        if isinstance(value, tuple):
            return self._said_tuple(value)
        return value

    def _said_tuple(self, value: tuple[Any, ...]) -> Any:
        tag, *rest = value
        if tag in self.address:
            return tuple(self.address[name] for name in value)
        if tag == "records":
            return self.joined(rest[0])
        if tag == "signed":
            return self.signed(rest[1], rest[0])
        if tag == "committed":
            work, signer, place = rest
            signature = self.signed(work, signer) if signer else b""
            siblings = () if place is None or place[2] is None else self.siblings(*place[1:], True)
            return to_abi(chain.CommittedWork(self.submission(work), signature, tuple(siblings)))
        if tag == "leased":
            return to_abi(self.leased(rest[0]))
        if tag == "verdict":
            run, owner, *others = rest
            return (run, self.address[owner], *others)
        if tag == "nothing":
            return b""
        if tag == "sources":
            return tuple(SOURCES)
        if tag == "signatures":
            return b"".join(self.stated(rest[1], signer) for signer in rest[0])
        return self.word(value)


def _file(number: int) -> Hash32:
    return keccak(b"file" + bytes([number]))


class Stage:
    """Anvil with the contracts; `acting` is who sends the next transaction, `now` when."""

    def __init__(self, rpc: Rpc, deployment: Deployment, names: Sequence[str]) -> None:
        self.rpc = rpc
        self.words = Words(names, deployment)
        self.table = EventTable(deployment.contracts)
        self.contracts = deployment.contracts
        self.acting, self.now = names[0], 0
        self.token = contracts.MusterToken(self)
        self.vault = contracts.StakeVault(self)
        self.bench = contracts.JuryPool(self)
        self.workers = contracts.WorkerRegistry(self)
        self.runs = contracts.RunRegistry(self)
        self.ledger = contracts.ContributionLedger(self)
        self.court = contracts.DisputeCourt(self)
        self.faults = contracts.FaultCourt(self)
        self.escrow = contracts.RewardEscrow(self)

    @staticmethod
    def address_of(name: str) -> Address:
        return address_of(key_of(name))

    async def write(self, contract: str, function: str, args: Sequence[Any]) -> contracts.Receipt:
        """Mine one transaction in a block of its own; raises ContractRevert."""
        transaction = {
            "from": self.words.address[self.acting],
            "to": self.contracts[contract],
            "data": hex0x(contract_abi(contract).functions[function].encode(args)),
            "gas": hex(GAS),
        }
        await self.rpc.call("evm_setNextBlockTimestamp", self.now)
        tx = await self.rpc.call("eth_sendTransaction", transaction)
        receipt = await self._receipt(tx)
        number = from_hex(receipt["blockNumber"])
        self.words.blocks[number] = Hash32(bytes.fromhex(receipt["blockHash"][2:]))
        if not from_hex(receipt["status"]):
            trace = await self.rpc.call(
                "debug_traceTransaction",
                tx,
                {"tracer": "callTracer", "tracerConfig": {"onlyTopCall": True}},
            )
            raise decode_revert(bytes.fromhex(trace.get("output", "0x")[2:]), tx=tx)
        events = [self.table.decode(log, self.now) for log in receipt["logs"]]
        return contracts.Receipt(tx, number, from_hex(receipt["gasUsed"]), [e for e in events if e])

    async def _receipt(self, tx: str) -> Any:
        # Anvil mines in the background: it may answer before it has.
        async with asyncio.timeout(MINED_S):
            while (receipt := await self.rpc.call("eth_getTransactionReceipt", tx)) is None:
                await asyncio.sleep(0.001)
        return receipt

    async def read(self, contract: str, function: str, args: Sequence[Any]) -> tuple[Any, ...]:
        (answer,) = await self.read_all([(contract, function, args)])
        return answer

    async def read_all(
        self, calls: Sequence[tuple[str, str, Sequence[Any]]]
    ) -> list[tuple[Any, ...]]:
        """Return the results of many views."""
        functions = [contract_abi(contract).functions[name] for contract, name, _ in calls]
        requests = [
            (
                "eth_call",
                [{"to": self.contracts[contract], "data": hex0x(function.encode(args))}, "latest"],
            )
            for (contract, _, args), function in zip(calls, functions, strict=True)
        ]
        answers = await self.rpc.batch(requests)
        return [
            function.decode(bytes.fromhex(answer[2:]))
            for function, answer in zip(functions, answers, strict=True)
        ]

    def plain(self, event: Event) -> tuple[str, dict[str, Any]]:
        """Return an event in the form that `Words.said` gives the model's."""
        return event.name, {name: _plain(value) for name, value in event.args.items()}


def _plain(value: Any) -> Any:
    return to_abi(value) if hasattr(value, "__dataclass_fields__") else value
