"""Writes the typed contracts of `muster.chain.contracts` from the compiler's output.

Each function in CALLED, which Muster's own programs call, gets a method. Other functions are called
with `Chain.read` and `Chain.write`, or with web3.py's contracts from `Chain.contract`.
"""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "core" / "muster" / "chain" / "contracts.py"
LINE, INDENT, QUOTES = 100, 8, '"""'
CALLED = {
    "MusterToken": "allowance approve balanceOf faucet nonces totalSupply",
    "StakeVault": "accountOf activeStake deposit insurance insurancePpm reporterCap reporterPpm"
    " requestUnbond unbondingPeriod withdraw",
    "JuryPool": "isJuror join leave requiredStake shorten",
    "WorkerRegistry": "comeBack exit join memberOf nonces"
    " requiredStake rotateNode workerById workerOf workerOfNode",
    "RunRegistry": "applyChange cancelChange changeDelay checkpointOf closeRun configOf createRun"
    " dismiss invite isInvited isValidator latestVersion leaveSeat pauseSlashing"
    " proposeChange proposedChange publishCheckpoint requiredValidatorStake rotateOrchestrator"
    " rotateTrainer runCount setSubmissionsPaused slashCooldown slashPause takeSeat termsOf",
    "ContributionLedger": "appealTime batchCount challengeWindow commitBatch executeFraud"
    " finaliseFraud outcomeDeadline postOutcomes showOutcomes splitOff stakePerUnit"
    " standingOf submitDirect unitCapOf voidBatch",
    "DisputeCourt": "announce claim collectFee commitVote draw fineAbsentJuror fineSigner prove"
    " returnBond revealVote settle settleSummoned summon terms",
    "FaultCourt": "proveDoubleOutcome proveDoubleSubmission proveMisrecord",
    "RewardEscrow": "claim claimPeriod fund isPaid reclaim recover",
}
"""Functions that Muster's programs call; `test_chain_contracts.py` finds those no longer called."""

NUMBERED_BY = {"createRun": "RunCreated", "commitBatch": "BatchCommitted"}
"""By function that creates something: the event that holds the new number, to be returned."""

NUMBERS = {"runid": "RunId", "version": "PolicyVersion", "step": "Step", "verdict": "Verdict"}
"""Types of numbers, by the end of their names in lower case."""

PYTHON_NAMES = {
    "IContributionLedger.Standing": "StandingOutcome",
    "IDisputeCourt.Terms": "CourtTerms",
    "IRewardEscrow.Claim": "RewardClaim",
    "IRunRegistry.Terms": "RunTerms",
    "IStakeVault.Account": "StakeAccount",
    "IStakeVault.Verdict": "SlashSubject",
}
"""Python names of structs whose Solidity name says too little outside their contract."""

Built = dict[str, dict[str, Any]]
"""solc's output for each contract, by name."""

HEADER = '''"""The nine contracts: a declaration of each function that Muster calls.

Made by `python contracts/script/export_artifacts.py` from the contracts; not to be edited. Views
return Python types; the others send a transaction and return its receipt, or raise ContractRevert,
and need a chain that was connected with a key. `Contract` calls what is declared here.
"""

from __future__ import annotations

'''


def render_module(output: dict[str, Any]) -> str:
    """Return the module's text from solc's output, formatted as the project formats Python."""
    built = {name: part for file in output["contracts"].values() for name, part in file.items()}
    classes = "".join(_class(built, name, called.split()) for name, called in CALLED.items())
    return _formatted(HEADER + _imports(classes) + classes)


