"""The JSON bodies of requests, typed: the client writes them, the orchestrator parses them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from muster.api.answers import AccountAddress, HexBytes, HexHash, HexSignature


class Body(BaseModel):
    """Base of JSON bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HardwareBody(Body):
    """What a node says its machine has."""

    report: dict[str, Any]
    """The report in its JSON form."""
    signature: HexSignature
    """EIP-712 `HardwareReport` by the node."""


class HeartbeatBody(Body):
    """What a node says of itself."""

    run_id: int
    """The run."""
    policy_version: Annotated[int, Field(ge=0, lt=1 << 32)] | None
    """The policy it has loaded."""
    state: Annotated[str, Field(max_length=32)]
    """What it does."""
    software: Annotated[str, Field(max_length=64)]
    """Its software and version."""
    hardware: HardwareBody | None = None
    """What its machine has, once and when it is asked for."""


class LeaseBody(Body):
    """Which run's work is asked for."""

    run_id: int
    """The run."""


class OutcomesBody(Body):
    """A validator's outcomes of one batch."""

    records: HexBytes
    """The packed records; none when nothing of the batch can be had."""
    signature: HexSignature
    """EIP-712 `Outcomes`."""


class MetricsBody(Body):
    """Figures of one training step or evaluation."""

    step: Annotated[int, Field(ge=0, lt=1 << 32)]
    """Training step, or policy version evaluated."""
    metrics: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")],
            Annotated[float, Field(allow_inf_nan=False)],
        ],
        Field(max_length=64),
    ]
    """Name to number."""


Count = Annotated[int, Field(ge=0, lt=1 << 32)]
"""A uint32."""


class CheckingBody(Body):
    """A validator's commitment to its fingerprints of one batch."""

    records_hash: HexHash
    """Keccak-256 of the outcomes that go with them."""
    fingerprints_hash: HexHash
    """What they hash to."""
    signature: HexSignature
    """EIP-712 `Checking`."""


class FingerprintsBody(Body):
    """The fingerprints that a validator committed to."""

    fingerprints: HexBytes
    """Packed, in batch order."""


class ReportBody(Body):
    """What one validator says about another's fingerprints."""

    batch_root: HexHash
    """The batch's root."""
    validator: AccountAddress
    """Whose they are."""
    fingerprints_hash: HexHash
    """What they hash to."""
    compared: Count
    """Submissions compared."""
    failed: Count
    """Those whose fingerprints come from no recomputation."""
    signature: HexSignature
    """EIP-712 `CheckReport`."""
