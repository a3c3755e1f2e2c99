"""The engine of vLLM with a process that fails on demand in vLLM's place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import faulty_device
import pytest
import vllm_double

from muster.inference.engine import (
    Examined,
    Progress,
    Redraw,
    Request,
    Sample,
    Share,
)
from muster.inference.vllm.engine import Patience, ProcessEngine, VllmEngine
from muster.inference.vllm.host import HostedTransformers
from muster.protocol.errors import EngineError, EngineSilent, ProofError
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.recipe import ProofRecipe
from muster.protocol.set_aside import FILE_NAME, SetAside

PROOF = ProofRecipe()
DOUBLE = Path(vllm_double.__file__)
ASKED = [Request((1, 2, 3), seed, 1.0, 8) for seed in range(4)]
EXPECTED = [(seed, 3, vllm_double.EOS) for seed in range(4)]

Open = Callable[..., VllmEngine]


def policy(folder: Path, mode: str = "") -> Path:
    folder.mkdir()
    (folder / "mode").write_text(mode)
    return folder


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    engines = []

    def open_(mode: str = "", silence_s: float = 20.0, restarts: int = 2) -> VllmEngine:
        patience = Patience(open_s=20.0, silence_s=silence_s, restarts=restarts)
        engine = VllmEngine(python=Path(sys.executable), child=DOUBLE, patience=patience)
        engines.append(engine)
        engine.load_policy(policy(tmp_path / "policy", mode), PolicyVersion(3))
        return engine

    yield open_
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """One engine for tests that do not change it."""
    engine = VllmEngine(python=Path(sys.executable), child=DOUBLE)
    engine.load_policy(policy(tmp_path_factory.mktemp("serving") / "policy"), PolicyVersion(3))
    yield engine
    engine.close()


def tokens(engine: VllmEngine) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in engine.generate(ASKED, proof=PROOF)]


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def ends(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def test_list_of_problems_set_aside_is_the_loaded_folder_s(opened: Open, tmp_path: Path) -> None:
    engine = opened()
    assert engine.set_aside == SetAside()
    listed = policy(tmp_path / "listed")
    (listed / FILE_NAME).write_bytes(b"\x05")
    engine.load_policy(listed, PolicyVersion(4))
    assert engine.set_aside == SetAside(b"\x05")
    (listed / FILE_NAME).unlink()
    assert engine.set_aside == SetAside(b"\x05")
    with pytest.raises(EngineError, match="no policy is loaded"):
        _ = VllmEngine(python=Path(sys.executable), child=DOUBLE).set_aside


def test_answers_come_in_the_order_asked_with_their_proofs(serving: VllmEngine) -> None:
    engine = serving
    made = engine.generate(ASKED, proof=PROOF)
    assert [completion.tokens for completion in made] == EXPECTED
    assert {tuple(completion.proofs) for completion in made} == {(b"a", b"bc")}
    assert engine.encode("ab") == (97, 98)
    assert engine.generate([], proof=PROOF) == engine.prove([], proof=PROOF) == []
    assert engine.examine([], proof=PROOF, temperature=1.0) == []


SAMPLES = [
    Sample((1,), (5, 6, 7), 9, [b"abc", b"d"]),
    Sample(
        (1, 2),
        (8,),
        2**64 - 1,
        [b"ab"],
        (Share(Hash32(bytes(range(32))), 3, 70),),
        (Redraw(4, (9,)), Redraw(0, (3,))),
    ),
]


def assert_findings(found: Sequence[Examined]) -> None:
    for sample, each in zip(SAMPLES, found, strict=True):
        expected = vllm_double.found_in(sample)
        assert each.chunks == expected.chunks
        assert each.projections.tolist() == expected.projections.tolist()
        pairs = [(each.replayed, expected.replayed)]
        pairs += zip(each.redrawn, expected.redrawn, strict=True)
        for got, wanted in pairs:
            assert got.margins_T.tolist() == wanted.margins_T.tolist()
            assert got.expected_T.tolist() == wanted.expected_T.tolist()
            assert got.is_likelier_T.tolist() == wanted.is_likelier_T.tolist()
        assert (each.ends_T is None) == (expected.ends_T is None)
    assert found[1].ends_T == pytest.approx([0.5])


def test_findings_come_in_the_order_asked(serving: VllmEngine) -> None:
    assert_findings(serving.examine(SAMPLES, proof=PROOF, temperature=0.6))


def test_proofs_come_in_the_order_asked(serving: VllmEngine) -> None:
    pairs = [((1,), (5, 6, 7)), ((1, 2), (8,))]
    assert serving.prove(pairs, proof=PROOF) == [[b"\5\6\7"], [b"\x08"]]


@pytest.mark.parametrize("failure", ["forgets", "finds too little"])
def test_missing_findings_are_asked_for_again(opened: Open, tmp_path: Path, failure: str) -> None:
    engine = opened(f"once {failure}")
    assert_findings(engine.examine(SAMPLES, proof=PROOF, temperature=0.6))
    assert (tmp_path / "asked").read_text() == "examine\n" * 2


def test_samples_without_numbers_are_no_failure_of_the_process(opened: Open) -> None:
    engine = opened("once finds nonsense")
    before = engine.pid
    with pytest.raises(ProofError, match="NaN"):
        engine.examine(SAMPLES, proof=PROOF, temperature=0.6)
    assert_findings(engine.examine(SAMPLES, proof=PROOF, temperature=0.6))
    assert engine.pid == before


@pytest.mark.parametrize(
    "failure", ["dies", "ends", "hangs", "breaks", "talks nonsense", "forgets", "answers too much"]
)
def test_failure_is_survived_by_another_process(opened: Open, failure: str) -> None:
    engine = opened(f"once {failure}", silence_s=1.0 if failure == "hangs" else 20.0)
    before = engine.pid
    assert tokens(engine) == EXPECTED
    assert engine.pid != before
    assert before is not None
    assert not is_running(before)
    assert engine.policy_version == 3


def test_what_was_answered_before_a_failure_is_not_asked_again(
    opened: Open, tmp_path: Path
) -> None:
    engine = opened("once dies")
    assert tokens(engine) == EXPECTED
    # Samples 3 and 2 were answered; the second process was asked for 0 and 1 alone.
    assert (tmp_path / "asked").read_text() == "generate\n" * 2


def test_signs_of_life_keep_a_slow_process(opened: Open) -> None:
    engine = opened("once is slow", silence_s=0.5)
    before = engine.pid
    assert tokens(engine) == EXPECTED
    assert engine.pid == before


def test_what_a_watch_raises_ends_its_call_and_not_the_process(opened: Open) -> None:
    engine = opened("once is slow")
    before, told = engine.pid, []

    def stop(made: Progress) -> None:
        told.append(made)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(ASKED, proof=PROOF, watch=stop)
    assert told == [Progress(3, 1, 2)]
    # A late answer to the first question is dropped.
    assert tokens(engine) == EXPECTED
    assert engine.pid == before


def test_silence_for_ever_is_an_error_of_its_own(opened: Open) -> None:
    engine = opened("always hangs", silence_s=1.0, restarts=1)
    with pytest.raises(
        EngineSilent, match="failed 2 times in a row, last: it said nothing for 1 s"
    ):
        engine.generate(ASKED, proof=PROOF)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("dies", "killed by signal 9: Killed"),
        ("ends", "ended with code 1: out of memory"),
        ("breaks", "RuntimeError: no"),
        ("talks nonsense", "too long"),
        ("forgets", "3 of 4 samples"),
        ("answers too much", "9 tokens"),
    ],
)
def test_failure_for_ever_is_an_error_that_says_how(opened: Open, failure: str, said: str) -> None:
    engine = opened(f"always {failure}", restarts=1)
    with pytest.raises(EngineError, match=f"failed 2 times in a row, last: .*{said}") as caught:
        engine.generate(ASKED, proof=PROOF)
    assert not isinstance(caught.value, EngineSilent)
    assert engine.pid is None
    # The policy is still the engine's: with more memory the next batch may pass.
    assert engine.policy_version == 3


def test_process_killed_between_batches_is_replaced(opened: Open) -> None:
    engine = opened()
    assert engine.pid is not None
    os.kill(engine.pid, 9)
    assert tokens(engine) == EXPECTED


def test_opening_that_kills_is_given_up_with_what_it_said(opened: Open) -> None:
    with pytest.raises(EngineError, match=r"failed 3 times.*no room for the model"):
        opened("dies opening")


def test_refused_policy_is_not_tried_twice_and_leaves_none(opened: Open, tmp_path: Path) -> None:
    engine = opened()
    with pytest.raises(EngineError, match="no such model") as refusal:
        engine.load_policy(policy(tmp_path / "other", "refuses"), PolicyVersion(4))
    assert refusal.value.hint == "another"
    assert engine.policy_version is None
    with pytest.raises(EngineError, match="no policy is loaded"):
        engine.generate(ASKED, proof=PROOF)


def test_policy_that_changed_on_disk_is_not_loaded_again(opened: Open, tmp_path: Path) -> None:
    engine = opened()
    (tmp_path / "policy" / "mode").write_text("something else")
    engine.close()
    with pytest.raises(EngineError, match="changed while it was loaded"):
        engine.generate(ASKED, proof=PROOF)
    assert engine.policy_version is None


def test_missing_folder_is_refused_without_a_process(tmp_path: Path) -> None:
    engine = VllmEngine(python=Path(sys.executable), child=DOUBLE)
    with pytest.raises(EngineError, match="no policy folder"):
        engine.load_policy(tmp_path / "nowhere", PolicyVersion(0))
    assert engine.pid is None


def test_interpreter_that_does_not_start_is_an_engine_error(tmp_path: Path) -> None:
    engine = VllmEngine(python=tmp_path / "python", child=DOUBLE)
    with pytest.raises(EngineError, match="does not start"):
        engine.load_policy(policy(tmp_path / "policy"), PolicyVersion(0))


def test_process_ends_with_its_engine(opened: Open) -> None:
    engine = opened()
    pid = engine.pid
    assert pid is not None
    engine.close()
    assert not is_running(pid)


def test_engine_that_nobody_holds_ends_its_process(tmp_path: Path) -> None:
    engine = VllmEngine(python=Path(sys.executable), child=DOUBLE)
    engine.load_policy(policy(tmp_path / "policy"), PolicyVersion(0))
    pid = engine.pid
    assert pid is not None
    del engine
    assert ends(pid)


OWNER = """
import sys, time
from pathlib import Path
from muster.inference.vllm.engine import VllmEngine
engine = VllmEngine(python=Path(sys.executable), child=Path(sys.argv[1]))
engine.load_policy(Path(sys.argv[2]), 0)
print(engine.pid, flush=True)
time.sleep(3600)
"""


def test_process_ends_with_its_owner_however_that_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(DOUBLE), str(policy(tmp_path / "policy"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
    assert ends(pid)


@pytest.fixture
def computing(policy_folder: Path, tmp_path: Path) -> Iterator[ProcessEngine]:
    """An engine that computes, in a process whose device `tmp_path / "fault"` lets fail."""
    engine = ProcessEngine(child=Path(faulty_device.__file__), patience=Patience(restarts=1))
    engine.load_policy(shutil.copytree(policy_folder, tmp_path / "policy"), PolicyVersion(3))
    yield engine
    engine.close()


def test_lost_device_is_survived_by_another_process(
    computing: ProcessEngine, tmp_path: Path
) -> None:
    before = computing.pid
    expected = computing.prove([((1,), (5, 6, 7))], proof=PROOF)
    (tmp_path / "fault").write_text("AcceleratorError")
    assert computing.prove([((1,), (5, 6, 7))], proof=PROOF) == expected
    assert computing.pid != before
    assert computing.policy_version == 3


def test_lack_of_memory_on_a_device_ends_one_call(computing: ProcessEngine, tmp_path: Path) -> None:
    before = computing.pid
    (tmp_path / "fault").write_text("OutOfMemoryError")
    with pytest.raises(EngineError, match="inference failed: CUDA out of memory"):
        computing.prove([((1,), (5, 6, 7))], proof=PROOF)
    assert len(computing.prove([((1,), (5, 6, 7))], proof=PROOF)) == 1
    assert computing.pid == before


@pytest.mark.parametrize(("pass_tokens", "passes"), [(1, 20), (60, 2), (1 << 14, 1)])
def test_hosted_transformers_give_a_sign_of_life_after_every_pass(
    policy_folder: Path, pass_tokens: int, passes: int
) -> None:
    options = {"dtype": "float32", "threads": 1, "max_rows": 64, "batch_tokens": pass_tokens}
    # The device "cpu" would bound the memory of this process.
    options |= {"device": "cpu:0", "context": None, "memory_share": None}
    hosted, told = HostedTransformers(policy_folder, options), []
    pairs = [((i // 10, i % 10), (5, 6, 7)) for i in range(20)]
    proven = dict(hosted.prove(pairs, PROOF, tick=told.append))
    assert (sorted(proven), len(told)) == (list(range(20)), passes)
    samples = [Sample(*pair, 9, proven[i].proofs) for i, pair in enumerate(pairs)]
    found = dict(hosted.examine(samples, PROOF, 1.0, tick=told.append))
    assert (sorted(found), len(told)) == (list(range(20)), 2 * passes)
    assert not any(c.exponent_mismatches for each in found.values() for c in each.chunks)
