"""Measurements of one calibration by other machines: signed files, and what they may change.

A contribution holds a machine's honest work, and the distances between its own ways to compute. The
owner of the calibration recomputes the work on the owner's machines. The errors that a contributor
reports for its own validators cannot be recomputed, and a lie there would widen limits. So a
machine whose errors are outside the limits of the owner's machines is an *outlier*: it is named,
and refused until the owner accepts it.
"""

import math
import platform
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from muster.inference.calibrated_limits import Drawn, worst_of
from muster.inference.engine import Completion, Request
from muster.inference.honest import Honest
from muster.inference.measuring import Delivery, Errors
from muster.protocol.documents import Document, DocumentPart
from muster.protocol.eip712 import recover, sign
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import EncodingError, EngineError, SignatureError
from muster.protocol.ids import Address, Hash32
from muster.protocol.recipe import Recipe
from muster.shardcast.digests import state_hash
from muster.toploc import ChunkResult
from muster.toploc.calibration import Calibration, MeasuredMachine
from muster.toploc.sequential_test import HistoryLimits

_SIGNATURE_BYTES = 65
_PURPOSE = b"\x19Muster calibration contribution:\n"
"""Prefix of the signed bytes: nothing else that this project signs begins with it."""
_MOST = 1e30
"""Reported for a margin that is not finite."""

Count = Annotated[int, Field(ge=0, le=1 << 31)]
Points = Annotated[int, Field(ge=1, le=1 << 31)]
Error = Annotated[float, Field(ge=0, le=1e31)]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]


class ContributedSample(DocumentPart):
    """One honest completion."""

    prompt: tuple[Count, ...]
    """Token ids."""
    seed: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """The sampling seed."""
    tokens: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Token ids."""
    proofs: tuple[Hex, ...]
    """One per chunk."""


class ContributedPair(DocumentPart):
    """Errors of a worker's way under a validator's way, sample by sample."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """The pair."""
    chunks: tuple[tuple[tuple[Count, Error, Error, Count, Points, Count], ...], ...]
    """Per sample and chunk, the fields of a ChunkResult in their order."""
    lengths: tuple[Count, ...]
    """Tokens of each sample."""
    margins: tuple[tuple[Count, Count, Error], ...]
    """Sample, position and margin, where it is not 0."""


class ContributedDraws(DocumentPart):
    """Errors of choices under fresh noise, in a validator's way."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """The pair."""
    count: Count
    """Tokens drawn."""
    moved: tuple[tuple[Error, bool], ...]
    """Margin where it is not 0, and whether an EOS was chosen or expected."""
    shift: tuple[float, float]
    """Difference of the probability of EOS, see `end_shift`."""


class Contribution(Document):
    """A machine's measurements."""

    NAME: ClassVar[str] = "contribution"
    MAX_BYTES: ClassVar[int] = 64 << 20

    schema_version: Literal[1] = 1
    """Version of this document's form."""
    weights: Annotated[str, Field(pattern=r"^0x[0-9a-f]{64}$")]
    """Hash of the model's files."""
    recipe: Annotated[str, Field(pattern=r"^0x[0-9a-f]{64}$")]
    """Hash of the recipe."""
    device: Annotated[str, Field(min_length=1, max_length=64)]
    """Class of the device."""
    engine: Annotated[str, Field(min_length=1, max_length=128)]
    """Engines and number formats."""
    work: tuple[ContributedSample, ...]
    """Samples that the plain way generated."""
    pairs: Annotated[tuple[ContributedPair, ...], Field(max_length=1024)]
    """Errors between its own ways."""
    draws: Annotated[tuple[ContributedDraws, ...], Field(max_length=64)]
    """Choices under fresh noise."""


@dataclass(frozen=True, slots=True)
class Signed:
    """A contribution and its signer."""

    contribution: Contribution
    signer: Address

    @property
    def name(self) -> str:
        """Its name in tables."""
        said = self.contribution
        return f"{said.device[:40]}, by {self.signer[:10]}"


