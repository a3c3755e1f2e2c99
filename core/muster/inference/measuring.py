"""Generates and recomputes rollouts the way workers and validators do, and measures the difference.

Every difference that two honest parties may have is a way here, because limits are chosen from the
worst pair. `muster.inference.calibrate` compares them; nothing here applies limits. Axes: R rows, L
width, T completion tokens, H hidden units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from muster.inference.blocks import examine_rows
from muster.inference.calibration_plan import PLAIN, Way
from muster.inference.engine import (
    Completion,
    Examined,
    InferenceEngine,
    Redraw,
    Request,
    Sample,
)
from muster.inference.forgers import RecomputedChunks
from muster.inference.forward import Forward, Tokens, WholeBatch, pad_left
from muster.inference.policy_files import keep_caps
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.recipe import ProofRecipe, Recipe
from muster.toploc import ChunkResult, build_proofs_many, verify_proofs_many
from muster.toploc.chunks import Patterns, to_patterns

_MOST_CHUNKS = 512
"""Chunks that forgers are tried on: more would take memory and hardly change the result."""

_SCORE_BYTES = 4 << 30
"""Most bytes of eager attention's scores in a pass, unless it is one sample."""

_PART_LOGITS = 1 << 26
"""Logits held at a time where two models are compared: 256 MiB for each."""


@contextmanager
def computing(engine: TransformersEngine, way: Way) -> Iterator[None]:
    """Run the body with the engine set up in a way; afterwards it is as before."""
    config = engine.model.config
    own = engine.max_rows, engine.lean, torch.get_num_threads(), config._attn_implementation
    _set_up(engine, way.max_rows, way.lean, way.threads, way.attention)
    try:
        yield
    finally:
        _set_up(engine, *own)


def _set_up(
    engine: TransformersEngine, max_rows: int, lean: bool, threads: int | None, attention: str
) -> None:
    engine.max_rows, engine.lean = max_rows, lean
    if threads is not None:
        torch.set_num_threads(threads)
    if engine.model.config._attn_implementation != attention:
        engine.model.set_attn_implementation(attention)
        keep_caps(engine.model)


# ------------------------------------------------------------------------------------- parties


