"""The first code of vLLM's process: makes this same code importable there, then serves.

Started as a script by another environment's Python, with the number of the socket and the folders
that hold `muster`. So both processes run the same code, and the environment does not need to have
Muster installed. Imports nothing but what requirements-cpu.txt lists.
"""

from __future__ import annotations

import sys
import types


def make_importable(folders: list[str]) -> None:
    """Let `muster` be imported from the folders that hold its parts."""
    _add_package("muster", folders)
    # Its __init__ would import packages that only workers and validators have.
    _add_package("muster.inference", [f"{folder}/inference" for folder in folders])


def _add_package(name: str, folders: list[str]) -> None:
    package = types.ModuleType(name)
    package.__path__ = folders
    sys.modules[name] = package


# vLLM's workers on several GPUs are spawned: Python runs this file in each under the second name.
if __name__ in ("__main__", "__mp_main__"):
    make_importable(sys.argv[2:])

if __name__ == "__main__":
    from muster.inference.vllm.host import serve

    serve(int(sys.argv[1]))
