"""Many positions at once in a lean model: prompts, and the completions that follow them.

All sequences of a pass lie one after the other without padding, and a prompt that several
completions share is there once. A layer is finished for all of them before the next begins, so a
layer's keys and values are freed after it. Attention takes all sequences in one call where a GPU
has a kernel for that, else some queries at a time. Axes: N positions of a pass, M of them as
sequences see them, T completion tokens, Q queries, L keys, A query heads, K key heads, E head size,
H hidden units.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from muster.inference.forward import Tokens
from muster.inference.lean_model import Attend, LeanModel, Rotary

_QUERY_ROWS = 1 << 9
"""Queries of one call of attention on a CPU, where masks and scores are arrays."""

_DEVICE_QUERY_ROWS = 1 << 11
"""The same on an accelerator that has no kernel for sequences of any length."""

Keep = Callable[[int, torch.Tensor], None]
"""Called with a layer's number and its keys followed by values [N, 2K, E]."""


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence's rows in a pass, and the rows of its prompt, if that lies elsewhere."""

    rows: slice
    before: slice | None = None

    @property
    def first(self) -> int:
        """The position of its first row."""
        return 0 if self.before is None else self.before.stop - self.before.start


class Pass:
    """Sequences that are computed together."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens so far."""
        self.spans: list[Span] = []
        self._tokens: list[npt.NDArray[np.int64]] = []

    def add(self, tokens: Tokens, before: slice | None = None) -> slice:
        """Append a sequence, after the rows of another or alone; return its rows."""
        rows = slice(self.length, self.length + len(tokens))
        if tokens:
            self.length = rows.stop
            self._tokens.append(np.asarray(tokens, np.int64))
            self.spans.append(Span(rows, before))
        return rows

    def tokens_N(self) -> torch.Tensor:
        """Return the tokens of all sequences, in this process's memory."""
        return torch.from_numpy(np.concatenate(self._tokens))


