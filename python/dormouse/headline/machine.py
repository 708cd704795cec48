"""Memory that a benchmark may use: of the host what is available now, not what the machine has."""

from __future__ import annotations

import ctypes

from .. import host_memory

# Share of the free memory for sleeping bytes; the rest is for processes and the page cache.
HOST_SHARE = 0.75
# The most that may be asked for.
HOST_SHARE_MAX = 0.9


def host_budget_bytes() -> int:
    """Returns the default of the host tier."""
    return int(HOST_SHARE * host_memory.free_bytes())


def host_refused(host_bytes: int) -> str | None:
    """Returns a sentence if a host tier has no room here."""
    free_bytes = host_memory.free_bytes()
    most_bytes = int(HOST_SHARE_MAX * free_bytes)
    if host_bytes <= most_bytes:
        return None
    return f"--host-bytes {host_bytes}: {free_bytes} are free; accepted: at most {most_bytes}"


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
