"""Honest work in every way to compute it: pairs of ways, counts, and no rejected pair."""

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from muster.inference.calibration_plan import VALIDATORS, WORKERS
from muster.inference.vllm.launcher import find_python
from muster.lab.redteam import honest
from muster.lab.redteam.cells import (
    ONE_LENGTH,
    RUNS,
    SEVERAL_LENGTHS,
    VLLM_RUNS,
    Cell,
    EngineWay,
    Panel,
    panels,
)
from muster.lab.redteam.gain import Terms
from muster.lab.redteam.report import Run, write_page
from muster.lab.redteam.runner import read_trials
from muster.lab.redteam.stage import Stage
from muster.protocol.errors import EngineError

ALL = RUNS + VLLM_RUNS
ROLLOUTS = 128
JUDGED = honest.Judged(
    run="r",
    worker="float32 batches of 7",
    strikes={"float32 eager attention": 1, "bfloat16 decoding with a cache": 1},
    number=3,
    prompts=ONE_LENGTH,
    rollouts=ROLLOUTS,
    rejected=2,
    is_fraud=False,
    cpu_s=0.5,
)


def test_bound_of_none_and_of_some() -> None:
    assert honest.upper_bound(0, 30_000) == pytest.approx(1e-4, rel=0.01)
    # Clopper-Pearson: 3 of 100 is at most 7.57 % with 95 % confidence.
    assert honest.upper_bound(3, 100) == pytest.approx(0.0757, abs=2e-4)


@pytest.mark.parametrize("engines", RUNS)
def test_all_ways_of_all_workers_meet_those_of_all_validators(engines: tuple[str, ...]) -> None:
    def names(ways: dict[str, tuple[object, ...]]) -> list[str]:
        kinds = [engine.split(":")[1] for engine in engines]
        return [f"{kind} {way.name}" for kind in kinds for way in ways["full"]]  # type: ignore[attr-defined]

    run = " + ".join(engines)
    crossed = {Cell(run, *pair) for pair in product(names(WORKERS), names(VALIDATORS))}
    assert {cell for panel in panels([engines]) for cell in panel.cells} == crossed


def test_runs_with_vllm_hold_what_vllm_has_a_part_in() -> None:
    cells = [cell for panel in panels(VLLM_RUNS) for cell in panel.cells]
    assert all("vLLM" in f"{cell.worker} {cell.validator}" for cell in cells)
    # 9 workers without vLLM before 3 validators with it; 3 workers with it before 7 without and 3
    # with it. Only one way of vLLM takes part where number formats are crossed.
    assert Counter(cell.run for cell in set(cells)) == {
        " + ".join(engines): count for engines, count in zip(VLLM_RUNS, (57, 57, 68), strict=True)
    }


@pytest.mark.parametrize(("runs", "cells"), [(RUNS, 378), (ALL, 560)])
def test_thirty_thousand_rollouts_visit_every_cell(
    runs: tuple[tuple[str, ...], ...], cells: int
) -> None:
    first_round = panels(runs)
    assert len({cell for panel in first_round for cell in panel.cells}) == cells
    assert len({panel.key for panel in first_round}) == len(first_round)
    assert len(first_round) * ROLLOUTS <= honest.WANTED


def test_validators_of_a_submission_compute_differently() -> None:
    assert all(len(set(panel.validators)) == len(panel.validators) for panel in panels(ALL))


