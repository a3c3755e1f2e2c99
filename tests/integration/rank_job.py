"""One trainer of N processes, forked from one that has imported everything; run as a script.

    rank_job.py JOB SIZE FOLDER [fail]

JOB is a function of this file. Rank 0 runs it and writes what it returns to FOLDER/JOB-SIZE.pt; the
other ranks follow. Exits 0 when all ranks do.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from muster.lifecycle.ports import free_port
from muster.protocol.encoding import keccak
from muster.protocol.errors import MusterError
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.recipe import FilterRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.base_model import WarmStart, build_base_model
from muster.trainer.checkpoint import Checkpoints, Identity, TrainerState
from muster.trainer.follow import follow
from muster.trainer.learner import Learner
from muster.trainer.parallel import ONE_PROCESS, Team, join
from muster.trainer.policies import BASE, PolicyShelf
from muster.trainer.stream import Cursor

IDENTITY = Identity(RunId(1), keccak(b"recipe"), 31337)


def recipe(**training: Any) -> Recipe:
    """A recipe in which every term of the loss counts."""
    filters = FilterRecipe(max_mismatch=training.pop("max_mismatch", 0.0))
    values = {
        "submissions_per_step": 1,
        "optimizer_steps": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1e9,
        "kl_coefficient": 0.05,
        "entropy_coefficient": 0.01,
        **training,
    }
    return Recipe(
        name="ranks",
        sampling=SamplingRecipe(
            problems_per_submission=1, samples_per_problem=4, temperature=0.8, max_new_tokens=12
        ),
        training=TrainingRecipe.model_validate(values),
        filters=filters,
    )


def groups(seed: int, count: int) -> list[list[Rollout]]:
    """Groups of very different lengths, sampled by two policies."""
    rng = random.Random(seed)
    made = []
    for group in range(count):
        prompt = tuple(rng.randrange(3, 13) for _ in range(rng.randrange(2, 9)))
        longest = rng.choice((2, 5, 11))
        rows = []
        for sample in range(4):
            body = tuple(rng.randrange(3, 13) for _ in range(rng.randrange(1, longest + 1)))
            rows.append(
                Rollout(
                    f"p{group}",
                    group,
                    sample,
                    rng.getrandbits(64),
                    -1,
                    group % 2,
                    prompt,
                    (*body, 1),
                    b"proof",
                    float(sample % 2),
                )
            )
        made.append(rows)
    return made


class Job:
    """What a job works with; the same in a trainer of one process."""

    def __init__(
        self, team: Team | None, folder: Path, state: str = "state", **training: Any
    ) -> None:
        self.shelf = PolicyShelf(folder / f"policies-{team.size if team else 1}", in_memory=8)
        self.shelf.adopt(folder / "model")
        base = self.shelf.weights(BASE)
        generator = torch.Generator().manual_seed(1)
        noisy = {
            n: w + 0.05 * torch.randn(w.shape, generator=generator) for n, w in sorted(base.items())
        }
        self.shelf.write(PolicyVersion(1), noisy)
        budget = training.pop("micro_batch_tokens", 60)
        dtype = training.pop("compute_dtype", "float32")
        self.learner = Learner(
            self.shelf.path(BASE),
            recipe(**training),
            published=self.shelf.weights,
            micro_batch_tokens=budget,
            compute_dtype=dtype,
            team=team,
        )
        self.checkpoints = Checkpoints(
            folder / "state" / state, IDENTITY, keep=9, ranks=team or ONE_PROCESS
        )

    def flat(self) -> torch.Tensor:
        """Return all weights as one vector."""
        weights = self.learner.weights()
        return torch.cat([weights[name].detach().flatten() for name in sorted(weights)])

    def save(self, version: int) -> None:
        """Write a checkpoint and wait for it."""
        state = TrainerState(PolicyVersion(version), Cursor(2 * version), 0, 0)
        self.checkpoints.save(state, self.learner.state()).result(60)


def _plain(figures: Any) -> dict[str, float]:
    names = ("loss", "grad_norm", "entropy", "kl", "tokens", "samples", "mean_ratio", "max_ratio")
    return {name: float(getattr(figures, name)) for name in names}


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "more groups than ranks": (8, {}),
    "fewer groups than ranks": (3, {}),
    "one group": (1, {}),
    "a sample at a time": (8, {"micro_batch_tokens": 1}),
    "without mismatching samples": (8, {"max_mismatch": 0.3}),
    "bfloat16": (8, {"compute_dtype": "bfloat16"}),
}
"""Groups in a step, and how it is computed."""


def gradients(team: Team | None, folder: Path) -> Any:
    """The first optimiser step of every variant; its checkpoint has the gradient in it."""
    found = {}
    for version, (name, (count, options)) in enumerate(VARIANTS.items()):
        job = Job(team, folder, state=f"gradients-{team.size if team else 1}", **options)
        figures = job.learner.step(Step(1), groups(5, count))
        job.save(version)
        job.checkpoints.close()
        found[name] = _plain(figures)
    return found


def saves(team: Team | None, folder: Path) -> Any:
    """Two steps, a checkpoint, a third step: what other sizes go on from."""
    job = Job(team, folder, state=f"saves-{team.size if team else 1}", optimizer_steps=2)
    for number in (1, 2):
        job.learner.step(Step(number), groups(number, 3))
    job.save(2)
    job.learner.step(Step(3), groups(3, 5))
    return job.flat()


def resumes(team: Team | None, folder: Path) -> Any:
    """The third step from the checkpoints of one, two and four ranks."""
    found = {}
    for size in (1, 2, 4):
        job = Job(team, folder, state=f"saves-{size}", optimizer_steps=2)
        saved = job.checkpoints.newest()
        assert saved is not None
        job.learner.restore(job.checkpoints.read(saved.folder, job.learner))
        job.learner.step(Step(3), groups(3, 5))
        found[size] = job.flat()
        job.checkpoints.close()
    return found


def idles(team: Team | None, folder: Path) -> Any:
    """A leader that waits long for records, and says so."""
    assert team is not None
    job = Job(team, folder)
    for _ in range(6):
        time.sleep(0.5)
        team.lead("beat")
    return job.flat()


def dies(team: Team | None, folder: Path) -> Any:
    """A leader that trains for ever; somebody is killed meanwhile."""
    job = Job(team, folder)
    number = 0
    while True:
        number += 1
        job.learner.step(Step(number), groups(number, 4))
        (folder / "steps").write_text(str(number))


def _rank(job: Callable[[Team | None, Path], Any], rank: int, size: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    timeout_s = float(os.environ.get("RANK_TIMEOUT_S", "60"))
    team = join(torch.device("cpu"), timeout_s)
    if rank:
        assert team is not None
        follow(team, "cpu")
    else:
        result = job(team, folder)
        torch.save(result, folder / f"{job.__name__}-{size}.pt")
        if team is not None:
            team.lead("stop")


def _child(job: Callable[[Team | None, Path], Any], rank: int, size: int, folder: Path) -> None:
    code = 0
    try:
        _rank(job, rank, size, folder)
    except MusterError as error:
        sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
        code = 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 2
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    """Fork the ranks and wait for them; prints their pids."""
    name, sizes, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if not (folder / "model").exists():
        torch.set_num_threads(1)
        build_base_model(folder / "model", seed=0, warm_start=WarmStart(steps=10, batch=32))
    worst = 0
    for part in name.split(","):
        for size in map(int, sizes.split(",")):
            worst = max(worst, _run(globals()[part], size, folder))
    return worst


def _run(job: Callable[[Team | None, Path], Any], size: int, folder: Path) -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    pids = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            _child(job, rank, size, folder)
        pids.append(pid)
    (folder / "pids").write_text(" ".join(map(str, pids)))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    (folder / "codes").write_text(" ".join(map(str, codes)))
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(abs(main()))
