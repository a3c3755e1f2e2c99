"""A real Chromium for tests: the system's, or else the one that npm brought."""

import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

ROOT = Path(__file__).parents[1]
SCREENSHOTS = ROOT / "runs" / "screenshots"
"""Folder of the pages' pictures, for people to look at."""
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
_UNPACKED = ROOT / "node_modules" / ".cache" / "chromium"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1360, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1360, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}


def find_chromium() -> tuple[str, dict[str, str]]:
    """Return a Chromium's path and the environment it needs."""
    own = os.environ.get("MUSTER_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    return (own, {}) if own else unpack_chromium()


def unpack_chromium() -> tuple[str, dict[str, str]]:
    """Return the Chromium of node_modules, unpacked the first time (209 MB)."""
    _UNPACKED.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["node", "tools/chromium.mjs"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(_UNPACKED)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (
        "no Chromium: run `make setup`, or install Debian's package chromium, or set "
        f"MUSTER_CHROMIUM to one\n{done.stderr}"
    )
    found = json.loads(done.stdout)
    return found["path"], {"LD_LIBRARY_PATH": found["libraries"], "FONTCONFIG_FILE": found["fonts"]}


def locale_environment(locale: str) -> dict[str, str]:
    """Return this process's environment with another locale, which need not be installed."""
    ours = {k for k in os.environ if k in ("LANG", "LANGUAGE") or k.startswith("LC_")}
    kept = {k: v for k, v in os.environ.items() if k not in ours}
    return kept if locale == "C" else {**kept, "LANG": f"{locale}.UTF-8"}


@asynccontextmanager
async def open_browser(locale: str = "en_US") -> AsyncIterator[Browser]:
    """Start Chromium without a window, in a locale that does not depend on the machine's."""
    path, environment = find_chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path,
            # Tests may run as root, where Chromium's own sandbox does not start.
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            env={**locale_environment(locale), **environment},
        )
        yield browser
        await browser.close()


class Watched:
    """A page that records its console errors and the hosts that it asked."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda m: self._note(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("dialog", lambda dialog: self._note(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _note(self, text: str) -> None:
        self.complaints.append(text)

    async def violations(self) -> list[str]:
        """Return the accessibility faults that axe finds."""
        # Evaluated by the debugger, so the page's policy need not allow it.
        await self.page.evaluate(AXE.read_text())
        found = await self.page.evaluate("axe.run().then((result) => result.violations)")
        return [
            f"{v['id']}: {v['nodes'][0]['html'][:160]} {v['nodes'][0]['failureSummary'][:200]}"
            for v in found
            if v["impact"] in ("serious", "critical")
        ]


@asynccontextmanager
async def open_page(browser: Browser, **context: Any) -> AsyncIterator[Watched]:
    """Open a fresh visitor's page."""
    visitor = await browser.new_context(**context)
    try:
        yield Watched(await visitor.new_page())
    finally:
        await visitor.close()
