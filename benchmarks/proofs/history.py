"""The sequential test over a worker's submissions: false alarms, delay, and the bias that survives.

    make bench-history

1. False alarms: workers exactly as bad as honest ones may be, a group's flips all alike.
2. Five calibrated models (`make bench-calibration` first): paths of 128 tokens, their logits as a
   worker decodes and as a validator prefills them. Submissions of 128 samples are simulated on
   these paths with fresh noise by workers that add a bias to the score of EOS or of another token.
   The bias that survives is the largest of a grid that is not found within a window of submissions.
   Proof errors are left out: they only help to find a worker.

Writes results/history.json, case by case.
"""

import argparse
import json
import random as plain_random
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from benchmarks.proofs import base_models
from benchmarks.proofs.calibration import folder_of
from benchmarks.report import RESULTS, machine, print_table, write
from transformers import DynamicCache

from muster.inference.calibrated_limits import history_limits
from muster.inference.forward import pad_left
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.toploc.sequential_test import (
    SUBMISSIONS_A_YEAR,
    WINDOW,
    Conduct,
    Flip,
    HistoryLimits,
    WorkerHistory,
)

LIMITS = HistoryLimits(honest_strain=0.1, honest_loss=0.01, honest_lean=0.25, false_alarm=0.99)
"""A false-alarm bound that a simulation can verify; the default of 1e-6 would need far more
runs."""
WORKERS, SUBMISSIONS, GROUPS, SAMPLES = 100, 500, 8, 16
PROMPTS, PATHS, TOKENS = 16, 4, 128
CASES = ("4x256:bfloat16", "8x512:bfloat16", "2x64:float32", "4x256:float32", "8x512:float32")
REFUSED = ("2x64:bfloat16",)
BIASES = (0.002, 0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.5, 0.8, 1.78)
TRIES, LEAST = 2, 6
"""Workers of each kind, and fewest submissions of each."""

Logits = npt.NDArray[np.float32]


def alarms(conducts: list[Conduct]) -> bool:
    """Whether a worker alarms after any of its submissions."""
    history = WorkerHistory()
    for conduct in conducts:
        history = history.after(conduct, LIMITS)
        if history.alarms(LIMITS):
            return True
    return False


# 1. False alarms


def worst_honest(together: float, random: np.random.Generator) -> list[Conduct]:
    """Return submissions whose means equal the bounds; all flips of a group follow one coin."""
    spread = (1 - together) / together
    mean, loss = LIMITS.honest_strain, LIMITS.honest_loss
    strains = random.beta(mean * spread, (1 - mean) * spread, SUBMISSIONS)
    losses = random.beta(loss * spread, (1 - loss) * spread, SUBMISSIONS)
    coins = random.random((SUBMISSIONS, GROUPS)) < (1 + LIMITS.honest_lean) / 2
    counts = random.poisson(3, (SUBMISSIONS, GROUPS))
    flip = {True: Flip(1, 2, 1, 1), False: Flip(2, 1, -1, -1)}
    return [
        Conduct(s, x, tuple((flip[bool(c)],) * n for c, n in zip(coin, many, strict=True)))
        for s, x, coin, many in zip(strains, losses, coins, counts, strict=True)
    ]


def false_alarms(together: float, random: np.random.Generator) -> int:
    """Return how many honest workers alarm."""
    return sum(alarms(worst_honest(together, random)) for _ in range(WORKERS))


# 2. What survives


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model's paths: what a worker and a validator compute of them."""

    worker_PTV: Logits
    """By the worker, decoding."""
    validator_PTV: Logits
    """By the validator, of one prefill."""
    eos: int
    """The token that ends."""
    given: int
    """The most frequent token of the paths."""
    margin: float
    """The calibrated margin."""
    limits: HistoryLimits
    """Of the sequential test."""
    worst: tuple[float, float]
    """Largest honest margins seen: as computed, and with the head in float32."""


def measure(name: str) -> Case:
    """Return the paths of a calibrated model."""
    known = json.loads((RESULTS / "calibration.json").read_text())["detail"][name]["limits"]
    size, dtype = name.split(":")
    engine = TransformersEngine(dtype)  # type: ignore[arg-type]
    engine.load_policy(folder_of(size), PolicyVersion(0))
    rng = plain_random.Random(2)
    prompts = [engine.encode(base_models.prompt(rng)) for _ in range(PROMPTS)]
    asked = [prompt for prompt in prompts for _ in range(PATHS)]
    (eos,) = engine.eos_token_ids
    tokens_PT, worker, hidden = decode(engine, asked, eos)
    computed = engine.recompute(list(zip(asked, map(tuple, tokens_PT.tolist()), strict=True)))
    validator = np.stack([each.logits_TV for each in computed])
    head = engine.forward.head.get_parameter("weight").detach().float().numpy().T
    bits = np.stack([each.hidden_TH for each in computed]).astype(np.uint32) << 16
    exact = (hidden @ head, bits.view(np.float32) @ head) if dtype == "bfloat16" else None
    random = np.random.default_rng(3)
    margin = known["sampler"]["margin"]
    margins = redrawn(worker, validator, random)
    sharper = redrawn(*exact, random) if exact else margins
    loss = float((np.minimum(margins, margin) / margin).mean())
    odds = [
        np.exp(x - np.logaddexp.reduce(x, axis=2, keepdims=True))[..., eos]
        for x in (worker, validator)
    ]
    shift = np.where(np.abs(odds[0] - odds[1]) > 1e-9, odds[0] - odds[1], 0.0)
    lean = abs(shift.sum()) / max(1e-12, np.abs(shift).sum())
    limits = history_limits([known["history"]["honest_strain"] / 2], [loss], [float(lean)])
    given = int(np.bincount(tokens_PT.ravel()).argmax())
    worst = (float(margins.max()), float(sharper.max()))
    return Case(worker, validator, eos, given, margin, limits, worst)


