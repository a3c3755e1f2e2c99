"""The recipes that come with the software, by name: `configs/` in a checkout, here in a wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_PLACES = (Path(__file__).parent / "presets", Path(__file__).parents[3] / "configs")


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted({path.stem for place in _PLACES for path in place.glob("*.toml")})


def find_preset(name: str) -> Path | None:
    """Return the file of a preset; None when there is none of that name."""
    if name not in preset_names():
        return None
    return next(path for place in _PLACES if (path := place / f"{name}.toml").exists())


class RecipePath(click.Path):
    """A recipe on a command line: a file's path, or the name of a preset."""

    name = "recipe"

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; fails with the presets' names when it is neither."""
        if Path(value).is_file():  # a folder may be called like a preset
            return super().convert(value, param, ctx)
        preset = find_preset(str(value))
        if preset is None:
            names = ", ".join(preset_names())
            self.fail(f"{str(value)!r} is no file, and no preset ({names})", param, ctx)
        return preset


RECIPE = RecipePath()
