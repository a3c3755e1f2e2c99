"""Policy folders on the trainer's disk: what was published, exactly as workers receive it.

Behaviour log-probabilities are recomputed from them, the next version is published from them, and a
trainer that starts again finds them. Layout: `<folder>/<version>/`, each a complete model folder
that appears atomically.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from muster.protocol.errors import ConfigError, StorageError
from muster.protocol.ids import PolicyVersion

BASE = PolicyVersion(0)
"""The base model; never dropped: the next versions' side files and the KL reference."""
WEIGHTS_FILE = "model.safetensors"
"""Where versions after the base have their weights."""
DTypeName = Literal["float32", "bfloat16"]
"""What weights are published as."""

_PEFT_SUFFIX = ".peft"
_SIDE_FILES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm"}


class PolicyShelf:
    """Policy versions in one folder; the newest ones' weights stay in memory."""

    def __init__(self, folder: Path, *, dtype: DTypeName = "float32", in_memory: int = 4) -> None:
        self._folder = folder
        self._dtype = getattr(torch, dtype)
        self._in_memory = in_memory
        self._cache: OrderedDict[PolicyVersion, dict[str, Tensor]] = OrderedDict()
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
        self._cache.pop(version, None)

    def write(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> Path:
        """Write a version with the base model's side files; returns its folder. Deterministic."""
        # Copies: the caller goes on to change its tensors.
        stored = {n: t.detach().to("cpu", self._dtype, copy=True) for n, t in weights.items()}
        with fresh_folder(self.path(version)) as fresh:
            for name, path in policy_files(self.path(BASE)).items():
                if not _is_weights(name):
                    shutil.copyfile(path, fresh / name)
            save_file(stored, fresh / WEIGHTS_FILE, metadata={"format": "pt"})
        self._remember(version, stored)
        return self.path(version)

    def weights(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Return a version's weights; raises StorageError when they are not on disk."""
        if version not in self._cache:
            self._remember(version, _read_weights(self.path(version)))
        self._cache.move_to_end(version)
        return self._cache[version]

    def learned(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Return what a learner goes on from: a version's weights, as far as they are trained."""
        return self.weights(version)

    def drop_before(self, version: PolicyVersion) -> None:
        """Delete all versions before this one, except the base."""
        for path in self._folder.iterdir():
            if path.name.isdecimal() and BASE < int(path.name) < version:
                shutil.rmtree(path, ignore_errors=True)
                self._cache.pop(PolicyVersion(int(path.name)), None)

    def _remember(self, version: PolicyVersion, weights: dict[str, Tensor]) -> None:
        # In memory as in the file: rounded to its type.
        self._cache[version] = weights
        self._cache.move_to_end(version)
        while len(self._cache) > self._in_memory:
            self._cache.popitem(last=False)


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


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))


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


class fresh_folder:
    """A new folder beside `target` that takes its place when the block ends without error."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._fresh = target.with_name(f".{target.name}.part")

    def __enter__(self) -> Path:
        shutil.rmtree(self._fresh, ignore_errors=True)
        self._fresh.mkdir(parents=True)
        return self._fresh

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._fresh, ignore_errors=True)
            return
        for path in [*self._fresh.iterdir(), self._fresh]:
            sync(path)
        shutil.rmtree(self._target, ignore_errors=True)
        self._fresh.rename(self._target)
        sync(self._target.parent)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
