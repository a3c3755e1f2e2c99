"""One trainer site of the DiLoCo benchmark: the trainer's own flow, fed from a folder.

FOLDER/stream.jsonl has a line per accepted file, FOLDER/files the files. There is no chain or
orchestrator: only the traffic between sites is measured.
"""

import asyncio
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from muster.chain import ChainView, StreamItem
from muster.lifecycle import ComputeThread
from muster.protocol.encoding import keccak
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.recipe import Recipe
from muster.trainer.learn.learner import Learner
from muster.trainer.loop import Parts, Trainer
from muster.trainer.measure.metrics import MetricsLog, MetricsPoster, Unshown
from muster.trainer.ports import ChainLedger
from muster.trainer.publish.policies import BASE, PolicyShelf
from muster.trainer.publish.publisher import Unpublished
from muster.trainer.recover.checkpoint import Checkpoints, Identity
from muster.trainer.sites.meeting import Meeting, MeetingPlace
from muster.trainer.sites.site_learner import OuterStep, SiteLearner
from muster.trainer.stream.reader import FileBuffer, StreamReader


class FolderLedger(ChainLedger):
    """The accepted stream as lines of a file that grows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ChainView(), RunId(1))
        self._folder = folder

    def stream(self) -> Sequence[StreamItem]:
        """Return the records so far."""
        path = self._folder / "stream.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [StreamItem(i, 0, i, _record(i, json.loads(line))) for i, line in enumerate(lines)]

    async def changed(self) -> None:
        """Return soon: the file may have grown."""
        await asyncio.sleep(0.02)

    async def file(self, submission_file_hash: Hash32) -> bytes:
        """Return an accepted file."""
        return (self._folder / "files" / submission_file_hash.hex()).read_bytes()


def _record(position: int, line: dict[str, Any]) -> OutcomeRecord:
    return OutcomeRecord(
        worker_id=1,
        step=Step(1),
        index=position,
        policy_version=PolicyVersion(line["version"]),
        file_hash=Hash32(bytes.fromhex(line["file"])),
        rollouts=line["rollouts"],
        units=1,
        verdict=Verdict.ACCEPTED,
        reason=Reason.NONE,
    )


class CountingLearner(SiteLearner):
    """Writes its traffic to a file after every step."""

    path: Path
    """Receives a line per step."""

    def step(self, step: Step, groups: Any) -> Any:
        """Take a site's step."""
        figures = super().step(step, groups)
        steps = int(max(v for n, v in self.state().items() if n.endswith(".step")))
        line = {
            "step": int(step),
            "sites": len(self.members),
            "inner_steps": steps,
            "outer_bytes": self.outer_bytes,
            "heal_bytes": self.heal_bytes,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return figures


async def train(folder: Path, site: int, sites: int, port: int) -> None:
    """Run the trainer's flow to the recipe's last step."""
    recipe = Recipe.from_bytes((folder / "recipe.json").read_bytes())
    own = folder / f"site-{site}"
    shelf = PolicyShelf(own / "policies")
    if not shelf.has(BASE):
        shelf.adopt(folder / "model")
    checkpoints = Checkpoints(own / "checkpoints", Identity(RunId(1), keccak(b"diloco"), 1))
    learner: Any = Learner(shelf.path(BASE), recipe, published=shelf.weights)
    if sites > 1:
        learner = CountingLearner(
            learner,
            Meeting(
                MeetingPlace(site, "127.0.0.1", port, alive_s=3, wait_s=120),
                expected=sites,
                secret=bytes(32),
            ),
            OuterStep(recipe.training.outer_learning_rate, recipe.training.outer_momentum),
            checkpoints,
            shelf,
            max_async_level=recipe.training.max_async_level,
        )
        learner.path = own / "traffic.jsonl"
        if site:
            (own / "asks").touch()
            await asyncio.to_thread(learner.join)
    ledger = FolderLedger(folder)
    buffer = FileBuffer(own / "files", ledger, ledger)
    parts = Parts(
        recipe=recipe,
        stream=StreamReader(ledger, buffer, recipe, vocab_size=16),
        learner=learner,
        shelf=shelf,
        checkpoints=checkpoints,
        buffer=buffer,
        publisher=Unpublished(),
        log=MetricsLog(own / "metrics.jsonl"),
        poster=MetricsPoster(Unshown()),
        compute=ComputeThread(),
    )
    await Trainer(parts, steps=recipe.training.steps).run()


def main() -> None:
    """Arguments: folder, site, sites, port."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.set_num_threads(1)
    asyncio.run(train(Path(sys.argv[1]), *map(int, sys.argv[2:5])))


if __name__ == "__main__":
    main()
