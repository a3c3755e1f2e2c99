"""Trainers of N processes, forked from one that has imported everything; run as a script.

Each line of stdin is an `Order`, as JSON. Its ranks are forked, their stderr is FOLDER/errors, and
when all have ended their exit codes are in FOLDER/codes. The script ends when stdin does.
"""

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from muster.lifecycle import free_port
from muster.protocol.encoding import keccak
from muster.protocol.errors import MusterError
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.recipe import (
    AdapterRecipe,
    FilterRecipe,
    Recipe,
    SamplingRecipe,
    TrainingRecipe,
)
from muster.protocol.rollouts import Rollout
from muster.protocol.sft import SftRecipe
from muster.trainer.base_model import WarmStart, build_base_model
from muster.trainer.learn.follow import follow
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.learn.parallel import ONE_PROCESS, Team, join
from muster.trainer.learn.sft_learner import SftLearner
from muster.trainer.loop import Trainer
from muster.trainer.publish.policies import BASE, PolicyShelf
from muster.trainer.recover.checkpoint import Checkpoints, Identity, TrainerState
from muster.trainer.recover.collapse import Guard
from muster.trainer.stream.reader import Cursor


@dataclass(frozen=True, slots=True)
class Order:
    """Trainers that the same processes run, one after the other."""

    folder: str
    """Folder of all files; the base model is built when it is missing."""
    plan: list[tuple[list[str], int, int]]
    """Names of functions of this file, how many ranks run them, and how many of these share rows.
    Rank 0 runs a function and writes what it returns to FOLDER/NAME-LABEL.pt (`label`); the other
    ranks follow.
    """
    timeout_s: float = 120.0
    """Seconds after which a silent rank is given up."""

    def line(self) -> bytes:
        """Return the line that the script reads."""
        return json.dumps(asdict(self)).encode() + b"\n"


def label(ranks: int, context: int = 1) -> str:
    """Return what files of some ranks are called after, of which so many share rows."""
    return f"{ranks}" if context == 1 else f"{ranks}-by-{context}"


def _label(team: Team | None) -> str:
    return label(team.size, team.context) if team else label(1)


LATE = "model.layers.0.mlp.up_proj.weight"
"""A weight that ranks share out."""
SAVED = (label(1), label(2), label(4), label(4, 2))
"""Ranks whose checkpoints others go on from."""


IDENTITY = Identity(RunId(1), keccak(b"recipe"), 31337)


def recipe(**training: Any) -> Recipe:
    """A recipe in which every term of the loss counts."""
    filters = FilterRecipe(max_mismatch=training.pop("max_mismatch", 0.0))
    adapter = AdapterRecipe(rank=training.pop("rank", 0))
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
        adapter=adapter,
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
    """The parts of a job; the same in a trainer of one process."""

    def __init__(
        self, team: Team | None, folder: Path, state: str = "state", **training: Any
    ) -> None:
        self.shelf = PolicyShelf(folder / f"policies-{_label(team)}")
        self.shelf.adopt(folder / "model")
        base = self.shelf.weights(BASE)
        generator = torch.Generator().manual_seed(1)
        noisy = {
            n: w + 0.05 * torch.randn(w.shape, generator=generator) for n, w in sorted(base.items())
        }
        self.shelf.write(PolicyVersion(1), noisy)
        budget = training.pop("micro_batch_tokens", 60)
        dtype = training.pop("compute_dtype", "float32")
        recomputed = training.pop("recomputed", "none")
        optimizer_state = training.pop("optimizer_state", "float32")
        self.learner = Learner(
            self.shelf.path(BASE),
            recipe(**training),
            published=self.shelf.weights,
            micro_batch_tokens=budget,
            compute_dtype=dtype,
            recomputed=recomputed,
            optimizer_state=optimizer_state,
            team=team,
        )
        self.checkpoints = Checkpoints(
            folder / "state" / state, IDENTITY, keep=99, ranks=team or ONE_PROCESS
        )

    def flat(self) -> torch.Tensor:
        """Return all weights as one vector."""
        formats = dict.fromkeys(sorted(self.learner.weights()), torch.float32)
        return torch.cat([piece for _, piece in self.learner.pieces(formats)])

    def save(self, version: int) -> None:
        """Write a checkpoint and wait for it."""
        self.save_behind(version, first=lambda: None).result(60)

    def save_behind(self, version: int, *, first: Callable[[], object]) -> Future[None]:
        """Write a checkpoint in the background, after `first`."""
        state = TrainerState(PolicyVersion(version), Cursor(2 * version), 0, 0)
        learner = self.learner
        return self.checkpoints.save(state, learner.state(), first=first, release=learner.hold())


