"""The site builds without a warning, and a reader's browser contacts no other host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import open_browser, open_page

ROOT = Path(__file__).parents[3]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


SOUND = "[sound](other.md#here)"
NOWHERE = {
    "[no page](missing.md)": "link 'missing.md', but the target is not found",
    "[no anchor](other.md#gone)": "does not contain an anchor '#gone'",
    "[a folder](nothing/)": "unrecognized relative link 'nothing/'",
}


def test_links_that_lead_nowhere_fail_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "other.md").write_text("# Other\n\n## Here\n")
    config = tmp_path / "mkdocs.yml"
    pages = "nav: [index.md, other.md]\nplugins: []\nhooks: []\nextra_javascript: []\n"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\n{pages}")
    for links, fails in ([SOUND], False), ([SOUND, *NOWHERE], True):
        (docs / "index.md").write_text("# Home\n\n" + "\n\n".join(links))
        done = build(config, tmp_path / "site")
        assert (done.returncode != 0) is fails, done.stderr
    assert [reason for reason in NOWHERE.values() if reason not in done.stderr] == []
    assert done.stderr.count("WARNING") == len(NOWHERE)


def test_every_page_is_there(site: Path) -> None:
    sources = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")]
    assert [p for p in sources if not (site / p.with_suffix(".html")).exists()] == []


def test_python_page_shows_what_the_package_exports(site: Path) -> None:
    text = (site / "reference" / "python" / "tasks.html").read_text()
    assert {"muster.tasks.Verifier", "muster.tasks.verify"} <= set(
        re.findall(r'id="([^"]+)"', text)
    )
    assert "muster.tasks.registry" not in re.findall(r'<h2 id="([^"]+)"', text)


def test_contract_page_has_signature_and_natspec(site: Path) -> None:
    text = (site / "reference" / "contracts" / "StakeVault.html").read_text()
    assert "Takes stake for an offence that is proven, and splits it at once" in text
    assert "<code>reporter</code>: Gets the capped reporter's share" in text
    assert 'id="function-slash"' in text


def test_http_page_has_every_route(site: Path) -> None:
    text = (site / "reference" / "http-api.html").read_text()
    for route in ("POST /v1/leases", "PUT /v1/submissions/{run_id}/{step}/{index}"):
        assert f"<code>{route}</code>" in text


def test_no_page_names_a_script_style_or_picture_of_another_host(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    assert len(pages) > 80
    loaded = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*')
    assert [
        (page.name, loaded.findall(text)) for page, text in pages.items() if loaded.search(text)
    ] == []


async def test_diagrams_and_search_work_from_a_folder_without_a_network(site: Path) -> None:
    async with open_browser() as browser, open_page(browser) as visit:
        page = visit.page
        await page.goto((site / "architecture.html").as_uri())
        # Each diagram's text is replaced by a drawing.
        await page.wait_for_function(
            "document.querySelectorAll('div.mermaid').length == 2"
            " && !document.querySelector('pre.mermaid')"
        )
        await page.fill("input[name=query]", "unbonding period")
        await page.wait_for_selector(".md-search-result__item a")
        assert visit.complaints == []
        assert visit.hosts == {""}


def test_every_decision_has_a_number_of_its_own() -> None:
    paths = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    numbers = [int(path.name[:4]) for path in paths]
    assert len(set(numbers)) == len(numbers)
    for number, path in zip(numbers, paths, strict=True):
        assert path.read_text().startswith(f"# {number}. ")
