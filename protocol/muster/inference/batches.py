"""Which samples share a forward pass, and how their tokens are laid out. Pure.

Axes: R rows, L width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = Sequence[int]


def plan_decode(prompts: Sequence[Tokens]) -> list[int]:
    """Return the order to generate in: prompts of like length together, equal ones side by side."""
    return sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), tuple(prompts[i])))


def plan_prefill(
    samples: Sequence[tuple[Tokens, Tokens]], max_rows: int, max_tokens: int, max_logit_rows: int
) -> list[list[int]]:
    """Return batches of positions: like lengths together, so that little is computed for padding.

    A batch computes logits for (rows x window) positions, where the window reaches from its
    shortest prompt's end to its longest sample's end; `max_logit_rows` bounds that, `max_tokens`
    the tokens with padding (one row always fits).
    """
    spans = [(len(prompt), len(prompt) + len(completion)) for prompt, completion in samples]
    batches: list[list[int]] = []
    first, last = 0, 0
    for i in sorted(range(len(samples)), key=lambda i: (spans[i][1], spans[i][0])):
        prompt, end = spans[i]
        first, last = min(first, prompt), max(last, end)
        rows = len(batches[-1]) + 1 if batches else max_rows + 1
        is_full = rows > max_rows or rows * last > max_tokens
        if is_full or rows * (last - first) > max_logit_rows:
            batches.append([])
            first, last = prompt, end
        batches[-1].append(i)
    return batches


def distinct(prompts: Sequence[Tokens]) -> tuple[list[tuple[int, ...]], npt.NDArray[np.int64]]:
    """Return the different prompts in order of appearance, and [R] which of them each row has."""
    places: dict[tuple[int, ...], int] = {}
    rows = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
    return list(places), np.array(rows)


def pad_left(rows: Sequence[Tokens]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Return tokens [R, L] that end in the last column, and their mask (None without padding)."""
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max())
    tokens = np.zeros((len(rows), width), np.int64)
    mask = (np.arange(width) >= width - lengths[:, None]).astype(np.int64)
    tokens[mask.astype(bool)] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return tokens, None if (lengths == width).all() else mask


def pad_right(rows: Sequence[Tokens]) -> npt.NDArray[np.int64]:
    """Return tokens [R, L] starting in the first column."""
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
    is_token = np.arange(tokens.shape[1]) < lengths[:, None]
    tokens[is_token] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return tokens
