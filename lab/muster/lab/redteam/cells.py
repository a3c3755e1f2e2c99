"""The cells of the honest matrix: combinations of a worker's and a validator's way of computing.

Pure: no engine is loaded here. A cell combines one way of a worker with one way of a validator
within one run. A panel holds the cells of one submission: one way of a worker with up to three ways
of validators, since a submission has several judges in a network too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, sqrt

from muster.inference.calibration_plan import ENGINES, VALIDATORS, WORKERS, Way

RUNS = (
    ("transformers:float32",),
    ("transformers:bfloat16",),
    ("transformers:float32", "transformers:bfloat16"),
)
"""Engines that a run's calibration covers; within each run all ways are combined."""
VLLM_RUNS = (
    ("transformers:float32", "vllm:float32"),
    ("transformers:bfloat16", "vllm:bfloat16"),
    tuple(ENGINES),
)
"""Runs whose calibration covers vLLM: only cells in which vLLM takes part are played."""
VLLM_WAYS = (Way("batched"), Way("two threads", threads=2), Way("batches of 7", max_rows=7))
"""Ways of vLLM beside transformers in the same number format. Calibration measures the first."""
JUDGES = 3
"""Validators that judge one submission."""
ONE_LENGTH, SEVERAL_LENGTHS = "prompts of one length", "prompts of several lengths"
"""Kinds of submissions: the second needs padding when its samples are computed together."""


@dataclass(frozen=True, slots=True)
class EngineWay:
    """One way to compute on one engine."""

    engine: str
    """Name of the engine in `--engines`."""
    way: Way
    """How it computes."""

    @property
    def name(self) -> str:
        """Name in records."""
        vllm = "vLLM " if self.is_vllm else ""
        return f"{vllm}{ENGINES[self.engine]} {self.way.name}"

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM computes, with its own kernels."""
        return self.engine.startswith("vllm:")


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of a worker under one way of a validator."""

    run: str
    """The engines of the run's calibration."""
    worker: str
    """The worker's way of computing."""
    validator: str
    """The validator's way of computing."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One way of a worker, before the validators that judge the same submission."""

    engines: tuple[str, ...]
    """Engines of the run's calibration."""
    worker: EngineWay
    """Way of the worker."""
    validators: tuple[EngineWay, ...]
    """Ways of the validators."""
    starts_ragged: bool
    """Whether its first submission has prompts of several lengths; submissions alternate."""

    @property
    def run(self) -> str:
        """Name of the run in records."""
        return " + ".join(self.engines)

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        """Unique key."""
        return self.run, self.worker.name, tuple(judge.name for judge in self.validators)

    @property
    def cells(self) -> list[Cell]:
        """The cells that one submission visits."""
        return [Cell(self.run, self.worker.name, judge.name) for judge in self.validators]

    def prompts(self, turn: int) -> str:
        """Return the kind of prompts of its submission in a turn."""
        return SEVERAL_LENGTHS if (turn % 2 == 0) == self.starts_ragged else ONE_LENGTH


def panels(runs: Sequence[tuple[str, ...]]) -> list[Panel]:
    """Return the panels of some runs, in an order in which every prefix is well mixed.

    Strides of the golden section: neighbours in the nested product are visited far apart, and
    every panel once before any is visited twice.
    """
    nested = [panel for engines in runs for panel in _panels(engines)]
    stride = _stride(len(nested))
    return [nested[i * stride % len(nested)] for i in range(len(nested))]


def _panels(engines: tuple[str, ...]) -> list[Panel]:
    workers = _engine_ways(engines, WORKERS["full"])
    judges = _engine_ways(engines, VALIDATORS["full"])
    has_vllm = any(one.is_vllm for one in workers)
    found = []
    for place, worker in enumerate(workers):
        # Cells without vLLM belong to another run, with narrower limits.
        who = [judge for judge in judges if not has_vllm or worker.is_vllm or judge.is_vllm]
        for start in range(0, len(who), JUDGES):
            # The last panel is filled up with judges of the first, different ones for each worker.
            seats = range(start + place, start + place + min(JUDGES, len(who)))
            validators = tuple(who[seat % len(who)] for seat in seats)
            starts_ragged = (place + start // JUDGES) % 2 == 1
            found.append(Panel(engines, worker, validators, starts_ragged))
    return found


def _engine_ways(engines: Sequence[str], ways: Sequence[Way]) -> list[EngineWay]:
    # Each way of vLLM is a process. Across number formats, the format alone is varied.
    own = VLLM_WAYS if len(engines) == 2 else VLLM_WAYS[:1]
    return [
        EngineWay(engine, way)
        for engine in engines
        for way in (own if engine.startswith("vllm:") else ways)
    ]


def _stride(count: int) -> int:
    stride = max(1, round(count * (sqrt(5) - 1) / 2))
    while gcd(stride, count) > 1:
        stride += 1
    return stride


# ------------------------------------------------------------------------------------- dimensions


def _named(ways: Sequence[Way]) -> dict[str, EngineWay]:
    return {one.name: one for engines in RUNS + VLLM_RUNS for one in _engine_ways(engines, ways)}


_WORKERS, _VALIDATORS = _named(WORKERS["full"]), _named(VALIDATORS["full"])


def worker_values(name: str) -> dict[str, str]:
    """Return a worker's value in every dimension; `name` is the worker's in records."""
    one = _WORKERS[name]
    # Lean decoding has one attention kernel; with another, the model's own forward pass is used.
    is_lean = one.way.lean and one.way.attention == "sdpa"
    return _values(one, "lean decoding" if is_lean else "the model's own forward pass")


def validator_values(name: str) -> dict[str, str]:
    """Return a validator's value in every dimension; `name` is the validator's in records."""
    one = _VALIDATORS[name]
    path = {"prefill": "prefill", "padded left": "prefill, padded on the left"}
    return _values(one, path.get(one.way.path, "decoding with a cache"))


def _values(one: EngineWay, path: str) -> dict[str, str]:
    own = "vLLM's own" if one.is_vllm else None
    return {
        "engine": "vLLM" if one.is_vllm else "transformers",
        "number format": ENGINES[one.engine],
        "samples computed together": f"up to {one.way.max_rows}",
        "attention": own or one.way.attention,
        "path": own or path,
        "threads": str(one.way.threads or 1),
    }
