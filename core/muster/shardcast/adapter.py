"""Low-rank adapters (LoRA) over a base: an adapter's files, and the merge with weights.

A version that is an adapter holds the base's weights *merged* with it, so that any engine loads it
like any other policy. Beside them it holds the adapter as peft wrote it, under names that no engine
takes for weights. Only the adapter is sent: a delta makes the merged weights from the base's
(`muster.shardcast.delta`).

The merge of a weight W [rows, columns] with A [rank, columns] and B [rows, rank] is

    W + ((0 + B'[:, 0] A[0, :]) + B'[:, 1] A[1, :]) + …,    B' = B * scale

in float32, rounded after every operation to the nearest (ties to even), and at the end once to W's
type. No product is fused with a sum and nothing is reordered, so every processor makes the same
bytes. A NaN result has one bit pattern per type.

Axes: O rows, I columns, K rank.
"""

import json
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import AdapterError
from muster.shardcast.delta_block import FORMATS, FloatFormat, Patterns, load_kernel
from muster.shardcast.delta_layout import Tensor, read_tensors

CONFIG_NAME = "adapter_config.peft"
"""Our name of peft's adapter_config.json."""
WEIGHTS_NAME = "adapter_model.peft"
"""Our name of peft's adapter_model.safetensors. With peft's name transformers would load the folder
as an adapter, and engines would take the tensors for the model's."""
MAX_RANK = 1024
"""Largest rank: it bounds the cost of a merge in proportion to the weights."""
FACTOR_TYPES = ("BF16", "F32")
MAX_ALPHA = 1 << 20
MAX_COLUMNS = 1 << 24
"""Longest row of a weight that can be merged: it bounds memory."""
MAX_CONFIG_BYTES = 1 << 20
BLOCK_NUMBERS = 1 << 16
"""Numbers of a weight that are merged at a time: they fit a core's own cache."""

_PREFIX = "base_model.model."
_PARTS = (".lora_A.weight", ".lora_B.weight")
_NOT_A_NUMBER = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC0_0000}

Floats = npt.NDArray[np.float32]


class Factors(NamedTuple):
    """The factors of one weight's update."""

    up_OK: Floats
    """B, scaled already."""
    down_KI: Floats
    """A."""


@dataclass(frozen=True, slots=True)
class Merge:
    """How a weight is merged: its shape, and the place of its factors in the adapter's file."""

    rows: int
    columns: int
    rank: int
    scale: np.float32
    """Factor on B."""
    dtype: str
    """The factors' type, BF16 or F32."""
    down: int
    """Offset of A in the file."""
    up: int
    """Offset of B in the file."""

    def __post_init__(self) -> None:
        """Raise AdapterError for numbers out of range."""
        is_bounded = (
            1 <= self.rank <= MAX_RANK
            and 1 <= self.columns <= MAX_COLUMNS
            and self.rows >= 1
            and bool(np.isfinite(self.scale))
        )
        if not is_bounded:
            raise AdapterError(
                f"a weight of {self.rows} x {self.columns} cannot be merged with rank {self.rank} "
                f"and scale {self.scale}",
                reason="rank",
            )

    @property
    def size(self) -> int:
        """Numbers of the weight."""
        return self.rows * self.columns


class Adapter:
    """An adapter's merges, by the name of the base's weight."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Raise AdapterError when the files are not an adapter that can be merged."""
        config = _config(files)
        self.base = str(config.get("base_model_name_or_path"))
        """The base model that the adapter names."""
        self.path = files[WEIGHTS_NAME]
        self.merges = dict(_merges(self.path, *_rank_and_scale(config)))
        if not self.merges:
            raise AdapterError(f"{self.path} has no adapter", reason="missing")


def is_adapter(files: Container[str]) -> bool:
    """Tell whether files of these names are a version that has an adapter."""
    return CONFIG_NAME in files or WEIGHTS_NAME in files


def read_factors(merge: Merge, path: Path) -> Factors:
    """Return a weight's factors; raises AdapterError when the file does not have them."""
    down = _read(path, merge.down, merge.rank * merge.columns, merge.dtype)
    up = _read(path, merge.up, merge.rows * merge.rank, merge.dtype)
    return Factors(
        up.reshape(merge.rows, merge.rank) * merge.scale, down.reshape(merge.rank, merge.columns)
    )


