"""Adapters as deltas: the merge is exact, and an adapter that does not fit has a named fault."""

import json
from pathlib import Path

import numpy as np
import pytest
from delta_tensors import Files, applied, delta_between, sizes_of
from hypothesis import given, settings, strategies as st
from shardcast_policies import write_files

from muster.protocol.errors import AdapterError, DeltaError
from muster.shardcast.adapter import (
    CONFIG_NAME,
    MAX_RANK,
    WEIGHTS_NAME,
    Adapter,
    Factors,
    Floats,
    merged,
    merged_by_numpy,
    merged_weight,
    read_factors,
)
from muster.shardcast.delta import MERGED
from muster.shardcast.delta_block import load_kernel
from muster.shardcast.delta_layout import read_tensors

ROWS, COLUMNS, RANK = 6, 5, 2
WEIGHT = "layers.0.q_proj.weight"
KEY = "base_model.model.layers.0.q_proj"


def shaped(tensors: dict[str, tuple[str, np.ndarray]]) -> bytes:  # type: ignore[type-arg]
    """Return a safetensors file of arrays, each stored under the given name of its type."""
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for _, array in tensors.values())
    return len(text).to_bytes(8, "little") + text + data


def numbers(seed: int, *shape: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def config(**changes: object) -> bytes:
    value = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "base_model_name_or_path": "0xba5e"}
    return json.dumps(value | changes).encode()


def adapter_files(seed: int = 1, **changes: object) -> Files:
    tensors = {
        f"{KEY}.lora_A.weight": ("F32", numbers(seed, RANK, COLUMNS)),
        f"{KEY}.lora_B.weight": ("F32", numbers(seed + 1, ROWS, RANK)),
    }
    return {CONFIG_NAME: config(**changes), WEIGHTS_NAME: shaped(tensors)}


def base_files(dtype: str = "F32", seed: int = 7) -> Files:
    return {
        "config.json": b"{}",
        "model.safetensors": shaped(
            {
                "layers.0.norm.weight": ("F32", numbers(9, 4)),
                WEIGHT: (dtype, patterns(dtype, numbers(seed, ROWS, COLUMNS))),
            }
        ),
    }


def patterns(dtype: str, values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Return numbers in a type, converted otherwise than in a merge: bfloat16 truncates."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype == "F16" else values


def merged_files(folder: Path, base: Files, adapter: Files) -> Files:
    """Return a version: the base's weights merged, and the adapter beside them."""
    paths = write_files(folder / "adapter", adapter)
    merge = Adapter(paths).merges[WEIGHT]
    weights = write_files(folder / "base", base)["model.safetensors"]
    tensor = next(t for t in read_tensors(weights) if t.name == WEIGHT)
    data = bytearray(base["model.safetensors"])
    place = slice(tensor.offset, tensor.offset + tensor.size)
    width = tensor.size // merge.size
    old = np.frombuffer(bytes(data[place]), f"<u{width}")
    made = merged_weight(old, read_factors(merge, paths[WEIGHTS_NAME]), tensor.dtype)
    data[place] = made.tobytes()
    return base | adapter | {"model.safetensors": bytes(data)}


# ------------------------------------------------------------------------------ the arithmetic


def test_merge_is_the_sum_of_products_rounded_one_by_one() -> None:
    rows, columns, rank = 3, 4, 5
    base, down, up = numbers(1, rows, columns), numbers(2, rank, columns), numbers(3, rows, rank)
    made = merged_weight(base.reshape(-1).view(np.uint32), Factors(up, down), "F32")
    for i in range(rows):
        for j in range(columns):
            total = np.float32(0)
            for k in range(rank):
                total = np.float32(total + np.float32(up[i, k] * down[k, j]))
            expected = np.float32(base[i, j] + total)
            assert made[i * columns + j] == expected.view(np.uint32)


def test_merge_in_blocks_of_rows_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    base, factors = numbers(1, 40, 8), Factors(numbers(2, 40, 3), numbers(3, 3, 8))
    whole = merged_weight(base.reshape(-1).view(np.uint32), factors, "F32")
    monkeypatch.setattr("muster.shardcast.adapter.BLOCK_NUMBERS", 56)
    parts = merged_weight(base.reshape(-1).view(np.uint32), factors, "F32")
    assert np.array_equal(whole, parts)


def any_floats(seed: int, *shape: int) -> Floats:
    """Return floats of every kind: most of common sizes, some of any bits (infinities, NaN)."""
    rng = np.random.default_rng(seed)
    strange = rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)
    return np.where(rng.random(shape) < 0.1, strange, numbers(seed, *shape))


