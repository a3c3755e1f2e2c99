"""A verdict recomputed where the policy is at fault: as validators reject it (decision 95)."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from worlds.client_world import (
    RULES,
    VERSION,
    HashEngine,
    make_claim,
    make_rollouts,
    make_submission,
    make_ticket,
)
from worlds.validator_bench import PlainDecoder

from muster.client.disputes.rerun import Rerun, recompute
from muster.client.validator.checks import ClaimedWork
from muster.inference.examining import Recomputed
from muster.protocol.errors import EngineError, StorageError, ValidatorDisturbed
from muster.protocol.messages import Reason, Verdict
from muster.protocol.rollouts import encode_rollouts
from muster.shardcast import delta_layout

TICKET = make_ticket()
ROWS = make_rollouts(TICKET)
DATA = encode_rollouts(ROWS)
CLAIM = make_claim(make_submission(TICKET, ROWS), TICKET)
REJECTED = (Verdict.REJECTED, Reason.TOPLOC_MISMATCH)
NAN = np.uint16(0x7FC0)


class Nonsense(HashEngine):
    """Computes NaN from any policy: in the hidden states, or in the logits only."""

    in_hidden = True

    def recompute(self, samples: Any) -> list[Recomputed]:
        found = super().recompute(samples)
        if self.in_hidden:
            return [Recomputed(np.full_like(p.hidden_TH, NAN), p.logits_TV) for p in found]
        return [Recomputed(p.hidden_TH, p.logits_TV * np.float32("nan")) for p in found]

    def generate(self, requests: Any, **options: Any) -> Any:
        if self.in_hidden:
            raise EngineError("the policy computes nonsense")
        return super().generate(requests, **options)


class InLogits(Nonsense):
    in_hidden = False


class Unloadable(HashEngine):
    """Loads no policy."""

    def load_policy(self, folder: Path, version: Any) -> None:
        raise EngineError(f"version {version} in {folder.name} does not load")


class Crowded(HashEngine):
    """Has no memory to load a policy."""

    def load_policy(self, folder: Path, version: Any) -> None:
        raise MemoryError(f"{folder.name} {version}")


def weights_of(folder: Path, number: float) -> Path:
    weight = torch.ones(8)
    weight[5] = number
    save_file({"norm": weight}, folder / "model.safetensors")
    return folder


def rerun(
    engine: HashEngine, folder: Path | None, claim: ClaimedWork = CLAIM, data: bytes = DATA
) -> Rerun:
    decoder: Any = PlainDecoder()
    return asyncio.run(recompute(claim, data, RULES, engine, decoder, folder=folder))


def ruling_of(found: Rerun) -> tuple[Verdict, Reason]:
    return found.record.verdict, found.record.reason


def test_the_policy_of_a_folder_is_loaded_once(tmp_path: Path) -> None:
    engine = HashEngine()
    for _ in range(2):
        found = rerun(engine, weights_of(tmp_path, 1.0))
        assert ruling_of(found) == (Verdict.ACCEPTED, Reason.NONE)
    assert engine.loaded == [(tmp_path, VERSION)]


@pytest.mark.parametrize("engine", [Nonsense(), InLogits(), Unloadable(), Crowded(), HashEngine()])
def test_work_of_a_policy_that_is_not_finite_is_rejected(
    tmp_path: Path, engine: HashEngine
) -> None:
    found = rerun(engine, weights_of(tmp_path, math.nan))
    assert ruling_of(found) == REJECTED
    assert found.record.units == CLAIM.submission.units
    assert "its norm is not finite" in found.detail
    assert found.preferring is None


@pytest.mark.parametrize("engine", [Nonsense(), InLogits(), Unloadable()])
@pytest.mark.parametrize("has_weights", [True, False])
def test_an_engine_that_fails_with_other_weights_judges_nothing(
    tmp_path: Path, engine: HashEngine, has_weights: bool
) -> None:
    if has_weights:
        weights_of(tmp_path, 1.0)
    else:
        (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(EngineError):
        rerun(engine, tmp_path)


def test_a_machine_without_memory_for_the_policy_judges_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValidatorDisturbed, match="MemoryError"):
        rerun(Crowded(), weights_of(tmp_path, 1.0))


def test_weights_that_cannot_be_read_say_nothing_about_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(delta_layout, "_is_finite", fail)
    with pytest.raises(StorageError, match="input/output error"):
        rerun(HashEngine(), weights_of(tmp_path, math.nan))


def test_the_earlier_checks_decide_also_where_the_policy_is_broken(tmp_path: Path) -> None:
    folder = weights_of(tmp_path, math.nan)
    unsigned = replace(CLAIM, signature=bytes(65))
    assert ruling_of(rerun(Unloadable(), folder, unsigned))[1] is Reason.BAD_SIGNATURE
    malformed = rerun(Unloadable(), folder, data=b"no table")
    assert ruling_of(malformed)[1] is Reason.SCHEMA
