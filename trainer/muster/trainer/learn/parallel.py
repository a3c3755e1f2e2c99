"""The processes of one trainer: this one alone, or those that torchrun started.

Rank 0 leads: it alone talks to chain, orchestrator and disk, and sends the other ranks each command
with their share of the work. They follow, step by step. Every wait has a deadline. While the leader
waits for records, reads or writes files it sends beats, so that all ranks notice when one is gone.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muster.protocol.errors import ConfigError, NotYet
from muster.trainer.learn.recompute import blocks

T = TypeVar("T")

PIECE_BYTES = 16 << 20
"""Most bytes of a tensor that are gathered or written at a time."""
BEATS = 4
"""Number of beats that a waiting leader sends within a deadline."""


class RankLost(NotYet):
    """A process of this trainer died, or did not answer in time; all ranks that start again
    resume."""


class Ranks:
    """The processes that train one policy together; in this base class, this process alone."""

    rank = 0
    """This process's number; 0 leads."""
    size = 1
    """Number of processes."""
    context = 1
    """Number of ranks that share rows; their numbers are consecutive."""
    storage_group: Any = None
    """Process group for checkpoints, separate from training's messages."""

    @property
    def groups(self) -> int:
        """Number of groups of ranks that share rows."""
        return self.size // self.context

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its group: it alone counts what the whole group has."""
        return self.rank % self.context == 0

    def lead(self, command: str, *shares: Any) -> None:
        """On rank 0, have the others do `command`: with one share for all, or for each group."""

    @contextmanager
    def beating(self) -> Iterator[None]:
        """On rank 0, send signs of life to the others meanwhile; they only wait for commands."""
        yield

    def dismiss(self) -> None:
        """On rank 0, let the others end, if they still listen; they take no commands after that."""

    def wait_for_all(self) -> None:
        """Return when every rank is here."""

    def gather(self, own: T) -> list[T]:
        """Return what each rank gave, in order of rank; on every rank."""
        return [own]

    def gather_groups(self, own: T) -> list[T]:
        """Return each group's value, in order; all ranks of a group give the same."""
        return self.gather(own)[:: self.context]

    def merge(self, sums: Any, largest: frozenset[str]) -> None:
        """Add up the fields of a dataclass of numbers over ranks; take the maximum of `largest`."""

    @contextmanager
    def watch(self, work: str) -> Iterator[None]:
        """Raise RankLost when `work` fails because another rank is gone."""
        del work
        yield

    def wrote(self, name: str) -> bool:
        """Tell whether this rank wrote a checkpoint's file of this name."""
        return bool(name)

    def gather_stored(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return all ranks' entries on rank 0; the messages are separate from training's."""
        return dict(own)

    def pieces(self, value: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield a tensor's numbers as `pieces_of` does, on rank 0; other ranks send their shards
        and yield nothing. The messages are separate from training's, so this may run during a step.
        """
        return pieces_of(value, dtype)


ONE_PROCESS = Ranks()
"""The trainer without torchrun."""


class ContextGroup:
    """Ranks that share rows: each computes a part of every row."""

    def __init__(self, size: int, timeout: timedelta) -> None:
        """Form all groups of `size` consecutive ranks; on all ranks together."""
        self.size = size
        """Number of ranks."""
        self.place = dist.get_rank() % size
        """This rank's number among them."""
        self._group: Any = dist.new_subgroups(size, timeout=timeout)[0]  # type: ignore[no-untyped-call]  # torch's stub

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return each rank's tensor, in order of place; all are of one shape."""
        own = own.contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, self._group)
        return found

    def sum_of(self, parts: list[Tensor]) -> Tensor:
        """Return the sum of all ranks' parts for this rank; `parts` has one for each rank."""
        found = torch.empty_like(parts[0])
        dist.reduce_scatter(found, parts, group=self._group)
        return found

    def add(self, own: Tensor) -> None:
        """Add all ranks' tensors up, in place."""
        dist.all_reduce(own, group=self._group)


