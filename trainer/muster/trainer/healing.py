"""How a site that was away comes to the run's state with few bytes.

All sites hold the same weights and the same outer momentum after every step, bit by bit, and both
follow from the mean movements. A site that still has the state of an earlier version of this run
therefore needs only the means it missed, as they travelled: a byte per weight and version. The
others take the state itself. Optimiser moments are each site's own: who comes back goes on with
those it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from muster.protocol.ids import PolicyVersion
from muster.trainer.outer import restored


class Mean(NamedTuple):
    """The sites' mean movement in one step, as it travelled."""

    parts: list[Tensor]
    """Bytes, as each of the members made them."""

    def vector(self) -> Tensor:
        """Return the numbers, padded as they were."""
        return torch.cat([restored(part) for part in self.parts])

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self.parts))


class _Step(NamedTuple):
    digest: str
    mean: Mean


class History:
    """The newest outer steps, as far as they are fewer bytes than the state."""

    def __init__(self) -> None:
        self._steps: OrderedDict[PolicyVersion, _Step] = OrderedDict()

    def add(self, version: PolicyVersion, digest: str, mean: Mean, *, most_bytes: int) -> None:
        """Note what made a version; `digest` is that of the state before."""
        newest = next(reversed(self._steps), None)
        if newest is not None and newest + 1 != version:
            self._steps.clear()
        self._steps[version] = _Step(digest, mean)
        while sum(step.mean.size for step in self._steps.values()) > most_bytes:
            self._steps.popitem(last=False)

    def since(self, version: PolicyVersion, digest: str) -> list[Mean] | None:
        """Return what was moved since a version with this state; None when that is not known."""
        first = self._steps.get(PolicyVersion(version + 1))
        if first is None or first.digest != digest:
            return None
        return [step.mean for v, step in self._steps.items() if v > version]

    def clear(self) -> None:
        """Forget all: the state is another's now."""
        self._steps.clear()


def digest_of(version: PolicyVersion, *states: Mapping[str, Tensor]) -> str:
    """Return what two sites agree in that have a version's weights and momentum."""
    hasher = blake3(int(version).to_bytes(8, "big"))
    for state in states:
        for name, value in sorted(state.items()):
            hasher.update(name.encode() + b"\0" + value.detach().cpu().numpy().tobytes())
        hasher.update(b"\0")
    return hasher.hexdigest()


def byte_count(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
