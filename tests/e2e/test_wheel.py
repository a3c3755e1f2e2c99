"""The wheel is built, installed and tried outside any checkout, with and without extras."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
from installed import TOO_MUCH, Installed

from muster.app.cli import SECTIONS, muster as root_command

ROOT = Path(__file__).parents[2]
DEMO_TIMEOUT_S = 300


def leaves(command: click.Command, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command that is no group, and of groups that are commands."""
    if not isinstance(command, click.Group):
        return [words]
    context = click.Context(command)
    found = [words] if command.invoke_without_command else []
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        found += leaves(inner, (*words, name))
    return found


COMMANDS = leaves(root_command)


def test_what_runs_is_the_wheel_and_no_checkout(complete: Installed) -> None:
    python = complete.program.with_name("python")
    code = "import muster.app.cli as a, muster.protocol as b; print(a.__file__, b.__file__)"
    done = subprocess.run(
        [python, "-P", "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    assert all(str(complete.program.parents[1]) in path for path in done.stdout.split())


def test_data_is_found(complete: Installed) -> None:
    python, prefix = complete.program.with_name("python"), complete.program.parents[1]
    code = (
        "from muster.settings.flags import find_preset; from muster.chain.abi import CONTRACTS;"
        "from muster.toploc import kernel; from muster.tasks.hacks import all_hacks;"
        "from muster.settings import DEPLOYMENTS;"
        "print(find_preset('intellect2-long'), DEPLOYMENTS, len(CONTRACTS),"
        " kernel.load() is not None, len(all_hacks()) > 10)"
    )
    done = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    preset, *found = done.stdout.split()
    assert Path(preset).is_relative_to(prefix)
    assert found == ["~/.muster/deployments", "9", "True", "True"]
    shared = prefix / "share" / "muster"
    assert (shared / "ops" / "systemd" / "muster-worker.service").exists()
    assert (shared / "examples" / "countdown-task" / "pyproject.toml").exists()


def is_sound(done: subprocess.CompletedProcess[str]) -> bool:
    """Tell whether a command succeeded, or said in one line what it needs."""
    if done.returncode == 0 or (done.returncode == 2 and "Usage:" in done.stderr):
        return "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if re.match("(error|hint): ", line)]
    kinds = [line.split(":")[0] for line in said]
    return kinds in (["error"], ["error", "hint"]) and "Traceback" not in done.stderr


@pytest.mark.parametrize("environment", ["complete", "base"])
def test_every_command_works_or_says_what_it_needs(
    environment: str, request: pytest.FixtureRequest
) -> None:
    installed: Installed = request.getfixturevalue(environment)
    program = (
        "import contextlib, io, json, sys; from muster.app.cli import main\n"
        "for words in map(str.split, sys.stdin.read().splitlines()):\n"
        "    sys.argv = ['muster', *words]; err = io.StringIO(); code = 0\n"
        "    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):\n"
        "        try: main()\n"
        "        except SystemExit as e: code = e.code or 0\n"
        "        except BaseException as e: code, _ = 99, err.write(f'Traceback: {e!r}')\n"
        "    print(json.dumps((words, code, err.getvalue())))\n"
    )
    asked = [(*words, "--help") for words in COMMANDS] + [
        words for words in COMMANDS if words not in LONG
    ]
    done = subprocess.run(
        [installed.program.with_name("python"), "-c", program],
        input="\n".join(" ".join(words) for words in asked),
        cwd=installed.folder,
        env=installed.environment,
        capture_output=True,
        text=True,
        timeout=2 * TOO_MUCH,
        check=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(asked)
    unsound = [
        (words, code, said)
        for words, code, said in results
        if not is_sound(subprocess.CompletedProcess(words, code, "", said))
    ]
    assert unsound == []
    helpless = {words[0]: said for words, code, said in results if words[-1] == "--help" and code}
    assert set(helpless) == set(STUDIES)
    assert all("run this command there" in said for said in helpless.values())


STUDIES = SECTIONS["Study, from a checkout"]
LONG = {("completion",), ("init",), ("relay", "run")}
"""Commands that start without options: long work, a dialogue at a terminal, a server."""


def test_missing_extra_is_named(base: Installed) -> None:
    for words, module, extra in (
        (("demo",), "torch", "demo"),
        (("orchestrator", "run"), "", "orchestrator"),
    ):
        done = base.run(*words)
        error, hint = done.stderr.splitlines()[-2:]
        assert (done.returncode, error.startswith("error: ")) == (1, True), done.stderr
        assert module in error
        assert hint.startswith(f"hint: install the extra `{extra}`")


def test_demo_without_node_names_it(complete: Installed) -> None:
    done = complete.run("demo")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: anvil, the local chain, is not installed",
        "hint: install Node.js 18 or newer with npm, or set MUSTER_ANVIL to the path of anvil",
    ]


def test_demo_fetches_anvil_stays_up_is_audited_and_leaves_no_process_behind(
    complete: Installed, base: Installed, bringing_npm: str
) -> None:
    cache = complete.folder / "cache"
    output = complete.folder / "out.txt"
    words = ("--keep", "--steps", "2", "--port", "0", "--honest", "1")
    with output.open("w") as stream:
        demo = subprocess.Popen(
            [complete.program, "demo", *words],
            cwd=complete.folder,
            env={**complete.environment, "PATH": bringing_npm, "XDG_CACHE_HOME": str(cache)},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        report = _wait_for_report(demo, complete.folder / "runs/demo/report.json", output)
        addresses = complete.folder / "home/.muster/deployments"
        where = ("--rpc", report["chain"]["rpc"], "--deployments", str(addresses))
        audit = base.run("audit", "--run", "1", "--json", *where)
        found = json.loads(audit.stdout)
        assert all(check["passed"] for check in found["checks"])
        assert len(found["workers"]) == len(report["workers"]) == 3
    finally:
        family = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        code = demo.wait(timeout=30)
    assert output.read_text().startswith("npm fetches Anvil")
    written = {path.name for path in complete.folder.iterdir()}
    assert written <= {"cache", "home", "out.txt", "runs"}
    assert code == 130
    assert len(family) >= 5
    assert psutil.wait_procs(family, timeout=20)[1] == []


def _wait_for_report(demo: subprocess.Popen[bytes], path: Path, output: Path) -> dict[str, Any]:
    deadline = time.monotonic() + DEMO_TIMEOUT_S
    while "stays up" not in output.read_text():
        assert demo.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
    report: dict[str, Any] = json.loads(path.read_text())
    return report