class Team(Ranks):
    """The ranks of a torchrun job."""

    def __init__(self, device: torch.device, timeout_s: float, context: int = 1) -> None:
        """Join the job that the environment describes; raises RankLost when it does not form.

        `context` is how many ranks share rows.
        """
        timeout = timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self.beat_s = timeout_s / BEATS
        self._lock = threading.Lock()
        self._is_dismissed = False
        with _lost("the ranks to meet"):
            dist.init_process_group(backend, timeout=timeout)
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.mesh = init_device_mesh(device.type, (self.size,))
            self.storage_group: Any = dist.new_group(backend="gloo", timeout=timeout)
            self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
            self.context = context
            self.context_group = ContextGroup(context, timeout) if context > 1 else None

    def lead(self, command: str, *shares: Any) -> None:
        """On rank 0, send a command; a single share goes to every rank."""
        if self.rank:
            return
        each = shares if len(shares) == self.groups else (*shares, None)[:1] * self.groups
        given = [(command, share) for share in each for _ in range(self.context)]
        # Beats come from another thread than commands.
        with self._lock, _lost(f"the ranks to take '{command}'"):
            dist.scatter_object_list([None], given, 0, self._group)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """On rank 0, send beats from a thread of its own meanwhile."""
        if self.rank:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over,), name="beat")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _beat(self, over: threading.Event) -> None:
        # The next command fails, too, if a rank is gone.
        with suppress(RankLost):
            while not over.wait(self.beat_s):
                self.lead("beat")

    def dismiss(self) -> None:
        """On rank 0, let the others end, if they still listen; the second call does nothing."""
        if not self._is_dismissed:
            self._is_dismissed = True
            with suppress(RankLost):
                self.lead("stop")

    def next_command(self) -> tuple[str, Any]:
        """Return the leader's next command and this rank's share; not on rank 0."""
        received: list[Any] = [None]
        with _lost("the leader's next command"):
            dist.scatter_object_list(received, None, 0, self._group)
        command, share = received[0]
        return command, share

    def wait_for_all(self) -> None:
        """Return when every rank is here."""
        with _lost("all ranks"):
            dist.barrier(self._group)

    def gather(self, own: T) -> list[T]:
        """Return what each rank gave, in order of rank; on every rank."""
        found: list[Any] = [None] * self.size
        with _lost("all ranks' values"):
            dist.all_gather_object(found, own, self._group)
        return found

    def merge(self, sums: Any, largest: frozenset[str]) -> None:
        """Add up the fields of a dataclass of numbers over ranks; take the maximum of `largest`."""
        for names, operation in (
            ([n for n in sums.__slots__ if n not in largest], dist.ReduceOp.SUM),
            ([n for n in sums.__slots__ if n in largest], dist.ReduceOp.MAX),
        ):
            values = torch.tensor([float(getattr(sums, n)) for n in names], dtype=torch.float64)
            with _lost("all ranks' sums"):
                dist.all_reduce(values, operation, self._group)
            for name, value in zip(names, values.tolist(), strict=True):
                setattr(sums, name, type(getattr(sums, name))(value))

    def share(self, tensor: Tensor) -> None:
        """Fill a tensor in main memory with rank 0's values."""
        with _lost("rank 0's tensors"):
            dist.broadcast(tensor, 0, self._group)

    @contextmanager
    def watch(self, work: str) -> Iterator[None]:
        """Raise RankLost when `work` fails because another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankLost) or not _is_about_peers(error):
                raise
            raise _rank_lost(f"the other ranks' part in {work}", error) from error

    def wrote(self, name: str) -> bool:
        """Tell whether this rank wrote a checkpoint's file of this name."""
        return name.startswith(f"__{self.rank}_") or (self.rank == 0 and not name.startswith("__"))

    def gather_stored(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return all ranks' entries on rank 0."""
        found: list[Any] = [None] * self.size
        with _lost("all ranks' files"):
            dist.gather_object(dict(own), found if self.rank == 0 else None, 0, self.storage_group)
        return {name: digest for part in found if part for name, digest in part.items()}

    def pieces(self, value: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield a tensor's numbers on rank 0, shard by shard; other ranks send theirs."""
        own = pieces_of(value.to_local() if isinstance(value, DTensor) else value, dtype)
        if not self.rank:
            yield from own
        if not isinstance(value, DTensor):
            return
        for rank in range(1, self.size):
            if self.rank == rank:
                for piece in own:
                    with _lost("rank 0 to take the policy"):
                        dist.send(piece.view(torch.uint8), 0, self.storage_group)
            elif not self.rank:
                for numbers in _piece_sizes(_shard_size(value, rank, self.size), dtype):
                    piece = torch.empty(numbers, dtype=dtype)
                    with _lost(f"rank {rank}'s part of the policy"):
                        dist.recv(piece.view(torch.uint8), rank, self.storage_group)
                    yield piece

    def leave(self) -> None:
        """End the job in good order."""
        dist.destroy_process_group()


def join(device: torch.device, timeout_s: float, context: int = 1) -> Team | None:
    """Return the torchrun job that this process is part of; None when it is on its own.

    `context` is how many ranks share rows; raises ConfigError when it does not divide the ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    require_groups(size, context)
    if size == 1:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return Team(device, timeout_s, context)


def require_groups(ranks: int, context: int) -> None:
    """Raise ConfigError unless the ranks divide into groups of `context` that share rows."""
    if ranks % context:
        raise ConfigError(
            f"{ranks} {'rank' if ranks == 1 else 'ranks'} cannot be divided into groups of "
            f"{context} that share rows",
            hint=f"start {context}, {2 * context} or more processes with torchrun, or use "
            "--context-ranks 1",
        )


@contextmanager
def _lost(awaited: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _rank_lost(awaited, error) from error


def _rank_lost(awaited: str, error: RuntimeError) -> RankLost:
    return RankLost(
        f"waiting for {awaited} failed: {str(error).splitlines()[0]}",
        hint="find the rank that ended first; start all ranks again: the run resumes from the "
        "last checkpoint",
    )


def _is_about_peers(error: RuntimeError) -> bool:
    """Tell whether a backend lost a connection; other failures of a step keep their own names."""
    words = ("gloo", "nccl", "connection", "peer", "socket", "timed out", "timeout")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


# ------------------------------------------------------------------------------- sharded models


def shard(model: Any, team: Team, compute_dtype: torch.dtype) -> Any:
    """Shard a model's parameters over the ranks, block by block, in place; returns it.

    What is trained stays float32 and is gathered in `compute_dtype`, in which all else is held.
    Gradients are summed in float32, not averaged, because the loss is normalised by counts over all
    ranks.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": team.mesh, "mp_policy": policy}
    # Part by part: until then ranks other than 0 have no memory behind their weights.
    for part in (*blocks(model), model):
        for weight in part.parameters():
            if not weight.requires_grad and weight.dtype != compute_dtype:
                weight.data = weight.data.to(compute_dtype)
        fully_shard(part, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.run_inside = MethodType(_run_inside, model)
    register_fsdp_forward_method(model, "run_inside")
    return model


def _run_inside(_model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def inside(model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result, computed with the weights outside a model's blocks gathered."""
    run = getattr(model, "run_inside", None)
    return run(function, *arguments) if run else function(*arguments)


def forget_gathered(model: Any) -> None:
    """Have the next pass gather a sharded model's weights again, because they changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(value: Tensor) -> Tensor:
    """Return a tensor that may be sharded as a whole one; on all ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def pieces_of(value: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a tensor's numbers in order, flat, in main memory and in format `dtype`: at most
    `PIECE_BYTES` at a time.
    """
    flat, start = value.detach().reshape(-1), 0
    for numbers in _piece_sizes(flat.numel(), dtype):
        yield flat[start : start + numbers].to("cpu", dtype)
        start += numbers


def is_finite(value: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Tell whether this rank's numbers of a tensor hold no NaN or infinity, converted to `dtype` if
    it is given.
    """
    own = value.to_local() if isinstance(value, DTensor) else value
    if not own.is_floating_point() or not own.numel():
        return True
    # Ten times as fast as isfinite on a CPU; both ends are NaN where any number is.
    return all(bool(end.to(dtype).isfinite()) for end in torch.aminmax(own.detach()))


def _piece_sizes(numbers: int, dtype: torch.dtype) -> Iterator[int]:
    most = PIECE_BYTES // dtype.itemsize
    for start in range(0, numbers, most):
        yield min(most, numbers - start)


def _shard_size(value: DTensor, rank: int, ranks: int) -> int:
    """Return how many numbers a rank has of a tensor: `shard` cuts its rows as torch.chunk does."""
    if value.placements != (Shard(0),):
        raise AssertionError(f"sharded otherwise: {value.placements}")
    rows, each = value.shape[0], -(-value.shape[0] // ranks)
    return max(0, min(each, rows - rank * each)) * (value.numel() // max(1, rows))


def spread(target: Tensor, source: Tensor | None) -> None:
    """Copy rank 0's whole `source` into a tensor that may be sharded; on all ranks."""
    if not isinstance(target, DTensor):
        if source is not None:
            target.copy_(source)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(target, 0)
        return
    given = torch.empty(target.shape, dtype=target.dtype) if source is None else source
    given = given.to(target.device, target.dtype)
    target.copy_(distribute_tensor(given, target.device_mesh, target.placements))


def from_leader(value: Tensor | None, like: Tensor) -> Tensor:
    """Return rank 0's tensor on every rank; other ranks give None, and `like` for its shape."""
    if value is None and not dist.is_initialized():
        raise ValueError("nobody gives the tensor")
    given = torch.empty_like(like) if value is None else value
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(given, 0)
    return given
