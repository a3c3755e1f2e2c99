"""Policy folders on the trainer's disk: what was published, exactly as workers receive it.

Behaviour log-probabilities are recomputed from them, the next version is published from them, and a
trainer that starts again finds them. Layout: `<folder>/<version>/`, each a complete model folder
that appears atomically.

A run that trains an adapter has the base merged with it in each folder, and the adapter beside. The
merged weights are what workers sample from, byte for byte, and in the base's own number formats; of
the adapter, which is all that travels, nothing is lost in them that was not lost for the workers
too (`muster.shardcast.adapter`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from muster.lifecycle import sync_path
from muster.protocol.encoding import hex0x
from muster.protocol.errors import AdapterError, ConfigError, StorageError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import AdapterRecipe, Recipe
from muster.shardcast import state_hash
from muster.shardcast.adapter import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    Adapter,
    merged_weight,
    read_factors,
)
from muster.trainer.learn.persistence import peft_config

BASE = PolicyVersion(0)
"""The base model; never dropped: the next versions' side files and the KL reference."""
WEIGHTS_FILE = "model.safetensors"
"""File of the weights, in versions after the base."""
DTypeName = Literal["float32", "bfloat16"]
"""Number format of published weights."""

_CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_PATTERNS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}
_PEFT_SUFFIX = ".peft"
_SIDE_FILES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm"}


