"""Checks that a figure does not grow: compares its last quarter with its second one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from rows import LOWER, Row

MIB = 1 << 20
# Fewer say nothing: each quarter has two.
SAMPLES_MIN = 8


@dataclass(frozen=True)
class Bound:
    """How much more the last quarter's median may be than the second quarter's."""

    unit: str
    unit_size: int
    share: float
    slack: int
    """In units of one."""


EQUAL = Bound("", 1, 0.0, 0)
BYTES = Bound("MiB", MIB, 0.01, MIB)

BOUNDS = {
    "resident_bytes": BYTES,
    "resident_bytes_peak": BYTES,
    "open_files": EQUAL,
    "threads": EQUAL,
    "mappings": Bound("", 1, 0.01, 8),
    "regions": EQUAL,
    "extent_bytes": EQUAL,
    "pinned_bytes": EQUAL,
    "extent_bytes_peak": BYTES,
    "pinned_bytes_peak": BYTES,
}


def judge(subject: str, about: str, samples: list[dict[str, int]]) -> list[Row]:
    """A row for each figure: by how much it grew. What must be equal may not shrink either."""
    return [_row(subject, about, name, [s[name] for s in samples]) for name in BOUNDS]


def _row(subject: str, about: str, name: str, values: list[int]) -> Row:
    bound = BOUNDS[name]
    row = Row(f"soak_{subject}_{name}", bound.unit, LOWER, about, bar=0)
    if len(values) < SAMPLES_MIN:
        row.note("ours", f"{len(values)} samples; accepted: at least {SAMPLES_MIN}")
        return row
    first, last = (median(part) for part in quarters(values))
    most = bound.share * first + bound.slack
    grown = abs(last - first) if most == 0 else last - first
    row.bar, row.ours = most / bound.unit_size, grown / bound.unit_size
    row.how += (
        f"; median of the last quarter less that of the second, {len(values)} samples: "
        f"{last / bound.unit_size:,.6g} less {first / bound.unit_size:,.6g}"
    )
    return row


def quarters(values: list[int]) -> tuple[list[int], list[int]]:
    """The second and the last."""
    size = len(values) // 4
    return values[size : 2 * size], values[len(values) - size :]
