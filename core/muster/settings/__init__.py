"""Process settings: one frozen model per process, from defaults < TOML < environment < flags.

Unless one of these sets the chain's endpoint, the network (`muster.settings.profiles`) does.
Secrets are never settings: they come from a file or the environment, see muster.wallet.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from muster.protocol.documents import Document, first_fault
from muster.protocol.errors import ConfigError, EncodingError
from muster.settings.profiles import (
    DEFAULT_RPC as DEFAULT_RPC,
    DEPLOYMENTS as DEPLOYMENTS,
    SHARED,
    chosen_network,
    typed_network,
)

CACHE = Path("~/.muster/cache")
"""Files that can be fetched or computed again."""

Confirmations = Annotated[int, Field(ge=0, le=1000)] | Literal["safe", "finalized"]
"""Blocks that must be on top of a block before it counts, or the consensus tag that it must
have."""


def urls_of(text: str) -> list[str]:
    """Return the URLs in a text, separated by blanks or commas."""
    return text.replace(",", " ").split()


def _listed(value: Any) -> Any:
    # A variable is one text; an option that may be repeated, or a TOML array, is several.
    texts = [value] if isinstance(value, str) else value
    is_texts = isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
    return tuple(urls_of(",".join(texts))) if is_texts else value


def _require_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ValueError(f"{text[:80]!r} is no URL like http://host:8700")
    return text


Listed = BeforeValidator(_listed)
"""Marks a tuple of texts that variables and flags may give as one text, separated by blanks or
commas."""
Urls = Annotated[tuple[Annotated[str, AfterValidator(_require_url)], ...], Listed]


def joined(_context: object, _option: object, urls: Sequence[str]) -> str | None:
    """Return an option's URLs as one setting: the callback of an option that may be repeated."""
    return ",".join(urls) or None


class Settings(BaseModel):
    """Base of every process's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    of_network: ClassVar[frozenset[str]] = frozenset({"rpc", "deployments"})
    """Settings that come from a network's profile if nothing else sets them."""


S = TypeVar("S", bound=Settings)
D = TypeVar("D", bound=Document)


def load_settings(
    cls: type[S],
    *,
    env_prefix: str,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> S:
    """Return the settings; flags that are None, or an empty tuple, count as not given.

    Raises ConfigError for an unreadable file, an unknown key (with the close match) or a bad value.
    """
    values = read_toml(file) if file else {}
    _refuse_unknown(cls, values, str(file))
    for name in cls.model_fields:
        text = environ.get(env_prefix + name.upper(), environ.get(SHARED.get(name, "")))
        if text is not None:
            values[name] = text
    # An option that may be repeated is an empty tuple when it is not given.
    given = {name: value for name, value in (flags or {}).items() if value not in (None, ())}
    if typed_network() is not None:
        # A flag, like the others: before variables and file.
        values = {name: value for name, value in values.items() if name not in cls.of_network}
    values |= given
    _refuse_unknown(cls, values, "flags")
    values = _of_network(cls, values, environ) | values
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise _first_problem(error, env_prefix) from error


def _of_network(
    cls: type[Settings], values: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the settings from the network."""
    wanted = cls.of_network & cls.model_fields.keys()
    if "rpc" not in wanted:
        return {}
    chosen = chosen_network(values.get("rpc"), values.get("deployments"), environ)
    served = chosen.served(values.get("run"))
    said = {
        "rpc": chosen.rpc,
        "deployments": chosen.deployments,
        "orchestrator": served.orchestrator,
        "relay": served.relays,
    }
    return {name: said[name] for name in wanted if said[name]}


def read_file(file: Path, most: int | None = None, *, hint: str | None = None) -> bytes:
    """Return the content of a file that the user named: all of it, or at most `most` + 1 bytes.

    Raises ConfigError when it cannot be read.
    """
    try:
        with file.open("rb") as source:
            return source.read(-1 if most is None else most + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}", hint=permission_hint(error) or hint
        ) from error


def permission_hint(error: OSError) -> str | None:
    """Return who must be allowed to read a file; None for another error than a missing right."""
    if not isinstance(error, PermissionError):
        return None
    return f"let user {os.geteuid()}, whose process this is, enter its folders and read it"


def read_toml(file: Path) -> dict[str, Any]:
    """Return the values of a TOML file; raises ConfigError."""
    try:
        return tomllib.loads(read_file(file).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def parse_document(kind: type[D], values: Mapping[str, Any], file: Path) -> D:
    """Return a document from the values of a TOML file; raises ConfigError that names the field."""
    try:
        # TOML has no tuples, so the values are validated with JSON's rules.
        return kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(f"{file}: {first_fault(error)}") from error
    except TypeError as error:
        raise ConfigError(f"{file}: {error}") from error


def read_document(kind: type[D], file: Path, *, hint: str) -> D:
    """Return the document in a file; `hint` says which file it should be.

    Raises ConfigError when the file cannot be read, EncodingError when it is no such document.
    """
    data = read_file(file, hint=hint)
    try:
        return kind.from_bytes(data)
    except EncodingError as error:
        raise EncodingError(f"{file} is no {kind.NAME}: {error}", hint=hint) from error


def _refuse_unknown(cls: type[Settings], values: Mapping[str, Any], where: str) -> None:
    for key in values:
        if key not in cls.model_fields:
            close = difflib.get_close_matches(key, cls.model_fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else None
            raise ConfigError(f"unknown setting {key!r} in {where}", hint=hint)


def _first_problem(error: ValidationError, env_prefix: str) -> ConfigError:
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        hint = f"give --{name.replace('_', '-')}, or set {env_prefix}{name.upper()}"
        return ConfigError(f"setting {name!r} is missing", hint=hint)
    said = problem["msg"].removeprefix("Value error, ")
    advice = getattr(problem.get("ctx", {}).get("error"), "hint", None)
    return ConfigError(f"setting {name!r}: {said}, got {problem['input']!r}", hint=advice)
