"""The dashboard in a real Chromium: every page, three looks, and visitors' actions."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import orchestrator_bench
import pytest
import pytest_asyncio
from browser import LOOKS, SCREENSHOTS, Watched, open_browser, open_page
from dashboard_stage import (
    HOSTILE,
    History,
    save_tokenizer,
    served,
    sorting_rollouts,
    store,
    train,
    training_figures,
)
from orchestrator_bench import Bench
from orchestrator_fakes import Network
from playwright.async_api import Browser

from muster.protocol.messages import Reason, Submission, Verdict
from muster.protocol.recipe import TrainingRecipe

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Stage:
    """A served run and a browser."""

    bench: Bench
    url: str
    browser: Browser
    shown: Submission
    """A submission whose file is there, with a hostile completion."""

    @property
    def cheater(self) -> str:
        """A banned worker's address."""
        return self.bench.network.view.slashes[0].owner

    @property
    def paths(self) -> dict[str, str]:
        """Every page by name."""
        fraud = self.bench.services.projection.judged_with(Verdict.FRAUD)[0].record.file_hash
        return {
            "run": "/",
            "workers": "/workers?order=seen",
            "worker": f"/workers/{self.cheater}",
            "submissions": "/submissions",
            "frauds": "/submissions?verdict=fraud",
            "submission": f"/submissions/0x{self.shown.file_hash.hex()}",
            "fraud": f"/submissions/0x{fraud.hex()}",
            "cases": "/cases",
            "samples": "/samples",
            "network": "/network",
            "problem": "/workers/0x12",
            "missing": "/nothing",
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("dashboard")
    training = TrainingRecipe(steps=60, submissions_per_step=19, max_async_level=2)
    history = History(Network(training=training))
    history.register(14)
    history.work(800, steps=40, judged=780)
    history.fund_and_pay()
    history.dispute()
    files = [
        history.write_file(sorting_rollouts(version, hostile=True), Verdict.ACCEPTED, Reason.NONE)
        for version in (37, 38, 39)
    ]
    tokenizer = save_tokenizer(folder / "tokenizer.json")
    # By its full name: the pages are not to be looked at once per database.
    async with orchestrator_bench.open_bench(
        folder, history.network, tokenizer=tokenizer, relays=("http://127.0.0.1:9",)
    ) as bench:
        bench.wall.time = history.network.chain.time + 12
        bench.services.chain_clock.update(history.network.chain.time + 10)
        bench.services.chain_health.read_at = bench.wall.time - 1
        await store(history, bench)
        await train(bench, 40)
        async with served(bench) as url, open_browser() as browser:
            yield Stage(bench, url, browser, files[-1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def looks(stage: Stage) -> AsyncIterator[dict[str, Watched]]:
    """One visitor per look for all pages: each has a process of its own, which starts slowly."""
    async with AsyncExitStack() as visits:
        yield {
            look: await visits.enter_async_context(open_page(stage.browser, **context))
            for look, context in LOOKS.items()
        }


NAMES = (
    *("run", "workers", "worker", "submissions", "frauds", "submission", "fraud", "cases"),
    *("samples", "network", "problem", "missing"),
)


@pytest.mark.parametrize("name", NAMES)
async def test_page_is_sound_in_every_look(
    stage: Stage, looks: dict[str, Watched], name: str
) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for look, visit in looks.items():
        visit.complaints.clear()
        await visit.page.goto(stage.url + stage.paths[name])
        width = await visit.page.evaluate("document.documentElement.scrollWidth")
        await visit.page.screenshot(path=SCREENSHOTS / f"{name}-{look}.png", full_page=True)
        # A phone has the colours and elements of the light look.
        assert look == "phone" or await visit.violations() == []
        is_missing = name in ("problem", "missing")
        complaints = [c for c in visit.complaints if not is_missing or "404" not in c]
        assert (complaints, width) == ([], LOOKS[look]["viewport"]["width"])
        assert visit.hosts == {stage.url.removeprefix("http://")}
        # Leave the page, so that it no longer follows the run.
        await visit.page.goto("about:blank")


CUT = """[...document.querySelectorAll(".scroll")]
.filter((box) => box.scrollWidth > box.clientWidth)
.map((box) => `${box.getAttribute("aria-label")}: ${box.scrollWidth} in ${box.clientWidth}`)"""
"""Tables that show a part of their columns only."""

UNLABELLED = """[...document.querySelectorAll(".scroll table")].flatMap((table) => {
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.innerHTML);
  return [...table.tBodies[0].rows].flatMap((row) =>
    [...row.cells].filter((cell, i) => cell.dataset.label !== heads[i])
      .map((cell) => cell.outerHTML));
})"""
"""Cells whose label is not the heading of their column."""


@pytest.mark.parametrize("width", [390, 640, 900, 1280])
async def test_no_table_or_tab_is_cut_off(stage: Stage, width: int) -> None:
    async with open_page(stage.browser, viewport={"width": width, "height": 844}) as visit:
        for name in NAMES:
            await visit.page.goto(stage.url + stage.paths[name])
            cut = await visit.page.evaluate(CUT)
            # Between a phone and a desk, the widest tables scroll by themselves.
            assert width == 900 or cut == [], name
            assert await visit.page.evaluate(UNLABELLED) == [], name
            for tab in await visit.page.locator("nav a").all():
                box = await tab.bounding_box()
                assert box is not None
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width, name


async def test_keyboard_goes_through_the_tabs_of_a_phone(stage: Stage) -> None:
    async with open_page(stage.browser, **LOOKS["phone"]) as visit:
        await visit.page.goto(stage.url + "/network")
        await visit.page.focus(".brand")
        await visit.page.keyboard.press("Tab")
        for name in ("Run", "Workers", "Submissions", "Cases", "Samples", "Network"):
            assert await visit.page.evaluate("document.activeElement.innerText") == name
            await visit.page.keyboard.press("Tab")
        await visit.page.focus("nav a[href='/cases']")
        await visit.page.keyboard.press("Enter")
        await visit.page.wait_for_url("**/cases")


async def test_pages_are_complete_without_scripts(stage: Stage) -> None:
    async with open_page(stage.browser, java_script_enabled=False) as visit:
        page = visit.page
        await page.goto(stage.url)
        assert await page.locator("figure svg.plot").count() == 8
        assert await page.locator("#latest tbody tr").count() == 12
        assert "reload to update" in await page.inner_text("#live")
        assert not await page.locator("#theme").is_visible()
        await page.goto(stage.url + "/submissions")
        first = await page.locator("tbody tr td").first.inner_text()
        await page.click("text=older")
        assert await page.locator("tbody tr td").first.inner_text() != first
        await page.select_option("select[name=verdict]", "fraud")
        await page.click("button:has-text('Filter')")
        verdicts = await page.locator("tbody .badge").all_inner_texts()
        assert set(verdicts) == {"fraud"}


async def test_hostile_texts_stay_texts(stage: Stage) -> None:
    async with open_page(stage.browser) as visit:
        for name in ("workers", "worker", "submission", "samples"):
            await visit.page.goto(stage.url + stage.paths[name])
            assert "pwned" not in await visit.page.title()
        shown = await visit.page.locator(".sample pre", has_text="script").first.inner_text()
        seen = ("U+202E", "U+001B", "U+200B", "&amp;", "<script>document.title='pwned'</script>")
        assert [text for text in seen if text not in shown] == []
        assert not set(HOSTILE) & {"\u202e", "\x1b"} & set(await visit.page.content())
        assert visit.complaints == []


async def test_open_page_follows_the_run(stage: Stage) -> None:
    async with open_page(stage.browser) as visit:
        page = visit.page
        await page.goto(stage.url)
        await page.wait_for_selector("#live[data-state=on]")
        before = await page.inner_text("#chart-reward .latest")
        await page.focus("#latest tbody a")
        await stage.bench.services.training.report(41, training_figures(41, 40) | {"reward": 0.99})
        stage.bench.services.feed.publish("a new status")
        await page.wait_for_function(
            "before => document.querySelector('#chart-reward .latest').innerText !== before",
            arg=before,
        )
        assert await page.inner_text("#chart-reward .latest") == "0.990"
        assert await page.locator("#chart-reward .uplot canvas").count() == 1
        # An update does not move the reader's focus.
        assert await page.evaluate("document.activeElement.closest('#latest') !== null")


async def test_chart_tells_its_values_under_the_pointer(stage: Stage) -> None:
    async with open_page(stage.browser, **LOOKS["light"]) as visit:
        await visit.page.goto(stage.url)
        await visit.page.hover("#chart-entropy .u-over", position={"x": 100, "y": 40})
        readout = await visit.page.inner_text("#chart-entropy .readout")
        step, value = readout.split()
        figures = stage.bench.services.training.column("entropy")
        assert float(value) == pytest.approx(figures[int(step)], abs=5e-4)


OWN_LANGUAGE = """
Object.getOwnPropertyDescriptor(Navigator.prototype, "language").get.call(navigator)
"""
"""Chromium's own language, even if the page has replaced the value."""


@pytest.mark.parametrize(
    ("locale", "own", "number", "mark"),
    [("C", "en-US@posix", "1,234.5", "."), ("de_DE", "de-DE", "1.234,5", ",")],
)
async def test_charts_speak_the_language_of_the_browser(
    stage: Stage, locale: str, own: str, number: str, mark: str
) -> None:
    async with open_browser(locale) as browser, open_page(browser, **LOOKS["light"]) as visit:
        await visit.page.goto(stage.url)
        assert await visit.page.evaluate(OWN_LANGUAGE) == own
        assert await visit.page.locator("figure .uplot canvas").count() == 8
        assert await visit.page.evaluate("uPlot.fmtNum(1234.5)") == number
        await visit.page.hover("#chart-entropy .u-over", position={"x": 100, "y": 40})
        readout = await visit.page.inner_text("#chart-entropy .readout")
        assert re.fullmatch(rf"\d+ +\d+\{mark}\d{{3}}", readout)
        assert visit.complaints == []


async def test_keyboard_reaches_content_search_and_results(stage: Stage) -> None:
    async with open_page(stage.browser) as visit:
        page = visit.page
        await page.goto(stage.url)
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"
        await page.keyboard.press("/")
        await page.keyboard.type(stage.cheater)
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"**/workers/{stage.cheater}")
        assert stage.cheater in await page.inner_text("h1")


async def test_chosen_theme_is_kept(stage: Stage) -> None:
    async with open_page(stage.browser, color_scheme="light") as visit:
        page = visit.page
        await page.goto(stage.url)
        paper = "getComputedStyle(document.body).backgroundColor"
        light = await page.evaluate(paper)
        await page.click("#theme")
        dark = await page.evaluate(paper)
        await page.reload()
        assert await page.evaluate(paper) == dark != light


async def test_hashes_are_copied_whole(stage: Stage) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    async with open_page(stage.browser, permissions=permissions) as visit:
        await visit.page.goto(stage.url + stage.paths["worker"])
        await visit.page.click("h1 .copy")
        await visit.page.wait_for_selector("h1 .copy.done")
        copied = await visit.page.evaluate("navigator.clipboard.readText()")
        assert copied == stage.cheater


async def test_stream_is_closed_while_nobody_looks(stage: Stage) -> None:
    feed = stage.bench.services.feed
    async with asyncio.timeout(10):
        # The pages of earlier tests are closed, but some of their streams may still be open.
        while feed.listeners:
            await asyncio.sleep(0.02)
    async with open_page(stage.browser) as visit:
        await visit.page.goto(stage.url)
        await visit.page.wait_for_selector("#live[data-state=on]")
        assert feed.listeners == 1
        await visit.page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        assert await visit.page.evaluate("source") is None
