"""torch's memory statistics under its own names, from dormouse's figures.

Torch refuses to give statistics of an allocator that is not its own. Under door A the functions of
``torch._C`` that it would ask are replaced, so that ``torch.cuda.memory_allocated`` and the rest,
also where they were imported by name before, tell dormouse's figures. ``memory_summary`` is
replaced as well: torch's needs counts that dormouse does not keep.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .. import _native as native
from ..errors import ArgumentError, MemoryTierError, StateError
from ..runtime import Runtime

# Room for blocks that come while they are listed, by attempt.
_SPARE_BLOCKS = (64, 1024, 16384)

# Retries and failures of each GPU when its accumulated statistics were last reset.
_counted_before: dict[int, tuple[int, int]] = {}


def nested(ordinal: int) -> dict:
    """Memory of GPU ``ordinal`` as ``torch.cuda.memory_stats_as_nested_dict`` shapes it, in bytes.

    Only keys that dormouse has a figure for: allocated, active, requested, reserved and inactive
    split bytes with their peaks, live allocations, retries and failures. ``active_bytes`` are the
    allocated ones and those of freed blocks that another stream may still use. Of
    ``inactive_split_bytes`` whole pages can go back all the same. Any-thread.
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
    """A nested dictionary as ``torch.cuda.memory_stats`` gives it: ``a.b.c`` names, sorted."""
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
        native.call("torch_get_stats", ordinal, ctypes.byref(stats))
    except ArgumentError:
        # Nothing was allocated there yet: all zero, as it stands.
        return native.Stats()
    return stats


class TorchStats:
    """torch's statistics functions answered by dormouse, until :meth:`uninstall`."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._before: list[tuple[object, str, Callable]] = []
        self._put(torch._C, "_cuda_memoryStats", nested)
        self._put(torch._C, "_cuda_resetPeakMemoryStats", self._reset_peaks)
        self._put(torch._C, "_cuda_resetAccumulatedMemoryStats", _reset_accumulated)
        self._put(torch._C, "_cuda_memorySnapshot", snapshot)
        for module in (torch.cuda, torch.cuda.memory):
            self._put(module, "memory_summary", summary)

    def uninstall(self) -> None:
        """Gives torch its own functions back. Twice is fine."""
        while self._before:
            module, name, function = self._before.pop()
            setattr(module, name, function)

    def _put(self, module, name: str, function: Callable) -> None:
        self._before.append((module, name, getattr(module, name)))
        setattr(module, name, function)

    def _reset_peaks(self, ordinal: int) -> None:
        mine = self._runtime.device.index
        if ordinal != mine:
            raise ArgumentError(
                f"peaks of CUDA device {ordinal} cannot be reset; accepted: {mine}, whose runtime "
                "dormouse.install() made"
            )
        self._runtime.reset_peaks()


def _reset_accumulated(ordinal: int) -> None:
    stats = _stats(ordinal)
    _counted_before[ordinal] = (stats.alloc_retries, stats.alloc_failures)


def snapshot(*_) -> dict:
    """What ``torch.cuda.memory._snapshot`` gives, of every GPU dormouse has memory on.

    Each block is a segment of its own, whole pages of it, under the address it has for life; what
    is asleep has no bytes on the GPU and says so. No allocation traces: ``runtime.dump(path)`` has
    the timeline. Any-thread; blocks of one moment.
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
    """Blocks of a GPU; none where nothing was allocated."""
    count = ctypes.c_uint64()
    try:
        native.call("torch_get_blocks", ordinal, None, 0, ctypes.byref(count))
    except ArgumentError:
        return []
    for spare in _SPARE_BLOCKS:
        # Other threads may allocate between the two calls.
        capacity = count.value + spare
        array = (native.Block * capacity)()
        try:
            native.call("torch_get_blocks", ordinal, array, capacity, ctypes.byref(count))
        except MemoryTierError:
            continue
        return sorted(array[: count.value], key=lambda block: block.base)
    raise StateError(f"CUDA device {ordinal}: blocks come faster than they can be listed")


def summary(device=None, abbreviated: bool = False) -> str:
    """The figures of :func:`nested` as a table in MiB, now and at their peak."""
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
