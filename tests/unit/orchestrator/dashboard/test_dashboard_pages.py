"""The dashboard over HTTP: content, refusals and cost of pages."""

import asyncio
import hashlib
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import httpx
import orchestrator_bench
import pytest
from dashboard_stage import History, save_tokenizer, sorting_rollouts, store, train
from hypothesis import given, strategies as st
from orchestrator_bench import Bench
from orchestrator_fakes import RUN, Network

from muster.chain import Deployment, loss_of
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import Observed, Parameters
from muster.client.audit.report import build_report
from muster.orchestrator.dashboard import render, samples
from muster.orchestrator.dashboard.figures import (
    Panel,
    Point,
    Series,
    draw,
    panels,
    round_levels,
    thin,
)
from muster.orchestrator.dashboard.health import MAX_ANSWER_BYTES, RelayWatch
from muster.orchestrator.dashboard.lists import Wanted, list_submissions
from muster.orchestrator.dashboard.render import ago, compact, percent, shorten, tokens, visible
from muster.orchestrator.dashboard.sample_reader import choose
from muster.orchestrator.db.query import plain
from muster.orchestrator.outcomes.settlement import Payments
from muster.orchestrator.projection import slot_of
from muster.protocol.errors import ChainUnreachable
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason, Submission, Verdict

STATIC = Path(render.__file__).parent / "static"
UPLOT = Path(__file__).parents[4] / "node_modules" / "uplot"


@dataclass
class Site:
    """A run with a history, and its pages."""

    bench: Bench
    history: History
    http: httpx.AsyncClient
    shown: Submission

    async def get(self, path: str) -> str:
        response = await self.http.get(path)
        assert response.status_code == 200, response.text
        return response.text


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    history = History(Network(), per_batch=16)
    history.register(8)
    history.work(260, steps=10, judged=250)
    history.fund_and_pay()
    history.dispute()
    rollouts = sorting_rollouts(9, hostile=True)
    shown = history.write_file(rollouts, Verdict.ACCEPTED, Reason.NONE)
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    async with orchestrator_bench.open_bench(
        tmp_path, history.network, tokenizer=tokenizer
    ) as bench:
        await store(history, bench)
        await train(bench, 10)
        async with bench.http() as http:
            yield Site(bench, history, http, shown)


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncIterator[Bench]:
    """A run without a history, in SQLite."""
    async with orchestrator_bench.open_bench(tmp_path) as bench:
        yield bench


def in_both_databases(test: Callable[..., object]) -> Callable[..., object]:
    """Run a test of the queries in SQLite and in PostgreSQL."""
    kinds = pytest.mark.parametrize("kind_of_database", ["sqlite", "postgresql"], indirect=True)
    return pytest.mark.usefixtures("kind_of_database")(kinds(test))


