#!/usr/bin/env python3
"""Opens a page in a browser; prints the time that takes, and that of a move of the pointer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "timeline" / "tests" / "page"))

from browser import WIDE, opened_browser, settle

MOVES = 40
# From the pointer's event until the frame after the one that shows it.
MEASURE = """
(() => {
    globalThis.moves_ms = [];
    stage.addEventListener("pointermove", (event) => {
        const shown = (now) => moves_ms.push(now - event.timeStamp);
        requestAnimationFrame(() => requestAnimationFrame(shown));
    });
})()
"""


def main() -> None:
    path = Path(sys.argv[1])
    with opened_browser() as browser:
        page = browser.new_page(viewport={"width": WIDE[0], "height": WIDE[1]})
        page.set_default_timeout(120_000)
        began_s = time.monotonic()
        page.goto(path.as_uri(), timeout=120_000)
        settle(page)
        open_s = time.monotonic() - began_s
        page.click("#all")
        settle(page)
        page.evaluate("byId('picture').scrollIntoView({ block: 'start' })")
        page.evaluate(MEASURE)
        box = page.locator("#canvas").bounding_box()
        for move in range(MOVES):
            page.mouse.move(box["x"] + 200 + 25 * move, box["y"] + 60 + 11 * move)
            settle(page)
        page.wait_for_timeout(200)
        moves_ms = page.evaluate("moves_ms")
    print(json.dumps({"open_s": open_s, "hover_ms": max(moves_ms), "moves": len(moves_ms)}))


if __name__ == "__main__":
    main()
