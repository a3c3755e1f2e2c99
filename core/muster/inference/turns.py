"""Locks of threads that use one engine: whose turn it is, and whether its weights may change."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """A fair lock: a thread does not get it again while another one waits for it."""

    def __init__(self) -> None:
        self._door, self._inside = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._inside.acquire()

    def __exit__(self, *_: object) -> None:
        self._inside.release()


class Weights:
    """A lock of weights: many use them at a time, or one changes them while nobody uses them."""

    def __init__(self) -> None:
        self._users = 0
        self._changed = threading.Condition()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the weights unchanged inside the block."""
        with self._changed:
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Wait until nobody uses the weights; nobody else can use them inside the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._users)
            yield