def block_rows(columns: int) -> int:
    """Return how many rows are merged at a time."""
    return max(1, BLOCK_NUMBERS // columns)


def merged(base: Patterns, factors: Factors, first_row: int, dtype: str) -> Patterns:
    """Return consecutive rows of a weight after the merge; `base` has their bit patterns.

    Releases the GIL where the kernel was compiled.
    """
    columns = factors.down_KI.shape[1]
    up_RK = factors.up_OK[first_row : first_row + len(base) // columns]
    kernel = load_kernel()
    if kernel is None or dtype == "F16":
        return merged_by_numpy(base, up_RK, factors.down_KI, dtype)
    old, made = np.require(base, requirements=["C", "A"]), np.empty_like(base)
    kernel.muster_merge(
        old.ctypes.data,
        len(up_RK),
        columns,
        FORMATS[dtype].width,
        up_RK.ctypes.data,
        factors.down_KI.ctypes.data,
        up_RK.shape[1],
        made.ctypes.data,
    )
    return made


def merged_by_numpy(base: Patterns, up_RK: Floats, down_KI: Floats, dtype: str) -> Patterns:
    """Return the same without the kernel, and for float16."""
    update_RI = np.zeros((len(up_RK), down_KI.shape[1]), np.float32)
    product_RI = np.empty_like(update_RI)
    with np.errstate(all="ignore"):
        for k, down_I in enumerate(down_KI):
            np.multiply(up_RK[:, k : k + 1], down_I, out=product_RI)
            np.add(update_RI, product_RI, out=update_RI)
        np.add(_numbers(base, dtype).reshape(update_RI.shape), update_RI, out=update_RI)
        return _patterns(update_RI.reshape(-1), dtype)


def merged_weight(base: Patterns, factors: Factors, dtype: str) -> Patterns:
    """Return a whole weight after the merge."""
    columns = factors.down_KI.shape[1]
    step = block_rows(columns)
    made = np.empty_like(base)
    for row in range(0, len(factors.up_OK), step):
        part = slice(row * columns, (row + step) * columns)
        made[part] = merged(base[part], factors, row, dtype)
    return made


def _numbers(patterns: Patterns, dtype: str) -> Floats:
    if dtype == "BF16":
        return (patterns.astype(np.uint32) << 16).view(np.float32)
    return patterns.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def _patterns(numbers: Floats, dtype: str) -> Patterns:
    kind: FloatFormat = FORMATS[dtype]
    if dtype == "BF16":
        bits = numbers.view(np.uint32)
        # To the nearest, ties to even: round up if the dropped bits are above a half, or a half and
        # the kept part is odd.
        made: Patterns = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    elif dtype == "F16":
        made = numbers.astype(np.float16).view(np.uint16)
    else:
        made = numbers.view(np.uint32)
    made = made.astype(f"<u{kind.width}")
    made[np.isnan(numbers)] = _NOT_A_NUMBER[dtype]
    return made


def _read(path: Path, offset: int, count: int, dtype: str) -> Floats:
    width = FORMATS[dtype].width
    if not path.is_file():
        raise AdapterError(f"there is no {path.name}", reason="missing")
    # Checked before reading: a read allocates memory for the requested number of bytes.
    if offset + count * width > path.stat().st_size:
        raise AdapterError(f"{path.name} ends before what is read of it", reason="bounds")
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(count * width)
    return _numbers(np.frombuffer(data, f"<u{width}"), dtype)


def _config(files: Mapping[str, Path]) -> dict[str, Any]:
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if name not in files or not files[name].is_file():
            raise AdapterError(f"an adapter has a file {name}", reason="missing")
    try:
        value = json.loads(files[CONFIG_NAME].read_bytes()[:MAX_CONFIG_BYTES])
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_NAME} is not JSON: {error}", reason="config") from error
    if not isinstance(value, dict):
        raise AdapterError(f"{CONFIG_NAME} is not an object", reason="config")
    return value


def _rank_and_scale(config: Mapping[str, Any]) -> tuple[int, np.float32]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    variants = ("use_dora", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern")
    used = [name for name in variants if config.get(name)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or used:
        raise AdapterError(f"only plain LoRA can be merged, not with {used}", reason="config")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise AdapterError(f"rank {rank!r} is out of range", reason="rank")
    if not isinstance(alpha, int | float) or not 0 < alpha <= MAX_ALPHA:
        raise AdapterError(f"alpha {alpha!r} is out of range", reason="rank")
    return rank, np.float32(alpha / rank)


def _merges(path: Path, rank: int, scale: np.float32) -> Iterator[tuple[str, Merge]]:
    tensors = {tensor.name: tensor for tensor in read_tensors(path)}
    names = {name.removesuffix(_PARTS[0]).removesuffix(_PARTS[1]) for name in tensors}
    for name in sorted(names):
        parts = [tensors.get(name + part) for part in _PARTS]
        if not name.startswith(_PREFIX) or name in tensors:
            raise AdapterError(f"{path.name} has an unexpected tensor {name}", reason="unexpected")
        down, up = parts
        if down is None or up is None:
            raise AdapterError(f"{path.name} has half an update of {name}", reason="missing")
        yield name.removeprefix(_PREFIX) + ".weight", _merge(down, up, rank, scale)


def _merge(down: Tensor, up: Tensor, rank: int, scale: np.float32) -> Merge:
    shapes = (down.shape, up.shape)
    if [len(shape) for shape in shapes] != [2, 2] or (down.shape[0], up.shape[1]) != (rank, rank):
        raise AdapterError(
            f"{down.name} and its counterpart have shapes {shapes}, the rank is {rank}",
            reason="rank",
        )
    if down.dtype != up.dtype or down.dtype not in FACTOR_TYPES:
        raise AdapterError(f"{down.name} is of type {down.dtype}", reason="config")
    width = FORMATS[down.dtype].width
    if (down.size, up.size) != (width * math.prod(down.shape), width * math.prod(up.shape)):
        raise AdapterError(f"{down.name} has another size than its shape says", reason="rank")
    return Merge(up.shape[0], down.shape[1], rank, scale, down.dtype, down.offset, up.offset)
