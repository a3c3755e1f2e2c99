"""Outages said once, retries paced, processes that stop when asked."""

import asyncio
import logging
import random
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, strategies as st

from muster.client.outage import SURVIVED, Outages
from muster.client.settings import WorkerSettings
from muster.lifecycle import ComputeThread, run_beside
from muster.lifecycle.outage import MOST_CAUSES, Outage
from muster.protocol import errors
from muster.protocol.ids import to_address
from muster.settings import load_settings


def test_outage_is_said_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("the orchestrator", rng=random.Random(1))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            outage.failed(OSError("refused"))
        assert outage.is_on
        outage.recovered()
        outage.recovered()
    assert [record.getMessage() for record in caplog.records] == [
        "the orchestrator is not available, trying again until it is",
        "the orchestrator is available again",
    ]


def test_each_cause_of_an_outage_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("the orchestrator", rng=random.Random(1))
    with caplog.at_level(logging.WARNING):
        for cause in ("refused", "not found", "refused"):
            outage.failed(OSError(cause))
        outage.recovered()
        outage.failed(OSError("refused"))
    causes = [vars(record)["error"] for record in caplog.records]
    assert causes == ["refused", "not found", "refused"]


def test_server_that_words_each_answer_anew_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = Outage("the orchestrator", rng=random.Random(1))
    for number in range(10 * MOST_CAUSES):
        outage.failed(OSError(f"refused {number}"))
    assert len(caplog.records) == MOST_CAUSES


@given(st.integers(1, 200), st.integers())
def test_pauses_grow_to_a_bound_with_jitter(failures: int, seed: int) -> None:
    outage = Outage("it", first_s=0.5, longest_s=8.0, rng=random.Random(seed))
    pauses = [outage.failed(OSError()) for _ in range(failures)]
    for n, pause in enumerate(pauses):
        full = min(0.5 * 2**n, 8.0)
        assert full / 2 <= pause <= full


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (errors.ApiError("", status=503, code="unreachable"), "the orchestrator"),
        (errors.ApiError("", status=429, code="too_many"), "the orchestrator"),
        (errors.ApiError("", status=403, code="not_active"), "the orchestrator's consent"),
        (errors.PolicyUnavailable(""), "the policy"),
        (errors.ChainUnreachable(""), "the chain"),
        (errors.ContractRevert("Refused"), "the chain"),
        (errors.EngineError(""), "the engine"),
        (errors.StorageError(""), "the disk"),
    ],
)
def test_outage_names_what_is_missing(
    error: errors.MusterError, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    outages = Outages(first_s=0.5)
    assert isinstance(error, SURVIVED)
    with caplog.at_level(logging.DEBUG):
        assert 0.25 <= outages.failed(error) <= 0.5
    assert caplog.records[0].getMessage().startswith(f"{what} is not available")
    assert outages.lasting == [what]
    outages.recovered()
    assert outages.lasting == []


def test_outage_of_the_chain_is_left_to_who_follows_it(caplog: pytest.LogCaptureFixture) -> None:
    outages = Outages(first_s=0.001)
    with caplog.at_level(logging.INFO):
        outages.failed(errors.ChainUnreachable("no answer"))
        outages.recovered()
    assert not caplog.records


def test_outage_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    Outages().failed(errors.StorageError("cannot write", hint="free some space"))
    assert vars(caplog.records[0])["hint"] == "free some space"


def test_outages_of_different_things_are_paced_apart() -> None:
    outages = Outages(first_s=1.0)
    pauses = [outages.failed(errors.PolicyUnavailable("")) for _ in range(4)]
    assert pauses[3] >= 4.0
    assert outages.failed(errors.ChainUnreachable("")) <= 1.0
    outages.recovered()
    assert outages.failed(errors.PolicyUnavailable("")) <= 1.0


async def test_compute_thread_runs_one_function_at_a_time() -> None:
    thread = ComputeThread()
    running: list[int] = []

    def work(n: int) -> int:
        running.append(n)
        assert len(running) == 1
        time.sleep(0.01)
        running.remove(n)
        return n

    assert await asyncio.gather(*(thread.run(work, n) for n in range(4))) == [0, 1, 2, 3]
    thread.close()


async def forever(ended: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


async def test_first_error_ends_all_and_is_raised_alone() -> None:
    ended = asyncio.Event()

    async def failing() -> None:
        raise errors.ConfigError("the cause")

    with pytest.raises(errors.ConfigError, match="the cause"):
        await run_beside(forever(ended), failing())
    assert ended.is_set()


async def test_what_runs_beside_ends_with_what_it_is_for() -> None:
    ended = asyncio.Event()
    await run_beside(asyncio.sleep(0), forever(ended))
    assert ended.is_set()


PROGRAM = """
import asyncio, sys, time
from muster.lifecycle import ComputeThread, run_until_stopped

async def main():
    thread = ComputeThread()
    try:
        print("up", flush=True)
        await {work}
    finally:
        print("closed", flush=True)
        thread.close()

run_until_stopped(main)
print("after", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("work", "said"),
    [("asyncio.sleep(60)", "closed\nafter\n"), ("thread.run(time.sleep, 60)", "closed\n")],
)
def test_process_stops_cleanly_and_soon_when_asked(
    number: signal.Signals, work: str, said: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(work=work)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        assert output.readline() == "up\n"
        started = time.monotonic()
        process.send_signal(number)
        assert output.read() == said
        assert process.wait() == 0
        assert time.monotonic() - started < 15


def test_relays_from_the_environment_are_a_list() -> None:
    environ = {
        "MUSTER_WORKER_RELAY": "http://a:1, http://b:2",
        "MUSTER_WORKER_WORKER": "0x" + "ab" * 20,
        "MUSTER_WORKER_RUN": "3",
    }
    flags = {"orchestrator": "http://o", "state_dir": "state"}
    settings = load_settings(
        WorkerSettings, env_prefix="MUSTER_WORKER_", flags=flags, environ=environ
    )
    assert settings.relay == ("http://a:1", "http://b:2")
    assert settings.run == 3
    assert settings.worker == to_address(environ["MUSTER_WORKER_WORKER"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [({"worker": "0x12"}, "'worker'"), ({"run": 0}, "'run'"), ({"dtype": "int4"}, "'dtype'")],
)
def test_bad_settings_are_named(flags: dict[str, object], message: str) -> None:
    good = {"orchestrator": "http://o", "state_dir": "s", "worker": "0x" + "ab" * 20, "run": 1}
    with pytest.raises(errors.ConfigError, match=message):
        load_settings(WorkerSettings, env_prefix="X_", flags={**good, **flags}, environ={})
