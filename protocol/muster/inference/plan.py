"""What a calibration is asked to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from muster.protocol.recipe import Recipe

Profile = Literal["quick", "full"]
NumberFormat = Literal["float32", "bfloat16"]

ENGINES: dict[str, NumberFormat] = {
    "transformers:float32": "float32",
    "transformers:bfloat16": "bfloat16",
    "vllm:float32": "float32",
    "vllm:bfloat16": "bfloat16",
}
"""Engines that can be measured, by what `--engines` calls them, of each kind the exacter first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how thoroughly."""

    recipe: Recipe
    """Sampling, proofs and learning rate."""
    prompts: Sequence[str] = ()
    """Taken in turn; none means prompts that the model makes up."""
    engines: Sequence[str] = ("transformers:float32",)
    """Whose errors must be inside the limits, each against each; cheats use the first."""
    others: Mapping[str, Path] = field(default_factory=dict)
    """Further models of the same vocabulary that a cheat could run, by name: a smaller sibling,
    the base model."""
    profile: Profile = "full"
    """"quick" is for small models and demonstrations: fewer ways, fewer cheats."""
    samples: int = 320
    """Samples of most ways and cheats."""
    seed: int = 0
    """Of everything drawn."""
