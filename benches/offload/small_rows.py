"""The row of the cost of small tensors that sleep together, compared with each alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ours import TARGET, Unavailable
from rows import LOWER, Row

DRIVER = TARGET / "release" / "examples" / "small_tensors"
WAYS = ("together", "alone")


def small_tensors(directory: Path) -> Row:
    if not DRIVER.exists():
        raise Unavailable(f"{DRIVER} is missing (make bench-offload builds it)")
    times = json.loads(subprocess.check_output([DRIVER, directory], text=True))
    cases = [name.removesuffix("_alone_ms") for name in times if name.endswith("_alone_ms")]
    pairs = {case: [times[f"{case}_{way}_ms"] for way in WAYS] for case in cases}
    ratios = {case: together / alone for case, (together, alone) in pairs.items()}
    shown = ", ".join(
        f"{case.replace('_', ' of ')} KiB {pairs[case][0]:.0f} of {pairs[case][1]:.0f} ms"
        for case in cases
    )
    how = (
        "falling asleep and waking of 24 layers of 12 small tensors on the host device, together "
        f"over each alone; the worst of five cases, medians of 15 steps in turn: {shown}"
    )
    row = Row("small_tensors_over_alone", "ratio", LOWER, how, bar=1.0)
    row.put("ours", max(ratios.values()))
    return row
