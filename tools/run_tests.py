"""`make test`: runs parts in parallel, with a line of progress now and then and one at the end.

Tests of networks mostly wait for time windows to pass, so more parts run at once than there are
cores.
The output of a part is in runs/tests/PART.log; if a part fails, the end of its log is shown. Up to
three failed tests run once more at the end, with nothing beside them: a busy machine misses time
windows. Those that pass then are named.

    python tools/run_tests.py                  all parts
    python tools/run_tests.py networks -x      one part, with options for pytest
"""

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
ENGINES = ("tests/unit/inference", "tests/conformance")
LEARNERS = "tests/unit/trainer"
NETWORKS = "tests/integration/network"
CHAINS = tuple(
    f"tests/integration/{name}" for name in ("orchestrator", "chain", "contracts", "shardcast")
)
TRAINERS = tuple(
    str(path.relative_to(ROOT))
    for path in sorted(ROOT.glob("tests/integration/trainer/test_trainer_*.py"))
)


def without(paths: tuple[str, ...]) -> list[str]:
    """Return pytest's options that exclude paths."""
    return [f"--ignore={path}" for path in paths]


PARTS = {
    "stories": ("tests/e2e", *TRAINERS),
    "networks": (NETWORKS,),
    "services": (*SERVICES, "tests/redteam"),
    "learners": (LEARNERS,),
    "journeys": ("tests/integration", *without((NETWORKS, *TRAINERS, *CHAINS))),
    "packages": ("tests/unit", *without((*SERVICES, *ENGINES, LEARNERS))),
    "chains": CHAINS,
    "engines": ENGINES,
}
"""Parts of pytest's tests, with pytest's arguments: those that wait between those that compute, the
longest first.
"""
CONTRACTS = "contracts"
"""The part that forge runs."""
AGAIN, MOST_AGAIN = "again", 3
"""The part of failed tests that run once more, and how many at most."""
AT_ONCE = len(os.sched_getaffinity(0)) + 1
"""Parts that run at once. On two cores, five made programs so late that tests of deadlines failed.
"""
LOOK_S, PROGRESS_S = 0.2, 15.0
SHOWN_LINES = 60
"""Lines shown of the log of a failed part."""
SILENT_S = 1800.0
"""A part that prints nothing for longer is stuck: it dumps its threads' stacks and is ended."""
DUMP_S = 5.0
"""Time limit of that dump."""
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
        """End the part and its child processes; pytest dumps its threads' stacks first."""
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
        """Its progress, in a few words."""
        found = _PYTEST_PROGRESS.findall(self.log.read_text(errors="replace"))
        return f"{self.name} {found[-1][0]}/{found[-1][1]}" if found else f"{self.name} begins"


@dataclass
class Result:
    """The results of the tests of one part or of all."""

    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of skipped tests, by reason."""
    nodes: list[str] = field(default_factory=list)
    """The failed tests as pytest names them, where they are known."""


def command_of(name: str, options: list[str]) -> list[str]:
    """Return the command that runs a part."""
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
    """Return the result that an ended part reported; without a report, the part failed."""
    if part.name == CONTRACTS:
        found = _FORGE_RESULT.findall(part.log.read_text(errors="replace"))
        passed, failed, skipped = map(int, found[-1]) if found else (0, 1, 0)
        return Result(passed, failed, Counter({"by forge": skipped} if skipped else {}))
    report = LOGS / f"{part.name}.xml"
    if not report.exists():
        return Result(failed=1)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skips = [case.find("skipped") for case in cases]
    reasons = Counter(skip.get("message", "") for skip in skips if skip is not None)
    passed = len(cases) - len(failed) - reasons.total()
    return Result(passed, len(failed), reasons, [node for case in failed for node in node_of(case)])


def node_of(case: ElementTree.Element) -> list[str]:
    """Return a test of a report as pytest names it, if its file is found."""
    words = case.get("classname", "").split(".")
    for length in range(len(words), 0, -1):
        path = "/".join(words[:length]) + ".py"
        if (ROOT / path).is_file():
            return ["::".join([path, *words[length:], case.get("name", "")])]
    return []


def summary(results: list[Result]) -> str:
    """Return the line at the end."""
    reasons = sum((result.skipped for result in results), Counter[str]())
    counts = [sum(result.passed for result in results), sum(result.failed for result in results)]
    said = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    line = f"tests: {counts[0]} passed, {counts[1]} failed, {reasons.total()} skipped"
    return f"{line} ({said})" if said else line


def watch(waiting: list[str], options: list[str], running: list[Part], out: TextIO) -> list[Result]:
    """Run parts and print their progress; returns their results.

    `running` always holds the running parts, also after an interrupt.
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
            # CPU time counts when a part has ended: the increase since the last one is this part's.
            spent_s, cpu_s = cpu_s, cpu_time_s()
            results.append(finish(part, now - began, cpu_s - spent_s, out))
        if now - shown > PROGRESS_S and running:
            shown = now
            print(f"{now - began:4.0f} s  {', '.join(p.progress for p in running)}", file=out)
    return results


def try_again(
    results: list[Result], options: list[str], running: list[Part], out: TextIO
) -> list[Result]:
    """Run a few failed tests once more, alone; returns the results with those that pass then."""
    nodes = [node for result in results for node in result.nodes]
    if not 0 < sum(result.failed for result in results) == len(nodes) <= MOST_AGAIN:
        return results
    print(f"once more, with nothing beside: {', '.join(nodes)}", file=out)
    PARTS[AGAIN] = tuple(nodes)
    [again] = watch([AGAIN], options, running, out)
    if again.failed or again.passed != len(nodes):
        return results
    for result in results:
        result.passed, result.failed = result.passed + result.failed, 0
    print(f"failed beside other parts, passed alone: {', '.join(nodes)}", file=out)
    return results


def cpu_time_s() -> float:
    """Return the CPU time of all ended parts, with the child processes that they waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def finish(part: Part, took_s: float, cpu_s: float, out: TextIO) -> Result:
    """Print a part's result and, if it failed, the end of its log; return the result."""
    result = result_of(part)
    if part.process.returncode != 0:
        # A part may fail without a failed test, for example for a secret in a log file.
        result.failed = max(result.failed, 1)
        said = part.log.read_text(errors="replace").splitlines()
        print(*said[-SHOWN_LINES:], sep="\n", file=out)
    counts = summary([result])[7:]
    print(f"{took_s:4.0f} s  {part.name}: {counts}; {cpu_s:.0f} s of CPU", file=out)
    return result


def stop(parts: list[Part]) -> None:
    """End parts and their child processes."""
    for part in parts:
        if part.process.poll() is None:
            os.killpg(part.process.pid, signal.SIGTERM)


def main(words: list[str]) -> int:
    """Run the parts named by the first words, or all; the other words are pytest's options."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    names = [word for word in words if word in (CONTRACTS, *PARTS)]
    options = [word for word in words if word not in names]
    LOGS.mkdir(parents=True, exist_ok=True)
    running: list[Part] = []
    out = sys.stdout
    try:
        results = watch(names or [CONTRACTS, *PARTS], options, running, out)
        results = try_again(results, options, running, out)
    except KeyboardInterrupt:
        return 130
    finally:
        stop(running)
    print(summary(results), file=out)
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    # Parts are process groups of their own, so a signal that ends this process must end them, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
