"""What vLLM's process runs first: makes this very code importable there, then serves.

Started as a script by another environment's Python, with the number of the socket and the folders
that hold `muster`. Both processes so run the same code, wherever it is installed, and the
environment needs none of its own. Imports nothing but what requirements-cpu.txt lists.
"""

from __future__ import annotations

import sys
import types


def make_importable(folders: list[str]) -> None:
    """Let `muster` be imported from the folders that hold its parts."""
    _add_package("muster", folders)
    # Its __init__ brings what workers and validators need, and packages that are not here.
    _add_package("muster.inference", [f"{folder}/inference" for folder in folders])


def _add_package(name: str, folders: list[str]) -> None:
    package = types.ModuleType(name)
    package.__path__ = folders
    sys.modules[name] = package


if __name__ == "__main__":
    make_importable(sys.argv[2:])
    from muster.inference.vllm.host import serve

    serve(int(sys.argv[1]))
