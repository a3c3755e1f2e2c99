"""transformers in a process of its own, for a worker with several devices: one engine each.

What `muster.inference.vllm.host` asks of a policy, by `TransformersEngine`. Completions are told
when all of them are done; what a process that dies had generated is generated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from muster.inference.engine import Completion, Examined, Progress, Request, Room, Sample
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.frames import Facts, Tokens
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

_TOGETHER = 16
"""Samples that are examined between two signs of life."""
_ANY = PolicyVersion(0)
"""The process is not told which version it holds."""

Tick = Callable[[Progress | None], None]
"""Gives a sign of life, and how far a generation is."""


class HostedTransformers:
    """A policy that transformers holds."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        """Open a folder; raises EngineError when it is unusable."""
        # The process sees one GPU, if it is to use any.
        device = "cuda" if options["device"].startswith("cuda") else options["device"]
        room = ("context", "memory_share", "max_rows", "batch_tokens")
        self._engine = TransformersEngine(
            options["dtype"],
            threads=options["threads"],
            device=device,
            room=Room(**{name: options[name] for name in room}),
        )
        self.swap(folder)

    def swap(self, folder: Path) -> bool:
        """Load another folder, which always can be; raises EngineError."""
        engine = self._engine
        engine.load_policy(folder, _ANY)
        config = engine.model.config.get_text_config()
        self.facts = Facts(
            hidden_size=engine.hidden_size,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            context=getattr(config, "max_position_embeddings", None) or 1 << 31,
        )
        return True

    def encode(self, text: str, *, is_start: bool) -> list[int]:
        """Return the token ids of a prompt, or of text within a sequence."""
        return list(self._engine.encode(text, is_start=is_start))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion without EOS and special tokens."""
        return self._engine.decode(tokens)

    def generate(
        self, requests: Sequence[Request], proof: ProofRecipe, *, due: int, tick: Tick
    ) -> Iterator[tuple[int, Completion]]:
        """Yield every request's place and completion."""
        yield from enumerate(self._engine.generate(requests, proof=proof, watch=tick, due=due))

    def prove(
        self, samples: Sequence[tuple[Tokens, Tokens]], proof: ProofRecipe, *, tick: Tick
    ) -> Iterator[tuple[int, Completion]]:
        """Yield every sample's place and its completion with proofs."""
        for first in range(0, len(samples), _TOGETHER):
            part = samples[first : first + _TOGETHER]
            for place, proofs in enumerate(self._engine.prove(part, proof=proof), first):
                yield place, Completion(tuple(samples[place][1]), proofs)
            tick(None)

    def examine(
        self, samples: Sequence[Sample], proof: ProofRecipe, temperature: float, *, tick: Tick
    ) -> Iterator[tuple[int, Examined]]:
        """Yield every sample's place and what it shows."""
        for first in range(0, len(samples), _TOGETHER):
            part = samples[first : first + _TOGETHER]
            found = self._engine.examine(part, proof=proof, temperature=temperature)
            yield from enumerate(found, first)
            tick(None)
