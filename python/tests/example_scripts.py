"""Pairs of example scripts, plain and shared."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

CHANGED_LINES_MAX = 10
LINES_MAX = 60


def differ_in_few_lines_and_agree(folder: Path, names: tuple[str, str]) -> None:
    """Checks that scripts of four steps differ in few lines, and print the same."""
    scripts = [(folder / name).read_text().splitlines() for name in names]
    changed = [line for line in difflib.ndiff(*scripts) if line[0] in "+-"]
    assert len(changed) <= CHANGED_LINES_MAX and max(map(len, scripts)) <= LINES_MAX, changed
    printed = [
        subprocess.run(
            [sys.executable, str(folder / name)], capture_output=True, text=True, check=True
        ).stdout
        for name in names
    ]
    assert printed[0] == printed[1] and "step 3" in printed[0]