def decode(
    engine: TransformersEngine, prompts: list[tuple[int, ...]], eos: int
) -> tuple[npt.NDArray[np.int64], Logits, Logits]:
    """Return tokens [P, T] sampled without EOS, their logits and hidden states, step by step."""
    random, forward = np.random.default_rng(1), engine.forward
    rows_PL, mask_PL = pad_left(prompts)
    mask_PL = np.ones_like(rows_PL) if mask_PL is None else mask_PL
    cache, made, logits, hidden = DynamicCache(config=forward.model.config), [], [], []
    fed, positions = rows_PL, np.maximum(mask_PL.cumsum(axis=1) - 1, 0)
    with torch.inference_mode():
        for _ in range(TOKENS):
            h, s = forward(fed, keep=1, cache=cache, mask=mask_PL, positions_RL=positions)
            scores = s[:, 0].numpy()
            logits.append(scores)
            hidden.append(h[:, 0].float().numpy())
            noisy = scores + random.gumbel(size=scores.shape)
            noisy[:, eos] = -np.inf
            fed = noisy.argmax(axis=1)[:, None]
            made.append(fed[:, 0])
            mask_PL = np.concatenate([mask_PL, np.ones_like(fed)], axis=1)
            positions = positions[:, -1:] + 1
    return np.stack(made, axis=1), np.stack(logits, axis=1), np.stack(hidden, axis=1)


def gumbel(shape: tuple[int, ...], random: np.random.Generator) -> Logits:
    """Return fresh noise, finite."""
    waits = random.standard_exponential(shape, np.float32)
    noise: Logits = -np.log(np.maximum(waits, np.float32(1e-30)))
    return noise


def redrawn(own: Logits, other: Logits, random: np.random.Generator) -> Logits:
    """Return the margins of four fresh choices at every token."""
    found = []
    for _ in range(4):
        noise = gumbel(own.shape, random)
        chosen = (own + noise).argmax(axis=2)[..., None]
        scores = other + noise
        found.append(scores.max(axis=2) - np.take_along_axis(scores, chosen, 2)[..., 0])
    return np.stack(found)


