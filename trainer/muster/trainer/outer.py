"""DiLoCo's outer step: what sites that train apart agree on now and then. Pure.

Every site takes its own inner steps from the same weights; the mean of what they moved, as a
gradient, goes through Nesterov momentum (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).
Differences travel as int8 with a float32 scale per block, rounded to the nearest (ties to even), as
INTELLECT-1's did.

Every operation is one rounding of float32 in a fixed order, so sites that start from the same
weights and receive the same bytes hold the same weights, whatever their processors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    """How much of it is taken; 1 with momentum 0 is plain averaging of weights."""
    momentum: float
    """Decay of what was moved before."""
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
