"""Writes the contracts' artifacts for Python: ABI, creation bytecode, and typed methods.

    export_artifacts.py          compile, then write core/muster/chain/artifacts/<Contract>.json
                                 and core/muster/chain/contracts.py
    export_artifacts.py --check  compile, then fail when what is committed differs

Running Muster needs the artifacts only, never a compiler. They are compiled from the document that
block explorers get, without metadata: the same source gives the same bytes everywhere.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from typed_contracts import MODULE, render_module

from muster.client.deployed import standard_json

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "core" / "muster" / "chain" / "artifacts"
CONTRACTS = (
    "MusterToken",
    "JuryPool",
    "StakeVault",
    "WorkerRegistry",
    "RunRegistry",
    "ContributionLedger",
    "DisputeCourt",
    "FaultCourt",
    "RewardEscrow",
    "NetworkFactory",
)
SOLC_TIMEOUT_S = 600


def main() -> int:
    """Return the exit code: 0 when the artifacts were written or are up to date."""
    parser = argparse.ArgumentParser(description="export contract artifacts for Python")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check = parser.parse_args().check
    output = compiled()
    documents = {ARTIFACTS / f"{name}.json": render(output, name) for name in CONTRACTS}
    documents[MODULE] = render_module(output)
    if check:
        return report_stale(documents)
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    for path, text in documents.items():
        path.write_text(text)
    print(f"wrote {MODULE.relative_to(ROOT)} and {len(CONTRACTS)} artifacts")
    return 0


def compiled() -> dict[str, Any]:
    """Return solc's output for the sources; exits with its message when it fails."""
    document = standard_json(CONTRACTS, ROOT)
    # The syntax trees name the immutables, for which the bytecode has places.
    document["settings"]["outputSelection"]["*"][""] = ["ast"]
    # The functions' natspec becomes the docstrings of the typed methods.
    document["settings"]["outputSelection"]["*"]["*"] += ["userdoc", "devdoc"]
    done = subprocess.run(
        [str(ROOT / "tools" / "solc"), "--standard-json"],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=SOLC_TIMEOUT_S,
    )
    if done.returncode:
        sys.exit(f"error: solc failed\n{done.stderr}")
    output: dict[str, Any] = json.loads(done.stdout)
    if errors := [e["formattedMessage"] for e in output.get("errors", ())]:
        sys.exit("error: the contracts do not compile\n" + "\n".join(errors))
    return output


def render(output: dict[str, Any], contract: str) -> str:
    """Return the artifact of one contract: sorted keys, so equal content is equal text."""
    built = output["contracts"][f"contracts/src/{contract}.sol"][contract]
    code, runtime = built["evm"]["bytecode"]["object"], built["evm"]["deployedBytecode"]
    # Creation code ends with the runtime code that it returns, with immutables still zero.
    assert code.endswith(runtime["object"])
    artifact = {
        "contract": contract,
        "abi": sorted(built["abi"], key=abi_order),
        "bytecode": f"0x{code}",
        "runtime_offset": (len(code) - len(runtime["object"])) // 2,
        "immutables": immutables(runtime["immutableReferences"], names_of(output)),
    }
    return json.dumps(artifact, indent=1, sort_keys=True) + "\n"


def immutables(
    references: dict[str, list[dict[str, int]]], names: dict[int, str]
) -> dict[str, list[int]]:
    """Return the byte offsets in the runtime code at which each immutable's word is placed."""
    found: dict[str, list[int]] = {}
    for identifier, places in references.items():
        assert all(place["length"] == 32 for place in places)
        name = names[int(identifier)]
        assert name not in found, f"two immutables are called {name}"
        found[name] = sorted(place["start"] for place in places)
    return found


def names_of(output: dict[str, Any]) -> dict[int, str]:
    """Return the names of all contracts' variables by their id in the syntax tree."""
    return {
        member["id"]: member["name"]
        for source in output["sources"].values()
        for part in source["ast"]["nodes"]
        for member in part.get("nodes", ())
        if member["nodeType"] == "VariableDeclaration"
    }


def abi_order(entry: dict[str, Any]) -> tuple[str, str, str]:
    """Return the sort key of an ABI entry: kind, name, then the argument types."""
    return entry["type"], entry.get("name", ""), json.dumps(entry.get("inputs", []))


def report_stale(documents: dict[Path, str]) -> int:
    """Return 1 and name the files that differ from the source, or 0 when none does."""
    stale = [p.name for p, text in documents.items() if not p.exists() or p.read_text() != text]
    if not stale:
        return 0
    print(f"error: artifacts differ from the contracts: {', '.join(stale)}", file=sys.stderr)
    print("hint: run contracts/script/export_artifacts.py and commit the result", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
