"""What training takes of memory, said before anything is loaded.

Weights, gradients and the optimiser's state are counted, passes are rehearsed (`rehearsal`), and
what is free is asked of the machine. A micro-batch's tokens and what the backward pass computes
again are chosen so that all of it fits:

 1. Whatever is set stays as it is.
 2. Computing again costs time, small micro-batches hardly any: the least that is computed again for
    which a row of the longest length, or `EFFICIENT` tokens, fit.
 3. Then as many tokens as fit, up to `MOST`.

What never fits is refused, with the smallest change that would do.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoConfig

from muster.protocol.errors import ConfigError
from muster.protocol.recipe import AdapterRecipe, Recipe
from muster.protocol.sft import SftRecipe
from muster.trainer.learn.optimizer import StateType
from muster.trainer.learn.parallel import require_groups
from muster.trainer.learn.passes import ComputeType, require_dense
from muster.trainer.learn.recompute import Recompute
from muster.trainer.learn.rehearsal import PassBytes, Rehearsal

GB = 1e9
MOST = 16_384
"""Tokens of a micro-batch beyond which nothing is gained."""
EFFICIENT = 2_048
"""Tokens of a micro-batch below which products of matrices become slow."""
LEAST = 64
"""Tokens of the smallest micro-batch that is tried."""
PROMPT_TOKENS = 1_024
"""Length that is assumed of a prompt: recipes have no limit for it."""
SAVING_BYTES = 256 << 20
"""Bytes of what is on its way to the disk while versions and checkpoints are written."""
SAVING = "versions on their way out"
"""The part of a plan that this is."""
PROCESS = "process"
"""The part that is there before anything is loaded."""
TOKEN_BYTES = 36
"""Of a token in a tuple of Python's."""
LIBRARIES = 100 << 20
"""Bytes that torch and the C library take with the first step, whatever the model: code that is
loaded then, and holes between small buffers."""
MAPPED = 1 << 20
"""Bytes of a buffer that the kernel takes back as soon as it is freed (`return_freed_buffers`)."""
PROCESS_ON_GPU = 600 << 20
"""Bytes of a GPU that CUDA itself takes."""
M_MMAP_THRESHOLD = -3
"""Name of that limit in glibc's `mallopt`."""
RANKS = (2, 4, 8, 16, 32, 64)
"""Numbers of ranks that are tried for a hint."""


