"""The life of a process: one thread that computes, and one error that says why it ended."""

from __future__ import annotations

import asyncio

import pytest

from muster.lifecycle import ComputeThread, first_error
from muster.protocol.errors import StorageError


def test_first_error_is_the_one_that_was_raised_on_purpose() -> None:
    meant = StorageError("disk full")
    inner = ExceptionGroup("tasks", [RuntimeError("x"), meant])
    assert first_error(ExceptionGroup("outer", [ValueError("y"), inner])) is meant
    other = ValueError("y")
    assert first_error(ExceptionGroup("outer", [other])) is other


async def test_compute_thread_runs_one_function_at_a_time() -> None:
    compute, running, most = ComputeThread(), 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1

    await asyncio.gather(*(compute.run(work) for _ in range(20)))
    compute.close()
    assert most == 1


async def test_compute_thread_passes_errors_on() -> None:
    compute = ComputeThread()

    def work() -> None:
        raise StorageError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        await compute.run(work)
    compute.close()
