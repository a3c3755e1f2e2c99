"""The mutation drill of the Python: what it changes, and that it leaves nothing changed."""

from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script

SOURCE = b'''"""A bound: 1 < 2."""
LIMIT: Literal[1] = 1 << 4

@dataclass(frozen=True)
def check(value: Literal[3], is_open):
    if value >= LIMIT and not is_open:
        raise ValueError(f"{value + 1} is too much")
    return value + 1
'''


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    return load_script(Path(__file__).parents[3] / "tools" / "mutate.py")


def test_mutants_change_what_code_does_and_nothing_else(mutate: ModuleType) -> None:
    found = {
        (mutant.line, mutant.of(SOURCE)[mutant.start :].split(b"\n")[0].decode())
        for mutant in mutate.mutants_of(Path("a.py"), SOURCE)
    }
    assert found == {
        (2, "(1 >> 4)"),
        (2, "(2) << 4"),
        (2, "(5)"),
        (6, "(value >= LIMIT or not is_open):"),
        (6, "(value > LIMIT) and not is_open:"),
        (6, "(is_open):"),
        (7, "pass"),
        (8, "(value - 1)"),
        (8, "(2)"),
    }


def test_mutants_are_drawn_the_same_for_a_seed(mutate: ModuleType) -> None:
    drawn = mutate.draw(5, 1)
    assert len(set(drawn)) == 5
    assert mutate.draw(5, 1) == drawn


@pytest.mark.parametrize(("second", "is_killed"), [(2, True), (0, False)])
def test_mutant_is_killed_by_a_failing_test_alone(
    mutate: ModuleType, tmp_path: Path, second: int, *, is_killed: bool
) -> None:
    module, test = tmp_path / "summed.py", tmp_path / "test_summed.py"
    module.write_text("def summed(a, b):\n    return a + b\n")
    test.write_text(
        "from summed import summed\n\ndef test_sum():\n"
        f"    assert summed(1, {second}) == {1 + second}\n"
    )
    [mutant] = mutate.mutants_of(Path(module.name), module.read_bytes())
    assert mutate.is_killed(tmp_path, mutant, {test.name}) is is_killed
    assert module.read_text().endswith("return a + b\n")
