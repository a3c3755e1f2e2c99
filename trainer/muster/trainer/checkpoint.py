"""The trainer's state on disk: one file that is replaced atomically after every training step.

Weights, optimiser, cursor and version are in the same file, so they can only be consistent: a
trainer killed at any instruction resumes at the last complete step, bit by bit.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.protocol.encoding import hex0x
from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, to_hash32
from muster.trainer.policies import sync
from muster.trainer.stream import Cursor

SCHEMA_VERSION = 1
"""Version of the file's form."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint belongs to; another run's or recipe's state is refused."""

    run_id: RunId
    """The run."""
    recipe_hash: Hash32
    """Hash of its recipe."""
    chain_id: int
    """The chain."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Everything the next training step depends on."""

    version: PolicyVersion
    """The version these weights are; also the number of training steps taken."""
    cursor: Cursor
    """How much of the training stream they have seen."""
    step_start: int
    """Where in the stream this version's step began."""
    previous_start: int
    """Where the step before began: its version may still have been on its way to the chain."""
    weights: dict[str, Tensor]
    """The policy, in full precision."""
    optimizer: dict[str, Any]
    """The optimiser's state."""


class CheckpointFile:
    """The state of one run in one file."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self._path = path
        self._identity = identity

    def save(self, state: TrainerState) -> None:
        """Replace the file; raises StorageError, and the previous state stays, when it cannot."""
        fresh = self._path.with_name(f".{self._path.name}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("wb") as file:
                torch.save(self._to_dict(state), file)
            sync(fresh)
            fresh.replace(self._path)
            sync(self._path.parent)
        except (OSError, RuntimeError) as error:
            fresh.unlink(missing_ok=True)
            raise StorageError(
                f"cannot save the trainer's state to {self._path}: {error}"
            ) from error

    def load(self) -> TrainerState | None:
        """Return the state, None when there is none yet.

        Raises StorageError when the file is damaged or belongs to another run, chain or recipe.
        """
        if not self._path.exists():
            return None
        try:
            # weights_only: the file holds tensors and numbers; nothing in it may run.
            value = torch.load(self._path, map_location="cpu", weights_only=True)
            found = Identity(
                RunId(value["run_id"]), to_hash32(value["recipe_hash"]), value["chain_id"]
            )
            state = _from_dict(value)
        except (
            OSError,
            RuntimeError,
            pickle.UnpicklingError,
            LookupError,
            ValueError,
            EOFError,
        ) as e:
            raise StorageError(
                f"the trainer's state in {self._path} is damaged: {e}",
                hint="restore it, or move it away to go on from the newest published policy",
            ) from e
        if found != self._identity:
            raise StorageError(
                f"{self._path} belongs to run {found.run_id} on chain {found.chain_id}",
                hint="give every run a --state-dir of its own",
            )
        return state

    def _to_dict(self, state: TrainerState) -> dict[str, Any]:
        last = state.cursor.last
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": int(self._identity.run_id),
            "chain_id": self._identity.chain_id,
            "recipe_hash": hex0x(self._identity.recipe_hash),
            "version": int(state.version),
            "position": state.cursor.position,
            "last": hex0x(last) if last is not None else None,
            "step_start": state.step_start,
            "previous_start": state.previous_start,
            "weights": state.weights,
            "optimizer": state.optimizer,
            "torch_rng": torch.get_rng_state(),
        }


def _from_dict(value: dict[str, Any]) -> TrainerState:
    if value["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema version {value['schema_version']}, expected {SCHEMA_VERSION}")
    last = to_hash32(value["last"]) if value["last"] is not None else None
    torch.set_rng_state(value["torch_rng"])
    return TrainerState(
        version=PolicyVersion(value["version"]),
        cursor=Cursor(value["position"], last),
        step_start=value["step_start"],
        previous_start=value["previous_start"],
        weights=value["weights"],
        optimizer=value["optimizer"],
    )
