"""DiLoCo's outer step, by which sites that train apart come to the same weights. Pure.

Every site takes its own inner steps from the same weights; the mean of what they moved, as a
gradient, goes through Nesterov momentum (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).
Differences travel as int8 with a float32 scale per block, rounded to the nearest (ties to even), as
INTELLECT-1's did.

Every operation is one rounding of float32 in a fixed order, so sites that start from the same
weights and receive the same bytes hold the same weights, whatever their processors.

All sites hold the same weights and the same momentum after every step, and both follow from the
mean movements. A site that still has the state of an earlier version of this run therefore needs
only the means it missed, as they travelled (`OuterHistory`): a byte per weight and version. The
others take the state itself. Optimiser moments are each site's own: a site that comes back goes on
with those it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from muster.protocol.ids import PolicyVersion

BLOCK = 256
"""Numbers that share a scale: 1.6 % on top of their bytes."""
LARGEST = 127


def quantised(values_P: Tensor) -> Tensor:
    """Return numbers as bytes: int8 codes, then each block's scale in float32.

    `values_P` is finite float32 and a multiple of BLOCK long; an error is at most half a scale,
    1/254 of the block's largest number.
    """
    blocks_KB = values_P.view(-1, BLOCK)
    scale_K = blocks_KB.abs().amax(1) / LARGEST
    safe_K = torch.where(scale_K > 0, scale_K, torch.ones_like(scale_K))
    codes_KB = (blocks_KB / safe_K[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat([codes_KB.flatten().view(torch.uint8), scale_K.view(torch.uint8)])


def restored(data: Tensor) -> Tensor:
    """Return the numbers [P] that `quantised` made bytes of."""
    blocks = len(data) // (BLOCK + 4)
    codes_KB = data[: blocks * BLOCK].view(torch.int8).view(blocks, BLOCK)
    scale_K = data[blocks * BLOCK :].clone().view(torch.float32)
    return (codes_KB.float() * scale_K[:, None]).flatten()


def byte_size(numbers: int) -> int:
    """Return how many bytes so many numbers become; a multiple of BLOCK."""
    return numbers // BLOCK * (BLOCK + 4)


def mean_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean of vectors, added up in the order given."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


@dataclass(slots=True)
class OuterStep:
    """Nesterov momentum on the sites' mean movement."""

    learning_rate: float
    """Share of the mean movement that is taken; 1 with momentum 0 is plain averaging of weights."""
    momentum: float
    """Decay of earlier movements."""
    velocity: dict[str, Tensor] = field(default_factory=dict)
    """Momentum so far, by weight."""

    def apply(
        self, weights: Mapping[str, Tensor], moved: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the weights after the step; `moved` is old minus new, averaged over sites."""
        after = {}
        for name, weight in weights.items():
            velocity = self.velocity.get(name, torch.zeros_like(weight))
            # Separate operations: a fused one rounds once, and not every processor fuses.
            velocity = velocity * self.momentum
            velocity = velocity + moved[name]
            step = velocity * self.momentum
            step = (step + moved[name]) * self.learning_rate
            self.velocity[name] = velocity
            after[name] = weight - step
        return after


def joined(tensors: Mapping[str, Tensor], parts: int) -> Tensor:
    """Return tensors as one vector, in order of name, padded to whole blocks for each part."""
    flat = torch.cat([tensors[name].detach().float().flatten() for name in sorted(tensors)])
    missing = -len(flat) % (parts * BLOCK)
    return torch.nn.functional.pad(flat, (0, missing))


def split(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `joined` made one vector of."""
    found, start = {}, 0
    for name in sorted(like):
        size = like[name].numel()
        found[name] = flat[start : start + size].view(like[name].shape)
        start += size
    return found


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


class OuterHistory:
    """The newest outer steps, as far as they are fewer bytes than the state."""

    def __init__(self) -> None:
        self._steps: OrderedDict[PolicyVersion, _Step] = OrderedDict()

    def add(self, version: PolicyVersion, digest: str, mean: Mean, *, most_bytes: int) -> None:
        """Note the mean that made a version; `digest` is that of the state before."""
        newest = next(reversed(self._steps), None)
        if newest is not None and newest + 1 != version:
            self._steps.clear()
        self._steps[version] = _Step(digest, mean)
        while sum(step.mean.size for step in self._steps.values()) > most_bytes:
            self._steps.popitem(last=False)

    def since(self, version: PolicyVersion, digest: str) -> list[Mean] | None:
        """Return the means since a version with this state; None when they are not known."""
        first = self._steps.get(PolicyVersion(version + 1))
        if first is None or first.digest != digest:
            return None
        return [step.mean for v, step in self._steps.items() if v > version]

    def clear(self) -> None:
        """Forget all means: the state is another site's now."""
        self._steps.clear()


def byte_count(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
