"""What every engine refuses, in the same words: samples that the loaded policy cannot compute."""

from __future__ import annotations

from collections.abc import Sequence

from muster.inference.engine import Request
from muster.protocol.errors import EngineError


def require_samplable(request: Request) -> None:
    """Raise EngineError unless there is a temperature, a seed and a position to sample with."""
    if not request.temperature > 0 or not 0 <= request.seed < 1 << 64:
        raise EngineError(f"cannot sample with T {request.temperature}, seed {request.seed}")
    if request.position < 0:
        raise EngineError(f"a position counts from 0, got {request.position}")


def require_fits(
    prompt: Sequence[int],
    new_tokens: int,
    completion: Sequence[int] = (),
    *,
    vocab_size: int,
    context: int | None,
) -> None:
    """Raise EngineError for an empty part, a token id outside the vocabulary, and a sample beyond
    the model's context (None for no limit).
    """
    if not prompt or new_tokens < 1:
        raise EngineError("a prompt or completion is empty")
    ids = (*prompt, *completion)
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise EngineError(f"a token id is outside the vocabulary of {vocab_size}")
    if context is not None and len(prompt) + new_tokens > context:
        raise EngineError(
            f"{len(prompt)} prompt and {new_tokens} new tokens exceed the context of {context}",
            hint="prompts are never truncated: use shorter problems or a smaller limit",
        )
