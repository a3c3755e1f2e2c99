"""A validator's process that judges one honest submission under real limits of its memory.

    python memory_limits.py FOLDER ROOM_KB …

Each room is given to a fork of its own: so much address space beside what the process has. A fork
prints one JSON line, `{"room_kb", "said"}`, or dies.
"""

import json
import os
import resource
import sys
from pathlib import Path

import torch
from one_submission import CALIBRATION, judge, recipe, ticket

from muster.client.validator.judging import Rules
from muster.client.validator.soundness import own_trouble
from muster.client.worker.generation import play_ticket
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import EngineError, ValidatorDisturbed
from muster.protocol.ids import PolicyVersion
from muster.trainer.base_model import LESSONS, WarmStart, build_base_model

RECIPE = recipe(problems=4, samples=32, limit=16)


def main(folder: Path, rooms_kb: list[int]) -> None:
    """Judge once for each room."""
    torch.set_num_threads(1)
    lesson = LESSONS["sort"]
    build_base_model(folder, seed=0, lesson=lesson, warm_start=WarmStart(steps=2, batch=8))
    tasks, _ = lesson.split(32, 4, 0)
    engine, rules = TransformersEngine(), Rules(RECIPE, tasks, CALIBRATION)
    engine.load_policy(folder, PolicyVersion(0))
    rows = play_ticket(ticket(0), RECIPE, tasks, engine).graded()

    def say() -> str:
        try:
            with own_trouble():
                judged = judge(rows, ticket(0), rules, engine)
        except (ValidatorDisturbed, EngineError):
            return "disturbed"
        return judged.finding.reason.name if judged.finding else "accepted"

    for room_kb in rooms_kb:
        if os.fork() == 0:
            _limit(room_kb)
            said = say()
            _limit(None)
            os.write(1, json.dumps({"room_kb": room_kb, "said": said}).encode() + b"\n")
            os._exit(0)
        os.wait()


def _limit(room_kb: int | None) -> None:
    """Leave so much address space; None removes the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    most = hard if room_kb is None else used + (room_kb << 10)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])
