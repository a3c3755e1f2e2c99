"""How large a submission file may be: any file, and the files of a recipe.

Without the Parquet library, which takes 45 MB: an orchestrator refuses what is too large unread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.protocol.recipe import Recipe

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Most bytes of any file; a larger one is not read. A recipe's files are smaller: `Bounds`."""
MAX_ROWS = 65_535
"""Most rows of a file: the outcome record counts them in 16 bits."""
MAX_UNCOMPRESSED_BYTES = 256 * 1024 * 1024
"""Most bytes of a decoded file."""
MAX_PROBLEM_ID_BYTES = 4096
"""Longest name of a problem in a file."""
_SCALARS_BYTES = 64
"""Allowance in bytes for a row's numbers, and for the lengths of its other values."""
_FRAME_BYTES = 1 << 20
"""Allowance in bytes for a file's headers, dictionaries and footer."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds on a file, as means per row; a larger file is not decoded."""

    rows: int = MAX_ROWS
    prompt_tokens: int = MAX_UNCOMPRESSED_BYTES
    """Prompt tokens of a row."""
    completion_tokens: int = MAX_UNCOMPRESSED_BYTES
    """Completion tokens of a row; also its reply bounds."""
    proof_bytes: int = MAX_UNCOMPRESSED_BYTES
    """Bytes of a row's proofs."""

    @classmethod
    def of(cls, recipe: Recipe, *, prompt_tokens: int = MAX_UNCOMPRESSED_BYTES) -> Bounds:
        """Return the bounds of a recipe's files, with room for rows that are a little too long,
        because the checks of single rows give a better reason. `prompt_tokens` depends on the task
        set.
        """
        sampling, proof = recipe.sampling, recipe.proof
        completion = 2 * sampling.max_new_tokens + 256
        return cls(
            rows=min(sampling.problems_per_submission * sampling.samples_per_problem, MAX_ROWS),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion,
            proof_bytes=-(-completion // proof.chunk_tokens) * (2 + 2 * proof.topk),
        )

    @property
    def file_bytes(self) -> int:
        """Most bytes of a file: what its rows take as plain values, without compression."""
        tokens = self.prompt_tokens + 2 * self.completion_tokens  # replies are bounded like those
        row = 4 * tokens + self.proof_bytes + MAX_PROBLEM_ID_BYTES + _SCALARS_BYTES
        return min(self.rows * row + _FRAME_BYTES, MAX_FILE_BYTES)


ANY = Bounds()
"""The bounds of any file."""
