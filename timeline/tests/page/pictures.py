#!/usr/bin/env python3
"""Takes the pictures of the page that the documents show.

target/browser-venv/bin/python timeline/tests/page/pictures.py [directory]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import PHONE, ROOT, WIDE, opened_browser, opened_page, write_pages


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    with tempfile.TemporaryDirectory() as made, opened_browser() as browser:
        dump = write_pages(Path(made), "8", "900")
        for name, size in (("timeline", WIDE), ("timeline-phone", PHONE)):
            with opened_page(browser, dump, size) as page:
                if size == PHONE:
                    page.evaluate("byId('stage').scrollIntoView({ block: 'start' })")
                page.screenshot(path=directory / f"{name}.png")


if __name__ == "__main__":
    main()
