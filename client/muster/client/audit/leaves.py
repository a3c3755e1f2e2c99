"""Leaves of many records at once: the preimages are laid out in arrays, then hashed one by one.

The layouts are those of docs/protocol.md sections 3 and 9; a test compares them with the messages'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.protocol.encoding import address_bytes, keccak
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Submission

_TYPE = keccak(Submission.TYPE.encode())
_WORDS = 9
"""Type hash and the fields of a submission."""
_FIELDS = (
    ("step", 3, 4),
    ("index", 4, 4),
    ("policy_version", 5, 4),
    ("rollouts", 7, 2),
    ("units", 8, 4),
)
"""Numbers of a record, the word that each is in a submission, and its bytes."""


def outcome_leaves(batch_id: int, records_N: NDArray[Any]) -> list[Hash32]:
    """Return the leaves of a batch's outcomes tree."""
    count = len(records_N)
    preimages = np.empty((count, 12 + records_N.dtype.itemsize), np.uint8)
    preimages[:, :8] = np.frombuffer(batch_id.to_bytes(8, "big"), np.uint8)
    preimages[:, 8:12] = np.arange(count, dtype=">u4").view(np.uint8).reshape(count, 4)
    preimages[:, 12:] = _bytes_of(records_N)
    return [keccak(row.tobytes()) for row in preimages]


def submission_leaves(
    run_id: int, records_N: NDArray[Any], addresses: Mapping[int, Address]
) -> list[Hash32] | None:
    """Return the leaves that the submissions have if the records repeat them; None when a record
    names a worker without an address.
    """
    known = {number: addresses.get(number) for number in set(records_N["worker_id"].tolist())}
    if None in known.values():
        return None
    count = len(records_N)
    preimages = np.zeros((count, _WORDS, 32), np.uint8)
    preimages[:, 0] = np.frombuffer(_TYPE, np.uint8)
    preimages[:, 1, 24:] = np.frombuffer(run_id.to_bytes(8, "big"), np.uint8)
    for number, address in known.items():
        assert address is not None  # looked at above
        mine = records_N["worker_id"] == number
        preimages[mine, 2, 12:] = np.frombuffer(address_bytes(address), np.uint8)
    for name, word, size in _FIELDS:
        preimages[:, word, 32 - size :] = _bytes_of(records_N[name])
    preimages[:, 6] = _bytes_of(records_N["file_hash"])
    return [keccak(keccak(row.tobytes())) for row in preimages]


def _bytes_of(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return each value's bytes as a row."""
    size = values.dtype.itemsize
    return np.frombuffer(values.tobytes(), np.uint8).reshape(len(values), size)
