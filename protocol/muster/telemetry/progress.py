"""How far long work has come: a bar on a terminal, else lines in the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None]
"""Told how much is done, of how much; 0 when that is not known."""

LOG_EVERY_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show how many of `what` are done: a bar on a terminal, else lines in the log."""
    if not sys.stderr.isatty():
        yield LoggedProgress(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Display

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
        """Log, if it is time to."""
        now = time.monotonic()
        if now >= self._due or done == of:
            self._due = now + self._every_s
            logger.info("%s", self._what, extra={"done": done, **({"of": of} if of else {})})
