"""The replay of one sample, for tests that have all its logits."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from muster.inference.sampling import Noise, replay_block


def replay_sample(
    logits_TV: Noise, tokens: Sequence[int], seed: int, temperature: float
) -> tuple[Noise, npt.NDArray[np.int64]]:
    """Return [T] the margins of the tokens, and [T] the tokens that sampling yields."""
    count = len(tokens)
    return replay_block(
        logits_TV,
        np.asarray(tokens, np.int64),
        np.full(count, seed, np.uint64),
        np.arange(count, dtype=np.uint64),
        temperature,
    )
