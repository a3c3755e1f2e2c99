"""A recipe is named by its file, or by the name of one that comes with the software."""

from pathlib import Path

import click
import pytest

from muster.settings.flags import RECIPE, find_preset, preset_names


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_presets_are_those_of_the_checkout() -> None:
    configs = Path(__file__).parents[3] / "configs"
    assert preset_names() == sorted(path.stem for path in configs.glob("*.toml"))
    assert find_preset("demo") == configs / "demo.toml"


@pytest.mark.parametrize("name", ["nothing", "../configs/demo", ""])
def test_other_names_are_no_presets(name: str) -> None:
    assert find_preset(name) is None


def test_folder_of_a_presets_name_is_not_in_its_way(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    assert RECIPE.convert("demo", None, None) == find_preset("demo")


def test_file_comes_before_a_preset(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("name = 'mine'")
    assert RECIPE.convert("demo", None, None) == Path("demo")


def test_what_is_neither_is_refused_with_the_presets_names() -> None:
    with pytest.raises(click.BadParameter, match=r"no file, and no preset .*intellect2-short"):
        RECIPE.convert("none.toml", None, None)
