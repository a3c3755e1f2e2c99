"""Compiling the kernel in tests, with the build hook's own compiler and flags."""

import subprocess
from pathlib import Path

import pytest
from scripts import load_script

from muster.toploc import kernel

ROOT = Path(__file__).parents[3]


SCRIPT = load_script("tools/build_kernel.py")


def _has_compiler() -> bool:
    try:
        SCRIPT.find_compiler()
    except SCRIPT.KernelError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no C compiler")


def compile_kernel(library: Path, *flags: str) -> Path:
    """Compile the kernel with more flags, warnings as errors; the library is not loaded."""
    digest = f'-DSOURCE_DIGEST="{SCRIPT.source_digest(kernel.FOLDER)}"'
    subprocess.run(
        [
            *(*SCRIPT.find_compiler(), *SCRIPT.FLAGS, "-Wall", "-Wextra", "-Werror", digest),
            *(*flags, str(kernel.FOLDER / "proofs.c"), "-o", str(library)),
        ],
        check=True,
    )
    return library


def sanitizer_runtime() -> str:
    """Return the path of the compiler's address sanitizer, or its bare name for none."""
    command = [*SCRIPT.find_compiler(), "-print-file-name=libasan.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
