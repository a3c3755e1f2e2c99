"""What a calibration measures: engines, the ways to compute, how many samples of each.

Known before a model is loaded, so that a plan that cannot work is refused at once. No torch here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from muster.inference.calibrated_limits import fraud_strikes
from muster.protocol.errors import EngineError
from muster.protocol.prompts import Prompt
from muster.protocol.recipe import Recipe

Profile = Literal["quick", "full"]
NumberFormat = Literal["float32", "bfloat16"]

ENGINES: dict[str, NumberFormat] = {
    "transformers:float32": "float32",
    "transformers:bfloat16": "bfloat16",
    "vllm:float32": "float32",
    "vllm:bfloat16": "bfloat16",
}
"""Engines that can be measured, by their names for `--engines`; of each kind the more exact
first."""


def layout_of(engine: str) -> tuple[NumberFormat, int]:
    """Return an engine's number format and the devices that a model is spread over, by its name:
    "vllm:bfloat16:tp2" is vLLM over two GPUs. Raises EngineError when there is no such engine.
    """
    name, spread, devices = engine.partition(":tp")
    is_layout = name.startswith("vllm:") and re.fullmatch(r"[1-9]\d?", devices)
    if name not in ENGINES or (spread and not is_layout):
        known = f"{', '.join(ENGINES)}, and vllm:bfloat16:tp2 and the like over several GPUs"
        raise EngineError(f"no engine {engine!r}", hint=f"there are: {known}")
    return ENGINES[name], int(devices or 1)


MIN_CHUNKS = 300
"""Chunks that every forger is tried on: none accepted bounds its rate below 1 % (95 %)."""

_FEW = 24
"""Samples of one chunk for the ways that run one sample at a time."""

_LEAST_SAMPLES = 48
"""Least samples of the work that everything is compared with, however long a sample is."""

_LEAST_CHEATS = 80
"""Samples of a cheat: all noticed bounds its detection above 95 % (95 %)."""

_LEAST_OF_A_WAY = 4


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute that gives the same results up to rounding."""

    name: str
    """What differs, in words."""
    max_rows: int = 256
    """Samples in a forward pass."""
    threads: int | None = None
    """Threads of torch; None for as many as it has."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """The attention kernel."""
    path: Literal["prefill", "padded left", "decode"] = "prefill"
    """How a validator feeds tokens: at once, at once behind padding, or one by one with a cache."""
    lean: bool = True
    """Whether a worker decodes without the model's own forward pass, where it can."""
    samples: int | None = None
    """How many samples are computed in this way; None for all."""


PLAIN = Way("batched")
"""The default way to generate and recompute work."""

WORKERS = {
    "quick": (
        PLAIN,
        Way("one by one", max_rows=1, samples=_FEW),
        Way("batches of 7", max_rows=7, samples=4 * _FEW),
        Way("own forward pass", lean=False, samples=4 * _FEW),
        Way("two threads", threads=2, samples=4 * _FEW),
    ),
    "full": (
        PLAIN,
        Way("one by one", max_rows=1, samples=_FEW),
        Way("batches of 7", max_rows=7, samples=4 * _FEW),
        Way("own forward pass", lean=False),
        Way("own, batches of 7", lean=False, max_rows=7, samples=4 * _FEW),
        Way("batches of 2", max_rows=2, samples=2 * _FEW),
        Way("two threads", threads=2),
        Way("eager attention", attention="eager"),
        Way("eager, batches of 16", attention="eager", max_rows=16, samples=4 * _FEW),
    ),
}
"""Ways of workers, by profile. Numbers of samples are for samples of one chunk."""

