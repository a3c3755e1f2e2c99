"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with its state in a short format or in a
file.

torch's own AdamW keeps two float32 moments, eight bytes a parameter. There are two ways to need
less memory:

* bfloat16 moments: four bytes. Each step rounds them at random, up or down so that the mean is
  exact: the second moment changes by a thousandth of itself in a step, a quarter of the smallest
  change in bfloat16, and rounding to the nearest would never change it. Random bits come from the
  numbers of the step and the parameter, so a resumed run draws the same.
* a file: moments are mapped from it, and the kernel may reclaim their memory after every tensor.

Arithmetic is in float32, on a slice of the numbers at a time.
"""

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.protocol.errors import storage_error_of

StateType = Literal["float32", "bfloat16"]
"""Number formats of the optimiser's state."""
SLICE = 1 << 20
"""Numbers of a parameter that are computed at a time."""
EPSILON = 1e-8
"""Added to the root of the second moment, as torch does."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments, as in torch."""


class StateFile:
    """Tensors in one unnamed file in a folder; the file disappears when the process ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._fd, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
        weakref.finalize(self, os.close, self._fd)
        self._size = 0
        self._maps: dict[int, mmap.mmap] = {}

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros in the file; raises StorageError when the disk is full."""
        size = max(1, shape.numel() * dtype.itemsize)
        start, page = self._size, mmap.ALLOCATIONGRANULARITY
        self._size += -(-size // page) * page
        try:
            # A mapped page that finds no room on the disk would kill the process.
            os.posix_fallocate(self._fd, start, self._size - start)
        except OSError as error:
            raise storage_error_of(
                error,
                f"cannot keep the optimiser's state in {self._folder}: {error.strerror}",
                hint="free 8 bytes for each trained weight (4 with --optimizer-state bfloat16), or "
                "use --no-offload",
            ) from error
        mapped = mmap.mmap(self._fd, size, offset=start)
        numbers = torch.frombuffer(mapped, dtype=torch.uint8)[: shape.numel() * dtype.itemsize]
        made = numbers.view(dtype).view(shape)
        self._maps[made.data_ptr()] = mapped
        return made

    def let_go(self, tensor: Tensor) -> None:
        """Give a tensor's memory back to the kernel, which keeps its numbers in the file."""
        mapped = self._maps.get(tensor.data_ptr())
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)


class SmallAdamW(torch.optim.Optimizer):
    """AdamW with moments in a short format, in a file, or both."""

    def __init__(
        self,
        parameters: list[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        dtype: StateType,
        file: StateFile | None = None,
        rank: int = 0,
    ) -> None:
        """`rank` makes the random bits of this process's shards differ from other ranks'. Raises
        StorageError when the file's disk has no room for the moments.
        """
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._file, self._rank = file, rank
        if file is not None:
            self.state |= {own: self.fresh_state(own) for own in parameters}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures here
        """Take an optimiser step for the parameters that have a gradient."""
        del closure
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._step_one(group, number, parameter)

    def forget(self, parameter: Tensor) -> None:
        """Be as before the parameter's first step."""
        if self._file is None:
            self.state.pop(parameter, None)
        # A file does not give its room back.
        for value in self.state.get(parameter, {}).values():
            value.zero_()

    def fresh_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before its first step."""
        return {"step": torch.tensor(0.0)} | {name: self._zeros(parameter) for name in MOMENTS}

    def _zeros(self, parameter: Tensor) -> Tensor:
        if self._file is None:
            return torch.zeros_like(parameter, dtype=self._dtype)
        return self._file.zeros(parameter.shape, self._dtype)

    def _step_one(self, group: dict[str, Any], number: int, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state |= self.fresh_state(parameter)
        state["step"] += 1
        step = int(state["step"])
        moments = [state[name] for name in MOMENTS]
        generator = torch.Generator(parameter.device)
        generator.manual_seed(_seed(self._rank, number, step))
        # All but gradients are contiguous, so these are views: writes to them reach the tensors.
        tensors = [_flat(t) for t in (parameter, parameter.grad, *moments)]
        for own, gradient, *kept in _slices(tensors):
            mean, square = (t.to(own.device, torch.float32) for t in kept)
            gradient = gradient.float()
            _update(own, gradient, mean, square, group, step)
            for target, value in zip(kept, (mean, square), strict=True):
                if target.dtype == torch.bfloat16:
                    value = round_at_random(value, generator)
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value)
        if self._file is not None:
            for moment in moments:
                self._file.let_go(moment)


def _update(
    own: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, group: dict[str, Any], step: int
) -> None:
    """Change some weights and their moments, float32, in place."""
    rate, (first, second) = group["lr"], group["betas"]
    own.mul_(1 - rate * group["weight_decay"])
    mean.lerp_(gradient, 1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    root = square.sqrt().div_(math.sqrt(1 - second**step)).add_(EPSILON)
    own.addcdiv_(mean, root, value=-rate / (1 - first**step))


def round_at_random(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 numbers as bfloat16, rounded at random so that the mean is the number.

    A bfloat16 is the upper half of a float32's bits; a random lower half is added, and cut off.
    """
    noise = torch.randint(
        0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator
    )
    bits = value.view(torch.int32).add(noise).bitwise_and_(-(1 << 16))
    # Infinity and NaN stay as they are.
    return torch.where(value.isfinite(), bits.view(torch.float32), value).to(torch.bfloat16)


def _seed(rank: int, number: int, step: int) -> int:
    return ((rank << 20 | number) << 32) | step


def _flat(tensor: Any) -> Tensor:
    own: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach().reshape(-1)


def _slices(tensors: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(torch.split(tensor, SLICE) for tensor in tensors), strict=True)
