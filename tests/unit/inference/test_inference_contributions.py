"""Measurements of one calibration by several machines, and the effect of a lying one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inference_policy import plan

from muster.inference.calibrate import CalibrationRun, calibrate_model, contribute
from muster.inference.contributions import Contribution, Signed, read_file, to_file
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import EngineError
from muster.toploc import Calibration

pytestmark = pytest.mark.usefixtures("honest_once")

KEY, OTHER = keccak(b"contributor"), keccak(b"somebody else")
SIGNER = address_of(KEY)


@pytest.fixture(scope="module")
def contribution(policy_folder: Path, honest_once: None) -> Contribution:
    return contribute(policy_folder, plan(threads=2))


def merge(folder: Path, contribution: Contribution, **options: Any) -> CalibrationRun:
    return calibrate_model(folder, plan(), contributions=[Signed(contribution, SIGNER)], **options)


@pytest.fixture(scope="module")
def merged(policy_folder: Path, contribution: Contribution) -> CalibrationRun:
    return merge(policy_folder, contribution)


def test_contribution_survives_its_file(contribution: Contribution, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(to_file(contribution, KEY))
    assert read_file(tmp_path / "part", SIGNER).contribution == contribution


@pytest.mark.parametrize(
    ("change", "signer", "reason"),
    [
        (lambda data: data, address_of(OTHER), "is signed by"),
        (lambda data: data.replace(b'"device":"CPU', b'"device":"TPU', 1), SIGNER, "is signed by"),
        (lambda data: data[:200], SIGNER, "is signed by"),
        (lambda _: b"", SIGNER, "is no contribution"),
    ],
)
def test_file_that_its_contributor_did_not_sign_is_refused(
    change: Callable[[bytes], bytes],
    signer: Any,
    reason: str,
    contribution: Contribution,
    tmp_path: Path,
) -> None:
    (tmp_path / "part").write_bytes(change(to_file(contribution, KEY)))
    with pytest.raises(EngineError, match=reason):
        read_file(tmp_path / "part", signer)


def test_honest_contribution_counts_and_is_named_in_the_document(
    merged: CalibrationRun, contribution: Contribution
) -> None:
    own, other = merged.calibration.machines
    assert merged.refusal is None
    assert (own.contributor, other.contributor) == ("", SIGNER)
    assert (own.outside, other.outside) == (0, 0)
    assert other.device == contribution.device
    claimed = sum(len(pair.lengths) for pair in contribution.pairs)
    assert other.samples == claimed + 320 + 24 + 96
    document = merged.calibration.to_bytes()
    assert Calibration.from_bytes(document) == merged.calibration


def altered(contribution: Contribution, name: str, value: Any) -> Contribution:
    return contribution.model_copy(update={name: value})


def with_margin(contribution: Contribution, margin: float) -> Contribution:
    first, *rest = contribution.pairs
    lie = first.model_copy(update={"margins": ((0, 0, margin),)})
    return altered(contribution, "pairs", (lie, *rest))


def with_draws(contribution: Contribution, **changes: Any) -> Contribution:
    first, *rest = contribution.draws
    return altered(contribution, "draws", (first.model_copy(update=changes), *rest))


@pytest.mark.parametrize(
    "lie",
    [
        lambda honest: with_margin(honest, 7.5),
        lambda honest: with_draws(honest, moved=((0.0009, False),) * honest.draws[0].count),
        lambda honest: with_draws(honest, shift=(0.9, 1.0)),
    ],
    ids=["a huge margin", "every margin below the limit", "choices that lean to EOS"],
)
def test_contributor_who_would_widen_limits_is_named_and_refused(
    lie: Callable[[Contribution], Contribution],
    policy_folder: Path,
    contribution: Contribution,
    merged: CalibrationRun,
) -> None:
    found = merge(policy_folder, lie(contribution))
    assert f"contribution of {SIGNER} is an outlier" in str(found.refusal)
    assert ((found.refusal and found.refusal.hint) or "").endswith(f"--accept {SIGNER}")


def test_owner_may_accept_an_outlier(policy_folder: Path, contribution: Contribution) -> None:
    found = merge(policy_folder, with_margin(contribution, 0.004), accepted=[SIGNER])
    assert found.refusal is None
    assert found.calibration.machines[1].outside == 1
    assert found.calibration.machines[1].margin == pytest.approx(0.004)


def test_good_figures_of_others_do_not_make_fewer_strikes_a_fraud(
    policy_folder: Path, contribution: Contribution, merged: CalibrationRun
) -> None:
    many = altered(contribution, "pairs", contribution.pairs * 50)
    found = merge(policy_folder, many)
    assert found.calibration.fraud_strikes == merged.calibration.fraud_strikes
    assert found.calibration.sampler == merged.calibration.sampler


def test_work_of_another_model_is_recomputed_and_found(
    policy_folder: Path, sibling_folder: Path, contribution: Contribution
) -> None:
    lie = altered(contribution, "work", contribute(sibling_folder, plan()).work)
    found = merge(policy_folder, lie)
    assert found.calibration.machines[1].outside >= 320
    assert "is an outlier" in str(found.refusal)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("weights", hex0x(bytes(32)), "measured with the model"),
        ("recipe", hex0x(bytes(32)), "measured with the recipe"),
        ("engine", "abacus:float32", "no engine 'abacus:float32'"),
    ],
)
def test_contribution_about_something_else_is_refused(
    name: str, value: str, reason: str, policy_folder: Path, contribution: Contribution
) -> None:
    with pytest.raises(EngineError, match=reason):
        merge(policy_folder, altered(contribution, name, value))


def test_contributor_cannot_choose_what_is_sampled(
    policy_folder: Path, contribution: Contribution
) -> None:
    first, *rest = contribution.work
    chosen = altered(contribution, "work", (first.model_copy(update={"seed": "0" * 16}), *rest))
    with pytest.raises(EngineError, match="prompts or seeds are not those"):
        merge(policy_folder, chosen)


def test_contribution_that_says_more_than_it_measured_is_refused(
    policy_folder: Path, contribution: Contribution
) -> None:
    with pytest.raises(EngineError, match="does not add up"):
        merge(policy_folder, with_draws(contribution, count=1 << 30))
