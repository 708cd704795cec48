"""Rows of what is held: utilisation of churns and traces, calls for it, pinned memory."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pinned
import runs
import traces
from contenders import (
    EXPANDABLE,
    NATIVE,
    OURS,
    OURS_ALONE,
    TORCH_ENVIRONMENT,
    Contender,
    Unavailable,
)
from rows import HIGHER, LOWER, Row
from setting import CHURN_LIVE, KIB, MIB, Setting

TRACE_BAR = 0.99
OVER_EXPANDABLE = 0.03
# Works that the host is ahead by, of all streams; and what a driver queues at most.
RUN_AHEAD, RUN_AHEAD_FAR = 64, 1024
WAITS = ("cuStreamWaitEvent", "cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize")
CALLS_BAR = 0.1
PINNED_BAR = 0.03
# What the stand-in runtime asks at each call and the real one reads from the thread's memory.
RUNTIMES_OWN = ("cuCtxGetCurrent", "cuCtxSetCurrent")
CALLS_NAMED = 4


def utilisation(result: runs.Result) -> float:
    return result["peak_live_bytes"] / result["peak_device_bytes"]


def with_and_alone(row: Row, one: Contender, run: Callable[[Contender], runs.Result]) -> float:
    """The utilisation. Ours is the smaller of those with and without large pages."""
    if one is not OURS:
        return utilisation(run(one))
    return smaller(row, run(OURS), run(OURS_ALONE))


def smaller(row: Row, result: runs.Result, alone: runs.Result) -> float:
    """The smaller utilisation of ours; the row names both. ``alone``: without large pages."""
    ours, without = utilisation(result), utilisation(alone)
    row.how += f"; ours with large pages and without: {ours:.4f}, {without:.4f}, the smaller counts"
    return min(ours, without)


def utilisation_churn(setting: Setting, name: str, live: int) -> Row:
    how = (
        "most requested bytes live at once / most device bytes held at once by the stand-in "
        f"driver's figure, whole run of churn_{live}_instructions; bar: torch expandable of this "
        f"run + {OVER_EXPANDABLE}"
    )
    row = Row(name, "ratio", HIGHER, how)
    setting.fill(row, lambda one: with_and_alone(row, one, partial(setting.churned, live=live)))
    row.bar = over_expandable(row)
    for contender in setting.contenders:
        if row.figure(contender.name) is not None:
            row.how += own_figure(contender, setting.churned(contender, live))
    return row


def over_expandable(row: Row, most: float = math.inf) -> float | None:
    """The bar that torch expandable sets. If that could not be measured, the bar is over a peer
    that wastes nothing: a peer that fails must not take the bar away."""
    if EXPANDABLE.name not in row.peers:
        # A part of the contenders is for a look.
        return None
    expandable = row.peers[EXPANDABLE.name]
    return min((1.0 if expandable is None else expandable) + OVER_EXPANDABLE, most)


def own_figure(contender: Contender, result: runs.Result) -> str:
    """Says so where an allocator's own figure is not the driver's."""
    held, own = result["peak_device_bytes"], result.get("own_reserved_bytes", None)
    if own is None or own == held:
        return ""
    return f"; {contender.name} itself says {own / held:.4f} of what it holds"


def replay(setting: Setting, name: str, path: Path) -> Row:
    how = (
        f"{path.name} replayed by one thread on the trace's streams: most requested bytes live at "
        "once / most device bytes held at once"
    )
    row = Row(name, "ratio", HIGHER, how, bar=TRACE_BAR)
    with packed(row, path) as records:

        def replayed(one: Contender) -> runs.Result:
            return runs.run(one, "replay", records)

        return setting.fill(row, lambda one: with_and_alone(row, one, replayed))


def replay_busy(setting: Setting, name: str, path: Path) -> Row:
    how = (
        f"as utilisation_{traces.stem(path)}, with work on the stream of each block: the host is "
        f"{RUN_AHEAD} works ahead, so no stream is ever idle; bar: torch expandable of this run + "
        f"{OVER_EXPANDABLE}, at most {TRACE_BAR}"
    )
    row = Row(name, "ratio", HIGHER, how)
    with packed(row, path) as records:

        def replayed(one: Contender, works: int = RUN_AHEAD) -> runs.Result:
            ahead = {"STANDIN_CUDA_RUN_AHEAD": works, "STANDIN_CUDA_EXACT": 1}
            return runs.run(one, "replay_busy", records, **ahead)

        setting.fill(row, lambda one: busy(row, one, replayed))
    row.bar = over_expandable(row, TRACE_BAR)
    return row


def busy(row: Row, one: Contender, run: Callable[..., runs.Result]) -> float:
    """As :func:`with_and_alone`; of ours also, in words: farther ahead, the waits."""
    if one is not OURS:
        return utilisation(run(one))
    result, far = run(OURS), run(OURS, RUN_AHEAD_FAR)
    found = smaller(row, result, run(OURS_ALONE))
    row.how += (
        f"; ours {RUN_AHEAD_FAR} works ahead: {utilisation(far):.4f}; waits of ours: "
        f"{waits(result)} and {waits(far)} for {result['pairs']} blocks"
    )
    return found


def waits(result: runs.Result) -> int:
    return sum(result["calls"].get(wait, 0) for wait in WAITS)


@contextmanager
def packed(row: Row, path: Path) -> Iterator[str]:
    """The trace as a file that drivers read."""
    records = traces.pack_file(path)
    if traces.has_scopes(records):
        row.how += "; ours takes scopes as layers of nodes, others do not know of them"
    with tempfile.NamedTemporaryFile() as file:
        file.write(records)
        file.flush()
        yield file.name


def driver_calls(setting: Setting, name: str) -> Row:
    how = (
        "every driver call of the measured part of the three churns, the worst of them; torch "
        "without the context look-ups of the stand-in runtime"
    )
    row = Row(name, "calls/pair", LOWER, how, bar=CALLS_BAR)
    return setting.fill(row, lambda one: worst_calls(setting, row, one))


def worst_calls(setting: Setting, row: Row, contender: Contender) -> float:
    results = [setting.churned(contender, live) for live in CHURN_LIVE]
    per_pair = [calls_of(contender, result) / result["pairs"] for result in results]
    row.how += f"; {contender.name} " + " ".join(f"{calls:.3f}" for calls in per_pair)
    if contender is OURS:
        worst = results[per_pair.index(max(per_pair))]
        most = sorted(worst["calls"].items(), key=lambda item: -item[1])[:CALLS_NAMED]
        named = ", ".join(f"{entry} {calls / worst['pairs']:.3f}" for entry, calls in most)
        row.how += f" ({named})"
    return max(per_pair)


def calls_of(contender: Contender, result: runs.Result) -> int:
    if contender is OURS:
        return result["calls_total"]
    return result["calls_total"] - sum(result["calls"].get(own, 0) for own in RUNTIMES_OWN)


def pinned_waste(setting: Setting, name: str) -> Row:
    how = (
        f"pinned bytes / requested bytes - 1, {pinned.REQUESTS} buffers live at once, log-uniform "
        f"{pinned.MIN_BYTES // KIB} KiB to {pinned.MAX_BYTES // MIB} MiB; torch's pool of pinned "
        "host memory, by torch.empty(pin_memory=True)"
    )
    row = Row(name, "ratio", LOWER, how, bar=PINNED_BAR)
    measures = {OURS: pinned.measure_ours, NATIVE: lambda: pinned.measure_torch(TORCH_ENVIRONMENT)}
    for contender in setting.contenders:
        try:
            if contender in measures:
                row.put(contender.name, measures[contender]())
        except Unavailable as reason:
            row.put(contender.name, None)
            row.note(contender.name, reason)
    return row
