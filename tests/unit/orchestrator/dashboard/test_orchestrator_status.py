from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import NOW, RUN, Network

from muster.api.answers import RunStatus
from muster.orchestrator import metrics
from muster.orchestrator.dashboard.figures import panels
from muster.orchestrator.dashboard.status import SHOWN_POINTS, to_json
from muster.orchestrator.http.feed import Notice, StatusFeed
from muster.orchestrator.metrics import MetricsText
from muster.protocol.messages import Reason, Verdict
from muster.protocol.mixture import CurriculumPoint, PartRecipe, TasksRecipe


async def test_status_of_a_fresh_run_is_empty(bench: Bench) -> None:
    status = await bench.services.status.build()
    assert (status.phase, status.step, status.steps, status.policy_version) == (
        "collecting",
        1,
        3,
        0,
    )
    assert (status.received, status.batches_committed, status.submissions) == (0, 0, [])
    assert [w.accepted for w in status.workers] == [0, 0, 0]


async def test_step_is_one_integer_for_programs_that_ask_a_counter(bench: Bench) -> None:
    async with bench.http() as http:
        answer = await http.get(f"/v1/runs/{RUN}/step")
        assert (answer.text, answer.headers["content-type"]) == ("1", "text/plain; charset=utf-8")
        await bench.run_through(0, b"one")
        await bench.run_through(1, b"two")
        assert int((await http.get(f"/v1/runs/{RUN}/step")).text) == 2
        assert (await http.get("/v1/runs/9/step")).status_code == 404


async def test_status_shows_what_workers_did_and_earned(bench: Bench) -> None:
    await bench.run_through(1)
    worker = bench.network.worker(1)
    bench.network.apply(
        "RewardEscrow", "RewardClaimed",
        run_id=RUN, worker=worker.address, slots=1, units=20, amount=7,
    )  # fmt: skip
    bench.services.projection.rebuild()
    async with bench.node(1) as api:
        await api.heartbeat(RUN, policy_version=None, state="idle", software="x")
    shown = (await bench.services.status.build()).workers[0]
    assert (shown.worker, shown.accepted, shown.units) == (worker.address, 1, 20)
    assert (shown.earned_wei, shown.paid_wei) == (str(20 * 10**12), "7")
    assert (shown.state, shown.seen_at) == ("idle", NOW)


