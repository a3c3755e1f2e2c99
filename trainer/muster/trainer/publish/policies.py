"""Policy folders on the trainer's disk: versions exactly as workers receive them.

A folder appears before its version is published, and stays after a crash between the two. The
trainer recomputes behaviour log-probabilities from them, publishes from them, and finds them
after a restart. Layout: `<folder>/<version>/`, each a complete model folder that appears
atomically.

Weights are streamed. A version is written some rows of a tensor at a time, in the published number
format, as the learner yields them; a version is read one tensor at a time, memory-mapped. Neither
needs a copy of the model in memory.

In a run that trains an adapter, each folder holds the adapter and the base merged with it. Only the
adapter is sent to workers. They merge it themselves, in the base's own number formats, and get the
same bytes as in this folder (`muster.shardcast.adapter`).
"""

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
from muster.protocol.errors import AdapterError, ConfigError, StorageError, TrainingCollapsed
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
from muster.trainer.learn.parallel import is_finite, pieces_of
from muster.trainer.learn.persistence import peft_config

BASE = PolicyVersion(0)
"""The base model. It is never dropped: it has the side files of later versions and is the KL
reference."""
WEIGHTS_FILE = "model.safetensors"
"""File of the weights, in versions after the base."""
DTypeName = Literal["base", "float32", "bfloat16"]
"""Number format of published weights; `base` keeps each weight's format in the base model."""
Formats = Mapping[str, torch.dtype]
"""Number formats of tensors, by name, in the order in which the tensors are written."""
Gather = Callable[[Formats], Iterable[tuple[str, Tensor]]]
"""A learner's `pieces`: begins at once to gather tensors in these formats; yields names and
numbers, all pieces of a tensor one after the other."""

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
"""Names of number formats in safetensors, in the order in which it stores tensors."""
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_PATTERNS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}
_PEFT_SUFFIX = ".peft"
_SIDE_FILES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm"}


class MappedWeights(Mapping[str, Tensor]):
    """Tensors of safetensors files. Each is mapped by itself when it is read, and its memory is
    freed with it. Mapped tensors survive the deletion of the files.
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
        """Return a tensor; its pages are read on use, and writes to it stay in memory."""
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
        """Return the path of a version's folder, which may not exist."""
        return self._folder / str(version)

    def has(self, version: PolicyVersion) -> bool:
        """Tell whether the version is there."""
        return self.path(version).is_dir()

    def adopt(self, model_folder: Path, version: PolicyVersion = BASE) -> None:
        """Copy a model folder's files as a version; raises StorageError when it is not a model.

        A list of set-aside problems is not copied to the base model: it may belong to another run.
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
        """Begin to gather the trained weights. Returns a function that writes the version with its
        list of set-aside problems, and returns the folder.

        The function may be called in another thread; until it returns, `weights` must not change.
        """
        formats = self.formats(weights)
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
        """Write the weights that workers sample with, made from the trained ones."""
        del base
        write_tensors(fresh / WEIGHTS_FILE, formats, shapes, pieces)

    def formats(self, weights: Mapping[str, Tensor]) -> Formats:
        """Return the published format of each trained weight."""
        if self._dtype is not None:
            return _in_order(dict.fromkeys(weights, self._dtype))
        own = {n: t.dtype for n, t in self.weights(BASE).items() if t.dtype in _CODES}
        # A weight with another name in the base's files gets the format that most of them have.
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
        """Return the trained weights of a version, from which a learner continues."""
        return self.weights(version)

    def drop_before(self, version: PolicyVersion) -> None:
        """Delete all versions before this one, except the base."""
        for path in self._folder.iterdir():
            if path.name.isdecimal() and BASE < int(path.name) < version:
                shutil.rmtree(path, ignore_errors=True)


class AdapterShelf(PolicyShelf):
    """Policy versions that are adapters of version 0."""

    def __init__(self, folder: Path, recipe: AdapterRecipe, *, dtype: DTypeName = "base") -> None:
        """`dtype` is that of the adapter, where `base` means float32; merged weights have the
        base's."""
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
                raise AdapterError(
                    f"the base model has no layer {name} of the adapter's shape", reason="base"
                )
        kinds = _in_order({name: weight.dtype for name, weight in weights.items()})
        write_tensors(fresh / WEIGHTS_FILE, kinds, own, _merged(weights, adapter, kinds))

    def learned(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Return a version's adapter; raises StorageError when it does not belong to this run."""
        base = hex0x(state_hash(policy_files(self.path(BASE))))
        try:
            adapter = _adapter_in(self.path(version))
        except AdapterError as error:
            raise StorageError(f"cannot continue from version {version}: {error}") from error
        if adapter.base != base:
            raise StorageError(
                f"version {version} is an adapter of base {adapter.base}, not {base}"
            )
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
    """Yield tensors of this process piece by piece: a `Gather` for tensors that are already
    here."""
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
    """Write a safetensors file while its numbers arrive; the bytes are those of `save_file`.

    `formats` are in the order of the file. Raises StorageError when the pieces are not those of
    these tensors in this order, or the disk refuses the write.
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
    """Write tensors' numbers; `ends` are the offsets at which the tensors end, in order."""
    order = iter(ends.items())
    written, (current, end) = 0, next(order, ("", 0))
    for name, piece in pieces:
        while written == end and name != current:
            current, end = next(order, ("", -1))
        written += piece.nbytes
        if name != current or written > end:
            raise StorageError(f"a policy's weights came in another order, at {name}")
        if not is_finite(piece):
            raise TrainingCollapsed(
                f"{name} holds NaN or infinity in its published format, {piece.dtype}: its version "
                "is not published",
                hint="start a new run from the version before, with a smaller learning rate",
            )
        write_all(fd, [piece.view(torch.uint8).numpy().data])
    if written != max(ends.values(), default=0):
        raise StorageError(f"a policy's weights ended in {current}, after {written} bytes")


def open_shelf(folder: Path, recipe: Recipe | SftRecipe, *, dtype: DTypeName) -> PolicyShelf:
    """Return the shelf of a run's policies, or of a fine-tuning's models, in a folder."""
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
    """Return the published files of a version's folder: those of `policy_files`, and its list of
    set-aside problems if it has one. Raises StorageError as `policy_files` does.
    """
    files, path = policy_files(folder), folder / LIST_NAME
    return {**files, LIST_NAME: path} if path.is_file() else files


def _is_needed(path: Path) -> bool:
    return path.suffix in _SIDE_FILES or path.suffix in (".safetensors", _PEFT_SUFFIX)


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Make a new folder beside `target` that replaces it when the block ends without error."""
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
    """Return the number of token ids in a model folder's configuration."""
    config = json.loads((folder / "config.json").read_text())
    size: int = config.get("vocab_size") or config["text_config"]["vocab_size"]
    return size


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the token ids that end a completion of a folder's model: those of the engines.

    Raises ConfigError when there are none, or one is outside the vocabulary: completions of such a
    model would end only at the token limit.
    """
    from muster.inference.framing import read_ends, read_tokenizer

    found = read_ends(read_tokenizer(folder), folder)
    size = vocab_size(folder)
    if not found or max(found) >= size:
        raise ConfigError(
            f"the model in {folder} has EOS tokens {sorted(found)} and {size} token ids",
            hint="set eos_token_id in its config.json, and its tokenizer's eos_token, to tokens of "
            "its vocabulary",
        )
    return found
