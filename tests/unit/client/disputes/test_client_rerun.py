"""A verdict recomputed where validators reject the policy (decision 95), or where
a program does not answer alike everywhere (decision 99)."""

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
    as_claimed,
    make_claim,
    make_rollouts,
    make_submission,
    make_ticket,
)
from worlds.validator_bench import PlainDecoder

from muster.client.disputes.bundle_checks import CheckAnswer, check_verdict, is_borne_out
from muster.client.disputes.rerun import Rerun, recompute
from muster.client.validator.checks import ClaimedWork
from muster.inference.examining import Recomputed
from muster.protocol.errors import EngineError, StorageError, ValidatorDisturbed
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason, Verdict
from muster.protocol.rollouts import encode_rollouts
from muster.shardcast import delta_layout
from muster.tasks import Grade, Graded, Problem, exact_match, registry

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


# Programs


ACCEPTED = (Verdict.ACCEPTED, Reason.NONE)
REWARD = (Verdict.REJECTED, Reason.WRONG_REWARD)
REPLY = (Verdict.REJECTED, Reason.WRONG_REPLY)
FALSE_REWARD = (Verdict.FRAUD, Reason.WRONG_REWARD)
SCHEMA = (Verdict.REJECTED, Reason.SCHEMA)


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_only_a_program_that_answers_alike_everywhere_contradicts_an_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_repeatable: bool
) -> None:
    def grade(problem: Problem, completion: str) -> Grade:
        found = exact_match.grade_exact_match(problem, completion)
        assert isinstance(found, Graded)
        return replace(found, is_repeatable=is_repeatable)

    grader = replace(exact_match.VERIFIER, grade=grade)
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    passed_then = [replace(row, task_reward=1.0 - row.task_reward) for row in ROWS]
    submission = make_submission(TICKET, passed_then)
    claim, data = make_claim(submission, TICKET), encode_rollouts(passed_then)
    again = rerun(HashEngine(), weights_of(tmp_path, 1.0), claim, data)
    assert ruling_of(again) == (FALSE_REWARD if is_repeatable else REWARD)
    checks = check_verdict(replace(again.record, verdict=ACCEPTED[0], reason=ACCEPTED[1]), again)
    assert is_borne_out(checks) is not is_repeatable
    assert (checks[-1].answer is CheckAnswer.SILENT) is not is_repeatable


@pytest.mark.parametrize("is_ruled", [True, False])
@pytest.mark.parametrize(
    ("standing", "ours", "answer"),
    [
        (ACCEPTED, REWARD, CheckAnswer.SILENT),
        (REWARD, ACCEPTED, CheckAnswer.SILENT),
        (FALSE_REWARD, REPLY, CheckAnswer.SILENT),
        (REWARD, REWARD, CheckAnswer.AGREE),
        (REWARD, FALSE_REWARD, CheckAnswer.CONTRADICT),
        (ACCEPTED, FALSE_REWARD, CheckAnswer.CONTRADICT),
        (FALSE_REWARD, ACCEPTED, CheckAnswer.CONTRADICT),
        (ACCEPTED, SCHEMA, CheckAnswer.CONTRADICT),
    ],
)
def test_a_ruling_that_rests_on_a_program_is_neither_confirmed_nor_contradicted(
    standing: tuple[Verdict, Reason],
    ours: tuple[Verdict, Reason],
    answer: CheckAnswer,
    is_ruled: bool,
) -> None:
    recorded = as_claimed(CLAIM.submission, 5)
    again = Rerun(replace(recorded, verdict=ours[0], reason=ours[1]), "", [])
    number = Ruling(*standing).number if is_ruled else None
    if not is_ruled:
        recorded = replace(recorded, verdict=standing[0], reason=standing[1])
    checks = check_verdict(recorded, again, ruling=number)
    assert checks[-1].answer is answer
    assert is_borne_out(checks) is (answer is not CheckAnswer.CONTRADICT)


def test_another_rejection_by_a_program_agrees_with_a_jury_and_not_with_a_record() -> None:
    """A ruling is compared by its consequences."""
    recorded = as_claimed(CLAIM.submission, 5)
    again = Rerun(replace(recorded, verdict=REWARD[0], reason=REWARD[1]), "", [])
    ruled = check_verdict(recorded, again, ruling=Ruling(*REPLY).number)
    assert ruled[-1].answer is CheckAnswer.AGREE
    of_record = check_verdict(replace(recorded, verdict=REPLY[0], reason=REPLY[1]), again)
    assert of_record[-1].answer is CheckAnswer.SILENT


@pytest.mark.parametrize("ours", [REWARD, ACCEPTED])
def test_a_check_that_runs_no_program_still_contradicts(ours: tuple[Verdict, Reason]) -> None:
    recorded = as_claimed(CLAIM.submission, 5)
    again = Rerun(replace(recorded, verdict=ours[0], reason=ours[1]), "", [])
    malformed = replace(recorded, verdict=SCHEMA[0], reason=SCHEMA[1])
    checks = check_verdict(malformed, again)
    assert checks[1].answer is CheckAnswer.CONTRADICT
    assert checks[-1].answer is CheckAnswer.CONTRADICT
