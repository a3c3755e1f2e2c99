"""The frozen messages between components, with their hashes and byte layouts.

docs/protocol.md specifies the layouts. Peers' bytes are validated once, when they are parsed into
these types; inside, nothing checks again.
"""

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

from muster.protocol.eip712 import struct_hash
from muster.protocol.encoding import address_bytes, hex0x, keccak, require_uint
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step, to_address, to_hash32
from muster.protocol.reasons import Reason as Reason, Verdict as Verdict

COMMIT_GRACE_S = 60
"""A batch may be committed this long after a ticket's deadline before its submission is late."""


class SignedMessage:
    """A dataclass with the fields of its EIP-712 type, in that order, in snake case.

    Unless the class says otherwise, the domain is ContributionLedger's.
    """

    __slots__ = ()
    TYPE: ClassVar[str]
    """The type in EIP-712's notation."""

    def struct_hash(self) -> Hash32:
        """Return the EIP-712 struct hash."""
        members = _members(self.TYPE)
        values = list(members.values_of(self))
        for place in members.addresses:
            values[place] = address_bytes(values[place])
        return struct_hash(self.TYPE, *values)


class JsonMessage(SignedMessage):
    """A message that also travels as JSON: addresses and hashes as hexadecimal text."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form used by the HTTP API."""
        members = _members(self.TYPE)
        fields = zip(members.parsers, members.values_of(self), strict=True)
        return {name: hex0x(v) if isinstance(v, bytes) else v for name, v in fields}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse the JSON form; raises EncodingError on anything else."""
        make: Any = cls
        with _parsing(cls.__name__):
            parsers = _members(cls.TYPE).parsers
            message: Self = make(*[parse(value[name]) for name, parse in parsers.items()])
            return message


_CAPITAL = re.compile("([A-Z])")


class _Members(NamedTuple):
    """The fields of an EIP-712 type in a message; computed once per type, because that is slow."""

    values_of: Callable[[SignedMessage], tuple[Any, ...]]
    addresses: list[int]
    """The places of fields that are addresses."""
    parsers: dict[str, Callable[[Any], Any]]
    """Parsers of the fields' JSON values, by field name."""


@cache
def _members(type_string: str) -> _Members:
    fields = [field.split(" ") for field in type_string[:-1].split("(")[1].split(",")]
    kinds = {_CAPITAL.sub(r"_\1", name).lower(): kind for kind, name in fields}
    addresses = [place for place, kind in enumerate(kinds.values()) if kind == "address"]
    parsers = {name: _parser(kind, name) for name, kind in kinds.items()}
    return _Members(attrgetter(*kinds), addresses, parsers)


def _parser(kind: str, name: str) -> Callable[[Any], Any]:
    known: dict[str, Callable[[Any], Any]]
    known = {"address": to_address, "bytes32": to_hash32, "string": str}
    return known.get(kind) or partial(_uint, name, int(kind.removeprefix("uint")))


class _parsing:
    """Turns the errors that hostile JSON causes in Python into an EncodingError."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _tb: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError)):
            what = _CAPITAL.sub(r" \1", self.what).strip().lower()
            raise EncodingError(f"malformed {what}: {error}") from error


def _uint(name: str, bits: int, value: Any) -> int:
    if type(value) is not int:
        raise EncodingError(f"{name} must be an integer, got {value!r}")
    return require_uint(name, value, bits)


@dataclass(frozen=True, slots=True)
class Ticket(JsonMessage):
    """The right to fill one slot, signed by the run's orchestrator."""

    TYPE = (
        "Ticket(uint64 runId,address worker,uint32 step,uint32 index,uint32 policyVersion,"
        "bytes32 policyRoot,bytes32 beacon,uint64 deadline)"
    )

    run_id: RunId
    worker: Address
    """The staking wallet that is paid or slashed."""
    step: Step
    index: int
    """Slot number, drawn once per worker and step. uint32."""
    policy_version: PolicyVersion
    """The policy that must generate."""
    policy_root: Hash32
    """Root of that policy's manifest, as on chain."""
    beacon: Hash32
    """Hash of the block that published that policy, or in which the worker joined the run: the
    later one."""
    deadline: int
    """Unix seconds after which the upload is late."""


@dataclass(frozen=True, slots=True)
class Submission(JsonMessage):
    """A worker's claim over one file of rollouts, signed by its node key."""

    TYPE = (
        "Submission(uint64 runId,address worker,uint32 step,uint32 index,uint32 policyVersion,"
        "bytes32 fileHash,uint32 rollouts,uint64 units)"
    )

    run_id: RunId
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

    def leaf(self) -> Hash32:
        """Return the leaf of a batch's Merkle tree: `keccak256(structHash)`."""
        return keccak(self.struct_hash())


@dataclass(frozen=True, slots=True)
class HardwareReport(JsonMessage):
    """A node's own claim about its machine, signed by its key. Its real speed is measured."""

    TYPE = (
        "HardwareReport(uint64 runId,address node,uint32 cpuCores,uint64 memoryMb,uint32 gpus,"
        "uint64 gpuMemoryMb,uint64 issuedAt)"
    )

    run_id: RunId
    """The run that the report is for."""
    node: Address
    """The node that signs."""
    cpu_cores: int
    """Cores it may use. uint32."""
    memory_mb: int
    """Main memory in MiB. uint64."""
    gpus: int
    gpu_memory_mb: int
    """Memory of the largest of them in MiB. uint64."""
    issued_at: int
    """Unix seconds of its clock. uint64."""


