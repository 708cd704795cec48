"""Host memory that a process may still take: what is available, within its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# Lines of hierarchy:controllers:path.
_CGROUP = Path("/proc/self/cgroup")
# By controller, of which version 2 names none: files of limit and usage, and where groups are.
_VERSIONS = {
    "": ("memory.max", "memory.current", Path("/sys/fs/cgroup")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", Path("/sys/fs/cgroup/memory")),
}


def free_bytes() -> int:
    """Returns the bytes that are available, within the limits of the control group and of those
    around it."""
    available = available_bytes(_MEMINFO.read_text())
    for limit, usage, folder in _groups():
        left = _left(folder, limit, usage)
        if left is not None:
            available = min(available, left)
    return max(0, available)


def available_bytes(meminfo: str) -> int:
    """Returns ``MemAvailable`` of the text of ``/proc/meminfo``."""
    lines = (line.split() for line in meminfo.splitlines())
    return next(int(words[1]) << 10 for words in lines if words[:1] == ["MemAvailable:"])


def _groups() -> Iterator[tuple[str, str, Path]]:
    """Yields the files and the folder of each group. In a container a path may be that outside of
    it; the root has the container's figures then."""
    lines = _CGROUP.read_text().splitlines() if _CGROUP.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        for name in _VERSIONS.keys() & set(controllers.split(",")):
            limit, usage, root = _VERSIONS[name]
            group = Path(path.lstrip("/"))
            # The parents of a relative path end with the root.
            for each in (group, *group.parents):
                yield limit, usage, root / each


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