# ------------------------------------------------------------------------------------- writing


def device_class(device: str) -> str:
    """Return the device's class, as calibrations name it."""
    if device == "cpu":
        return f"CPU {platform.machine()}"
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def contribution_of(
    honest: Honest, weights: Hash32, recipe: Recipe, *, device: str, engine: str
) -> Contribution:
    """Return a machine's measurements as a document."""
    work = honest.survey.work
    return Contribution(
        weights=hex0x(weights),
        recipe=hex0x(recipe.hash()),
        device=device,
        engine=engine,
        work=tuple(
            ContributedSample(
                prompt=request.prompt_tokens,
                seed=f"{request.seed:016x}",
                tokens=completion.tokens,
                proofs=tuple(proof.hex() for proof in completion.proofs),
            )
            for request, completion in zip(work.requests, work.completions, strict=True)
        ),
        pairs=tuple(_pair(name, errors) for name, errors in honest.errors.items()),
        draws=tuple(
            _draws(name, drawn, honest.shifts[name]) for name, drawn in honest.redrawn.items()
        ),
    )


def _pair(name: str, errors: Errors) -> ContributedPair:
    return ContributedPair(
        name=name,
        chunks=tuple(tuple(astuple(result) for result in results) for results in errors.chunks),
        lengths=tuple(len(margins_T) for margins_T in errors.margins),
        margins=tuple(
            (sample, int(place), _finite(margins_T[place]))
            for sample, margins_T in enumerate(errors.margins)
            for place in np.flatnonzero(margins_T)
        ),
    )


def _draws(name: str, drawn: Drawn, shift: tuple[float, float]) -> ContributedDraws:
    moved = np.flatnonzero(drawn.margins_N)
    return ContributedDraws(
        name=name,
        count=len(drawn.margins_N),
        moved=tuple((_finite(drawn.margins_N[i]), bool(drawn.is_end_N[i])) for i in moved),
        shift=shift,
    )


def _finite(margin: np.float32) -> float:
    return float(margin) if math.isfinite(margin) else _MOST


def to_file(contribution: Contribution, key: bytes) -> bytes:
    """Return the file of a contribution, signed: 65 bytes of signature, then canonical JSON."""
    data = contribution.to_bytes()
    return sign(keccak(_PURPOSE + data), key) + data


# ------------------------------------------------------------------------------------- reading


def read_file(path: Path, signer: Address) -> Signed:
    """Return a contribution; raises EngineError unless the file holds one, signed by `signer`."""
    try:
        data = path.read_bytes()
        document = data[_SIGNATURE_BYTES:]
        found = recover(keccak(_PURPOSE + document), data[:_SIGNATURE_BYTES])
        if found != signer:
            raise EngineError(f"{path} is signed by {found}, not by {signer}")
        return Signed(Contribution.from_bytes(document), signer)
    except (OSError, EncodingError, SignatureError) as error:
        raise EngineError(f"{path} is no contribution: {error}") from error


def require_same(
    signed: Signed, weights: Hash32, recipe: Recipe, requests: Sequence[Request]
) -> Delivery:
    """Return a contribution's work; raises EngineError unless it is about this model and recipe,
    and answers exactly these requests: a contributor can choose nothing.
    """
    said = signed.contribution
    for what, theirs, ours in (
        ("model", said.weights, hex0x(weights)),
        ("recipe", said.recipe, hex0x(recipe.hash())),
    ):
        if theirs != ours:
            raise EngineError(f"{signed.name}: measured with the {what} {theirs}, not {ours}")
    asked = [(request.prompt_tokens, f"{request.seed:016x}") for request in requests]
    if [(each.prompt, each.seed) for each in said.work] != asked[: len(said.work)]:
        raise EngineError(
            f"{signed.name}: its prompts or seeds are not those of this calibration",
            hint="give both the same --task-set, --samples and --seed",
        )
    completions = [
        Completion(each.tokens, [bytes.fromhex(proof) for proof in each.proofs])
        for each in said.work
    ]
    return Delivery(requests[: len(completions)], completions)