class PolicyShelf:
    """Policy versions in one folder."""

    def __init__(self, folder: Path, *, dtype: DTypeName = "float32") -> None:
        self._folder = folder
        self._dtype = getattr(torch, dtype)
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, version: PolicyVersion) -> Path:
        """Return where a version's folder is or would be."""
        return self._folder / str(version)

    def has(self, version: PolicyVersion) -> bool:
        """Tell whether the version is there."""
        return self.path(version).is_dir()

    def adopt(self, model_folder: Path, version: PolicyVersion = BASE) -> None:
        """Copy a model folder's files as a version; raises StorageError when it is no model."""
        files = policy_files(model_folder)
        with fresh_folder(self.path(version)) as fresh:
            for name, path in files.items():
                shutil.copyfile(path, fresh / name)

    def write(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> Path:
        """Write a version with the base model's side files; returns its folder. Deterministic."""
        # Copies: the caller goes on to change its tensors.
        stored = {n: t.detach().to("cpu", self._dtype, copy=True) for n, t in weights.items()}
        base = policy_files(self.path(BASE))
        with fresh_folder(self.path(version)) as fresh:
            for name, path in base.items():
                if not name.endswith((".safetensors", ".safetensors.index.json")):
                    shutil.copyfile(path, fresh / name)
            sampled = self._as_sampled(stored, base, fresh)
            save_file(sampled, fresh / WEIGHTS_FILE, metadata={"format": "pt"})
        return self.path(version)

    def _as_sampled(
        self, learned: dict[str, Tensor], base: Mapping[str, Path], fresh: Path
    ) -> dict[str, Tensor]:
        """Return the weights that workers sample with, given what was trained."""
        del base, fresh
        return learned

    def weights(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Return a version's weights, mapped from its files: they are read when they are used, and
        take no memory that others need. Raises StorageError when they are not on disk.
        """
        return _read_weights(self.path(version))

    def learned(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Return what a learner goes on from: a version's weights, as far as they are trained."""
        return self.weights(version)

    def drop_before(self, version: PolicyVersion) -> None:
        """Delete all versions before this one, except the base."""
        for path in self._folder.iterdir():
            if path.name.isdecimal() and BASE < int(path.name) < version:
                shutil.rmtree(path, ignore_errors=True)


class AdapterShelf(PolicyShelf):
    """Policy versions that are adapters over version 0."""

    def __init__(
        self, folder: Path, recipe: AdapterRecipe, *, dtype: DTypeName = "float32"
    ) -> None:
        """`dtype` is the adapter's; merged weights have the base's."""
        super().__init__(folder, dtype=dtype)
        self._recipe = recipe

    def _as_sampled(
        self, learned: dict[str, Tensor], base: Mapping[str, Path], fresh: Path
    ) -> dict[str, Tensor]:
        """Write the adapter beside them; returns the base's weights merged with it."""
        save_file(learned, fresh / WEIGHTS_NAME, metadata={"format": "pt"})
        description = peft_config(self._recipe, hex0x(state_hash(base))).to_dict()
        text = json.dumps(description, indent=2, sort_keys=True, default=sorted)
        (fresh / CONFIG_NAME).write_text(text + "\n")
        return self._merged(fresh)

    def learned(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Return a version's adapter; raises StorageError when it is none of this run's."""
        base = hex0x(state_hash(policy_files(self.path(BASE))))
        try:
            adapter = _adapter_in(self.path(version))
        except AdapterError as error:
            raise StorageError(f"version {version} cannot be gone on from: {error}") from error
        if adapter.base != base:
            raise StorageError(f"version {version} is over the base {adapter.base}, not {base}")
        return read_tensors([adapter.path])

    def _merged(self, folder: Path) -> dict[str, Tensor]:
        """Return the base's weights merged with the adapter in a folder."""
        adapter = _adapter_in(folder)
        merged = dict(self.weights(BASE))
        for name, merge in adapter.merges.items():
            weight = merged.get(name)
            if weight is None or tuple(weight.shape) != (merge.rows, merge.columns):
                raise AdapterError(f"the base has no {name} for the adapter", reason="base")
            patterns = weight.contiguous().view(_PATTERNS[weight.dtype]).flatten().numpy()
            made = merged_weight(patterns, read_factors(merge, adapter.path), _CODES[weight.dtype])
            merged[name] = torch.from_numpy(made).view(weight.dtype).view(weight.shape)
        return merged


def open_shelf(folder: Path, recipe: Recipe, *, dtype: DTypeName) -> PolicyShelf:
    """Return the policies of a run, in a folder."""
    if recipe.adapter.rank:
        return AdapterShelf(folder, recipe.adapter, dtype=dtype)
    return PolicyShelf(folder, dtype=dtype)


def _adapter_in(folder: Path) -> Adapter:
    return Adapter({name: folder / name for name in (CONFIG_NAME, WEIGHTS_NAME)})


def policy_files(folder: Path) -> dict[str, Path]:
    """Return the files of a model folder that workers need, by name.

    Raises StorageError when there is no config.json or no weights.
    """
    found = {
        path.name: path
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if path.is_file() and not path.name.startswith(".") and _is_needed(path)
    }
    if "config.json" not in found or not any(n.endswith(".safetensors") for n in found):
        raise StorageError(
            f"{folder} is not a model folder",
            hint="it needs config.json, *.safetensors and the tokenizer's files",
        )
    return found


def _is_needed(path: Path) -> bool:
    return path.suffix in _SIDE_FILES or path.suffix in (".safetensors", _PEFT_SUFFIX)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    weights = read_tensors(sorted(folder.glob("*.safetensors")))
    if not weights:
        raise StorageError(f"there is no policy in {folder}")
    return weights


def read_tensors(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Return all tensors of safetensors files; raises StorageError when they cannot be read."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot read the policy in {path.parent}: {error}") from error
    return tensors


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Make a new folder beside `target` that takes its place when the block ends without error."""
    fresh = target.with_name(f".{target.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    for path in [*fresh.iterdir(), fresh]:
        sync_path(path)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    sync_path(target.parent)


def vocab_size(folder: Path) -> int:
    """Return how many token ids a model folder's configuration allows."""
    config = json.loads((folder / "config.json").read_text())
    size: int = config.get("vocab_size") or config["text_config"]["vocab_size"]
    return size


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the token ids that end a completion, by a model folder's configuration files.

    Raises ConfigError when there are none, or one is outside the vocabulary: a completion of such
    a model would only ever end at the token limit.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            config = json.loads((folder / name).read_text())
            ids = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
            found.update([ids] if isinstance(ids, int) else ids or [])
    size = vocab_size(folder)
    if not found or max(found) >= size:
        raise ConfigError(
            f"the model in {folder} has EOS tokens {sorted(found)} and {size} token ids",
            hint="set eos_token_id in its config.json to a token of its vocabulary",
        )
    return frozenset(found)
