"""A missing prerequisite of the README is named with the command that installs it."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tools" / "prerequisites"
# A compiler calls the assembler and the linker by their names.
NEEDED = ("sh", "mktemp", "rm", "cc", "as", "ld", "node", "npm")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with exactly the prerequisites."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    write(folder / "python3", f'exec {shlex.quote(sys.executable)} "$@"')
    return folder


def write(program: Path, script: str) -> None:
    program.unlink(missing_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def ask(programs: Path, **variables: str) -> tuple[int, list[str]]:
    """Return the script's exit status and output."""
    done = subprocess.run(
        [SCRIPT],
        env={"PATH": str(programs), "HOME": str(programs), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def test_machine_with_all_of_them_is_told_nothing(programs: Path) -> None:
    assert ask(programs) == (0, [])


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        ("python3", "python3 is not installed", "apt-get install python3"),
        ("cc", "there is no C compiler", "apt-get install gcc"),
        ("node", "Node.js is not installed", "apt-get install nodejs npm"),
        ("npm", "npm is not installed", "apt-get install npm"),
    ],
)
def test_missing_program_is_named(programs: Path, name: str, error: str, hint: str) -> None:
    (programs / name).unlink()
    status, said = ask(programs)
    assert status == 1
    assert [line.split(":")[0] for line in said] == ["error", "hint"]
    assert error in said[0]
    assert hint in said[1]


@pytest.mark.parametrize(
    ("name", "script", "error"),
    [
        (
            "python3",
            'case "$1" in -V) echo Python 3.9.2;; -c) exit 1;; esac',
            "this is|Python 3.9.2",
        ),
        ("python3", 'case "$2" in *venv*) exit 1;; esac', "makes no virtual environments"),
        ("python3", 'case "$2" in *Python.h*) exit 1;; esac', "has no headers"),
        ("cc", "exit 1", "cannot make a program"),
        ("node", 'case "$1" in --version) echo v16.20.0;; *) exit 1;; esac', "this is v16.20.0"),
    ],
    ids=[
        "old Python",
        "Python without venv",
        "Python without headers",
        "compiler without headers",
        "old Node.js",
    ],
)
def test_program_that_does_not_do_is_named(
    programs: Path, name: str, script: str, error: str
) -> None:
    write(programs / name, script)
    status, said = ask(programs)
    assert (status, len(said)) == (1, 2)
    assert re.search(error, said[0])


def test_another_python_and_compiler_are_taken(programs: Path) -> None:
    for name in ("python3", "cc"):
        (programs / name).rename(programs / f"other-{name}")
    assert ask(programs, PYTHON="other-python3", CC="other-cc -O0") == (0, [])


@pytest.mark.parametrize("target", [".venv/.installed", "node_modules/.installed"])
def test_make_says_it_before_it_installs_anything(
    programs: Path, tmp_path: Path, target: str
) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    for name in (
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "package.json",
        "package-lock.json",
    ):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path)
    (programs / "npm").unlink()
    (programs / "bash").symlink_to(shutil.which("bash") or "bash")
    done = subprocess.run(
        [shutil.which("make") or "make", target],
        cwd=tmp_path,
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "error: npm is not installed" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_readme_states_them_once() -> None:
    text = (ROOT / "README.md").read_text()
    said = {"Python 3.11": "3, 11", "Node.js 18": "< 18"}
    assert all(version in text for version in said)
    assert all(checked in SCRIPT.read_text() for checked in said.values())
