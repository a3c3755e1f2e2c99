"""Reads a submission file for display, in its own process, because the file is a stranger's.

    python -m muster.orchestrator.dashboard.sample_reader FILE [TOKENIZER]

prints one JSON array of samples. The Parquet library aborts on some damaged files, and the tokens
may be unknown to the tokenizer: a crash ends only this process.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from muster.lifecycle import limit_memory
from muster.protocol.errors import EncodingError
from muster.protocol.rollouts import Rollout, decode_rollouts

GROUPS = 4
"""Most groups shown of a file."""
PER_GROUP = 2
"""Samples shown of each group: the best, and the worst if it differs."""
MAX_CHARACTERS = 4_000
"""Longest text shown."""
MAX_TOKENS = 4_096
"""Most tokens that are decoded to text."""
MEMORY_BYTES = 4 << 30
"""Address space of the process."""

Decode = Callable[[Sequence[int]], str | None]
"""Token ids to text; None without a tokenizer."""


def choose(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the best and the worst sample of the first groups."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    chosen: list[Rollout] = []
    for group in sorted(groups)[:GROUPS]:
        ranked = sorted(groups[group], key=lambda r: (-r.task_reward, r.sample))
        differ = ranked[0].task_reward != ranked[-1].task_reward
        chosen += [ranked[0], ranked[-1]][: PER_GROUP if differ else 1]
    return chosen


def describe(rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """Return a sample as JSON values; texts and lists of ids are cut."""
    return {
        "problem_id": rollout.problem_id[:128],
        "group": rollout.group,
        "sample": rollout.sample,
        "reward": rollout.task_reward,
        "target_length": rollout.target_length,
        "length": len(rollout.completion_tokens),
        "prompt": _text(rollout.prompt_tokens, decode),
        "completion": _text(rollout.completion_tokens, decode),
    }


def _text(tokens: Sequence[int], decode: Decode) -> str:
    shown = tokens[:MAX_TOKENS]
    text = decode(shown)
    if text is None:
        text = " ".join(map(str, shown))
    is_cut = len(text) > MAX_CHARACTERS or len(tokens) > MAX_TOKENS
    return text[:MAX_CHARACTERS] + ("…" if is_cut else "")


def _decoder(path: str | None) -> Decode:
    if path is None:
        return lambda _tokens: None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return lambda _tokens: None
    tokenizer = Tokenizer.from_file(path)
    # Special tokens are kept: the end of a completion is part of the sample.
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def main(arguments: Sequence[str]) -> int:
    """Print the samples of a file; 1 when it cannot be read."""
    limit_memory(MEMORY_BYTES)
    path, tokenizer = arguments[0], arguments[1] if len(arguments) > 1 else None
    try:
        rollouts = decode_rollouts(Path(path).read_bytes())
    except (EncodingError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    decode = _decoder(tokenizer)
    sys.stdout.write(json.dumps([describe(rollout, decode) for rollout in choose(rollouts)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
