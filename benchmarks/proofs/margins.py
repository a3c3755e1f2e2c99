"""The origin of margins, and the bias that a calibrated margin allows in one submission.

    python -m benchmarks.proofs.margins                   all cases of results/calibration.json
    python -m benchmarks.proofs.margins 2x64:bfloat16     one of them

1. One engine decodes; the same positions are computed again by one prefill, with another attention
   kernel, and in float32. Choices under fresh noise are replayed by each.
2. A worker ends completions as much sooner, or later, as the calibration's limits allow: by the
   whole margin everywhere, and by the close margin but for the tokens that may be wide. What is
   left over 64 submissions is results/history.json's.

`make bench-calibration` comes first. Writes results/margins.json, case by case.
"""

import argparse
import itertools
import json
import random as plain_random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from benchmarks.proofs import base_models, history
from benchmarks.proofs.calibration import RECIPE, folder_of
from benchmarks.report import RESULTS, machine, print_table, write

from muster.inference.calibrated_limits import FLOORS, submission_size
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.toploc.calibration import SamplerLimits

PROMPTS, PATHS, DRAWS, SUBMISSIONS = 16, 2, 128, 40
FAR = FLOORS["bfloat16"].margin / 4
"""A margin that few tokens of one kernel have, in nats."""
QUANTILES = (0.5, 0.99)

Logits = npt.NDArray[np.float32]


def load(size: str, dtype: str, kernel: str = "sdpa") -> TransformersEngine:
    """Return an engine with a model of `base_models.py`."""
    engine = TransformersEngine(dtype)  # type: ignore[arg-type]
    engine.load_policy(folder_of(size), PolicyVersion(0))
    engine.model.set_attn_implementation(kernel)
    return engine


def compute(size: str, dtype: str) -> tuple[Logits, dict[str, Logits], int]:
    """Return [P, T, V] logits of a worker, those of each validator, and the EOS."""
    engine = load(size, dtype)
    rng = plain_random.Random(2)
    prompts = [engine.encode(base_models.prompt(rng)) for _ in range(PROMPTS)]
    asked = [prompt for prompt in prompts for _ in range(PATHS)]
    (eos,) = engine.eos_token_ids
    tokens_PT, worker, _ = history.decode(engine, asked, eos)
    pairs = list(zip(asked, map(tuple, tokens_PT.tolist()), strict=True))
    others = {
        "the same kernel": engine,
        "another attention kernel": load(size, dtype, "eager"),
        "float32": load(size, "float32"),
    }
    validators = {
        name: np.stack([each.logits_TV for each in other.recompute(pairs)])
        for name, other in others.items()
    }
    return worker, validators, eos


# 1. Where margins come from


