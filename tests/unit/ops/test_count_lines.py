"""The definition of a line of code."""

from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def counter() -> ModuleType:
    """The script."""
    return load_script("tools/count_lines.py")


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("x = 1\n", 1),
        ("x = 1  # why\n\n# a comment\n", 1),
        ('"""A module.\n\nMore of it.\n"""\n\nx = 1\n"""What x is."""\n', 1),
        ('def f():\n    """Do nothing."""\n', 1),
        ('def f():\n    """Add."""\n    return (\n        1\n        # 1\n        + 2\n    )\n', 5),
        ('x = """\n\ntext that is a value\n"""\n', 4),
        ('x = [\n    "a string",\n    # none\n]\n', 3),
    ],
)
def test_lines_of_code_are_those_with_a_token(counter: ModuleType, source: str, lines: int) -> None:
    assert counter.code_lines(source) == lines


def test_the_lab_is_not_counted_as_product(
    counter: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("core/a.py", "client/b.py", f"{counter.LAB[0]}/c.py", "tests/d.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * len(name))
    monkeypatch.setattr(counter, "ROOT", tmp_path)
    counter.main(["--folders"])
    assert capsys.readouterr().out.splitlines() == [
        "    11 lines   1 modules  client",
        "     9 lines   1 modules  core",
        "product_code_lines 20",
        "product_modules 2",
        "product_median_lines 10",
        "product_p95_lines 11",
        f"lab_code_lines {len(counter.LAB[0]) + 5}",
        "tests_code_lines 10",
    ]
