"""Compiles the C kernels: hatchling's build hook, and `python tools/build_kernel.py` by hand.

Each of FOLDERS has one C file and its headers, and gets a library with the C file's name beside it.
Without a working C compiler the installation continues, and the package computes in Python.
Libraries are loaded by ctypes, so one library works with every Python version.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

TOPLOC = Path("core/muster/toploc/native")
SHARDCAST = Path("core/muster/shardcast/native")
PROTOCOL = Path("core/muster/protocol/native")
INFERENCE = Path("core/muster/inference/native")
FOLDERS = {
    TOPLOC: "TOPLOC proofs",
    SHARDCAST: "weight deltas",
    PROTOCOL: "Keccak hashes",
    INFERENCE: "choices of tokens",
}
"""Folders, and what is computed in Python if a folder's library is missing."""
DATA = {
    "configs": "muster/settings/presets",
}
"""Folders of a checkout and their places in a wheel; an editable installation needs no copy."""
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"]
LIBRARIES = ["-lm"]
PLAIN = ["-DWIDEST_VECTORS="]
"""Options for compilers that cannot make code for several instruction sets at once."""


class KernelError(Exception):
    """The kernel cannot be compiled here; the message says why."""


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]  # of hatchling's own configuration
    """Puts libraries into wheels, and into the source tree of an editable installation."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling collects a wheel's files."""
        if self.target_name != "wheel":
            return
        if version != "editable":
            build_data["force_include"].update(DATA)
        for folder, what in FOLDERS.items():
            try:
                library = compile_kernel(Path(self.root) / folder)
            except KernelError as error:
                self.app.display_warning(f"{what} will be computed in Python, slowly: {error}")
                continue
            if version != "editable":
                inside = folder.relative_to("core") / library.name
                build_data["force_include"][str(library)] = str(inside)
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{next(sys_tags()).platform}"


def compile_kernel(folder: Path) -> Path:
    """Return the library made of the C sources in `folder`, beside them; raises KernelError."""
    compiler = find_compiler()
    library = main_source(folder).with_suffix(".so")
    try:
        # After a failure, a library made of other sources must not stay.
        library.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            if try_compiler([*compiler, *FLAGS], folder, made) is not None:
                failure = try_compiler([*compiler, *FLAGS, *PLAIN], folder, made)
                if failure is not None:
                    raise KernelError(failure)
            os.replace(made, library)
    except OSError as error:
        raise KernelError(f"{folder} is not writable: {error}") from error
    return library


def try_compiler(command: list[str], folder: Path, made: Path) -> str | None:
    """Compile a library and load it; return what failed, None if nothing did."""
    digest = f'-DSOURCE_DIGEST="{source_digest(folder)}"'
    asked = [*command, digest, str(main_source(folder)), "-o", str(made), *LIBRARIES]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{command[0]} failed: {done.stderr.strip() or done.returncode}"
    try:
        ctypes.CDLL(str(made))
    except OSError as error:
        return f"{command[0]} made a library that does not load: {error}"
    return None


def find_compiler() -> list[str]:
    """Return the C compiler's command: $CC, or Python's own, or cc, gcc or clang."""
    named = os.environ.get("CC")
    for candidate in [named] if named else [sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]:
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
    raise KernelError(f"no C compiler ({named or 'cc, gcc or clang'}); install one and reinstall")


def main_source(folder: Path) -> Path:
    """Return the one C file of a folder; it includes the others."""
    (source,) = folder.glob("*.c")
    return source


def source_digest(folder: Path) -> str:
    """Return a digest of the C sources in `folder`, which the package compares."""
    sources = sorted(folder.glob("*.[ch]"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()


if __name__ == "__main__":
    try:
        for folder in FOLDERS:
            compile_kernel(Path(__file__).parent.parent / folder)
    except KernelError as error:
        sys.exit(f"error: {error}")
