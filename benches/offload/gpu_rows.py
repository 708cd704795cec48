"""The row of what mapping calls add to a step on a GPU, by their published costs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from ours import TARGET, Unavailable
from rows import LOWER, Row

DRIVER = TARGET / "release" / "examples" / "gpu_step"
COSTS = Path(__file__).with_name("gpu_costs")
WORST = Path(__file__).with_name("gpu_costs_worst")
FREE = Path(__file__).with_name("gpu_costs_none")
MEMORY_BYTES = 143_771 << 20
# The page that the driver gives out: no large pages.
PAGE_MIB = 2
# Large pages. Pages are those of the driver in all cases.
LARGE_MIB = (2, 8, 16, 32, 64)
LARGE_MIB_DEFAULT = 16
BAR = 0.02
SECONDS_MAX = 120


def overhead() -> Row:
    if not DRIVER.exists():
        raise Unavailable(f"{DRIVER} is missing (make bench-offload builds it)")
    free = step(PAGE_MIB, FREE)
    steps = {large_mib: step(large_mib, COSTS) for large_mib in LARGE_MIB}
    return fill(free, steps, step(LARGE_MIB_DEFAULT, WORST))


def fill(free: dict, steps: dict[int, dict], worst: dict) -> Row:
    """The overhead of large pages: their step less that of free calls, which has none."""
    added = {large_mib: share(one, free) for large_mib, one in steps.items()}
    default = steps[LARGE_MIB_DEFAULT]
    how = (
        "what mapping calls add to a simulated step, over the step: 10k/2k, N = 32, calls at the "
        f"costs of {COSTS.name} on a virtual clock; pages of {PAGE_MIB} MiB and large pages of "
        f"{LARGE_MIB_DEFAULT} MiB, the default: {default['calls_ns'] / 1e9:.2f} s in calls on all "
        f"threads, a step of {default['step_ns'] / 1e9:.2f} s; where unmapping waits for kernels "
        f"and maps after releases stall: {share(worst, free):.4f}; peers: other large pages, at "
        f"{PAGE_MIB} MiB none"
    )
    row = Row("gpu_sleep_wake_overhead", "ratio", LOWER, how, bar=BAR)
    row.put("ours", added.pop(LARGE_MIB_DEFAULT))
    for large_mib, ratio in added.items():
        row.put(f"{large_mib} MiB", ratio)
    return row


def share(one: dict, free: dict) -> float:
    return (one["step_ns"] - free["step_ns"]) / free["step_ns"]


def step(large_mib: int, costs: Path) -> dict:
    environment = {
        "STANDIN_CUDA_BACKED": "0",
        "STANDIN_CUDA_TOTAL_BYTES": str(MEMORY_BYTES),
        "STANDIN_CUDA_COSTS": str(costs),
    }
    output = subprocess.run(
        [DRIVER, str(large_mib)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    if output.returncode != 0:
        raise Unavailable(f"{DRIVER} {large_mib}: {output.stderr.strip()[-300:]}")
    return json.loads(output.stdout)
