"""Compares slither's findings with those that docs/security.md explains.

    contracts/script/findings.py slither.json            fails on a finding that is not known
    contracts/script/findings.py slither.json --write    takes the findings as known

Findings are named by detector and place, not by line:
`unused-return FaultCourt.proveDoubleOutcome`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).resolve().parents[1] / "slither.known"


def main() -> int:
    """Return 0 when every finding is known, 1 otherwise."""
    parser = argparse.ArgumentParser(description="compare slither's findings with the known ones")
    parser.add_argument("report", type=Path, help="what slither --json wrote")
    parser.add_argument("--write", action="store_true", help="take the findings as known")
    arguments = parser.parse_args()
    report = json.loads(arguments.report.read_text())
    if not report["success"]:
        print(f"error: slither failed: {report['error']}", file=sys.stderr)
        return 1
    found = {name_of(finding) for finding in report["results"].get("detectors", [])}
    if arguments.write:
        KNOWN.write_text("".join(f"{name}\n" for name in sorted(found)))
        return 0
    known = set(KNOWN.read_text().splitlines())
    for name in sorted(found - known):
        print(f"error: slither found {name}", file=sys.stderr)
    for name in sorted(known - found):
        print(f"hint: {KNOWN.name} lists what slither no longer finds: {name}", file=sys.stderr)
    print(f"slither: {len(found)} findings, {len(found - known)} of them not explained")
    return 1 if found - known else 0


def name_of(finding: dict[str, Any]) -> str:
    """Return a finding's detector and the place of its first element."""
    element = finding["elements"][0]
    parent = element.get("type_specific_fields", {}).get("parent", {})
    scope = parent.get("name", "")
    if parent.get("type") == "function":
        contract = parent["type_specific_fields"]["parent"]["name"]
        scope = f"{contract}.{scope}"
    name = element["name"] if element["type"] != "node" else ""
    return f"{finding['check']} {'.'.join(part for part in (scope, name) if part)}"


if __name__ == "__main__":
    sys.exit(main())