VALIDATORS = {
    "quick": (
        PLAIN,
        Way("one by one", max_rows=1, samples=_FEW),
        Way("two threads", threads=2, samples=4 * _FEW),
    ),
    "full": (
        PLAIN,
        Way("one by one", max_rows=1, samples=_FEW),
        Way("batches of 5", max_rows=5, samples=4 * _FEW),
        Way("two threads", threads=2, samples=4 * _FEW),
        Way("eager attention", attention="eager"),
        Way("padded left", path="padded left", samples=4 * _FEW),
        Way("decoding with a cache", path="decode", samples=_FEW // 3),
    ),
}
"""Ways of validators, by profile. Numbers of samples are for samples of one chunk."""


_CHEATS = {"quick": 4, "full": 27}
"""Cheats that generate, by profile."""


@dataclass(frozen=True, slots=True)
class MeasuringPlan:
    """What is measured, and how thoroughly."""

    recipe: Recipe
    """Sampling, proofs and learning rate."""
    prompts: Sequence[Prompt] = ()
    """Prompts, used in turn; if empty, the model makes prompts up."""
    engines: Sequence[str] = ("transformers:float32",)
    """Engines whose errors must be inside the limits, each against each; cheats use the first."""
    others: Mapping[str, Path] = field(default_factory=dict)
    """Further models of the same vocabulary that a cheat could run, by name: a smaller sibling,
    the base model."""
    profile: Profile = "full"
    """"quick" is for small models and demonstrations: fewer ways, fewer cheats."""
    samples: int = 320
    """Samples of most ways and cheats if a sample is one chunk; with longer samples fewer are
    taken."""
    seed: int = 0
    """Seed of everything drawn."""
    device: str = "cpu"
    """Torch's name of the device that computes the models."""
    threads: int = 1
    """CPU threads of the models."""

    @property
    def chunks(self) -> int:
        """Chunks of a sample that ends at its limit."""
        return -(-self.recipe.sampling.max_new_tokens // self.recipe.proof.chunk_tokens)

    @property
    def base(self) -> int:
        """Samples of the work that everything is compared with."""
        return max(min(self.samples, _LEAST_SAMPLES), -(-self.samples // self.chunks))

    @property
    def cheats(self) -> int:
        """Samples of each cheat. Longer samples tell more, so fewer are enough."""
        return max(min(self.base, _LEAST_CHEATS), self.samples // self.chunks**2)

    def workers(self) -> list[Way]:
        """Return the ways to generate."""
        return [self._sized(way) for way in WORKERS[self.profile] if self._has(way)]

    def validators(self) -> list[Way]:
        """Return the ways to recompute."""
        return [self._sized(way) for way in VALIDATORS[self.profile] if self._has(way)]

    def honest_samples(self) -> int:
        """Return the number of samples of all pairs of ways together."""
        workers, judges = self.workers(), self.validators()
        vllm = [PLAIN] * sum(engine.startswith("vllm:") for engine in self.engines)
        benches = len(self.engines) - len(vllm)
        made = [*benches * workers, *vllm, PLAIN]
        counts = [way.samples or self.base for way in made]
        return sum(
            min(count, judge.samples or self.base)
            for count in counts
            for judge in [*benches * judges, *vllm]
        )

    def effort(self) -> int:
        """Return about how many samples are generated or examined in all, for progress reports."""
        parties = len(self.engines)
        made = sum(min(way.samples or self.base, self.base) for way in self.workers())
        cheats = _CHEATS[self.profile] + len(self.others)
        return parties * made + self.honest_samples() + 2 * cheats * self.cheats

    def _has(self, way: Way) -> bool:
        return way.threads is None or self.device == "cpu"

    def _sized(self, way: Way) -> Way:
        """Return the way with fewer samples if they are long: about the same number of tokens."""
        if way.threads is not None and way.threads == self.threads:
            way = replace(way, name="one thread", threads=1)
        if way.samples is None:
            return way
        few = max(_LEAST_OF_A_WAY, -(-way.samples // self.chunks))
        return replace(way, samples=min(way.samples, few))


def require_sound(folder: Path, plan: MeasuringPlan) -> None:
    """Raise EngineError, before anything is loaded, for a plan that cannot lead to limits."""
    for engine in plan.engines:
        layout_of(engine)
    first = plan.engines[0]
    if first.startswith("vllm:"):
        raise EngineError(
            "cheats are run on transformers",
            hint=f"--engines transformers:{layout_of(first)[0]},{','.join(plan.engines)}",
        )
    if plan.prompts and len(set(plan.prompts)) < 2:
        raise few_prompts(1)
    if plan.base * plan.chunks < MIN_CHUNKS:
        raise few_chunks(plan.base * plan.chunks)
    fraud_strikes(plan.honest_samples(), plan.recipe)
    vocabulary = _require_model(folder, plan)
    for name, other in plan.others.items():
        if (found := _require_model(other, plan)) != vocabulary:
            raise EngineError(f"{name} has {found} tokens of vocabulary, not {vocabulary}")


def few_prompts(count: int) -> EngineError:
    """Return the refusal of a plan with too few prompts."""
    return EngineError(f"{count} different prompts", hint="calibrate on at least 2, better 50")


def few_chunks(count: int) -> EngineError:
    """Return the refusal of a plan with too few chunks."""
    return EngineError(
        f"{count} chunks to try forgers on, {MIN_CHUNKS} are needed",
        hint="calibrate with more samples, on more prompts",
    )


def _require_model(folder: Path, plan: MeasuringPlan) -> int | None:
    """Return the vocabulary size that a model's folder states; None without one."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder} does not load: no config.json that is JSON") from error
    context, longest = config.get("max_position_embeddings"), plan.recipe.sampling.max_new_tokens
    if isinstance(context, int) and context <= longest:
        raise EngineError(
            f"{folder} has a context of {context}, the recipe asks for {longest} new tokens",
            hint="lower sampling.max_new_tokens",
        )
    vocabulary = config.get("vocab_size")
    return vocabulary if isinstance(vocabulary, int) else None
