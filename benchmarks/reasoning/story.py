"""The lesson's flow: from texts to a model that reasons, measured at every stage.

1. read        a tokenizer and two models of random weights learn from generated texts: the
               student from solutions of mixed quality, the teacher from right ones
2. make data   the teacher solves problems on a network; right solutions become a data set
3. fine-tune   the student learns from the data set, which its lineage records
4. reinforce   the student practises on a network: mathematics, programs and words, mixed
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reasoning import recipes
from benchmarks.reasoning.model import Shape, build_model
from benchmarks.reasoning.networks import Given, make_data, people, reinforce
from benchmarks.reasoning.recipes import Sampling
from benchmarks.reasoning.texts import Split, split_exercises, task_set, write_texts
from rich.console import Console

from muster.app.demo.display import DemoDisplay
from muster.app.demo.local_network import MUSTER
from muster.app.demo.processes import Processes
from muster.protocol.errors import ConfigError

MEASURE = "benchmarks.reasoning.measure"


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the lesson."""

    shape: Shape = field(default_factory=Shape)
    exercises: int = 1500
    """Exercises of each part in the texts."""
    practised: int = 400
    """Problems of each part, in both runs."""
    held_out: int = 160
    """Problems of each part that are measured on."""
    texts: int = 20_000
    """Worked solutions that each of the two models reads."""
    right: float = 0.5
    """Share of right solutions in the student's texts."""
    batch_tokens: int = 512
    """Tokens of an optimiser step in fine-tunings and in reading."""
    data: Sampling = field(default_factory=partial(Sampling, 8, 4))
    """Sampling of the data run."""
    data_submissions: int = 36
    least_reward: float = 1.0
    """Smallest reward of a sample for the student."""
    epochs: int = 2
    """Epochs of the fine-tuning."""
    practice: Sampling = field(default_factory=partial(Sampling, 8, 8))
    """Sampling of the reinforcement."""
    submissions: int = 8
    """Submissions of a training step."""
    steps: int = 30
    eval_every: int = 10
    samples: int = 2
    """Samples of each held-out problem."""


@dataclass(slots=True)
class Lesson:
    """Measurements of the lesson."""

    plan: Plan
    parameters: int = 0
    vocabulary: int = 0
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Evaluations by model and way of asking."""
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    """Clock and CPU seconds by step of the story."""
    data_set: dict[str, Any] = field(default_factory=dict)
    lineage: str = ""
    """What `muster trainer lineage` said of the fine-tuned model."""
    data_run: dict[str, Any] = field(default_factory=dict)
    """Results of its network, see `Happened`."""
    practice_run: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    """The trainer's evaluations during the reinforcement."""

    @classmethod
    def open(cls, path: Path, plan: Plan) -> Lesson:
        """Return what a lesson of this plan has measured so far."""
        if not path.exists():
            return cls(plan)
        held = json.loads(path.read_text())
        if held.pop("plan") != json.loads(json.dumps(asdict(plan))):
            raise ConfigError(
                f"{path} is of a lesson of another size", hint="choose another folder with --out"
            )
        return cls(plan, **held)

    def to_json(self) -> dict[str, Any]:
        """Return the lesson in the form of the result file."""
        return asdict(self)


