"""Where a fine-tuned model comes from: `lineage.json` in its folder.

It names the data set, the recipe, the base model and the model's own files by their hashes. It is
one of the files of the model folder, so `run create` pins it on chain and workers receive it.
"""

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
    """Keccak-256 of the recipe."""
    data_root: str
    """Root of the data set."""
    data_files: dict[str, str]
    """SHA-256 of its files of rows, by name."""
    data_origin: dict[str, Any] | None
    """Chain, ledger, run and documents of an exported data set; None for other files."""
    rows: dict[str, Any]
    """How many rows were trained on, held out and left out."""
    steps: int
    """Optimiser steps."""
    base: str
    """Hash of the base model's files."""
    base_lineage: dict[str, Any] | None
    """Content of `lineage.json` in the base model's folder, if there is one."""
    model: str
    """Hash of the model's files without this one."""
    format: str = FORMAT
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """Return the canonical JSON."""
        return canonical_json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a lineage; raises EncodingError on anything that `to_bytes` does not write."""
        values = parse_canonical_json(data, max_bytes=MAX_LINEAGE_BYTES)
        try:
            if (values["format"], values["version"]) != (FORMAT, VERSION):
                raise EncodingError(
                    f"unknown lineage format {values['format']!r} {values['version']!r}"
                )
            found = cls(**values)
        except (KeyError, TypeError) as error:
            raise EncodingError(f"malformed lineage: {error}") from error
        found._require_form()
        return found

    def _require_form(self) -> None:
        """Raise EncodingError unless the fields that are compared or printed have the right
        form."""
        origin = {"run_id": 0, "chain_id": 0} if self.data_origin is None else self.data_origin
        parts = (self.recipe, self.data_files, self.rows, origin)
        if not all(isinstance(part, dict) for part in parts):
            raise EncodingError("malformed lineage: a field has the wrong type")
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
            raise EncodingError("malformed lineage: a count or a hash is invalid")

    def summary(self) -> str:
        """Return one line about the model's origin."""
        data = f"data set {self.data_root[:10]}…"
        if self.data_origin is not None:
            run, chain = (self.data_origin.get(name) for name in ("run_id", "chain_id"))
            data = f"{data} of run {run} on chain {chain}"
        return f"fine-tuned in {self.steps} steps on {self.rows.get('trained')} rows of {data}"


def model_hash(folder: Path) -> str:
    """Return the hash of a model's files without its lineage; raises StorageError if it is no
    model."""
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
    """Return a base model's lineage as text, and whether its prompts differed from those of a run's
    recipe; empty when it has no lineage. Raises ConfigError.
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
    """Return the fields of a `[prompt]` that decide how a problem is asked, without those that `run
    create` fills in.
    """
    names = ("form", "system", "thinking", "length_request")
    return {name: prompt.get(name) for name in names} if isinstance(prompt, dict) else prompt


@dataclass(frozen=True, slots=True)
class LineageCheck:
    """Result of one check."""

    name: str
    """What was checked."""
    verdict: str
    """`ok`, `wrong`, or `open` when something to compare was not given."""
    said: str
    """Explanation for people."""


def check_lineage(
    folder: Path, *, data: Path | None = None, base: Path | None = None
) -> Iterator[LineageCheck]:
    """Yield checks of a model against its lineage; data set and base are checked if given.

    Raises ConfigError when the model has no lineage.
    """
    found = read_lineage(folder)
    if found is None:
        raise ConfigError(
            f"{folder} has no {LINEAGE}", hint="give a model folder that `muster trainer sft` wrote"
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
            return LineageCheck("data", "wrong", f"file {name!r} differs, is missing, or was added")
    if source.origin != found.data_origin:
        return LineageCheck(
            "data",
            "wrong",
            f"the data set comes from {source.origin}, not from {found.data_origin}",
        )
    return _compared("data", source.root, found.data_root)


def require_room(source: SftSource, before: ModelLineage | None) -> None:
    """Raise ConfigError when a data set and a base's lineage are too large for the new lineage."""
    size = sum(len(each.name) + len(each.sha256) + 8 for each in source.files)
    size += 0 if before is None else len(before.to_bytes())
    # Twice the size leaves room for the rest: recipes have 64 KiB at most.
    if size > MAX_LINEAGE_BYTES // 2:
        raise ConfigError(
            f"the lineage of {len(source.files)} files of rows would have {size} bytes and more",
            hint="merge the data set's files into fewer files",
        )