def rows_of(html: str, section: str) -> list[list[str]]:
    """Return the words of a section's table, by row and cell."""
    found = re.search(rf'id="{section}".*?</section>', html, re.S)
    assert found is not None
    rows = re.findall(r"<tr>(.*?)</tr>", found[0].split("</thead>")[-1], re.S)
    return [
        [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", row)]
        for row in rows
    ]


# ------------------------------------------------------------------------ figures


async def test_workers_are_those_of_the_audit(site: Site) -> None:
    deployment = Deployment(
        31337, 0, {"ContributionLedger": site.bench.network.domain.verifying_contract}
    )
    ledger = Ledger()
    for event in site.history.network.events:
        ledger.apply(event)
    terms = Parameters(*(0 for _ in fields(Parameters)))
    observed = Observed(0, 0, 0, {}, 0, 0, {}, {}, frozenset(), terms, frozenset(), {}, {}, 0)
    report = build_report(ledger, deployment, observed, run_id=RUN)
    shown = {row[1]: row for row in rows_of(await site.get("/workers"), "ranking")}
    assert len(shown) == len(report.workers) == 8
    for worker in report.workers:
        row = shown[shorten(worker.address)]
        # Without heartbeats every worker is only discovered.
        status = worker.status.lower()
        state = "discovered" if status == "active" else status
        figures = [state, worker.accepted, worker.rejected, worker.fraud]
        assert row[2:6] == [str(figure) for figure in figures]
        assert row[6].replace(",", "") == str(worker.units)
        assert row[8] == tokens(worker.paid_wei)
    front = await site.get("/")
    (run,) = report.runs
    judged = run.accepted + run.rejected + run.fraud
    assert f"{run.accepted:,} of {judged:,} judged" in front
    assert f"{run.rejected} rejected or incomplete" in front
    assert f"of {tokens(run.funded_wei)} tokens funded" in front


async def test_overturned_verdict_counts_as_the_one_that_stands(site: Site) -> None:
    view = site.history.network.view
    (case,) = view.cases.values()
    record = (view.batches[case.batch_id].records or ())[case.position]
    html = await site.get(f"/submissions/0x{record.file_hash.hex()}")
    assert "Overturned" in html
    assert 'class="badge rejected"' in html  # as it was judged
    accepted = await list_submissions(site.bench.services, Wanted(verdict=Verdict.ACCEPTED))
    found = next(ln for ln in accepted.lines if ln.submission_id[2:] == record.file_hash.hex())
    assert (found.verdict, found.reason) == (Verdict.ACCEPTED, Reason.NONE)
    assert "Late" not in html
    rebuilt = site.bench.services.projection.total
    site.bench.services.projection.rebuild()
    assert site.bench.services.projection.total == rebuilt


async def test_a_worker_s_reasons_are_those_that_stand(empty: Bench) -> None:
    submission = await empty.upload()
    await empty.commit()
    await empty.judge(1, [submission])
    await empty.record()
    found = Ruling(Verdict.FRAUD, Reason.WRONG_SEED)
    empty.network.close_case(empty.network.open_case(1, 0, found), found)
    empty.services.projection.rebuild()
    tally = empty.services.projection.tally(1)
    assert (tally.accepted, tally.fraud, tally.reasons) == (0, 1, {Reason.WRONG_SEED: 1})


async def test_work_that_nobody_judged_is_void_unless_its_worker_called_judges(
    empty: Bench,
) -> None:
    network, ledger = empty.network, empty.network.chain.ledger
    left, taken = await empty.upload(0, b"left"), await empty.upload(1, b"taken")
    await empty.commit()
    own = ledger.split_off(network.view.batches[1], network.work(taken, 1))
    await empty.follow()
    network.summon(own)
    await ledger.void_batch(network.view.batches[1].header())
    await empty.follow()
    async with empty.http() as http:
        pages = [
            (await http.get(f"/submissions/0x{each.file_hash.hex()}")).text
            for each in (left, taken)
        ]
    assert [">Void<" in html for html in pages] == [True, False]
    assert ["Waiting for jurors of the network" in html for html in pages] == [False, True]


async def test_cases_say_what_was_recorded_and_claimed(site: Site) -> None:
    (row,) = rows_of(await site.get("/cases"), "disputes")
    assert row[2:5] == ["rejected", "accepted", "overturned"]


async def test_timeline_names_every_transaction(site: Site) -> None:
    services = site.bench.services
    record = services.projection.judged_with(Verdict.FRAUD)[0].record
    html = await site.get(f"/submissions/0x{record.file_hash.hex()}")
    slash = services.projection.view.slashes[0]
    batch = services.projection.view.batches[slash.batch_id or 0]
    for transaction in (batch.tx_hash, batch.posted_tx, slash.tx_hash):
        assert f'data-copy="{transaction}"' in html
    for words in ("Leased", "Uploaded", "Committed", "Judged", "Slashed", "No payment"):
        assert words in html


async def test_a_fraudster_has_one_line_with_all_that_was_lost(site: Site) -> None:
    """A fraud without remaining stake hides no earlier slash: the page of cases lists it."""
    view = site.bench.services.projection.view
    taken = view.slashes[0]
    empty = [replace(taken, escrow_id=Hash32(bytes([n]) * 32), amount_wei=0) for n in range(9)]
    view.slashes.extend(empty)
    loss = loss_of(view, RUN, taken.owner)
    assert loss is not None
    for path in ("/", f"/workers/{taken.owner}"):
        html = await site.get(path)
        assert html.count("9 later frauds found nothing left") == 1
        assert f'data-copy="{taken.tx_hash}"' in html
    assert (await site.get("/cases")).count("none was left") == 9


@pytest.mark.parametrize(("is_paid", "word"), [(True, ">Paid<"), (False, ">Payment<")])
async def test_timeline_says_whether_it_was_paid(site: Site, is_paid: bool, word: str) -> None:
    shown, paid = site.shown, site.bench.network.chain.escrow.paid
    if is_paid:
        paid.add((shown.worker, shown.step, shown.index))
    assert word in await site.get(f"/submissions/0x{shown.file_hash.hex()}")


# ------------------------------------------------------------------------- lists


@in_both_databases
@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(limit=7),
        Wanted(limit=7, step=3),
        Wanted(limit=7, verdict=Verdict.ACCEPTED),
        Wanted(limit=1, verdict=Verdict.REJECTED),
        Wanted(limit=3, verdict=Verdict.ACCEPTED, step=2),
    ],
)
async def test_cursor_walks_over_everything_once(site: Site, wanted: Wanted) -> None:
    walked: list[str] = []
    before: int | None = None
    while True:
        asked = Wanted(**{**_fields(wanted), "before": before})
        listing = await list_submissions(site.bench.services, asked)
        walked += [line.submission_id for line in listing.lines]
        if listing.older is None:
            break
        before = listing.older
    projection = site.bench.services.projection
    expected = []
    for claim in site.history.claims():
        judged = projection.judged(slot_of(claim), claim.file_hash)
        verdict = judged and projection.standing_verdict(judged)
        if wanted.step in (None, claim.step) and wanted.verdict in (None, verdict):
            expected.append(f"0x{claim.file_hash.hex()}")
    assert sorted(walked) == sorted(expected)
    if wanted.verdict is None:
        assert walked == expected[::-1]