@pytest.mark.skipif(load_kernel() is None, reason="no compiled kernel")
@given(
    rows=st.integers(1, 9),
    columns=st.sampled_from([1, 7, 511, 512, 513, 1_100]),
    rank=st.integers(1, 9),
    dtype=st.sampled_from(["F32", "BF16", "F16"]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60)
def test_kernel_merges_to_the_bytes_of_numpy(
    rows: int, columns: int, rank: int, dtype: str, seed: int
) -> None:
    with np.errstate(all="ignore"):
        base = patterns(dtype, any_floats(seed, rows * columns))
    old = base.view(f"<u{base.itemsize}")
    up, down = any_floats(seed + 1, rows + 2, rank), any_floats(seed + 2, rank, columns)
    made = merged(old, Factors(up, down), 2, dtype)
    assert made.tobytes() == merged_by_numpy(old, up[2:], down, dtype).tobytes()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0x3F80_8000, 0x3F80),  # a tie, to even
        (0x3F81_8000, 0x3F82),  # a tie, to even
        (0x3F80_8001, 0x3F81),
        (0x7F7F_FFFF, 0x7F80),  # beyond the largest
        (0x7F80_0001, 0x7FC0),  # any NaN
    ],
)
def test_bfloat16_is_rounded_to_the_nearest_and_even(value: int, expected: int) -> None:
    factors = Factors(np.full((1, 1), 1, np.float32), np.array([[value]], np.uint32).view("f4"))
    assert merged_weight(np.zeros(1, np.uint16), factors, "BF16").tolist() == [expected]


# ------------------------------------------------------------------------------------- deltas


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_adapter_travels_alone_and_weights_come_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    base = base_files(dtype)
    version = merged_files(tmp_path, base, adapter_files())
    delta = delta_between(tmp_path, base, version)
    assert applied(tmp_path, base, delta, sizes_of(version)) == version
    assert version["model.safetensors"] != base["model.safetensors"]
    assert len(delta) < sum(map(len, adapter_files().values())) + 200


@given(st.integers(0, 1 << 30))
@settings(max_examples=20)
def test_weight_that_is_not_the_merge_is_coded_like_any_other(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder, base = tmp_path_factory.mktemp("delta"), base_files()
    version = merged_files(folder, base, adapter_files())
    changed = bytearray(version["model.safetensors"])
    changed[-1 - seed % (4 * ROWS * COLUMNS)] ^= 1 << seed % 8
    version["model.safetensors"] = bytes(changed)
    delta = delta_between(folder, base, version)
    assert applied(folder, base, delta, sizes_of(version)) == version


def _merge_operation(delta: bytes) -> int:
    """Return the offset of the only merge of a delta."""
    head = bytes([MERGED, 5, 1])
    assert delta.count(head) == 1
    return delta.index(head)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (1, 9, "format"),  # the weight has an unknown type
        (2, 7, "bounds"),  # the base does not have this file
        (4, 100, "bounds"),  # more rows than the file has room for
        (5, 0, "adapter"),  # no columns
        (6, 0, "adapter"),  # rank 0
        (6, 100, "adapter"),  # a higher rank than the adapter's factors have
        (11, 4, "format"),  # factors in a type that they never have
    ],
)
def test_merge_of_what_is_not_there_is_a_named_fault(
    tmp_path: Path, place: int, value: int, reason: str
) -> None:
    base = base_files()
    version = merged_files(tmp_path, base, adapter_files())
    delta = bytearray(delta_between(tmp_path, base, version))
    at = _merge_operation(bytes(delta))
    # The offset after the file's number takes one byte only if the tensor is near the start.
    offset_bytes = 2 if delta[at + 3] >= 0x80 else 1
    where = at + place + (offset_bytes - 1 if place > 2 else 0)
    delta[where] = value
    with pytest.raises(DeltaError) as caught:
        applied(tmp_path, base, bytes(delta), sizes_of(version))
    assert caught.value.reason == reason


