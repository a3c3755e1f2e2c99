"""Amounts, times and sizes as text; all parsing and formatting of them is here."""

import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation, localcontext

from muster.protocol.errors import ConfigError

WEI_PER_TOKEN = 10**18
"""The token has 18 decimals, like the chain's coin."""
_GROUPED = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?", re.ASCII)
"""An amount with a comma between thousands, as `format_tokens` writes it."""
_SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def parse_tokens(text: str) -> int:
    """Return the wei of a decimal amount of tokens, such as `1234.5`, `1,234.5` or `5 tokens`;
    raises ConfigError.
    """
    text = text.removesuffix(" tokens")
    plain = text.replace(",", "") if _GROUPED.fullmatch(text) else text
    try:
        # The default decimal context would round amounts of more than 28 digits.
        with localcontext(prec=80):
            wei = Decimal(plain) * WEI_PER_TOKEN
            is_whole = wei == wei.to_integral_value()
    except (InvalidOperation, ValueError):
        raise ConfigError(
            f"not an amount of tokens: {text!r}", hint="for example 100 or 0.5"
        ) from None
    if not is_whole or not 0 < wei < 1 << 128:
        raise ConfigError(f"not an amount of tokens: {text!r}", hint="at most 18 decimals, above 0")
    return int(wei)


def format_tokens(wei: int, *, group: str = ",") -> str:
    """Return an amount in tokens, exact, without trailing zeros; `group` is "," or nothing."""
    sign, wei = ("-", -wei) if wei < 0 else ("", wei)
    whole, rest = divmod(wei, WEI_PER_TOKEN)
    return f"{sign}{whole:{group}}" + (f".{rest:018d}".rstrip("0") if rest else "")


def format_coins(wei: int) -> str:
    """Return an amount of the chain's own coin, which pays for gas, to six significant digits."""
    return f"{wei / WEI_PER_TOKEN:.6g}"


def format_time(seconds: int) -> str:
    """Return a Unix time as UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_duration(seconds: float) -> str:
    """Return a span in its two largest units, such as `2 h 5 min`; short ones with a decimal."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    left, parts = round(seconds), []
    for size, name in _SPANS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {name}")
        if (count == 0 and parts) or len(parts) == 2:
            break
    return " ".join(parts)


def format_size(size_bytes: float) -> str:
    """Return a number of bytes in the largest binary unit that leaves at least one."""
    for unit, name in _SIZES:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes:.0f} B"


def format_share(ppm: int) -> str:
    """Return millionths as a percentage."""
    return f"{ppm / 10_000:g} %"


def format_slashes(fraud_ppm: int, exact_fraud_ppm: int) -> str:
    """Return a sentence on how much of a fraudulent worker's stake a run slashes."""
    return (
        f"{format_share(fraud_ppm)} for a first statistical fraud, twice the share for each that "
        f"stands already, {format_share(exact_fraud_ppm)} for an exact one"
    )
