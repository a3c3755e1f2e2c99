"""A fine-tuning job, and everything that is prepared before its first step.

Opens the data set, renders the prompt's frame, encodes the rows, and refuses folders that belong to
another fine-tuning. Knows no tensors.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from muster.inference.framing import pin_prompt
from muster.protocol.encoding import canonical_json, hex0x
from muster.protocol.errors import ConfigError
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.sft import SftRecipe
from muster.shardcast import state_hash
from muster.telemetry import progress
from muster.trainer.learn.memory_plan import MemoryChoices
from muster.trainer.publish.policies import BASE, PolicyShelf, open_shelf, policy_files
from muster.trainer.sft.encoding import RowEncoder
from muster.trainer.sft.lineage import ModelLineage, read_lineage, require_room
from muster.trainer.sft.rows import TokenRows, write_rows
from muster.trainer.sft.source import SftSource, open_source

logger = logging.getLogger(__name__)

IDENTITY = "identity.json"
"""File that names the job to which a state folder belongs."""


@dataclass(frozen=True, slots=True)
class TuningJob:
    """The inputs, outputs and settings of a fine-tuning."""

    data: Path
    """The data set: a folder or a file."""
    model: Path
    """The base model's folder."""
    recipe: SftRecipe
    """The recipe, without its prompt's frame."""
    out: Path
    """Receives the model's folder."""
    state_dir: Path
    """Folder of checkpoints and figures."""
    choices: MemoryChoices
    """Settings that decide how much memory training takes."""
    save_every: int = 100
    """Steps between two checkpoints."""
    eval_every: int = 0
    """Also evaluate every N steps; 0 for the first and the last only."""
    eval_set: Path | None = None
    """Task set of held-out problems."""
    eval_samples: int = 1
    """Samples per held-out problem."""
    threads: int = 1
    """CPU threads."""
    rank_timeout_s: float = 600.0
    """Under torchrun: deadline in seconds for the other ranks."""


@dataclass(frozen=True, slots=True)
class SftIdentity:
    """The owner of a checkpoint of a fine-tuning."""

    recipe_hash: str
    data_root: str
    base: str

    def to_json(self) -> dict[str, Any]:
        """Return the identity as a checkpoint stores it."""
        return {"recipe_hash": self.recipe_hash, "data_root": self.data_root, "base": self.base}

    def described(self, found: Mapping[str, Any]) -> str:
        """Describe the owner of another checkpoint, given its stored identity."""
        own = self.to_json()
        return "a fine-tuning with " + ", ".join(
            f"{name} {value}" for name, value in found.items() if value != own[name]
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job with everything that is prepared before the first step."""

    job: TuningJob
    recipe: SftRecipe
    asked: Recipe
    """The recipe by which evaluations sample the model."""
    source: SftSource
    before: ModelLineage | None
    """The base model's lineage."""
    rows: TokenRows
    identity: SftIdentity
    shelf: PolicyShelf


def prepare(job: TuningJob) -> Prepared:
    """Prepare a job for its first step; raises ConfigError when its parts do not fit together."""
    base = hex0x(state_hash(policy_files(job.model)))
    _require_positions(job)
    asked = pin_prompt(_asked(job.recipe), job.model)
    recipe = job.recipe.model_copy(update={"prompt": asked.prompt})
    source, before = open_source(job.data), read_lineage(job.model)
    require_room(source, before)
    identity = SftIdentity(hex0x(recipe.hash()), source.root, base)
    _require_own_target(job, identity)
    _require_own_state(job.state_dir, identity)
    shelf = open_shelf(job.state_dir / "policies", recipe, dtype="base")
    if not shelf.has(BASE):
        shelf.adopt(job.model)
    rows = _rows(job, recipe, source)
    logger.info("rows encoded", extra={"rows": str(rows.counts)})
    return Prepared(job, recipe, asked, source, before, rows, identity, shelf)


def _asked(recipe: SftRecipe) -> Recipe:
    """Return a run's recipe that samples a model with the settings of the fine-tuning."""
    sampling = SamplingRecipe(
        problems_per_submission=1,
        samples_per_problem=2,
        temperature=recipe.sampling.temperature,
        max_new_tokens=recipe.sampling.max_new_tokens,
    )
    training = TrainingRecipe(submissions_per_step=1)
    return Recipe(name=recipe.name, sampling=sampling, prompt=recipe.prompt, training=training)


def _require_positions(job: TuningJob) -> None:
    """Raise ConfigError when rows may be longer than the model can read."""
    config = AutoConfig.from_pretrained(job.model, local_files_only=True, trust_remote_code=False)
    positions = getattr(config, "max_position_embeddings", None)
    if positions and job.recipe.rows.max_tokens > positions:
        raise ConfigError(
            f"rows may have {job.recipe.rows.max_tokens} tokens, the model reads {positions}",
            hint=f"set rows.max_tokens to {positions}, or less",
        )


def _require_own_target(job: TuningJob, identity: SftIdentity) -> None:
    """Raise ConfigError when the model's folder would replace something else."""
    if not job.out.exists():
        return
    found = read_lineage(job.out)
    if found is None:
        if not job.out.is_dir() or any(job.out.iterdir()):
            raise ConfigError(f"{job.out} is not empty", hint="choose another folder with --out")
    elif SftIdentity(found.recipe_hash, found.data_root, found.base) != identity:
        raise ConfigError(
            f"{job.out} holds a model of another recipe, data set or base",
            hint="choose another folder with --out",
        )


def _require_own_state(folder: Path, identity: SftIdentity) -> None:
    """Mark the state folder as this job's; raises ConfigError when it belongs to another."""
    path = folder / IDENTITY
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(canonical_json(identity.to_json()))
        return
    found = json.loads(path.read_bytes())
    if found != identity.to_json():
        raise ConfigError(
            f"{folder} belongs to {identity.described(found)}",
            hint=f"choose another folder with --state-dir, or delete {folder} to start again",
        )


def _rows(job: TuningJob, recipe: SftRecipe, source: SftSource) -> TokenRows:
    """Return the data set's rows as tokens; encodes them unless that was done before."""
    folder = job.state_dir / "rows"
    if not folder.is_dir():
        with progress("rows encoded") as on_progress:
            encoder = RowEncoder(recipe, job.model)
            write_rows(folder, source, encoder, recipe.rows.held_out_share, on_progress)
    return TokenRows(folder)
