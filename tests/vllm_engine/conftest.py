"""Real vLLM: skipped without its environment, which `make test-vllm` installs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from muster.inference.vllm.engine import VllmEngine
from muster.inference.vllm.launcher import find_python
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion

TESTS = Path(__file__).parents[1]
# The policy of the engines' conformance suite, and the clients' network.
sys.path += [str(TESTS / "conformance" / "engines"), str(TESTS / "integration")]


@pytest.fixture(scope="session", autouse=True)
def python() -> Path:
    try:
        return find_python()
    except EngineError as error:
        pytest.skip(f"no vLLM: {error}")


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Policy folders that differ in weights only."""
    from conformance_policy import build_policy

    folder = tmp_path_factory.mktemp("policies")
    return [build_policy(folder / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="session")
def shared_engine(python: Path, policies: list[Path]) -> Iterator[VllmEngine]:
    engine = VllmEngine(python=python)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: VllmEngine, policies: list[Path]) -> VllmEngine:
    if shared_engine.policy_version != 0:
        shared_engine.load_policy(policies[0], PolicyVersion(0))
    return shared_engine


def vllm_processes() -> list[psutil.Process]:
    """The running vLLM processes of this process's engines."""
    children = psutil.Process().children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "inference/vllm/child.py" in " ".join(child.cmdline())]
