"""`muster init`: words before keys, keys never overwritten, nothing shown twice."""

import json
import os
import pty
import re
import select
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from muster.client.cli.keys import create_identity, init
from muster.protocol.eip712 import address_of
from muster.protocol.errors import WalletError
from muster.wallet import key_of_words, keystore_address, load_wallet, read_words

WORDS = "test test test test test test test test test test test junk"
ADDRESS = "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266"


def run(*words: str) -> Any:
    return CliRunner().invoke(init, [*words, "--light"], env={"MUSTER_PASSWORD": "secret"})


def test_words_file_restores_the_worker_that_was_created(tmp_path: Path) -> None:
    words, folder = tmp_path / "words", tmp_path / "keys"
    result = run("--dir", str(folder), "--words-file", str(words), "--json")
    created = json.loads(result.stdout)
    assert stat.S_IMODE(words.stat().st_mode) == 0o600
    assert address_of(key_of_words(read_words(words))) == created["worker"]
    assert load_wallet(folder / "worker.json", "secret").address == created["worker"]
    assert load_wallet(folder / "node.json", "secret").address == created["node"]
    # The printed sentence itself contains a word or two of the list of 2,048 ("machine").
    printed = set(re.findall(r"\w+", result.output))
    assert len(printed.intersection(read_words(words).split())) < 4


def test_recovery_gives_the_same_worker_and_another_node(tmp_path: Path) -> None:
    (tmp_path / "words").write_text(WORDS)
    made = [
        json.loads(
            run(
                "--dir", str(tmp_path / name), "--recover-from", str(tmp_path / "words"), "--json"
            ).stdout
        )
        for name in "ab"
    ]
    assert {each["worker"] for each in made} == {ADDRESS}
    assert made[0]["node"] != made[1]["node"]


def test_next_steps_name_the_keystores(tmp_path: Path) -> None:
    result = run("--dir", str(tmp_path / "my k"), "--words-file", str(tmp_path / "w"))
    assert "muster doctor --run" in result.stderr
    node = tmp_path / "my k" / "node.json"
    assert f"muster stake --keystore '{tmp_path / 'my k' / 'worker.json'}'" in result.stderr
    assert f"--keystore '{node}' --orchestrator URL" in result.stderr
    assert f"a bond and gas money to {keystore_address(node)}" in result.stderr


@pytest.mark.parametrize("name", ["worker.json", "node.json"])
def test_an_existing_keystore_stops_everything_before_words_are_made(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    result = run("--dir", str(tmp_path), "--words-file", str(tmp_path / "words"))
    assert "never overwritten" in str(result.exception)
    assert not (tmp_path / "words").exists()
    assert (tmp_path / name).read_text() == "mine"


def test_an_existing_words_file_is_left_alone_and_no_key_is_made(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("mine")
    result = run("--dir", str(tmp_path / "k"), "--words-file", str(tmp_path / "words"))
    assert isinstance(result.exception, WalletError)
    assert (tmp_path / "words").read_text() == "mine"
    assert not (tmp_path / "k").exists()


def test_without_a_terminal_words_are_not_shown_at_all(tmp_path: Path) -> None:
    result = run("--dir", str(tmp_path / "k"))
    assert "on a terminal only" in str(result.exception)
    assert "--words-file" in (getattr(result.exception, "hint", "") or "")
    assert result.stdout == ""


def test_wrong_words_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "words").write_text(WORDS.replace("junk", "test"))
    result = run("--dir", str(tmp_path / "k"), "--recover-from", str(tmp_path / "words"))
    assert "checksum" in str(result.exception)
    assert not (tmp_path / "k").exists()


def test_a_disk_that_refuses_the_worker_keeps_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise WalletError("cannot write")

    monkeypatch.setattr("muster.wallet.save_wallet", refuse)
    monkeypatch.setattr("muster.wallet.create_wallet", lambda path, *_, **__: path.write_text("x"))
    with pytest.raises(WalletError, match="cannot write"):
        create_identity(tmp_path, WORDS, ("a", "b"), light=True)
    assert list(tmp_path.iterdir()) == []


def test_ways_to_the_words_exclude_each_other(tmp_path: Path) -> None:
    assert run("--recover", "--words-file", str(tmp_path / "w")).exit_code == 2


class Terminal:
    """A command at a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self.text = ""
        self._main, child = pty.openpty()
        environment = {**os.environ, "MUSTER_PASSWORD": "secret", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "muster.app", *words],
            stdin=child, stdout=child, stderr=child, env=environment,
        )  # fmt: skip
        os.close(child)

    def expect(self, pattern: str, timeout_s: float = 60) -> re.Match[str]:
        ends_at = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.text)):
            assert time.monotonic() < ends_at, self.text
            if select.select([self._main], [], [], 0.1)[0]:
                self.text += os.read(self._main, 4096).decode()
        self.text = self.text[match.end() :]
        return match

    def type(self, line: str) -> None:
        os.write(self._main, line.encode() + b"\n")

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            os.close(self._main)


def test_words_on_a_terminal_are_shown_confirmed_and_restore_the_worker(tmp_path: Path) -> None:
    terminal = Terminal("init", "--dir", str(tmp_path / "k"), "--light")
    shown = terminal.expect(r"(?s)shown now and never again(.*)Press Enter")[1]
    words = [
        word for _, word in sorted((int(n), w) for n, w in re.findall(r"(\d+)\. (\w+)", shown))
    ]
    assert not (tmp_path / "k").exists()
    terminal.type("")
    for _ in range(3):
        terminal.type(words[int(terminal.expect(r"Word (\d+)")[1]) - 1])
    address = terminal.expect(r"worker\s+(0x\w{40})")[1]
    terminal.expect("Next:")
    assert terminal.close() == 0
    assert address == address_of(key_of_words(" ".join(words)))
    assert load_wallet(tmp_path / "k" / "worker.json", "secret").address == address


def test_words_typed_at_a_terminal_restore_the_worker_and_are_not_echoed(tmp_path: Path) -> None:
    terminal = Terminal("init", "--dir", str(tmp_path / "k"), "--light", "--recover")
    terminal.expect("Recovery words")
    terminal.type(WORDS)
    said = terminal.expect(r"(?s)(.*)worker\s+(0x\w{40})")
    assert terminal.close() == 0
    assert said[2] == ADDRESS
    assert "junk" not in said[1]


def test_words_that_are_not_confirmed_leave_nothing(tmp_path: Path) -> None:
    terminal = Terminal("init", "--dir", str(tmp_path / "k"), "--light")
    terminal.expect("Press Enter")
    terminal.type("")
    for _ in range(3):
        terminal.expect(r"Word \d+")
        terminal.type("wrong")
    terminal.expect("nothing was written")
    assert terminal.close() == 1
    assert not (tmp_path / "k").exists()
