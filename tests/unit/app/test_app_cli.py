"""The muster command: quick help, and one-line errors."""

import asyncio
import ctypes
import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from muster.app import cli
from muster.app.cli import COMMANDS, SECTIONS, main, muster
from muster.chain import Chain
from muster.chain.outgoing import TELL_SENT
from muster.client.audit import command as audit_command
from muster.client.cli.printing import SENT, tell_sent
from muster.lifecycle.files import cannot_write
from muster.protocol import errors
from muster.trainer.cli import SECTIONS as TRAINER_SECTIONS, trainer_run
from muster.trainer.learn.parallel import RankLost
from muster.trainer.sites.meeting import SiteLost
from muster.wallet import save_wallet

HEAVY = ("torch", "transformers", "vllm", "web3", "pyarrow", "matplotlib", "fastapi", "sqlalchemy")


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    script = (
        "import json, sys; from muster.app.cli import muster\n"
        "muster(['--help'], standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    times = []
    for _ in range(3):
        before = _cpu_s_of_children()
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
        )
        times.append(_cpu_s_of_children() - before)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert not set(HEAVY) & {name.split(".")[0] for name in loaded}
    assert min(times) < 0.4


READS_PARENT = "import os; print('secret' in open(f'/proc/{os.getppid()}/environ').read())"
STARTS_CHILD = f"""
import subprocess, sys, click
from muster.app.cli import main
sys.argv[1:] = []
child = [sys.executable, "-c", {READS_PARENT!r}]
command = click.Command("it", callback=lambda: subprocess.run(child) and None)
"""


def _as_an_ordinary_user() -> None:
    """Give up the capabilities with which root reads every process: ptrace, admin, perfmon."""
    for capability in (19, 21, 38):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such protection")
@pytest.mark.parametrize(
    ("call", "printed", "error"),
    [("main(command)", "", "PermissionError"), ("command.callback()", "True\n", "")],
)
def test_a_command_is_hidden_from_processes_that_it_starts(
    call: str, printed: str, error: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS_CHILD + call],
        env={**os.environ, "MUSTER_PASSWORD": "secret"},
        preexec_fn=_as_an_ordinary_user,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout, error in done.stderr) == (printed, True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_loads_and_has_help(name: str) -> None:
    command = muster.get_command(click.Context(muster), name)
    assert command is not None
    assert command.help


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(click.UsageError, match="No such command 'nonsense'"):
        muster(["nonsense"], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["wroker"], "worker"), (["run", "shwo"], "show"), (["worker", "rnu"], "run")],
)
def test_a_mistyped_command_is_suggested(words: list[str], meant: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        muster(words, standalone_mode=False)
    assert f"Did you mean '{meant}'?" in raised.value.format_message()


def test_every_command_is_under_one_title() -> None:
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(COMMANDS)
    text = muster.get_help(click.Context(muster, info_name="muster"))
    assert all(f"\n{title}:\n" in text for title in SECTIONS)
    assert text.count("  worker  ") == 1


def test_the_options_of_a_trainer_are_under_titles() -> None:
    text = trainer_run.get_help(click.Context(trainer_run, info_name="muster trainer run"))
    titles = re.findall(r"^(\S.*):$", text, re.M)
    assert titles == [*TRAINER_SECTIONS, "Others"]
    assert text.endswith("help  Show this message and exit.")


def _raise(error: BaseException) -> click.Command:
    def callback() -> None:
        raise error

    return click.Command("demo", callback=callback)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            errors.ConfigError("port 1 is taken", hint="use --port"),
            "error: port 1 is taken\nhint: use --port\n",
        ),
        (
            ModuleNotFoundError("x", name="torch"),
            "error: torch is not installed\n"
            "hint: install the extra `model`: docs/guides/install.md\n",
        ),
        (
            OSError(28, "No space left on device", "runs/x"),
            "error: No space left on device: runs/x\n"
            "hint: the disk is full: free some space, then run the same command again\n",
        ),
        (PermissionError(13, "Permission denied", "k"), "check who owns the path"),
    ],
)
def test_errors_are_lines_not_tracebacks(
    error: Exception,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "muster", _raise(error))
    monkeypatch.setattr(sys, "argv", ["muster"])
    with pytest.raises(SystemExit):
        main()
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch", "model"),
        ("transformers.models", "model"),
        ("fastapi", "orchestrator"),
        ("sqlalchemy", "orchestrator"),
        ("matplotlib", "plot"),
        ("math_verify", "math"),
        ("latex2sympy2_extended", "math"),
        ("pynvml", "gpu"),
        ("huggingface_hub", "demo"),
    ],
)
def test_missing_module_is_named_with_the_extra_that_brings_it(module: str, extra: str) -> None:
    assert cli.extra_of(module) == extra


