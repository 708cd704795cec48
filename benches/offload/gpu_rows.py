"""Rows of a simulated step on a GPU: what mapping calls add by their measured costs, and its peaks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

from ours import TARGET, Unavailable
from rows import LOWER, Row

DRIVER = TARGET / "release" / "examples" / "gpu_step"
COSTS = Path(__file__).with_name("gpu_costs")
PUBLISHED = Path(__file__).with_name("gpu_costs_published")
FREE = Path(__file__).with_name("gpu_costs_none")
MEMORY_BYTES = 143_771 << 20
# The page that the driver gives out: no large pages.
PAGE_MIB = 2
# Large pages. Pages are those of the driver in all cases.
LARGE_MIB = (2, 8, 16, 32, 64)
LARGE_MIB_DEFAULT = 16
PUBLISHED_ROW = "gpu_sleep_wake_overhead_published"
BAR = 0.02
# Layers that the host is ahead of the GPU: some 1,024 launches, all that a driver queues.
RUN_AHEAD_LAYERS = 48
# Works of the stand-in's GPU, more than a run has: they end as the simulation says.
WORKS_MAX = 1 << 20
PEAK_BAR = 1.1
MAPPED_BAR = 1.03
RUN_AHEAD_BAR = 1 << 30
# Phases and microbatches of which a step tells the most bytes mapped.
PHASES = ("a", "b", "middle", "last_microbatch", "c")
BEHIND_AWAKE = "behind an awake step"
BUT_LAST = "… over B but its last microbatch"
GIVEN_BACK = "free pages given back before"
SECONDS_MAX = 120


def overheads() -> list[Row]:
    """By costs that were measured, and by those that are published, which are higher."""
    if not DRIVER.exists():
        raise Unavailable(f"{DRIVER} is missing (make bench-offload builds it)")
    return [overhead("gpu_sleep_wake_overhead", COSTS), overhead(PUBLISHED_ROW, PUBLISHED)]


def overhead(name: str, costs: Path) -> Row:
    steps = {large_mib: step(large_mib, costs) for large_mib in LARGE_MIB}
    return fill(name, costs, step(PAGE_MIB, FREE), steps)


def fill(name: str, costs: Path, free: dict, steps: dict[int, dict]) -> Row:
    """The overhead of large pages: their step less that of free calls, which has none."""
    added = {large_mib: share(one, free) for large_mib, one in steps.items()}
    default = steps[LARGE_MIB_DEFAULT]
    how = (
        "what mapping calls add to a simulated step, over the step: 10k/2k, N = 32, calls at the "
        f"costs of {costs.name} on a virtual clock; pages of {PAGE_MIB} MiB and large pages of "
        f"{LARGE_MIB_DEFAULT} MiB, the default: {default['calls_ns'] / 1e9:.2f} s in calls on all "
        f"threads, which wait for the GPU for {default['waits_ns'] / 1e9:.2f} s beside, a step of "
        f"{default['step_ns'] / 1e9:.2f} s; peers: other large pages, at {PAGE_MIB} MiB none"
    )
    row = Row(name, "ratio", LOWER, how, bar=BAR)
    put_sizes(row, added)
    return row if default["calls_ns"] > 0 else without_figure(row, "no call cost time")


def put_sizes(row: Row, ratios: dict[int, float]) -> Row:
    """Puts the ratio of the default size of large pages, and those of the others beside it."""
    for large_mib, ratio in ratios.items():
        row.put("ours" if large_mib == LARGE_MIB_DEFAULT else f"{large_mib} MiB", ratio)
    return row


def without_figure(row: Row, reason: str) -> Row:
    """Takes the figure away: a bar must not be met by what did not happen."""
    row.put("ours", None)
    row.note("ours", reason)
    return row


def share(one: dict, free: dict) -> float:
    return (one["step_ns"] - free["step_ns"]) / free["step_ns"]


def c_peak() -> Row:
    steps = {large_mib: step(large_mib, COSTS) for large_mib in LARGE_MIB}
    behind_awake = step(LARGE_MIB_DEFAULT, COSTS, steps_awake=1)
    given_back = step(LARGE_MIB_DEFAULT, COSTS, steps_awake=1, gives_back=True)
    return fill_c_peak(steps, behind_awake, given_back)


def fill_c_peak(steps: dict[int, dict], behind_awake: dict, given_back: dict) -> Row:
    """``behind_awake``: a step of the default behind an awake one; ``given_back``: the same, and what was free had left."""

    def gigabytes(one: dict) -> str:
        return ", ".join(f"{one[f'{part}_bytes'] / 1e9:.1f}" for part in ("c", "b", "before_last"))

    default = steps[LARGE_MIB_DEFAULT]
    how = (
        f"most bytes mapped in the prompt's backward over those in the microbatches, calls at the costs of "
        f"{COSTS.name}, the host {RUN_AHEAD_LAYERS} layers ahead; GB of both, and of the microbatches but the last, beside "
        f"which layers wake: {gigabytes(default)} at large pages of {LARGE_MIB_DEFAULT} MiB, the default; "
        f"{gigabytes(behind_awake)} {BEHIND_AWAKE}; {gigabytes(given_back)} where {GIVEN_BACK}; "
        f"peers: other large pages, at {PAGE_MIB} MiB none; the default {BEHIND_AWAKE}, and then over the microbatches but "
        f"the last, {GIVEN_BACK}"
    )
    row = Row("gpu_c_peak_over_b_peak", "ratio", LOWER, how, bar=PEAK_BAR)
    put_sizes(row, {large_mib: one["c_bytes"] / one["b_bytes"] for large_mib, one in steps.items()})
    row.put(BEHIND_AWAKE, behind_awake["c_bytes"] / behind_awake["b_bytes"])
    row.put(BUT_LAST, given_back["c_bytes"] / given_back["before_last_bytes"])
    return row if default["c_bytes"] > 0 else without_figure(row, "nothing was mapped in C")


def b_mapped() -> Row:
    return fill_b_mapped({large_mib: step(large_mib, COSTS) for large_mib in LARGE_MIB})


def fill_b_mapped(steps: dict[int, dict]) -> Row:
    ratios = {
        large_mib: one["middle_bytes"] / one["middle_in_use_bytes"] for large_mib, one in steps.items()
    }
    default = steps[LARGE_MIB_DEFAULT]
    how = (
        f"most bytes mapped over most in use in the microbatch in the middle of B, calls at the costs of {COSTS.name}; "
        f"large pages of {LARGE_MIB_DEFAULT} MiB, the default: {default['middle_bytes'] / 1e9:.2f} GB and "
        f"{default['middle_in_use_bytes'] / 1e9:.2f} GB; peers: other large pages, at {PAGE_MIB} MiB none"
    )
    row = Row("gpu_b_mapped_over_in_use", "ratio", LOWER, how, bar=MAPPED_BAR)
    put_sizes(row, ratios)
    # What is in use is mapped.
    return row if row.ours >= 1 else without_figure(row, "less was mapped than was in use")


def run_ahead() -> Row:
    # Calls that cost nothing: with costs, the host is behind.
    layers = (0, RUN_AHEAD_LAYERS)
    pages_stay = [step(LARGE_MIB_DEFAULT, FREE, ahead) for ahead in layers]
    given_back = [step(LARGE_MIB_DEFAULT, FREE, ahead, gives_back=True) for ahead in layers]
    return fill_run_ahead(*pages_stay, *given_back)


def fill_run_ahead(beside: dict, ahead: dict, beside_given_back: dict, ahead_given_back: dict) -> Row:
    """Steps whose host waits for each work and whose host is ahead; then the same, and what was free had left."""
    added = phases_added(beside, ahead)
    how = (
        f"what a host that is {RUN_AHEAD_LAYERS} layers ahead of the GPU maps beyond the plan, calls free. Beyond the plan is "
        "taken as beyond the run whose host waits for each work. The largest difference of the most bytes mapped in a "
        f"phase or microbatch, GB: {gigabytes_of(added)}; a step of {ahead['step_ns'] / 1e9:.2f} s, of "
        f"{beside['step_ns'] / 1e9:.2f} s where it waits; peer: where {GIVEN_BACK}, so that A maps what it needs: "
    )
    added_given_back = phases_added(beside_given_back, ahead_given_back)
    how += gigabytes_of(added_given_back)
    row = Row("gpu_runahead_bytes", "bytes", LOWER, how, bar=RUN_AHEAD_BAR)
    row.put("ours", max(added.values()))
    row.put(GIVEN_BACK, max(added_given_back.values()))
    is_mapped = all(ahead[f"{phase}_bytes"] > 0 for phase in PHASES)
    return row if is_mapped else without_figure(row, "nothing was mapped")


def phases_added(beside: dict, ahead: dict) -> dict[str, int]:
    return {phase: ahead[f"{phase}_bytes"] - beside[f"{phase}_bytes"] for phase in PHASES}


def gigabytes_of(phases: dict[str, int]) -> str:
    return ", ".join(f"{phase} {added / 1e9:.2f}" for phase, added in phases.items())


# Rows share the steps: a run takes its time from a virtual clock.
@functools.cache
def step(
    large_mib: int,
    costs: Path,
    run_ahead_layers: int = RUN_AHEAD_LAYERS,
    steps_awake: int = 0,
    gives_back: bool = False,
) -> dict:
    return run(DRIVER, costs, (large_mib, run_ahead_layers, steps_awake, int(gives_back)))


def run(driver: Path, costs: Path, numbers: tuple[int, ...]) -> dict:
    """What the driver prints of a step. ``numbers``: its arguments."""
    environment = {
        "STANDIN_CUDA_BACKED": "0",
        "STANDIN_CUDA_TOTAL_BYTES": str(MEMORY_BYTES),
        "STANDIN_CUDA_COSTS": str(costs),
        "STANDIN_CUDA_RUN_AHEAD": str(WORKS_MAX),
        "STANDIN_CUDA_EXACT": "1",
    }
    words = [str(number) for number in numbers]
    output = subprocess.run(
        [driver, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    if output.returncode != 0:
        raise Unavailable(f"{driver} {' '.join(words)}: {output.stderr.strip()[-300:]}")
    return json.loads(output.stdout)
