"""Every declared package is pinned, and no file of dependencies names a host."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from muster.tasks import registry

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.strip()
]
# vLLM brings its own packages for GPUs; on a CPU it has an environment with its own list.
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name != "vllm"]
DECLARED = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *(PROJECT["optional-dependencies"][e] for e in EXTRAS))
    for text in group
]


def pins_of(name: str) -> list[Version]:
    pins = [pin for pin in PINS if canonicalize_name(pin.name) == canonicalize_name(name)]
    return [Version(str(next(iter(pin.specifier))).removeprefix("==")) for pin in pins]


@pytest.mark.parametrize("requirement", DECLARED, ids=str)
def test_what_is_declared_is_pinned_in_its_range(requirement: Requirement) -> None:
    if requirement.name == PROJECT["name"]:
        assert requirement.extras <= set(EXTRAS)
        return
    pins = pins_of(requirement.name)
    assert pins
    assert all(pin in requirement.specifier for pin in pins)


def test_every_constraint_is_one_version() -> None:
    assert all([s.operator for s in pin.specifier] == ["=="] for pin in PINS)


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_no_host_is_named(name: str) -> None:
    text = (ROOT / name).read_text()
    assert re.findall(r"(?:https?|git\+|file):[^\s\"]*|\.whl|index-url", text) == []


def test_packages_of_npm_are_locked_by_their_hashes() -> None:
    lock = json.loads((ROOT / "package-lock.json").read_text())
    wanted = json.loads((ROOT / "package.json").read_text())["devDependencies"]
    assert lock["packages"][""]["devDependencies"] == wanted
    entries = {name: entry for name, entry in lock["packages"].items() if name}
    assert [name for name, entry in entries.items() if "integrity" not in entry] == []
    assert [name for name, entry in entries.items() if "resolved" in entry] == []


def test_every_extra_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guides" / "install.md").read_text()
    shown = re.findall(r"^\| `([a-z0-9-]+)` \|", guide, re.M)
    assert sorted([*shown, "dev"]) == sorted(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("task_type", sorted(registry.installed_verifiers()))
def test_an_extra_pins_every_library_in_a_verifiers_hash(task_type: str) -> None:
    # Else honest installations of one release refuse each other's runs.
    required = {canonicalize_name(name) for name in registry.verifier_of(task_type).requires}
    exact = [
        {
            canonicalize_name(r.name)
            for r in map(Requirement, group)
            if [s.operator for s in r.specifier] == ["=="]
        }
        for group in PROJECT["optional-dependencies"].values()
    ]
    assert any(required <= pinned for pinned in exact)


def test_torch_is_pinned_exactly() -> None:
    # docs/decisions/0002
    (torch,) = [r for r in DECLARED if r.name == "torch"]
    assert [str(pin) for pin in pins_of("torch")] == [str(torch.specifier).removeprefix("==")]