async def test_status_shows_slashes_with_reason_and_transaction(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()
    await bench.judge(1, [submission], Verdict.FRAUD, Reason.SAMPLER_MISMATCH)
    await bench.record()
    await bench.settle()
    status = await bench.services.status.build()
    (slash,) = status.slashes
    assert (slash.reason, slash.state) == ("SAMPLER_MISMATCH", "escrowed")
    assert slash.tx_hash == bench.network.view.slashes[0].tx_hash
    assert (status.submissions[0].verdict, status.submissions[0].state) == ("FRAUD", "judged")
    assert status.workers[0].status == "banned"


async def test_status_lists_the_latest_submissions_first(bench: Bench) -> None:
    first = await bench.upload(0, b"one")
    await bench.commit()
    await bench.upload(1, b"two")
    status = await bench.services.status.build()
    assert [s.state for s in status.submissions] == ["received", "committed"]
    assert status.submissions[1].submission_id == "0x" + first.file_hash.hex()
    assert status.received == 2


@pytest.mark.parametrize(
    ("versions", "paused", "phase"),
    [
        ([], False, "waiting for the base model"),
        ([0], False, "collecting"),
        ([0], True, "paused"),
        ([0, 3], False, "finished"),
        ([0, 3], True, "finished"),
    ],
)
async def test_phase_follows_the_chain(
    bench: Bench, versions: list[int], paused: bool, phase: str
) -> None:
    bench.network.unpublish()
    bench.network.run.paused = paused
    for version in versions:
        bench.network.publish(version)
    assert bench.services.status.phase() == phase


async def test_long_curves_are_thinned_but_keep_their_last_point(bench: Bench) -> None:
    for step in range(3 * SHOWN_POINTS):
        bench.services.training._figures[step] = {"reward": step / 10_000}
    reward = (await bench.services.status.build()).reward
    assert len(reward) <= SHOWN_POINTS + 1
    assert reward[-1][0] == 3 * SHOWN_POINTS - 1


async def told(stream: AsyncGenerator[Notice | None, None]) -> str | None:
    notice = await anext(stream)
    return None if notice is None else notice.status


async def test_feed_tells_nobody_what_they_know(tmp_path: Path) -> None:
    feed = StatusFeed(max_listeners=1, keepalive_s=0.01)
    stream = feed.listen("first")
    await told(stream)
    feed.publish("second")
    feed.publish("second")
    assert [await told(stream), await told(stream)] == ["second", None]
    await stream.aclose()


@pytest.mark.parametrize(("lag", "expected"), [(0, None), (1, "now")])
async def test_feed_goes_on_after_what_a_listener_saw_last(lag: int, expected: str | None) -> None:
    feed = StatusFeed(max_listeners=1, keepalive_s=0.01)
    feed.publish("old")
    last_seen = feed.event_id
    if lag:
        feed.publish("now")
    stream = feed.listen("now", last_seen)
    assert await told(stream) == expected
    await stream.aclose()


async def test_feed_ends_its_streams_when_closed(bench: Bench) -> None:
    feed = bench.services.feed
    stream = feed.listen("first")
    assert (await told(stream)) == "first"
    feed.publish("second")
    feed.publish("third")
    assert (await told(stream)) == "third"
    feed.close()
    assert [notice async for notice in stream] == []
    assert feed.listeners == 0


async def test_listener_of_whom_nobody_has_less_makes_the_oldest_of_most_leave() -> None:
    feed = StatusFeed(max_listeners=3, keepalive_s=60)
    hosts = ("10.0.0.1", "10.0.1.1", "10.0.1.2")
    streams = [feed.listen("first", host=host) for host in hosts]
    for stream in streams:
        await told(stream)
    feed.require_room("10.0.2.1")
    newcomer = feed.listen("first", host="10.0.2.1")
    assert await told(newcomer) == "first"
    assert [notice async for notice in streams[1]] == []
    feed.publish("second")
    for stream in (streams[0], streams[2], newcomer):
        assert await told(stream) == "second"
        await stream.aclose()
    assert feed.listeners == 0


async def test_listener_is_refused_where_it_would_be_the_next_to_leave(tmp_path: Path) -> None:

    async with open_bench(tmp_path, Network(), max_listeners=1) as bench:
        stream = bench.services.feed.listen("first", host="127.0.0.1")
        await anext(stream)
        async with bench.http() as http:
            response = await http.get("/v1/events")
        await stream.aclose()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "too_many_listeners")


async def test_events_carry_the_status(bench: Bench) -> None:
    async with bench.api() as api:
        # In process the answer arrives as a whole: the stream has to end first.
        bench.services.feed.close()
        (event,) = [event async for event in api.events()]
        assert RunStatus.model_validate(event) == await api.status()
    assert to_json(await bench.services.status.build())


async def test_status_is_built_once_for_all_who_ask_at_the_same_time(bench: Bench) -> None:
    desk = bench.services.status
    first = await desk.latest()
    assert await desk.latest() is first
    desk._latest = (-10.0, first)
    assert await desk.latest() is not first


async def test_parts_of_a_mixture_are_told_apart_everywhere(bench: Bench) -> None:
    services = bench.services
    easy = PartRecipe(name="easy", weight=3)
    ramp = (CurriculumPoint(step=1, weight=0), CurriculumPoint(step=3, weight=4))
    parts = (easy, PartRecipe(name="late", curriculum=ramp))
    mixed = services.recipe.model_copy(update={"tasks": TasksRecipe(parts=parts)})
    services.recipe = services.status.recipe = mixed
    figures = {"part_easy_reward": 0.5, "part_easy_kept": 0.75, "part_easy_length": 9.0}
    await services.training.report(1, figures | {"eval_part_easy_reward": 0.4})
    first, second = (await services.status.build()).parts
    assert (first.name, first.weight, first.reward, first.kept) == ("easy", 3, 0.5, 0.75)
    assert (first.length, first.eval_reward) == (9.0, 0.4)
    assert (second.weight, second.reward) == (0, None)
    await MetricsText().read(services)
    shown = {
        name: metrics.REGISTRY.get_sample_value(
            "muster_orchestrator_training", {"figure": f"part_{name}_kept"}
        )
        for name in ("easy", "late")
    }
    assert shown == {"easy": 0.75, "late": None}
    drawn = {panel.key: panel for panel in panels(services.training, mixed)}
    reward, kept, evaluated = drawn["part-easy"].series
    assert [point.value for point in (*reward.points, *kept.points)] == [0.5, 0.75]
    assert (evaluated.is_dots, evaluated.points[0].value) == (True, 0.4)
    assert drawn["part-late"].is_empty