def _fields(wanted: Wanted) -> dict[str, object]:
    return {name: getattr(wanted, name) for name in ("worker", "verdict", "step", "limit")}


@in_both_databases
async def test_list_of_a_worker_holds_only_its_own(site: Site) -> None:
    worker = site.history.workers[3]
    for verdict in (None, Verdict.ACCEPTED):
        wanted = Wanted(worker=worker, verdict=verdict)
        listing = await list_submissions(site.bench.services, wanted)
        assert {line.worker for line in listing.lines} == {worker}


@pytest.mark.parametrize("index", ["worker", "step"])
async def test_lists_are_read_from_an_index(site: Site, index: str) -> None:
    query = f"SELECT * FROM submissions WHERE {index} = 1 ORDER BY sequence DESC LIMIT 51"
    [plan] = await site.bench.services.database.ask(plain(f"EXPLAIN QUERY PLAN {query}"))
    assert [row[3] for row in plan] == [
        f"SEARCH submissions USING INDEX ix_submissions_{index}_sequence ({index}=?)"
    ]


async def test_workers_are_ranked_and_filtered(site: Site) -> None:
    ranked = rows_of(await site.get("/workers?order=accepted"), "ranking")
    accepted = [int(row[3]) for row in ranked]
    assert accepted == sorted(accepted, reverse=True)
    banned = rows_of(await site.get("/workers?state=banned"), "ranking")
    assert {row[2] for row in banned} == {"banned"}
    assert "7–8 of 8" in await site.get("/workers?after=6")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/runs/2", 404),
        ("/workers/0x12", 404),
        ("/workers/0x" + "0" * 40, 404),
        ("/submissions/0x" + "0" * 64, 404),
        ("/submissions/nothing", 404),
        ("/submissions/999:0", 404),
        ("/submissions?step=-1", 400),
        ("/submissions?step=" + "9" * 30, 400),
        ("/submissions?step=١", 400),
        ("/submissions?before=x", 400),
        ("/submissions?worker=0xzz", 400),
        ("/submissions?verdict=maybe", 400),
        ("/workers?order=beauty", 400),
        ("/workers?state=%3Cscript%3E", 400),
        ("/search?q=", 404),
        ("/search?q=%3Cscript%3Ealert(1)%3C/script%3E", 404),
        ("/static/..%2Frender.py", 404),
        ("/static/vendor/uplot.LICENSE", 404),
    ],
)
async def test_what_does_not_parse_is_answered_by_a_page(
    empty: Bench, path: str, status: int
) -> None:
    async with empty.http() as http:
        response = await http.get(path)
    assert response.status_code == status
    assert response.headers["content-type"].startswith("text/html")
    assert "<script>alert" not in response.text
    assert response.headers["content-security-policy"] == render.CONTENT_SECURITY_POLICY


