"""Hidden states for golden vectors: derived from SHAKE-256, so any language can rebuild them.

Outliers of distinct magnitudes stand above the rest, so that no ties at the cut make the choice
ambiguous and the `toploc` library's order of ties does not matter.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Case:
    label: str
    tokens: int
    hidden_size: int
    chunk_tokens: int
    topk: int

    def patterns(self) -> npt.NDArray[np.uint16]:
        chunks = [
            self._chunk(i, min(self.chunk_tokens, self.tokens - start))
            for i, start in enumerate(range(0, self.tokens, self.chunk_tokens))
        ]
        return np.concatenate(chunks)

    def _chunk(self, index: int, rows: int) -> npt.NDArray[np.uint16]:
        elements = rows * self.hidden_size
        small = self._words(f"{index}/small", elements) & 0xBEFF
        order = np.argsort(self._words(f"{index}/order", elements), kind="stable")
        outliers = min(elements, self.topk)
        signs = self._words(f"{index}/signs", outliers) & 0x8000
        small[order[:outliers]] = signs | (0x3F80 + 3 * np.arange(outliers))
        return small.astype(np.uint16).reshape(rows, self.hidden_size)

    def perturbed(self) -> npt.NDArray[np.uint16]:
        patterns = self.patterns()
        is_outlier = (patterns & 0x7FFF) >= 0x3F80
        bumps = self._words("bumps", patterns.size).reshape(patterns.shape) % 2
        return np.where(is_outlier, patterns + bumps, patterns).astype(np.uint16)

    def _words(self, purpose: str, count: int) -> npt.NDArray[np.int64]:
        digest = hashlib.shake_256(f"{self.label}/{purpose}".encode()).digest(2 * count)
        return np.frombuffer(digest, ">u2").astype(np.int64)


CASES = (
    Case("one chunk", 32, 64, 32, 128),
    Case("three chunks", 96, 48, 32, 64),
    Case("shorter last chunk", 40, 64, 32, 128),
    Case("five tokens", 5, 64, 32, 128),
    Case("four values", 3, 16, 2, 4),
    Case("wraps the field", 32, 2560, 32, 128),
    Case("wraps twice", 32, 5120, 32, 128),
    Case("collides 1", 32, 5120, 32, 256),
    Case("collides 2", 32, 4096, 32, 512),
)
