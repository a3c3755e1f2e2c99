"""Logging set-up shared by every process; libraries only call `logging.getLogger(__name__)`."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class KeyValueFormatter(logging.Formatter):
    """`12:00:01 worker info submission accepted step=3 index=0`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and what was raised below it."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {k}={_printable(v)}" for k, v in _fields(record).items())
        line = f"{clock} {self.process} {record.levelname.lower()} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "process": self.process,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {k: _plain(v) for k, v in vars(record).items() if k not in _STANDARD}


def _plain(value: object) -> object:
    """Return a value with names in the place of what only a program reads: enums, dataclasses."""
    if isinstance(value, Enum):
        return value.value if isinstance(value, str) else value.name.lower()
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    return value


def _printable(value: object) -> str:
    """Return a value as one line: a stranger's words must not forge lines or drive a terminal."""
    if isinstance(value, dict):
        value = ",".join(f"{name}:{each}" for name, each in value.items()) or "-"
    return "".join(c if c.isprintable() else "\ufffd" for c in str(value))


def setup_logging(process: str) -> None:
    """Log to stderr: INFO, or `MUSTER_LOG_LEVEL`; as JSON lines when `MUSTER_LOG_FORMAT=json`."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get("MUSTER_LOG_FORMAT") == "json"
    handler.setFormatter(_JsonFormatter(process) if as_json else KeyValueFormatter(process))
    level = os.environ.get("MUSTER_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Third parties log every request at INFO.
    for name in ("httpx", "httpcore", "aiohttp", "uvicorn", "alembic", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
