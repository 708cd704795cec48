"""Figures as lines of JSON: the measurement, its bar and its peers.

``scripts/gpu-suite`` compares figures with bars. A later row of the same name replaces the earlier
one: figures are printed as soon as they are known, and again when improved.
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
    """One figure. ``peers``: figures of other systems by name. ``None``: not available."""
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
    """Prints ``{kind: value}`` and flushes."""
    print(json.dumps({kind: value}), flush=True)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)
