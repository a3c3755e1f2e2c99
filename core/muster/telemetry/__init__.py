"""Output of every process: its log, and the progress of long work.

Libraries only call `logging.getLogger(__name__)`; a process calls `setup_logging` once. Progress is
a bar on a terminal, else lines in the log.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the amount done and the total; the total is 0 if unknown."""
LOG_EVERY_S = 10.0
"""Seconds between two lines of progress without a terminal."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class KeyValueFormatter(logging.Formatter):
    """`12:00:01 worker info submission accepted step=3 index=0`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the exception if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {k}={_printable(v)}" for k, v in _fields(record).items())
        line = f"{clock} {self.process} {record.levelname.lower()} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(KeyValueFormatter):
    """One JSON object per line."""

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
    """Return a value in readable form: names for enums, text for dataclasses."""
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
    """Return a value as one line: untrusted text must not forge log lines or control a terminal."""
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
    for name in ("httpx", "httpcore", "aiohttp", "uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


# Progress


@contextlib.contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show how many of `what` are done: a bar on a terminal, else lines in the log."""
    if not sys.stderr.isatty():
        yield LoggedProgress(what)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress as Display,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Display(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(what, total=None)
        yield lambda done, of: display.update(task, completed=done, total=of or None)


class LoggedProgress:
    """Progress as log lines: the first, the last, and one every so often."""

    def __init__(self, what: str, every_s: float = LOG_EVERY_S) -> None:
        self._what, self._every_s = what, every_s
        self._due = 0.0

    def __call__(self, done: int, of: int) -> None:
        """Log, if enough time has passed."""
        now = time.monotonic()
        if now >= self._due or done == of:
            self._due = now + self._every_s
            logger.info("%s", self._what, extra={"done": done, **({"of": of} if of else {})})