def test_every_rpc_option_without_settings_reads_the_shared_variable() -> None:
    words = [["devnet", "fund"], ["run", "create"], ["tasks", "filter-run"], ["audit"], ["stake"]]
    for command in words:
        shown = CliRunner().invoke(muster, [*command, "--help"]).stdout
        assert "else MUSTER_RPC" in shown
        assert "else MUSTER_DEPLOYMENTS" in " ".join(shown.split())


def test_fund_asks_the_chain_of_the_shared_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_RPC", "http://127.0.0.1:1")
    monkeypatch.setenv("MUSTER_PASSWORD", "pw")
    keystore = str(tmp_path / "k.json")
    assert CliRunner().invoke(muster, ["wallet", "new", keystore, "--light"]).exit_code == 0
    result = CliRunner().invoke(muster, ["devnet", "fund", keystore])
    assert isinstance(result.exception, errors.ChainUnreachable)
    assert "http://127.0.0.1:1 " in str(result.exception)


@pytest.mark.parametrize(
    "defect", [ZeroDivisionError(), ModuleNotFoundError("x", name="muster.nothing")]
)
def test_defects_of_our_own_are_not_hidden(
    defect: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "muster", _raise(defect))
    monkeypatch.setattr(sys, "argv", ["muster"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == cli.CRASHED
    assert "Traceback (most recent call last):\n" in (shown := capsys.readouterr().err)
    assert type(defect).__name__ in shown


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("no such run"), 1),
        (errors.WalletError("wrong password"), 1),
        (errors.ContractRevert("VaultZeroAmount"), 1),
        (errors.ApiError("not allowed", status=403, code="forbidden"), 1),
        (errors.ApiError("busy", status=429, code="slow_down"), 3),
        (errors.ApiError("away", status=503, code="unreachable"), 3),
        (errors.ChainUnreachable("no answer"), 3),
        (errors.TransactionLost("no receipt", tx="0x", is_remembered=True), 3),
        (errors.TransactionLost("no receipt", tx="0x", is_remembered=False), 1),
        (errors.RpcError("internal error", code=-32603), 3),
        (errors.PolicyUnavailable("no relay"), 3),
        (errors.NotYet("in an hour"), 3),
        (SiteLost("waiting for site 0's decision failed"), 3),
        (RankLost("waiting for all ranks failed"), 3),
        (errors.TrainingCollapsed("site 1 left step 2"), 1),
        (errors.StorageFailed("the disk is full"), 3),
        (errors.StorageError("the database is damaged"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 3),
        (OSError(errno.ENFILE, "Too many open files in system"), 3),
        (ModuleNotFoundError("x", name="torch"), 1),
        (OSError(errno.EACCES, "Permission denied"), 1),
        (KeyboardInterrupt(), 130),
        (cannot_write(Path("state"), OSError(errno.ENOSPC, "No space left on device")), 3),
        (cannot_write(Path("state"), OSError(errno.EMFILE, "Too many open files")), 3),
        (cannot_write(Path("state"), OSError(errno.EACCES, "Permission denied")), 1),
        (MemoryError(), 70),
        (RuntimeError("CUDA out of memory"), 70),
    ],
)
def test_exit_codes_tell_not_now_from_not_so(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "muster", _raise(error))
    monkeypatch.setattr(sys, "argv", ["muster"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ChainUnreachable("no answer", hint="wait a minute and try again"), 1),
        (errors.TransactionLost("no receipt", tx="0xa1", is_remembered=False), 1),
        (errors.StorageFailed("the disk is full"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (ZeroDivisionError(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
@pytest.mark.parametrize("sent", [[], ["0xa1"], ["0xa1", "0xa2"]])
def test_command_that_sent_something_does_not_ask_to_be_repeated(
    sent: list[str],
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def command() -> None:
        for each in sent:
            tell_sent(each)
        raise error

    tell_sent("0xb1")  # by an earlier command
    capsys.readouterr()
    monkeypatch.setattr(cli, "muster", command)
    monkeypatch.setattr(sys, "argv", ["muster"])
    with pytest.raises(SystemExit) as caught:
        main()
    shown = capsys.readouterr().err
    for each in sent:
        assert f"sent {each}, waiting\n" in shown
    warning = f"hint: look for {' and '.join(sent)} on chain before you run the command again"
    assert (warning in shown) is bool(sent)
    assert "0xb1" not in shown
    if sent:
        assert caught.value.code == code
        assert "try again" not in shown


async def connect_and_send(*_: Any, **__: Any) -> None:
    """Stands for a connection to the chain that is lost once a transaction has left."""
    tell = TELL_SENT.get()
    assert tell is not None
    tell("0xa1")
    raise errors.ChainUnreachable("no answer")


PLAN_TRAPS = ["validator", "trap", "plan", "--run", "1", "--worker", "0x" + "11" * 20]
PLAN_TRAPS += ["--last-step", "9", "--out", "plan.json"]


@pytest.mark.parametrize(
    ("words", "code"),
    [(PLAN_TRAPS, 1), (["dispute", "settle", "1:0"], 3)],
)
def test_command_that_has_sent_ends_with_code_3_only_if_it_may_be_repeated(
    words: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Chain, "connect", connect_and_send)
    monkeypatch.setenv("MUSTER_PASSWORD", "secret")
    monkeypatch.chdir(tmp_path)
    save_wallet(Path("key.json"), bytes(31) + b"\x01", "secret", light=True)
    monkeypatch.setattr(sys, "argv", ["muster", *words, "--keystore", "key.json"])
    with pytest.raises(SystemExit) as caught:
        main()
    shown = capsys.readouterr().err
    assert caught.value.code == code
    assert "sent 0xa1, waiting\n" in shown
    assert ("before you run the command again" in shown) is (code == 1)


def test_report_of_faults_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Chain, "connect", connect_and_send)
    options = {"rpc": "http://node", "deployments": Path(), "dump": None}
    SENT.clear()
    with pytest.raises(errors.ChainUnreachable):
        asyncio.run(audit_command._report([], b"", options))
    assert "sent 0xa1, waiting\n" in capsys.readouterr().err
    assert not SENT


def test_exit_codes_are_those_of_the_reference() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/exit-codes.md").read_text()
    codes = [int(row) for row in re.findall(r"^\| (\d+) \|", page, re.M)]
    own = (cli.LATER, cli.CRASHED, cli.STOPPED)
    assert codes == [0, cli.REFUSED, click.UsageError("x").exit_code, *own]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_every_shell(
    shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    result = CliRunner().invoke(muster, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert "_MUSTER_COMPLETE" in result.stdout


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("muster unst", "unstake"),
        ("muster worker st", "status"),
        ("muster explain --re", "--rerun"),
    ],
)
def test_a_shell_completes_commands_and_flags(typed: str, expected: str) -> None:
    words = typed.split()
    environment = {
        **os.environ,
        "_MUSTER_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['muster']; "
         "from muster.app.cli import main; main()"],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    assert f"plain,{expected}" in done.stdout
