"""Peak memory of a process per phase, by two measures.

*Resident* is the kernel's figure: ``VmHWM``, reset at the start of each phase, minus idle
``VmRSS``. *Tracked* is the library's: peak awake allocated bytes, minus the same at idle. Cached
free pages count in the first only.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

# "5" resets the peak of resident memory to the current value (proc(5)).
_RESET_PEAK = "5"


class Memory:
    """Reads both measures of this process. ``runtime``: a :class:`dormouse.Runtime`."""

    def __init__(self, runtime):
        self._runtime = runtime

    def trim(self) -> None:
        """Collects garbage and releases cached free pages, so that remaining memory is in use."""
        gc.collect()
        self._runtime.trim()

    def resident(self) -> int:
        """Returns the current resident bytes."""
        return _status_bytes("VmRSS")

    def resident_peak(self) -> int:
        """Returns the peak of resident bytes since :meth:`reset_peaks`."""
        return _status_bytes("VmHWM")

    def tracked(self) -> int:
        """Returns the currently allocated awake bytes."""
        return self._runtime.stats()["allocated"]["current_bytes"]

    def tracked_peak(self) -> int:
        """Returns the peak of allocated awake bytes since :meth:`reset_peaks`."""
        return self._runtime.stats()["allocated"]["peak_bytes"]

    def reset_peaks(self) -> None:
        """Sets both peaks to the current values."""
        _CLEAR_REFS.write_text(_RESET_PEAK)
        self._runtime.reset_peaks()


class PeakMeter:
    """Peak bytes above idle per phase of a step. Pass :meth:`on_phase` to the step."""

    def __init__(self, memory: Memory):
        self._memory = memory
        self._idle: dict[str, int] | None = None
        self._phase: str | None = None
        self.peaks: dict[str, dict[str, int]] = {}

    def idle(self) -> dict[str, int]:
        """Trims, and sets the remaining bytes as the baseline of the peaks."""
        self._memory.trim()
        self._idle = {"resident": self._memory.resident(), "tracked": self._memory.tracked()}
        return self._idle

    def on_phase(self, name: str) -> None:
        """Ends the current phase and begins phase ``name``, perhaps again; ``"end"`` begins none."""
        if self._idle is None:
            raise RuntimeError("call idle() before the first phase: peaks are relative to idle")
        if self._phase is not None:
            peaks = self.peaks.setdefault(self._phase, {"resident": 0, "tracked": 0})
            resident = self._memory.resident_peak() - self._idle["resident"]
            tracked = self._memory.tracked_peak() - self._idle["tracked"]
            peaks["resident"] = max(peaks["resident"], resident)
            peaks["tracked"] = max(peaks["tracked"], tracked)
        self._phase = None if name == "end" else name
        if self._phase is not None:
            self._memory.reset_peaks()

    def step_peak(self) -> dict[str, int]:
        """Returns the maximum over all phases, per measure."""
        return {
            account: max(peak[account] for peak in self.peaks.values())
            for account in ("resident", "tracked")
        }


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{_STATUS} has no {field}; accepted: Linux with /proc")
    return int(match.group(1)) * 1024