class Story:
    """Plays the story in a folder."""

    def __init__(self, plan: Plan, folder: Path, seed: int) -> None:
        self._plan, self._folder, self._seed = plan, folder, seed
        self._path = folder / "lesson.json"
        self._lesson = Lesson.open(self._path, plan)
        names = {member.wallet.address: member.name for member in people(seed).members}
        self._progress = DemoDisplay(Console(), names)

    async def play(self) -> Lesson:
        """Play the remaining steps; finished ones are not repeated."""
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        # Remove the output of an interrupted try.
        shutil.rmtree(self._folder / "logs", ignore_errors=True)
        async with Processes(self._folder / "logs", environment) as processes:
            steps: dict[str, Callable[[], Awaitable[None]]] = {
                "write": self._write_problems,
                "read": partial(self._read, processes),
                "measure": partial(self._measure, processes, "pretrained", "teacher"),
                "make data": self._make_data,
                "fine-tune": partial(self._fine_tune, processes),
                "reinforce": self._reinforce,
                "measure again": partial(self._measure, processes, "fine-tuned", "reinforced"),
            }
            with self._progress:
                for name, step in steps.items():
                    await self._play(name, step)
        return self._lesson

    async def _play(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        """Play a step, and note what it cost."""
        if name in self._lesson.costs:
            return
        began, spent = time.monotonic(), cpu_seconds()
        await step()
        wall, cpu = time.monotonic() - began, cpu_seconds() - spent
        self._lesson.costs[name] = {"wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}
        self._path.write_text(json.dumps(self._lesson.to_json()))

    # ------------------------------------------------------------------------------- what is read

    async def _write_problems(self) -> None:
        plan, folder = self._plan, self._folder
        split = split_exercises(plan.exercises, plan.practised, plan.held_out, self._seed)
        task_set("lesson", split.practised).write(folder / "tasks.jsonl")
        task_set("lesson held out", split.held_out).write(folder / "held-out.jsonl")
        texts = self._write_texts(split)
        lesson = self._lesson
        lesson.parameters = build_model(folder / "blank", texts, plan.shape, self._seed)
        lesson.vocabulary = plan.shape.vocabulary
        self._progress.say(f"a model of {lesson.parameters:,} parameters that has read nothing")

    def _write_texts(self, split: Split) -> list[str]:
        plan, folder = self._plan, self._folder
        shares = {"pretrained": plan.right, "teacher": 1.0}
        written = [
            write_texts(folder / f"{name}.jsonl", split.read, plan.texts, right, self._seed)
            for name, right in shares.items()
        ]
        return [text for texts in written for text in texts]

    async def _read(self, processes: Processes) -> None:
        """Let student and teacher read side by side."""
        recipe = recipes.fine_tuning(
            "lesson: reading", trained="all", epochs=1,
            batch_tokens=self._plan.batch_tokens, rate=2e-3,
        )  # fmt: skip

        async def read(name: str) -> None:
            await self._sft(processes, name, self._folder / f"{name}.jsonl", "blank", recipe)
            self._progress.say(f"{name}: has read {self._plan.texts:,} solutions")

        await asyncio.gather(*map(read, ("pretrained", "teacher")))

    # -------------------------------------------------------------------------------- the stages

    async def _make_data(self) -> None:
        recipe = recipes.data_run(self._plan.data, self._plan.data_submissions)
        given = self._given("data-run", "teacher", recipe, cheat="forged-reward")
        traces, least = self._fresh("traces"), self._plan.least_reward
        happened, made = await make_data(given, traces, least, self._progress)
        self._lesson.data_run, self._lesson.data_set = asdict(happened), made

    async def _fine_tune(self, processes: Processes) -> None:
        data, out = self._folder / "traces", self._folder / "fine-tuned"
        recipe = recipes.fine_tuning(
            "lesson: fine-tuning", trained="completion", epochs=self._plan.epochs,
            batch_tokens=self._plan.batch_tokens, rate=1e-3,
        )  # fmt: skip
        await self._sft(processes, "fine-tuned", data, "pretrained", recipe)
        base = self._folder / "pretrained"
        words = ["trainer", "lineage", str(out), "--data", str(data), "--model", str(base)]
        self._lesson.lineage = await run(processes, "lineage", MUSTER, *words)
        self._progress.say("fine-tuned on the data set, and its lineage holds")

    async def _reinforce(self) -> None:
        plan = self._plan
        recipe = recipes.reinforcement(plan.practice, plan.steps, plan.submissions)
        given = self._given("practice-run", "fine-tuned", recipe, cheat="other-model")
        happened, figures = await reinforce(given, self._fresh("reinforced"), self._progress)
        self._lesson.practice_run = asdict(happened)
        self._lesson.curve = [line["eval"] for line in figures if "eval" in line]

    def _given(self, name: str, model: str, recipe: str, *, cheat: str) -> Given:
        return Given(
            folder=self._fresh(name),
            model=self._folder / model,
            tasks=self._folder / "tasks.jsonl",
            held_out=self._folder / "held-out.jsonl",
            recipe=recipes.write(self._folder, name, recipe),
            cheat=cheat,
            seed=self._seed,
            eval_every=self._plan.eval_every,
        )

    def _fresh(self, name: str) -> Path:
        """Return a folder's path, without what an interrupted try left there."""
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    async def _sft(
        self, processes: Processes, name: str, data: Path, base: str, recipe: str
    ) -> None:
        path = recipes.write(self._folder, f"{name}-recipe", recipe)
        words = ["--data", data, "--model", self._folder / base, "--recipe", path]
        command = ["trainer", "sft", *words, "--out", self._folder / name]
        await run(processes, name, MUSTER, *map(str, command))

    # ------------------------------------------------------------------------------ measurements

    async def _measure(self, processes: Processes, *names: str) -> None:
        """Evaluate models on the held-out problems, side by side."""
        plan = self._plan
        asked = recipes.reinforcement(plan.practice, plan.steps, plan.submissions)
        recipe = recipes.write(self._folder, "measured", asked)

        async def measured(name: str) -> None:
            words = [self._folder / name, self._folder / "held-out.jsonl", recipe, plan.samples]
            said = await run(processes, f"measure-{name}", MEASURE, *map(str, words))
            found = self._lesson.stages[name] = json.loads(said.splitlines()[-1])
            parts = found["sampled"]["parts"]
            shown = (f"{part} {each['reward']['value']:.2f}" for part, each in parts.items())
            self._progress.say(f"{name}: {', '.join(shown)}")

        await asyncio.gather(*map(measured, names))


async def run(processes: Processes, name: str, *command: str) -> str:
    """Run `python -m <command>` to its end and return what it printed."""
    child = await processes.start_warm(name, command)
    if await child.wait() != 0:
        processes.require_running(child)
    return child.log.read_text()


def cpu_seconds() -> float:
    """Return the CPU time of this process, its children, and theirs that have ended, in seconds."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = sum(usage.ru_utime + usage.ru_stime for usage in own)
    tick = os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = path.read_text().rpartition(")")
        except OSError:  # it has ended since
            continue
        fields = rest.split()
        if int(fields[1]) == os.getpid():
            spent += sum(map(int, fields[11:15])) / tick
    return spent
