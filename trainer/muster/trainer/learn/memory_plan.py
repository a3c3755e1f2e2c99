"""The memory that training takes, computed before anything is loaded.

Weights, gradients and the optimiser's state are counted, passes are rehearsed (`rehearsal`), and
the machine's free memory is read. The plan chooses a micro-batch's tokens and what the backward
pass computes again, so that all of it fits:

 1. A setting that the user gave stays as it is.
 2. Computing again costs time, small micro-batches cost hardly any. So the plan takes the kind that
    computes least again and with which the longest row and `EFFICIENT` tokens fit. If there is
    none, it takes the kind that computes least again and with which the longest row fits.
 3. A micro-batch has the largest of `MOST`, `MOST` / 2, `MOST` / 4, … tokens that fits.
 4. On a GPU, if even `full` does not fit, the inputs of blocks wait on the host.

If nothing fits, the plan fails and names the smallest change that would fit. `--offload` is never
chosen, only named.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
from transformers import AutoConfig

from muster.inference.policy_files import require_fixed_positions
from muster.lifecycle import available_memory_bytes
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
"""Tokens of the largest micro-batch that is tried: more gain nothing."""
EFFICIENT = 2_048
"""Tokens of a micro-batch below which matrix products become slow."""
LEAST = 64
"""Tokens of the smallest micro-batch that is tried."""
PROMPT_TOKENS = 1_024
"""Assumed length of a prompt, for which recipes have no limit; see `Planner.require_room`."""
SAVING_BYTES = 256 << 20
"""Bytes of buffers while versions and checkpoints are written to disk."""
SAVING = "versions on their way out"
"""Name of that part of a plan."""
PROCESS = "process"
"""Name of the part that the process takes before anything is loaded."""
TOKEN_BYTES = 36
"""Bytes of a token in a Python tuple."""
SAMPLES = "samples"
"""Name of the part of a plan that these tuples take: rank 0 has all of them."""
LIBRARIES = 100 << 20
"""Bytes that torch and the C library take with the first step, whatever the model: code that is
loaded then, and fragmentation."""
MAPPED = 1 << 20
"""Buffers of this many bytes go back to the kernel when they are freed (`return_freed_buffers`)."""
PROCESS_ON_GPU = 600 << 20
"""Bytes of a GPU that CUDA itself takes."""
M_MMAP_THRESHOLD = -3
"""Number of the parameter of glibc's `mallopt` for that limit."""
SITE_WEIGHT_BYTES = 16
"""Bytes of a trained weight that a site keeps besides the moments' copy: a copy for a step that is
taken again, the outer momentum, and the newest mean movements (two weights' worth at most)."""
EXCHANGE_BYTES = 17
"""Bytes of a trained weight at the peak of an exchange, that of a site which is alone."""
RANKS = (2, 4, 8, 16, 32, 64)
"""Numbers of ranks that are tried for a hint."""


class MemoryShort(ConfigError):
    """Training does not fit into the memory that there is."""


