"""Memory of a rank that is awake and asleep, in a call of the schedule and after it."""

from __future__ import annotations

import gc
from collections.abc import Callable

from case_table import HIDDEN, LAYERS, WIDE, Case
from dormouse.runtime import Runtime

# Gradients in FP64 of the feed-forward weights of one wide layer: gate, up and down. What the
# interpreter itself holds changes by less.
STAYS_BYTES_MAX = 8 * WIDE * 3 * HIDDEN


def has_last_layer_alone(case: Case, rank: int) -> bool:
    """Returns whether a rank has the model's last layer and no other. Of that a prompt keeps K and
    V, which are awake."""
    layers = case.config.get("num_layers_in_last_pipeline_stage", LAYERS // case.stages)
    return layers == 1 and rank >= case.ranks - case.ranks // case.stages


def asleep_bytes(runtime: Runtime) -> int:
    return runtime.stats()["asleep"]["current_bytes"]


def awake_bytes(runtime: Runtime) -> int:
    """Returns what is allocated and awake, without what only cycles of Python hold."""
    gc.collect()
    return runtime.stats()["allocated"]["current_bytes"]


def left_by(runtime: Runtime, work: Callable[[], dict]) -> dict:
    """Returns what ``work`` returns, the most bytes asleep at once in it, those asleep after it and
    how many more stay awake. One that runs before any other allocates what stays for all."""
    before = awake_bytes(runtime)
    runtime.reset_peaks()
    found = work()
    peak = runtime.stats()["asleep"]["peak_bytes"]
    after = awake_bytes(runtime)
    left = {"asleep": asleep_bytes(runtime), "stays": after - before}
    return found | {"asleep_peak": peak} | left


def most_asleep_bytes(runtime: Runtime, work: Callable[[], object]) -> int:
    """Returns the most bytes that are asleep at once in ``work``."""
    runtime.reset_peaks()
    work()
    return runtime.stats()["asleep"]["peak_bytes"]
