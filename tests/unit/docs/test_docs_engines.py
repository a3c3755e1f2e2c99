"""docs/architecture.md: the models that the fast decoder computes."""

from pathlib import Path

from muster.inference.lean_model import FAMILIES

DOCS = Path(__file__).parents[3] / "docs"


def test_the_fast_decoders_families_are_those_of_the_table() -> None:
    names = sorted(name.removesuffix("ForCausalLM") for name in FAMILIES)
    assert f"| {', '.join(names)} | `lean_rows`" in (DOCS / "architecture.md").read_text()
