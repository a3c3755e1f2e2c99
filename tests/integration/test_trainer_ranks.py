"""A trainer of two and four processes: one process's gradients, its checkpoints, and its deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_job import IDENTITY, VARIANTS
from torch import Tensor

from muster.trainer.checkpoint import Checkpoints

JOB = Path(__file__).with_name("rank_job.py")
SIZES = (1, 2, 4)


async def _run(words: str, folder: Path, timeout_s: float = 480, **env: str) -> tuple[int, str]:
    process = await _start(words, folder, **env)
    async with asyncio.timeout(timeout_s):
        _, errors = await process.communicate()
    return process.returncode or 0, errors.decode()


async def _start(words: str, folder: Path, **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", str(JOB), *words.split(), str(folder)),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one, two and four ranks computed."""
    folder = tmp_path_factory.mktemp("ranks")
    code, errors = asyncio.run(_run("gradients,saves 1,2,4", folder))
    assert code == 0, errors
    code, errors = asyncio.run(_run("resumes 1,2,4", folder))
    assert code == 0, errors
    return folder


class _Everything:
    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {n: torch.zeros(size) for n, size in sizes.items() if n.startswith("optimizer.")}


def _gradient(folder: Path, size: int, variant: str) -> Tensor:
    """Return the gradient of the first optimiser step, out of AdamW's mean of gradients."""
    version = list(VARIANTS).index(variant)
    path = folder / "state" / f"gradients-{size}"
    checkpoints = Checkpoints(path, IDENTITY)
    read = checkpoints.read(path / str(version), _Everything())
    checkpoints.close()
    means = [value for name, value in sorted(read.items()) if name.endswith(".exp_avg")]
    return torch.cat([mean.flatten() for mean in means]) / 0.1


def _load(folder: Path, job: str, size: int) -> Any:
    return torch.load(folder / f"{job}-{size}.pt", weights_only=True)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "bfloat16"])
@pytest.mark.parametrize("size", [2, 4])
def test_gradient_is_that_of_one_process(results: Path, size: int, variant: str) -> None:
    one, many = _gradient(results, 1, variant), _gradient(results, size, variant)
    assert float(one.norm()) > 0.01
    assert float((many - one).norm() / one.norm()) < 1e-6


def test_gradient_does_not_depend_on_micro_batches(results: Path) -> None:
    packed = _gradient(results, 1, "more groups than ranks")
    for size in SIZES:
        single = _gradient(results, size, "a sample at a time")
        assert float((single - packed).norm() / packed.norm()) < 1e-6


@pytest.mark.parametrize("size", [2, 4])
def test_figures_are_those_of_one_process(results: Path, size: int) -> None:
    one, many = _load(results, "gradients", 1), _load(results, "gradients", size)
    for variant in VARIANTS:
        tolerance = 5e-2 if variant == "bfloat16" else 2e-6
        assert many[variant] == pytest.approx(one[variant], rel=tolerance, abs=1e-6), variant


def test_mismatch_is_looked_for_on_all_ranks(results: Path) -> None:
    found = _load(results, "gradients", 4)
    assert found["without mismatching samples"]["samples"] > 0
    assert found["without mismatching samples"]["samples"] < found["bfloat16"]["samples"]


def test_fillers_of_ranks_without_work_count_for_nothing(results: Path) -> None:
    # One group on four ranks: three of them compute fillers only.
    one, four = (_load(results, "gradients", size)["one group"] for size in (1, 4))
    assert four["tokens"] == one["tokens"]
    assert four["samples"] == one["samples"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bfloat16_is_close_to_float32(results: Path, size: int) -> None:
    full = _gradient(results, 1, "more groups than ranks")
    short = _gradient(results, size, "bfloat16")
    assert float((short - full).norm() / full.norm()) < 0.05
    assert short.dtype == torch.float32


@pytest.mark.parametrize("size", SIZES)
def test_resumed_at_the_same_size_it_is_the_same_bit_by_bit(results: Path, size: int) -> None:
    resumed = _load(results, "resumes", size)[size]
    assert torch.equal(resumed, _load(results, "saves", size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("saved", SIZES)
def test_resumed_at_another_size_it_is_the_same_within_rounding(
    results: Path, size: int, saved: int
) -> None:
    resumed = _load(results, "resumes", size)[saved]
    through = _load(results, "saves", saved)
    assert float((resumed - through).norm() / through.norm()) < 1e-6


async def test_waiting_leader_is_not_given_up(results: Path) -> None:
    # Waits three seconds for records; one without a word would be given up after one and a half.
    code, errors = await _run("idles 2", results, RANK_TIMEOUT_S="1.5")
    assert code == 0, errors


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_death_of_a_rank_ends_all_with_a_clear_error(
    results: Path, tmp_path: Path, victim: int
) -> None:
    (tmp_path / "model").symlink_to(results / "model")
    process = await _start("dies 3", tmp_path)
    async with asyncio.timeout(120):
        while not (tmp_path / "steps").exists():
            await asyncio.sleep(0.02)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    os.kill(pids[victim], signal.SIGKILL)
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    codes = [int(code) for code in (tmp_path / "codes").read_text().split()]
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [1, 1]
    assert errors.decode().count("RankLost: waited in vain for") == 2
