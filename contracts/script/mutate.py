"""Mutation testing of contracts/src: does a test fail for every small mistake?

    contracts/script/mutate.py                 every mutant (hours)
    contracts/script/mutate.py --sample 150    as many, drawn by --seed
    contracts/script/mutate.py --list          the mutants, without running them

One mutant is one changed line: an operator exchanged, a condition or a statement dropped, a
constant moved by one. It is built and tested in a copy of the tree, first with the tests of its own
file, then with the rest, and is killed by the first test that fails, or by the compiler. The report
(contracts/mutation.json) lists the survivors; docs/security.md explains those that are no gap.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "contracts" / "src"
REPORT = ROOT / "contracts" / "mutation.json"

COPIED = ("foundry.toml", "tools", "contracts/src", "contracts/test", "tests/conformance/vectors")
"""Files of the tree that forge needs; node_modules is linked."""

OPERATORS = {
    " < ": (" <= ",),
    " <= ": (" < ",),
    " > ": (" >= ",),
    " >= ": (" > ",),
    " == ": (" != ",),
    " != ": (" == ",),
    " && ": (" || ",),
    " || ": (" && ",),
    " + ": (" - ",),
    " - ": (" + ",),
    " * ": (" / ",),
    " / ": (" * ",),
    " += ": (" -= ",),
    " -= ": (" += ",),
    " << ": (" >> ",),
    " >> ": (" << ",),
    " & ": (" | ",),
    " | ": (" & ",),
    "true": ("false",),
    "false": ("true",),
}
"""The replacements of each operator."""

SKIPPED = (
    "import ",
    "pragma ",
    "///",
    "//",
    "/*",
    "*",
    "error ",
    "event ",
    "using ",
    "contract ",
    "library ",
)
"""Beginnings of lines without behaviour."""

TESTS = {
    "StakeVault": "StakeVault*",
    "WorkerRegistry": "WorkerRegistry*",
    "RunRegistry": "Run*",
    "DisputeCourt": "DisputeCourt*",
    "FaultCourt": "FaultCourt*",
    "ContributionLedger": "Ledger*",
    "RewardEscrow": "RewardEscrow*",
    "MusterToken": "MusterToken*",
    "NetworkFactory": "NetworkFactory*",
    "MultiProofLib": "MultiProof*",
    "BatchLib": "Libraries*",
    "OutcomeRecordLib": "Libraries*",
    "SeedLib": "Libraries*",
    "JuryPool": "Jury*",
}
"""The unit tests of each file, which run first."""

OPTIMISED = ("--no-match-contract", "GasTest", "--no-match-test", "test_deployment")
"""Options that exclude tests for optimised code only: its gas, and the factory's address."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one line."""

    path: str
    """The file, relative to contracts/src."""
    line: int
    """Line number, from 1."""
    kind: str
    """Kind of change."""
    before: str
    """The original statement."""
    after: str
    """The statement in the mutant; empty when dropped."""
    start: int
    """Offset in the file of the replaced text."""
    end: int
    """Offset after the replaced text."""
    text: str
    """The replacement."""


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file, in the order of its lines."""
    source = path.read_text()
    offset = 0
    for number, line in enumerate(source.splitlines(keepends=True), start=1):
        code = line.split(" //")[0].rstrip("\n")
        if not code.strip().startswith(SKIPPED):
            for kind, start, end, text in _edits(source, offset, code):
                yield Mutant(
                    path=path.relative_to(SRC).as_posix(),
                    line=number,
                    kind=kind,
                    before=source[start:end] if kind.startswith("drop") else code.strip(),
                    after=""
                    if kind.startswith("drop")
                    else (code[: start - offset] + text + code[end - offset :]).strip(),
                    start=start,
                    end=end,
                    text=text,
                )
        offset += len(line)


def _edits(source: str, offset: int, code: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield (kind, start, end, replacement) for one line at `offset`."""
    for old, replacements in OPERATORS.items():
        for match in re.finditer(rf"\b{old}\b" if old.isalpha() else re.escape(old), code):
            for new in replacements:
                yield (
                    f"{old.strip()} -> {new.strip()}",
                    offset + match.start(),
                    offset + match.end(),
                    new,
                )
    # A number on its own: not part of a name, a type or a hexadecimal literal.
    for match in re.finditer(r"(?<![\w.])(\d+)(?![\w.])", code):
        yield (
            "constant + 1",
            offset + match.start(),
            offset + match.end(),
            str(int(match.group()) + 1),
        )
    stripped = code.strip()
    start = offset + len(code) - len(code.lstrip())
    if stripped.startswith("require("):
        yield "drop require", start, _statement_end(source, start), ""
    elif re.match(
        r"(emit |delete |[\w.\[\]]+(\.\w+)*\([^{]*\);$|[\w.\[\]]+ [|+\-*]?= [^{]*;$|\+\+|--)",
        stripped,
    ):
        yield "drop statement", start, _statement_end(source, start), ""
    elif stripped.startswith("if (") and stripped.endswith(" return;"):
        yield "drop early return", start, start + len(stripped), ""


