"""The generated reference is what the code says now."""

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field
from scripts import load_script

from muster.settings import Settings

ROOT = Path(__file__).parents[3]


WRITER = load_script("tools/write_reference.py")


@pytest.mark.parametrize("name", WRITER.PAGES)
def test_page_is_current(name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text()
    assert written == WRITER.PAGES[name](), "run `make docs`"


def test_every_part_of_a_recipe_is_on_the_page() -> None:
    parts = set(WRITER.RECIPE_PARTS.values())
    for model in parts:
        for field in model.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                assert field.annotation in parts


def test_settings_of_every_process_are_on_the_page() -> None:
    found, leaves = [Settings], set()
    while found:
        model = found.pop()
        found += model.__subclasses__()
        if not model.__subclasses__() and model.__module__.startswith("muster."):
            leaves.add(model)
    assert leaves == {model for model, _ in WRITER.SETTINGS.values()}


class Example(BaseModel):
    """A model for the test."""

    count: Annotated[int, Field(ge=1, lt=9)] = 3
    """How
    many."""
    names: tuple[Annotated[str, Field(max_length=4)], ...] = ()
    """What they are called."""
    mode: Literal["a", "b"]
    """Which | one."""


def test_field_has_type_default_bounds_and_sentence() -> None:
    rows = WRITER._table(Example).splitlines()[2:]
    assert rows == [
        "| `count` | int | `3` | ≥ 1, < 9 | How many. |",
        "| `names` | list of text | none | each length ≤ 4 | What they are called. |",
        '| `mode` | "a" or "b" | *required* |  | Which &#124; one. |',
    ]


def test_no_field_lacks_a_sentence() -> None:
    assert not re.search(r"\|  \|$", WRITER.config_page(), re.M)
