"""Host memory that a process may still take: what is available, within its control group."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# Of this process's control group: version 2, then version 1.
_GROUPS = (
    ("memory.max", "memory.current", Path("/sys/fs/cgroup")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", Path("/sys/fs/cgroup/memory")),
)


def free_bytes() -> int:
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
