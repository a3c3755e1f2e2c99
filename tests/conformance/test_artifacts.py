"""The committed artifacts are what the source compiles to, and say all that can go wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "protocol" / "muster" / "chain" / "artifacts"
NAMES = sorted(path.stem for path in ARTIFACTS.glob("*.json"))


def test_artifacts_match_the_source() -> None:
    command = [
        sys.executable,
        str(ROOT / "contracts" / "script" / "export_artifacts.py"),
        "--check",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_there_is_one_artifact_per_contract() -> None:
    sources = (ROOT / "contracts" / "src").glob("*.sol")
    assert sorted(path.stem for path in sources) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_artifact_has_every_error_and_event_of_its_interface(name: str) -> None:
    interface = (ROOT / "contracts" / "src" / "interfaces" / f"I{name}.sol").read_text()
    declared = set(re.findall(r"^    (?:error|event) (\w+)\(", interface, re.MULTILINE))
    artifact = json.loads((ARTIFACTS / f"{name}.json").read_text())
    listed = {entry["name"] for entry in artifact["abi"] if entry["type"] in ("error", "event")}
    assert declared
    assert declared <= listed


@pytest.mark.parametrize("name", NAMES)
def test_artifact_fits_the_contract_size_limit(name: str) -> None:
    artifact = json.loads((ARTIFACTS / f"{name}.json").read_text())
    code = bytes.fromhex(artifact["bytecode"].removeprefix("0x"))
    assert 0 < len(code) <= 24_576
