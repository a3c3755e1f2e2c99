"""The bodies of requests: how large they may be (docs/protocol.md section 11), and what JSON holds.

The client writes them, the orchestrator parses them.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from muster.api.answers import AccountAddress, HexBytes, HexHash, HexSignature
from muster.protocol.encoding import message_fault

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_FIGURES = 192
"""Of a training step or evaluation: a mixture has some for each part."""
"""Largest submission file: `muster.protocol.rollouts.MAX_FILE_BYTES`, without its pyarrow."""
MAX_JSON_BYTES = 256 * 1024
"""Largest JSON body of a request."""
MAX_RECORDS_BYTES = 2 * 1024 * 1024
"""Largest body of an outcomes post: 4096 records of 56 bytes as hexadecimal fit four times."""
MAX_FINGERPRINTS_BODY_BYTES = 8 * 1024 * 1024
"""Largest body that shows fingerprints: of 8 million completion tokens, as hexadecimal."""
MAX_HEADER_JSON_BYTES = 2 * 1024
"""Largest `x-muster-submission` header."""

Count = Annotated[int, Field(ge=0, lt=1 << 32)]
"""A uint32."""


class Body(BaseModel):
    """Base of JSON bodies. None holds what a database, a terminal or JSON cannot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _refuse_faults(self) -> Self:
        for name, value in self.__dict__.items():
            if fault := message_fault(value):
                raise ValueError(f"{name} {fault}")
        return self


class HardwareBody(Body):
    """What a node says its machine has."""

    report: dict[str, Any]
    """The report in its JSON form."""
    signature: HexSignature
    """EIP-712 `HardwareReport` by the node."""


class HeartbeatBody(Body):
    """What a node says of itself."""

    run_id: int
    policy_version: Count | None
    """The policy it has loaded."""
    state: Annotated[str, Field(max_length=32, examples=["generating"])]
    """What it does."""
    software: Annotated[str, Field(max_length=64, examples=["muster 0.1.0"])]
    """Its software and version."""
    hardware: HardwareBody | None = None
    """What its machine has, once and when it is asked for."""


class HeldTicket(Body):
    """A ticket that somebody works on."""

    step: Count
    """Rollout step of its slot."""
    index: Count
    """Number of its slot."""


class LeaseBody(Body):
    """Which run's work is asked for."""

    run_id: int
    holding: Annotated[tuple[HeldTicket, ...], Field(max_length=64)] = ()
    """Open tickets that the node works on: it asks for another one."""
    policy_version: Count | None = None
    """The version that it holds while a newer one is on its way to it: the ticket names it, where a
    step may still train on it."""


class OutcomesBody(Body):
    """A validator's outcomes of one batch."""

    records: HexBytes
    """The packed records; none when nothing of the batch can be had."""
    signature: HexSignature
    """EIP-712 `Outcomes`."""


class MetricsBody(Body):
    """Figures of one training step or evaluation."""

    step: Count
    """Training step, or policy version evaluated."""
    metrics: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")],
            Annotated[float, Field(allow_inf_nan=False)],
        ],
        Field(max_length=MAX_FIGURES, examples=[{"reward": 0.62, "grad_norm": 0.08}]),
    ]
    """Name to number."""


class EvaluationBody(Body):
    """Figures of one policy version on held-out problems."""

    run_id: Count
    """Run of the policy: a signature for one run is none for another."""
    policy_version: Count
    """Version that was evaluated."""
    manifest_root: HexHash
    """Its root on chain: which weights were evaluated."""
    metrics: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^eval_[a-z0-9_]{1,59}$")],
            Annotated[float, Field(allow_inf_nan=False)],
        ],
        Field(max_length=MAX_FIGURES, examples=[{"eval_reward": 0.62, "eval_problems": 256}]),
    ]
    """Name to number."""


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
