"""torch's memory statistics, under torch's names, with dormouse's figures.

Torch provides no statistics for a pluggable allocator. In mode ``"allocator"`` the functions of
``torch._C`` behind them are replaced, so ``torch.cuda.memory_allocated`` and its siblings report
dormouse's figures, even if they were imported by name before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .. import _native as native
from ..errors import ArgumentError
from ..runtime import Runtime
from . import history, profiling

# Statistics per GPU at the last reset of its accumulated statistics.
_before: dict[int, native.Stats] = {}

# Torch's figures of bytes, and dormouse's name for each.
_GAUGES = {
    "allocated": "allocated",
    "active": "active",
    "requested": "requested",
    "reserved": "mapped",
    "inactive_split": "inactive_split",
}

# Torch's figures of counts, and dormouse's name for each of a pool.
_COUNTS = {
    "allocation": "allocations",
    "active": "active_blocks",
    "segment": "segments",
    "inactive_split": "inactive_splits",
}

_FIGURE = ("current", "peak", "allocated", "freed")


def notice() -> str:
    """Returns a sentence about what torch's memory statistics lack."""
    return (
        "torch's memory statistics keep no past of small_pool, large_pool and the number of "
        "inactive split blocks: peak repeats current, allocated and freed are 0; peaks of GPUs that "
        "dormouse is not installed for are not reset"
    )


def nested(ordinal: int) -> dict:
    """Returns memory statistics of GPU ``ordinal`` in bytes and counts, shaped like
    ``torch.cuda.memory_stats_as_nested_dict``, with all of its keys.

    ``small_pool`` has blocks of up to half a page, 1 MiB, as torch's. It, ``large_pool`` and the
    number of inactive split blocks are counted here and have no past: ``peak`` repeats
    ``current``; ``allocated`` and ``freed`` are 0. Zero too: ``num_oom_rejections``, and everything
    oversize, as in torch without a ``max_split_size``.

    ``active_bytes`` counts allocated blocks and freed blocks that another stream may still use; the
    peak of their number is that of the allocated blocks, or the current number if that is higher.
    Whole pages within ``inactive_split_bytes`` can be released nevertheless. ``allocated`` and
    ``freed`` of bytes count a sleep as freed and a wake as allocated. Any-thread.
    """
    stats, before = _stats(ordinal), _before.get(ordinal, native.Stats())
    figures = {
        f"{name}_bytes": _with_pools(_gauge(stats, before, field), stats, f"{field}_bytes")
        for name, field in _GAUGES.items()
    }
    blocks, active = stats.allocations, stats.active.count
    active_blocks = native.Amount(active, max(active, blocks.peak), blocks.added_total)
    before_active = native.Amount(before.active.count, 0, before.allocations.added_total)
    counts = {
        "allocation": _figure(blocks, before.allocations),
        "active": _figure(active_blocks, before_active),
        "segment": _figure(stats.segments, before.segments),
        "inactive_split": _without_past(sum(pool.inactive_splits for pool in stats.pools)),
    }
    figures |= {name: _with_pools(counts[name], stats, field) for name, field in _COUNTS.items()}
    return figures | {
        "oversize_allocations": dict.fromkeys(_FIGURE, 0),
        "oversize_segments": dict.fromkeys(_FIGURE, 0),
        "max_split_size": -1,
        "num_alloc_retries": stats.alloc_retries - before.alloc_retries,
        "num_ooms": stats.alloc_failures - before.alloc_failures,
        "num_oom_rejections": 0,
        "num_sync_all_streams": stats.stream_waits - before.stream_waits,
        "num_device_alloc": stats.map_calls - before.map_calls,
        "num_device_free": stats.unmap_calls - before.unmap_calls,
        "reserved_bytes_by_private_pools": {},
    }


def flat(figures: dict, prefix: str = "") -> dict[str, int]:
    """Flattens a nested dictionary to sorted ``a.b.c`` keys, like ``torch.cuda.memory_stats``."""
    result = {}
    for key, value in sorted(figures.items()):
        name = f"{prefix}{key}"
        result |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return result


