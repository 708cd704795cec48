"""The row of what a layer's mark costs where there is nothing to do."""

from __future__ import annotations

import json
import subprocess
from statistics import median

from ours import TARGET, Unavailable
from rows import LOWER, Row

DRIVER = TARGET / "release" / "examples" / "layer_mark"
BAR_NS = 1_000
RUNS = 5


def layer_mark() -> Row:
    if not DRIVER.exists():
        raise Unavailable(f"{DRIVER} is missing (make bench-offload builds it)")
    runs = [json.loads(subprocess.check_output([DRIVER], text=True)) for _ in range(RUNS)]
    figures = {name: median(run[name] for run in runs) for name in runs[0]}
    shown = ", ".join(f"{name} {figure:.0f}" for name, figure in figures.items())
    how = (
        "ns a mark on the host device, 32 layers: of a node with nothing dormant, forward and "
        "backward, and of forward behind 16 layers of 20 sleeping regions; the worst of them: "
        f"{shown}; median of {RUNS} runs of 2,000 nodes (20 for the last)"
    )
    row = Row("layer_mark_ns", "ns/mark", LOWER, how, bar=BAR_NS)
    row.put("ours", max(figures.values()))
    return row
