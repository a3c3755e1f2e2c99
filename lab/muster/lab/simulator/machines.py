"""Replacements for relays, the decoder's process and the model."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from muster.inference import Completion, Examined, Request, Sample, gumbel_noise
from muster.inference.engine import Progress, Watch, set_aside_in
from muster.inference.examining import HostBlock, Recomputed, examine, prove_host
from muster.protocol.errors import PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.prompts import Prompt, text_of
from muster.protocol.recipe import ProofRecipe
from muster.protocol.rollouts import ANY, Bounds, Rollout, decode_rollouts
from muster.protocol.set_aside import NOTHING
from muster.shardcast.fetcher import NamedVersions
from muster.toploc import build_proofs, build_proofs_many

ALPHABET = "0123456789= "
EOS = len(ALPHABET)
Hidden = tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]
"""A hidden state and the logits that follow from it."""


@dataclass(slots=True)
class SimulatedFetcher:
    """Relays, and a node's disk: fetching a policy takes time once, and sometimes fails."""

    rng: random.Random
    """Draws times and failures."""
    seconds: float
    """Mean seconds that a version takes."""
    failures: float
    """Share of fetches that no relay answers."""
    named: NamedVersions = lambda _: ()
    """Unused: no version is ever deleted."""

    _held: set[PolicyVersion] = field(default_factory=set)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def fetch(self, _run_id: RunId, version: PolicyVersion, _root: Hash32) -> Path:
        """Return the policy's folder."""
        async with self._turn:
            if version not in self._held:
                await asyncio.sleep(self.seconds * self.rng.expovariate(1.0))
                if self.rng.random() < self.failures:
                    raise PolicyUnavailable(f"no relay has version {version}")
                self._held.add(version)
        return Path("policy")


class InlineDecoder:
    """Parses files in this process: they were written by it."""

    async def decode(self, data: bytes, bounds: Bounds = ANY) -> list[Rollout]:
        """Return the rows of a file; raises EncodingError."""
        return list(_decoded(data, bounds))


@lru_cache(4096)
def _decoded(data: bytes, bounds: Bounds) -> tuple[Rollout, ...]:
    # All called validators read the same file at about the same time.
    return tuple(decode_rollouts(data, bounds))


class SimulatedEngine:
    """An engine whose policy is a hash of its name, the version and the tokens so far.

    Proofs, sampling and replay are the real ones; another name is another model.
    """

    hidden_size = 8
    vocab_size = EOS + 1
    eos_token_ids = frozenset([EOS])

    def __init__(self, name: str = "policy") -> None:
        self.name = name
        self.policy_version: PolicyVersion | None = None
        self.set_aside = NOTHING

    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        """Load a version."""
        # Simulated relays deliver no folder.
        self.set_aside = set_aside_in(folder) if folder.is_dir() else NOTHING
        self.policy_version = version

    def generate(
        self,
        requests: Sequence[Request],
        *,
        proof: ProofRecipe,
        watch: Watch | None = None,
        due: int = 0,
    ) -> list[Completion]:
        """Return completions with proofs; generating takes no virtual time here."""
        assert due >= 0
        made: list[Completion] = []
        for request in requests:
            made.append(self._generate(request, proof))
            tokens = sum(len(each.tokens) for each in made)
            if watch is not None:
                watch(Progress(tokens, len(made), tokens))
        return made

    def examine(
        self, samples: Sequence[Sample], *, proof: ProofRecipe, temperature: float
    ) -> list[Examined]:
        """Return the policy's examination of every sample."""
        computed = self.recompute([(s.prompt_tokens, s.completion_tokens) for s in samples])
        if not samples:
            return []
        logits_NV = np.concatenate([each.logits_TV for each in computed])
        return examine(
            samples,
            lambda: prove_host(samples, [each.hidden_TH for each in computed], proof),
            lambda rows: HostBlock(logits_NV[rows]),
            vocab_size=self.vocab_size,
            eos=self.eos_token_ids,
            temperature=temperature,
        )

    def prove(
        self, samples: Sequence[tuple[Sequence[int], Sequence[int]]], *, proof: ProofRecipe
    ) -> list[list[bytes]]:
        """Return the proofs of completions."""
        hidden = [computed.hidden_TH for computed in self.recompute(samples)]
        return build_proofs_many(hidden, chunk_tokens=proof.chunk_tokens, topk=proof.topk)

    def recompute(self, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Recomputed]:
        """Return the policy's recomputation of completions."""
        return [self._recompute(prompt, completion) for prompt, completion in samples]

    def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:
        """Return a prompt's tokens."""
        assert is_start is not None
        return tuple(ALPHABET.index(character) for character in text_of(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return a completion's text."""
        return "".join(ALPHABET[token] for token in tokens if token != EOS)

    def _generate(self, request: Request, proof: ProofRecipe) -> Completion:
        tokens: list[int] = []
        hidden = []
        while len(tokens) < request.max_new_tokens and EOS not in tokens:
            row, logits = self._step((*request.prompt_tokens, *tokens))
            position = request.position + len(tokens)
            noise = gumbel_noise([request.seed], [position], self.vocab_size)[0]
            tokens.append(int((logits + noise).argmax()))
            hidden.append(row)
        proofs = build_proofs(np.stack(hidden), chunk_tokens=proof.chunk_tokens, topk=proof.topk)
        return Completion(tuple(tokens), proofs)

    def _recompute(self, prompt: Sequence[int], completion: Sequence[int]) -> Recomputed:
        steps = [self._step((*prompt, *completion[:i])) for i in range(len(completion))]
        hidden, logits = zip(*steps, strict=True)
        return Recomputed(np.stack(hidden), np.stack(logits))

    def _step(self, tokens: tuple[int, ...]) -> Hidden:
        return _step((self.name, self.policy_version, tokens))


@lru_cache(1 << 17)
def _step(seen: tuple[str, PolicyVersion | None, tuple[int, ...]]) -> Hidden:
    """Return a hidden state, bfloat16 as uint16, and float32 logits."""
    # Cached from the worker to its validators: at most 100 MB.
    size = SimulatedEngine.hidden_size
    whole = size + SimulatedEngine.vocab_size
    drawn = np.frombuffer(hashlib.shake_128(repr(seen).encode()).digest(4 * whole), "<u4")
    values = (drawn.astype(np.float32) / np.float32(2**31) - 1).astype(np.float32)
    hidden = (np.ascontiguousarray(values[:size]).view(np.uint32) >> 16).astype(np.uint16)
    logits = 3 * values[size:]
    hidden.setflags(write=False)
    logits.setflags(write=False)
    return hidden, logits