def _gauge(stats: native.Stats, before: native.Stats, field: str) -> dict:
    def amount(of: native.Stats) -> native.Amount:
        gauge = getattr(of, field)
        total = getattr(of, f"{field}_total_bytes")
        return native.Amount(gauge.current_bytes, gauge.peak_bytes, total)

    return _figure(amount(stats), amount(before))


def _figure(now: native.Amount, before: native.Amount) -> dict[str, int]:
    allocated = now.added_total - before.added_total
    # Whatever was added and is not there any more.
    freed = allocated - (now.current - before.current)
    return dict(zip(_FIGURE, (now.current, now.peak, allocated, freed), strict=True))


def _with_pools(figure: dict[str, int], stats: native.Stats, field: str) -> dict:
    named = zip(native.POOLS, stats.pools, strict=True)
    return {"all": figure} | {name: _without_past(getattr(pool, field)) for name, pool in named}


def _without_past(current: int) -> dict[str, int]:
    return dict(zip(_FIGURE, (current, current, 0, 0), strict=True))


def _stats(ordinal: int) -> native.Stats:
    count = torch.cuda.device_count()
    if not 0 <= ordinal < count:
        raise ArgumentError(f"CUDA device {ordinal}; accepted: 0 to {count - 1}")
    stats = native.Stats()
    try:
        native.call("torch_get_stats", ordinal, ctypes.byref(stats), None, 0, None)
    except ArgumentError:
        # Nothing was allocated there yet.
        return native.Stats()
    return stats


class TorchStats:
    """Replaces torch's statistics functions until :meth:`uninstall`."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._before: list[tuple[object, str, Callable]] = []
        self._replace(torch._C, "_cuda_memoryStats", nested)
        self._replace(torch._C, "_cuda_resetPeakMemoryStats", self._reset_peaks)
        self._replace(torch._C, "_cuda_resetAccumulatedMemoryStats", _reset_accumulated)
        self._replace(torch._C, "_cuda_getMemoryFraction", _memory_fraction)
        self._replace(torch._C, "_accelerator_isAllocatorInitialized", torch.cuda.is_initialized)
        self._replace(torch._C, "_accelerator_getDeviceStats", nested)
        self._replace(torch._C, "_accelerator_resetPeakStats", self._reset_peaks)
        self._replace(torch._C, "_accelerator_resetAccumulatedStats", _reset_accumulated)
        self._replace(torch._C, "_accelerator_emptyCache", _empty_cache)
        self._history = history.History()
        for name, replacement in self._history.replacements().items():
            self._replace(torch._C, name, replacement)
        for name, replacement in profiling.replacements().items():
            self._replace(torch.autograd.profiler, name, replacement)
        profiling.tell(profiling.is_running())

    def uninstall(self) -> None:
        """Restores torch's own functions, ends reports to its profiler, its memory history and its
        out-of-memory observers. Idempotent."""
        profiling.tell(False)
        self._history.stop()
        self._history.detach_observers()
        while self._before:
            module, name, function = self._before.pop()
            setattr(module, name, function)

    def _replace(self, module, name: str, function: Callable) -> None:
        self._before.append((module, name, getattr(module, name)))
        setattr(module, name, function)

    def _reset_peaks(self, ordinal: int) -> None:
        mine = self._runtime.device.index
        if ordinal != mine:
            raise ArgumentError(
                f"peaks of CUDA device {ordinal} cannot be reset; accepted: {mine}, the device "
                "dormouse is installed for"
            )
        self._runtime.reset_peaks()


def _memory_fraction(ordinal: int) -> float:
    """Returns the budget of a GPU as a fraction of its memory."""
    return native.library().dormouse_torch_get_memory_fraction(ordinal)


def _empty_cache() -> None:
    native.library().dormouse_torch_empty_cache()


def _reset_accumulated(ordinal: int) -> None:
    _before[ordinal] = _stats(ordinal)