def replayed(own: Logits, other: Logits) -> dict[str, float]:
    """Replay one party's choices with another's logits; return the figures."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(DRAWS):
        noise = history.gumbel(own.shape, random)
        chosen = (own + noise).argmax(axis=2)[..., None]
        scores = other + noise
        found.append(scores.max(axis=2) - np.take_along_axis(scores, chosen, 2)[..., 0])
    margins = np.stack(found)
    return {
        "tokens": margins.size,
        "flips": float((margins > 0).mean()),
        "far": float((margins > FAR).mean()),
        "largest": float(margins.max()),
    }


def by_class(own: Logits, other: Logits) -> dict[str, list[float]]:
    """Return quantiles of the largest error of the five likeliest logits, by class of position."""
    weights = np.exp(other - other.max(axis=2, keepdims=True))
    odds = weights / weights.sum(axis=2, keepdims=True)
    entropy = -(odds * np.log(odds + 1e-30)).sum(axis=2)
    top = np.sort(other, axis=2)
    gap = top[..., -1] - top[..., -2]
    likeliest = other.argsort(axis=2)[..., -5:]
    errors = np.take_along_axis(np.abs(own - other), likeliest, 2).max(axis=2)
    place = np.broadcast_to(np.arange(own.shape[1]), errors.shape)
    classes = {
        "entropy": (entropy, (0.0, 0.3, 1.0, 10.0)),
        "gap": (gap, (0.0, 0.25, 2.0, 100.0)),
        "place": (place, (0, 4, 32, 1000)),
    }
    return {
        f"{name} {low:g} to {high:g}": np.quantile(errors[inside], QUANTILES).tolist()
        for name, (values, bounds) in classes.items()
        for low, high in itertools.pairwise(bounds)
        if (inside := (values >= low) & (values < high)).any()
    }


# 2. What one submission may do


def mean_length(own: Logits, eos: int, bias_S: npt.NDArray[np.float64]) -> float:
    """Return the mean length of completions of submissions with a bias to EOS per sample."""
    random = np.random.default_rng(4)
    lengths = []
    for _ in range(SUBMISSIONS):
        paths = random.integers(0, len(own), len(bias_S))
        wanted = own[paths] + history.gumbel((len(paths), *own.shape[1:]), random)
        wanted[..., eos] += bias_S[:, None]
        ends = wanted.argmax(axis=2) == eos
        lengths.append(np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, own.shape[1]).mean())
    return float(np.mean(lengths))


def biases(limits: SamplerLimits) -> dict[str, npt.NDArray[np.float64]]:
    """Return the bias per sample by the margin alone, and with wide tokens counted, in nats."""
    samples = submission_size(RECIPE)
    whole = np.full(samples, limits.margin)
    wide = limits.wide
    if wide is None:
        return {"margin": whole, "counted": whole}
    counted = np.where(np.arange(samples) < wide.most_ends, limits.margin, wide.margin)
    return {"margin": whole, "counted": counted}


def left(worker: Logits, eos: int, limits: SamplerLimits) -> dict[str, Any]:
    """Return mean lengths of honest submissions, and of those that exhaust the limits."""
    honest = mean_length(worker, eos, np.zeros(submission_size(RECIPE)))
    found: dict[str, Any] = {"honest_length": honest}
    for name, bias_S in biases(limits).items():
        changed = [mean_length(worker, eos, sign * bias_S) / honest - 1 for sign in (1, -1)]
        found[name] = {"nats": float(bias_S.mean()), "shorter": changed[0], "longer": changed[1]}
    return found


def study(case: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return one case's figures."""
    worker, validators, eos = compute(*case.split(":"))
    sampler = SamplerLimits.model_validate(limits["sampler"])
    return {
        "replayed": {name: replayed(worker, other) for name, other in validators.items()},
        "classes": by_class(worker, validators["the same kernel"]),
        "limits": sampler.model_dump(mode="json"),
        "left": left(worker, eos, sampler),
    }


def _detail(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())["detail"]) if path.exists() else {}


def main() -> None:
    """Measure the cases asked for and print all that are known."""
    calibrated = _detail("calibration")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(calibrated))
    given = parser.parse_args()
    torch.set_num_threads(1)
    history.TOKENS = RECIPE.sampling.max_new_tokens
    for case in given.cases:
        found = study(case, calibrated[case]["limits"])
        known = {**_detail("margins"), case: found}
        bias = max(each["left"]["counted"]["nats"] for each in known.values())
        write("margins", {"bias_of_one_submission_max": bias}, known, measured_on=machine())
    _print(_detail("margins"))


def _print(known: Mapping[str, Any]) -> None:
    rows = [
        [case, name, f"{each['flips']:.3%}", f"{each['far']:.4%}", f"{each['largest']:.2g}"]
        for case, found in known.items()
        for name, each in found["replayed"].items()
    ]
    header = ["case", "replayed by", "flips", f"beyond {FAR:g}", "largest"]
    print_table("Choices of one engine in others' replay", header, rows)
    rows = [
        [case, *(f"{x:.3f}" for x in (found["limits"]["margin"], *_close(found["limits"])))]
        + [cell for name in ("margin", "counted") for cell in _cells(found["left"][name])]
        for case, found in known.items()
    ]
    header = ["case", "margin", "close", "wide at an end", "nats", "shorter", "longer",
              "nats, counted", "shorter", "longer"]  # fmt: skip
    print_table("What one submission may do to lengths", header, rows)


def _close(limits: Mapping[str, Any]) -> tuple[float, float]:
    wide = limits["wide"]
    return (limits["margin"], 0.0) if wide is None else (wide["margin"], wide["most_ends"])


def _cells(found: Mapping[str, float]) -> list[str]:
    return [f"{found['nats']:.3f}", f"{found['shorter']:+.1%}", f"{found['longer']:+.1%}"]


if __name__ == "__main__":
    main()
