"""Rows of a report: the figure, its bar, and whether it is met."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path

LOWER = "lower"
HIGHER = "higher"


@dataclass
class Row:
    """A figure of dormouse and those of its peers. None: not measured, ``how`` has the reason."""

    name: str
    unit: str
    better: str
    how: str
    ours: float | None = None
    bar: float | None = None
    peers: dict[str, float | None] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; a bar without a figure is missed, no bar is no question."""
        if self.bar is None:
            return None
        if self.ours is None or not math.isfinite(self.ours):
            return False
        return self.ours <= self.bar if self.better == LOWER else self.ours >= self.bar

    def note(self, name: str, reason: object) -> None:
        self.how += f"; {name} not measured: {reason}"

    def put(self, name: str, value: float | None) -> None:
        if name == "ours":
            self.ours = value
        else:
            self.peers[name] = value

    def figure(self, name: str) -> float | None:
        return self.ours if name == "ours" else self.peers.get(name)

    def record(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}


# Names of rows, and what measures them together.
Makers = Iterable[tuple[Iterable[str], Callable[[], "list[Row]"]]]


def measure(makers: Makers, only: str, out: Path) -> int:
    """Rows whose names match one of ``only``'s patterns, written and printed; an exit status."""
    patterns = only.split(",")
    rows: list[Row] = []
    chosen = [
        (names, maker)
        for names, maker in makers
        if any(fnmatch(name, pattern) for name in names for pattern in patterns)
    ]
    forget([name for names, _ in chosen for name in names], out)
    for names, maker in chosen:
        print(f"bench: {', '.join(names)}", file=sys.stderr, flush=True)
        rows += maker()
        # Written as they come: a run that is ended early keeps what it has.
        write(rows, out)
    if not rows:
        print(f"no row is called {only}", file=sys.stderr)
        return 2
    print(table(rows))
    for row in rows:
        print(f"{row.name}: {row.how}")
    return 0


def forget(names: Iterable[str], path: Path) -> None:
    """Drops the rows of an earlier run that are measured now: one that fails must not stay met."""
    if path.exists():
        kept = _records(path)
        for name in names:
            kept.pop(name, None)
        _keep(kept, path)


def write(rows: list[Row], path: Path) -> None:
    """Writes the rows; those of an earlier run that were not measured now stay."""
    kept = _records(path) if path.exists() else {}
    kept |= {row.name: row.record() for row in rows}
    _keep(kept, path)


def _records(path: Path) -> dict[str, dict[str, object]]:
    return {record["name"]: record for record in json.loads(path.read_text())}


def _keep(records: dict[str, dict[str, object]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(records.values()), indent=1) + "\n")


def table(rows: list[Row]) -> str:
    """The rows as text, one line each."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    head = ["row", "unit", "ours", "bar", "met", *peers]
    lines = [head]
    for row in rows:
        bar = "" if row.bar is None else ("≤ " if row.better == LOWER else "≥ ") + text(row.bar)
        met = {None: "", True: "yes", False: "NO"}[row.met]
        figures = [text(row.peers[name]) if name in row.peers else "" for name in peers]
        lines.append([row.name, row.unit, text(row.ours), bar, met, *figures])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
