"""A real browser, and the pages that it opens."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[3]
WIDE, PHONE = (1400, 900), (390, 844)


def browser_path() -> str:
    """The browser of ``DORMOUSE_BROWSER`` or Debian's chromium.

    Raises RuntimeError without one: a test that drives no browser has shown nothing.
    """
    found = os.environ.get("DORMOUSE_BROWSER") or shutil.which("chromium")
    if found is None:
        raise RuntimeError(
            "there is no browser: run scripts/setup-browser, or set DORMOUSE_BROWSER"
        )
    return found


@contextmanager
def opened_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Chromium's own sandbox needs user namespaces, which containers often lack.
        browser = playwright.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened_page(
    browser: Browser, path: Path, size: tuple[int, int], scheme: str = "light"
) -> Iterator[Page]:
    """The page at ``path`` in a window of ``size``; a narrow one is touched.

    Fails if the page logs an error or asks for anything beyond itself.
    """
    is_touch = size == PHONE
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        has_touch=is_touch,
        is_mobile=is_touch,
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: said.type == "error" and errors.append(said.text))
    page.on("request", lambda asked: asked.url.startswith("http") and errors.append(asked.url))
    page.goto(path.as_uri())
    settle(page)
    yield page
    context.close()
    assert not errors, errors


def settle(page: Page) -> None:
    """Waits until the picture is drawn. Playwright's waits evaluate text: forbidden."""
    page.evaluate(
        """new Promise((drawn) => {
            const look = () => !isStale && !requested ? drawn() : requestAnimationFrame(look);
            look();
        })"""
    )


def write_pages(directory: Path, *arguments: str) -> Path:
    """Writes a page of synthetic steps into ``directory`` and returns its path."""
    subprocess.run([example_path(), str(directory), *arguments], check=True, capture_output=True)
    return directory / "step.html"


def example_path() -> Path:
    path = ROOT / "target/release/examples/synthetic_step"
    return Path(os.environ.get("DORMOUSE_SYNTHETIC_STEP", path))
