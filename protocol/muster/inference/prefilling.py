"""Prefills of any number of samples, so many at a time that their logits fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PREFILL_VALUES = 1 << 26
"""Logits computed in one prefill: 256 MiB of float32."""

Sequences = tuple[Sequence[int], Sequence[int]]
"""A prompt and its completion."""


def prefill_parts(samples: Sequence[Sequences], vocab_size: int) -> Iterator[slice]:
    """Yield the samples in runs whose padded logits stay within PREFILL_VALUES, or of one."""
    first = longest = 0
    for i, (prompt, completion) in enumerate(samples):
        tokens = len(prompt) + len(completion)
        if i > first and max(longest, tokens) * (i + 1 - first) * vocab_size > PREFILL_VALUES:
            yield slice(first, i)
            first, longest = i, 0
        longest = max(longest, tokens)
    if samples:
        yield slice(first, len(samples))