@dataclass(frozen=True, slots=True)
class MemoryChoices:
    """Settings that decide the memory; None where the plan chooses."""

    ranks: int = 1
    """Processes that share the model."""
    context_ranks: int = 1
    """Number of these processes that share rows."""
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
    """Memory of a process, in 10^9 bytes; None for what is free."""
    evaluates: bool = False
    """Whether policies are evaluated beside training."""
    sites: int = 1
    """Trainer sites, each a process."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of a recipe's training steps."""

    adapter: AdapterRecipe
    """The adapter that is trained; rank 0 trains all weights."""
    longest: int
    """Tokens of the longest sample, prompt included."""
    step_tokens: int
    """Most tokens of a training step."""
    optimizer_steps: int
    """Optimiser steps of a training step."""
    values: int
    """Log-probabilities that are kept of each token."""
    reads_policies: bool
    """Whether other policies' weights stand in for those that are trained."""

    @classmethod
    def of(cls, recipe: Recipe | SftRecipe, positions: int | None) -> Workload:
        """Return a recipe's workload; `positions` is the model's limit, None if it has none."""
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
class MemoryPart:
    """Bytes of one thing in each phase."""

    name: str
    reading: float
    """While earlier policies are read."""
    training: float
    """In optimiser steps."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The settings that were chosen, and what they take."""

    parts: tuple[MemoryPart, ...]
    """All that takes memory in a process."""
    micro_batch_tokens: int
    """Tokens that go through the model together."""
    recompute: Recompute
    """What the backward pass computes again."""
    available: float
    """Bytes that a process may have."""
    on_host: tuple[MemoryPart, ...] = ()
    """All that takes the host's memory beside a GPU."""
    host_available: float = float("inf")
    """Bytes of the host's memory that are free for it."""

    @property
    def fits(self) -> bool:
        """Whether there is memory for all of it."""
        return self.peak <= self.available and self.host <= self.host_available

    @property
    def peak(self) -> float:
        """Bytes at the worst moment."""
        return max(sum(p.reading for p in self.parts), sum(p.training for p in self.parts))

    @property
    def host(self) -> float:
        """Bytes of the host's memory at the worst moment, beside a GPU."""
        return sum(p.training for p in self.on_host)

    def figures(self) -> dict[str, Any]:
        """Return the plan in gigabytes, by name."""
        return {
            "parts_gb": {
                p.name: {"reading": p.reading / GB, "training": p.training / GB} for p in self.parts
            },
            "peak_gb": self.peak / GB,
            "available_gb": self.available / GB,
            "host_gb": self.host / GB,
            "micro_batch_tokens": self.micro_batch_tokens,
            "recompute": self.recompute,
        }

    def table(self) -> str:
        """Return the plan as text."""
        of_host = [replace(p, name=f"of the host: {p.name}") for p in self.on_host]
        rows = [*self.parts, self._total(), *of_host]
        lines = [f"{'memory of a process, GB':<32}{'reading policies':>18}{'optimiser steps':>18}"]
        lines += [f"{p.name:<32}{p.reading / GB:>18.3f}{p.training / GB:>18.3f}" for p in rows]
        return "\n".join(
            [
                *lines,
                f"peak {self.peak / GB:.2f} of {self.available / GB:.2f} GB; micro-batches of "
                f"{self.micro_batch_tokens} tokens, recompute {self.recompute}",
            ]
        )

    def _total(self) -> MemoryPart:
        return MemoryPart(
            "together", sum(p.reading for p in self.parts), sum(p.training for p in self.parts)
        )


def plan_memory(model: Path, recipe: Recipe | SftRecipe, choices: MemoryChoices) -> MemoryPlan:
    """Return a plan that fits; raises MemoryShort, with a way out, when there is none.

    `model` is the base model's folder, of which only config.json is read.
    """
    return planner_of(model, recipe, choices).plan()


def planner_of(model: Path, recipe: Recipe | SftRecipe, choices: MemoryChoices) -> Planner:
    """Return the planner of the base model in a folder."""
    return Planner(AutoConfig.from_pretrained(model), recipe, choices)


