"""The models that the fast decoder computes, and how vLLM is installed for a GPU."""

import re
from pathlib import Path

from muster.inference.lean_model import FAMILIES
from muster.inference.vllm.launcher import GPU_REQUIREMENTS

DOCS = Path(__file__).parents[3] / "docs"


def test_the_fast_decoders_families_are_those_of_the_table() -> None:
    names = sorted(name.removesuffix("ForCausalLM") for name in FAMILIES)
    assert f"| {', '.join(names)} | `lean_rows`" in (DOCS / "architecture.md").read_text()


def test_the_environment_for_a_gpu_has_what_muster_imports_there() -> None:
    text = " ".join((DOCS / "engines.md").read_text().split())
    found = re.search(r"\.envs/vllm/bin/pip install --requirement ([^ `]+)`", text)
    assert found is not None
    assert (DOCS.parent / found[1]).samefile(GPU_REQUIREMENTS)
    assert "pip install vllm" not in text
