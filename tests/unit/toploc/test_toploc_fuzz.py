"""No bytes crash, hang or confuse the verifier: everything parses or is refused by name."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from kernel_building import compile_kernel, needs_compiler, sanitizer_runtime
from proof_fuzzing import REASONS, Sample, hostile_bytes, read_corpus, samples

from muster.protocol.errors import ProofError
from muster.toploc import ChunkResult, build_proofs, kernel, verify_proofs
from muster.toploc.chunks import cut
from muster.toploc.kernel import Kernel
from muster.toploc.portable import Portable

Result = TypeVar("Result")

BACKENDS: list[Kernel | Portable] = [b for b in (kernel.load(), Portable()) if b is not None]

cases = samples.flatmap(lambda sample: st.tuples(st.just(sample), hostile_bytes(sample)))


@pytest.mark.parametrize(
    ("sample", "joined", "outcome"), [pytest.param(*entry, id=why) for why, *entry in read_corpus()]
)
def test_corpus_gets_its_outcome(sample: Sample, joined: bytes, outcome: str) -> None:
    check(sample, joined)
    split = sample.split(joined)
    assert (split if isinstance(split, str) else "proofs") == outcome


@given(cases)
def test_any_bytes_are_proofs_or_refused_by_name(case: tuple[Sample, bytes]) -> None:
    check(*case)


@pytest.mark.slow
@settings(max_examples=12_000)
@given(cases)
def test_any_bytes_are_proofs_or_refused_by_name_for_minutes(case: tuple[Sample, bytes]) -> None:
    check(*case)


def check(sample: Sample, joined: bytes) -> None:
    """Fail unless parser and verifiers agree: refused by all for one reason, or accepted by all."""
    split = sample.split(joined)
    if isinstance(split, str):
        assert split in REASONS
        return
    assert b"".join(split) == joined
    verdicts = [verdict(backend, sample, split) for backend in BACKENDS]
    assert all(found == verdicts[0] for found in verdicts)
    assert isinstance(verdicts[0], list)
    for result in verdicts[0]:
        assert 0 <= result.exponent_mismatches <= result.points
        assert 0 <= result.mantissa_error_mean <= 127 or result.mantissa_error_mean == 2.0**64


def verdict(
    backend: Kernel | Portable, sample: Sample, proofs: list[bytes]
) -> list[ChunkResult] | str:
    chunks = cut([sample.hidden()], chunk_tokens=sample.chunk_tokens, topk=sample.topk)
    return outcome_of(lambda: backend.verify(chunks, proofs))


def outcome_of(call: Callable[[], Result]) -> Result | str:
    """Return what a call returns, or the reason of its ProofError."""
    try:
        return call()
    except ProofError as error:
        return error.reason


@given(samples, st.lists(st.binary(max_size=40), max_size=6))
def test_any_list_of_proofs_is_measured_or_refused_by_name(
    sample: Sample, proofs: list[bytes]
) -> None:
    shape = {"chunk_tokens": sample.chunk_tokens, "topk": sample.topk}
    outcome = outcome_of(lambda: verify_proofs(sample.hidden(), proofs, **shape))
    assert isinstance(outcome, list) or outcome in REASONS


@given(samples, st.binary(min_size=1, max_size=64))
def test_any_hidden_states_are_proven_unless_not_finite(sample: Sample, noise: bytes) -> None:
    bits = np.resize(np.frombuffer(noise + noise, np.uint16), (sample.tokens, sample.hidden_size))
    shape = {"chunk_tokens": sample.chunk_tokens, "topk": sample.topk}
    outcome = outcome_of(lambda: build_proofs(bits, **shape))
    if ((bits & 0x7F80) == 0x7F80).any():
        assert outcome == "hidden"
    else:
        assert sample.split(b"".join(outcome)) == outcome


@needs_compiler
@pytest.mark.slow
def test_kernel_stays_inside_its_memory(tmp_path: Path) -> None:
    flags = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -DWIDEST_VECTORS="
    library = compile_kernel(tmp_path / "sanitized.so", *flags.split())
    script = Path(__file__).with_name("sanitized_kernel.py")
    # Python itself leaks on purpose, so only bad accesses count here.
    done = subprocess.run(
        [sys.executable, str(script), str(library), "2000"],
        env={**os.environ, "LD_PRELOAD": sanitizer_runtime(), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2000 rounds\n"), done.stderr
