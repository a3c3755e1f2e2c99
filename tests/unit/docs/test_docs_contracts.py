"""The contracts' pages name every entry point, event and invariant, and only tests that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CONTRACTS = ROOT / "docs" / "contracts.md"
SECURITY = ROOT / "docs" / "security.md"
ARTIFACTS = sorted((ROOT / "core" / "muster" / "chain" / "artifacts").glob("*.json"))
ERC20 = {"approve", "transfer", "transferFrom", "permit", "EIP712DomainChanged"}
"""Calls and events of the ERC-20 standard and its extensions, which the page leaves out."""


def _abi(artifact: Path, kind: str) -> Iterator[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(artifact.read_text())["abi"]
    yield from (entry for entry in entries if entry["type"] == kind)


def _words(page: Path) -> set[str]:
    quoted = re.findall(r"`([^`\n]+)`", page.read_text())
    return {word for text in quoted for word in re.findall(r"\w+", text)}


def _tests() -> set[str]:
    solidity = (ROOT / "contracts" / "test").rglob("*.t.sol")
    python = (ROOT / "tests").rglob("test_*.py")
    found = (
        re.findall(r"(?:function|def) (\w+)", path.read_text()) for path in (*solidity, *python)
    )
    return {name for names in found for name in names}


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda path: path.stem)
def test_every_entry_point_and_event_is_on_the_page(artifact: Path) -> None:
    writes = {f["name"] for f in _abi(artifact, "function") if f["stateMutability"] == "nonpayable"}
    events = {event["name"] for event in _abi(artifact, "event")}
    assert (writes | events) - ERC20 - _words(CONTRACTS) == set()


@pytest.mark.parametrize("page", [CONTRACTS, SECURITY], ids=lambda path: path.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`((?:test|testFuzz|invariant)_\w+)`", page.read_text()))
    assert named - _tests() == set()


def test_every_invariant_is_on_the_page() -> None:
    source = (ROOT / "contracts" / "test" / "invariant" / "Network.t.sol").read_text()
    assert set(re.findall(r"function (invariant_\w+)", source)) - _words(CONTRACTS) == set()


def test_every_attack_is_on_the_page() -> None:
    sources = (ROOT / "contracts" / "test" / "unit").glob("Attacks*.t.sol")
    attacks = {
        attack
        for source in sources
        for attack in re.findall(r"function test\w*_attack_([AD]\d+)_", source.read_text())
    }
    listed = set(re.findall(r"^\| ([AD]\d+) \|", SECURITY.read_text(), re.M))
    assert attacks - listed == set()
