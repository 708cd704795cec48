"""Rows of the timeline: recording, dumps, and the page in a real browser."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from rows import LOWER, Row

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "target" / "release" / "examples"
BROWSER_PYTHON = ROOT / "target" / "browser-venv" / "bin" / "python"
# One synthetic step is 1,083 events.
STEPS_OF_1E6 = 924
MIB = 1 << 20


def record_rows() -> list[Row]:
    """What recording costs: the worst of the three kinds of events counts."""
    told = run_json(EXAMPLES / "record_cost")
    kinds = {kind: told[f"{kind}_ns"] for kind in ("slice", "instant", "gauge")}
    event = Row(
        "event_ns",
        "ns",
        LOWER,
        "timeline/examples/record_cost: one thread, the worst kind of event, median of 9 rounds "
        "of 1e6; instants and gauges read the clock",
        ours=max(kinds.values()),
        bar=30,
        peers=kinds,
    )
    ring = Row(
        "ring_bytes",
        "B",
        LOWER,
        "resident memory of both rings, full, at the default of DORMOUSE_TRACE_EVENTS_MAX",
        ours=told["ring_bytes"],
        bar=64 * MIB,
    )
    return [event, ring]


def page_rows() -> list[Row]:
    """A page of 1e6 events: written by an example, opened by Chromium at 1400 x 900."""
    with tempfile.TemporaryDirectory() as directory:
        told = run_json(EXAMPLES / "synthetic_step", directory, str(STEPS_OF_1E6), "50")
        events = told["events"]
        how = f"timeline/examples/synthetic_step: {events:,} events of {STEPS_OF_1E6} steps"
        dump = Row("dump_1e6_events_s", "s", LOWER, how, ours=told["page_s"], bar=3)
        size = Row(
            "page_bytes_per_event", "B", LOWER, how, ours=told["page_bytes"] / events, bar=40
        )
        opened = Row(
            "page_open_1e6_s", "s", LOWER, f"{how}; from its address to its picture", bar=5
        )
        hover = Row(
            "page_hover_1e6_ms",
            "ms",
            LOWER,
            f"{how}, all in view; the longest of 40 moves of the pointer, until the next frame",
            bar=50,
        )
        page = Path(directory) / "step.html"
        try:
            seen = run_json(BROWSER_PYTHON, ROOT / "benches" / "see" / "open_page.py", page)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or str(error)
            for row in (opened, hover):
                row.note("ours", f"no browser ({reason.strip().splitlines()[-1]})")
        else:
            opened.ours, hover.ours = seen["open_s"], seen["hover_ms"]
    return [dump, size, opened, hover]


def run_json(*command: str | Path) -> dict[str, float]:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return json.loads(done.stdout)


MAKERS = [
    (("event_ns", "ring_bytes"), record_rows),
    (
        ("dump_1e6_events_s", "page_bytes_per_event", "page_open_1e6_s", "page_hover_1e6_ms"),
        page_rows,
    ),
]
