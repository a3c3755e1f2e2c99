"""`make test` reports the result of every part, and skips only for listed reasons."""

import io
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from scripts import load_script
from skips import ALLOWED, SkipList

SCRIPT = Path(__file__).parents[3] / "tools" / "run_tests.py"
REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="1 != 2"/></testcase>
<testcase name="c"><error message="no fixture"/></testcase>
<testcase name="d"><skipped message="no Linux"/></testcase><testcase name="e"/>
</testsuite></testsuites>"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a folder of its own for logs."""
    module = load_script("tools/run_tests.py")
    monkeypatch.setattr(module, "LOGS", tmp_path)
    return module


def play(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, parts: Sequence[str] = (), **programs: str
) -> tuple[int, str]:
    """Run the script with other programs as its parts; returns its exit status and output."""
    monkeypatch.setattr(runner, "LOOK_S", 0.001)
    monkeypatch.setattr(runner, "PARTS", dict.fromkeys(programs, ()))
    monkeypatch.setattr(
        runner, "command_of", lambda name, _options: [sys.executable, "-c", programs[name]]
    )
    out = io.StringIO()
    monkeypatch.setattr(out, "reconfigure", lambda **_: None, raising=False)
    monkeypatch.setattr(sys, "stdout", out)
    return runner.main(list(parts or programs)), out.getvalue()


def reporting(folder: Path, name: str, cases: str, status: int = 0) -> str:
    report = f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
    return (
        f"open({str(folder / name)!r} + '.xml', 'w').write({report!r}); raise SystemExit({status})"
    )


def test_parts_that_pass_are_added_up(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, said = play(
        runner,
        monkeypatch,
        one=reporting(tmp_path, "one", "<testcase/><testcase/>"),
        two=reporting(tmp_path, "two", "<testcase/>"),
        contracts="print('Ran 2 test suites: 7 tests passed, 0 failed, 0 skipped (7 total tests)')",
    )
    assert (status, said.splitlines()[-1]) == (0, "tests: 10 passed, 0 failed, 0 skipped")


def test_why_something_was_skipped_is_said(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = '<testcase><skipped message="no Linux"/></testcase>'
    _, said = play(runner, monkeypatch, one=reporting(tmp_path, "one", case * 2))
    assert said.splitlines()[-1] == "tests: 0 passed, 0 failed, 2 skipped (2: no Linux)"


@pytest.mark.parametrize(
    "program",
    ["print('no test ran'); raise SystemExit(2)", "print('killed before the report')"],
    ids=["status", "report"],
)
def test_part_without_a_report_has_failed(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    status, said = play(runner, monkeypatch, one=program)
    assert (status, said.splitlines()[-1]) == (1, "tests: 0 passed, 1 failed, 0 skipped")


def test_end_of_a_failed_part_is_shown(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = "print('assert 1 == 2'); " + reporting(tmp_path, "one", "<testcase/>", status=1)
    status, said = play(runner, monkeypatch, one=program)
    assert status == 1
    assert "assert 1 == 2" in said
    assert said.splitlines()[-1] == "tests: 1 passed, 1 failed, 0 skipped"


def test_part_that_is_stuck_is_ended_and_says_where(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SILENT_S", 2.0)
    stuck = "import time\ndef waits_for_ever(): time.sleep(600)\nwaits_for_ever()"
    status, said = play(runner, monkeypatch, one=stuck)
    assert (status, said.splitlines()[-1]) == (1, "tests: 0 passed, 1 failed, 0 skipped")
    assert "in waits_for_ever" in said
    assert "nothing was printed for 2 s" in said


def test_failures_and_errors_of_a_report_are_counted(runner: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "one.xml").write_text(REPORT)
    result = runner.result_of(SimpleNamespace(name="one"))
    assert (result.passed, result.failed, result.skipped) == (2, 2, Counter({"no Linux": 1}))


FLAKY = "".join(
    f'<testcase classname="tests.unit.ops.test_run_tests{kind}" name="{name}"><failure/></testcase>'
    for kind, name in (("", "test_a[1-b c]"), (".TestClass", "test_b"))
)
NODES = (
    "tests/unit/ops/test_run_tests.py::test_a[1-b c], "
    "tests/unit/ops/test_run_tests.py::TestClass::test_b"
)


def test_failed_tests_run_once_more_alone(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    again = reporting(tmp_path, "again", "<testcase/><testcase/>")
    first = reporting(tmp_path, "one", "<testcase/>" + FLAKY, status=1)
    status, said = play(runner, monkeypatch, parts=["one"], one=first, again=again)
    lines = said.splitlines()
    assert (status, lines[-1]) == (0, "tests: 3 passed, 0 failed, 0 skipped")
    assert lines[-2] == f"failed beside other parts, passed alone: {NODES}"
    assert runner.PARTS["again"] == tuple(NODES.split(", "))


@pytest.mark.parametrize(
    "again",
    ["<testcase/><testcase><failure/></testcase>", "<testcase/>"],
    ids=["fails again", "not all ran"],
)
def test_what_does_not_pass_alone_has_failed(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: str
) -> None:
    first = reporting(tmp_path, "one", "<testcase/>" + FLAKY, status=1)
    second = reporting(tmp_path, "again", again)
    status, said = play(runner, monkeypatch, parts=["one"], one=first, again=second)
    assert (status, said.splitlines()[-1]) == (1, "tests: 1 passed, 2 failed, 0 skipped")
    assert "passed alone" not in said


@pytest.mark.parametrize("cases", [2 * FLAKY, FLAKY + "<testcase><failure/></testcase>"])
def test_many_failures_or_unknown_ones_stand(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cases: str
) -> None:
    status, said = play(runner, monkeypatch, one=reporting(tmp_path, "one", cases, status=1))
    assert status == 1
    assert "once more" not in said


def test_progress_is_what_pytest_counted_last(runner: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("....... [   7/4754]\n....... [ 120/4754]\n..")
    assert runner.Part("packages", None, tmp_path / "log").progress == "packages 120/4754"


def test_every_test_is_in_one_part(runner: ModuleType) -> None:
    tests = SCRIPT.parents[1] / "tests"
    found = [str(path.relative_to(tests.parent)) for path in tests.rglob("test_*.py")]

    def has(words: tuple[str, ...], file: str) -> bool:
        left_out = [word.removeprefix("--ignore=") for word in words if word.startswith("--")]
        return file.startswith(words) and not file.startswith(tuple(left_out))

    counts = {file: sum(has(words, file) for words in runner.PARTS.values()) for file in found}
    # vLLM has an environment of its own: `make test-vllm`.
    others = {file.split("/")[1] for file, count in counts.items() if count != 1}
    assert others == {"vllm_engine"}


# The reasons


def reported(reason: str) -> SimpleNamespace:
    """Return the result of a test that was skipped for a reason."""
    hook = SkipList().pytest_runtest_makereport()
    next(hook)
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("f", 1, reason))
    with pytest.raises(StopIteration) as ended:
        hook.send(report)
    return ended.value.value


@pytest.mark.parametrize("reason", ALLOWED)
def test_listed_reason_is_taken(reason: str) -> None:
    assert reported(f"Skipped: {reason} and more").outcome == "skipped"


def test_other_reason_fails_the_test() -> None:
    report = reported("Skipped: it is flaky")
    assert (report.outcome, "it is flaky" in report.longrepr) == ("failed", True)
