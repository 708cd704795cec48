"""Rows of the lines that sharing prompts changes in a trainer's script."""

from __future__ import annotations

import difflib
from pathlib import Path

from rows import LOWER, Row

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LINES_MAX = 10


def lines_row(trainer: str, plain: str, shared: str) -> Row:
    folder = EXAMPLES / trainer
    scripts = [(folder / name).read_text().splitlines() for name in (plain, shared)]
    how = f"added and removed lines from examples/{trainer}/{plain} to {shared}"
    return Row(
        f"lines_{trainer}", "lines", LOWER, how, ours=changed_lines(*scripts), bar=LINES_MAX
    )


def changed_lines(plain: list[str], shared: list[str]) -> int:
    """Lines that were added or removed."""
    # After the names of both files.
    lines = list(difflib.unified_diff(plain, shared, n=0, lineterm=""))[2:]
    return sum(line.startswith(("+", "-")) for line in lines)
