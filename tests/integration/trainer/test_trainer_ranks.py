"""A trainer of two and four processes: one process's gradients, its checkpoints, and its deaths.

They have rows of their own or share them: `4-by-2` are four ranks of which two share rows.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from rank_job import IDENTITY, LATE, SAVED, VARIANTS, Order, label, variants
from torch import Tensor

from muster.trainer.recover.checkpoint import Checkpoints

JOB = Path(__file__).with_name("rank_job.py")
WAYS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4))
"""Ranks, and how many of them share rows."""
LABELS = [label(*way) for way in WAYS]
SEVERAL = LABELS[1:]
SHORT = {"bfloat16": "more groups than ranks", "an adapter in bfloat16": "an adapter"}
"""Variants that compute in bfloat16, and those that compute the same in float32."""
COMPUTED = [(label(*way), name) for way in WAYS[1:] for name in variants(*way) if name not in SHORT]


@pytest.fixture(scope="module")
def ranks() -> Iterator[IO[bytes]]:
    """A process that has imported everything and takes orders."""
    process = subprocess.Popen(
        (sys.executable, "-W", "ignore", str(JOB)),
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        bufsize=0,
    )
    assert process.stdin is not None
    yield process.stdin
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()


async def _appears(path: Path, timeout_s: float) -> str:
    """Return the content of a file as soon as it exists."""
    async with asyncio.timeout(timeout_s):
        while not path.exists():
            await asyncio.sleep(0.02)
    return path.read_text()


async def _ended(folder: Path, timeout_s: float) -> tuple[list[int], str]:
    """Return the exit codes of the ranks, and their stderr."""
    codes = await _appears(folder / "codes", timeout_s)
    return [int(code) for code in codes.split()], (folder / "errors").read_text()


@pytest.fixture(scope="module")
def results(ranks: IO[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one, two and four ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    plan = [
        (["gradients", "tunes", "breaks", *["saves"] * (label(*way) in SAVED)], *way)
        for way in WAYS
    ]
    plan[0][0].append("holds")
    plan[1][0].extend(["holds", "rolls_back"])
    plan += [(["resumes"], *way) for way in WAYS if label(*way) in SAVED]
    ranks.write(Order(str(folder), plan).line())
    codes, errors = asyncio.run(_ended(folder, 480))
    assert codes == [0, 0, 0, 0], errors
    return folder


class _Everything:
    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {n: torch.zeros(size) for n, size in sizes.items() if n.startswith("optimizer.")}


def _gradient(folder: Path, size: str, variant: str) -> Tensor:
    """Return the gradient of the first optimiser step, from AdamW's first moment."""
    version = list(VARIANTS).index(variant)
    path = folder / "state" / f"gradients-{size}"
    checkpoints = Checkpoints(path, IDENTITY)
    read = checkpoints.read(path / str(version), _Everything())
    checkpoints.close()
    means = [value for name, value in sorted(read.items()) if name.endswith(".exp_avg")]
    return torch.cat([mean.flatten() for mean in means]) / 0.1


def _load(folder: Path, job: str, size: str) -> Any:
    return torch.load(folder / f"{job}-{size}.pt", weights_only=True)


@pytest.mark.parametrize(("size", "variant"), COMPUTED)
def test_gradient_is_that_of_one_process(results: Path, size: str, variant: str) -> None:
    one, many = _gradient(results, "1", variant), _gradient(results, size, variant)
    assert float(one.norm()) > 0.01
    assert float((many - one).norm() / one.norm()) < 1e-6


def test_gradient_does_not_depend_on_micro_batches(results: Path) -> None:
    packed = _gradient(results, "1", "more groups than ranks")
    for size in LABELS[:-2]:
        single = _gradient(results, size, "a sample at a time")
        assert float((single - packed).norm() / packed.norm()) < 1e-6


@pytest.mark.parametrize("size", SEVERAL)
def test_figures_are_those_of_one_process(results: Path, size: str) -> None:
    one, many = _load(results, "gradients", "1"), _load(results, "gradients", size)
    for variant in many:
        tolerance = 5e-2 if variant in SHORT else 2e-6
        assert many[variant] == pytest.approx(one[variant], rel=tolerance, abs=1e-6), variant


