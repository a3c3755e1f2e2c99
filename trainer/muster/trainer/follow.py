"""What the ranks behind rank 0 do: the same steps, with their own share of the work.

  1. start     build the model that the leader describes, without weights
     storage   open the folder of checkpoints
  2. take      the optimiser steps of a training step, on this rank's samples
  3. weights   take part in gathering the policy, which the leader writes and publishes
  4. save      write this rank's part of a checkpoint
  5. read, restore, load, beat, stop

A follower has no key, no chain and no metrics. When the leader or another rank is gone, it ends
with an error.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from muster.protocol.recipe import Recipe
from muster.trainer.checkpoint import Checkpoints, Identity
from muster.trainer.learner import Learner
from muster.trainer.parallel import Team
from muster.trainer.precision import ComputeType
from muster.trainer.sharded import Blueprint


def follow(team: Team, device: str) -> None:
    """Follow the leader until it stops; raises RankLost when it is gone."""
    follower = _Follower(team, device)
    while True:
        command, share = team.next_command()
        if command == "stop":
            break
        follower.do(command, share)
    follower.end()


class _Follower:
    def __init__(self, team: Team, device: str) -> None:
        self._team = team
        self._device = device
        self._learner: Learner
        self._checkpoints: Checkpoints | None = None
        self._read: dict[str, Tensor] = {}
        self._saved: Future[None] | None = None

    def _start(
        self, recipe: bytes, blueprint: Blueprint, tokens: int, compute_dtype: ComputeType
    ) -> None:
        self._learner = Learner(
            blueprint,
            Recipe.from_bytes(recipe),
            published=lambda _: None,
            micro_batch_tokens=tokens,
            device=self._device,
            compute_dtype=compute_dtype,
            team=self._team,
        )

    def _open(self, folder: Path, identity: Identity) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._checkpoints = Checkpoints(folder, identity, ranks=self._team)

    def do(self, command: str, share: Any) -> None:
        """Do what the leader does."""
        match command:
            case "start":
                self._start(*share)
            case "storage":
                self._open(*share)
            case "save" | "read" if self._checkpoints is not None:
                self._store(self._checkpoints, command, share)
            case "take":
                self._learner.take(*share)
            case "surprise":
                self._learner.surprise(share)
            case "weights":
                self._learner.weights()
            case "load":
                self._learner.load(None)
            case "restore":
                self._learner.restore(self._read)
                self._read = {}
            case "beat":
                pass
            case _:
                raise AssertionError(f"unknown command {command}")

    def _store(self, checkpoints: Checkpoints, command: str, share: Any) -> None:
        if command == "save":
            self._saved = checkpoints.save(share, self._learner.state())
        else:
            self._read = checkpoints.read(share, self._learner)

    def end(self) -> None:
        """Let what is being written come to its end."""
        if self._saved is not None:
            self._saved.result()
        if self._checkpoints is not None:
            self._checkpoints.close()
