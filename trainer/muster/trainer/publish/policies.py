"""Policy folders on the trainer's disk: what was published, exactly as workers receive it.

Behaviour log-probabilities are recomputed from them, the next version is published from them, and a
trainer that starts again finds them. Layout: `<folder>/<version>/`, each a complete model folder
that appears atomically.

Weights stream both ways. A version is written some rows of a tensor at a time, in the published
number format, as the learner gives them; a version is read one tensor at a time, memory-mapped.
Neither takes a copy of the model, whatever its size.

A run that trains an adapter has the base merged with it in each folder, and the adapter beside. The
merged weights are what workers sample from, byte for byte, and in the base's own number formats; of
the adapter, which is all that travels, nothing is lost in them that was not lost for the workers
too (`muster.shardcast.adapter`).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from muster.lifecycle import sync_path
from muster.protocol.encoding import hex0x
from muster.protocol.errors import AdapterError, ConfigError, StorageError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import AdapterRecipe, Recipe
from muster.protocol.set_aside import FILE_NAME as LIST_NAME, NOTHING, SetAside
from muster.protocol.sft import SftRecipe
from muster.shardcast import state_hash
from muster.shardcast.adapter import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    Adapter,
    merged_weight,
    read_factors,
)
from muster.shardcast.chunks import storage_error, write_all
from muster.shardcast.delta_layout import Tensor as StoredTensor, read_tensors
from muster.trainer.learn.parallel import pieces_of
from muster.trainer.learn.persistence import peft_config

BASE = PolicyVersion(0)
"""The base model; never dropped: the next versions' side files and the KL reference."""
WEIGHTS_FILE = "model.safetensors"
"""File of the weights, in versions after the base."""
DTypeName = Literal["base", "float32", "bfloat16"]
"""Number format of published weights; `base` for the one that each has in the base model."""
Formats = Mapping[str, torch.dtype]
"""Number formats of tensors, by name, in the order in which the tensors are written."""
Gather = Callable[[Formats], Iterable[tuple[str, Tensor]]]
"""A learner's `pieces`: begins at once to gather tensors in these formats; yields name and numbers,
all of a tensor's one piece after the other."""

