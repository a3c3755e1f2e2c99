"""What a run asks of the software that takes part: its version, its engine, the engine's version.

Asked before a model is loaded. Work of software that the run was not measured with would be
rejected, and its worker punished, for no fault of theirs.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import TYPE_CHECKING

from muster.protocol.errors import ConfigError

if TYPE_CHECKING:
    from muster.client.doctor.command import Examination
    from muster.client.settings import EngineSettings, NodeSettings
    from muster.protocol.recipe import Recipe
    from muster.toploc import Calibration

PACKAGE = "muster-rl"


def installed_version() -> str:
    """Return the version of this software."""
    return metadata.version(PACKAGE)


def engine_name(settings: EngineSettings | Examination) -> str:
    """Return what a calibration calls the engine and number format of these settings, and the
    layout of a model over several devices.
    """
    name = f"{settings.engine}:{settings.dtype}"
    return f"{name}:tp{settings.tensor_parallel}" if settings.tensor_parallel > 1 else name


def require_software(recipe: Recipe, version: str) -> None:
    """Raise ConfigError when the run pins a newer version than this one."""
    if _numbers(version) < _numbers(recipe.min_software):
        raise ConfigError(
            f"this is {PACKAGE} {version}, the run asks for {recipe.min_software} or newer",
            hint=f"pip install --upgrade {PACKAGE}, then start again",
        )


def require_covered(calibration: Calibration, engine: str) -> None:
    """Raise ConfigError when the run's limits were not measured with an engine."""
    covered = [name.strip() for name in calibration.model.engine.split(",")]
    if engine not in covered:
        raise ConfigError(
            f"the run is calibrated for {', '.join(covered)}, not for {engine}: "
            "honest work might be rejected",
            hint="choose one of those with --engine, --dtype and --tensor-parallel, or ask the "
            "run's owner to calibrate for this one",
        )


def require_pinned_engine(requirements: list[str] | None = None) -> None:
    """Raise ConfigError when what runs the model is not the version that this software pins.

    `requirements` are the package's own. A package that is not installed is passed over: the
    command that imports it reports that.
    """
    for name, pinned in _pins(metadata.requires(PACKAGE) if requirements is None else requirements):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        # A build's own part (+cpu, +cu130) says where it runs, not what it computes.
        if found.split("+")[0] != pinned:
            raise ConfigError(
                f"{name} {found} is installed, limits are measured with {pinned}",
                hint="pip install 'muster-rl[model]' brings the pinned versions",
            )


def require_fit(recipe: Recipe, calibration: Calibration, settings: NodeSettings) -> None:
    """Raise ConfigError when this software must not take part in a run, and why."""
    require_software(recipe, installed_version())
    require_covered(calibration, engine_name(settings))
    require_pinned_engine()


def _pins(requirements: list[str] | None) -> list[tuple[str, str]]:
    """Return the exactly pinned packages of the extra that runs models."""
    pattern = re.compile(r"([A-Za-z0-9_.-]+)==([0-9.]+)\s*;.*extra == ['\"]model['\"]")
    found = (pattern.fullmatch(text.strip()) for text in requirements or ())
    return [(match[1], match[2]) for match in found if match]


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's release; trailing zeros say nothing, nor does what follows it (rc1)."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
