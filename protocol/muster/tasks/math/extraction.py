r"""The final answer of a completion: what its last `\boxed{...}` holds, and nothing else.

There is no second candidate: an answer that is not boxed, or whose last box is not closed, is none.
"""

from __future__ import annotations

import re

BOX = "\\boxed{"
THOUGHT_END = "</think>"
"""Boxes before a thought's end are drafts."""
MAX_ANSWER_CHARS = 512
"""A longer answer is wrong unread."""
_BRACE = re.compile(r"\\[{}\\]|[{}]")


def final_answer(completion: str) -> str | None:
    """Return what the last box holds; None when there is none, or it is not closed or too long."""
    start = completion.rfind(BOX)
    if start < 0 or completion.find(THOUGHT_END, start) >= 0:
        return None
    start += len(BOX)
    window = completion[start : start + MAX_ANSWER_CHARS + 1]
    end = window.find("}")
    if end >= 0 and "{" not in window[:end] and "\\" not in window[:end]:
        return window[:end]
    return _balanced(window)


def _balanced(window: str) -> str | None:
    """Return the text before the brace that closes what was opened before the window."""
    depth = 1
    for match in _BRACE.finditer(window):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return window[: match.start()]
    return None


def gold_answer(gold: str) -> str:
    """Return a gold standard's answer: its last box, or all of it when it has none."""
    return (final_answer(gold) if BOX in gold else gold) or ""
