"""Curves as a self-contained SVG, readable on light and dark ground."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, PANEL_HEIGHT = 820, 250
COLUMNS = 2
# Of a panel, around its axes.
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 34, 40
HEAD_HEIGHT = 58
TICKS_MAX = 5
# Powers of ten above which every second one, and so on, has a tick.
DECADES_MAX = 6

STYLE = """
 text { font: 12px system-ui, sans-serif; fill: #24292f }
 .title { font-weight: 600 }
 .quiet { fill: #57606a; font-size: 11px }
 .grid { stroke: #d0d7de; stroke-width: 1 }
 .line { fill: none; stroke-width: 1.8; stroke-linejoin: round }
 .c0 { stroke: #0969da } .c1 { stroke: #bc4c00 } .c2 { stroke: #1a7f37 } .c3 { stroke: #8250df }
 @media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9198a1 } .grid { stroke: #3d444d }
  .c0 { stroke: #58a6ff } .c1 { stroke: #f0883e } .c2 { stroke: #3fb950 } .c3 { stroke: #bc8cff }
 }
"""
# By colour, so that lines over each other and in grey differ.
DASHES = ("", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Curve:
    """``color``: 0 to 3, the same for the same run in every panel."""

    name: str
    color: int
    values: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Curves over the same steps, the first of which is step 1. ``is_log``: values that are not
    positive are left out."""

    title: str
    curves: Sequence[Curve]
    is_log: bool = False


def svg(title: str, subtitle: str, steps: str, panels: Sequence[Panel]) -> str:
    """Returns the picture. ``steps``: the name of the horizontal axis."""
    rows = math.ceil(len(panels) / COLUMNS)
    height = HEAD_HEIGHT + rows * PANEL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
        f'<text class="quiet" x="12" y="40">{escape(subtitle)}</text>',
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, COLUMNS)
        at = (column * WIDTH / COLUMNS, HEAD_HEIGHT + row * PANEL_HEIGHT)
        parts.append(f'<g transform="translate({at[0]:g} {at[1]:g})">')
        parts += _panel(panel, steps)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, steps: str) -> list[str]:
    right, bottom = WIDTH / COLUMNS - RIGHT, PANEL_HEIGHT - BOTTOM
    count = max(len(curve.values) for curve in panel.curves)
    scale = _Scale(panel, bottom)

    def x(step: int) -> float:
        return LEFT + (right - LEFT) * (step - 1) / max(1, count - 1)

    parts = [f'<text class="title" x="{LEFT}" y="12">{escape(panel.title)}</text>']
    for value, label in scale.ticks():
        y = scale(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right:g}"/>')
        parts.append(_label(LEFT - 6, y + 4, label, "end"))
    for step in sorted({1, *range(20, count, 20), count}):
        parts.append(_label(x(step), bottom + 16, str(step), "middle"))
    parts.append(_label(right, bottom + 30, steps, "end"))
    legend = LEFT
    for curve in panel.curves:
        points = [
            f"{x(step):.1f} {scale(value):.1f}"
            for step, value in enumerate(curve.values, 1)
            if scale.has(value)
        ]
        line = f'class="line c{curve.color}" stroke-dasharray="{DASHES[curve.color]}"'
        if points:
            parts.append(f'<path {line} d="M{"L".join(points)}"/>')
        parts.append(f'<path {line} d="M{legend:g} {TOP - 9}h22"/>')
        parts.append(_label(legend + 27, TOP - 5, curve.name, "start"))
        legend += 42 + 6.2 * len(curve.name)
    return parts


def _label(x: float, y: float, text: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="quiet" {place}>{escape(text)}</text>'


class _Scale:
    """The vertical axis of a panel."""

    def __init__(self, panel: Panel, bottom: float):
        self._is_log, self._bottom = panel.is_log, bottom
        values = [v for curve in panel.curves for v in curve.values if self.has(v)]
        places = [self._place(value) for value in values] or [0.0]
        self._low, self._high = min(places), max(places)
        if self._is_log:
            self._low, self._high = math.floor(self._low), math.ceil(self._high)
        if self._high == self._low:
            self._low, self._high = self._low - 1, self._high + 1

    def has(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self._is_log)

    def __call__(self, value: float) -> float:
        share = (self._place(value) - self._low) / (self._high - self._low)
        return self._bottom - share * (self._bottom - TOP)

    def ticks(self) -> list[tuple[float, str]]:
        if self._is_log:
            powers = range(int(self._low), int(self._high) + 1)
            powers = powers[:: 1 + len(powers) // DECADES_MAX]
            return [(10.0**power, f"1e{power}") for power in powers]
        rough = (self._high - self._low) / TICKS_MAX
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [(number * step, f"{number * step:.4g}") for number in range(first, last + 1)]

    def _place(self, value: float) -> float:
        return math.log10(value) if self._is_log else value
