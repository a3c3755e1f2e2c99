"""Engines of the conformance suite, each started once, with the first policy loaded."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import pytest
from _pytest.mark import ParameterSet
from conformance_policy import build_policy
from conformance_reference import Reference
from conformance_subjects import SUBJECTS, VLLM_SUBJECTS, Subject

from muster.inference.calibration_plan import NumberFormat
from muster.inference.engine import InferenceEngine
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two policy folders that differ in weights only."""
    folder = tmp_path_factory.mktemp("policies")
    return build_policy(folder / "0", seed=0), build_policy(folder / "1", seed=1)


@pytest.fixture(scope="session")
def references(policies: tuple[Path, Path]) -> tuple[Reference, Reference]:
    return Reference(policies[0]), Reference(policies[1])


@pytest.fixture(scope="session")
def reference(references: tuple[Reference, Reference]) -> Reference:
    return references[0]


def parameter(name: str) -> ParameterSet:
    marks = (pytest.mark.slow, pytest.mark.vllm) if name in VLLM_SUBJECTS else ()
    return pytest.param(name, marks=marks)


@pytest.fixture(params=map(parameter, SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]


class Started:
    """Running engines by subject. A fixture by parameter would start them anew in random order."""

    def __init__(self, stack: ExitStack, device: str) -> None:
        self._stack, self._device = stack, device
        self._engines: dict[int, InferenceEngine] = {}

    def of(self, subject: Subject) -> InferenceEngine:
        """Return the subject's engine, starting it if need be."""
        if id(subject) not in self._engines:
            self._engines[id(subject)] = self._stack.enter_context(subject.start(self._device))
        return self._engines[id(subject)]


@pytest.fixture(scope="session")
def started(pytestconfig: pytest.Config) -> Iterator[Started]:
    with ExitStack() as stack:
        yield Started(stack, pytestconfig.getoption("device"))


@pytest.fixture
def engine(subject: Subject, started: Started, policies: tuple[Path, Path]) -> InferenceEngine:
    engine = started.of(subject)
    if engine.policy_version != 0:
        engine.load_policy(policies[0], PolicyVersion(0))
    return engine


@pytest.fixture(scope="session")
def parties(policies: tuple[Path, Path]) -> dict[NumberFormat, InferenceEngine]:
    """The transformers engine in each number format on a CPU, on the first policy."""
    engines: dict[NumberFormat, InferenceEngine] = {}
    for dtype in get_args(NumberFormat):
        engines[dtype] = TransformersEngine(dtype)
        engines[dtype].load_policy(policies[0], PolicyVersion(0))
    return engines


@pytest.fixture
def other(subject: Subject, parties: dict[NumberFormat, InferenceEngine]) -> InferenceEngine:
    """The other party: transformers in the subject's number format."""
    return parties[subject.dtype]
