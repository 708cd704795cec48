"""Runtimes, tags, plans and prefixes of libdormouse as Python objects.

Each object owns one handle of the library and is a context manager; a handle that was not closed
is closed when the object is collected. Errors are :class:`dormouse.DormouseError` with the
library's message.

On a GPU, calls that read or write memory are stream-ordered: after earlier work and before later
work of the calling thread's current torch stream of that device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import _native as native
from .errors import DormouseError, MemoryTierError, StorageError

if TYPE_CHECKING:
    from .activations.forwards import Forwards
    from .schedule import Plan

# Of a path that the library returns.
_PATH_BYTES_MAX = 4096

# Handles of collected objects that could not be destroyed yet. Runtimes of which tags, prefixes or
# stash ids existed: in one cycle of references the runtime may be finalized first. Tags whose
# memory could not wake, say for want of room. Few: a device has at most one runtime.
_left_runtimes: list[ctypes.c_void_p] = []
_left_tags: list[ctypes.c_void_p] = []


def destroy_left_runtimes() -> None:
    """Destroys the collected runtimes of which nothing exists any more. Any-thread."""
    _destroy_left(_left_runtimes, "runtime_destroy")


def _destroy_left_tags() -> None:
    """Destroys the collected tags whose memory can wake by now. Any-thread."""
    _destroy_left(_left_tags, "tag_destroy")


def _destroy_left(left: list[ctypes.c_void_p], destroy: str) -> None:
    for _ in range(len(left)):
        try:
            # Taken off the list first: another thread may do the same.
            handle = left.pop(0)
        except IndexError:
            return
        try:
            native.call(destroy, handle)
        except DormouseError as error:
            if _can_go_later(error):
                left.append(handle)
                continue
        # The finalized object has the same handle.
        handle.value = None


def _can_go_later(error: DormouseError) -> bool:
    """Whether what could not be destroyed exists still, and another attempt may succeed."""
    return error.status == native.ERR_BUSY or isinstance(error, (MemoryTierError, StorageError))


class _Handle:
    """Owns one handle of the library."""

    _destroy: str
    _handle = None
    # Where collection leaves a handle that can be destroyed later, if there is such.
    _left: list[ctypes.c_void_p] | None = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        try:
            self.close()
        except DormouseError:
            # The error in flight is more specific. Collection tries again; a runtime that is then
            # still in use, or a tag whose memory cannot wake, is destroyed by a later call.
            if error is None:
                raise

    def __del__(self, suppress=contextlib.suppress):
        # At interpreter exit the library and this module's names may be gone already.
        with suppress(Exception):
            try:
                self.close()
            except DormouseError as error:
                # No finalizer runs twice.
                if self._left is not None and _can_go_later(error):
                    self._left.append(self._handle)

    def close(self) -> None:
        """Destroys the handle. Idempotent."""
        if self._handle:
            native.call(self._destroy, self._handle)
        self._handle = None
        destroy_left_runtimes()


class Runtime(_Handle):
    """The memory tiers of one device. Any-thread; at most one live runtime per device.

    ``device``: ``"host"`` or ``"cuda"``. ``ordinal``: index of the GPU. :attr:`device` is the
    corresponding ``torch.device``.

    An option left out takes its value from the environment, then from the file named by
    ``DORMOUSE_CONFIG``, then the default (docs/params.md). Sizes and counts that nobody has set are chosen from
    what this machine has and revised by what is measured; :func:`dormouse.params` shows them with their reasons.

    ``nvme_dir``: directory of the file tier; without one the file tier is closed.
    ``nvme_file_bytes``, ``alloc_budget_bytes``, ``host_budget_bytes``, ``inflight_bytes``: sizes in
    bytes. ``io_threads``, ``window_layers``: counts. A ``host_budget_bytes`` of 0 closes the host
    tier; another 0 is an option left out. ``checksum``: verify each extent when it is read back.

    Raises :class:`ArgumentError` for a value that is not accepted, :class:`DeviceError` for a
    device that is not available, :class:`StateError` if the device has a live runtime.
    """

    _destroy = "runtime_destroy"
    _left = _left_runtimes

    def __init__(
        self,
        *,
        device: str = "host",
        ordinal: int = 0,
        nvme_dir: str | os.PathLike | None = None,
        nvme_file_bytes: int = 0,
        alloc_budget_bytes: int = 0,
        host_budget_bytes: int | None = None,
        inflight_bytes: int = 0,
        io_threads: int = 0,
        window_layers: int = 0,
        checksum: bool | None = None,
    ):
        self._contexts: weakref.WeakSet[Forwards] = weakref.WeakSet()
        """Those of :func:`dormouse.offload`."""
        if device not in native.DEVICES:
            accepted = ", ".join(native.DEVICES)
            raise native.refused(f"device {device!r}; accepted: {accepted}")
        options = native.Options(
            device_kind=native.DEVICES[device],
            device_ordinal=ordinal,
            nvme_dir=None if nvme_dir is None else native.text("nvme_dir", nvme_dir),
            nvme_file_bytes=nvme_file_bytes,
            alloc_budget_bytes=alloc_budget_bytes,
            host_budget_bytes=host_budget_bytes or 0,
            inflight_bytes=inflight_bytes,
            io_threads=io_threads,
            window_layers=window_layers,
            checksum=0 if checksum is None else (1 if checksum else -1),
        )
        self.device = torch.device("cpu") if device == "host" else torch.device(device, ordinal)
        _destroy_left_tags()
        destroy_left_runtimes()
        native.create(self, "runtime_create", ctypes.byref(options))
        if host_budget_bytes == 0:
            self.set_budget("host", 0)

    def close(self) -> None:
        """Waits for copies and destroys the runtime. Idempotent. Raises :class:`StateError` while
        tags, prefixes or saved tensors of it exist; collected tags wake and end first, as do
        forwards in a :func:`dormouse.offload` whose backward is over."""
        _destroy_left_tags()
        for context in list(self._contexts):
            context.finish()
        super().close()

    def stream(self) -> int | None:
        """Returns this thread's current CUDA stream of the device; None on the host."""
        if self.device.type == "cpu":
            return None
        return torch.cuda.current_stream(self.device).cuda_stream

    def info(self) -> dict:
        """Returns what the runtime is: names of ``dormouse_info_t`` in ``dormouse.h``.

        Sizes are in bytes, rates in bytes per second. ``modes`` and ``tiers`` list names, and
        ``unavailable_reason`` states why a mode or tier is missing.
        """
        info = native.Info()
        native.call("runtime_get_info", self._handle, ctypes.byref(info))
        skip = ("modes", "tier_flags")
        plain = {name: getattr(info, name) for name in _plain(native.Info, skip=skip)}
        plain["modes"] = [name for name, bit in native.MODES.items() if info.modes & bit]
        plain["tiers"] = [name for name, bit in native.TIER_FLAGS.items() if info.tier_flags & bit]
        plain["unavailable_reason"] = info.text("unavailable_reason")
        return plain

    def stats(self) -> dict:
        """Returns the counters of ``dormouse_stats_t`` in ``dormouse.h``, under its names.

        ``allocated``, ``requested``, ``mapped``, ``cached`` and ``asleep``, and ``tiers`` and
        ``roles`` by name, have ``current_bytes``, ``peak_bytes`` and ``count``; ``copies`` by
        direction have ``bytes`` and ``count``. Other sizes end in ``_bytes``, times in
        ``_ns``.
        """
        stats = native.Stats()
        native.call("runtime_get_stats", self._handle, 0, ctypes.byref(stats))
        result = {name: getattr(stats, name) for name in _plain(native.Stats)}
        for name in ("allocated", "requested", "mapped", "cached", "asleep"):
            result[name] = _fields(getattr(stats, name))
        for name, keys in (
            ("tiers", native.TIERS),
            ("roles", native.ROLES),
            ("copies", native.COPIES),
        ):
            values = getattr(stats, name)
            result[name] = {key: _fields(values[i]) for i, key in enumerate(keys)}
        return result

    def reset_peaks(self) -> None:
        """Sets every peak, except that of the interval, to its current value."""
        native.call("runtime_get_stats", self._handle, native.STATS_RESET_PEAKS, None)

    def begin_interval(self) -> None:
        """Begins an interval: ``allocated_interval_peak_bytes`` of :meth:`stats` is that of awake
        allocated memory from here on. A runtime has one interval; no other peak changes."""
        native.call("runtime_get_stats", self._handle, native.STATS_BEGIN_INTERVAL, None)

    def trim(self) -> int:
        """Releases cached free pages to the system or the driver. Returns the bytes released."""
        freed = ctypes.c_uint64()
        native.call("runtime_trim", self._handle, ctypes.byref(freed))
        return freed.value

    def set_budget(self, tier: str, nbytes: int) -> None:
        """Sets a tier's budget in bytes. 0 closes ``host`` or ``nvme``; not for ``device``.

        Raises :class:`ArgumentError` for another tier or a size that is not accepted, and
        :class:`MemoryTierError` for a tier that the runtime does not have.
        """
        native.call("runtime_set_budget", self._handle, _tier_code(tier), nbytes)

    def dump(self, path: str | os.PathLike | None = None, format: str | None = None) -> Path:
        """Writes the timeline as ``pftrace`` or ``html``, default: extension of ``path``. Returns the path.

        Without ``path``, an HTML page is written into the directory ``DORMOUSE_DUMP_DIR``, under a name of its
        own. Any-thread. Raises :class:`ArgumentError` for another format or if no directory was set when the
        first runtime was created, and :class:`StorageError` if the file cannot be written.
        """
        if path is None:
            if format not in (None, "html"):
                raise native.refused(f"dump format {format!r} without a path; accepted: html")
            buffer = ctypes.create_string_buffer(_PATH_BYTES_MAX + 1)
            count = ctypes.c_uint64()
            native.call(
                "runtime_write_dump", self._handle, buffer, len(buffer), ctypes.byref(count)
            )
            return Path(buffer.value.decode())
        kind = format or str(path).rsplit(".", 1)[-1]
        if kind not in native.FORMATS:
            accepted = ", ".join(native.FORMATS)
            raise native.refused(f"dump format {kind!r}; accepted: {accepted}")
        native.call("runtime_dump", self._handle, native.FORMATS[kind], native.text("path", path))
        return Path(path)

    def query(self, address: int) -> dict:
        """Describes the block at ``address``: base, bytes, state, tier, role, layer or None
        and the first 24 bytes of its name. Raises :class:`MemoryTierError` without a block."""
        info = native.MemInfo()
        native.call("mem_query", self._handle, address, ctypes.byref(info))
        return {
            "base": info.base,
            "bytes": info.bytes,
            "requested_bytes": info.requested_bytes,
            "state": native.STATES[info.state],
            "tier": native.TIERS[info.tier],
            "role": native.ROLES[info.role],
            "layer": None if info.layer < 0 else info.layer,
            "name": info.text("name"),
        }

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the CPU of a tensor that sleeps; the tensor stays asleep, in its tier.

        Synchronizes the GPU first. Do not free the tensor during the call. Raises
        :class:`ArgumentError` for a tensor that its bytes alone do not define: quantized, nested,
        not strided, of a subclass; :class:`StateError` for one that is awake, wakes during the
        call, or has no backup; and :class:`StorageError` if the file lost or changed bytes.
        """
        # A parameter is read as its data.
        if not is_defined_by_bytes(tensor.detach()):
            seen = f"{type(tensor).__name__}, layout {tensor.layout}, dtype {tensor.dtype}"
            raise native.refused(
                f"a tensor of class {seen}; accepted: a strided Tensor or Parameter, not nested or "
                "quantized"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        source = tensor.untyped_storage()
        nbytes = source.nbytes()
        storage = torch.UntypedStorage(nbytes)
        if nbytes:
            address, destination = source.data_ptr(), storage.data_ptr()
            native.call("mem_read", self._handle, address, nbytes, destination, self.stream())
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        copy = torch._neg_view(copy) if tensor.is_neg() else copy
        return copy.conj() if tensor.is_conj() else copy

    def tag(self, name: str, *, backup: bool = True) -> Tag:
        """Creates a tag. Without ``backup``, bytes are dropped on sleep and zero after wake."""
        _destroy_left_tags()
        return Tag(self, name, backup=backup)


class StayedAwake(str):
    """The reason why memory of a tag stays awake.

    ``is_partial`` is true if the rest of the tag's memory sleeps, false if all of it is awake.
    """

    is_partial: bool

    def __new__(cls, reason: str, *, is_partial: bool):
        self = super().__new__(cls, reason)
        self.is_partial = is_partial
        return self

    def __getnewargs_ex__(self):
        return (str(self),), {"is_partial": self.is_partial}


class Tag(_Handle):
    """A named set of blocks that sleep and wake together. Any-thread.

    ``with tag.collect():`` tags the blocks this thread allocates; :meth:`add` tags the block of an
    existing tensor. A tag that ends wakes its memory. One that is collected while there is no room
    ends with the next ``Runtime.tag()`` or ``Runtime.close()`` that finds some.
    """

    _destroy = "tag_destroy"
    _left = _left_tags

    def __init__(self, runtime: Runtime, name: str, *, backup: bool = True):
        flags = 0 if backup else native.TAG_WITHOUT_BACKUP
        self._runtime = runtime
        native.create(self, "tag_create", runtime._handle, native.text("name", name), flags)

    @contextlib.contextmanager
    def collect(self):
        """Tags the blocks this thread allocates inside the context."""
        # A thread that never left would tag all its later allocations. So no bytecode runs between
        # either call and the record of it, where Ctrl-C could interrupt.
        entered: list[int] = []
        left: list[int] = []
        entering = map(native.library().dormouse_tag_enter, (self._handle,))
        leaving = map(native.library().dormouse_tag_leave, (self._handle,))
        try:
            entered.extend(entering)
            native.check(entered[0])
            yield self
        finally:
            if entered and entered[0] >= 0:
                left.extend(leaving)
                native.check(left[0])

    def add(self, tensor: torch.Tensor) -> None:
        """Tags the tensor's storage. The whole block around it sleeps.

        Raises :class:`MemoryTierError` for memory that is not dormouse's, and :class:`StateError`
        for a block that belongs to a prefix or to another tag. Memory that is registered with NCCL
        or exported by CUDA IPC must not be tagged; nothing checks it.
        """
        storage = tensor.untyped_storage()
        native.call("tag_add", self._handle, storage.data_ptr(), storage.nbytes())

    def sleep(self, tier: str = "nvme") -> StayedAwake | None:
        """Moves the tag's memory to ``tier``; its addresses stay, its pages go back to the system or
        the driver. Returns None if all of it sleeps.

        Otherwise returns the reason as a :class:`StayedAwake`. If its ``is_partial`` is true, a
        part of the memory sleeps: do not access any of it before :meth:`wake`.

        ``tier``: ``"nvme"`` or ``"host"``. Synchronizes the GPU first: streams that were not
        recorded can use long-lived memory. Raises :class:`MemoryTierError` for a closed tier and
        :class:`StorageError` if the file cannot be written.
        """
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)
        stream = self._runtime.stream()
        status = native.call("tag_sleep", self._handle, _tier_code(tier), stream)
        if status == native.OK:
            return None
        return StayedAwake(native.last_error(), is_partial=status == native.PARTIAL)

    def wake(self) -> None:
        """Restores all bytes at their original addresses; every stream can use them afterwards.

        Raises :class:`MemoryTierError` without room, :class:`StorageError` if the file lost or
        changed bytes, and :class:`StateError` if another thread puts the memory to sleep meanwhile.
        What could not wake stays asleep, with its data.
        """
        native.call("tag_wake", self._handle, self._runtime.stream())


class Prefix(_Handle):
    """A prefix across phases A, B and C. Not thread-safe.

    Every method raises :class:`StateError` for a call out of order, and :class:`ArgumentError` for
    a layer, slot or size that is not accepted.
    """

    _destroy = "prefix_destroy"

    def __init__(self, runtime: Runtime, plan: Plan | None, layers: int, prefix_id: int = 0):
        self._runtime = runtime
        # By layer and slot: address, elements and dtype of the gradient accumulator.
        self._gradients: dict[tuple[int, int], tuple[int, int, torch.dtype]] = {}
        plan_handle = None if plan is None else plan._handle
        native.create(self, "prefix_create", runtime._handle, plan_handle, prefix_id, layers)

    def close(self) -> None:
        """Destroys the prefix. Idempotent.

        Raises :class:`StorageError` if memory could not be woken. The prefix is destroyed all the
        same; that memory stays asleep.
        """
        try:
            super().close()
        except StorageError:
            self._handle = None
            destroy_left_runtimes()
            raise

    @property
    def runtime(self) -> Runtime:
        """The runtime whose tiers hold what sleeps."""
        return self._runtime

    def enter(self, phase: native.Phase) -> None:
        """Enters the next phase: A, then B, then C."""
        native.call("prefix_enter_phase", self._handle, phase, self._runtime.stream())

    def mark(self, edge: native.Edge, layer: int) -> None:
        """Marks the begin or end of a layer's forward or backward. May block until the layer is
        awake.

        Raises :class:`MemoryTierError` or :class:`StorageError` if it cannot wake; its data is
        kept.
        """
        native.call("prefix_mark_edge", self._handle, edge, layer, self._runtime.stream())

    def dormant(self, layer: int, addresses: Sequence[int]) -> None:
        """Names storages saved by the prefix graph; blocks allocated in the layer may sleep."""
        array = native.array_of(ctypes.c_uint64, "addresses", addresses)
        native.call("prefix_add_dormant", self._handle, layer, array, len(addresses))

    def boundary(
        self, layer: int, slot: int, address: int, nbytes: int, elems: int, dtype: torch.dtype
    ) -> None:
        """Declares a boundary tensor, which stays awake. Allocates its zeroed accumulator."""
        gradient = ctypes.c_void_p()
        native.call(
            "prefix_add_boundary",
            self._handle,
            layer,
            slot,
            address,
            nbytes,
            elems,
            dtype_code(dtype),
            self._runtime.stream(),
            ctypes.byref(gradient),
        )
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        self._gradients[layer, slot] = (gradient.value, elems, kind)

    def accumulate(self, layer: int, slot: int, grad: torch.Tensor) -> None:
        """Adds a contiguous gradient to the accumulator."""
        if not grad.is_contiguous():
            seen = f"gradient has shape {tuple(grad.shape)} and strides {grad.stride()}"
            raise native.refused(f"{seen}; accepted: contiguous")
        native.call(
            "prefix_accumulate",
            self._handle,
            layer,
            slot,
            grad.data_ptr(),
            grad.numel(),
            dtype_code(grad.dtype),
            self._runtime.stream(),
        )

    def gradient(self, layer: int, slot: int) -> torch.Tensor:
        """Returns the accumulator as a 1-D view of the library's memory.

        The view is valid until the prefix is closed.
        """
        if (layer, slot) not in self._gradients:
            said = f"slot {slot} of layer {layer}; accepted: a slot declared with boundary()"
            raise native.refused(said)
        address, elems, dtype = self._gradients[layer, slot]
        return _view(address, elems, dtype, self._runtime.device)

    def report(self) -> dict:
        """Returns bytes per tier, stall and its bound in ns, rates in bytes/s, decline reasons."""
        report = native.PrefixReport()
        native.call("prefix_get_report", self._handle, ctypes.byref(report), None, 0, None)
        result = {name: getattr(report, name) for name in _plain(native.PrefixReport)}
        result["tier_bytes_peak"] = dict(zip(native.TIERS, report.tier_bytes_peak, strict=True))
        result["phase_peak_bytes"] = dict(zip("ABC", report.phase_peak_bytes, strict=True))
        result["declined"] = report.text("declined")
        result["first_stray"] = report.text("first_stray")
        result["planned_bytes"] = dict(zip(native.TIERS, report.planned_bytes, strict=True))
        return result

    def explain(self) -> str:
        """Returns the report as text: the peak, the waits and their reasons."""
        return _text("prefix_get_report", self._handle, None)


# Extra room for figures that grow between the call for the length and the call for the text.
_TEXT_SPARE_BYTES = 256


def _text(function: str, *arguments: ctypes.c_void_p | None) -> str:
    """Returns the text that a function of the library writes into a buffer."""
    count = ctypes.c_uint64()
    native.call(function, *arguments, None, 0, ctypes.byref(count))
    buffer = ctypes.create_string_buffer(count.value + _TEXT_SPARE_BYTES)
    native.call(function, *arguments, buffer, len(buffer), ctypes.byref(count))
    return buffer.value.decode()


def is_defined_by_bytes(tensor: torch.Tensor) -> bool:
    """Whether dtype, offset, size, stride and the bits of conjugation and sign define the tensor on
    its storage."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())
    )