_CODES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls number formats, in the order in which it stores tensors."""
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_PATTERNS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}
_PEFT_SUFFIX = ".peft"
_SIDE_FILES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm"}


class MappedWeights(Mapping[str, Tensor]):
    """Tensors of safetensors files, each mapped for itself when it is asked for: the memory of one
    goes back with it. They stay when the files are deleted.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises StorageError when a file cannot be read."""
        self._tensors: dict[str, tuple[int, StoredTensor]] = {}
        for path in paths:
            try:
                tensors, fd = read_tensors(path), os.open(path, os.O_RDONLY)
            except OSError as error:
                raise StorageError(f"cannot read the policy in {path.parent}: {error}") from error
            weakref.finalize(self, os.close, fd)
            if not tensors or not all(map(_is_readable, tensors)):
                raise StorageError(f"cannot read the policy in {path.parent}: {path.name} is none")
            self._tensors |= {tensor.name: (fd, tensor) for tensor in tensors}

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor; nothing of it is read yet, and what is written to it stays in memory."""
        fd, stored = self._tensors[name]
        if not stored.size:
            return torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
        skipped = stored.offset % mmap.ALLOCATIONGRANULARITY
        start, size = stored.offset - skipped, skipped + stored.size
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_COPY, offset=start)
        numbers = torch.frombuffer(mapped, dtype=torch.uint8, offset=skipped)
        return numbers.view(_DTYPES[stored.dtype]).view(stored.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _is_readable(stored: StoredTensor) -> bool:
    dtype = _DTYPES.get(stored.dtype)
    return dtype is not None and math.prod(stored.shape) * dtype.itemsize == stored.size


class PolicyShelf:
    """Policy versions in one folder."""

    def __init__(self, folder: Path, *, dtype: DTypeName = "base") -> None:
        self._folder = folder
        self._dtype: torch.dtype | None = None if dtype == "base" else getattr(torch, dtype)
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, version: PolicyVersion) -> Path:
        """Return where a version's folder is or would be."""
        return self._folder / str(version)

    def has(self, version: PolicyVersion) -> bool:
        """Tell whether the version is there."""
        return self.path(version).is_dir()

    def adopt(self, model_folder: Path, version: PolicyVersion = BASE) -> None:
        """Copy a model folder's files as a version; raises StorageError when it is no model.

        A base model has no list of problems set aside: the folder's may be of another run.
        """
        files = policy_files(model_folder) if version == BASE else published_files(model_folder)
        with fresh_folder(self.path(version)) as fresh:
            for name, path in files.items():
                shutil.copyfile(path, fresh / name)

    def write(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> Path:
        """Write a version with the base model's side files; returns its folder. Deterministic."""
        return self.writing(version, weights, partial(_in_memory, weights))()

    def writing(
        self,
        version: PolicyVersion,
        weights: Mapping[str, Tensor],
        gather: Gather,
        listed: SetAside = NOTHING,
    ) -> Callable[[], Path]:
        """Begin to gather what was trained; returns what writes the version, with the problems that
        it sets aside, and returns its folder.

        That may be called in another thread; until it returns, nothing of `weights` may change.
        """
        formats = self._formats(weights)
        shapes = {name: tuple(weights[name].shape) for name in formats}
        return partial(self._write, version, listed, formats, shapes, gather(formats))

    def _write(
        self,
        version: PolicyVersion,
        listed: SetAside,
        formats: Formats,
        shapes: Mapping[str, tuple[int, ...]],
        pieces: Iterable[tuple[str, Tensor]],
    ) -> Path:
        base = policy_files(self.path(BASE))
        with fresh_folder(self.path(version)) as fresh:
            for name, path in base.items():
                if not name.endswith((".safetensors", ".safetensors.index.json")):
                    shutil.copyfile(path, fresh / name)
            if listed.bits:
                (fresh / LIST_NAME).write_bytes(listed.bits)
            self._write_weights(fresh, base, formats, shapes, pieces)
        return self.path(version)

    def _write_weights(
        self,
        fresh: Path,
        base: Mapping[str, Path],
        formats: Formats,
        shapes: Mapping[str, tuple[int, ...]],
        pieces: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Write the weights that workers sample with, given what was trained."""
        del base
        write_tensors(fresh / WEIGHTS_FILE, formats, shapes, pieces)

    def _formats(self, weights: Mapping[str, Tensor]) -> Formats:
        """Return the published format of each weight."""
        if self._dtype is not None:
            return _in_order(dict.fromkeys(weights, self._dtype))
        own = {n: t.dtype for n, t in self.weights(BASE).items() if t.dtype in _CODES}
        # A weight that the base's files call otherwise gets the format that most of them have.
        usual = Counter(own.values()).most_common(1)[0][0] if own else torch.float32
        return _in_order({name: own.get(name, usual) for name in weights})

    def weights(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Return a version's weights, mapped one by one from the disk.

        Raises StorageError when they are not there.
        """
        weights = MappedWeights(sorted(self.path(version).glob("*.safetensors")))
        if not weights:
            raise StorageError(f"there is no policy in {self.path(version)}")
        return weights

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

    def __init__(self, folder: Path, recipe: AdapterRecipe, *, dtype: DTypeName = "base") -> None:
        """`dtype` is the adapter's, float32 for `base`; merged weights have the base's."""
        super().__init__(folder, dtype="float32" if dtype == "base" else dtype)
        self._recipe = recipe

    def _write_weights(
        self,
        fresh: Path,
        base: Mapping[str, Path],
        formats: Formats,
        shapes: Mapping[str, tuple[int, ...]],
        pieces: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Write the adapter, and the base's weights merged with it."""
        write_tensors(fresh / WEIGHTS_NAME, formats, shapes, pieces)
        description = peft_config(self._recipe, hex0x(state_hash(base))).to_dict()
        text = json.dumps(description, indent=2, sort_keys=True, default=sorted)
        (fresh / CONFIG_NAME).write_text(text + "\n")
        weights, adapter = self.weights(BASE), _adapter_in(fresh)
        own = {name: tuple(weight.shape) for name, weight in weights.items()}
        for name, merge in adapter.merges.items():
            if own.get(name) != (merge.rows, merge.columns):
                raise AdapterError(f"the base has no {name} for the adapter", reason="base")
        kinds = _in_order({name: weight.dtype for name, weight in weights.items()})
        write_tensors(fresh / WEIGHTS_FILE, kinds, own, _merged(weights, adapter, kinds))

    def learned(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Return a version's adapter; raises StorageError when it is none of this run's."""
        base = hex0x(state_hash(policy_files(self.path(BASE))))
        try:
            adapter = _adapter_in(self.path(version))
        except AdapterError as error:
            raise StorageError(f"version {version} cannot be gone on from: {error}") from error
        if adapter.base != base:
            raise StorageError(f"version {version} is over the base {adapter.base}, not {base}")
        return MappedWeights([adapter.path])


def _merged(
    weights: Mapping[str, Tensor], adapter: Adapter, formats: Formats
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base's weights merged with an adapter, in order."""
    for name, dtype in formats.items():
        weight = weights[name]
        if (merge := adapter.merges.get(name)) is not None:
            patterns = weight.contiguous().view(_PATTERNS[dtype]).flatten().numpy()
            made = merged_weight(patterns, read_factors(merge, adapter.path), _CODES[dtype])
            weight = torch.from_numpy(made).view(dtype)
        for piece in pieces_of(weight, dtype):
            yield name, piece


def _in_memory(weights: Mapping[str, Tensor], formats: Formats) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of this process piece by piece: a `Gather` of what need not be gathered."""
    for name, dtype in formats.items():
        for piece in pieces_of(weights[name], dtype):
            yield name, piece


def _in_order(formats: Formats) -> Formats:
    """Return formats in the order in which safetensors stores tensors: by format, then by name."""
    order = {dtype: place for place, dtype in enumerate(_CODES)}
    return dict(sorted(formats.items(), key=lambda item: (order[item[1]], item[0])))


def write_tensors(
    path: Path,
    formats: Formats,
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a safetensors file as its numbers come; the bytes are those of `save_file`.

    `formats` are in the order of the file. Raises StorageError when the pieces are not the numbers
    of these tensors one after the other, or the disk refuses.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends: dict[str, int] = {}
    end = 0
    for name, dtype in formats.items():
        start, end = end, end + math.prod(shapes[name]) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [start, end],
        }
        ends[name] = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb", buffering=0) as file:
            write_all(file.fileno(), [len(text).to_bytes(8, "little"), text])
            _write_pieces(file.fileno(), ends, pieces)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, f"write {path.name}") from error


def _write_pieces(fd: int, ends: Mapping[str, int], pieces: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors' numbers; `ends` are where each tensor ends, in order."""
    order = iter(ends.items())
    written, (current, end) = 0, next(order, ("", 0))
    for name, piece in pieces:
        while written == end and name != current:
            current, end = next(order, ("", -1))
        written += piece.nbytes
        if name != current or written > end:
            raise StorageError(f"a policy's weights came in another order, at {name}")
        write_all(fd, [piece.view(torch.uint8).numpy().data])
    if written != max(ends.values(), default=0):
        raise StorageError(f"a policy's weights ended in {current}, after {written} bytes")


def open_shelf(folder: Path, recipe: Recipe | SftRecipe, *, dtype: DTypeName) -> PolicyShelf:
    """Return the policies of a run, or the models of a fine-tuning, in a folder."""
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


def published_files(folder: Path) -> dict[str, Path]:
    """Return the files of a version's folder that are published: those of `policy_files`, and its
    list of problems set aside, if it has one. Raises StorageError as that does.
    """
    files, path = policy_files(folder), folder / LIST_NAME
    return {**files, LIST_NAME: path} if path.is_file() else files


def _is_needed(path: Path) -> bool:
    return path.suffix in _SIDE_FILES or path.suffix in (".safetensors", _PEFT_SUFFIX)


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
