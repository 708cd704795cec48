"""Figures and whether they meet their bars."""

from __future__ import annotations

import math

HIGHER, LOWER = "higher", "lower"


def row(name, unit, ours, *, how, bar=None, better=HIGHER, **peers) -> dict:
    """One figure. ``peers``: the same of others, by name. ``None``: could not be had."""
    named = {name.replace("_", " "): value for name, value in peers.items()}
    return judged(
        {"name": name, "unit": unit, "ours": ours, "bar": bar, "better": better, "peers": named,
         "how": how}
    )  # fmt: skip


def judged(found: dict) -> dict:
    """The row with ``met``: None without a bar; a figure that could not be had meets none."""
    ours, bar = found["ours"], found["bar"]
    if bar is None:
        met = None
    elif ours is None or not math.isfinite(ours):
        met = False
    else:
        met = ours >= bar if found["better"] == HIGHER else ours <= bar
    order = ("name", "unit", "ours", "bar", "better", "met", "peers", "how")
    return {key: {**found, "met": met}[key] for key in order}


def latest(found: list[dict]) -> list[dict]:
    """Each name's last row, where its first one stood."""
    return list({each["name"]: each for each in found}.values())
