"""The documents a run pins on chain, checked against their hashes when the orchestrator starts.

Recipe and calibration are read into memory. A task set, which may be large, stays on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from muster.chain import RunConfig
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.ids import Hash32
from muster.tasks import document_root

Documents: TypeAlias = Mapping[Hash32, bytes | Path]
"""By the hash that the chain pins: the bytes, or the file that holds them."""


def load_documents(folder: Path, config: RunConfig) -> Documents:
    """Return the run's recipe, calibration and task set by hash.

    Raises ConfigError when one is missing or is not what the chain pins.
    """
    return {
        config.recipe_hash: _load(folder, "recipe", config.recipe_hash),
        config.calibration_hash: _load(folder, "calibration", config.calibration_hash),
        config.task_set_hash: _task_set(folder, config.task_set_hash),
    }


def _load(folder: Path, name: str, pinned: Hash32) -> bytes:
    path = _find(folder, name, pinned)
    data = path.read_bytes()
    if keccak(data) != pinned:
        raise _other(path, name, folder)
    return data


def _task_set(folder: Path, pinned: Hash32) -> Path:
    path = _find(folder, "task set", pinned)
    try:
        found = document_root(path)
    except MusterError as error:
        raise _other(path, "task set", folder) from error
    if found != pinned:
        raise _other(path, "task set", folder)
    return path


def _find(folder: Path, name: str, pinned: Hash32) -> Path:
    for path in (folder / pinned.hex(), folder / hex0x(pinned)):
        if path.is_file():
            return path
    raise ConfigError(f"the run's {name} {pinned.hex()} is not in {folder}", hint=_hint(folder))


def _other(path: Path, name: str, folder: Path) -> ConfigError:
    return ConfigError(f"{path} is not the {name} that the chain pins", hint=_hint(folder))


def _hint(folder: Path) -> str:
    return f"put it into {folder} under that name; `muster run create` wrote it (--documents)"
