"""`make test`: parts side by side, a line of progress now and then, one line at the end.

Tests of networks wait for windows of time to pass more than they compute, so more parts run at once
than there are cores: those that wait first, those that compute beside them one after the other.
What a part prints is in runs/tests/PART.log; of one that fails, the end is shown.

    python tools/run_tests.py                  all parts
    python tools/run_tests.py networks -x      one part, with options for pytest
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "runs" / "tests"
SERVICES = ("tests/unit/client", "tests/unit/app", "tests/unit/orchestrator")
MODELS = ("tests/unit/inference", "tests/unit/trainer")
NETWORKS = "tests/integration/network"
CHAINS = tuple(
    f"tests/integration/{name}" for name in ("orchestrator", "chain", "contracts", "shardcast")
)
TRAINERS = tuple(
    str(path.relative_to(ROOT))
    for path in sorted(ROOT.glob("tests/integration/trainer/test_trainer_*.py"))
)


def without(paths: tuple[str, ...]) -> list[str]:
    """Return pytest's options that leave out paths."""
    return [f"--ignore={path}" for path in paths]


PARTS = {
    "networks": (NETWORKS,),
    "stories": ("tests/e2e", *TRAINERS),
    "journeys": ("tests/integration", *without((NETWORKS, *TRAINERS, *CHAINS))),
    "chains": CHAINS,
    "services": (*SERVICES, "tests/redteam"),
    "packages": ("tests/unit", *without(SERVICES), *without(MODELS)),
    "models": (*MODELS, "tests/conformance"),
}
"""Parts of pytest's tests, and what each consists of: those that wait first, then those that
compute, which keep the cores busy to the end.
"""
CONTRACTS = "contracts"
"""The part that is forge's."""
AT_ONCE = 5
LOOK_S, PROGRESS_S = 0.2, 15.0
SHOWN_LINES = 60
"""Of the log of a part that failed."""
SILENT_S = 600.0
"""A part that prints nothing for longer is stuck: it is ended, and says where its threads are."""
DUMP_S = 5.0
"""What writing that down may take."""
_FORGE_RESULT = re.compile(r"(\d+) tests? passed, (\d+) failed, (\d+) skipped")
_PYTEST_PROGRESS = re.compile(r"\[ *(\d+)/(\d+)\]")


@dataclass
class Part:
    """A running part."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    printed: int = 0
    printed_at: float = field(default_factory=time.monotonic)

    def is_silent(self, now: float) -> bool:
        """Whether it has printed nothing for too long."""
        if (size := self.log.stat().st_size) != self.printed:
            self.printed, self.printed_at = size, now
        return now - self.printed_at > SILENT_S

    def abort(self) -> None:
        """End it, with all that it started; pytest's process dumps the stacks of its threads."""
        self.process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(DUMP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with self.log.open("a") as log:
            print(f"nothing was printed for {SILENT_S:g} s: see the threads above", file=log)

    @property
    def progress(self) -> str:
        """How far it is, in a few words."""
        found = _PYTEST_PROGRESS.findall(self.log.read_text(errors="replace"))
        return f"{self.name} {found[-1][0]}/{found[-1][1]}" if found else f"{self.name} begins"


@dataclass
class Result:
    """What the tests of a part, or of all, came to."""

    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """How many were skipped, by reason."""


def command_of(name: str, options: list[str]) -> list[str]:
    """Return what runs a part."""
    if name == CONTRACTS:
        return [str(ROOT / "tools" / "forge"), "test"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *PARTS[name]]
    report = f"--junitxml={LOGS / name}.xml"
    return [*command, report, "-o", "console_output_style=count", *options]


def start(name: str, options: list[str]) -> Part:
    """Start a part in a process group of its own."""
    log = LOGS / f"{name}.log"
    environment = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONFAULTHANDLER": "1",
        **os.environ,
    }
    (LOGS / f"{name}.xml").unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command_of(name, options),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    return Part(name, process, log)


def result_of(part: Part) -> Result:
    """Return what an ended part reported; one without a report failed."""
    if part.name == CONTRACTS:
        found = _FORGE_RESULT.findall(part.log.read_text(errors="replace"))
        passed, failed, skipped = map(int, found[-1]) if found else (0, 1, 0)
        return Result(passed, failed, Counter({"by forge": skipped} if skipped else {}))
    report = LOGS / f"{part.name}.xml"
    if not report.exists():
        return Result(failed=1)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = sum(
        case.find("failure") is not None or case.find("error") is not None for case in cases
    )
    skips = [case.find("skipped") for case in cases]
    reasons = Counter(skip.get("message", "") for skip in skips if skip is not None)
    return Result(len(cases) - failed - reasons.total(), failed, reasons)


def summary(results: list[Result]) -> str:
    """Return the line at the end."""
    reasons = sum((result.skipped for result in results), Counter[str]())
    counts = [sum(result.passed for result in results), sum(result.failed for result in results)]
    said = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    line = f"tests: {counts[0]} passed, {counts[1]} failed, {reasons.total()} skipped"
    return f"{line} ({said})" if said else line


def watch(waiting: list[str], options: list[str], running: list[Part], out: TextIO) -> list[Result]:
    """Run parts, telling how far they are; returns their results.

    `running` holds those that run now, also when this is interrupted.
    """
    began = shown = time.monotonic()
    cpu_s = cpu_time_s()
    results = []
    while running or waiting:
        while waiting and len(running) < AT_ONCE:
            running.append(start(waiting.pop(0), options))
        time.sleep(LOOK_S)
        now = time.monotonic()
        for part in [part for part in running if part.is_silent(now)]:
            part.abort()
        for part in [part for part in running if part.process.poll() is not None]:
            running.remove(part)
            # A part's processes count when it has ended: what came since the one before is its own.
            spent_s, cpu_s = cpu_s, cpu_time_s()
            results.append(finish(part, now - began, cpu_s - spent_s, out))
        if now - shown > PROGRESS_S and running:
            shown = now
            print(f"{now - began:4.0f} s  {', '.join(p.progress for p in running)}", file=out)
    return results


def cpu_time_s() -> float:
    """Return the CPU time of all ended parts, with the processes that they started and awaited."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def finish(part: Part, took_s: float, cpu_s: float, out: TextIO) -> Result:
    """Tell how a part ended, and of one that failed what it printed last."""
    result = result_of(part)
    if part.process.returncode != 0:
        # A part may fail without a failed test, as for a secret in a log file.
        result.failed = max(result.failed, 1)
        said = part.log.read_text(errors="replace").splitlines()
        print(*said[-SHOWN_LINES:], sep="\n", file=out)
    counts = summary([result])[7:]
    print(f"{took_s:4.0f} s  {part.name}: {counts}; {cpu_s:.0f} s of CPU", file=out)
    return result


def stop(parts: list[Part]) -> None:
    """End parts, with all that they started."""
    for part in parts:
        if part.process.poll() is None:
            os.killpg(part.process.pid, signal.SIGTERM)


def main(words: list[str]) -> int:
    """Run the parts that are named first, or all; what follows them is for pytest."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    names = [word for word in words if word in (CONTRACTS, *PARTS)]
    options = [word for word in words if word not in names]
    LOGS.mkdir(parents=True, exist_ok=True)
    running: list[Part] = []
    out = sys.stdout
    try:
        results = watch(names or [CONTRACTS, *PARTS], options, running, out)
    except KeyboardInterrupt:
        return 130
    finally:
        stop(running)
    print(summary(results), file=out)
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    # Parts are process groups of their own: who ends this must end them, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
