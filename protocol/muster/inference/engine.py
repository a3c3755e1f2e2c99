"""What a worker and a validator ask of an inference engine.

No torch here: hidden states cross this seam as bfloat16 patterns, logits as float32 arrays. Axes:
T completion tokens, H hidden units, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate."""

    prompt_tokens: tuple[int, ...]
    """The whole prompt; engines never truncate."""
    seed: int
    """64-bit sampling seed."""
    temperature: float
    """Softmax temperature T."""
    max_new_tokens: int
    """Limit of the completion, EOS included."""
    position: int = 0
    """Noise position of the first token: what of a completion of several turns is in the prompt."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated sample."""

    tokens: tuple[int, ...]
    """Completion token ids, with the EOS that ended it, if one did."""
    proofs: list[bytes]
    """TOPLOC proofs, one per chunk of completion tokens."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """What the policy computes for a given completion; row t predicts completion token t."""

    hidden_TH: npt.NDArray[np.uint16]
    """Rows after the final norm, as bfloat16 patterns."""
    logits_TV: npt.NDArray[np.float32]
    """Logits, before temperature."""


class InferenceEngine(Protocol):
    """Runs one policy at a time; every method may be called from any thread, one at a time."""

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The loaded policy; None before the first and after a failed load."""

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""

    @property
    def vocab_size(self) -> int:
        """Logits per position; token ids are below it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a completion."""

    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        """Load a policy folder; raises EngineError when it is unusable."""

    def generate(self, requests: Sequence[Request], *, proof: ProofRecipe) -> list[Completion]:
        """Return the completions in the order asked; raises EngineError."""

    def prefill(self, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Prefill]:
        """Return the prefill of every (prompt, completion); raises EngineError on a token id
        outside the vocabulary, an empty part and a sample beyond the model's context.
        """

    def encode(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt; of text within a sequence, without what the tokenizer
        puts around one, when it is not the start.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion without EOS and special tokens."""
