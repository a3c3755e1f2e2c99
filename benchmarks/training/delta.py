"""Size and speed of weight deltas on real training steps, beside two plainer ways.

    make bench-delta

 1. For each learning rate and number of optimiser steps per version, train (see `delta_steps.py`),
    write the delta of every step, apply it, and compare the files byte by byte. The ratio is full
    copy over delta, files as published; the median over the steps counts.
 2. The references code the same weights: gaps and new values of what changed (32 and 16 bits) and
    the XOR of old and new, both through zstd at level 1. The bounds are entropies of positions and
    steps, over all weights and given the exponent of the old weight, with known probabilities.
 3. Speed: the last step's files, its tensors repeated to 200 MB, from disk cache to disk cache;
    megabytes of weights per CPU second of one thread, best of five, since the machine is shared.

Writes results/delta.json.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from benchmarks.report import machine, print_table, write
from benchmarks.training.delta_steps import Setting, build_model, train

from muster.shardcast.delta import States, apply_delta, write_delta
from muster.shardcast.delta_block import load_kernel
from muster.shardcast.digests import state_hash

SETTINGS = [Setting(1e-6, 1), Setting(3e-7, 1), Setting(1e-6, 8), Setting(3e-7, 8)]
STEPS = 8
REPEATED = 32
"""How often the tensors are repeated where speed is measured."""
ROUNDS = 5

Patterns = npt.NDArray[np.uint16]
Files = dict[str, Path]


def main() -> None:
    """Measure every setting; print the table and write the figures."""
    if load_kernel() is None:
        raise SystemExit("error: no compiled kernel\nhint: install a C compiler, then make setup")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_model(folder / "model")
        rows = [measure(folder, setting) for setting in SETTINGS]
    show(rows)
    metrics = {f"delta_ratio_{row['setting']}": row["ratio"] for row in rows}
    metrics["delta_encode_mb_s"] = min(row["encode_mb_s"] for row in rows)
    metrics["delta_decode_mb_s"] = min(row["decode_mb_s"] for row in rows)
    write("delta", metrics, rows, measured_on=machine())


def measure(folder: Path, setting: Setting) -> dict[str, Any]:
    """Return the figures of one setting."""
    versions = train(folder / "model", folder / setting.name, setting, STEPS)
    steps = [measure_step(folder, *pair) for pair in itertools.pairwise(versions)]
    middle = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
    speed = measure_speed(folder, versions[-2], versions[-1])
    ratios = [step["ratio"] for step in steps]
    return {"setting": setting.name, **middle, **speed, "ratios": ratios}


def measure_step(folder: Path, before: Path, after: Path) -> dict[str, float]:
    """Return sizes of one step's delta and of its references, as ratios to the full copy."""
    full = sum(path.stat().st_size for path in files_of(after).values())
    delta = write_one(folder / "delta", files_of(before), files_of(after))
    apply_one(delta, files_of(before), files_of(after), folder / "made")
    for name, path in files_of(after).items():
        if path.read_bytes() != (folder / "made" / name).read_bytes():
            raise SystemExit(f"error: {name} was not rebuilt")
    old, new = weights_of(before), weights_of(after)
    exponents = (old >> np.uint16(7)) & np.uint16(0xFF)
    return {
        "ratio": full / delta.stat().st_size,
        "changed": float(np.mean(old != new)),
        "gaps_zstd_ratio": old.nbytes / gaps_zstd(old, new),
        "xor_zstd_ratio": old.nbytes / xor_zstd(old, new),
        "bound": old.nbytes / entropy_bytes(old, new, np.zeros_like(old)),
        "exponent_bound": old.nbytes / entropy_bytes(old, new, exponents),
    }