@given(st.text(max_size=60))
def test_search_finds_or_says_so(text: str) -> None:
    from muster.orchestrator.dashboard.routes import _address, _hash

    assert _address(text) is None or text.startswith("0x")
    assert _hash(text) is None or len(text.removeprefix("0x")) >= 64


async def test_search_leads_to_what_is_named(site: Site) -> None:
    worker = site.history.network.view.workers[site.history.workers[2]]
    file_hash = f"0x{site.shown.file_hash.hex()}"
    for text, target in (
        (worker.address.lower(), f"/workers/{worker.address}"),
        (worker.node, f"/workers/{worker.address}"),
        (file_hash, f"/submissions/{file_hash}"),
        (" 7 ", "/submissions?step=7"),
    ):
        response = await site.http.get("/search", params={"q": text})
        assert (response.status_code, response.headers["location"]) == (303, target)


async def test_submission_is_found_by_its_place_and_by_a_part_of_its_hash(site: Site) -> None:
    shown = f"0x{site.shown.file_hash.hex()}"
    batches = site.history.network.view.batches.values()
    place = next(
        f"{batch.batch_id}:{position}"
        for batch in batches
        for position, record in enumerate(batch.records or ())
        if record.file_hash == site.shown.file_hash
    )
    for name in (place, shown[:14]):
        response = await site.http.get(f"/submissions/{name}")
        found = (response.status_code, response.headers["location"])
        assert found == (303, f"/submissions/{shown}")


# ------------------------------------------------------------------------- safety


async def test_pages_refer_to_nothing_outside_and_run_nothing_inline(site: Site) -> None:
    for path in ("/", "/workers", "/submissions", "/cases", "/samples", "/network"):
        html = await site.get(path)
        assert not re.findall(r'(?:src|href|action)="(?!/|\?|#|data:)[^"]*"', html)
        assert not re.search(r"<script>|<style|\son\w+=|\sstyle=|javascript:", html)
        assert len(html) < 200_000


async def test_assets_are_cached_by_content(site: Site) -> None:
    html = await site.get("/")
    for url in re.findall(r'(?:src|href)="(/static/[^"]+)"', html):
        for encoding in ("gzip", "identity"):
            response = await site.http.get(url, headers={"accept-encoding": encoding})
            assert "immutable" in response.headers["cache-control"]
            assert hashlib.sha256(response.content).hexdigest()[:12] == url.split("v=")[1]


@pytest.mark.parametrize(
    ("published", "name"),
    [
        ("dist/uPlot.iife.min.js", "uplot.js"),
        ("dist/uPlot.min.css", "uplot.css"),
        ("LICENSE", "uplot.LICENSE"),
    ],
)
def test_vendored_files_are_those_of_the_package(published: str, name: str) -> None:
    assert json.loads((UPLOT / "package.json").read_text())["version"] == "1.6.32"
    assert (UPLOT / published).read_bytes() == (STATIC / "vendor" / name).read_bytes()


# ------------------------------------------------------------------------ samples


async def test_samples_show_text_with_what_hides_made_visible(site: Site) -> None:
    html = await site.get("/samples")
    assert "sort 4,1,3,2 =&gt; " in html
    assert '<span class="hidden-char">U+202E</span>' in html
    assert "<script>document.title" not in html


async def test_files_are_not_shown_before_their_verdict(site: Site) -> None:
    claim = list(site.history.claims())[255]
    assert not site.bench.services.projection.naming(claim.file_hash)
    path = site.bench.services.settings.files / f"{claim.file_hash.hex()}.parquet"
    path.write_bytes(site.history.files[site.shown.file_hash])
    assert "Not shown yet" in await site.get(f"/submissions/0x{claim.file_hash.hex()}")


async def test_damaged_file_costs_one_process_and_is_not_shown(site: Site) -> None:
    path = site.bench.services.settings.files / f"{site.shown.file_hash.hex()}.parquet"
    path.write_bytes(path.read_bytes()[:200])
    html = await site.get(f"/submissions/0x{site.shown.file_hash.hex()}")
    assert "This file cannot be shown" in html


async def test_reading_that_takes_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(samples, "DEADLINE_S", 0.2)
    with pytest.raises(TimeoutError):
        await samples._run(["file"])