def _plain(figures: Any) -> dict[str, float]:
    names = ("loss", "grad_norm", "entropy", "kl", "tokens", "samples", "mean_ratio", "max_ratio")
    return {name: float(getattr(figures, name)) for name in names}


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "more groups than ranks": (5, {}),
    "fewer groups than ranks": (3, {}),
    "one group": (1, {}),
    "a sample at a time": (5, {"micro_batch_tokens": 1}),
    "without mismatching samples": (5, {"max_mismatch": 0.3}),
    "bfloat16": (5, {"compute_dtype": "bfloat16"}),
    "recomputed": (5, {"recomputed": "full"}),
    "an adapter": (5, {"rank": 4, "recomputed": "host"}),
    "an adapter in bfloat16": (5, {"rank": 4, "compute_dtype": "bfloat16"}),
    "a ratio per sample": (5, {"loss": "gspo", "aggregation": "sequence"}),
    "a sequence's correction": (5, {"decoupled": True, "correction_level": "sequence"}),
}
"""Each variant's number of groups in a step, and its settings."""
FEW = ("more groups than ranks", "one group", "an adapter", "a ratio per sample")
"""The variants for four ranks that share rows, which wait for one another most."""


def variants(ranks: int, context: int) -> list[str]:
    """Return the variants that some ranks compute, of which so many share rows."""
    return list(FEW if ranks == 4 and context > 1 else VARIANTS)


def gradients(team: Team | None, folder: Path) -> Any:
    """The first optimiser step of every variant; its checkpoint has the gradient in it."""
    found = {}
    ranks = team or ONE_PROCESS
    for name in variants(ranks.size, ranks.context):
        version, (count, options) = list(VARIANTS).index(name), VARIANTS[name]
        job = Job(team, folder, state=f"gradients-{_label(team)}", **options)
        figures = job.learner.step(Step(1), groups(5, count))
        job.save(version)
        job.checkpoints.close()
        found[name] = _plain(figures)
    return found


def holds(team: Team | None, folder: Path) -> Any:
    """Bytes of a number of this rank's weights that are trained, and of all others: an adapter over
    a base in bfloat16.
    """
    job = Job(team, folder, **VARIANTS["an adapter in bfloat16"][1])
    job.learner.step(Step(1), groups(5, 2))
    found: dict[str, list[int]] = {"trained": [], "others": []}
    for weight in job.learner.model.parameters():
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        found["trained" if weight.requires_grad else "others"].append(own.itemsize)
    job.checkpoints.close()
    return found


def tunes(team: Team | None, folder: Path) -> Any:
    """Two steps of supervised fine-tuning, and the loss on rows that are held out."""
    base = PolicyShelf(folder / "policies-tuned")
    base.adopt(folder / "model")
    given = SftRecipe.model_validate(
        {
            "name": "ranks",
            "rows": {"max_tokens": 64},
            "training": {"batch_tokens": 64, "learning_rate": 1e-3, "warmup_steps": 0},
        }
    )
    learner = SftLearner(
        base.path(BASE), given, published=base.weights, micro_batch_tokens=60, team=team
    )
    samples = [
        TrainingSample(
            r.prompt_tokens, r.completion_tokens, replies=((1, 2),) * (len(r.completion_tokens) > 3)
        )
        for group in groups(7, 3)
        for r in group
    ]
    losses = [learner.step(Step(n), Step(4), samples).loss for n in (1, 2)]
    held_out = learner.held_out(samples[:5])
    formats = dict.fromkeys(sorted(learner.weights()), torch.float32)
    weights = torch.cat([piece for _, piece in learner.pieces(formats)])
    return {"losses": losses, "held_out": tuple(held_out), "weights": weights}


def saves(team: Team | None, folder: Path) -> Any:
    """Two steps, a third while the second's policy and checkpoint are written: what other sizes go
    on from.
    """
    job = Job(team, folder, state=f"saves-{_label(team)}", optimizer_steps=2)
    for number in (1, 2):
        job.learner.step(Step(number), groups(number, 3))
    learned, version = job.flat(), PolicyVersion(2)
    writing = job.shelf.writing(version, job.learner.weights(), job.learner.pieces)
    saving = job.save_behind(2, first=writing)
    job.learner.step(Step(3), groups(3, 5))
    saving.result(60)
    job.checkpoints.close()
    published = job.shelf.weights(version)
    written = torch.cat([published[name].flatten() for name in sorted(published)])
    return {"through": job.flat(), "learned": learned, "written": written}


