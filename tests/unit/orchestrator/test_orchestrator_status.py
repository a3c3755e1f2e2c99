from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import NOW, RUN, Network

from muster.orchestrator.dashboard.chart import HEIGHT, WIDTH, draw
from muster.orchestrator.dashboard.page import ago, render, shorten, tokens
from muster.orchestrator.services.status import SHOWN_POINTS, to_json
from muster.protocol.messages import Reason, Verdict


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


async def test_status_shows_what_workers_did_and_earned(bench: Bench) -> None:
    await bench.run_through(1)
    worker = bench.network.worker(1)
    bench.network.apply(
        "RewardEscrow", "RewardClaimed",
        run_id=RUN, worker=worker.address, slots=1, units=20, amount=7,
    )  # fmt: skip
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


async def test_page_is_complete_without_scripts(bench: Bench) -> None:
    await bench.run_through(1)
    async with bench.api(bench.network.keys.trainer) as api:
        await api.post_metrics(1, {"reward": 0.25})
        await api.post_metrics(2, {"reward": 0.75, "eval_reward": 0.8})
    page = render(await bench.services.status.build(), now=NOW)
    body = page.split("<script>")[0]
    for shown in ("a run", "collecting", "accepted", "<polyline", "Step 2: 0.750", "never"):
        assert shown in body
    assert bench.network.worker(1).address in body


async def test_page_refers_to_nothing_outside(bench: Bench) -> None:
    page = render(await bench.services.status.build(), now=NOW)
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert not re.search(r"https?://|@import|url\(|\son\w+=|\sstyle=", page)
    assert len(page) < 20_000


async def test_page_shows_the_words_of_peers_as_text_only(bench: Bench) -> None:
    status = await bench.services.status.build()
    hostile = "<script>alert(1)</script>"
    workers = [replace(status.workers[0], status=hostile, state=hostile)]
    page = render(replace(status, name=hostile, phase=hostile, workers=workers), now=NOW)
    assert hostile not in page


async def test_style_and_script_are_the_ones_the_policy_allows(bench: Bench) -> None:
    import base64
    import hashlib

    import httpx

    transport = httpx.ASGITransport(bench.app)
    async with httpx.AsyncClient(base_url="http://test", transport=transport) as http:
        response = await http.get("/")
    policy = response.headers["content-security-policy"]
    for tag in ("style", "script"):
        inline = re.search(rf"<{tag}>(.*)</{tag}>", response.text, re.S)
        assert inline is not None
        digest = base64.b64encode(hashlib.sha256(inline[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


async def test_feed_ends_its_streams_when_closed(bench: Bench) -> None:
    feed = bench.services.feed
    stream = feed.listen("first")
    assert await anext(stream) == "first"
    feed.publish("second")
    feed.publish("third")
    assert await anext(stream) == "third"
    feed.close()
    assert [text async for text in stream] == []
    assert feed.listeners == 0


async def test_feed_keeps_quiet_streams_alive(tmp_path: Path) -> None:
    from muster.orchestrator.services.feed import StatusFeed

    feed = StatusFeed(max_listeners=1, keepalive_s=0.01)
    stream = feed.listen("first")
    assert [await anext(stream), await anext(stream)] == ["first", None]
    await stream.aclose()
    assert feed.listeners == 0


async def test_listeners_are_refused_beyond_the_limit(tmp_path: Path) -> None:
    import httpx

    async with open_bench(tmp_path, Network(), max_listeners=1) as bench:
        stream = bench.services.feed.listen("first")
        await anext(stream)
        transport = httpx.ASGITransport(bench.app)
        async with httpx.AsyncClient(base_url="http://test", transport=transport) as http:
            response = await http.get("/v1/events")
        await stream.aclose()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "too_many_listeners")


async def test_events_carry_the_status(bench: Bench) -> None:
    async with bench.api() as api:
        # In process the answer arrives as a whole: the stream has to end first.
        bench.services.feed.close()
        (event,) = [event async for event in api.events()]
        assert event == await api.status()
    assert to_json(await bench.services.status.build())


async def test_status_is_built_once_for_all_who_ask_at_the_same_time(bench: Bench) -> None:
    desk = bench.services.status
    first = await desk.latest()
    assert await desk.latest() is first
    desk._latest = (-10.0, first)
    assert await desk.latest() is not first


points = st.lists(
    st.tuples(st.integers(0, 10**6), st.floats(-10, 10)), unique_by=lambda p: p[0]
).map(sorted)


@given(points, points)
def test_chart_stays_inside_its_box(
    reward: list[tuple[int, float]], evaluations: list[tuple[int, float]]
) -> None:
    chart = draw(reward, evaluations)
    drawn = [tuple(map(float, p.split(","))) for p in chart.line.split()]
    drawn += [(x, y) for x, y, _ in chart.dots]
    assert len(drawn) == len(reward) + len(evaluations)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in drawn)
    assert 1 <= len(chart.x_ticks) <= 11


@pytest.mark.parametrize(
    ("last", "expected"),
    [(1, 1), (10, 1), (11, 2), (20, 2), (21, 5), (50, 5), (51, 10), (200, 20), (201, 50)],
)
def test_steps_on_the_axis_are_round(last: int, expected: int) -> None:
    ticks = draw([(0, 0.0), (last, 1.0)], []).x_ticks
    assert int(ticks[1].label) - int(ticks[0].label) == expected


@pytest.mark.parametrize(
    ("wei", "shown"),
    [
        ("0", "0"),
        ("1", "0"),
        (str(10**18), "1"),
        (str(15 * 10**17), "1.5"),
        (str(1234567 * 10**18 + 999999999999999999), "1,234,567.9999"),
    ],
)
def test_tokens_are_rounded_down(wei: str, shown: str) -> None:
    assert tokens(wei) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "never"), (-3, "0 s ago"), (59.9, "59 s ago"), (60, "1 min ago"), (7200, "2 h ago"),
     (90_000, "1 d ago")],
)  # fmt: skip
def test_ages_are_shown_in_their_largest_unit(seconds: float | None, shown: str) -> None:
    assert ago(seconds) == shown


def test_hashes_are_shortened_in_the_middle() -> None:
    assert shorten("0x" + "ab" * 32) == "0xababab…abab"
    assert shorten("0x12") == "0x12"
