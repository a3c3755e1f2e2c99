"""A judge that runs on this machine: a model's folder, asked through an engine.

The noise of a reply follows from the question, so the same judge gives the same reply. A reply is
proven like a rollout: anybody with the judge's folder can check by one forward pass that this model
said it, without asking again (`EngineJudge.fault_of`, `muster data judge`). Installed by
`MUSTER_JUDGE_MODEL=DIR`, for runs that allow a judge.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from muster.inference.engine import InferenceEngine, Request, Sample
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, ProofError
from muster.protocol.ids import PolicyVersion
from muster.protocol.prompts import render_prompt
from muster.protocol.recipe import PromptRecipe, ProofRecipe
from muster.settings import read_document
from muster.toploc import Calibration

MODEL_VARIABLE = "MUSTER_JUDGE_MODEL"
"""Environment variable that names the judge's folder."""
MAX_REPLY_TOKENS = 32
"""Most tokens of a reply, which is one short line of JSON."""
PROMPT, PROOF, TEMPERATURE = PromptRecipe(), ProofRecipe(), 1.0
"""The recipe by which a judge's replies are sampled and proven."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """A judge's reply to a question, with its proofs."""

    tokens: tuple[int, ...]
    """The reply, with the EOS that ended it, if one did."""
    proofs: tuple[bytes, ...]
    """TOPLOC proofs of its chunks."""
    text: str
    """The reply as text."""


class EngineJudge:
    """A judge on an engine that has loaded its model. Any thread may ask; questions take turns."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._turn = threading.Lock()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the judge whose model is in a folder."""
        from muster.inference.transformers_engine import TransformersEngine

        engine = TransformersEngine()
        engine.load_policy(folder, PolicyVersion(0))
        return cls(engine)

    def ask(self, prompt: str) -> str:
        """Return the reply to a question; the same question always gets the same reply."""
        return self.opinions([prompt])[0].text

    def opinions(self, prompts: Sequence[str]) -> list[Opinion]:
        """Return replies with their proofs, all generated together."""
        asked = [
            Request(self._tokens(text), seed_of(text), TEMPERATURE, MAX_REPLY_TOKENS)
            for text in prompts
        ]
        with self._turn:
            made = self._engine.generate(asked, proof=PROOF)
            return [
                Opinion(each.tokens, tuple(each.proofs), self._engine.decode(each.tokens))
                for each in made
            ]

    def fault_of(self, prompt: str, opinion: Opinion, calibration: Calibration) -> str:
        """Return why an opinion is not this judge's; empty if it is.

        `calibration` has the limits of the judge's own model.
        """
        if not 1 <= len(opinion.tokens) <= MAX_REPLY_TOKENS:
            return f"a reply of {len(opinion.tokens)} tokens"
        if not 0 <= min(opinion.tokens) <= max(opinion.tokens) < self._engine.vocab_size:
            return "a token that the model does not have"
        ends = [token in self._engine.eos_token_ids for token in opinion.tokens]
        if any(ends[:-1]) or not (ends[-1] or len(ends) == MAX_REPLY_TOKENS):
            return "the reply ends elsewhere"
        if self._engine.decode(opinion.tokens) != opinion.text:
            return "the text is not that of the tokens"
        sample = Sample(self._tokens(prompt), opinion.tokens, seed_of(prompt), opinion.proofs)
        try:
            with self._turn:
                [found] = self._engine.examine([sample], proof=PROOF, temperature=TEMPERATURE)
        except ProofError as error:
            return f"its proofs: {error}"
        if not all(map(calibration.chunk_passes, found.chunks)):
            return "its proofs are not of this model's hidden states"
        if not calibration.sampler_passes(found.replayed.margins_T):
            return "its tokens do not follow from the question's seed"
        return ""

    def _tokens(self, prompt: str) -> tuple[int, ...]:
        return self._engine.encode(render_prompt(prompt, -1, PROMPT))


def seed_of(prompt: str) -> int:
    """Return the 64-bit seed of the noise of a reply to a question."""
    return int.from_bytes(keccak(b"muster judge" + prompt.encode("utf-8", "replace"))[:8], "big")


def read_limits(path: Path) -> Calibration:
    """Return a judge's calibration; raises ConfigError when it has other proofs or temperature."""
    calibration = read_document(Calibration, path, hint="muster calibrate writes it")
    if (calibration.proof, calibration.temperature) != (PROOF, TEMPERATURE):
        raise ConfigError(
            f"{path} was measured with other proofs or at another temperature than judges have",
            hint="muster calibrate --model JUDGE, without --recipe",
        )
    return calibration


def from_environment() -> EngineJudge | None:
    """Return the judge that the environment names, with its model loaded; None without one."""
    folder = os.environ.get(MODEL_VARIABLE)
    return EngineJudge.load(Path(folder)) if folder else None