def test_best_and_worst_of_a_group_are_chosen() -> None:
    chosen = choose(sorting_rollouts(1))
    assert [(r.group, r.sample, r.task_reward) for r in chosen] == [
        (0, 0, 1.0), (0, 3, 0.0), (1, 0, 1.0), (1, 3, 0.0),
    ]  # fmt: skip


# ---------------------------------------------------------------- relays, payments


def answer(body: bytes, status: int = 200) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(status, content=body))


@pytest.mark.parametrize(
    ("transport", "newest"),
    [
        (answer(b'{"versions": [1, 4, 3]}'), 4),
        (answer(b'{"versions": []}'), None),
        (answer(b'{"versions": [-1]}'), None),
        (answer(b'{"versions": ["<script>"]}'), None),
        (answer(b'{"versions": 3}'), None),
        (answer(b"[]"), None),
        (answer(b"no JSON"), None),
        (answer(b" " * (MAX_ANSWER_BYTES + 1)), None),
        (answer(b"", 500), None),
    ],
)
async def test_relay_is_known_by_its_answer_alone(
    transport: httpx.MockTransport, newest: int | None
) -> None:
    watch = RelayWatch(RUN, origin="http://origin", relays=["http://relay"], transport=transport)
    answers = await watch.latest()
    assert [(each.role, each.newest) for each in answers] == [
        ("origin", newest), ("relay", newest),
    ]  # fmt: skip
    assert await watch.latest() is answers


async def test_chain_that_does_not_say_what_was_paid_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unreachable(*_: object) -> bool:
        raise ChainUnreachable("no answer")

    chain = Network().chain
    payments = Payments(chain, RUN)
    monkeypatch.setattr(chain.escrow, "is_paid", unreachable)
    assert await payments.is_paid(Address("0x"), 1, 0) is None

    async def never(*_: object) -> bool:
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(chain.escrow, "is_paid", never)
    monkeypatch.setattr("muster.orchestrator.outcomes.settlement.TIMEOUT_S", 0.01)
    assert await payments.is_paid(Address("0x"), 1, 0) is None


# ------------------------------------------------------------------------- charts

points = st.lists(
    st.tuples(st.integers(0, 10**6), st.floats(-1e6, 1e6)), min_size=1, unique_by=lambda p: p[0]
).map(sorted)


@given(points, points)
def test_chart_stays_inside_its_box(
    line: list[tuple[int, float]], dots: list[tuple[int, float]]
) -> None:
    def series(pairs: list[tuple[int, float]], is_dots: bool) -> Series:
        return Series("step", [Point(s, v, v - 1, v + 1) for s, v in pairs], is_dots)

    panel = Panel("k", "t", "u", "m", "e", [series(line, False), series(dots, True)])
    chart = draw(panel, 400, 200)
    drawn = [tuple(map(float, p.split(","))) for p in chart.lines[0][1].split()]
    drawn += [(dot.x, y) for dot in chart.dots for y in (dot.y, dot.low, dot.high)]
    assert len(drawn) == len(line) + 3 * len(dots)
    assert all(0 <= x <= 400 and 0 <= y <= 200 for x, y in drawn)


async def test_steps_that_learned_nothing_are_gaps_and_then_a_banner(site: Site) -> None:
    training = site.bench.services.training

    async def learn_nothing(step: int) -> None:
        zeros = {"entropy": 0.0, "grad_norm": 0.0, "tokens": 0.0, "reward": 0.5, "wall_s": 1.0}
        await training.report(step, {**zeros, "dropped_zero_advantage": 128.0, "dropped_easy": 0.0})

    for step in (11, 12):
        await learn_nothing(step)
    assert "Nothing was learned" not in await site.get("/")
    await learn_nothing(13)
    html = await site.get("/")
    assert "<strong>Nothing was learned</strong> for 3 steps" in html
    assert "zero advantage (128)" in html
    assert "easy" not in html.split("Nothing was learned")[1].split("</p>")[0]
    await training.report(14, {"entropy": 0.4, "grad_norm": 0.1, "tokens": 9.0, "wall_s": 1.0})
    assert "Nothing was learned" not in await site.get("/")
    shown = panels(training, site.bench.services.recipe)
    entropy = next(panel for panel in shown if panel.key == "entropy")
    (series,) = entropy.series
    assert {11, 12, 13}.isdisjoint(point.step for point in series.points)
    before, after = draw(entropy, 400, 200).lines
    assert (len(before[1].split()), len(after[1].split())) == (10, 1)


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9), st.integers(2, 10))
def test_levels_enclose_their_range(low: float, span: float, count: int) -> None:
    levels = round_levels(low, low + span, count)
    slack = 1e-9 * max(abs(low), span, 1.0)
    assert levels[0] <= low + slack
    assert levels[-1] >= low + span - slack
    assert 2 <= len(levels) <= 2 * count + 3