class MemoryShort(ConfigError):
    """Training does not fit into the memory that there is."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings that decide about memory; none where the plan chooses."""

    ranks: int = 1
    """Processes that share the model."""
    context_ranks: int = 1
    """Those of them that share rows."""
    device: str = "cpu"
    """Where the model computes."""
    compute_dtype: ComputeType = "float32"
    """Number format of passes."""
    micro_batch_tokens: int | None = None
    """Tokens that go through the model together."""
    recompute: Recompute | None = None
    """What the backward pass computes again."""
    optimizer_state: StateType = "float32"
    """Number format of the optimiser's moments."""
    offload: bool = False
    """Whether the moments are in a file."""
    memory_gb: float | None = None
    """Memory of a process, in 10^9 bytes; none for what is there."""
    evaluates: bool = False
    """Whether policies are evaluated beside training."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a recipe's training steps ask for."""

    adapter: AdapterRecipe
    """What of the model is trained."""
    longest: int
    """Tokens of the longest sample, prompt included."""
    step_tokens: int
    """Most tokens of a training step."""
    optimizer_steps: int
    """Optimiser steps of it."""
    values: int
    """Log-probabilities that are kept of each token."""
    reads_policies: bool
    """Whether other policies' weights stand in for those that are trained."""

    @classmethod
    def of(cls, recipe: Recipe | SftRecipe, positions: int | None) -> Workload:
        """Return that of a recipe, of a model with so many positions; none for any number."""
        if isinstance(recipe, SftRecipe):
            longest = min(recipe.rows.max_tokens, positions or recipe.rows.max_tokens)
            tokens = recipe.training.batch_tokens + longest
            return cls(recipe.adapter, longest, tokens, 1, 0, reads_policies=False)
        training, sampling = recipe.training, recipe.sampling
        longest = sampling.max_new_tokens + PROMPT_TOKENS
        longest = min(longest, positions or longest)
        rows = sampling.problems_per_submission * sampling.samples_per_problem
        rows *= training.submissions_per_step
        values = 1 + bool(training.kl_coefficient) + training.decoupled
        steps = training.optimizer_steps
        return cls(recipe.adapter, longest, rows * longest, steps, values, reads_policies=True)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one thing in each phase."""

    name: str
    """What it is."""
    reading: float
    """While earlier policies are read."""
    training: float
    """In optimiser steps."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The settings that were chosen, and what they take."""

    parts: tuple[Part, ...]
    """All that takes memory in a process."""
    micro_batch_tokens: int
    """Tokens that go through the model together."""
    recompute: Recompute
    """What the backward pass computes again."""
    available: float
    """Bytes that a process may have."""

    @property
    def peak(self) -> float:
        """Bytes at the worst moment."""
        return max(sum(p.reading for p in self.parts), sum(p.training for p in self.parts))

    def figures(self) -> dict[str, Any]:
        """Return the plan in gigabytes, by name."""
        return {
            "parts_gb": {
                p.name: {"reading": p.reading / GB, "training": p.training / GB} for p in self.parts
            },
            "peak_gb": self.peak / GB,
            "available_gb": self.available / GB,
            "micro_batch_tokens": self.micro_batch_tokens,
            "recompute": self.recompute,
        }

    def table(self) -> str:
        """Return the plan as text."""
        rows = [*self.parts, self._total()]
        lines = [f"{'memory of a process, GB':<32}{'reading policies':>18}{'optimiser steps':>18}"]
        lines += [f"{p.name:<32}{p.reading / GB:>18.3f}{p.training / GB:>18.3f}" for p in rows]
        return "\n".join(
            [
                *lines,
                f"peak {self.peak / GB:.2f} of {self.available / GB:.2f} GB; micro-batches of "
                f"{self.micro_batch_tokens} tokens, recompute {self.recompute}",
            ]
        )

    def _total(self) -> Part:
        return Part(
            "together", sum(p.reading for p in self.parts), sum(p.training for p in self.parts)
        )


def plan_memory(model: Path, recipe: Recipe | SftRecipe, choices: Choices) -> MemoryPlan:
    """Return a plan that fits; raises MemoryShort, with a way out, when there is none.

    `model` is the base model's folder, of which config.json alone is read.
    """
    return Planner(AutoConfig.from_pretrained(model), recipe, choices).plan()


