"""The frozen messages that travel between components, with their hashes and byte layouts.

Layouts are normative in docs/protocol.md. Parsing peers' bytes into these types is the only place
where they are validated; inside, nothing checks again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from muster.protocol.eip712 import struct_hash
from muster.protocol.encoding import address_bytes, hex0x, keccak, require_uint
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step, to_address, to_hash32

COMMIT_GRACE_S = 60
"""A batch may be committed this long after a ticket's deadline before its submission is late."""


class Verdict(IntEnum):
    """What validators decide about a submission."""

    ACCEPTED = 1
    """Paid, and offered to training, whose filters may leave it out."""
    INCOMPLETE = 2
    """Not paid, not punished: an honest crash explains it."""
    REJECTED = 3
    """Not paid."""
    FRAUD = 4
    """Slashed."""


class Reason(IntEnum):
    """Why a submission was not accepted; the tens digit is the check of docs/protocol.md."""

    NONE = 0
    """Accepted."""
    FILE_TOO_LARGE = 10
    """The file or its row count exceeds the caps."""
    BAD_SIGNATURE = 11
    """Not signed by the node of an active worker."""
    UNKNOWN_TICKET = 12
    """No valid ticket for the slot."""
    LATE = 13
    """Arrived after the ticket's deadline."""
    SLOT_REUSED = 14
    """The slot (run, worker, step, index) already has an outcome."""
    FILE_UNAVAILABLE = 15
    """The committed file cannot be fetched."""
    BATCH_MISDECLARED = 16
    """The batch holds more units than it was committed for, so that none of it can be paid."""
    SCHEMA = 20
    """Not a Parquet file of the expected schema, or a value is out of range."""
    PROOF_COUNT = 21
    """A sample lacks proofs or has too many."""
    PROOF_ENCODING = 22
    """A proof does not parse or is not canonical."""
    FILE_INCOMPLETE = 23
    """Whole groups are missing at the end of the file."""
    WRONG_PROBLEM = 30
    """A problem, prompt or target length is not the derived one."""
    WRONG_SEED = 31
    """A sampling seed is not the derived one."""
    WRONG_POLICY = 32
    """Rows claim another policy version than the ticket's."""
    WRONG_REPLY = 33
    """Within a completion something else is replied than its task's environment does."""
    WRONG_REWARD = 40
    """A reward is not what the task's verifier computes."""
    WRONG_UNITS = 41
    """The claimed units are not what the completions add up to."""
    WRONG_TERMINATION = 50
    """A completion ends neither in EOS within the limit nor at the limit."""
    TOPLOC_MISMATCH = 60
    """Hidden states do not match the committed proofs."""
    SAMPLER_MISMATCH = 70
    """Tokens are not what verifiable sampling yields."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to fill one slot, signed by the run's orchestrator."""

    TYPE = (
        "Ticket(uint64 runId,address worker,uint32 step,uint32 index,uint32 policyVersion,"
        "bytes32 policyRoot,bytes32 beacon,uint64 deadline)"
    )

    run_id: RunId
    """The run."""
    worker: Address
    """The staking wallet that is paid or slashed."""
    step: Step
    """Rollout step."""
    index: int
    """Slot number, contiguous from 0 per worker and step. uint32."""
    policy_version: PolicyVersion
    """The policy that must generate."""
    policy_root: Hash32
    """Root of that policy's manifest, as on chain."""
    beacon: Hash32
    """Hash of the block that published that policy."""
    deadline: int
    """Unix seconds after which the upload is late."""

    def struct_hash(self) -> Hash32:
        """Return the EIP-712 struct hash (domain: ContributionLedger)."""
        return struct_hash(
            self.TYPE,
            self.run_id,
            address_bytes(self.worker),
            self.step,
            self.index,
            self.policy_version,
            self.policy_root,
            self.beacon,
            self.deadline,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form used by the HTTP API."""
        return {
            "run_id": self.run_id,
            "worker": self.worker,
            "step": self.step,
            "index": self.index,
            "policy_version": self.policy_version,
            "policy_root": hex0x(self.policy_root),
            "beacon": hex0x(self.beacon),
            "deadline": self.deadline,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse the JSON form; raises EncodingError on anything else."""
        with _parsing("ticket"):
            return cls(
                run_id=RunId(_uint(value, "run_id", 64)),
                worker=to_address(value["worker"]),
                step=Step(_uint(value, "step", 32)),
                index=_uint(value, "index", 32),
                policy_version=PolicyVersion(_uint(value, "policy_version", 32)),
                policy_root=to_hash32(value["policy_root"]),
                beacon=to_hash32(value["beacon"]),
                deadline=_uint(value, "deadline", 64),
            )


@dataclass(frozen=True, slots=True)
class Submission:
    """A worker's claim over one file of rollouts, signed by its node key."""

    TYPE = (
        "Submission(uint64 runId,address worker,uint32 step,uint32 index,uint32 policyVersion,"
        "bytes32 fileHash,uint32 rollouts,uint64 units)"
    )

    run_id: RunId
    """The run."""
    worker: Address
    """The staking wallet that is paid or slashed."""
    step: Step
    """Rollout step of the ticket."""
    index: int
    """Slot number of the ticket. uint32."""
    policy_version: PolicyVersion
    """The policy that generated the rollouts."""
    file_hash: Hash32
    """SHA-256 of the Parquet file."""
    rollouts: int
    """Rows in the file. uint32."""
    units: int
    """Completion tokens, capped per sample: what is paid. uint64."""

    def struct_hash(self) -> Hash32:
        """Return the EIP-712 struct hash (domain: ContributionLedger)."""
        return struct_hash(
            self.TYPE,
            self.run_id,
            address_bytes(self.worker),
            self.step,
            self.index,
            self.policy_version,
            self.file_hash,
            self.rollouts,
            self.units,
        )

    def leaf(self) -> Hash32:
        """Return the leaf of a batch's Merkle tree: `keccak256(structHash)`."""
        return keccak(self.struct_hash())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form used by the HTTP API."""
        return {
            "run_id": self.run_id,
            "worker": self.worker,
            "step": self.step,
            "index": self.index,
            "policy_version": self.policy_version,
            "file_hash": hex0x(self.file_hash),
            "rollouts": self.rollouts,
            "units": self.units,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse the JSON form; raises EncodingError on anything else."""
        with _parsing("submission"):
            return cls(
                run_id=RunId(_uint(value, "run_id", 64)),
                worker=to_address(value["worker"]),
                step=Step(_uint(value, "step", 32)),
                index=_uint(value, "index", 32),
                policy_version=PolicyVersion(_uint(value, "policy_version", 32)),
                file_hash=to_hash32(value["file_hash"]),
                rollouts=_uint(value, "rollouts", 32),
                units=_uint(value, "units", 64),
            )


@dataclass(frozen=True, slots=True)
class HardwareReport:
    """What a node says its machine has, signed by its key. What it is worth is measured."""

    TYPE = (
        "HardwareReport(uint64 runId,address node,uint32 cpuCores,uint64 memoryMb,uint32 gpus,"
        "uint64 gpuMemoryMb,uint64 issuedAt)"
    )

    run_id: RunId
    """The run it is meant for."""
    node: Address
    """The node that signs."""
    cpu_cores: int
    """Cores it may use. uint32."""
    memory_mb: int
    """Main memory in MiB. uint64."""
    gpus: int
    """GPUs. uint32."""
    gpu_memory_mb: int
    """Memory of the largest of them in MiB. uint64."""
    issued_at: int
    """Unix seconds of its clock. uint64."""

    def struct_hash(self) -> Hash32:
        """Return the EIP-712 struct hash (domain: ContributionLedger)."""
        return struct_hash(
            self.TYPE,
            self.run_id,
            address_bytes(self.node),
            self.cpu_cores,
            self.memory_mb,
            self.gpus,
            self.gpu_memory_mb,
            self.issued_at,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form used by the HTTP API."""
        return {
            "run_id": self.run_id,
            "node": self.node,
            "cpu_cores": self.cpu_cores,
            "memory_mb": self.memory_mb,
            "gpus": self.gpus,
            "gpu_memory_mb": self.gpu_memory_mb,
            "issued_at": self.issued_at,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse the JSON form; raises EncodingError on anything else."""
        with _parsing("hardware report"):
            return cls(
                run_id=RunId(_uint(value, "run_id", 64)),
                node=to_address(value["node"]),
                cpu_cores=_uint(value, "cpu_cores", 32),
                memory_mb=_uint(value, "memory_mb", 64),
                gpus=_uint(value, "gpus", 32),
                gpu_memory_mb=_uint(value, "gpu_memory_mb", 64),
                issued_at=_uint(value, "issued_at", 64),
            )


_RECORD = struct.Struct(">IIII32sHIBB")


@dataclass(frozen=True, slots=True)
class OutcomeRecord:
    """One submission's outcome as it stands on chain: 56 bytes, big-endian, no padding."""

    SIZE = _RECORD.size

    worker_id: int
    """The worker's number in WorkerRegistry. uint32."""
    step: Step
    """Rollout step."""
    index: int
    """Slot number. uint32."""
    policy_version: PolicyVersion
    """The policy that generated the rollouts."""
    file_hash: Hash32
    """SHA-256 of the Parquet file."""
    rollouts: int
    """Rows in the file. uint16."""
    units: int
    """Units as recomputed by the validators; what is paid if accepted. uint32."""
    verdict: Verdict
    """The decision."""
    reason: Reason
    """Why, when it is not Accepted."""

    def to_bytes(self) -> bytes:
        """Return the 56-byte record; raises EncodingError when a value does not fit."""
        try:
            return _RECORD.pack(
                self.worker_id,
                self.step,
                self.index,
                self.policy_version,
                self.file_hash,
                self.rollouts,
                self.units,
                self.verdict,
                self.reason,
            )
        except struct.error as error:
            raise EncodingError(f"outcome record: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse 56 bytes; raises EncodingError on a wrong size or an unknown verdict or reason."""
        if len(data) != cls.SIZE:
            raise EncodingError(f"an outcome record has {cls.SIZE} bytes, got {len(data)}")
        worker_id, step, index, version, file_hash, rollouts, units, verdict, reason = (
            _RECORD.unpack(data)
        )
        with _parsing("outcome record"):
            return cls(
                worker_id=worker_id,
                step=Step(step),
                index=index,
                policy_version=PolicyVersion(version),
                file_hash=Hash32(file_hash),
                rollouts=rollouts,
                units=units,
                verdict=Verdict(verdict),
                reason=Reason(reason),
            )

    def leaf(self, batch_id: int, position: int) -> Hash32:
        """Return the leaf of the outcomes tree: `keccak256(uint64 batchId ‖ uint32 i ‖ record)`.

        Its 68-byte preimage cannot be confused with a 64-byte inner node.
        """
        prefix = require_uint("batch_id", batch_id, 64).to_bytes(8, "big")
        return keccak(
            prefix + require_uint("position", position, 32).to_bytes(4, "big") + self.to_bytes()
        )

    @property
    def is_exact_fraud(self) -> bool:
        """Whether validators found a fault that one look proves: checks 3 to 5."""
        return self.verdict is Verdict.FRAUD and 30 <= self.reason < 60


def pack_records(records: list[OutcomeRecord]) -> bytes:
    """Return the records of a batch, one after the other, in batch order."""
    return b"".join(record.to_bytes() for record in records)


def unpack_records(data: bytes) -> list[OutcomeRecord]:
    """Parse a batch's records; raises EncodingError on a partial or unknown record."""
    size = OutcomeRecord.SIZE
    if not data or len(data) % size:
        raise EncodingError(f"{len(data)} bytes are not a whole number of {size}-byte records")
    return [OutcomeRecord.from_bytes(data[i : i + size]) for i in range(0, len(data), size)]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What a validator signs: the outcomes of every submission of one batch."""

    TYPE = "Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)"

    batch_id: int
    """The batch, as numbered by ContributionLedger from 1. uint64."""
    batch_root: Hash32
    """The root the batch was committed with."""
    records_hash: Hash32
    """Keccak-256 of the packed records."""

    def struct_hash(self) -> Hash32:
        """Return the EIP-712 struct hash (domain: ContributionLedger)."""
        return struct_hash(self.TYPE, self.batch_id, self.batch_root, self.records_hash)


@dataclass(frozen=True, slots=True)
class NodeRegistration:
    """A node key's consent to act for a worker: proof of possession, made by the node key."""

    TYPE = "NodeRegistration(address worker,address node,uint256 nonce,uint256 deadline)"

    worker: Address
    """The staking wallet."""
    node: Address
    """The hot key that consents."""
    nonce: int
    """`WorkerRegistry.nonces(worker)` at signing time."""
    deadline: int
    """Unix seconds after which the consent lapses."""

    def struct_hash(self) -> Hash32:
        """Return the EIP-712 struct hash (domain: WorkerRegistry)."""
        return struct_hash(
            self.TYPE,
            address_bytes(self.worker),
            address_bytes(self.node),
            self.nonce,
            self.deadline,
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the trainer signs about a published policy version."""

    TYPE = "Checkpoint(uint64 runId,uint32 version,bytes32 manifestRoot)"

    run_id: RunId
    """The run."""
    version: PolicyVersion
    """The policy version."""
    manifest_root: Hash32
    """Keccak-256 of the canonical manifest."""

    def struct_hash(self) -> Hash32:
        """Return the EIP-712 struct hash (domain: RunRegistry)."""
        return struct_hash(self.TYPE, self.run_id, self.version, self.manifest_root)


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """What a node signs to make one HTTP request."""

    TYPE = (
        "ApiRequest(string audience,string method,string path,bytes32 bodyHash,"
        "bytes32 nonce,uint64 issuedAt)"
    )

    audience: str
    """Who may act on it: the orchestrator's account address, checksummed."""
    method: str
    """Upper-case HTTP method."""
    path: str
    """Path with the query string, as sent."""
    body_hash: Hash32
    """SHA-256 of the body (of the empty string when there is none)."""
    nonce: Hash32
    """Random; used once per signer."""
    issued_at: int
    """Unix seconds. uint64."""

    def struct_hash(self) -> Hash32:
        """Return the EIP-712 struct hash (domain: ContributionLedger)."""
        return struct_hash(
            self.TYPE,
            self.audience,
            self.method,
            self.path,
            self.body_hash,
            self.nonce,
            self.issued_at,
        )


@dataclass(frozen=True, slots=True)
class NetworkDocument:
    """What a run's orchestrator signs to say where the run's network is."""

    TYPE = "NetworkDocument(uint64 runId,bytes32 documentHash)"

    run_id: RunId
    """The run it serves."""
    document_hash: Hash32
    """Keccak-256 of the document's bytes, as served."""

    def struct_hash(self) -> Hash32:
        """Return the EIP-712 struct hash (domain: ContributionLedger)."""
        return struct_hash(self.TYPE, self.run_id, self.document_hash)


class _parsing:
    """Turns what hostile JSON makes Python raise into one EncodingError."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _tb: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError)):
            raise EncodingError(f"malformed {self.what}: {error}") from error


def _uint(value: Any, name: str, bits: int) -> int:
    number = value[name]
    if type(number) is not int:
        raise EncodingError(f"{name} must be an integer, got {number!r}")
    return require_uint(name, number, bits)
