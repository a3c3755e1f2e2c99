"""The reference for engines: one sequence at a time, a whole forward pass per token, no cache.

Axes: T completion tokens, H hidden units, V vocabulary.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from muster.inference.engine import Request
from muster.inference.sampling import gumbel_noise

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Expected:
    """A completion by the definition, in float32."""

    tokens: tuple[int, ...]
    """Completion token ids."""
    hidden_TH: Floats
    """Row t is the hidden state that predicted token t."""
    logits_TV: Floats
    """Row t is the logits from which token t was chosen."""


class Reference:
    """The definition of generation, computed by transformers' own model."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        (self._eos,) = [self._model.config.eos_token_id]
        self.complete = cache(self._complete)

    def predict(self, tokens: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Return hidden states [L, H] and logits [L, V] of a sequence."""
        with torch.inference_mode():
            hidden = self._model.model(torch.tensor([tokens])).last_hidden_state[0]
            return hidden.numpy(), self._model.lm_head(hidden).numpy()

    def seeds_of_first(self, prompt: tuple[int, ...], token: int, count: int) -> list[int]:
        """Return seeds under which the completion of a prompt begins with a token, at T 1."""
        logits_V = self.predict(prompt)[1][-1]
        seeds = np.arange(1 << 12, dtype=np.uint64)
        noise_RV = gumbel_noise(seeds, np.zeros(len(seeds)), len(logits_V))
        return np.flatnonzero((logits_V + noise_RV).argmax(axis=1) == token)[:count].tolist()

    def _complete(self, request: Request) -> Expected:
        tokens: list[int] = []
        hidden, logits = [], []
        while len(tokens) < request.max_new_tokens and self._eos not in tokens:
            hidden_LH, logits_LV = self.predict((*request.prompt_tokens, *tokens))
            scores_V = logits_LV[-1] / np.float32(request.temperature)
            position = request.position + len(tokens)
            noise_V = gumbel_noise([request.seed], [position], len(scores_V))[0]
            tokens.append(int((scores_V + noise_V).argmax()))
            hidden.append(hidden_LH[-1])
            logits.append(logits_LV[-1])
        return Expected(tuple(tokens), np.stack(hidden), np.stack(logits))
