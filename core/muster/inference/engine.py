"""The interface of inference engines for workers and validators, and what every engine refuses.

No torch here, and no tensor crosses this interface: an engine that examines samples returns its
findings, some tens of bytes a token. Hidden states and logits stay where they are computed. Axes: T
completion tokens, S shares of a sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import EngineError, SampleUnfit
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.prompts import Prompt
from muster.protocol.recipe import ProofRecipe
from muster.protocol.set_aside import FILE_NAME, MAX_BYTES, NOTHING, SetAside
from muster.toploc import ChunkResult


@dataclass(frozen=True, slots=True)
class Room:
    """The resources of its machine that an engine may use."""

    context: int | None = None
    """Most tokens of a prompt and its completion together; None for as many as the model can."""
    memory_share: float | None = None
    """Share of the memory that is free when the engine starts, for weights, keys and values; None
    for 0.9 of a GPU's and half of a CPU's."""
    max_rows: int = 256
    """Most samples that run at a time."""
    batch_tokens: int | None = None
    """Most tokens of one step, prompts included; None for the engine to choose."""


ROOM = Room()
"""The default resources of an engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate."""

    prompt_tokens: tuple[int, ...]
    """The whole prompt; engines never truncate."""
    seed: int
    """64-bit sampling seed."""
    temperature: float
    """Softmax temperature T."""
    max_new_tokens: int
    """Limit of the completion, EOS included."""
    position: int = 0
    """Noise position of the first token: the tokens of a completion's earlier turns, which are in
    the prompt."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated sample."""

    tokens: tuple[int, ...]
    """Completion token ids, with the EOS that ended it, if one did."""
    proofs: list[bytes]
    """TOPLOC proofs, one per chunk of completion tokens."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a `generate` is."""

    tokens: int
    """Completion tokens so far, of all samples."""
    ended: int
    """Samples that are done."""
    ended_tokens: int
    """Their completion tokens."""


Watch = Callable[[Progress], None]
"""Called every few steps with the progress of a `generate`; what it raises ends that call."""


# Examining


@dataclass(frozen=True, slots=True)
class Share:
    """A sample's part of a block of hidden states that is to be projected."""

    seed: Hash32
    """The seed of the directions, see `muster.toploc.projections`."""
    first: int
    """The block's row that is the sample's first."""
    tokens: int
    """Rows of the whole block."""


@dataclass(frozen=True, slots=True)
class Redraw:
    """Other choices at the same rows: calibration compares machines by them."""

    seed: int
    """64-bit sampling seed."""
    tokens: tuple[int, ...]
    """[T] The tokens chosen under that seed, at the rows of the sample's own completion."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to examine, as its worker claims it."""

    prompt_tokens: tuple[int, ...]
    """The whole prompt."""
    completion_tokens: tuple[int, ...]
    """The completion; noise positions count from its first token."""
    seed: int
    """64-bit sampling seed."""
    proofs: Sequence[bytes]
    """Its TOPLOC proofs, one per chunk."""
    shares: tuple[Share, ...] = ()
    """The projections that it is a part of."""
    redraws: tuple[Redraw, ...] = ()
    """Other choices to replay. With any, the probability of EOS is measured too."""


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Choices compared with those that the noise yields under the engine's logits."""

    margins_T: npt.NDArray[np.float32]
    """`max - chosen` in units of `logit / T`; inf for an id outside the vocabulary and for scores
    that are not finite."""
    expected_T: npt.NDArray[np.int64]
    """The tokens that sampling yields."""
    is_likelier_T: npt.NDArray[np.bool_]
    """Whether the chosen token's logit is above the expected one's."""


@dataclass(frozen=True, slots=True, eq=False)
class Examined:
    """What the policy's forward pass shows of a sample."""

    replayed: Replayed
    """The sample's own choices."""
    chunks: tuple[ChunkResult, ...]
    """Each proof compared with the hidden states."""
    projections: npt.NDArray[np.float64]
    """[S, VALUES]: what the sample's rows add to each share's block, before scaling."""
    redrawn: tuple[Replayed, ...] = ()
    """Its redraws, in their order."""
    ends_T: npt.NDArray[np.float64] | None = None
    """Probability that the next token is an EOS; None without redraws."""