@dataclass(frozen=True, slots=True)
class Delivery:
    """Completions and the requests they claim to answer."""

    requests: Sequence[Request]
    """The requests, with the seeds that a validator replays."""
    completions: Sequence[Completion]
    """The delivered completions."""

    def __getitem__(self, places: slice) -> Delivery:
        """Return some of the samples."""
        return Delivery(self.requests[places], self.completions[places])

    @property
    def pairs(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The samples as (prompt, completion)."""
        asked = [request.prompt_tokens for request in self.requests]
        return list(zip(asked, [c.tokens for c in self.completions], strict=True))

    def samples(self, redraws: Sequence[tuple[Redraw, ...]] = ()) -> list[Sample]:
        """Return the samples for a validator; `redraws` are those of each sample, or empty."""
        rows = zip(
            self.requests, self.completions, redraws or [()] * len(self.requests), strict=True
        )
        return [Sample(r.prompt_tokens, c.tokens, r.seed, c.proofs, (), d) for r, c, d in rows]


@dataclass(frozen=True, slots=True)
class Errors:
    """Differences between work and its recomputation, sample by sample."""

    chunks: list[list[ChunkResult]]
    """Distances of the proofs."""
    margins: list[npt.NDArray[np.float32]]
    """Margins of the choices."""

    @staticmethod
    def of(examined: Sequence[Examined]) -> Errors:
        """Return the errors that an examination found."""
        chunks = [list(each.chunks) for each in examined]
        return Errors(chunks, [each.replayed.margins_T for each in examined])

    def all_chunks(self) -> list[ChunkResult]:
        """Return the chunks of every sample."""
        return [result for results in self.chunks for result in results]

    def only(self, kept: Sequence[bool]) -> Errors:
        """Return the samples marked True."""
        chunks = [c for c, keep in zip(self.chunks, kept, strict=True) if keep]
        return Errors(chunks, [m for m, keep in zip(self.margins, kept, strict=True) if keep])

    def __add__(self, other: Errors) -> Errors:
        """Return the samples of both."""
        return Errors(self.chunks + other.chunks, self.margins + other.margins)


@dataclass(frozen=True, slots=True)
class Survey:
    """Findings of one forward pass over honest work."""

    work: Delivery
    """The work."""
    found: list[Examined]
    """What the plain validator finds in it."""
    redraws: list[tuple[Redraw, ...]]
    """What the policy chooses at the same rows under other noise, per sample."""
    other_seed: Errors
    """Samples whose choices are replaced by those of one more seed, if any differs, with true
    proofs: the result of a cheat that changes only seeds. Its texts would come from the policy too,
    so these texts stand for them."""
    hidden: list[Patterns]
    """The policy's hidden states [T, H] of each sample."""

    def chunks(self, proof: ProofRecipe, *, one_token: bool = False) -> list[RecomputedChunks]:
        """Return chunks by shape, for shapes that both halves of the prompts have: all chunks, or,
        of long samples, some spread over each; `one_token` takes the first row of each chunk.
        """
        places: dict[tuple[int, ...], int] = {}
        starts = [range(0, len(tokens), proof.chunk_tokens) for _, tokens in self.work.pairs]
        most = _most_of_each([len(each) for each in starts])
        members: defaultdict[int, list[tuple[Patterns, tuple[int, ...], int]]] = defaultdict(list)
        for (prompt, tokens), hidden_TH, own in zip(
            self.work.pairs, self.hidden, starts, strict=True
        ):
            number = places.setdefault(prompt, len(places))
            taken = min(len(own), most)
            for start in (own[i * len(own) // taken] for i in range(taken)):
                end = start + 1 if one_token else start + proof.chunk_tokens
                rows = hidden_TH[start:end]
                members[len(rows)].append((rows, tokens[start:end], number))
        shaped = [
            RecomputedChunks(
                np.stack([rows for rows, *_ in group]),
                np.array([tokens for _, tokens, _ in group]),
                np.array([prompt for *_, prompt in group]),
                proof,
            )
            for group in members.values()
        ]
        return [chunks for chunks in shaped if len(np.unique(chunks.prompts_B % 2)) == 2]


def _most_of_each(counts: Sequence[int]) -> int:
    """Return how many chunks to take of each sample to have about _MOST_CHUNKS in all."""
    most = 1
    while most < max(counts) and sum(min(count, most) for count in counts) < _MOST_CHUNKS:
        most += 1
    return most


def one_token(requests: Sequence[Request]) -> list[Request]:
    """Return the requests cut to their first token: the smallest chunks."""
    return [replace(request, max_new_tokens=1) for request in requests]


class Party:
    """An engine on one recipe, as workers and validators use it; it has one way to compute."""

    engine: InferenceEngine

    def __init__(self, name: str, engine: InferenceEngine, recipe: Recipe) -> None:
        self.name, self.engine, self.recipe = name, engine, recipe
        self.done = 0
        """Samples generated or examined so far, for progress reports."""

    def ways(self, ways: Sequence[Way]) -> Sequence[Way]:
        """Return the ways among these that this engine can compute in."""
        return [way for way in ways if way == PLAIN]

    def generate(self, requests: Sequence[Request], way: Way = PLAIN) -> Delivery:
        """Return what a worker delivers."""
        asked = requests[: way.samples]
        self.done += len(asked)
        return Delivery(asked, self.engine.generate(asked, proof=self.recipe.proof))

    def examine(
        self, work: Delivery, _way: Way = PLAIN, redraws: Sequence[tuple[Redraw, ...]] = ()
    ) -> list[Examined]:
        """Return what a validator finds in work."""
        self.done += len(work.requests)
        proof, temperature = self.recipe.proof, self.recipe.sampling.temperature
        return self.engine.examine(work.samples(redraws), proof=proof, temperature=temperature)


class OwnParty(Party):
    """The engine on transformers, which can be made to compute in many ways."""

    engine: TransformersEngine

    def __init__(self, engine: TransformersEngine, recipe: Recipe) -> None:
        super().__init__(engine.dtype, engine, recipe)

    def ways(self, ways: Sequence[Way]) -> Sequence[Way]:
        """Return all of them."""
        return ways

    def generate(self, requests: Sequence[Request], way: Way = PLAIN) -> Delivery:
        """Return what a worker delivers."""
        with computing(self.engine, way):
            return super().generate(requests, way)

    def examine(
        self, work: Delivery, way: Way = PLAIN, redraws: Sequence[tuple[Redraw, ...]] = ()
    ) -> list[Examined]:
        """Return what a validator finds in work."""
        with computing(self.engine, self._fitting(way, work)):
            if way.path == "prefill":
                return super().examine(work, way, redraws)
            run = _padded_left if way.path == "padded left" else _decoded
            samples, found = work.samples(redraws), []
            self.done += len(samples)
            with torch.inference_mode():
                for start in range(0, len(samples), way.max_rows):
                    places = slice(start, start + way.max_rows)
                    hidden = run(self.engine.forward, work[places].pairs)
                    found += self._examine_rows(samples[places], hidden)
        return found

    def score_bytes(self, tokens: int) -> int:
        """Return the bytes that eager attention takes for the scores of so many tokens: twice in
        the model's format and once in float32.
        """
        model = self.engine.model
        width: int = 2 * model.dtype.itemsize + 4
        return int(model.config.get_text_config().num_attention_heads) * tokens**2 * width

    def _fitting(self, way: Way, work: Delivery) -> Way:
        """Return a way with only so many samples in a pass as there is room for."""
        if way.attention != "eager":
            return way
        longest = max(len(prompt) + len(tokens) for prompt, tokens in work.pairs)
        fitting = _SCORE_BYTES // self.score_bytes(longest)
        return replace(way, max_rows=max(1, min(way.max_rows, fitting)))

    def _examine_rows(
        self, samples: Sequence[Sample], hidden: Sequence[torch.Tensor]
    ) -> list[Examined]:
        engine, recipe = self.engine, self.recipe
        return examine_rows(
            samples,
            hidden,
            engine.forward.logits,
            vocab_size=engine.vocab_size,
            eos=engine.eos_token_ids,
            proof=recipe.proof,
            temperature=recipe.sampling.temperature,
        )

    def survey(
        self, work: Delivery, redraws: Sequence[tuple[Redraw, ...]], other_seeds: Sequence[int]
    ) -> Survey:
        """Return the findings of one forward pass over work; `redraws` have seeds, but no tokens
        yet.
        """
        asked = [
            replace(sample, redraws=(*sample.redraws, Redraw(seed, sample.completion_tokens)))
            for sample, seed in zip(work.samples(redraws), other_seeds, strict=True)
        ]
        found: dict[int, Examined] = {}
        cheats: dict[int, Examined] = {}
        is_different = [False] * len(asked)
        hidden_TH: dict[int, Patterns] = {}
        self.done += len(work.requests)
        for places, hidden in self.engine.passes(work.pairs):
            samples = [asked[i] for i in places]
            seen = self._examine_rows(samples, hidden)
            chosen = [tuple(each.redrawn[-1].expected_T.tolist()) for each in seen]
            lies = [
                replace(sample, completion_tokens=tokens, redraws=())
                for sample, tokens in zip(samples, chosen, strict=True)
            ]
            for i, sample, lie in zip(places, samples, lies, strict=True):
                is_different[i] = sample.completion_tokens != lie.completion_tokens
            found.update(zip(places, seen, strict=True))
            cheats.update(zip(places, self._examine_rows(lies, hidden), strict=True))
            hidden_TH.update(zip(places, map(to_patterns, hidden), strict=True))
        order = range(len(asked))
        drawn = [
            tuple(
                Redraw(redraw.seed, tuple(each.expected_T.tolist()))
                for redraw, each in zip(redraws[i], found[i].redrawn, strict=False)
            )
            for i in order
        ]
        return Survey(
            work,
            [found[i] for i in order],
            drawn,
            Errors.of([cheats[i] for i in order]).only(is_different),
            [hidden_TH[i] for i in order],
        )

    def measure_proven(self, work: Delivery) -> tuple[Errors, Errors]:
        """Return the errors of work, and the errors that its tokens would have with proofs by the
        policy itself.
        """
        found: dict[int, Examined] = {}
        proven: dict[int, list[ChunkResult]] = {}
        samples, proof = work.samples(), self.recipe.proof
        sizes = {"chunk_tokens": proof.chunk_tokens, "topk": proof.topk}
        self.done += len(work.requests)
        for places, hidden in self.engine.passes(work.pairs):
            rows = [to_patterns(hidden_TH) for hidden_TH in hidden]
            true = verify_proofs_many(rows, build_proofs_many(rows, **sizes), **sizes)
            proven.update(zip(places, true, strict=True))
            seen = self._examine_rows([samples[i] for i in places], hidden)
            found.update(zip(places, seen, strict=True))
        errors = Errors.of([found[i] for i in range(len(samples))])
        return errors, Errors([proven[i] for i in range(len(samples))], errors.margins)

    def logits(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[npt.NDArray[np.float32]]:
        """Return the logits [T, V] of samples that are small enough to hold."""
        return [computed.logits_TV for computed in self.engine.recompute(pairs)]

    def parts(self, work: Delivery) -> Iterator[tuple[int, Delivery]]:
        """Yield the work in parts whose logits fit into memory, each with its first place."""
        start = tokens = 0
        most = max(1, _PART_LOGITS // self.engine.vocab_size)
        for place, completion in enumerate(work.completions):
            if tokens and tokens + len(completion.tokens) > most:
                yield start, work[start:place]
                start, tokens = place, 0
            tokens += len(completion.tokens)
        yield start, work[start:]

    def measure(self, work: Delivery) -> Errors:
        """Return the errors of work under its recomputation in the plain way."""
        return Errors.of(self.examine(work))

    def prove(self, work: Delivery) -> list[Completion]:
        """Return the completions with true proofs, whatever model chose the tokens."""
        built = self.engine.prove(work.pairs, proof=self.recipe.proof)
        pairs = zip(work.completions, built, strict=True)
        return [Completion(completion.tokens, proofs) for completion, proofs in pairs]


def _padded_left(forward: Forward, samples: Sequence[tuple[Tokens, Tokens]]) -> list[torch.Tensor]:
    """Prefill a batch that is padded on the left, as some libraries do."""
    tokens_RL, mask_RL = pad_left([(*prompt, *completion[:-1]) for prompt, completion in samples])
    positions = None if mask_RL is None else np.maximum(mask_RL.cumsum(axis=1) - 1, 0)
    longest = max(len(completion) for _, completion in samples)
    hidden = forward.hidden(tokens_RL, keep=longest, mask=mask_RL, positions_RL=positions)
    return [rows[longest - len(c) :] for rows, (_, c) in zip(hidden, samples, strict=True)]


def _decoded(forward: Forward, samples: Sequence[tuple[Tokens, Tokens]]) -> list[torch.Tensor]:
    """Feed the completion token by token, as a worker does; one sample at a time."""
    made = []
    for prompt, completion in samples:
        rows = WholeBatch(forward, 1, len(completion))
        steps = [rows.admit([tuple(prompt)]), *(rows.step(np.array([t])) for t in completion[:-1])]
        made.append(torch.cat([hidden for hidden, _ in steps]))
    return made
