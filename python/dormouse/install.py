"""``dormouse.install()``: one call that selects the best mode available in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from . import _native as native
from .errors import ArgumentError, DeviceError, StateError
from .modes import allocator, pool, stats
from .modes.copying import MIN_BYTES, SavedTensorOffload
from .runtime import Runtime

# In the order in which they are tried, and the sentence of ``Installed.why`` for each.
MODES = {
    "allocator": "dormouse is torch's CUDA allocator; any tensor sleeps in place",
    "pool": "torch keeps its allocator; tensors built in Installed.pool() sleep together",
    "copy": "torch keeps its allocator; Installed.saved_tensor_offload() copies saved tensors",
    "host": "dormouse manages CPU memory of this process",
}

_installed: Installed | None = None


class Installed:
    """The installed mode. One instance per process.

    ``mode``: ``"allocator"``, ``"pool"``, ``"copy"`` or ``"host"``. ``why``: sentences that give
    the reason for this mode and against the others. ``runtime``: the :class:`Runtime` of the
    device; it stays open until the process ends.
    """

    def __init__(self, mode: str, why: list[str], runtime: Runtime, requested: dict):
        self.mode = mode
        self.why = tuple(why)
        self.runtime = runtime
        self._requested = requested
        self._process = os.getpid()
        self._torch_stats = stats.TorchStats(runtime) if mode == "allocator" else None

    def pool(self, name: str, *, backup: bool = True) -> pool.Pool:
        """Creates a memory pool that sleeps as a whole. Raises :class:`StateError` unless
        ``mode`` is ``"pool"``."""
        if self.mode != "pool":
            raise StateError(
                f"memory pools require mode pool; the installed mode is {self.mode}; accepted: "
                'install(mode="pool")'
            )
        return pool.Pool(self.runtime, name, backup=backup)

    def saved_tensor_offload(
        self, keep: Iterable[torch.Tensor] = (), *, min_bytes: int = MIN_BYTES
    ) -> SavedTensorOffload:
        """Creates saved-tensor hooks that copy saved activations off the device. Every mode."""
        return SavedTensorOffload(self.runtime, keep, min_bytes=min_bytes)

    def uninstall_stats(self) -> None:
        """Restores torch's own statistics functions, which raise in mode ``"allocator"``.

        Idempotent.
        """
        if self._torch_stats is not None:
            self._torch_stats.uninstall()

    def _check_same(self, requested: dict) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"dormouse was installed in process {self._process}, and process {os.getpid()} is "
                "its fork; accepted: processes started with spawn that install their own"
            )
        for name, value in requested.items():
            seen = self._requested.get(name)
            if value != seen:
                raise StateError(
                    f"dormouse is installed with {name}={seen!r}, but {value!r} was requested; "
                    "accepted: the same value, or none"
                )


def install(device=None, *, mode: str | None = None, **runtime_options) -> Installed:
    """Installs dormouse in this process and reports the selected mode and the reasons for it.

    ``device``: a GPU (``"cuda:1"``, ``torch.device``, ordinal) or ``"host"``. Defaults to the
    current GPU if CUDA is initialized, else to the GPU that the environment's ``LOCAL_RANK`` names,
    if there is one, else to the first GPU, else to the host. ``mode``: defaults to the first of
    these that is available:

    - ``"allocator"``: dormouse becomes torch's CUDA allocator. Available only before torch first
      uses CUDA, including ``torch.cuda.set_device``. ``torch.cuda.graph`` is supported: memory
      allocated during a capture belongs to that graph and never sleeps. Captures that bypass torch
      may share memory with other tensors.
    - ``"pool"``: memory pools next to torch's allocator (:meth:`Installed.pool`).
    - ``"copy"``: copies of saved tensors (:meth:`Installed.saved_tensor_offload`).
    - ``"host"``: CPU memory; no GPU.

    ``runtime_options``: options of :class:`Runtime` other than the device. A repeated call returns
    the same object and accepts only the options of the first call. Not thread-safe.

    Raises :class:`ArgumentError` for an unknown mode, :class:`DeviceError` for a GPU that does not
    exist, :class:`StateError` for an unavailable mode, for options that differ from those of the
    first call, and in a forked child.
    """
    global _installed
    requested = {"mode": mode, "device": None if device is None else str(_device(device))}
    requested = {name: value for name, value in requested.items() if value is not None}
    requested |= runtime_options
    if _installed is not None:
        _installed._check_same(requested)
        return _installed
    if mode is not None and mode not in MODES:
        raise ArgumentError(f"mode {mode!r}; accepted: {', '.join(MODES)}")
    chosen_because = _default_gpu()[1] if device is None else None
    target = _device(device)
    unavailable = _unavailable_modes(target)
    if mode in unavailable:
        raise StateError(f"mode {mode} is unavailable: {unavailable[mode]}")
    options = runtime_options | {"device": "host" if target.type == "cpu" else "cuda"}
    runtime = Runtime(ordinal=target.index or 0, **options)
    try:
        selected = mode or next(name for name in MODES if name not in unavailable)
        why = _activate(selected, unavailable, runtime)
        if chosen_because is not None:
            why.append(f"device {target}: {chosen_because}")
        requested = {"mode": selected, "device": str(target)} | runtime_options
        _installed = Installed(selected, why, runtime, requested)
    except BaseException:
        # A device has one runtime at a time: left open, it would fail the next attempt.
        runtime.close()
        raise
    return _installed


def installed() -> Installed | None:
    """Returns what :func:`install` has installed in this process, or None."""
    return _installed


def memory_stats(device=None) -> dict[str, int]:
    """Returns a GPU's memory statistics, in bytes and counts, keyed as in
    ``torch.cuda.memory_stats``.

    ``device`` defaults to the GPU dormouse is installed for. Works in every mode: the figures are
    the library's own. All values but ``max_split_size``, which is -1, are zero for a GPU without
    allocations. Any-thread. Raises :class:`ArgumentError` for a device that is not a GPU of this
    machine, :class:`StateError` in a forked child.
    """
    target = _installed.runtime.device if device is None and _installed else _device(device)
    if target.type != "cuda":
        raise ArgumentError(f"device {target}; accepted: CUDA devices, Runtime.stats() for others")
    return stats.flat(stats.nested(target.index))


def _activate(selected: str, unavailable: dict[str, str], runtime: Runtime) -> list[str]:
    """Activates the mode; returns the reasons for it and against the others."""
    why = [f"mode {selected}: {MODES[selected]}"]
    if selected == "host":
        why.append(_preload(runtime))
    if selected == "allocator":
        why += allocator.activate()
        unavailable["pool"] = "torch supports memory pools only in its own allocator"
    for name in MODES:
        if name in unavailable:
            why.append(f"mode {name} is unavailable: {unavailable[name]}")
        elif name not in (selected, "copy"):
            why.append(f"mode {name} is available; {selected} was requested")
    if selected != "copy":
        why.append("Installed.saved_tensor_offload() works in every mode")
    return why


def _device(device) -> torch.device:
    """Returns the device with its index. Does not initialize CUDA."""
    count = torch.cuda.device_count()
    if device is None:
        index, _ = _default_gpu()
        device = "host" if index is None else index
    if isinstance(device, int):
        device = torch.device("cuda", device)
    target = torch.device("cpu" if device == "host" else device)
    if target.type == "cpu":
        return torch.device("cpu")
    if target.type != "cuda":
        raise ArgumentError(f"device {target}; accepted: CUDA devices and 'host'")
    index = target.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if index >= count:
        raise DeviceError(f"CUDA device {index}; torch finds {count}")
    return torch.device("cuda", index)


def _default_gpu() -> tuple[int | None, str]:
    """Returns the GPU to take where none is named, None for the host, and the reason. Does not
    initialize CUDA."""
    count = torch.cuda.device_count()
    if not count:
        return None, "torch finds no GPU"
    if torch.cuda.is_initialized():
        return torch.cuda.current_device(), "it is torch's current GPU"
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return 0, "it is the first GPU; LOCAL_RANK is not set"
    # Launchers that show each process a GPU of its own leave other ranks in the variable.
    if rank.isascii() and rank.isdecimal() and int(rank) < count:
        return int(rank), f"LOCAL_RANK is {rank}"
    return 0, f"it is the first GPU; LOCAL_RANK is {rank!r}; accepted: 0 to {count - 1}"


def _unavailable_modes(target: torch.device) -> dict[str, str]:
    """Returns the reason for each mode that is unavailable on ``target``."""
    if target.type == "cpu":
        reason = "it manages GPU memory, and the device is the host"
        return {name: reason for name in MODES if name != "host"}
    reasons = {
        "allocator": allocator.unavailable_because(),
        "pool": pool.unavailable_because(),
        "host": f"it manages CPU memory, and the device is {target}",
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _preload(runtime: Runtime) -> str:
    if "preload" in runtime.info()["modes"]:
        return "libdormouse_preload.so serves malloc of this process: CPU tensors sleep in place"
    return (
        "CPU tensors sleep in place only in a process started by `python -m dormouse run SCRIPT`, "
        f"or with LD_PRELOAD={native.preload_path()}; this process was not"
    )
