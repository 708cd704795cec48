"""The row of the cost of a CRC-32C, compared with the crate it replaces."""

from __future__ import annotations

import json
import subprocess

from ours import TARGET, Unavailable
from rows import LOWER, Row

DRIVER = TARGET / "release" / "examples" / "sums"


def sums() -> Row:
    if not DRIVER.exists():
        raise Unavailable(f"{DRIVER} is missing (make bench-offload builds it)")
    cost = json.loads(subprocess.check_output([DRIVER], text=True))
    ratios = {where: cost[f"ours{where}"] / cost[f"crate{where}"] for where in ("", "_cached")}
    how = (
        "CRC-32C, seconds per GB over those of the crate crc32c 0.6.9, medians of 9 in turn; the "
        f"larger ratio of memory ({cost['ours']:.3f} of {cost['crate']:.3f} s/GB) and of a piece in "
        f"cache ({cost['ours_cached']:.3f} of {cost['crate_cached']:.3f})"
    )
    row = Row("sum_over_crate", "ratio", LOWER, how, bar=1.0)
    row.put("ours", max(ratios.values()))
    return row
