"""Where a fine-tuned model comes from: `lineage.json` in its folder.

It names the data set, the recipe and the base model by their hashes, and the model's own files. It
is one of the files of the base model that `run create` pins on chain, and travels with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from muster.protocol.encoding import canonical_json, hex0x, parse_canonical_json
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.recipe import PromptRecipe
from muster.protocol.sft import SftRecipe
from muster.shardcast import state_hash
from muster.trainer.publish.policies import policy_files
from muster.trainer.sft.source import SftSource, open_source

LINEAGE = "lineage.json"
MAX_LINEAGE_BYTES = 4 << 20
"""A larger one is refused."""
FORMAT, VERSION = "muster-sft", 1
_HASH = re.compile("0x[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ModelLineage:
    """What `lineage.json` holds."""

    software: str
    """Version of the command that made the model."""
    recipe: dict[str, Any]
    """The recipe, with the prompt's frame."""
    recipe_hash: str
    """Its Keccak-256."""
    data_root: str
    """Root of the data set."""
    data_files: dict[str, str]
    """SHA-256 of its files of rows, by name."""
    data_origin: dict[str, Any] | None
    """Chain, ledger, run and documents of an exported one; none of other files."""
    rows: dict[str, Any]
    """How many rows were trained on, held out and left out."""
    steps: int
    """Optimiser steps."""
    base: str
    """Hash of the base model's files."""
    base_lineage: dict[str, Any] | None
    """What `lineage.json` of the base model's folder says, if there is one: where the base comes
    from, or a model that it descends from."""
    model: str
    """Hash of the model's files but this one."""
    format: str = FORMAT
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """Return the canonical JSON."""
        return canonical_json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse it; raises EncodingError on anything that `to_bytes` does not write."""
        values = parse_canonical_json(data, max_bytes=MAX_LINEAGE_BYTES)
        try:
            if (values["format"], values["version"]) != (FORMAT, VERSION):
                raise EncodingError(f"a lineage of {values['format']!r} {values['version']!r}")
            found = cls(**values)
        except (KeyError, TypeError) as error:
            raise EncodingError(f"malformed lineage: {error}") from error
        found._require_form()
        return found

    def _require_form(self) -> None:
        """Raise EncodingError unless what is compared and printed has the form that it should."""
        origin = {"run_id": 0, "chain_id": 0} if self.data_origin is None else self.data_origin
        parts = (self.recipe, self.data_files, self.rows, origin)
        if not all(isinstance(part, dict) for part in parts):
            raise EncodingError("malformed lineage: a part of another type")
        counts = (
            self.steps,
            self.rows.get("trained"),
            origin.get("run_id"),
            origin.get("chain_id"),
        )
        hashes = (self.recipe_hash, self.data_root, self.base, self.model)
        if not all(isinstance(count, int) for count in counts) or not all(
            isinstance(each, str) and _HASH.fullmatch(each) for each in hashes
        ):
            raise EncodingError("malformed lineage: a count or a hash is none")

    def summary(self) -> str:
        """Return in a line what the model was made of."""
        data = f"data set {self.data_root[:10]}…"
        if self.data_origin is not None:
            run, chain = (self.data_origin.get(name) for name in ("run_id", "chain_id"))
            data = f"{data} of run {run} on chain {chain}"
        return f"fine-tuned in {self.steps} steps on {self.rows.get('trained')} rows of {data}"


def model_hash(folder: Path) -> str:
    """Return the hash of a model's files but its lineage; raises StorageError when it is none."""
    files = policy_files(folder)
    return hex0x(state_hash({name: path for name, path in files.items() if name != LINEAGE}))


