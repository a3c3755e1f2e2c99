"""Work that nobody waits for any more: nothing interrupts a thread that grades, so it looks itself.

Who begins such work sets GIVEN_UP to an event of its own. Threads of `asyncio.to_thread` and
`in_threads` have their caller's.
"""

from contextvars import ContextVar
from threading import Event

GIVEN_UP = ContextVar[Event | None]("given_up", default=None)
"""The event that is set once the work at hand is given up; None for work that never is."""
REASON = "the work was given up"
"""Why what was not computed then is undecided."""


def is_given_up() -> bool:
    """Return whether the work at hand was given up."""
    event = GIVEN_UP.get()
    return event is not None and event.is_set()
