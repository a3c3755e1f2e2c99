"""What a worker and a validator ask of an inference engine, and what every engine refuses.

No torch here: hidden states cross this seam as bfloat16 patterns, logits as float32 arrays. Axes:
T completion tokens, H hidden units, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import SampleUnfit
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

PREFILL_VALUES = 1 << 26
"""Logits computed in one prefill: 256 MiB of float32."""


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
        """Return the prefill of every (prompt, completion); raises SampleUnfit on a token id
        outside the vocabulary, an empty part and a sample beyond the model's context.
        """

    def encode(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt; of text within a sequence, without what the tokenizer
        puts around one, when it is not the start.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion without EOS and special tokens."""


def prefill_parts(
    samples: Sequence[tuple[Sequence[int], Sequence[int]]], vocab_size: int
) -> Iterator[slice]:
    """Yield runs of samples whose padded logits stay within PREFILL_VALUES, or of one sample."""
    first = longest = 0
    for i, (prompt, completion) in enumerate(samples):
        tokens = len(prompt) + len(completion)
        if i > first and max(longest, tokens) * (i + 1 - first) * vocab_size > PREFILL_VALUES:
            yield slice(first, i)
            first, longest = i, 0
        longest = max(longest, tokens)
    if samples:
        yield slice(first, len(samples))


def require_samplable(request: Request) -> None:
    """Raise SampleUnfit unless there is a temperature, a seed and a position to sample with."""
    if not request.temperature > 0 or not 0 <= request.seed < 1 << 64:
        raise SampleUnfit(f"cannot sample with T {request.temperature}, seed {request.seed}")
    if request.position < 0:
        raise SampleUnfit(f"a position counts from 0, got {request.position}")


def require_fits(
    prompt: Sequence[int],
    new_tokens: int,
    completion: Sequence[int] = (),
    *,
    vocab_size: int,
    context: int | None,
) -> None:
    """Raise SampleUnfit for an empty part, a token id outside the vocabulary, and a sample beyond
    the model's context (None for no limit).
    """
    if not prompt or new_tokens < 1:
        raise SampleUnfit("a prompt or completion is empty")
    ids = (*prompt, *completion)
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise SampleUnfit(f"a token id is outside the vocabulary of {vocab_size}")
    if context is not None and len(prompt) + new_tokens > context:
        raise SampleUnfit(
            f"{len(prompt)} prompt and {new_tokens} new tokens exceed the context of {context}",
            hint="prompts are never truncated: use shorter problems or a smaller limit",
        )