def read_lineage(folder: Path) -> ModelLineage | None:
    """Return a model folder's lineage, None when it has none; raises ConfigError."""
    path = folder / LINEAGE
    if not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(MAX_LINEAGE_BYTES + 1)
    try:
        return ModelLineage.from_bytes(data)
    except EncodingError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def describe_base(folder: Path, prompt: PromptRecipe | None = None) -> str:
    """Return what a base model's lineage says of it, and whether it was shown other prompts than a
    run's recipe makes; empty when it has none. Raises ConfigError.
    """
    found = read_lineage(folder)
    if found is None:
        return ""
    # A run's later versions carry the lineage of their base.
    descends = "" if found.model == model_hash(folder) else "descends: "
    is_other = prompt is not None and _asks(found.recipe.get("prompt")) != _asks(
        prompt.model_dump(mode="json")
    )
    other = "; it was shown OTHER PROMPTS than the recipe's [prompt] makes" if is_other else ""
    return f"{descends}{found.summary()}{other}"


def _asks(prompt: Any) -> Any:
    """Return what of a `[prompt]` decides how a problem is asked, without what creating a run fills
    in.
    """
    names = ("form", "system", "thinking", "length_request")
    return {name: prompt.get(name) for name in names} if isinstance(prompt, dict) else prompt


@dataclass(frozen=True, slots=True)
class LineageCheck:
    """What came of one check."""

    name: str
    """What was checked."""
    verdict: str
    """`ok`, `wrong`, or `open` where something was not at hand."""
    said: str
    """For people."""


def check_lineage(
    folder: Path, *, data: Path | None = None, base: Path | None = None
) -> Iterator[LineageCheck]:
    """Yield whether a model is what its lineage says, as far as data set and base are at hand.

    Raises ConfigError when it has no lineage.
    """
    found = read_lineage(folder)
    if found is None:
        raise ConfigError(
            f"{folder} has no {LINEAGE}", hint="`muster trainer sft` writes one with the model"
        )
    yield _compared("model", model_hash(folder), found.model)
    yield _check_recipe(found)
    if data is None:
        yield LineageCheck("data", "open", f"{found.data_root}: give it with --data")
    else:
        yield _check_data(open_source(data), found)
    if base is None:
        yield LineageCheck("base", "open", f"{found.base}: give it with --model")
    else:
        yield _compared("base", hex0x(state_hash(policy_files(base))), found.base)


def _compared(name: str, is_hash: str, said: str) -> LineageCheck:
    if is_hash == said:
        return LineageCheck(name, "ok", said)
    return LineageCheck(name, "wrong", f"its files hash to {is_hash}, the lineage says {said}")


def _check_recipe(found: ModelLineage) -> LineageCheck:
    try:
        recipe = SftRecipe.from_bytes(canonical_json(found.recipe))
    except (EncodingError, ValidationError) as error:
        return LineageCheck("recipe", "wrong", str(error).splitlines()[0])
    return _compared("recipe", hex0x(recipe.hash()), found.recipe_hash)


def _check_data(source: SftSource, found: ModelLineage) -> LineageCheck:
    files = {each.name: each.sha256 for each in source.files}
    for name in sorted(files.keys() | found.data_files.keys()):
        if files.get(name) != found.data_files.get(name):
            return LineageCheck(
                "data", "wrong", f"{name!r} is another file, missing, or was not there"
            )
    if source.origin != found.data_origin:
        return LineageCheck(
            "data", "wrong", f"it is of {source.origin}, not of {found.data_origin}"
        )
    return _compared("data", source.root, found.data_root)


def require_room(source: SftSource, before: ModelLineage | None) -> None:
    """Raise ConfigError when a data set and a base's lineage are too large for another lineage."""
    size = sum(len(each.name) + len(each.sha256) + 8 for each in source.files)
    size += 0 if before is None else len(before.to_bytes())
    # As much again for the rest: recipes have 64 KiB at most.
    if size > MAX_LINEAGE_BYTES // 2:
        raise ConfigError(
            f"the lineage of {len(source.files)} files of rows would have {size} bytes and more",
            hint="join files of the data set, so that they are fewer",
        )