def resumes(team: Team | None, folder: Path) -> Any:
    """The third step from the checkpoints of one, two and four ranks."""
    found = {}
    for saved_by in SAVED:
        job = Job(team, folder, state=f"saves-{saved_by}", optimizer_steps=2)
        saved = job.checkpoints.newest()
        assert saved is not None
        job.learner.restore(job.checkpoints.read(saved.folder, job.learner))
        job.learner.step(Step(3), groups(3, 5))
        found[saved_by] = job.flat()
        job.checkpoints.close()
    return found


def rolls_back(team: Team | None, folder: Path) -> Any:
    """A step, a rollback to the base model and another step; that step without all before it."""
    found = {}
    for name, rank in (("all weights", 0), ("an adapter", 4)):
        job = Job(team, folder, rank=rank)
        job.learner.step(Step(1), groups(1, 3))
        parts: Any = SimpleNamespace(guard=Guard(), **vars(job))
        Trainer(parts, steps=0)._roll_back(BASE)
        rolled = _second_step(job)
        job.checkpoints.close()
        job = Job(team, folder, rank=rank)
        found[name] = rolled, _second_step(job)
        job.checkpoints.close()
    return found


def _second_step(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    before = job.flat()
    job.learner.step(Step(2), groups(2, 3))
    return before, job.flat()


def breaks(team: Team | None, folder: Path) -> Any:
    """What is not finite: nothing, a number that only the last rank has, the logits."""
    job = Job(team, folder)
    found = [job.learner.fault({})]
    for name, number in ((LATE, float("nan")), ("model.norm.weight", 3e38)):
        weights = {n: weight.clone() for n, weight in job.shelf.weights(BASE).items()}
        weights[name][-1 if name == LATE else slice(None)] = number
        job.learner.load(weights)
        found.append(job.learner.fault({}))
    job.checkpoints.close()
    return found


def idles(team: Team | None, folder: Path) -> Any:
    """A leader that waits long for records, reads files for long, and goes on alone for long."""
    assert team is not None
    job = Job(team, folder)
    for _ in range(4):
        time.sleep(0.5)
        team.lead("beat")
    with team.beating():
        time.sleep(2.0)
    made = job.flat()
    team.dismiss()
    time.sleep(2.0)
    return made


def dies(team: Team | None, folder: Path) -> Any:
    """A leader that trains for ever; a rank is killed meanwhile."""
    job = Job(team, folder)
    number = 0
    while True:
        number += 1
        job.learner.step(Step(number), groups(number, 4))
        (folder / "steps").write_text(str(number))


def _rank(order: Order, ports: list[int], rank: int) -> None:
    folder = Path(order.folder)
    for (names, size, context), port in zip(order.plan, ports, strict=True):
        if rank >= size:
            continue
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        team = join(torch.device("cpu"), order.timeout_s, context)
        if not rank:
            for name in names:
                torch.save(globals()[name](team, folder), folder / f"{name}-{_label(team)}.pt")
        if team is not None:
            team.dismiss() if not rank else follow(team, "cpu")
            team.leave()


def _child(order: Order, ports: list[int], rank: int) -> None:
    os.dup2(os.open(Path(order.folder) / "errors", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    code = 0
    try:
        _rank(order, ports, rank)
    except MusterError as error:
        sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
        code = 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 2
    sys.stderr.flush()
    os._exit(code)


def _run(order: Order) -> None:
    """Fork the ranks and wait for them; writes their pids at once and their codes at the end."""
    folder = Path(order.folder)
    ports = [free_port() for _ in order.plan]
    pids = []
    for rank in range(max(size for _, size, _ in order.plan)):
        pid = os.fork()
        if not pid:
            _child(order, ports, rank)
        pids.append(pid)
    (folder / "pids").write_text(" ".join(map(str, pids)))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    (folder / "codes.part").write_text(" ".join(map(str, codes)))
    (folder / "codes.part").rename(folder / "codes")


def main() -> None:
    """Carry out one order after the other."""
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for line in sys.stdin:
        order = Order(**json.loads(line))
        model = Path(order.folder) / "model"
        if not model.exists():
            build_base_model(model, seed=0, warm_start=WarmStart(steps=10, batch=32))
        gc.freeze()
        _run(order)


if __name__ == "__main__":
    main()
