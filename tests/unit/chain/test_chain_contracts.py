"""The generated contracts fit the ABI and the Python types, and have no unused function."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from chain_fakes import DEPLOYMENT, FakeNode

from muster.chain import Chain, contracts as module, structs
from muster.chain.abi import CONTRACTS, Contract, artifact, snake_case
from muster.protocol import messages

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("core", "client", "orchestrator", "trainer", "app", "lab")
CLIENTS = {
    name: type(value).__name__
    for name, value in vars(Chain(FakeNode().rpc, DEPLOYMENT)).items()
    if isinstance(value, Contract)
}
PYTHON_STRUCTS = {
    "Worker": "WorkerAccount",
    "Account": "StakeAccount",
    "Standing": "StandingOutcome",
    "Claim": "RewardClaim",
}


def methods(contract: str) -> dict[str, Any]:
    return {k: v for k, v in vars(getattr(module, contract)).items() if not k.startswith("_")}


def functions(contract: str) -> dict[str, dict[str, Any]]:
    entries = artifact(contract)["abi"]
    return {snake_case(e["name"]): e for e in entries if e["type"] == "function"}


def called(source: str) -> Iterator[str]:
    """Yield each name that a source calls on one of the nine contracts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on = node.func.value
            name = on.attr if isinstance(on, ast.Attribute) else getattr(on, "id", "")
            if name in CLIENTS:
                yield node.func.attr


def test_every_method_is_called_by_a_program() -> None:
    assert sorted(CLIENTS.values()) == sorted(CONTRACTS)
    everything = {name for contract in CONTRACTS for name in methods(contract)}
    own = Path(inspect.getfile(module))
    files = {path for program in PROGRAMS for path in (ROOT / program).rglob("*.py")} - {own}
    names = {name for path in files for name in called(path.read_text())}
    assert everything - names == set()
    assert {"create_run", "transfer_from"} - names == {"transfer_from"}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_methods_take_what_the_functions_take(contract: str) -> None:
    for name, method in methods(contract).items():
        expected = [snake_case(part["name"]) for part in functions(contract)[name]["inputs"]]
        assert list(inspect.signature(method).parameters) == ["self", *expected]


def struct_of(parameter: dict[str, Any], contract: str) -> type:
    name = parameter["internalType"].removesuffix("[]").rpartition(".")[2]
    if name == "Terms":
        name = "CourtTerms" if contract == "DisputeCourt" else "RunTerms"
    name = PYTHON_STRUCTS.get(name, name)
    found: type | None = getattr(structs, name, None) or getattr(messages, name, None)
    return found or messages.OutcomeRecord


def misfits(parameter: dict[str, Any], kind: Any, contract: str) -> Iterator[str]:
    """Yield the differences between a dataclass and its struct."""
    parts, held = parameter["components"], fields(kind)
    if len(parts) != len(held):
        yield f"{kind.__name__} has {len(held)} fields, {contract} {len(parts)}"
        return
    hints = get_type_hints(kind)
    for part, field in zip(parts, held, strict=True):
        if "components" in part:
            yield from misfits(part, struct_of(part, contract), contract)
        elif (part["type"] == "bool") is not (hints[field.name] is bool):
            yield f"{kind.__name__}.{field.name} is {part['type']} in {contract}"


@pytest.mark.parametrize("contract", CONTRACTS)
def test_dataclasses_have_the_fields_of_the_structs(contract: str) -> None:
    for name in methods(contract):
        function = functions(contract)[name]
        for part in (*function["inputs"], *function["outputs"]):
            if "components" in part:
                assert list(misfits(part, struct_of(part, contract), contract)) == []


def test_dataclass_with_another_field_is_found() -> None:
    (config,) = functions("RunRegistry")["create_run"]["inputs"]
    assert list(misfits(config, structs.RunTerms, "RunRegistry")) == [
        "RunTerms has 4 fields, RunRegistry 8"
    ]