class Planner:
    """Plans one model with one recipe."""

    def __init__(
        self,
        config: Any,
        recipe: Recipe | SftRecipe,
        choices: Choices,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        """`config` is the architecture, as transformers describes it; `rehearsal` was made for
        another plan of the same model. Raises ConfigError for a mixture of experts, and for
        ranks that do not divide into groups.
        """
        require_dense(config)
        require_groups(choices.ranks, choices.context_ranks)
        self._recipe, self._choices, self._config = recipe, choices, config
        self._rehearsal = rehearsal or Rehearsal(
            config, recipe.adapter, choices.compute_dtype, choices.device
        )
        self._process = _process_bytes(choices.device)
        self._available = (
            _available(choices.device, self._process, choices.ranks)
            if choices.memory_gb is None
            else choices.memory_gb * GB
        )
        self._work = Workload.of(recipe, getattr(config, "max_position_embeddings", None))

    def plan(self) -> MemoryPlan:
        """Return a plan that fits; raises MemoryShort when there is none."""
        found = self.found()
        if found is None:
            tokens = self._choices.micro_batch_tokens or self._useful()
            raise self._short(self._made(self._kinds()[-1], tokens))
        return found

    def found(self) -> MemoryPlan | None:
        """Return a plan that fits; None when there is none."""
        useful, efficient = self._useful(), EFFICIENT * self._choices.context_ranks
        for least in (max(useful, min(efficient, self._per_optimizer_step())), useful):
            for kind in self._kinds():
                found = self._largest(kind, least)
                if found is not None:
                    return found
        return None

    def _kinds(self) -> Sequence[Recompute]:
        """Return what may be computed again, the least first."""
        chosen = self._choices.recompute
        if not self._rehearsal.size.blocks:
            return ("none",)
        return get_args(Recompute) if chosen is None else (chosen,)

    def _useful(self) -> int:
        """Return the fewest tokens of a micro-batch that save memory."""
        return max(LEAST, min(self._work.longest, self._per_optimizer_step()))

    def _with(self, choices: Choices) -> Planner:
        """Return the planner of other choices."""
        return Planner(self._config, self._recipe, choices, self._rehearsal)

    def _per_optimizer_step(self) -> int:
        """Return the most tokens that a group of ranks has in an optimiser step."""
        groups = self._choices.ranks // self._choices.context_ranks
        steps = self._work.optimizer_steps * groups
        return max(self._work.longest, -(-self._work.step_tokens // steps))

    def _largest(self, kind: Recompute, least: int) -> MemoryPlan | None:
        """Return the plan with most tokens that fits, `least` or more."""
        fixed = self._choices.micro_batch_tokens
        tokens = fixed or MOST
        while True:
            made = self._made(kind, tokens)
            if made.peak <= self._available:
                return made
            if fixed or tokens <= least:
                return None
            tokens = max(least, tokens // 2)

    def _made(self, kind: Recompute, tokens: int) -> MemoryPlan:
        # A longer sample is a micro-batch of its own, and a step may have fewer tokens.
        alive = max(min(tokens, self._per_optimizer_step()), self._work.longest)
        passes = self._rehearsal.bytes(
            kind,
            alive,
            is_whole=self._choices.ranks == 1,
            context=self._choices.context_ranks,
        )
        return MemoryPlan(tuple(self._parts(passes)), tokens, kind, self._available)

    def _parts(self, passes: PassBytes) -> list[Part]:
        size, ranks, choices = self._rehearsal.size, self._choices.ranks, self._choices
        work = self._work
        is_adapter, is_short = bool(work.adapter.rank), choices.compute_dtype != "float32"
        frozen = size.parameters - size.trained
        weights = (4 * size.trained + (2 if is_short else 4) * frozen) / ranks
        parts = [Part(PROCESS, self._process, self._process), Part("weights", weights, weights)]
        if is_short and not is_adapter and ranks == 1:
            parts.append(Part("weights that compute", 2 * size.trained, 2 * size.trained))
        parts += [
            Part("gradients", 0, 4 * size.trained / ranks),
        ]
        moments = self._moments()
        parts.append(Part("optimiser", moments, moments))
        if work.reads_policies:
            parts.append(Part("policy that stands in", self._stand_in(is_short=is_short), 0))
        if ranks > 1:
            gathered = self._gathered(2 if is_short else 4)
            parts.append(Part("weights gathered from ranks", gathered, gathered))
        known = work.step_tokens * (TOKEN_BYTES + 4 * work.values)
        parts += [
            Part("passes", passes.reading, passes.training),
            Part("samples, log-probabilities", known, known),
        ]
        if choices.device == "cpu":
            parts.append(Part("kept by libraries", LIBRARIES, LIBRARIES))
        if choices.evaluates:
            policy = (2 if is_short else 4) * size.parameters
            parts.append(Part("evaluation", policy, policy))
        parts.append(Part(SAVING, SAVING_BYTES, SAVING_BYTES))
        return parts

    def _moments(self) -> float:
        """Return the bytes of the optimiser's state, or of what is mapped of it at a time."""
        width = 4 if self._choices.optimizer_state == "bfloat16" else 8
        size = self._rehearsal.size
        if self._choices.offload:
            return width * min(size.trained, max(size.head, size.layer))
        return width * size.trained / self._choices.ranks

    def _stand_in(self, *, is_short: bool) -> float:
        """Return the bytes of a policy whose weights stand in for those that are trained."""
        size, ranks = self._rehearsal.size, self._choices.ranks
        if self._work.adapter.rank:
            # Merged weights are mapped and converted one layer at a time.
            return ((2 if is_short else 4) + self._file_width()) * size.layer
        return (2 if is_short and ranks == 1 else 4) * size.parameters / ranks

    def _file_width(self) -> int:
        """Return the bytes of a weight in the base model's files."""
        dtype = getattr(self._config, "dtype", None)
        return dtype.itemsize if isinstance(dtype, torch.dtype) else 4

    def _gathered(self, width: int) -> float:
        """Return the bytes of the parts of a sharded model that are whole at a time."""
        size = self._rehearsal.size
        outer = size.parameters - sum(size.blocks)
        # Whole weights; of blocks also their gradient, and what it is summed up in over ranks. For
        # head and embedding passes have these.
        return outer * width + 2 * max(size.blocks, default=0) * (2 * width + 4)

    def _short(self, least: MemoryPlan) -> MemoryShort:
        return MemoryShort(
            f"training takes {least.peak / GB:.2f} GB in a process and there are "
            f"{self._available / GB:.2f} (micro-batches of {least.micro_batch_tokens} tokens, "
            f"recompute {least.recompute})",
            hint=self._way_out(least),
        )

    def _less_state(self) -> Iterator[tuple[str, Choices]]:
        """Yield flags that leave less of the optimiser in memory, those that change least first."""
        own = self._choices
        is_short = own.optimizer_state != "float32"
        short = "" if is_short else " --optimizer-state bfloat16"
        if own.ranks == 1 and torch.device(own.device).type == "cpu" and not own.offload:
            yield "--offload", replace(own, offload=True)
            yield f"--offload{short}", replace(own, offload=True, optimizer_state="bfloat16")
        elif not is_short:
            yield short.strip(), replace(own, optimizer_state="bfloat16")

    def _more_ranks(self) -> Iterator[Choices]:
        """Yield choices with more ranks that share rows, then those with more ranks."""
        own = replace(self._choices, offload=False, memory_gb=self._available / GB)
        for ranks in (own.ranks, *(ranks for ranks in RANKS if ranks > own.ranks)):
            for context in (1, *RANKS):
                is_more = ranks > own.ranks or context > own.context_ranks
                if is_more and context >= own.context_ranks and ranks % context == 0:
                    yield replace(own, ranks=ranks, context_ranks=context)

    def _way_out(self, least: MemoryPlan) -> str:
        """Return the smallest change with which training would fit."""
        own = self._choices
        free = replace(own, micro_batch_tokens=None, recompute=None)
        if free != own:
            found = self._with(free).found()
            if found is not None:
                return (
                    f"--micro-batch-tokens {found.micro_batch_tokens} "
                    f"--recompute {found.recompute} fits"
                )
        if not self._work.adapter.rank:
            for flags, less in self._less_state():
                if self._with(less).found() is not None:
                    return f"{flags} fits"
        for more in self._more_ranks():
            if self._with(more).found() is not None:
                shared = f"--context-ranks {more.context_ranks}"
                if more.ranks == own.ranks:
                    return f"{shared} fits"
                flags = f" and {shared}" * (more.context_ranks > 1)
                return f"{more.ranks} ranks with as much memory each{flags} would do (torchrun)"
        return f"it needs --memory-gb {least.peak / GB:.2f}, or an adapter instead of all weights"


def return_freed_buffers() -> None:
    """Have the C library give large buffers back to the kernel when they are freed.

    glibc keeps buffers of up to 32 MiB, for others that rarely fit: a sixth of the memory of a
    training step. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)


def _process_bytes(device: str) -> float:
    """Return what the process takes before anything is loaded: Python, torch, transformers."""
    if torch.device(device).type == "cuda":
        return float(PROCESS_ON_GPU)
    return float(_status("VmRSS") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _available(device: str, own: float, ranks: int) -> float:
    """Return the bytes that this process may have: what is free, by the kernel, by the container's
    limit or on the GPU, and what it has already; a share of it for each rank.
    """
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(torch.device(device))[0])
    free = [_meminfo("MemAvailable")]
    limit, used = (
        _number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current")
    )
    if limit is not None and used is not None:
        free.append(limit - used)
    known = [value for value in free if value is not None]
    return (min(known) if known else float("inf")) / ranks + own


def _meminfo(name: str) -> float | None:
    return _line_of(Path("/proc/meminfo"), name)


def _status(name: str) -> float | None:
    return _line_of(Path("/proc/self/status"), name)


def _line_of(path: Path, name: str) -> float | None:
    """Return the bytes that a file of the kernel gives for a name; none where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return float(found[0]) * 1024 if found else None


def _number(path: Path) -> float | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return float(text) if text.isdecimal() else None