class InferenceEngine(Protocol):
    """Runs one policy at a time. Every method may be called from any thread, also during a
    `generate`; `load_policy` waits until no other call uses the weights.
    """

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The loaded policy; None before the first and after a failed load."""

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""

    @property
    def vocab_size(self) -> int:
        """Logits per position; token ids are below it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a completion."""

    @property
    def set_aside(self) -> SetAside:
        """The problems that the loaded policy sets aside, as its folder lists them; the list has
        not been checked against the run yet.
        """

    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        """Load a policy folder; raises EngineError when it is unusable."""

    def generate(
        self,
        requests: Sequence[Request],
        *,
        proof: ProofRecipe,
        watch: Watch | None = None,
        due: int = 0,
    ) -> list[Completion]:
        """Return the completions in the order asked.

        Concurrent calls share the engine: the samples of the call with the smallest `due` start
        first, and those of the next call take the rows that remain. Raises EngineError, and what
        `watch` raises, which ends this call's samples only.
        """

    def examine(
        self, samples: Sequence[Sample], *, proof: ProofRecipe, temperature: float
    ) -> list[Examined]:
        """Return what the policy shows of every sample.

        Raises SampleUnfit for a token id outside the vocabulary, an empty prompt or completion and
        a sample beyond the model's context; ProofError for hidden states with NaN or infinity and
        for proofs that do not parse.
        """

    def prove(
        self, samples: Sequence[tuple[Sequence[int], Sequence[int]]], *, proof: ProofRecipe
    ) -> list[list[bytes]]:
        """Return the TOPLOC proofs of every (prompt, completion), whoever wrote the completion;
        raises EngineError as `generate` does, and SampleUnfit as `examine` does.
        """

    def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt, see `muster.inference.prompts`. If it is not the start
        of a sequence, the tokens that the tokenizer puts around a text are left out.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion without EOS and special tokens."""


def set_aside_in(folder: Path) -> SetAside:
    """Return the list of problems set aside of a policy folder, empty without one. If the file is
    too large for any task set, its beginning is returned, which is no valid list. Raises
    EngineError when it cannot be read, or there is no such folder.
    """
    path = folder / FILE_NAME
    try:
        if path.is_file():
            with path.open("rb") as file:
                return SetAside(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise EngineError(f"cannot read {path}: {error.strerror}") from error
    # Looked at last: another thread may have deleted the folder meanwhile.
    if not folder.is_dir():
        raise EngineError(f"no policy folder at {folder}")
    return NOTHING


def require_samplable(request: Request) -> None:
    """Raise SampleUnfit unless there is a temperature, a seed and a position to sample with."""
    if not request.temperature > 0 or not 0 <= request.seed < 1 << 64:
        raise SampleUnfit(f"cannot sample with T {request.temperature}, seed {request.seed}")
    if request.position < 0:
        raise SampleUnfit(f"a position counts from 0, got {request.position}")


def require_fits(
    prompt: Sequence[int],
    new_tokens: int,
    completion: Sequence[int] = (),
    *,
    vocab_size: int,
    context: int | None,
    room: int | None = None,
) -> None:
    """Raise SampleUnfit for an empty prompt or completion, a token id outside the vocabulary, and a
    sample beyond the model's `context` (None for no limit); EngineError for one beyond `room`.
    """
    if not prompt or new_tokens < 1:
        raise SampleUnfit("a prompt or completion is empty")
    ids = (*prompt, *completion)
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise SampleUnfit(f"a token id is outside the vocabulary of {vocab_size}")
    if context is not None and len(prompt) + new_tokens > context:
        raise SampleUnfit(
            f"{len(prompt)} prompt and {new_tokens} new tokens exceed the context of {context}",
            hint="prompts are never truncated: use shorter problems or a smaller limit of "
            "new tokens",
        )
    if room is not None and len(prompt) + new_tokens > room:
        # A limit of this machine: no verdict on anybody's sample.
        raise EngineError(
            f"{len(prompt)} prompt and {new_tokens} new tokens exceed the {room} that this engine "
            "makes room for",
            hint=f"start again with --context {len(prompt) + new_tokens} or more",
        )