def add_claims(honest: Honest, signed: Signed, chunk_tokens: int) -> None:
    """Add what a contributor reports of its own ways; raises EngineError if that is inconsistent.

    A pair may have no more samples or draws than the owner's pairs: many good ones would hide a few
    bad ones.
    """
    most = max(len(drawn.margins_N) for drawn in honest.redrawn.values())
    samples = max(len(errors.chunks) for errors in honest.errors.values())
    for pair in signed.contribution.pairs:
        counts = [-(-length // chunk_tokens) for length in pair.lengths]
        margins = [np.zeros(length, np.float32) for length in pair.lengths]
        is_known = all(s < len(margins) and p < len(margins[s]) for s, p, _ in pair.margins)
        is_whole = [len(results) for results in pair.chunks] == counts and all(pair.lengths)
        if not is_known or not is_whole or len(counts) > samples:
            raise EngineError(f"{signed.name}: {pair.name!r} does not add up")
        for sample, place, margin in pair.margins:
            margins[sample][place] = margin
        chunks = [[ChunkResult(*result) for result in results] for results in pair.chunks]
        honest.add(signed.name, Errors(chunks, margins))
        honest.claimed.add(signed.name)
    for draws in signed.contribution.draws:
        if not len(draws.moved) <= draws.count <= most or draws.count == 0:
            raise EngineError(f"{signed.name}: {draws.name!r} does not add up")
        name = f"{signed.name}: {draws.name}"
        margins_N, is_end_N = np.zeros(draws.count, np.float32), np.zeros(draws.count, bool)
        for place, (margin, is_end) in enumerate(draws.moved):
            margins_N[place], is_end_N[place] = margin, is_end
        honest.redrawn[name] = Drawn(margins_N, is_end_N)
        honest.claimed.add(name)
        honest.shifts[name] = draws.shift


# -------------------------------------------------------------------------------------- judging


def machine_of(part: Honest, own: Calibration, device: str, engine: str) -> MeasuredMachine:
    """Return the figures of one machine's measurements; `own` has the limits of the owner's
    machines.
    """
    errors = sum(part.errors.values(), Errors([], []))
    pairs = list(zip(errors.chunks, errors.margins, strict=True))
    passed = [all(map(own.chunk_passes, c)) and own.sampler_passes(m) for c, m in pairs]
    worst = worst_of(errors.all_chunks(), honest=True)
    return MeasuredMachine(
        name="own",
        contributor="",
        device=device,
        engine=engine,
        samples=len(passed),
        outside=len(passed) - sum(passed),
        exponent_mismatches=worst["exponent_mismatches"],
        mantissa_error_mean=worst["mantissa_error_mean"],
        margin=max(_finite(margins_T.max()) for margins_T in errors.margins),
        strain=float(np.mean([own.sample_strain(*pair) for pair in pairs])),
        loss=max(map(own.loss, part.margins_by_pair()), default=0.0),
        lean=max(part.leans(), default=0.0),
    )


def require_no_outlier(
    machines: Sequence[MeasuredMachine], own: HistoryLimits, accepted: Collection[Address]
) -> None:
    """Raise EngineError for a contribution that would widen the limits and is not accepted."""
    known = {"", *accepted}
    for machine in machines:
        if machine.is_outside(own) and machine.contributor not in known:
            raise EngineError(
                f"the contribution of {machine.contributor} is an outlier: {machine.outside} of "
                f"{machine.samples} samples are outside the limits that your own machines lead "
                f"to; strain {machine.strain:.2g}, loss {machine.loss:.2g}, "
                f"lean {machine.lean:.2g}",
                hint=f"measure such a device yourself, or --accept {machine.contributor}",
            )


def weights_hash(folder: Path) -> Hash32:
    """Return the hash of a model's configuration and weights."""
    files = [folder / "config.json", *folder.glob("*.safetensors")]
    return state_hash({path.name: path for path in files if path.is_file()})
