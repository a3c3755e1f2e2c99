"""An event loop whose time is virtual: it jumps to the next timer when nothing is ready.

Coroutines run on it unchanged. There are no threads: their work runs at once and takes no virtual
time, so that one seed gives one history. Hours of a network pass in seconds.
"""

import asyncio
import contextvars
import selectors
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

KIND: contextvars.ContextVar[str] = contextvars.ContextVar("kind", default="harness")
"""Which kind of process a task belongs to; tasks that it starts inherit it."""


class _NoSelector(selectors.SelectSelector):
    """A selector without files: waiting advances the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Advance the clock; raises RuntimeError when no timer is left."""
        if timeout is None:
            raise RuntimeError("every task waits for something that nobody will bring about")
        self.now += max(timeout, 0.0)
        return []


class Meter:
    """Sums up processor seconds by kind of process; inner spans are not the outer's.

    Spans are measured by the wall clock, which is cheap to read, and scaled to their total CPU
    time, so that interruptions by other programs are spread evenly.
    """

    def __init__(self) -> None:
        self._walls: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0
        self._began = time.process_time()
        self._ended = self._began

    @property
    def seconds(self) -> dict[str, float]:
        """Processor seconds by kind."""
        total = sum(self._walls.values())
        scale = (self._ended - self._began) / total if total else 0.0
        return {kind: wall * scale for kind, wall in self._walls.items()}

    def stop(self) -> None:
        """Stop counting."""
        self._ended = time.process_time()

    def enter(self, kind: str) -> None:
        """Begin a span."""
        self._turn()
        self._open.append(kind)

    def leave(self) -> None:
        """End the innermost span."""
        self._turn()
        self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._walls[self._open[-1]] += now - self._since
        self._since = now


class Metered(Coroutine[Any, Any, T]):
    """A coroutine whose every step is charged to one kind of process."""

    def __init__(self, inner: Coroutine[Any, Any, T], meter: Meter, kind: str) -> None:
        self._inner, self._meter, self._kind = inner, meter, kind

    def send(self, value: Any) -> Any:
        """Take a step."""
        self._meter.enter(self._kind)
        try:
            return self._inner.send(value)
        finally:
            self._meter.leave()

    def throw(self, *error: Any) -> Any:
        """Take a step with an error."""
        self._meter.enter(self._kind)
        try:
            return self._inner.throw(*error)
        finally:
            self._meter.leave()

    def close(self) -> None:
        """End early."""
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        value = None
        while True:
            try:
                asked = self.send(value)
            except StopIteration as done:
                result: T = done.value
                return result
            try:
                value = yield asked
            # Thrown exceptions, above all CancelledError, belong to the inner coroutine.
            except BaseException as error:
                try:
                    asked = self.throw(error)
                except StopIteration as done:
                    result = done.value
                    return result
                value = yield asked


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, from 0; `meter` holds what its tasks really cost."""

    def __init__(self) -> None:
        self._virtual = _NoSelector()
        super().__init__(self._virtual)
        self.meter = Meter()
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._virtual.now

    def run_in_executor(
        self, _executor: Executor | None, function: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a function at once."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(function(*args))
        # A thread would pass any exception to the awaiting code.
        except Exception as error:
            future.set_exception(error)
        return future

    def _make_task(
        self, _loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        metered = Metered(coroutine, self.meter, KIND.get())
        return asyncio.Task(metered, loop=self, **options)


async def charged(kind: str, work: Coroutine[Any, Any, T]) -> T:
    """Return a coroutine's result, with its steps charged to another kind of process."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return await Metered(work, loop.meter, kind)


def run_virtual(main: Callable[[], Awaitable[T]]) -> tuple[T, Meter]:
    """Run a coroutine to its end in virtual time; returns its result and the CPU time of all."""
    made: list[VirtualLoop] = []

    def make() -> VirtualLoop:
        made.append(VirtualLoop())
        return made[0]

    async def awaited() -> T:
        return await main()

    with asyncio.Runner(loop_factory=make) as runner:
        result = runner.run(awaited())
    made[0].meter.stop()
    return result, made[0].meter
