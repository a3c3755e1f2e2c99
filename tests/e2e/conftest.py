"""The wheel, built once and installed outside any checkout, with and without extras."""

import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from installed import TOO_MUCH, Installed
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from muster.app.cli import PACKAGE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of git's files, so that nothing else gets into it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", ROOT.as_uri(), source], check=True)
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=TOO_MUCH)
    (found,) = folder.glob("*.whl")
    return found


def install(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Install the wheel alone; returns the environment's program and where its packages are."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet",
         "--no-deps", "--no-index", "--disable-pip-version-check", wheel],
        check=True,
    )  # fmt: skip
    (packages,) = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "muster", packages


@pytest.fixture(scope="session")
def complete(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel with every extra: these tests' packages without the links to the checkout."""
    folder = tmp_path_factory.mktemp("complete")
    program, packages = install(wheel, folder / "env")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (folder / "work").mkdir()
    return Installed(program, folder / "work")


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel with no extra."""
    folder = tmp_path_factory.mktemp("base")
    program, packages = install(wheel, folder / "env")
    needed = {canonicalize_name(PACKAGE)}
    waiting = [(PACKAGE, "")]
    while waiting:
        name, extra = waiting.pop()
        for requirement in map(Requirement, metadata.requires(name) or ()):
            marker, known = requirement.marker, canonicalize_name(requirement.name)
            if (marker is None or marker.evaluate({"extra": extra})) and known not in needed:
                needed.add(known)
                waiting += [(known, each) for each in ("", *requirement.extras)]
    for name in needed - {canonicalize_name(PACKAGE)}:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():  # a folder may be several distributions'
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    (folder / "work").mkdir()
    return Installed(program, folder / "work")


@pytest.fixture
def bringing_npm(tmp_path: Path) -> str:
    """A PATH whose npm installs the local Anvil: tests use no network."""
    (anvil,) = ROOT.glob("node_modules/@foundry-rs/anvil-*/bin/anvil")
    place = "node_modules/@foundry-rs/anvil-here/bin"
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("npm", "node"):
        (programs / name).write_text(f"#!/bin/sh\nmkdir -p {place} && cp '{anvil}' {place}/anvil\n")
        (programs / name).chmod(0o755)
    return f"{programs}:/usr/bin:/bin"