_RECORD = struct.Struct(">IIII32sHIBB")
_SLOT, _HASH_AT = struct.Struct(">III44x"), 16
# Looked up much faster than an enumeration's member is made from its number.
_VERDICTS = {int(verdict): verdict for verdict in Verdict}
_REASONS = {int(reason): reason for reason in Reason}


@dataclass(frozen=True, slots=True)
class OutcomeRecord:
    """One submission's outcome as stored on chain: 56 bytes, big-endian, no padding."""

    SIZE = _RECORD.size

    worker_id: int
    """The worker's number in WorkerRegistry. uint32."""
    step: Step
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
        *claim, verdict, reason = _RECORD.unpack(data)
        with _parsing(cls.__name__):
            values = (*claim, Verdict(verdict), Reason(reason))
            return cls(*values)

    def leaf(self, batch_id: int, position: int) -> Hash32:
        """Return the leaf of the outcomes tree: `keccak256(uint64 batchId ‖ uint32 i ‖ record)`.

        Its 68-byte preimage cannot be confused with a 64-byte inner node.
        """
        prefix = require_uint("batch_id", batch_id, 64).to_bytes(8, "big")
        return keccak(
            prefix + require_uint("position", position, 32).to_bytes(4, "big") + self.to_bytes()
        )


def pack_records(records: list[OutcomeRecord]) -> bytes:
    """Return the records of a batch, one after the other, in batch order."""
    return b"".join(record.to_bytes() for record in records)


def unpack_records(data: bytes) -> list[OutcomeRecord]:
    """Parse a batch's records; raises EncodingError on a partial or unknown record."""
    size = OutcomeRecord.SIZE
    if not data or len(data) % size:
        raise EncodingError(f"{len(data)} bytes are not a whole number of {size}-byte records")
    with _parsing(OutcomeRecord.__name__):
        return [
            OutcomeRecord(*(*claim, _VERDICTS[verdict], _REASONS[reason]))
            for *claim, verdict, reason in _RECORD.iter_unpack(data)
        ]


# Single fields of packed records that may be many, without an object for each.


def slots_in(packed: bytes) -> Iterator[tuple[int, int, int]]:
    """Return the worker, step and index of packed records."""
    return _SLOT.iter_unpack(packed)


def file_hashes_in(packed: bytes) -> Iterator[bytes]:
    """Return the file hashes of packed records."""
    return (packed[at : at + 32] for at in range(_HASH_AT, len(packed), OutcomeRecord.SIZE))


def verdicts_in(packed: bytes) -> bytes:
    """Return the verdicts of packed records, a byte each."""
    return packed[OutcomeRecord.SIZE - 2 :: OutcomeRecord.SIZE]


@dataclass(frozen=True, slots=True)
class Outcomes(SignedMessage):
    """The outcomes of every submission of one batch, signed by a validator."""

    TYPE = "Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)"

    batch_id: int
    """The batch, as numbered by ContributionLedger from 1. uint64."""
    batch_root: Hash32
    """The root the batch was committed with."""
    records_hash: Hash32
    """Keccak-256 of the packed records."""


@dataclass(frozen=True, slots=True)
class NodeRegistration(SignedMessage):
    """A node key's consent to act for a worker: proof of possession, made by the node key.

    Its domain is WorkerRegistry's.
    """

    TYPE = "NodeRegistration(address worker,address node,uint256 nonce,uint256 deadline)"

    worker: Address
    """The staking wallet."""
    node: Address
    """The hot key that consents."""
    nonce: int
    """`WorkerRegistry.nonces(worker)` at signing time."""
    deadline: int
    """Unix seconds after which the consent lapses."""


@dataclass(frozen=True, slots=True)
class Checkpoint(SignedMessage):
    """A published policy version, signed by the trainer. Its domain is RunRegistry's."""

    TYPE = "Checkpoint(uint64 runId,uint32 version,bytes32 manifestRoot)"

    run_id: RunId
    version: PolicyVersion
    manifest_root: Hash32
    """Keccak-256 of the canonical manifest."""


@dataclass(frozen=True, slots=True)
class ApiRequest(SignedMessage):
    """One HTTP request, signed by a node."""

    TYPE = (
        "ApiRequest(string audience,string method,string path,bytes32 bodyHash,"
        "bytes32 nonce,uint64 issuedAt)"
    )

    audience: str
    """Account address of the orchestrator that may act on it, checksummed."""
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


@dataclass(frozen=True, slots=True)
class NetworkDocument(SignedMessage):
    """The description of a run's network, signed by the run's orchestrator."""

    TYPE = "NetworkDocument(uint64 runId,bytes32 documentHash)"

    run_id: RunId
    """The run it serves."""
    document_hash: Hash32
    """Keccak-256 of the document's bytes, as served."""
