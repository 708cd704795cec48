"""Every example of docs/history.md, in order and in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "history.md"
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def test_the_examples_run():
    blocks = BLOCKS.findall(PAGE.read_text())
    assert len(blocks) == 7
    names: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, example {number}", "exec"), names)
    names["history"].close()
