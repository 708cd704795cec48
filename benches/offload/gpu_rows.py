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
# Memory of the GPU, and the page that its driver gives out.
MEMORY_BYTES = 143_771 << 20
PAGE_MIB_MIN = 2
PAGES_MIB = (2, 8, 16, 32, 64)
PAGE_MIB_DEFAULT = PAGE_MIB_MIN
BAR = 0.02
SECONDS_MAX = 120


def overhead() -> Row:
    if not DRIVER.exists():
        raise Unavailable(f"{DRIVER} is missing (make bench-offload builds it)")
    free = step(PAGE_MIB_MIN, FREE)
    steps = {page_mib: step(page_mib, COSTS) for page_mib in PAGES_MIB}
    return fill(free, steps, step(PAGE_MIB_DEFAULT, WORST))


def fill(free: dict, steps: dict[int, dict], worst: dict) -> Row:
    """A page's overhead is its step less the one whose calls are free and whose pages waste nothing."""
    added = {page_mib: share(one, free) for page_mib, one in steps.items()}
    default = steps[PAGE_MIB_DEFAULT]
    how = (
        "what mapping calls and the rest of last pages add to a simulated step, over the step: 10k/2k, "
        f"N = 32, calls at the costs of {COSTS.name} on a virtual clock; pages of {PAGE_MIB_DEFAULT} MiB, "
        f"the default: {default['calls_ns'] / 1e9:.2f} s in calls on all threads, a step of "
        f"{default['step_ns'] / 1e9:.2f} s; where unmapping waits for kernels and maps after releases "
        f"stall: {share(worst, free):.4f}; peers: other pages"
    )
    row = Row("gpu_sleep_wake_overhead", "ratio", LOWER, how, bar=BAR)
    row.put("ours", added.pop(PAGE_MIB_DEFAULT))
    for page_mib, ratio in added.items():
        row.put(f"{page_mib} MiB", ratio)
    return row


def share(one: dict, free: dict) -> float:
    return (one["step_ns"] - free["step_ns"]) / free["step_ns"]


def step(page_mib: int, costs: Path) -> dict:
    environment = {
        "STANDIN_CUDA_BACKED": "0",
        "STANDIN_CUDA_TOTAL_BYTES": str(MEMORY_BYTES),
        "STANDIN_CUDA_COSTS": str(costs),
    }
    output = subprocess.run(
        [DRIVER, str(page_mib)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    if output.returncode != 0:
        raise Unavailable(f"{DRIVER} {page_mib}: {output.stderr.strip()[-300:]}")
    return json.loads(output.stdout)