def measure_speed(folder: Path, before: Path, after: Path) -> dict[str, float]:
    """Return megabytes of weights per CPU second, writing and applying."""
    name = "model.safetensors"
    old = {name: repeat(before / name, folder / "old.safetensors")}
    new = {name: repeat(after / name, folder / "new.safetensors")}
    size = old[name].stat().st_size
    encode_s, decode_s = [], []
    for _ in range(ROUNDS):
        encode_s.append(cpu_s(lambda: write_one(folder / "delta", old, new)))
        if size < 20 * (folder / "delta").stat().st_size:
            raise SystemExit("error: the large file was not coded as weights")
        decode_s.append(cpu_s(lambda: apply_one(folder / "delta", old, new, folder / "made")))
    if state_hash(new) != state_hash({name: folder / "made" / name}):
        raise SystemExit("error: the large file was not rebuilt")
    return {"encode_mb_s": size / min(encode_s) / 1e6, "decode_mb_s": size / min(decode_s) / 1e6}


NAMES = States(parent=b"p" * 32, made=b"m" * 32)  # type: ignore[arg-type]  # any two will do


def write_one(path: Path, old: Files, new: Files) -> Path:
    """Write the delta between two versions."""
    with path.open("wb") as target:
        write_delta(target, new, old, states=NAMES, max_bytes=1 << 40)
    return path


def apply_one(delta: Path, old: Files, new: Files, folder: Path) -> None:
    """Rebuild a version's files in a folder."""
    folder.mkdir(exist_ok=True)
    sizes = {name: path.stat().st_size for name, path in new.items()}
    with delta.open("rb") as source:
        apply_delta(source, old, folder, sizes, states=NAMES)


def files_of(folder: Path) -> Files:
    """Return a version's files by name."""
    return {path.name: path for path in folder.iterdir()}


def repeat(path: Path, target: Path) -> Path:
    """Write a safetensors file with every tensor many times."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    body, made = data[start:], {}
    for name, entry in json.loads(data[8:start]).items():
        for i in range(REPEATED if name != "__metadata__" else 0):
            offsets = [i * len(body) + at for at in entry["data_offsets"]]
            made[f"{i}.{name}"] = {**entry, "data_offsets": offsets}
    header = json.dumps(made).encode()
    target.write_bytes(len(header).to_bytes(8, "little") + header + body * REPEATED)
    return target


def cpu_s(call: Callable[[], object]) -> float:
    """Return the CPU seconds a call takes."""
    began = time.process_time()
    call()
    return time.process_time() - began


def weights_of(folder: Path) -> Patterns:
    """Return a version's bfloat16 patterns in file order."""
    data = (folder / "model.safetensors").read_bytes()
    return np.frombuffer(data, np.uint16, offset=8 + int.from_bytes(data[:8], "little"))


def gaps_zstd(old: Patterns, new: Patterns) -> int:
    """Return the size of gaps (int32) and new values of what changed, through zstd-1."""
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=0).astype(np.int32)
    return sum(len(_zstd(part.tobytes())) for part in (gaps, new[places]))


def xor_zstd(old: Patterns, new: Patterns) -> int:
    """Return the size of the XOR of old and new, through zstd-1."""
    return len(_zstd((old ^ new).tobytes()))


def _zstd(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd", compression_level=1).compress(data, asbytes=True)
    return packed


def entropy_bytes(old: Patterns, new: Patterns, classes: Patterns) -> float:
    """Return the entropy of which weights change and by what, given each weight's class."""
    numbers = [p.view(np.int16) ^ ((p.view(np.int16) >> 15) & 0x7FFF) for p in (old, new)]
    steps, bits = numbers[1] - numbers[0], 0.0
    for number in np.unique(classes):
        _, counts = np.unique(steps[classes == number], return_counts=True)
        bits -= float(np.sum(counts * np.log2(counts / counts.sum())))
    return bits / 8


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    header = ["lr, steps", "changed", "delta", "bound", "bound under exponent"]
    header += ["gaps zstd-1", "xor zstd-1", "encode MB/s", "decode MB/s"]
    print_table(
        "full copy / size (bfloat16, lossless); MB of weights per CPU second",
        header,
        [
            [
                row["setting"],
                f"{row['changed']:.2%}",
                f"{row['ratio']:.1f}",
                f"{row['bound']:.1f}",
                f"{row['exponent_bound']:.1f}",
                f"{row['gaps_zstd_ratio']:.1f}",
                f"{row['xor_zstd_ratio']:.1f}",
                f"{row['encode_mb_s']:.0f}",
                f"{row['decode_mb_s']:.0f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
