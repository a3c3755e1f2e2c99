"""The gate: kill -9 at random moments, and the policy is the one of an undisturbed trainer."""

from pathlib import Path

import pytest
from trainer_kills import kill_and_compare, killable


@pytest.mark.parametrize(("kills", "steps"), [(4, 8), pytest.param(30, 60, marks=pytest.mark.slow)])
async def test_killed_trainer_leaves_the_run_of_an_undisturbed_one(
    tmp_path: Path, kills: int, steps: int
) -> None:
    async with killable(tmp_path, steps=steps) as trainers:
        report = await kill_and_compare(trainers, kills=kills, seed=kills)
    assert report.kills == kills
    assert report.identical
    assert report.consumed_once
