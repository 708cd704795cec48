"""Door C, by copy: tensors that autograd saves wait outside the GPU until backward asks.

For memory that must stay torch's own. One storage is copied once however often and in whatever
views it is saved, and comes back as one storage: views, broadcasts and aliases stay what they
were, bit for bit. A change in place after the save is the error it is without hooks.

What stays where it is: parameters and whatever shares a parameter's or another leaf's storage
(their owner keeps that memory anyway), tensors of subclasses, small ones, those on other devices,
and what a CUDA graph captures.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _native as native
from ..errors import MemoryTierError, StateError
from ..runtime import Runtime

# Smaller tensors stay: moving them costs more time than their memory is worth.
MIN_BYTES = 1 << 20

# Never given twice in a process, so that no two storages are taken for one.
_keys = itertools.count(1)


class _Version(NamedTuple):
    """The version a tensor had when it was saved. Hooks switch autograd's own check off."""

    # Without memory, on the version counter that the saved tensor shares with all its views.
    counter: torch.Tensor
    saved: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Version:
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return cls(counter, counter._version)

    def check(self) -> None:
        if self.counter._version != self.saved:
            # In torch's words, which callers may look for.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.counter.type()}] is at version "
                f"{self.counter._version}; expected version {self.saved} instead."
            )


class _Copy:
    """One storage's bytes in the tiers, for as long as anything saved refers to it."""

    id: int | None = None

    def __init__(self, runtime: Runtime, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self._version = tensor._version
        root = _root(tensor)
        self._root = root._cdata
        # While this is held, no other tensor can have the same identity.
        self._root_reference = torch._C._WeakTensorRef(root)
        # While this is held, no other storage can have the same identity.
        self._original = StorageWeakRef(storage)
        self._address = storage.data_ptr()
        self._nbytes = storage.nbytes()
        self._runtime = runtime
        self._lock = threading.Lock()
        self._unread = 0
        self._restored: StorageWeakRef | None = None
        self._held: torch.UntypedStorage | None = None
        out = ctypes.c_uint64()
        status = native.call(
            "stash_put",
            runtime._handle,
            self._address,
            self._nbytes,
            next(_keys),
            runtime.stream(),
            ctypes.byref(out),
        )
        self.id = None if status == native.DECLINED else out.value

    def __del__(self):
        # At interpreter exit the library may be gone, and nobody is left to be told.
        with contextlib.suppress(Exception):
            if self.id is not None:
                native.call("stash_drop", self._runtime._handle, self.id)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, on a storage of the same identity, would be copied to the same bytes."""
        storage = tensor.untyped_storage()
        return (
            # Counted by one counter: those of others (``unsafe_split``) say nothing of its changes.
            _root(tensor)._cdata == self._root
            and tensor._version == self._version
            # A storage may be freed and allocated anew under its own identity.
            and storage.data_ptr() == self._address
            and storage.nbytes() == self._nbytes
        )

    def add_reader(self) -> None:
        """One more saved tensor that will ask for the bytes."""
        with self._lock:
            self._unread += 1

    def restore(self, *, first: bool) -> torch.UntypedStorage:
        """The bytes on the device, in one storage for all who ask. ``first``: a reader's first."""
        original = _live(self._original)
        # Somebody kept it all along; but its memory may have been given up without it.
        if original is not None and original.nbytes() < self._nbytes:
            original = None
        with self._lock:
            self._unread -= first
            storage = original or _live(self._restored) or self._fetch()
            # Until each reader had them once, for the bytes are not to be moved twice.
            self._held = storage if self._unread > 0 and original is None else None
        return storage

    def _fetch(self) -> torch.UntypedStorage:
        if _is_capturing(self._runtime.device):
            raise StateError(
                f"{self._nbytes} saved bytes wait outside the GPU, and a copy back is not captured "
                "in a CUDA graph; accepted: forward and backward in one capture, or none"
            )
        fresh = torch.UntypedStorage(self._nbytes, device=self._runtime.device)
        stream = self._runtime.stream()
        native.call("stash_get", self._runtime._handle, self.id, fresh.data_ptr(), stream)
        self._restored = StorageWeakRef(fresh)
        return fresh


@dataclass(slots=True, eq=False)
class _View:
    """A saved tensor whose storage waits outside."""

    copy: _Copy
    version: _Version
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    is_read: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, copy: _Copy) -> _View:
        copy.add_reader()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return cls(copy, _Version.of(tensor), tensor.dtype, *place)

    def restore(self) -> torch.Tensor:
        self.version.check()
        storage = self.copy.restore(first=not self.is_read)
        self.is_read = True
        place = torch.empty(0, dtype=self.dtype, device=storage.device)
        place.set_(storage, self.offset, self.size, self.stride)
        # On the counter of the tensor saved: a change of one is a change of the other.
        tensor = self.version.counter.detach()
        tensor.data = place
        if tensor.is_cuda:
            # It may have come back for a reader on another stream.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor


class _Awake(NamedTuple):
    """A saved tensor left where it is."""

    tensor: torch.Tensor
    saved: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Awake:
        with torch._C.DisableTorchFunctionSubclass():
            # A result that its own graph node holds would never be freed.
            kept = tensor if tensor.is_leaf else tensor.detach()
            return cls(kept, kept._version)

    def restore(self) -> torch.Tensor:
        _Version(self.tensor, self.saved).check()
        return self.tensor


class ByCopy:
    """Saved-tensor hooks that copy out what a forward saves. Any-thread.

    ``keep``: tensors whose storages are left alone: buffers, and what else lives on anyway.
    Parameters are found without. ``min_bytes``: smaller storages stay on the device.

    What the tiers have no room for stays on the device as well, also where a disk fails in the
    middle: ``Runtime.stats()["declined"]`` counts it, and ``Runtime.info()["closed_because"]`` has
    the reason. Changes that torch does not count (through ``.data``, by kernels of others) are not
    seen between two saves of one storage. Aliases of which torch does not say that it counts their
    changes as one (``detach``) are copied apart. Hooks of others entered inside these, checkpointing's
    above all, take their place.
    """

    def __init__(
        self, runtime: Runtime, keep: Iterable[torch.Tensor] = (), *, min_bytes: int = MIN_BYTES
    ):
        self._runtime = runtime
        storages = [each.untyped_storage() for each in keep if torch._C._has_storage(each)]
        self._keep = {storage._cdata: StorageWeakRef(storage) for storage in storages}
        self._min_bytes = min_bytes
        self._copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[ByCopy]:
        """What this thread's forward saves inside waits outside the device.

        Backward may run inside or outside, on any thread, and not at all: a copy goes with the
        graph that holds it. Raises in forward and backward what the library raises:
        :class:`DeviceError`, :class:`StateError`, and in backward :class:`StorageError`.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _restore):
            yield self

    def _pack(self, tensor: torch.Tensor) -> _View | _Awake:
        copy = self._copy(tensor) if self._may_leave(tensor) else None
        return _Awake.of(tensor) if copy is None else _View.of(tensor, copy)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if not _is_plain(tensor) or tensor.device != self._runtime.device:
            return False
        if _is_held(tensor) or _is_held(_root(tensor)):
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= max(self._min_bytes, 1)
            and storage._cdata not in self._keep
            and not _is_capturing(tensor.device)
        )

    def _copy(self, tensor: torch.Tensor) -> _Copy | None:
        identity = tensor.untyped_storage()._cdata
        with self._lock:
            copy = self._copies.get(identity)
            if copy is not None and copy.is_of(tensor):
                return copy
            try:
                copy = _Copy(self._runtime, tensor)
            except MemoryTierError:
                return None
            if copy.id is None:
                return None
            self._copies[identity] = copy
            return copy


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, offset, size and stride are all there is to say of a tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
    )


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, with the same counter of changes; or else the tensor."""
    return tensor._base if tensor._is_view() else tensor


def _is_held(tensor: torch.Tensor) -> bool:
    """Whether it lives on anyway: a graph holds its leaves, and a model its parameters."""
    return isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _live(reference: StorageWeakRef | None) -> torch.UntypedStorage | None:
    if reference is None:
        return None
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def _restore(packed: _View | _Awake) -> torch.Tensor:
    return packed.restore()