def snake_case(name: str) -> str:
    """Return a Solidity name in Python's style; `muster.chain` may not be importable here yet."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _imports(classes: str) -> str:
    used = set(re.findall(r"\b[A-Z]\w+", re.sub(r'""".*?"""|"\w+"', "", classes, flags=re.DOTALL)))
    homes = {
        "collections.abc": {"Sequence"},
        "typing": {"Annotated"},
        "muster.chain.abi": {"Contract", "Receipt"},
        "muster.protocol.ids": {"Address", "Hash32", "PolicyVersion", "RunId", "Step"},
        "muster.protocol.messages": {"Outcomes", "Submission", "Verdict"},
    }
    elsewhere = {*CALLED, "None", *set().union(*homes.values())}
    homes["muster.chain.structs"] = used - elsewhere
    return "".join(
        f"from {home} import {', '.join(sorted(names & used))}\n"
        for home, names in sorted(homes.items())
    )


def _class(built: Built, contract: str, called: list[str]) -> str:
    source = (ROOT / "contracts" / "src" / f"{contract}.sol").read_text()
    title = re.findall("^/// @title (.*)$", source, re.MULTILINE)[0]
    functions = {e["name"]: e for e in built[contract]["abi"] if e["type"] == "function"}
    methods = "".join(_method(built, contract, functions[name]) for name in called)
    return f'\n\nclass {contract}(Contract):\n    """{title}."""\n{methods}'


def _method(built: Built, contract: str, function: dict[str, Any]) -> str:
    name, inputs = function["name"], function["inputs"]
    names = [snake_case(part["name"]) for part in inputs]
    types = [_type(part, "Sequence[{}]") for part in inputs]
    parameters = "".join(f", {n}: {kind}" for n, kind in zip(names, types, strict=True))
    if function["stateMutability"] == "view":
        returned = _view(function)
    elif name in NUMBERED_BY:
        (made,) = function["outputs"]
        carried = f'"{NUMBERED_BY[name]}", "{snake_case(made["name"])}"'
        returned = f"Annotated[tuple[{_type(made, '')}, Receipt], {carried}]"
    else:
        returned = "Receipt"
    head = f"\n    async def {snake_case(name)}(self{parameters}) -> {returned}:\n"
    return head + textwrap.indent(f"{_docstring(built, contract, name)}\n", " " * INDENT)


def _view(function: dict[str, Any]) -> str:
    """Return a view's type: one value, a value that may not exist, or two values."""
    kind, *others = [_type(part, "tuple[{}, ...]") for part in function["outputs"]]
    if not others:
        return kind
    if function["outputs"][1]["name"] == "exists":
        return f"{kind} | None"
    assert len(others) == 1, f"{function['name']} returns {len(others) + 1} values"
    return f"tuple[{kind}, {others[0]}]"


def _type(part: dict[str, Any], sequence: str) -> str:
    """Return a parameter's Python type, from its struct or enum, its name or its ABI type."""
    declared: str = part.get("internalType", part["type"])
    if declared.endswith("[]"):
        return sequence.format(_type({**part, "internalType": declared[:-2]}, sequence))
    kind, _, declared = declared.rpartition(" ")
    if kind in ("struct", "enum"):
        return PYTHON_NAMES.get(declared, declared.rpartition(".")[2])
    if declared.startswith("uint"):
        name: str = part["name"].lower()
        return next((kind for end, kind in NUMBERS.items() if name.endswith(end)), "int")
    return {"address": "Address", "bytes32": "Hash32", "string": "str"}.get(declared, declared)


def _docstring(built: Built, contract: str, function: str) -> str:
    """Return a function's `@notice`; for inherited ones, the first sentence of `@dev`."""
    notices = _said(built[contract]["userdoc"], "notice")
    details = _said(built[f"I{contract}"]["devdoc"], "details")
    said = notices.get(function) or re.split(r"(?<=\.) ", details[function])[0]
    said = re.sub(r"\s+", " ", said.replace("``", "`"))
    said = re.sub(r"\{(\w+)\}", r"`\1`", said)
    if len(said) <= LINE - INDENT - 2 * len(QUOTES):
        return f"{QUOTES}{said}{QUOTES}"
    return "\n".join([*textwrap.wrap(QUOTES + said, LINE - INDENT - len(QUOTES)), QUOTES])


def _said(document: dict[str, Any], tag: str) -> dict[str, str]:
    methods = document["methods"]
    return {key.partition("(")[0]: said[tag] for key, said in methods.items() if tag in said}


def _formatted(text: str) -> str:
    for command in (["check", "--select", "I", "--fix-only", "-q"], ["format", "-q"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(MODULE), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text