def submit(
    case: Case, token: int, bias: float, random: np.random.Generator
) -> tuple[Conduct, float, float]:
    """Return a submission's conduct, its mean length, and the share of `token` in it."""
    prompts = random.choice(PROMPTS, GROUPS, replace=False)
    paths = (prompts[:, None] * PATHS + random.integers(0, PATHS, (GROUPS, SAMPLES))).ravel()
    own, other = case.worker_PTV[paths], case.validator_PTV[paths]
    noise = gumbel(own.shape, random)
    scores, wanted = other + noise, own + noise
    wanted[..., token] += bias
    chosen, expected = wanted.argmax(axis=2), scores.argmax(axis=2)
    ends = chosen == case.eos
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, TOKENS)
    is_there = np.arange(TOKENS) < lengths[:, None]
    given_up = scores.max(axis=2) - np.take_along_axis(scores, chosen[..., None], 2)[..., 0]
    shares = np.minimum(given_up / case.margin, 1.0) * is_there
    groups: list[list[Flip]] = [[] for _ in range(GROUPS)]
    for row, at in np.argwhere((chosen != expected) & is_there):
        c, e = int(chosen[row, at]), int(expected[row, at])
        likelier = 1 if other[row, at, c] > other[row, at, e] else -1
        groups[row // SAMPLES].append(Flip(c, e, (c == case.eos) - (e == case.eos), likelier))
    conduct = Conduct(
        float(shares.max(axis=1).mean()),
        float(shares.sum() / is_there.sum()),
        tuple(map(tuple, groups)),
    )
    said = float(((chosen == token) & is_there).sum() / is_there.sum())
    return conduct, float(lengths.mean()), said


@dataclass(frozen=True, slots=True)
class Played:
    """Workers with one bias."""

    bias: float
    """In nats, towards the token."""
    alarms: list[int | None]
    """After how many submissions each alarms."""
    length: float
    """Mean length of their completions."""
    said: float
    """Share of the token."""

    def find(self) -> str:
        """Return the median delay in words."""
        known = [WINDOW + 1 if alarm is None else alarm for alarm in self.alarms]
        middle = statistics.median(known)
        return f"{middle:g}" if middle <= WINDOW else "never"


def play(case: Case, token: int, bias: float, share: float = 1.0) -> Played:
    """Simulate workers with a bias in a share of their submissions."""
    random = np.random.default_rng(4)
    alarms: list[int | None] = []
    lengths, said = [], []
    for _ in range(TRIES):
        history, alarm = WorkerHistory(), None
        for number in range(1, WINDOW + 1):
            is_biased = random.random() < share
            conduct, length, there = submit(case, token, bias if is_biased else 0.0, random)
            lengths.append(length)
            said.append(there)
            history = history.after(conduct, case.limits)
            if alarm is None and history.alarms(case.limits):
                alarm = number
            if alarm is not None and number >= LEAST:
                break
        alarms.append(alarm)
    return Played(bias, alarms, float(np.mean(lengths)), float(np.mean(said)))


def survivor(case: Case, token: int, sign: int) -> tuple[Played, Played]:
    """Return workers with a bias of the whole margin, and those with the largest undetected
    bias."""
    whole = play(case, token, sign * case.margin)
    if whole.find() == "never":
        return whole, whole
    best, grid = play(case, token, 0.0), [bias for bias in BIASES if bias < case.margin]
    low, high = -1, len(grid)
    while high - low > 1:
        middle = (low + high) // 2
        tried = play(case, token, sign * grid[middle])
        if tried.find() == "never":
            low, best = middle, tried
        else:
            high = middle
    return whole, best


def study(name: str) -> dict[str, Any]:
    """Return one model's figures."""
    case = measure(name)
    honest = play(case, case.eos, 0.0)
    found: dict[str, Any] = {
        "margin": case.margin,
        "worst_margin": case.worst[0],
        "worst_margin_float32_head": case.worst[1],
        "limits": case.limits.model_dump(),
        "honest": {"length": honest.length, "alarms": sum(a is not None for a in honest.alarms)},
    }
    sides = {"shorter": (case.eos, 1), "longer": (case.eos, -1), "given": (case.given, 1)}
    for side, (token, sign) in sides.items():
        whole, best = survivor(case, token, sign)
        fair = play(case, token, 0.0) if token == case.given else honest
        found[side] = {
            "before": {"bias": whole.bias, "length": whole.length, "said": whole.said},
            "delay": whole.find(),
            "after": {"bias": best.bias, "length": best.length, "said": best.said},
            "honest_said": fair.said,
        }
    rare = play(case, case.eos, -case.margin, share=0.1)
    found["one in ten"] = {"delay": rare.find(), "length": rare.length}
    turns = [play(case, case.eos, sign * case.margin / 4).find() for sign in (1, -1)]
    found["quarter of the margin"] = turns
    return found


def row(name: str, found: dict[str, Any]) -> list[str]:
    """Return one model's row of the table."""
    honest = found["honest"]["length"]

    def percent(side: str, when: str) -> str:
        if side == "given":
            change = found[side][when]["said"] / found[side]["honest_said"]
        else:
            change = found[side][when]["length"] / honest
        return f"{100 * (change - 1):+.1f} %"

    cells = [name, f"{found['margin']:.3g}", f"{honest:.1f}"]
    for side in ("shorter", "longer", "given"):
        cells.append(
            f"{percent(side, 'before')} → {abs(found[side]['after']['bias']):g}, "
            f"{percent(side, 'after')} (found after {found[side]['delay']})"
        )
    return cells


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[*CASES, *REFUSED])
    given = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    honest = {together: false_alarms(together, random) for together in (0.02, 0.3)}
    bound = SUBMISSIONS / SUBMISSIONS_A_YEAR / LIMITS.false_alarm
    rows = [
        [f"{together:g}", f"{alarms} of {WORKERS}", f"{bound * WORKERS:.2g}"]
        for together, alarms in honest.items()
    ]
    header = ["spread of strain and loss", "honest workers that alarm", "bound"]
    print_table(f"False alarms in {SUBMISSIONS} submissions at the bounds", header, rows)
    cases: dict[str, Any] = {}
    for name in given.cases:
        found = study(name)
        print(name, json.dumps(found), flush=True)
        cases = {**_known(), name: found}
        save(honest, cases)
    header = ["model", "margin", "mean length", "shorter", "longer", "given token"]
    print_table(
        "Bias by the whole margin → the most that is not found in 64 submissions, nats",
        header,
        [row(name, found) for name, found in cases.items()],
    )


def _known() -> dict[str, Any]:
    path = RESULTS / "history.json"
    known: dict[str, Any] = json.loads(path.read_text())["detail"].get("cases", {})
    return known


def save(honest: dict[float, int], cases: dict[str, Any]) -> None:
    """Write what is known."""
    detail = {"honest": honest, "workers": WORKERS, "submissions": SUBMISSIONS, "cases": cases}
    metrics = {
        "false_alarm_rate": max(honest.values()) / WORKERS,
        "surviving_bias_max": max(
            abs(cases[name][side]["after"]["bias"])
            for name in set(CASES) & set(cases)
            for side in ("shorter", "longer", "given")
        ),
    }
    write("history", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    main()
