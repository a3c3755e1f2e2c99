"""What vLLM's process runs first: makes this very code importable there, then serves.

Started as a script by another environment's Python, with the number of the socket and the folders
that hold `muster`. Both processes so run the same code, wherever it is installed, and the
environment needs none of its own.
"""

from __future__ import annotations

import sys
import types


def _make_importable(folders: list[str]) -> None:
    package = types.ModuleType("muster")
    package.__path__ = folders
    sys.modules["muster"] = package


if __name__ == "__main__":
    _make_importable(sys.argv[2:])
    from muster.inference.vllm.host import serve

    serve(int(sys.argv[1]))