class Planner:
    """Plans one model with one recipe."""

    def __init__(
        self,
        config: Any,
        recipe: Recipe | SftRecipe,
        choices: MemoryChoices,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        """`config` is the architecture, as transformers describes it; `rehearsal` may come from
        another plan of the same model. Raises EngineError for positions that depend on the length,
        ConfigError for a mixture of experts, for ranks that
        do not divide into groups, for ranks of a site, and for recompute `host` on a CPU.
        """
        require_dense(config)
        require_fixed_positions(config)
        require_groups(choices.ranks, choices.context_ranks)
        if choices.sites > 1 and choices.ranks > 1:
            raise ConfigError(
                "with --sites, a site is one process", hint="start the trainer without torchrun"
            )
        if choices.recompute == "host" and not _has_host(choices.device):
            raise ConfigError(
                f"--recompute host moves activations from a GPU to the host, but --device is "
                f"{choices.device}",
                hint="use --recompute full",
            )
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
        self._host = _available("cpu", 0, choices.ranks)
        self._work = Workload.of(recipe, getattr(config, "max_position_embeddings", None))

    def plan(self) -> MemoryPlan:
        """Return a plan that fits; raises MemoryShort when there is none."""
        found = self.found()
        if found is None:
            tokens = self._choices.micro_batch_tokens or self._useful()
            made = [self._made(kind, tokens) for kind in reversed(self._kinds())]
            raise self._short(next((m for m in made if m.host <= m.host_available), made[0]))
        return found

    def require_room(self, plan: MemoryPlan, lengths: Sequence[int]) -> None:
        """Raise MemoryShort, with a way out, when a step's samples do not fit with a plan's
        settings; `lengths` are their tokens.
        """
        longest, planned = max(lengths, default=0), self._work.longest
        if longest <= planned:
            return
        longer = self._with(
            replace(
                self._choices,
                micro_batch_tokens=plan.micro_batch_tokens,
                recompute=plan.recompute,
            )
        )
        tokens = max(self._work.step_tokens, sum(lengths))
        longer._work = replace(self._work, longest=longest, step_tokens=tokens)
        try:
            longer.plan()
        except MemoryShort as error:
            raise MemoryShort(
                f"a sample has {longest} tokens, and {planned} were planned: {error}",
                hint=error.hint,
            ) from error

    def found(self) -> MemoryPlan | None:
        """Return a plan that fits; None when there is none."""
        # Passes need a rehearsal, which takes seconds: it is spared if the other parts do not fit.
        if not self._planned(PassBytes(0.0, 0.0), 0, "none").fits:
            return None
        useful, efficient = self._useful(), EFFICIENT * self._choices.context_ranks
        leasts = (max(useful, min(efficient, self._per_optimizer_step())), useful)
        tries = [(kind, least) for least in leasts for kind in self._kinds()]
        for kind, least in sorted(tries, key=lambda each: each[0] == "host"):
            found = self._largest(kind, least)
            if found is not None:
                return found
        return None

    def _kinds(self) -> Sequence[Recompute]:
        """Return the kinds of recompute to try, the one that computes least again first."""
        chosen = self._choices.recompute
        if not self._rehearsal.size.blocks:
            return ("none",)
        if chosen is not None:
            return (chosen,)
        has_host = _has_host(self._choices.device)
        return [kind for kind in get_args(Recompute) if kind != "host" or has_host]

    def _useful(self) -> int:
        """Return the micro-batch size in tokens below which no memory is saved."""
        return max(LEAST, min(self._work.longest, self._per_optimizer_step()))

    def _with(self, choices: MemoryChoices) -> Planner:
        """Return a planner with other choices, for the same memory of a process."""
        made = copy.copy(self)
        made._choices = choices
        made._host = self._host * self._choices.ranks / choices.ranks
        return made

    def _per_optimizer_step(self) -> int:
        """Return the most tokens that a group of ranks has in an optimiser step."""
        groups = self._choices.ranks // self._choices.context_ranks
        steps = self._work.optimizer_steps * groups
        return max(self._work.longest, -(-self._work.step_tokens // steps))

    def _largest(self, kind: Recompute, least: int) -> MemoryPlan | None:
        """Return the fitting plan with most tokens, at least `least`; None if none fits."""
        fixed = self._choices.micro_batch_tokens
        tokens = fixed or MOST
        while True:
            made = self._made(kind, tokens)
            if made.fits:
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
        return self._planned(passes, tokens, kind)

    def _planned(self, passes: PassBytes, tokens: int, kind: Recompute) -> MemoryPlan:
        parts, on_host = self._parts(passes), list[MemoryPart]()
        if passes.host:
            on_host.append(MemoryPart("inputs of blocks", 0, passes.host))
        tuples = TOKEN_BYTES * self._work.step_tokens
        of_python = [MemoryPart(SAMPLES, tuples, tuples), *self._of_site(passes)]
        (on_host if _has_host(self._choices.device) else parts).extend(of_python)
        return MemoryPlan(tuple(parts), tokens, kind, self._available, tuple(on_host), self._host)

    def _of_site(self, passes: PassBytes) -> list[MemoryPart]:
        """Return what a site keeps and exchanges, in the host's memory also beside a GPU."""
        if self._choices.sites == 1:
            return []
        trained = self._rehearsal.size.trained
        kept = (SITE_WEIGHT_BYTES + self._moment_width()) * trained
        exchange: float = EXCHANGE_BYTES * trained
        if not _has_host(self._choices.device):
            # There are no gradients and no passes meanwhile.
            exchange -= 4 * trained + passes.training
        return [
            MemoryPart("copies of a site", kept, kept),
            MemoryPart("exchange of sites", 0, max(0.0, exchange)),
        ]

    def _parts(self, passes: PassBytes) -> list[MemoryPart]:
        size, ranks, choices = self._rehearsal.size, self._choices.ranks, self._choices
        work = self._work
        is_adapter, is_short = bool(work.adapter.rank), choices.compute_dtype != "float32"
        frozen = size.parameters - size.trained
        weights = (4 * size.trained + (2 if is_short else 4) * frozen) / ranks
        parts = [
            MemoryPart(PROCESS, self._process, self._process),
            MemoryPart("weights", weights, weights),
        ]
        if is_short and not is_adapter and ranks == 1:
            parts.append(MemoryPart("weights that compute", 2 * size.trained, 2 * size.trained))
        parts += [
            MemoryPart("gradients", 0, 4 * size.trained / ranks),
        ]
        moments = self._moments()
        parts.append(MemoryPart("optimiser", moments, moments))
        if work.reads_policies:
            parts.append(MemoryPart("policy that stands in", self._stand_in(is_short=is_short), 0))
        if ranks > 1:
            gathered = self._gathered(2 if is_short else 4)
            parts.append(MemoryPart("weights gathered from ranks", gathered, gathered))
        known = work.step_tokens * 4 * work.values
        parts += [
            MemoryPart("passes", passes.reading, passes.training),
            MemoryPart("log-probabilities", known, known),
        ]
        if choices.device == "cpu":
            parts.append(MemoryPart("kept by libraries", LIBRARIES, LIBRARIES))
        if choices.evaluates:
            policy = (2 if is_short else 4) * size.parameters
            parts.append(MemoryPart("evaluation", policy, policy))
        parts.append(MemoryPart(SAVING, SAVING_BYTES, SAVING_BYTES))
        return parts

    def _moments(self) -> float:
        """Return the bytes of the optimiser's state, or of its part that is mapped at a time."""
        width, size = self._moment_width(), self._rehearsal.size
        if self._choices.offload:
            return width * min(size.trained, max(size.head, size.layer))
        return width * size.trained / self._choices.ranks

    def _moment_width(self) -> int:
        """Return the bytes of a weight's moments."""
        return 4 if self._choices.optimizer_state == "bfloat16" else 8

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
        """Return the bytes of the parts of a sharded model that are gathered at a time."""
        size = self._rehearsal.size
        outer = size.parameters - sum(size.blocks)
        # Gathered weights; for blocks also their gradient, and the float32 buffer in which ranks
        # sum it. For head and embedding these are part of the passes.
        return outer * width + 2 * max(size.blocks, default=0) * (2 * width + 4)

    def _short(self, least: MemoryPlan) -> MemoryShort:
        if least.host > least.host_available:
            return MemoryShort(
                f"{', '.join(p.name for p in least.on_host)} need {least.host / GB:.2f} GB of the "
                f"host's memory, but only {least.host_available / GB:.2f} GB are free",
                hint="leave out --recompute, so that the plan chooses it"
                if self._choices.recompute == "host"
                else "take a host with more memory, or train an adapter",
            )
        return MemoryShort(
            f"training needs {least.peak / GB:.2f} GB in a process, but only "
            f"{self._available / GB:.2f} GB are free (micro-batches of "
            f"{least.micro_batch_tokens} tokens, recompute {least.recompute})",
            hint=self._way_out(least),
        )

    def _less_state(self) -> Iterator[tuple[str, MemoryChoices]]:
        """Yield flags that keep less of the optimiser in memory, the smallest change first."""
        own = self._choices
        is_short = own.optimizer_state != "float32"
        short = "" if is_short else " --optimizer-state bfloat16"
        if own.ranks == 1 and torch.device(own.device).type == "cpu" and not own.offload:
            yield "--offload", replace(own, offload=True)
            yield f"--offload{short}", replace(own, offload=True, optimizer_state="bfloat16")
        elif not is_short:
            yield short.strip(), replace(own, optimizer_state="bfloat16")

    def _more_ranks(self) -> Iterator[MemoryChoices]:
        """Yield choices with more ranks that share rows, then those with more ranks."""
        own = replace(self._choices, offload=False)
        if own.sites > 1:
            return
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
                return (
                    f"{more.ranks} ranks with as much memory each{flags} would be enough (torchrun)"
                )
        return f"--memory-gb {least.peak / GB:.2f} would be enough; or train an adapter"


def return_freed_buffers() -> None:
    """Have the C library give large buffers back to the kernel when they are freed.

    glibc keeps freed buffers of up to 32 MiB for later ones, which rarely fit: a sixth of the
    memory of a training step. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)


def _has_host(device: str) -> bool:
    """Tell whether a device has memory of its own, apart from the host's."""
    return torch.device(device).type == "cuda"


def _process_bytes(device: str) -> float:
    """Return what the process takes before anything is loaded: Python, torch, transformers."""
    if _has_host(device):
        return float(PROCESS_ON_GPU)
    return float(psutil.Process().memory_info().rss)


def _available(device: str, own: float, ranks: int) -> float:
    """Return the bytes that this process may have: what is free on the GPU; on a CPU, a rank's
    share of what kernel and container leave free, plus what the process has already.
    """
    if _has_host(device):
        return float(torch.cuda.mem_get_info(torch.device(device))[0])
    return available_memory_bytes() / ranks + own