def test_every_beginning_of_the_order_is_mixed() -> None:
    order = panels(ALL)
    shares = Counter(panel.engines for panel in order)
    for part in (order[: len(order) // 4], order[len(order) // 4 : len(order) // 2]):
        seen = Counter(panel.engines for panel in part)
        assert all(4 * seen[run] > share / 2 for run, share in shares.items())


def test_prompts_of_one_and_of_several_lengths_take_turns() -> None:
    first, second = (Counter(panel.prompts(turn) for panel in panels(ALL)) for turn in (0, 1))
    assert first == {ONE_LENGTH: second[SEVERAL_LENGTHS], SEVERAL_LENGTHS: second[ONE_LENGTH]}
    assert min(first.values()) > 0.4 * first.total()


def test_rows_are_read_back_and_are_no_trials(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text(json.dumps(JUDGED.line()) + "\n")
    assert honest.read_judged(record) == [JUDGED]
    assert read_trials(record) == []


def test_rollouts_are_counted_once_however_many_judge_them() -> None:
    result = honest.conclude_honest([JUDGED, replace(JUDGED, number=4, is_fraud=True)])
    assert (result.rollouts, result.judgements, result.cells) == (256, 512, 2)
    assert (result.rejected, result.slashed) == (4, 1)


@pytest.mark.parametrize(
    ("worker", "path"),
    [
        ("float32 batches of 7", "lean decoding"),
        ("float32 own, batches of 7", "the model's own forward pass"),
        ("float32 eager attention", "the model's own forward pass"),
        ("vLLM float32 batches of 7", "vLLM's own"),
    ],
)
def test_path_of_a_worker_is_what_computes(worker: str, path: str) -> None:
    margins = honest.honest_margins([replace(JUDGED, worker=worker)])
    assert [m.value for m in margins if m.dimension == "path" and m.rollouts] == [path]


def test_margins_add_up_in_every_dimension() -> None:
    margins = honest.honest_margins([JUDGED])
    found = {(m.dimension, m.value): (m.rollouts, m.judgements) for m in margins}
    assert found["attention", "sdpa"] == (128, 128)
    assert found["attention", "eager"] == (0, 128)
    assert found["samples computed together", "up to 7"] == (128, 0)
    assert found["path", "decoding with a cache"] == (0, 128)
    assert found["prompts", ONE_LENGTH] == (128, 256)
    assert found["formats crossed", "float32 judged in bfloat16"] == (0, 128)
    for dimension in {m.dimension for m in margins}:
        made = sum(m.rollouts for m in margins if m.dimension == dimension)
        assert made == (0 if dimension.endswith("crossed") else 128)
        assert sum(m.judgements for m in margins if m.dimension == dimension) == 256


def test_page_says_what_was_visited_and_what_was_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    run = Run("2 cores", "2026-11-22", "abc", Terms(1, 1, 500_000, 1))
    write_page(page, [], honest.conclude_honest([JUDGED]), run)
    text = page.read_text()
    assert "128 honest rollouts" in text
    assert "2 rejected" in text
    assert "| attention | eager |  | 128 |" in text
    assert "no GPU was measured" in text


def test_honest_work_is_not_rejected_and_a_record_is_gone_on_with(stage: Stage) -> None:
    runs = RUNS[:1]
    judged = list(honest.play_honest(stage, 6 * ROLLOUTS, runs=runs, profile="quick"))
    assert honest.conclude_honest(judged).rejected == 0
    assert {j.prompts for j in judged} == {ONE_LENGTH, SEVERAL_LENGTHS}
    assert len({cell for j in judged for cell in j.cells}) == 18
    told: list[tuple[int, int]] = []
    (further,) = honest.play_honest(
        stage, 7 * ROLLOUTS, runs=runs, profile="quick", done=judged,
        progress=lambda *seen: told.append(seen),
    )  # fmt: skip
    assert further.key not in {j.key for j in judged}
    assert told == [(7 * ROLLOUTS, 7 * ROLLOUTS)]


def test_a_number_format_that_no_calibration_covers_is_noticed(stage: Stage) -> None:
    """The matrix must fail for work in another format, or its success would prove nothing."""
    exact, coarse = (
        EngineWay(f"transformers:{kind}", WORKERS["full"][0]) for kind in ("float32", "bfloat16")
    )
    panel = Panel(("transformers:float32",), coarse, (exact, coarse), starts_ragged=False)
    judged = honest.HonestMatrix(stage, profile="quick").judge(panel, 0)
    assert judged.strikes[exact.name] > 0.9 * ROLLOUTS
    # Not 0: a product of few rows is summed in another order than one of many, and the limits for
    # float32 do not allow this difference.
    assert judged.strikes[coarse.name] < judged.strikes[exact.name]
    assert judged.rejected == judged.strikes[exact.name]
    assert judged.is_fraud


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_is_honest_before_transformers_and_they_before_it(stage: Stage) -> None:
    try:
        find_python()
    except EngineError as error:
        pytest.skip(f"no vLLM: {error}")
    judged = list(honest.play_honest(stage, 21 * ROLLOUTS, runs=VLLM_RUNS[:1], profile="quick"))
    result = honest.conclude_honest(judged)
    assert (result.rollouts, result.rejected, result.cells) == (21 * ROLLOUTS, 0, 57)


@pytest.mark.slow
def test_thirty_thousand_honest_rollouts(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    def tell(judged: int, wanted: int) -> None:
        if judged // ROLLOUTS % 10 == 0:
            with capsys.disabled():
                print(f"honest rollouts: {judged:,} of {wanted:,}", flush=True)  # noqa: T201

    result = honest.conclude_honest(list(honest.play_honest(stage, honest.WANTED, progress=tell)))
    assert result.rollouts >= honest.WANTED
    assert result.cells == len(
        {c for panel in panels(honest.installed_runs()) for c in panel.cells}
    )
    assert result.false_positive_upper <= 1e-4
    assert result.slashed == 0
