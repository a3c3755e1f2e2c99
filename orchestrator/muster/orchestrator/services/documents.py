"""The documents a run pins on chain, read once and checked against their hashes."""

from __future__ import annotations

from pathlib import Path

from muster.chain import RunConfig
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32


def load_documents(folder: Path, config: RunConfig) -> dict[Hash32, bytes]:
    """Return the run's recipe, calibration and task set by hash.

    Raises ConfigError when one is missing or is not what the chain pins.
    """
    names = {
        "recipe": config.recipe_hash,
        "calibration": config.calibration_hash,
        "task set": config.task_set_hash,
    }
    return {pinned: _load(folder, name, pinned) for name, pinned in names.items()}


def _load(folder: Path, name: str, pinned: Hash32) -> bytes:
    hint = f"put it into {folder} under that name; `muster run create` wrote it (--documents)"
    for path in (folder / pinned.hex(), folder / hex0x(pinned)):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if keccak(data) != pinned:
            raise ConfigError(f"{path} is not the {name} that the chain pins", hint=hint)
        return data
    raise ConfigError(f"the run's {name} {pinned.hex()} is not in {folder}", hint=hint)