class _CudaArray:
    """GPU memory as ``__cuda_array_interface__``, version 2."""

    def __init__(self, address: int, elems: int, dtype: torch.dtype):
        self.__cuda_array_interface__ = {
            "shape": (elems,),
            "typestr": f"<f{dtype.itemsize}",
            "data": (address, False),
            "version": 2,
        }


def _view(address: int, elems: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a 1-D tensor over memory that torch does not own."""
    if device.type == "cuda":
        return torch.as_tensor(_CudaArray(address, elems, dtype), device=device)
    buffer = (ctypes.c_char * (elems * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


def dtype_code(dtype: torch.dtype) -> int:
    """Returns the header's number of a dtype. Raises :class:`ArgumentError` for one that it lacks."""
    name = str(dtype).removeprefix("torch.")
    if name not in native.DTYPES:
        raise native.refused(f"dtype {name}; accepted: {', '.join(native.DTYPES)}")
    return native.DTYPES[name]


def _tier_code(tier: str) -> int:
    if tier not in native.TIERS:
        raise native.refused(f"tier {tier!r}; accepted: {', '.join(native.TIERS)}")
    return native.TIERS.index(tier)


def _plain(struct: type, skip: Sequence[str] = ()) -> list[str]:
    """Returns the names of a struct's scalar fields except size, version and reserved."""
    scalars = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32, ctypes.c_double)
    hidden = ("size", "version", "reserved", *skip)
    return [name for name, kind in struct._fields_ if kind in scalars and name not in hidden]


def _fields(struct: ctypes.Structure) -> dict:
    return {name: getattr(struct, name) for name, _ in struct._fields_}
