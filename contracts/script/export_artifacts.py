"""Writes what Python needs of the contracts: ABI and creation bytecode, and typed methods.

    export_artifacts.py          build, then write protocol/muster/chain/artifacts/<Contract>.json
                                 and protocol/muster/chain/contracts.py
    export_artifacts.py --check  build, then fail when what is committed differs

Running Muster needs the artifacts only, never a compiler. The build leaves out metadata, so the
same source gives the same bytes everywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from typed_contracts import CALLED, MODULE, render_module

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "protocol" / "muster" / "chain" / "artifacts"
FORGE_TIMEOUT_S = 600


def main() -> int:
    """Return the exit code: 0 when the artifacts were written or are up to date."""
    parser = argparse.ArgumentParser(description="export contract artifacts for Python")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check = parser.parse_args().check
    build()
    documents = {ARTIFACTS / f"{name}.json": render(name) for name in CALLED}
    documents[MODULE] = render_module()
    if check:
        return report_stale(documents)
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    for path, text in documents.items():
        path.write_text(text)
    print(f"wrote {MODULE.relative_to(ROOT)} and {len(CALLED)} artifacts")
    return 0


def build() -> None:
    """Compile the contracts; exits with forge's message when that fails."""
    forge = ROOT / "tools" / "forge"
    command = [str(forge), "build", "contracts/src", "--root", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FORGE_TIMEOUT_S)
    if done.returncode:
        sys.exit(f"error: forge build failed\n{done.stdout}{done.stderr}")


def render(contract: str) -> str:
    """Return the artifact of one contract: sorted keys, so equal content is equal text."""
    built = json.loads((ROOT / "out" / f"{contract}.sol" / f"{contract}.json").read_text())
    artifact = {
        "contract": contract,
        "abi": sorted(built["abi"], key=abi_order),
        "bytecode": built["bytecode"]["object"],
    }
    return json.dumps(artifact, indent=1, sort_keys=True) + "\n"


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
