"""Recovery words: published vectors, every wallet's account, and no word in any error."""

import stat
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from muster.protocol.eip712 import address_of
from muster.protocol.errors import WalletError
from muster.wallet import key_of_words, new_words, read_words, write_words

# The words that Hardhat, Anvil and Ganache share, and their well-known first account.
KNOWN = "test test test test test test test test test test test junk"
KNOWN_ADDRESS = "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266"


def test_words_give_the_account_that_every_wallet_shows_first() -> None:
    assert address_of(key_of_words(KNOWN)) == KNOWN_ADDRESS


def test_case_and_spacing_of_words_do_not_matter() -> None:
    assert key_of_words(f"  {KNOWN.upper()}\n".replace(" ", "\t ")) == key_of_words(KNOWN)


def test_new_words_are_twelve_that_restore_an_account_and_differ() -> None:
    first, second = new_words(), new_words()
    assert len(first.split()) == 12
    assert key_of_words(first) != key_of_words(second)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (KNOWN.rsplit(" ", 1)[0], "11 recovery words"),
        (KNOWN.replace("junk", "jumk"), "not a recovery word: number 12"),
        (KNOWN.replace("junk", "test"), "checksum is wrong"),
        ("", "0 recovery words"),
    ],
)
def test_damaged_words_are_refused_without_repeating_them(words: str, problem: str) -> None:
    with pytest.raises(WalletError, match=problem) as caught:
        key_of_words(words)
    assert not {"test", "junk", "jumk"} & set(f"{caught.value} {caught.value.hint}".split())


@given(st.text(max_size=200))
def test_any_text_is_words_or_a_wallet_error(text: str) -> None:
    with pytest.raises(WalletError):
        key_of_words(text)


def test_words_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "words.txt"
    write_words(file, KNOWN)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key_of_words(read_words(file)) == key_of_words(KNOWN)
    with pytest.raises(WalletError, match="never overwritten"):
        write_words(file, KNOWN)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"word " * 1000])
def test_a_file_that_holds_no_words_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(WalletError):
        read_words(tmp_path / "w")


def test_a_missing_words_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WalletError, match=r"cannot read the recovery words in .*none"):
        read_words(tmp_path / "none")
