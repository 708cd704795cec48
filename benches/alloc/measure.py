"""All rows by name, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import memory
import rotation
import speed
import traces
from rows import Row
from setting import CHURN_LIVE, Setting

Maker = Callable[[Setting, str], Row]


def makers(trace_directory: Path) -> dict[str, Maker]:
    """What measures each row, when it is called with the setting and the row's name."""
    return dict(_makers(trace_directory))


def _makers(trace_directory: Path) -> Iterator[tuple[str, Maker]]:
    yield "hot_pair_instructions", speed.hot_instructions
    yield "history_pair_instructions", speed.history_instructions
    for live in CHURN_LIVE:
        yield f"churn_{live}_instructions", partial(speed.churn_instructions, live=live)
    yield "two_thread_scaling", speed.two_threads
    for live in CHURN_LIVE:
        yield f"utilisation_churn_{live}", partial(memory.utilisation_churn, live=live)
    yield "driver_calls_per_pair_churn", memory.driver_calls
    yield "stream_rotation_cap_over_live", rotation.cap_over_live
    yield "stream_rotation_added_waits", rotation.added_waits
    yield "stream_rotation_reserved_over_live", rotation.reserved_over_live
    yield "stream_rotation_waits_at_cap", rotation.waits_at_cap
    yield "pinned_waste", memory.pinned_waste
    for path in traces.find(trace_directory):
        yield f"utilisation_{traces.stem(path)}", partial(memory.replay, path=path)
    for path in traces.find(trace_directory):
        yield f"utilisation_busy_{traces.stem(path)}", partial(memory.replay_busy, path=path)
    yield "hot_pair_ns", speed.hot_ns
    for cost_ns in speed.COSTS_NS:
        suffix = f"_cost_{cost_ns // 1000}us" if cost_ns else ""
        yield f"churn_1000_ns{suffix}", partial(speed.churn_ns, cost_ns=cost_ns)
    yield f"churn_1000_cold_ns_cost_{speed.COSTS_NS[-1] // 1000}us", speed.churn_cold_ns
