"""One browser for all tests, and a page that they read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import opened_browser, opened_page, write_pages
from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with opened_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with pauses of 4 s."""
    return write_pages(tmp_path_factory.mktemp("dump"), "3", "4000")


@pytest.fixture(scope="session")
def other_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step."""
    return write_pages(tmp_path_factory.mktemp("other"), "1", "0")


@pytest.fixture
def open_page(browser: Browser, dump: Path):
    def opened(size: tuple[int, int], path: Path = dump, scheme: str = "light"):
        return opened_page(browser, path, size, scheme)

    return opened


@pytest.fixture
def wide(open_page) -> Iterator[Page]:
    from browser import WIDE

    with open_page(WIDE) as page:
        yield page


@pytest.fixture
def phone(open_page) -> Iterator[Page]:
    from browser import PHONE

    with open_page(PHONE) as page:
        yield page
