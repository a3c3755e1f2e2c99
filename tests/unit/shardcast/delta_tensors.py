"""Safetensors files of any content, made by hand: numpy has no bfloat16, and some are unusual."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st
from shardcast_policies import write_files

from muster.protocol.ids import Hash32
from muster.shardcast.delta import States, apply_delta, write_delta
from muster.shardcast.digests import state_hash

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "U8": 1, "F8_E4M3": 1, "BOOL": 1}
"""Bytes per element of the types that the tests use."""


class TensorBytes(NamedTuple):
    """A tensor as its file holds it."""

    dtype: str
    data: bytes


Files = dict[str, bytes]
"""A version's file contents by name."""


def safetensors(tensors: Mapping[str, TensorBytes], metadata: str = "pt") -> bytes:
    """Return the bytes of a safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": metadata}}
    at = 0
    for name, (dtype, data) in tensors.items():
        shape = [len(data) // WIDTHS[dtype]]
        offsets = [at, at + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(t.data for t in tensors.values())


def states_of(parent: Mapping[str, Path], files: Mapping[str, Path]) -> States:
    """Return the real state hashes of two versions."""
    return States(Hash32(state_hash(parent)), Hash32(state_hash(files)))


def delta_between(folder: Path, parent: Files, fresh: Files) -> bytes:
    """Return the delta of two versions."""
    old, new = write_files(folder / "old", parent), write_files(folder / "new", fresh)
    with (folder / "delta").open("w+b") as target:
        assert write_delta(target, new, old, states=states_of(old, new), max_bytes=1 << 40)
        target.seek(0)
        return target.read()


def applied(folder: Path, parent: Files, delta: bytes, sizes: Mapping[str, int]) -> Files:
    """Return the version that a delta makes, with the states that it names."""
    old = write_files(folder / "old", parent)
    made = folder / "made"
    made.mkdir(exist_ok=True)
    (folder / "delta").write_bytes(delta)
    states = States(Hash32(delta[8:40]), Hash32(delta[40:72]))
    with (folder / "delta").open("rb") as source:
        apply_delta(source, old, made, sizes, states=states)
    return {name: (made / name).read_bytes() for name in sizes}


def sizes_of(files: Files) -> dict[str, int]:
    """Return each file's size."""
    return {name: len(data) for name, data in files.items()}


def trained(versions: int, *, floats: int = 5000, seed: int = 1) -> list[Files]:
    """Return a model's versions, each with one bfloat16 weight in fifty moved by one step."""
    rng = random.Random(seed)
    weights = bytearray(b"".join(0x3C00.to_bytes(2, "little") for _ in range(floats)))
    made = []
    for _ in range(versions):
        made.append(
            {
                "config.json": b"{}",
                "model.safetensors": safetensors({"w": TensorBytes("BF16", bytes(weights))}),
            }
        )
        for i in rng.sample(range(floats), floats // 50):
            weights[2 * i] = (weights[2 * i] + 1) % 256
    return made


@st.composite
def tensors(draw: st.DrawFn, names: Iterable[str] = "abcde") -> dict[str, TensorBytes]:
    """Some tensors of any type and content, empty ones among them."""
    chosen = draw(st.lists(st.sampled_from(list(names)), unique=True, max_size=5))
    made = {}
    for name in chosen:
        dtype = draw(st.sampled_from(list(WIDTHS)))
        count = draw(st.sampled_from([0, 1, 3, 40, 300]))
        rng = random.Random(draw(st.integers(0, 1 << 32)))
        made[name] = TensorBytes(dtype, rng.randbytes(count * WIDTHS[dtype]))
    return made


@st.composite
def changed(draw: st.DrawFn, before: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    """The same tensors after a step: nudged, replaced, added, removed, in another order."""
    after = dict(before) if draw(st.booleans()) else {**before, **draw(tensors())}
    for name in draw(st.lists(st.sampled_from(sorted(after)), unique=True)) if after else []:
        kind = draw(st.sampled_from(["nudge", "remove", "flip"]))
        if kind == "remove":
            del after[name]
        else:
            after[name] = draw(_nudged(after[name], everywhere=kind == "flip"))
    return {name: after[name] for name in draw(st.permutations(list(after)))}


@st.composite
def _nudged(draw: st.DrawFn, tensor: TensorBytes, *, everywhere: bool) -> TensorBytes:
    data = bytearray(tensor.data)
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    step = draw(st.sampled_from([1, 255, 128]))
    for place in range(len(data)):
        if everywhere or rng.random() < 0.05:
            data[place] = (data[place] + step) % 256
    return TensorBytes(tensor.dtype, bytes(data))
