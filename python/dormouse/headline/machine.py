"""Memory that a benchmark may use: of the host what is available now, not what the machine has."""

from __future__ import annotations

import ctypes
from pathlib import Path

# Share of the free memory for sleeping bytes; the rest is for processes and the page cache.
HOST_SHARE = 0.75

_MEMINFO = Path("/proc/meminfo")
# Of this process's control group: version 2, then version 1.
_GROUPS = (
    ("memory.max", "memory.current", Path("/sys/fs/cgroup")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", Path("/sys/fs/cgroup/memory")),
)


def host_budget_bytes() -> int:
    """Returns the default of the host tier."""
    return int(HOST_SHARE * free_host_bytes())


def free_host_bytes() -> int:
    """Returns the bytes that are available, within the limit of the control group."""
    available = available_bytes(_MEMINFO.read_text())
    for limit, usage, folder in _GROUPS:
        left = _left(folder, limit, usage)
        if left is not None:
            available = min(available, left)
    return max(0, available)


def available_bytes(meminfo: str) -> int:
    """Returns ``MemAvailable`` of the text of ``/proc/meminfo``."""
    lines = (line.split() for line in meminfo.splitlines())
    return next(int(words[1]) << 10 for words in lines if words[:1] == ["MemAvailable:"])


def _left(folder: Path, limit: str, usage: str) -> int | None:
    """Returns what a group's limit leaves; pages of files that it can drop count as free."""
    texts = [folder / name for name in (limit, usage)]
    if not all(path.is_file() for path in texts):
        return None
    most, used = (path.read_text().strip() for path in texts)
    if not most.isdigit():
        return None
    stat = folder / "memory.stat"
    lines = stat.read_text().splitlines() if stat.is_file() else []
    files = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return int(most) - int(used) + files


def gpu_bytes() -> int | None:
    """Returns the memory of the first GPU, without a context on it; None if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, total = ctypes.c_int(), ctypes.c_size_t()
    calls = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
        lambda: driver.cuDeviceTotalMem_v2(ctypes.byref(total), device),
    )
    return total.value if all(call() == 0 for call in calls) else None