def test_mismatch_is_looked_for_on_all_ranks(results: Path) -> None:
    found = _load(results, "gradients", "4")
    assert found["without mismatching samples"]["samples"] > 0
    assert found["without mismatching samples"]["samples"] < found["bfloat16"]["samples"]


def test_fillers_of_ranks_without_work_count_for_nothing(results: Path) -> None:
    # One group on four ranks: three of them compute fillers only.
    one, four = (_load(results, "gradients", size)["one group"] for size in ("1", "4"))
    assert four["tokens"] == one["tokens"]
    assert four["samples"] == one["samples"]


@pytest.mark.parametrize("variant", SHORT)
@pytest.mark.parametrize("size", LABELS[:-2])
def test_bfloat16_is_close_to_float32(results: Path, size: str, variant: str) -> None:
    full = _gradient(results, "1", SHORT[variant])
    short = _gradient(results, size, variant)
    assert float((short - full).norm() / full.norm()) < 0.05
    assert short.dtype == torch.float32


@pytest.mark.parametrize("size", ["1", "2"])
def test_adapted_base_is_held_in_the_compute_format(results: Path, size: str) -> None:
    held = _load(results, "holds", size)
    assert (set(held["trained"]), set(held["others"])) == ({4}, {2})


@pytest.mark.parametrize("size", SEVERAL)
def test_fine_tuning_is_that_of_one_process(results: Path, size: str) -> None:
    one, many = _load(results, "tunes", "1"), _load(results, "tunes", size)
    assert one["losses"][1] < one["losses"][0]
    assert many["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert many["held_out"] == pytest.approx(one["held_out"], rel=2e-6)
    assert float((many["weights"] - one["weights"]).abs().max()) < 2e-5


@pytest.mark.parametrize("size", SAVED)
def test_resumed_at_the_same_size_it_is_the_same_bit_by_bit(results: Path, size: str) -> None:
    resumed = _load(results, "resumes", size)[size]
    assert torch.equal(resumed, _load(results, "saves", size)["through"])


@pytest.mark.parametrize("size", SAVED)
@pytest.mark.parametrize("saved", SAVED)
def test_resumed_at_another_size_it_is_the_same_within_rounding(
    results: Path, size: str, saved: str
) -> None:
    resumed = _load(results, "resumes", size)[saved]
    through = _load(results, "saves", saved)["through"]
    assert float((resumed - through).norm() / through.norm()) < 1e-6


@pytest.mark.parametrize("trained", ["all weights", "an adapter"])
def test_rollback_to_the_base_model_forgets_what_came_before(results: Path, trained: str) -> None:
    rolled, fresh = _load(results, "rolls_back", "2")[trained]
    for number in range(2):
        assert torch.equal(rolled[number], fresh[number])
    assert not torch.equal(*rolled)


@pytest.mark.parametrize("size", LABELS)
def test_what_is_not_finite_is_found_at_whichever_rank(results: Path, size: str) -> None:
    assert _load(results, "breaks", size) == [None, LATE, "logits"]


@pytest.mark.parametrize("size", SAVED)
def test_policy_gathered_beside_the_next_step_is_the_one_before_it(
    results: Path, size: str
) -> None:
    found = _load(results, "saves", size)
    assert torch.equal(found["written"], found["learned"])
    assert not torch.equal(found["learned"], found["through"])


async def test_waiting_leader_is_not_given_up(
    ranks: IO[bytes], results: Path, tmp_path: Path
) -> None:
    # Does each for two seconds; a silent rank would be given up after one and a half.
    (tmp_path / "model").symlink_to(results / "model")
    ranks.write(Order(str(tmp_path), [(["idles"], 2, 1)], timeout_s=1.5).line())
    codes, errors = await _ended(tmp_path, 120)
    assert codes == [0, 0], errors


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_death_of_a_rank_ends_all_with_a_clear_error(
    ranks: IO[bytes], results: Path, tmp_path: Path, victim: int
) -> None:
    (tmp_path / "model").symlink_to(results / "model")
    ranks.write(Order(str(tmp_path), [(["dies"], 3, 1)], timeout_s=60).line())
    await _appears(tmp_path / "steps", 120)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    os.kill(pids[victim], signal.SIGKILL)
    codes, errors = await _ended(tmp_path, 60)
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [1, 1]
    assert errors.count("RankLost: waiting for") == 2