def _statement_end(source: str, start: int) -> int:
    """Return the offset after the semicolon that ends the statement at `start`."""
    depth = 0
    for i in range(start, len(source)):
        depth += source[i] in "({["
        depth -= source[i] in ")}]"
        if depth == 0 and source[i] == ";":
            return i + 1
    raise ValueError(f"no statement ends after offset {start}")


class Workshop:
    """A copy of the tree in which mutants are built and tested one after the other."""

    def __init__(self, place: Path) -> None:
        """Copy what forge needs to `place`, an empty folder."""
        self._place = place
        for name in COPIED:
            source, target = ROOT / name, place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        (place / "node_modules").symlink_to(ROOT / "node_modules")

    def check(self) -> None:
        """Raise unless every test passes without a mutant."""
        if not self._passes("*"):
            raise SystemExit("error: tests fail without any mutant\nhint: run make test first")

    def verdict(self, mutant: Mutant) -> str:
        """Return "killed" or "survived"."""
        path = self._place / "contracts" / "src" / mutant.path
        original = path.read_text()
        path.write_text(original[: mutant.start] + mutant.text + original[mutant.end :])
        try:
            own = TESTS.get(Path(mutant.path).stem)
            if own is not None and not self._passes(f"contracts/test/unit/{own}"):
                return "killed"
            return "survived" if self._passes("*") else "killed"
        finally:
            path.write_text(original)

    def _passes(self, tests: str) -> bool:
        """Whether the tests that match a path pattern build and pass."""
        command = ["tools/forge", "test", "--fail-fast", *OPTIMISED]
        if tests != "*":
            command += ["--match-path", tests]
        environment = os.environ | {
            # Compiling takes most of the time. Tests load bytecode from disk, so that only changed
            # files are compiled again. The optimizer is off: it changes no behaviour.
            "FOUNDRY_OPTIMIZER": "false",
            "FOUNDRY_DYNAMIC_TEST_LINKING": "true",
            "FOUNDRY_FUZZ_RUNS": "16",
            "FOUNDRY_FUZZ_SEED": "0x1",
            "FOUNDRY_INVARIANT_RUNS": "1",
            # A mutant may leave a variable unused; such a warning must not count as killed.
            "FOUNDRY_DENY": "never",
        }
        done = subprocess.run(
            command, cwd=self._place, env=environment, capture_output=True, check=False
        )
        return done.returncode == 0


def main() -> int:
    """Run the chosen mutants; return 0 when at least 90 % were killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="how many mutants to draw; all without it")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--only", default="", help="part of the paths of the files to mutate")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument(
        "--minutes", type=float, help="stop after as long, with what was done so far"
    )
    arguments = parser.parse_args()
    files = [
        path
        for path in sorted(SRC.rglob("*.sol"))
        if "interfaces" not in path.parts and arguments.only in str(path)
    ]
    mutants = [mutant for path in files for mutant in mutants_of(path)]
    total = len(mutants)
    if arguments.sample is not None:
        mutants = random.Random(arguments.seed).sample(mutants, min(arguments.sample, total))
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.path}:{mutant.line} {mutant.kind}: {mutant.before} => {mutant.after}")
        print(f"{len(mutants)} of {total} mutants")
        return 0
    with tempfile.TemporaryDirectory() as place:
        return _run(Workshop(Path(place)), mutants, total, arguments)


def _run(
    workshop: Workshop, mutants: list[Mutant], total: int, arguments: argparse.Namespace
) -> int:
    workshop.check()
    started = time.monotonic()
    results: list[tuple[Mutant, str]] = []
    for mutant in mutants:
        if arguments.minutes is not None and time.monotonic() - started > 60 * arguments.minutes:
            break
        results.append((mutant, workshop.verdict(mutant)))
        place = f"{mutant.path}:{mutant.line}"
        print(f"{results[-1][1]:8} {place} {mutant.kind}: {mutant.before}", flush=True)
        _write_report(results, total, arguments)
    killed = sum(verdict == "killed" for _, verdict in results)
    share = 100 * killed / max(len(results), 1)
    print(f"{killed} of {len(results)} killed ({share:.1f} %), of {total} mutants in all")
    return 0 if killed >= 0.9 * len(results) else 1


def _write_report(
    results: list[tuple[Mutant, str]], total: int, arguments: argparse.Namespace
) -> None:
    killed = sum(verdict == "killed" for _, verdict in results)
    survivors = [asdict(mutant) for mutant, verdict in results if verdict == "survived"]
    for survivor in survivors:
        for field in ("start", "end", "text"):
            del survivor[field]
    report = {
        "mutants": total,
        "sampled": len(results),
        "seed": arguments.seed if arguments.sample is not None else None,
        "killed": killed,
        "survivors": survivors,
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
