"""Seconds and bytes in use per phase; bytes as the driver reports them and as the allocator counts
them.

*Driver*: ``cudaMemGetInfo``, total minus free, of the whole GPU; on the CPU the process's resident
bytes. A thread reads it every millisecond, so shorter peaks are missed. *Allocator*: peak bytes
that the allocator reserved, exact but limited to itself. Both are relative to a baseline with
parameters, gradients and all other processes.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import median

import torch

PERIOD_SECONDS = 1e-3
_STATM = Path("/proc/self/statm")


def used_bytes(device: torch.device) -> int:
    """Returns the bytes in use, as the driver reports them."""
    if device.type == "cpu":
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class PhaseClock:
    """Seconds of each phase of a step on the device. Pass :meth:`on_phase` to the step. Nothing waits:
    a phase begins when the device comes to the work queued after its mark."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._begins: list[tuple[str, torch.cuda.Event | float]] = []

    def on_phase(self, name: str) -> None:
        """Ends the current phase and begins ``name``; ``"end"`` begins none."""
        if not self._on_gpu:
            self._begins.append((name, time.monotonic()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._begins.append((name, event))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase. The device has done the step's work."""
        pairs = zip(self._begins, self._begins[1:], strict=False)
        return {name: self._between(begin, end) for (name, begin), (_, end) in pairs}

    def _between(self, begin, end) -> float:
        return begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin


class Meter:
    """Peaks and medians per phase of a step. Pass :meth:`on_phase` to the step.

    Memory is attributed to the phase in which the host queued the work, when it is allocated.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._idle = used_bytes(device)
        self._reserved_idle = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        self._phase: str | None = None
        self._seen: dict[str, list[int]] = {}
        self._reserved: dict[str, int] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def idle_bytes(self) -> int:
        """Records the bytes in use when idle, the baseline of all figures."""
        return self._idle

    def on_phase(self, name: str) -> None:
        """Ends the current phase and begins ``name``; ``"end"`` begins none."""
        self._look()
        if self._device.type == "cuda":
            if self._phase is not None:
                self._reserved[self._phase] = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        with self._lock:
            self._phase = None if name == "end" else name

    def close(self) -> dict[str, dict[str, int | None]]:
        """Ends the thread; returns ``driver_peak``, ``driver_median``, ``allocator_peak`` per
        phase."""
        self._done.set()
        self._thread.join()
        return {
            phase: {
                "driver_peak": max(seen) - self._idle,
                "driver_median": int(median(seen)) - self._idle,
                "allocator_peak": self._reserved[phase] - self._reserved_idle
                if phase in self._reserved
                else None,
            }
            for phase, seen in self._seen.items()
        }

    def _watch(self) -> None:
        while not self._done.is_set():
            self._look()
            time.sleep(PERIOD_SECONDS)

    def _look(self) -> None:
        with self._lock:
            if self._phase is not None:
                self._seen.setdefault(self._phase, []).append(used_bytes(self._device))
