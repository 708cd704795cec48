"""torch's memory statistics, under torch's names, with dormouse's figures.

Torch provides no statistics for a pluggable allocator. In mode ``"allocator"`` the functions of
``torch._C`` behind them are replaced, so ``torch.cuda.memory_allocated`` and its siblings report
dormouse's figures, even if they were imported by name before. ``memory_summary`` is replaced as
well, because torch's version needs counts that dormouse does not keep.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .. import _native as native
from ..errors import ArgumentError, MemoryTierError, StateError
from ..runtime import Runtime

# Extra capacity for blocks allocated during the listing, by attempt.
_SPARE_BLOCKS = (64, 1024, 16384)

# Retries and failures per GPU at the last reset of its accumulated statistics.
_counted_before: dict[int, tuple[int, int]] = {}


def nested(ordinal: int) -> dict:
    """Returns memory statistics of GPU ``ordinal`` in bytes and counts, shaped like
    ``torch.cuda.memory_stats_as_nested_dict``.

    Contains only keys that dormouse has a figure for: allocated, active, requested, reserved and
    inactive split bytes with their peaks, live allocations, retries and failures. ``active_bytes``
    counts allocated blocks and freed blocks that another stream may still use. Whole pages within
    ``inactive_split_bytes`` can be released nevertheless. Any-thread.
    """
    stats = _stats(ordinal)
    retries, failures = _counted_before.get(ordinal, (0, 0))
    return {
        "allocated_bytes": _gauge(stats.allocated),
        "active_bytes": _gauge(stats.active),
        "requested_bytes": _gauge(stats.requested),
        "reserved_bytes": _gauge(stats.mapped),
        "inactive_split_bytes": _gauge(stats.inactive_split),
        "allocation": {"all": {"current": stats.allocated.count}},
        "active": {"all": {"current": stats.active.count}},
        "num_alloc_retries": stats.alloc_retries - retries,
        "num_ooms": stats.alloc_failures - failures,
    }


def flat(figures: dict, prefix: str = "") -> dict[str, int]:
    """Flattens a nested dictionary to sorted ``a.b.c`` keys, like ``torch.cuda.memory_stats``."""
    result = {}
    for key, value in sorted(figures.items()):
        name = f"{prefix}{key}"
        result |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return result


def _gauge(gauge: native.Gauge) -> dict:
    return {"all": {"current": gauge.current_bytes, "peak": gauge.peak_bytes}}


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
        self._replace(torch._C, "_cuda_memorySnapshot", snapshot)
        self._replace(torch._C, "_cuda_getMemoryFraction", _memory_fraction)
        self._replace(torch._C, "_accelerator_isAllocatorInitialized", torch.cuda.is_initialized)
        self._replace(torch._C, "_accelerator_getDeviceStats", nested)
        self._replace(torch._C, "_accelerator_resetPeakStats", self._reset_peaks)
        self._replace(torch._C, "_accelerator_resetAccumulatedStats", _reset_accumulated)
        self._replace(torch._C, "_accelerator_emptyCache", _empty_cache)
        for module in (torch.cuda, torch.cuda.memory):
            self._replace(module, "memory_summary", summary)

    def uninstall(self) -> None:
        """Restores torch's own functions. Idempotent."""
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
    stats = _stats(ordinal)
    _counted_before[ordinal] = (stats.alloc_retries, stats.alloc_failures)


def snapshot(*_) -> dict:
    """Returns a snapshot like ``torch.cuda.memory._snapshot`` of all GPUs with dormouse memory.

    Each block is a segment of its own, in whole pages, at its fixed address; blocks that are asleep
    count zero bytes on the GPU and are ``inactive``. Contains no allocation traces:
    ``runtime.dump(path)`` writes the timeline. Any-thread; all blocks are of one moment.
    """
    segments = []
    for ordinal in range(torch.cuda.device_count()):
        segments += [_segment(ordinal, block) for block in _blocks(ordinal)]
    return {
        "segments": segments,
        "device_traces": [[] for _ in range(torch.cuda.device_count())],
        "external_annotations": [],
        "allocator_settings": {"backend": "dormouse"},
    }


def _segment(ordinal: int, block: native.Block) -> dict:
    awake = native.STATES[block.state] in ("awake", "falling_asleep")
    on_gpu = block.bytes if awake else 0
    piece = {
        "address": block.base,
        "size": block.bytes,
        "requested_size": block.requested_bytes,
        "state": "active_allocated" if awake else "inactive",
        "frames": [],
    }
    return {
        "device": ordinal,
        "address": block.base,
        "total_size": block.bytes,
        "allocated_size": on_gpu,
        "active_size": on_gpu,
        "requested_size": block.requested_bytes,
        "stream": block.stream or 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [piece],
    }


def _blocks(ordinal: int) -> list[native.Block]:
    """Returns the blocks of a GPU by address; empty if nothing was allocated there."""
    count = ctypes.c_uint64()
    try:
        native.call("torch_get_stats", ordinal, None, None, 0, ctypes.byref(count))
    except ArgumentError:
        return []
    for spare in _SPARE_BLOCKS:
        # Other threads may allocate between the two calls.
        capacity = count.value + spare
        array = (native.Block * capacity)()
        try:
            native.call("torch_get_stats", ordinal, None, array, capacity, ctypes.byref(count))
        except MemoryTierError:
            continue
        return sorted(array[: count.value], key=lambda block: block.base)
    raise StateError(
        f"CUDA device {ordinal}: other threads allocated more than {_SPARE_BLOCKS[-1]} blocks "
        "during the listing; accepted: a snapshot while fewer allocations are under way"
    )


def summary(device=None, abbreviated: bool = False) -> str:
    """Returns the figures of :func:`nested` as a table in MiB: current and peak."""
    ordinal = torch.cuda._utils._get_device_index(device, optional=True)
    figures = nested(ordinal)
    lines = [
        f"dormouse CUDA memory summary, device {ordinal}",
        f"CUDA OOMs: {figures['num_ooms']}, retries: {figures['num_alloc_retries']}",
        f"{'MiB':<22}{'now':>14}{'peak':>14}",
    ]
    for name, value in figures.items():
        if name.endswith("_bytes"):
            now, peak = (value["all"][key] / (1 << 20) for key in ("current", "peak"))
            lines.append(f"{name.removesuffix('_bytes'):<22}{now:>14.1f}{peak:>14.1f}")
    return "\n".join(lines) + "\n"
