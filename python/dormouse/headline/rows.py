"""Figures as lines of JSON: what is measured, what it is held to, and what it stands beside.

``scripts/gpu-suite`` says whether a bar is met; here a row only carries it. A later row of the same
name replaces the earlier: figures are printed as soon as there are any, and again when better.
"""

from __future__ import annotations

import json
import math

HIGHER, LOWER = "higher", "lower"


def row(
    name: str,
    unit: str,
    ours: float | None,
    *,
    how: str,
    bar: float | None = None,
    better: str = HIGHER,
    **peers: float | None,
) -> dict:
    """One figure. ``peers``: the same of others, by name. ``None``: could not be had."""
    return {
        "name": name,
        "unit": unit,
        "ours": _finite(ours),
        "bar": bar,
        "better": better,
        "peers": {name.replace("_", " "): _finite(value) for name, value in peers.items()},
        "how": how,
    }


def emit(kind: str, value) -> None:
    """Prints ``{kind: value}`` at once."""
    print(json.dumps({kind: value}), flush=True)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)