def test_merge_before_the_adapter_is_there_is_refused(tmp_path: Path) -> None:
    base = base_files()
    version = merged_files(tmp_path, base, adapter_files())
    early = {n.replace("model.safetensors", "a.safetensors"): d for n, d in version.items()}
    delta = delta_between(tmp_path, base, early)
    assert applied(tmp_path, base, delta, sizes_of(early)) == early
    assert MERGED not in delta[72:90]
    data = delta_between(tmp_path, base, version)
    at = _merge_operation(data)
    # The same operation for a file whose name comes before the adapter's.
    body = bytes([len("a.safetensors")]) + b"a.safetensors" + bytes([120]) + data[at:]
    with pytest.raises(DeltaError, match="unknown operation 6"):
        applied(tmp_path, base, data[:72] + body, {"a.safetensors": 120})


# ----------------------------------------------------------------------------- adapters to read


def test_adapter_says_its_base_and_what_it_changes(tmp_path: Path) -> None:
    adapter = Adapter(write_files(tmp_path / "a", adapter_files()))
    assert (adapter.base, set(adapter.merges)) == ("0xba5e", {WEIGHT})


def _tensors(**changes: tuple[str, np.ndarray] | None) -> bytes:  # type: ignore[type-arg]
    own = {"lora_A": ("F32", numbers(1, RANK, COLUMNS)), "lora_B": ("F32", numbers(2, ROWS, RANK))}
    kept = {name: value for name, value in (own | changes).items() if value is not None}
    return shaped({f"{KEY}.{name}.weight": value for name, value in kept.items()})


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({CONFIG_NAME: config(), WEIGHTS_NAME: _tensors(lora_A=None)}, "missing"),
        ({CONFIG_NAME: config()}, "missing"),
        ({WEIGHTS_NAME: _tensors()}, "missing"),
        ({CONFIG_NAME: config(), WEIGHTS_NAME: shaped({})}, "missing"),
        ({CONFIG_NAME: config(), WEIGHTS_NAME: b"no safetensors"}, "missing"),
        ({CONFIG_NAME: config(r=3), WEIGHTS_NAME: _tensors()}, "rank"),
        ({CONFIG_NAME: config(r=0), WEIGHTS_NAME: _tensors()}, "rank"),
        ({CONFIG_NAME: config(r=MAX_RANK + 1), WEIGHTS_NAME: _tensors()}, "rank"),
        ({CONFIG_NAME: config(lora_alpha=None), WEIGHTS_NAME: _tensors()}, "rank"),
        (
            {
                CONFIG_NAME: config(),
                WEIGHTS_NAME: _tensors(lora_B=("F32", numbers(2, ROWS, RANK + 1))),
            },
            "rank",
        ),
        (
            {CONFIG_NAME: config(), WEIGHTS_NAME: _tensors(lora_C=("F32", numbers(2, 1, 1)))},
            "unexpected",
        ),
        ({CONFIG_NAME: config(use_dora=True), WEIGHTS_NAME: _tensors()}, "config"),
        ({CONFIG_NAME: config(peft_type="IA3"), WEIGHTS_NAME: _tensors()}, "config"),
        ({CONFIG_NAME: b"[]", WEIGHTS_NAME: _tensors()}, "config"),
        ({CONFIG_NAME: b"{", WEIGHTS_NAME: _tensors()}, "config"),
        (
            {
                CONFIG_NAME: config(),
                WEIGHTS_NAME: _tensors(lora_A=("F64", numbers(1, RANK, COLUMNS))),
            },
            "config",
        ),
    ],
)
def test_adapter_that_cannot_be_merged_is_refused(
    tmp_path: Path, files: Files, reason: str
) -> None:
    with pytest.raises(AdapterError) as caught:
        Adapter(write_files(tmp_path, files))
    assert caught.value.reason == reason
