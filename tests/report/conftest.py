"""Pages in a real browser: headless Chromium of the system, driven by Playwright."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
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
def windows(browser: Any) -> tuple[Callable[[bool], Any], list[str]]:
    """A window with scripts and one without, and what happens in them; a new window costs three times as much."""
    happened: list[str] = []

    @cache
    def window(scripts: bool) -> Any:
        page = browser.new_context(java_script_enabled=scripts).new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: happened.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: happened.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (happened.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: happened.append(f"request: {request.url[:80]}"))
        return page

    return window, happened


@pytest.fixture
def opened(windows: tuple[Callable[[bool], Any], list[str]], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens HTML as a file in a browser window, and returns Playwright's page; the next file takes its place.

    After the test no page may have asked for anything, shown a dialog, or written to the console.
    """
    window, happened = windows
    numbers = count()
    happened.clear()

    def open_page(
        html: str, hash: str = "", *, width: int = 1280, height: int = 900, scripts: bool = True, **media: str
    ) -> Any:
        path = tmp_path / f"page-{next(numbers)}.html"
        path.write_text(html, encoding="utf-8")
        page = window(scripts)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(**{"media": "null", "color_scheme": "null", **media})
        page.mouse.move(0, 0)
        page.goto(path.as_uri() + hash)
        assert happened.pop(0).startswith("request: file:")
        return page

    yield open_page
    assert not happened