@given(st.integers(0, 5000))
def test_thinned_series_keep_their_end(length: int) -> None:
    kept = thin(range(length))
    assert len(kept) <= 401
    assert kept[-1:] == list(range(length))[-1:]


# ------------------------------------------------------------------------- wording


@pytest.mark.parametrize(
    ("wei", "shown"),
    [
        ("0", "0"),
        ("1", "<0.0001"),
        (str(10**18), "1"),
        (str(15 * 10**17), "1.5"),
        (str(1234567 * 10**18 + 999999999999999999), "1,234,567.9999"),
        (str(-25 * 10**17), "-2.5"),
    ],
)
def test_tokens_are_rounded_down(wei: str, shown: str) -> None:
    assert tokens(wei) == shown


@pytest.mark.parametrize(
    ("at", "shown"),
    [(None, "never"), (1003, "in 3 s"), (940.1, "59 s ago"), (940, "1 min ago"), (-6200, "2 h ago"),
     (-89_000, "1 d ago"), (1 << 64, "in 213503982334601 d")],
)  # fmt: skip
def test_ages_are_shown_in_their_largest_unit(at: float | None, shown: str) -> None:
    assert f">{shown}<" in ago(at, 1000)


@given(st.text())
def test_visible_text_hides_nothing_and_is_no_markup(text: str) -> None:
    import unicodedata

    shown = visible(text)
    plain = re.sub(r'<span class="hidden-char">U\+[0-9A-F]{4,6}</span>', "", shown)
    assert "<" not in plain
    assert all(unicodedata.category(c) not in ("Cc", "Cf") or c in "\n\t" for c in shown)


def test_numbers_are_short() -> None:
    assert [compact(n) for n in (0, 999, 12_345, 4_560_000)] == ["0", "999", "12.3k", "4.56M"]
    assert [percent(1, 3), percent(0, 3), percent(3, 3), percent(0, 0)] == [
        "33.3 %", "0 %", "100 %", "–",
    ]  # fmt: skip
    assert shorten("0x" + "ab" * 32) == "0xababab…abab"


@pytest.mark.parametrize(
    "path", ["/", "/workers", "/samples", "/nothing", "/healthz", "/openapi.json"]
)
async def test_head_is_that_of_the_page(site: Site, path: str) -> None:
    page, head = await site.http.get(path), await site.http.head(path)
    assert (head.status_code, head.content) == (page.status_code, b"")
    for name in ("content-type", "content-length", "content-security-policy"):
        assert head.headers.get(name) == page.headers.get(name)


async def test_stream_has_no_head(site: Site) -> None:
    assert (await site.http.head("/live")).status_code == 405


async def test_missing_page_is_a_page_for_readers_and_an_error_for_programs(site: Site) -> None:
    reader = {"accept": "text/html,*/*;q=0.8"}
    shown = await site.http.get("/nothing", headers=reader)
    assert shown.status_code == 404
    assert "There is no such page." in shown.text
    assert 'href="/submissions"' in shown.text
    for path, headers in (("/nothing", {}), ("/v1/nothing", reader)):
        answer = await site.http.get(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_unknown")


async def test_length_has_a_panel_when_the_run_has_budgets(site: Site) -> None:
    recipe = site.bench.services.recipe
    budgets = recipe.sampling.model_copy(update={"target_lengths": (8, 16)})
    with_budgets = recipe.model_copy(update={"sampling": budgets})
    training = site.bench.services.training
    without = [panel.key for panel in panels(training, recipe)]
    assert "length" not in without
    assert [p.key for p in panels(training, with_budgets)] == [*without[:-1], "length", without[-1]]
