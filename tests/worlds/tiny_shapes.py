"""Tiny models of every family, and rows and samples for them."""

from typing import Any

from hypothesis import strategies as st

from muster.trainer.learn.cascade import Layout
from muster.trainer.learn.packing import TrainingSample

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA = {**COMMON, "query_pre_attn_scalar": 16}

LAYOUTS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
).map(lambda groups: Layout(tuple(p for p, _ in groups), tuple(tuple(c) for _, c in groups)))
"""Packed rows of up to four prompts with up to four completions each."""


def uneven_samples() -> list[TrainingSample]:
    """Samples of very different lengths, some of which share a prompt."""
    lengths = [(4, 1), (4, 9), (4, 5), (7, 3), (7, 1), (2, 12), (1, 1), (30, 30)]
    return [
        TrainingSample(
            tuple(3 + (7 * p + j) % 30 for j in range(p)),
            tuple(3 + (5 * i + 11 * j) % 36 for j in range(c)),
            (-1.0) ** i * (1 + i / 4),
        )
        for i, (p, c) in enumerate(lengths)
    ]
