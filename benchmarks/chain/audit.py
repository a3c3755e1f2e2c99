"""Time and memory of an audit of a million submissions, without recomputing verdicts.

    make bench-audit                                   a million submissions, three times
    make bench-audit ARGS="--submissions 20000 --rounds 1"

 1. A dump of a synthetic run is written: real Merkle roots, real signatures of two validators under
    every batch, slashes, claims (`audit_history.py`).
 2. `muster audit run 1 --dump FILE --json` reads and checks it in its own process. It must find
    no fault. `audit_1m_s` is the median CPU time of that process: it has one thread, so this is the
    wall time on an idle machine. `audit_1m_rss_mb` is its largest resident memory.
 3. The same dump with one outcome's units changed must be found faulty, to prove that the audit
    checks.

Writes results/audit.json.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chain.audit_history import History
from benchmarks.report import machine, print_table, write

MUSTER = Path(sys.executable).with_name("muster")


@dataclass
class Round:
    """One audit."""

    cpu_s: float
    """User and system time."""
    wall_s: float
    """Wall-clock seconds, including the machine's other work."""
    rss_mb: float
    """Largest resident memory, in units of 2^20 bytes."""


def main() -> None:
    """Write a history, audit it, print and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--submissions", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        dump, began = Path(folder) / "run.dump.gz", time.perf_counter()
        blocks = History(asked.submissions).write(dump)
        size_mb = dump.stat().st_size / 2**20
        print(f"{blocks} blocks, {size_mb:.0f} MB, made in {time.perf_counter() - began:.0f} s")
        report: dict[str, Any] = {}
        rounds = []
        for _ in range(asked.rounds):
            measured, report = audit(dump)
            rounds.append(measured)
        require_clean(report, asked.submissions)
        require_contradicted(tampered(dump, Path(folder) / "tampered.dump.gz"))
    publish(rounds, report, asked.submissions, size_mb)


def audit(dump: Path) -> tuple[Round, dict[str, Any]]:
    """Return the cost and the report of an audit."""
    began = time.perf_counter()
    with subprocess.Popen(
        [MUSTER, "audit", "run", "1", "--dump", dump, "--json"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
    wall_s = time.perf_counter() - began
    measured = Round(used.ru_utime + used.ru_stime, wall_s, used.ru_maxrss / 1024)
    return measured, json.loads(output)


def require_clean(report: dict[str, Any], submissions: int) -> None:
    """Exit unless everything was audited and nothing contradicts."""
    (run,) = report["runs"]
    if report["contradictions"] or run["submitted"] != submissions:
        sys.exit(f"error: the audit of the synthetic run fails: {report['contradictions'][:3]}")


def tampered(dump: Path, to: Path) -> Path:
    """Write a copy whose first posted record has another number of units; return it."""
    is_done = False
    with gzip.open(dump, "rt") as source, gzip.open(to, "wt", compresslevel=1) as sink:
        for line in source:
            changed = line
            if not is_done and '"logs"' in line:
                block = json.loads(line)
                is_done = _raise_units(block)
                changed = json.dumps(block) + "\n" if is_done else line
            sink.write(changed)
    return to


def _raise_units(block: dict[str, Any]) -> bool:
    """Add one to the units of a block's first record, if it has records."""
    for log in block["logs"]:
        data = bytearray.fromhex(log["data"][2:])
        if len(data) > 1000:
            start = int.from_bytes(data[96:128], "big") + 32
            data[start + 53] ^= 1
            log["data"] = "0x" + data.hex()
            return True
    return False


def require_contradicted(dump: Path) -> None:
    """Exit unless an audit finds what was changed."""
    _, report = audit(dump)
    kinds = {found["kind"] for found in report["contradictions"]}
    if not {"outcomes-root", "outcome-quorum"} <= kinds:
        sys.exit(f"a changed record was not found: {kinds}")


def publish(rounds: list[Round], report: dict[str, Any], submissions: int, size_mb: float) -> None:
    """Print the figures and write them."""
    cpu_s = statistics.median(each.cpu_s for each in rounds)
    rss_mb = max(each.rss_mb for each in rounds)
    rows = [
        ["CPU time", f"{cpu_s:.1f} s", "300 s", f"{300 / cpu_s:.1f}"],
        ["largest resident memory", f"{rss_mb:.0f} MB", "2048 MB", f"{2048 / rss_mb:.1f}"],
    ]
    title = f"Audit of {submissions:,} submissions in {report['batches']:,} batches"
    print_table(title, ["", "ours", "allowed", "ratio"], rows)
    detail = {
        "submissions": submissions,
        "batches": report["batches"],
        "dump_mb": round(size_mb, 1),
        "checks": [check["name"] for check in report["checks"]],
        "rounds": [asdict(each) for each in rounds],
    }
    if submissions != 1_000_000:
        print("(not written: only a million submissions make audit_1m_s)")
        return
    metrics = {"audit_1m_s": cpu_s, "audit_1m_rss_mb": rss_mb}
    write("audit", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    main()