def prefill(
    model: LeanModel, work: Pass, rotary: Rotary, keep: Keep = lambda *_: None
) -> torch.Tensor:
    """Return the hidden states [N, H] of a pass, after the final norm."""
    attention = (_at_once if has_flash(model) else _by_spans)(model, work.spans)

    def attend(layer: int, queries_NAE: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        keep(layer, keys_values)
        return attention(layer, queries_NAE, keys_values).flatten(1)

    tokens_N = work.tokens_N().to(model.device)
    places = [torch.arange(s.first, s.first + s.rows.stop - s.rows.start) for s in work.spans]
    return model.run(tokens_N, rotary.at(torch.cat(places).to(model.device)), attend)


def has_flash(model: LeanModel) -> bool:
    """Return whether the GPU kernel for sequences of any length can compute a model's attention."""
    is_half = model.dtype in (torch.bfloat16, torch.float16)
    is_size = model.head_size <= 256 and model.head_size % 8 == 0
    return model.device.type == "cuda" and is_half and is_size and model.cap is None


def _at_once(model: LeanModel, spans: Sequence[Span]) -> Attend:
    """Return attention of all sequences in one call, which needs no mask and repeats no head."""
    asking = [span.rows.stop - span.rows.start for span in spans]
    asked = [span.first + own for span, own in zip(spans, asking, strict=True)]
    parts = [part for span in spans for part in (span.before, span.rows) if part is not None]
    seen_M = torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(model.device)
    ends_asking, ends_asked = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=model.device)
        for lengths in (asking, asked)
    )

    def attend(layer: int, queries_NAE: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        seen_M2KE, window = keys_values[seen_M], model.windows[layer]
        return flash(
            queries_NAE,
            seen_M2KE[:, : model.key_heads],
            seen_M2KE[:, model.key_heads :],
            ends_asking,
            ends_asked,
            max(asking),
            max(asked),
            scale=model.scale,
            window=window,
        )

    return attend


def flash(
    queries_NAE: torch.Tensor,
    keys_MKE: torch.Tensor,
    values_MKE: torch.Tensor,
    asking: torch.Tensor,
    asked: torch.Tensor,
    longest_asking: int,
    longest_asked: int,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return the output of attention [N, A, E] for sequences that end at `asking` among the queries
    and at `asked` among the keys; the last query of each sees its last key.
    """
    found: tuple[torch.Tensor, ...] = torch.ops.aten._flash_attention_forward(
        queries_NAE,
        keys_MKE,
        values_MKE,
        asking,
        asked,
        longest_asking,
        longest_asked,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    return found[0]


def _by_spans(model: LeanModel, spans: Sequence[Span]) -> Attend:
    """Return attention of one sequence after the other."""

    def attend(layer: int, queries_NAE: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        for span in spans:
            whole = keys_values[span.rows]
            if span.before is not None:
                whole = torch.cat([keys_values[span.before], whole])
            _attend_span(model, layer, queries_NAE[span.rows], whole)
        return queries_NAE

    return attend


def _attend_span(
    model: LeanModel, layer: int, queries_QAE: torch.Tensor, keys_values: torch.Tensor
) -> None:
    """Overwrite the queries, which belong to the last keys, with the output of attention."""
    seen = keys_values.transpose(0, 1)[None]
    keys, values = seen[:, : model.key_heads], seen[:, model.key_heads :]
    window, ahead = model.windows[layer], len(keys_values) - len(queries_QAE)
    size = _QUERY_ROWS if model.device.type == "cpu" else _DEVICE_QUERY_ROWS
    for start in range(0, len(queries_QAE), size):
        queries = queries_QAE[start : start + size]
        end = ahead + start + len(queries)
        first = 0 if window is None else max(0, ahead + start + 1 - window)
        shown = slice(first, end)
        found = mix(
            queries.transpose(0, 1)[None],
            keys[:, :, shown],
            values[:, :, shown],
            _mask(len(queries), end - first, window, model.device),
            scale=model.scale,
            cap=model.cap,
        )
        queries.copy_(found[0].transpose(0, 1))


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the mask [Q, L] of the last positions: what each sees, within a window."""
    places = torch.arange(keys, device=device)
    behind_QL = places[keys - queries :, None] - places
    return behind_QL >= 0 if window is None else (behind_QL >= 0) & (behind_QL < window)


def mix(
    queries_RAQE: torch.Tensor,
    keys_RKLE: torch.Tensor,
    values_RKLE: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Return the output of attention [R, A, Q, E], with scores capped by tanh if `cap` is given;
    the mask is boolean, or added to the scores.
    """
    groups = queries_RAQE.shape[1] // keys_RKLE.shape[1]
    if groups > 1 and (cap is not None or keys_RKLE.device.type != "cpu"):
        # The kernels of accelerators that take masks do not support shared heads.
        keys_RKLE = keys_RKLE.repeat_interleave(groups, dim=1)
        values_RKLE = values_RKLE.repeat_interleave(groups, dim=1)
        groups = 1
    if cap is None:
        return F.scaled_dot_product_attention(
            queries_RAQE, keys_RKLE, values_RKLE, attn_mask=mask, scale=scale, enable_gqa=groups > 1
        )
    scores = (queries_RAQE.float() @ keys_RKLE.float().mT).mul_(scale / cap).tanh_().mul_(cap)
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    else:
        scores += mask
    return (scores.softmax(dim=-1) @ values_RKLE.float()).to(queries_RAQE.dtype)


# ------------------------------------------------------------------------------- of samples


def plan_passes(samples: Sequence[tuple[Tokens, Tokens]], max_tokens: int) -> list[list[int]]:
    """Return passes, as lists of places. Samples of one prompt go together and share its tokens.

    `max_tokens` bounds the tokens of a pass; one sample always fits.
    """
    passes: list[list[int]] = []
    tokens = 0
    last: tuple[int, ...] = ()
    for i in sorted(range(len(samples)), key=lambda i: (len(samples[i][0]), tuple(samples[i][0]))):
        prompt, completion = tuple(samples[i][0]), samples[i][1]
        tokens += len(completion) + (0 if prompt == last else len(prompt))
        if not passes or tokens > max_tokens:
            passes.append([])
            tokens = len(prompt) + len(completion)
        passes[-1].append(i)
        last = prompt
    return passes


def predicting_rows(
    model: LeanModel, samples: Iterable[tuple[Tokens, Tokens]]
) -> list[torch.Tensor]:
    """Return the hidden states [T, H] that predict each sample's completion."""
    work, prompts, placed = Pass(), dict[tuple[int, ...], slice](), []
    length = 1
    for prompt, completion in samples:
        key = tuple(prompt)
        if key not in prompts:
            prompts[key] = work.add(key)
        placed.append((prompts[key], work.add(completion[:-1], prompts[key])))
        length = max(length, len(prompt) + len(completion))
    hidden_NH = prefill(model, work, model.begin(length))
    return [
        torch.cat([hidden_NH[prompt.stop - 1 : prompt.stop], hidden_NH[rows]])
        for prompt, rows in placed
    ]
