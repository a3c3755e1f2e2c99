"""An environment with the wheel in it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

TOO_MUCH = 120
"""Seconds after which a command that neither started nor refused has failed."""


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, and an empty folder to work in."""

    program: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """A bare environment: nothing on the PATH, an empty home."""
        return {"PATH": "/nowhere", "HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1"}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TOO_MUCH,
            check=False,
        )
