"""How a part that is written in Python tells what it found."""

from __future__ import annotations

import json


def say(kind: str, value) -> None:
    """Prints ``{kind: value}`` at once: what a part had printed counts, however it ends."""
    print(json.dumps({kind: value}), flush=True)
