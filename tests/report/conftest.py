"""Pages in a real browser: headless Chromium of the system, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests of a process; they are skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("no browser: install Chromium, such as by `apt-get install chromium`")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def contexts(browser: Any) -> Callable[..., Any]:
    """The context of the browser with and without scripts: a new one for each test would take a second of each."""
    return cache(lambda java_script_enabled: browser.new_context(java_script_enabled=java_script_enabled))


@pytest.fixture
def opened(contexts: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens HTML as a file in a browser window, and returns Playwright's page.

    After the test no page may have asked for anything, shown a dialog, or written to the console.
    """
    pages: list[Any] = []
    happened: list[str] = []

    def open_page(
        html: str, hash: str = "", *, width: int = 1280, height: int = 900, scripts: bool = True, **media: str
    ) -> Any:
        path = tmp_path / f"page-{len(pages)}.html"
        path.write_text(html, encoding="utf-8")
        page = contexts(scripts).new_page()
        pages.append(page)
        page.set_default_timeout(10_000)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(**media)
        page.on("console", lambda message: happened.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: happened.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (happened.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: happened.append(f"request: {request.url[:80]}"))
        page.goto(path.as_uri() + hash)
        assert happened.pop(0).startswith("request: file:")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not happened
