"""The ranks behind rank 0: they take the same steps with their own share of the work.

  1. start     build the model that the leader describes, without weights
     storage   open the folder of checkpoints
  2. take      the optimiser steps of a training step, on this rank's samples
  3. pieces    send this rank's part of the policy, which the leader writes and publishes
  4. save      write this rank's part of a checkpoint
  5. read, restore, load, fault, surprise, measure, beat, stop

A follower has no key, no chain and no metrics. When the leader or another rank is gone, it ends
with an error.
"""

from collections import deque
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from muster.trainer.learn.learner import Learner
from muster.trainer.learn.parallel import Team
from muster.trainer.learn.sft_learner import SftLearner
from muster.trainer.recover.checkpoint import Checkpoints


def follow(team: Team, device: str) -> None:
    """Follow the leader until it stops; raises RankLost when it is gone."""
    learner: Learner | SftLearner
    checkpoints: Checkpoints | None = None
    read: dict[str, Tensor] = {}
    saved: Future[None] | None = None
    while True:
        command, share = team.next_command()
        match command:
            case "start":
                kind, recipe, blueprint, options = share
                options |= {"device": device, "team": team}
                learner = kind(blueprint, recipe, published=lambda _: None, **options)
            case "storage":
                if checkpoints is not None:
                    checkpoints.close()
                checkpoints = Checkpoints(*share, ranks=team, device=device)
            case "save" if checkpoints is not None:
                saved = checkpoints.save(share, learner.state(), release=learner.hold())
            case "read" if checkpoints is not None:
                read = checkpoints.read(share, learner)
            case "restore":
                learner.restore(read)
                read = {}
            case "take":
                learner.take(*share)
            case "surprise" if isinstance(learner, Learner):
                learner.surprise(share)
            case "measure" if isinstance(learner, SftLearner):
                learner.measure(share)
            case "pieces" if checkpoints is not None:
                # Before the checkpoint, as on rank 0: all ranks send their messages in the same
                # order.
                checkpoints.behind(partial(deque, learner.pieces(share), maxlen=0))
            case "fault":
                learner.fault(share)
            case "load":
                learner.load(None, is_fresh=share)
            case "beat":
                pass
            case "stop":
                break
            case _:
                raise AssertionError(f"unknown command {command}")
    # Finish what is being written.
    if saved is not None:
        saved.result()
    if checkpoints is not None:
        checkpoints.close()
