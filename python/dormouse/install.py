"""``dormouse.install()``: one call that opens the best door this process still has."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from . import _native as native
from .doors import pool, stats, whole
from .doors.by_copy import MIN_BYTES, ByCopy
from .errors import ArgumentError, DeviceError, StateError
from .runtime import Runtime

DOORS = ("A", "B", "C", "host")

_installed: Installed | None = None


class Installed:
    """What :func:`install` did. There is one per process.

    ``door``: ``"A"``, ``"B"``, ``"C"`` or ``"host"``. ``why``: sentences, why this door and why not
    the others. ``runtime``: the :class:`Runtime` of the device.
    """

    def __init__(self, door: str, why: list[str], runtime: Runtime, asked: dict):
        self.door = door
        self.why = tuple(why)
        self.runtime = runtime
        self._asked = asked
        self._process = os.getpid()
        self._torch_stats = stats.TorchStats(runtime) if door == "A" else None

    def pool(self, name: str, *, backup: bool = True) -> pool.Pool:
        """A memory pool that sleeps as a whole (door B)."""
        if self.door != "B":
            raise StateError(f"memory pools need door B, and door {self.door} is open")
        return pool.Pool(self.runtime, name, backup=backup)

    def by_copy(self, keep: Iterable[torch.Tensor] = (), *, min_bytes: int = MIN_BYTES) -> ByCopy:
        """Saved-tensor hooks that copy out what a forward saves; works with every door."""
        return ByCopy(self.runtime, keep, min_bytes=min_bytes)

    def uninstall_stats(self) -> None:
        """Gives torch its own statistics functions back; they raise under door A."""
        if self._torch_stats is not None:
            self._torch_stats.uninstall()

    def _check_same(self, asked: dict) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"dormouse was installed in process {self._process}, and this is its fork "
                f"{os.getpid()}; accepted: processes started with spawn, which install their own"
            )
        for name, value in asked.items():
            if value != self._asked.get(name):
                raise StateError(
                    f"dormouse is installed with {name}={self._asked.get(name)!r} and was asked "
                    f"for {value!r}; accepted: the same, or nothing"
                )


def install(device=None, *, door: str | None = None, **runtime_options) -> Installed:
    """Opens dormouse for this process and says which door it took and why.

    ``device``: a GPU (``"cuda:1"``, ``torch.device``, ordinal) or ``"host"``. By default a GPU if
    torch finds one: the current one if CUDA is in use already, else the first. ``door``: insist on
    one; by default the first of these that is open:

    - ``"A"`` dormouse becomes torch's CUDA allocator. Only before torch first uses CUDA, and before
      ``torch.cuda.set_device``. ``torch.cuda.graph`` works: what a capture allocates is its graph's
      and never sleeps. Captures that go past torch get memory that others use as well.
    - ``"B"`` pools beside torch's allocator: :meth:`Installed.pool`.
    - ``"C"`` copies: :meth:`Installed.by_copy`.
    - ``"host"`` no GPU.

    ``runtime_options``: those of :class:`Runtime`, its device apart. Called again it
    returns the same; what is asked for then must be what was asked for first. One thread at a time.

    Raises :class:`ArgumentError` for an unknown door, :class:`DeviceError` for a GPU that is not
    there, :class:`StateError` for a closed door, another request than the first, or a forked child.
    """
    global _installed
    asked = {"door": door, "device": None if device is None else str(_device(device))}
    asked = {name: value for name, value in asked.items() if value is not None} | runtime_options
    if _installed is not None:
        _installed._check_same(asked)
        return _installed
    if door is not None and door not in DOORS:
        raise ArgumentError(f"door {door!r}; accepted: {', '.join(DOORS)}")
    place = _device(device)
    closed = _closed_doors(place)
    if door in closed:
        raise StateError(f"door {door} is closed: {closed[door]}")
    options = runtime_options | {"device": "host" if place.type == "cpu" else "cuda"}
    runtime = Runtime(ordinal=place.index or 0, **options)
    try:
        chosen = door or next(name for name in DOORS if name not in closed)
        why = _open(chosen, closed, runtime)
        asked = {"door": chosen, "device": str(place)} | runtime_options
        _installed = Installed(chosen, why, runtime, asked)
    except BaseException:
        # Another try must not find this runtime in its way.
        runtime.close()
        raise
    return _installed


def memory_stats(device=None) -> dict[str, int]:
    """A GPU's memory under the names of ``torch.cuda.memory_stats``, in bytes and counts.

    By default of the GPU dormouse is installed for. Needs no door but the library's own figures;
    a GPU nothing was allocated on is all zero. Any-thread. Raises :class:`ArgumentError` for a
    device that is no GPU of this machine, :class:`StateError` in a forked child.
    """
    place = _installed.runtime.device if device is None and _installed else _device(device)
    if place.type != "cuda":
        raise ArgumentError(f"device {place}; accepted: CUDA devices, Runtime.stats() for others")
    return stats.flat(stats.nested(place.index))


_OPEN = {
    "A": "door A: dormouse is torch's CUDA allocator, and any tensor sleeps in place",
    "B": "door B: torch keeps its allocator; what is built inside Installed.pool() sleeps as one",
    "C": "door C: torch keeps its allocator; Installed.by_copy() copies what autograd saves",
    "host": "door host: dormouse manages this process' CPU memory",
}


def _open(chosen: str, closed: dict[str, str], runtime: Runtime) -> list[str]:
    """Opens the door; says so, and why not the others."""
    why = [_OPEN[chosen]]
    if chosen == "host":
        why.append(_preload(runtime))
    if chosen == "A":
        why += whole.enter()
        closed["B"] = "torch has memory pools only in its own allocator"
    for name in DOORS:
        if name in closed:
            why.append(f"door {name} is closed: {closed[name]}")
        elif name not in (chosen, "C"):
            why.append(f"door {name} is open, and {chosen} was asked for")
    if chosen != "C":
        why.append("copies need no door: Installed.by_copy() works beside this one")
    return why


def _device(device) -> torch.device:
    """The device meant, with its index; CUDA is not started for it."""
    count = torch.cuda.device_count()
    if device is None:
        device = "cuda" if count else "host"
    if isinstance(device, int):
        device = torch.device("cuda", device)
    place = torch.device("cpu" if device == "host" else device)
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise ArgumentError(f"device {place}; accepted: CUDA devices and 'host'")
    index = place.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if index >= count:
        raise DeviceError(f"CUDA device {index}; torch finds {count}")
    return torch.device("cuda", index)


def _closed_doors(place: torch.device) -> dict[str, str]:
    """Why each door that is closed is."""
    if place.type == "cpu":
        return dict.fromkeys("ABC", "it is for GPUs, and this is the host's memory")
    closed = {"host": f"it is for the CPU's memory, and this is {place}"}
    reason = whole.closed_because()
    if reason is not None:
        closed["A"] = reason
    reason = pool.closed_because()
    if reason is not None:
        closed["B"] = reason
    return closed


def _preload(runtime: Runtime) -> str:
    if "preload" in runtime.info()["doors"]:
        return "libdormouse_preload.so serves this process' malloc: CPU tensors sleep in place"
    library = native.library_path().with_name("libdormouse_preload.so")
    return (
        "CPU tensors sleep in place only in a process that was started with "
        f"LD_PRELOAD={library}, and this one was not"
    )
