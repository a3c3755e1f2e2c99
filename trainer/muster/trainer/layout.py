"""Where the sequences of a packed row lie: all prompts, then the completions of each.

Pure; knows neither tensors nor models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Layout:
    """Which positions of a packed row belong together."""

    prompts: tuple[int, ...]
    """Length of every prompt; they fill the row's beginning."""
    completions: tuple[tuple[int, ...], ...]
    """Per prompt, the number of positions of each of its completions; 0 is possible."""

    @property
    def width(self) -> int:
        """Positions of the row."""
        return sum(self.prompts) + sum(map(sum, self.completions))

    @property
    def longest(self) -> int:
        """Positions of the longest sequence, its prompt included."""
        return max(
            prompt + max(group, default=0)
            for prompt, group in zip(self.prompts, self.completions, strict=True)
        )

    def segments(self) -> Iterator[slice]:
        """Yield the places of all prompts and completions that are not empty, in order."""
        lengths = [*self.prompts, *(n for group in self.completions for n in group)]
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            if length:
                yield slice(end - length, end)

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """Yield per prompt its place and the place of all its completions."""
        prompt_end, end = 0, sum(self.prompts)
        for length, group in zip(self.prompts, self.completions, strict=True):
            prompt_end += length
            end += sum(group)
            yield slice(prompt_end - length, prompt_end), slice(end - sum(group), end)

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Yield per completion that is not empty the places of its prompt and of itself."""
        for (prompt, place), group in zip(self.groups(), self.completions, strict=True):
            for end, length in zip(
                accumulate(group, initial=place.start), (0, *group), strict=True
            ):
                if length:
                    yield prompt, slice(end - length, end)

    def positions(self) -> list[int]:
        """Return the position id of every place: completions go on from their prompt."""
        ids = [i for length in self.prompts for i in range(length)]
        for length, group in zip(self.prompts, self.completions, strict=True):
            ids += [length + i for n in group for i in range(n)]
        return ids
