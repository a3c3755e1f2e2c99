"""The committed artifacts are what the source compiles to, and say all that can go wrong.

`make check` compiles and compares, too; tests here that need solc run in `make test-all`.
"""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "core" / "muster" / "chain" / "artifacts"
CONTRACTS = ARTIFACTS.parent / "contracts.py"
NAMES = sorted(path.stem for path in ARTIFACTS.glob("*.json"))


@pytest.fixture(scope="module")
def scripts() -> Iterator[ModuleType]:
    """The script that exports; solc runs once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "contracts" / "script"))
        export = importlib.import_module("export_artifacts")
        output = export.compiled()
        patch.setattr(export, "compiled", lambda: output)
        yield export
    for name in ("export_artifacts", "typed_contracts"):
        sys.modules.pop(name)


@pytest.fixture
def export(scripts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "argv", ["export_artifacts.py", "--check"])
    return scripts


@pytest.mark.slow
def test_artifacts_match_the_source(export: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main() == 0, capsys.readouterr().err


@pytest.mark.slow
def test_typed_contracts_that_somebody_edited_are_refused(
    export: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "contracts.py"
    monkeypatch.setattr(export, "MODULE", copy)
    copy.write_text(CONTRACTS.read_text())
    assert export.main() == 0
    copy.write_text(CONTRACTS.read_text().replace("active_stake(", "stake_that_is_active("))
    assert export.main() == 1
    assert "differ from the contracts: contracts.py" in capsys.readouterr().err


@pytest.mark.slow
def test_function_that_returns_more_than_a_method_can_is_refused(
    export: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = sys.modules["typed_contracts"]
    monkeypatch.setattr(typed, "CALLED", {"RunRegistry": "admissionOf"})
    with pytest.raises(AssertionError, match="admissionOf returns 4 values"):
        typed.render_module(export.compiled())


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


@pytest.mark.slow
def test_contracts_fit_the_limits_of_size(export: ModuleType) -> None:
    """EIP-3860 limits what creates a contract, EIP-170 what is deployed."""
    deployed = {
        name: len(built["evm"]["deployedBytecode"]["object"]) // 2
        for source, of_source in export.compiled()["contracts"].items()
        for name, built in of_source.items()
        if name in NAMES and source.startswith("contracts/src/")
    }
    assert sorted(deployed) == NAMES
    assert 0 < min(deployed.values()) <= max(deployed.values()) <= 24_576
    for name in NAMES:
        artifact = json.loads((ARTIFACTS / f"{name}.json").read_text())
        assert deployed[name] < len(artifact["bytecode"]) // 2 <= 49_152
