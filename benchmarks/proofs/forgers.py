"""Forgers against synthetic hidden states: where the customary limits fail, and decoys do not.

    make bench-forgers

Chunks of 32 tokens, top 128. Constants are chosen from other chunks; templates are the mean hidden
state, which the forger knows exactly. The customary limits are 38 exponent mismatches, mean 10 and
median 8. Writes results/forgers.json.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from benchmarks.report import machine, print_table, write

from muster.toploc import ChunkResult, build_proofs, verify_proofs
from muster.toploc.chunks import DECOYS

Values = npt.NDArray[np.float32]

CHUNKS = 300
ROWS, TOPK, PRIME = 32, 128, 65497


def customary(result: ChunkResult) -> bool:
    """Return whether a chunk is inside the customary limits."""
    return (
        result.exponent_mismatches <= 38
        and result.mantissa_error_mean <= 10
        and result.mantissa_error_median <= 8
    )


def gaussian(width: int) -> Callable[[np.random.Generator], Values]:
    """Hidden states without structure."""
    return lambda random: random.standard_normal((ROWS, width), np.float32)


def outliers(jitter: float, mean_H: Values) -> Callable[[np.random.Generator], Values]:
    """Hidden states whose largest entries are in a few channels, and vary by `jitter`."""

    def draw(random: np.random.Generator) -> Values:
        noise = random.standard_normal((2, ROWS, len(mean_H)), np.float32)
        return np.asarray(mean_H * (1 + jitter * noise[0]) + 0.3 * noise[1], np.float32)

    return draw


def channel_means(width: int, random: np.random.Generator) -> Values:
    """Means with eight outlier channels."""
    mean_H = 0.5 * random.standard_normal(width, np.float32)
    chosen = random.choice(width, 8, replace=False)
    mean_H[chosen] = random.uniform(20, 60, 8) * random.choice([-1, 1], 8)
    return mean_H


def constant_of(draw: Callable[[np.random.Generator], Values]) -> bytes:
    """Return a constant proof, with a typical value of the largest entries."""
    random = np.random.default_rng(99)
    largest = [np.sort(np.abs(draw(random)).ravel())[-TOPK:] for _ in range(16)]
    pattern = int(np.float32(np.median(largest)).view(np.uint32) >> 16)
    return np.array([PRIME, pattern, *[0] * (TOPK - 1)], ">u2").tobytes()


def trial(
    draw: Callable[[np.random.Generator], Values], forge: Callable[[Values], bytes]
) -> list[ChunkResult]:
    """Compare proofs of `forge` with freshly drawn chunks."""
    random = np.random.default_rng(1)
    found = []
    for _ in range(CHUNKS):
        hidden = draw(random)
        found += verify_proofs(hidden, [forge(hidden)])
    return found


def honest_with(noise: float) -> Callable[[Values], bytes]:
    """Return a prover whose arithmetic differs by a relative `noise`."""
    random = np.random.default_rng(2)

    def prove(hidden: Values) -> bytes:
        scale = 1 + noise * random.standard_normal(hidden.shape, np.float32)
        return build_proofs(np.asarray(hidden * scale, np.float32))[0]

    return prove


def main() -> None:
    """Try every forger, print, write."""
    means = channel_means(5120, np.random.default_rng(0))
    template = build_proofs(np.tile(means, (ROWS, 1)))[0]
    states = {f"gaussian, width {width}": gaussian(width) for width in (1024, 4096, 5120)}
    states |= {f"8 outliers, jitter {j:.0%}": outliers(j, means) for j in (0.01, 0.05, 0.1, 0.4)}
    detail = []
    for name, draw in states.items():
        constant = constant_of(draw)
        provers: dict[str, Callable[[Values], bytes]] = {
            "honest, 0.4 % noise": honest_with(0.004),
            "honest, 1.7 % noise": honest_with(0.017),
            "constant": lambda _hidden, constant=constant: constant,  # type: ignore[misc]
        }
        if "outliers" in name:
            provers["mean template"] = lambda _hidden: template
        detail += [_row(name, label, trial(draw, prove)) for label, prove in provers.items()]
    header = list(detail[0])
    print_table("Chunks", header, [[str(v) for v in row.values()] for row in detail])
    constants = [row for row in detail if row["prover"] == "constant"]
    honest = [row for row in detail if "honest" in str(row["prover"])]
    metrics = {
        "constant_customary_max": max(float(row["customary limits"]) for row in constants),
        "constant_with_decoys": max(float(row["and decoys"]) for row in constants),
        "honest_decoys_max": max(float(row["most decoys"]) for row in honest),
    }
    write("forgers", metrics, detail, measured_on=machine())


def _row(states: str, prover: str, results: list[ChunkResult]) -> dict[str, float | str]:
    passing = [r for r in results if customary(r)]
    return {
        "hidden states": states,
        "prover": prover,
        "exponents": max(r.exponent_mismatches for r in results),
        "least mean": round(min(min(r.mantissa_error_mean, 999) for r in results), 2),
        "most mean": round(max(min(r.mantissa_error_mean, 999) for r in results), 2),
        "least decoys": min(r.decoy_matches for r in results),
        "most decoys": max(r.decoy_matches for r in results),
        "customary limits": round(len(passing) / len(results), 3),
        "and decoys": round(sum(r.decoy_matches <= DECOYS // 2 for r in passing) / len(results), 3),
    }


if __name__ == "__main__":
    main()
