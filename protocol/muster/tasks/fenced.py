"""The program of a completion: what its last fenced block holds, and nothing else."""

from __future__ import annotations

import re

from muster.tasks.math.extraction import THOUGHT_END

MAX_PROGRAM_CHARS = 65_536
"""A longer program is wrong unread."""
_FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[ \t]*\r?$", re.MULTILINE)


def last_block(completion: str, languages: frozenset[str]) -> str | None:
    """Return the last fenced block; None when there is none, or it is not closed, in another
    language or too long.

    Blocks before the end of a thought are drafts.
    """
    text = completion.rpartition(THOUGHT_END)[2]
    opened: re.Match[str] | None = None
    found: str | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened, found = fence, None
        elif not fence[1]:
            block = text[opened.end() + 1 : fence.start()]
            is_wanted = opened[1].lower() in languages and len(block) <= MAX_PROGRAM_CHARS
            opened, found = None, block if is_wanted else None
    return found
