"""Recovery words: BIP-39 words that any wallet turns into the same account (BIP-44, its first).

Words are as good as the key: they are in no error, log line or representation.
"""

from __future__ import annotations

from pathlib import Path

from muster.protocol.errors import WalletError
from muster.wallet import write_private

RECOVERY_PATH = "m/44'/60'/0'/0/0"
"""The account that wallets show first."""
WORDS = 12
"""128 bits, as strong as the key itself."""
WORD_COUNTS = (12, 15, 18, 21, 24)
"""What BIP-39 allows."""
MAX_WORDS_BYTES = 1024
"""A larger file holds something else."""


def new_words() -> str:
    """Return fresh recovery words, separated by single blanks."""
    from eth_account.hdaccount import generate_mnemonic
    from eth_account.types import Language

    return generate_mnemonic(WORDS, Language.ENGLISH)


def key_of_words(words: str) -> bytes:
    """Return the private key of the words' first account.

    Case and spacing do not matter. Raises WalletError for a wrong count, a word that is in no list
    or words whose checksum is wrong; it names places, never words.
    """
    from eth_account.hdaccount import key_from_seed, seed_from_mnemonic

    normal = words.lower().split()
    _check(normal)
    return bytes(key_from_seed(seed_from_mnemonic(" ".join(normal), ""), RECOVERY_PATH))


def read_words(file: Path) -> str:
    """Return the words in a file; raises WalletError when it cannot be read."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_WORDS_BYTES + 1)
        if len(data) > MAX_WORDS_BYTES:
            raise WalletError(f"{file} is too large to hold recovery words")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise WalletError(f"cannot read the recovery words in {file}: {reason}") from None


def write_words(file: Path, words: str) -> None:
    """Write the words to a new file that only its owner can read; raises WalletError."""
    write_private(file, words.encode() + b"\n")


def _check(words: list[str]) -> None:
    from eth_account.hdaccount.mnemonic import Mnemonic
    from eth_account.types import Language

    if len(words) not in WORD_COUNTS:
        raise WalletError(
            f"{len(words)} recovery words, there are {', '.join(map(str, WORD_COUNTS[:-1]))} or "
            f"{WORD_COUNTS[-1]}",
            hint="type all of them, in order, separated by blanks",
        )
    english = Mnemonic(Language.ENGLISH)
    known = set(english.wordlist)
    unknown = [str(place) for place, word in enumerate(words, 1) if word not in known]
    if unknown:
        raise WalletError(
            f"not a recovery word: number {', '.join(unknown)}",
            hint="check the spelling: English BIP-39 words only",
        )
    if not english.is_mnemonic_valid(" ".join(words)):
        raise WalletError(
            "the recovery words' checksum is wrong", hint="a word is wrong, or two are swapped"
        )
