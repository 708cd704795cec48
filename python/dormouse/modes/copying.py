"""Mode ``"copy"``: tensors saved by autograd are copied off the device until backward needs them.

For memory that must stay torch's own. A storage is copied once, however often and through whatever
views it is saved, and is restored as one storage: views, broadcasts and aliases are preserved bit
for bit. An in-place change after the save raises the same error as without hooks.

These tensors stay on the device: parameters, other leaves and their views (their owner keeps the
memory anyway), tensors that share a storage with one of ``keep``, tensor subclasses, small
storages, tensors on other devices, and tensors saved during a CUDA graph capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from .. import _native as native
from ..errors import MemoryTierError, StateError
from ..runtime import Runtime, destroy_left_runtimes, is_defined_by_bytes

# Default of ``min_bytes``: moving smaller storages costs more time than their memory is worth.
MIN_BYTES = 1 << 20

# Unique per process, so that no two storages share a key.
_keys = itertools.count(1)


class Version(NamedTuple):
    """The version of a tensor when it was saved. Hooks disable autograd's own check."""

    # Has no memory; shares the version counter of the saved tensor and all its views.
    counter: torch.Tensor
    saved: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Version:
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return cls(counter, counter._version)

    def check(self) -> None:
        if self.counter._version != self.saved:
            # Torch's wording, which callers may match.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.counter.type()}] is at version "
                f"{self.counter._version}; expected version {self.saved} instead."
            )


class _Copy:
    """A copy of one storage in the tiers, alive while any saved tensor refers to it."""

    def __init__(self, runtime: Runtime, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self._version = tensor._version
        # These weak references prevent reuse of the identities.
        self._base = torch._C._WeakTensorRef(base_of(tensor))
        self._original = StorageWeakRef(storage)
        self._address = storage.data_ptr()
        self._nbytes = storage.nbytes()
        self._runtime = runtime
        self.lock = threading.Lock()
        # Views of the storage by tensor identity and geometry.
        self._views: weakref.WeakValueDictionary[tuple, _View] = weakref.WeakValueDictionary()
        self._restored: StorageWeakRef | None = None
        # Written by the library, so that an interrupt right after the call cannot lose the id.
        self._id = ctypes.c_uint64()
        status = native.call(
            "stash_put",
            runtime._handle,
            self._address,
            self._nbytes,
            next(_keys),
            runtime.stream(),
            ctypes.byref(self._id),
        )
        self.is_declined = status == native.DECLINED

    def __del__(self, suppress=contextlib.suppress):
        # At interpreter exit the library and this module's names may be gone already.
        with suppress(Exception):
            if self._id.value:
                native.call("stash_drop", self._runtime._handle, self._id.value)
                destroy_left_runtimes()

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this copy has the bytes of ``tensor``, which has the same identities."""
        storage = tensor.untyped_storage()
        return (
            tensor._version == self._version
            # A storage can be resized or reallocated under the same identity.
            and storage.data_ptr() == self._address
            and storage.nbytes() == self._nbytes
        )

    def save(self, tensor: torch.Tensor) -> _Saved:
        """Registers one more save of ``tensor``."""
        with self.lock:
            geometry = _Geometry.of(tensor)
            key = (tensor._cdata, *geometry)
            view = self._views.get(key)
            if view is None:
                view = self._views[key] = _View(self, tensor, geometry)
            return _Saved(view)

    def storage(self) -> torch.UntypedStorage:
        """Returns one storage on the device with the bytes, for all readers. Requires the lock."""
        original = _live(self._original)
        # Still referenced elsewhere; but its memory may have been resized away.
        if original is not None and original.nbytes() >= self._nbytes:
            return original
        return self._alive_restored() or self._fetch()

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` has the bytes: the original, or the one restored last."""
        identities = {self._original.cdata, self._restored and self._restored.cdata}
        return storage._cdata in identities and storage.nbytes() >= self._nbytes

    def _alive_restored(self) -> torch.UntypedStorage | None:
        """Returns the restored storage if a view still uses it: a gradient may own it by now."""
        restored = _live(self._restored)
        is_used = restored is not None and any(view.is_alive() for view in self._views.values())
        return restored if is_used else None

    def _fetch(self) -> torch.UntypedStorage:
        if is_capturing(self._runtime.device):
            raise StateError(
                f"{self._nbytes} saved bytes are off the GPU, and a copy back cannot be captured "
                "in a CUDA graph; accepted: forward and backward in one capture, or neither"
            )
        fresh = torch.UntypedStorage(self._nbytes, device=self._runtime.device)
        stream = self._runtime.stream()
        native.call("stash_get", self._runtime._handle, self._id.value, fresh.data_ptr(), stream)
        self._restored = StorageWeakRef(fresh)
        # Held until every save was read once, so that the bytes move only once.
        for view in self._views.values():
            view.hold(fresh)
        return fresh


class _Geometry(NamedTuple):
    """Everything that defines a plain tensor except its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Geometry:
        return cls(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())


class _View:
    """A saved tensor whose storage is off the device, however often it was saved.

    All saves of one tensor restore one tensor, as without hooks: autograd steals an otherwise
    unreferenced tensor as a gradient, and decides that by the tensor, not by its storage.
    """

    def __init__(self, copy: _Copy, tensor: torch.Tensor, geometry: _Geometry):
        self._copy = copy
        self.version = Version.of(tensor)
        self._geometry = geometry
        # This weak reference prevents reuse of the identity.
        self._identity = torch._C._WeakTensorRef(tensor)
        # For a leaf the saved tensor, which a graph returns itself; later the restored one.
        self._tensor = TensorWeakRef(tensor) if tensor.is_leaf else None
        self._is_leaf = tensor.is_leaf
        self._is_read = False
        self.unread: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def is_alive(self) -> bool:
        """Whether the restored tensor is in use or will be read."""
        if any(saved.held is not None for saved in self.unread):
            return True
        # A tensor with a history is a new tensor for each reader, so its readers are unknown.
        return self._alive() is not None if self._is_leaf else self._is_read

    def hold(self, held: torch.UntypedStorage | torch.Tensor) -> None:
        """Keeps the restored bytes for the saves that were not read yet."""
        for saved in self.unread:
            saved.held = held

    def read(self, saved: _Saved) -> torch.Tensor:
        with self._copy.lock:
            tensor = self._alive()
            if tensor is None:
                tensor = self._on(self._copy.storage())
                self._tensor = TensorWeakRef(tensor)
            self.unread.discard(saved)
            saved.held = None
            self._is_read = True
            if self._is_leaf:
                self.hold(tensor)
        return tensor

    def _alive(self) -> torch.Tensor | None:
        tensor = None if self._tensor is None else self._tensor()
        if tensor is None:
            return None
        storage = tensor.untyped_storage()
        # Its memory may have been replaced or resized.
        return (
            tensor if self._copy.has(storage) and _Geometry.of(tensor) == self._geometry else None
        )

    def _on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        with torch.inference_mode(False):
            restored = torch.empty(0, dtype=self._geometry.dtype, device=storage.device)
            restored.set_(storage, *self._geometry[1:])
            # Shares the version counter of the saved tensor: a change of one changes the other.
            tensor = self.version.counter.detach()
            tensor.data = restored
        return tensor


class _Saved:
    """One save of a tensor."""

    __slots__ = ("__weakref__", "_view", "held")

    def __init__(self, view: _View):
        self._view = view
        # Bytes restored for another reader before this save was read; freed with this save.
        self.held: torch.UntypedStorage | torch.Tensor | None = None
        view.unread.add(self)

    def restore(self) -> torch.Tensor:
        self._view.version.check()
        tensor = self._view.read(self)
        if tensor.is_cuda:
            # It may have been restored for a reader on another stream.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor


class Awake(NamedTuple):
    """A saved tensor that stays on the device."""

    tensor: torch.Tensor
    saved: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Awake:
        with torch._C.DisableTorchFunctionSubclass():
            # Its own graph node would keep a result alive in a cycle.
            kept = tensor if tensor.is_leaf else tensor.detach()
            return cls(kept, kept._version)

    def restore(self) -> torch.Tensor:
        Version(self.tensor, self.saved).check()
        return self.tensor


class SavedTensorOffload:
    """Saved-tensor hooks that copy the tensors a forward saves off the device. Any-thread.

    ``keep``: tensors whose storages stay on the device, such as buffers that outlive the step.
    Parameters and their views stay without being named; their ``.data`` and ``detach()`` are
    recognized only by a storage in ``keep``. ``min_bytes``: smaller storages stay on the device.

    Storages the tiers have no room for stay on the device, also after a disk failure:
    ``Runtime.stats()["declined"]`` counts them and ``Runtime.info()["unavailable_reason"]`` has the
    reason.

    Between two saves of one storage, changes without a version bump are not detected: through
    ``.data``, by foreign kernels, or by freeing a storage's memory and allocating it again at the
    same address and size. Aliases with version counters of their own (``detach``) are copied
    separately. If a backward returns a saved tensor with a history as a leaf's gradient, both share
    a storage, as with any saved-tensor hooks. Hooks entered inside these, such as those of
    activation checkpointing, take precedence.

    An operation that fills a tensor after autograd has saved it, without a version bump, gets wrong
    gradients: the copy has the bytes from before, and nothing shows it. One is known,
    ``F.rrelu(training=True)``, which saves its noise. Run it inside
    ``torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)``, so that what it saves
    stays on the device.
    """

    def __init__(
        self, runtime: Runtime, keep: Iterable[torch.Tensor] = (), *, min_bytes: int = MIN_BYTES
    ):
        self._runtime = runtime
        storages = [each.untyped_storage() for each in keep if torch._C._has_storage(each)]
        self._keep = {storage._cdata: StorageWeakRef(storage) for storage in storages}
        self._min_bytes = min_bytes
        self._copies: weakref.WeakValueDictionary[tuple[int, int], _Copy] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[SavedTensorOffload]:
        """Copies what this thread's forward saves inside the context off the device.

        Backward may run inside or outside the context, on any thread, or never: a copy lives as
        long as the graph that holds it. Forward and backward raise :class:`DeviceError` and
        :class:`StateError`; backward also raises :class:`StorageError`.
        """
        with torch.autograd.graph.saved_tensors_hooks(self.save, _restore):
            yield self

    def save(self, tensor: torch.Tensor) -> _Saved | Awake:
        copy = self._copy(tensor) if self._may_leave(tensor) else None
        return Awake.of(tensor) if copy is None else copy.save(tensor)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if not is_plain(tensor) or tensor.device != self._runtime.device:
            return False
        if is_held(tensor) or is_held(base_of(tensor)):
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= max(self._min_bytes, 1)
            and storage._cdata not in self._keep
            and not is_capturing(tensor.device)
        )

    def _copy(self, tensor: torch.Tensor) -> _Copy | None:
        # One version counter: aliases with another (``detach``, ``unsafe_split``) miss its changes.
        identity = tensor.untyped_storage()._cdata, base_of(tensor)._cdata
        with self._lock:
            copy = self._copies.get(identity)
            if copy is not None and copy.is_of(tensor):
                return copy
            try:
                copy = _Copy(self._runtime, tensor)
            except MemoryTierError:
                return None
            if copy.is_declined:
                return None
            self._copies[identity] = copy
            return copy


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, offset, size and stride define the tensor on its storage."""
    return is_defined_by_bytes(tensor) and not (tensor.is_conj() or tensor.is_neg())


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the base of a view, which shares its version counter, or the tensor itself."""
    return tensor._base if tensor._is_view() else tensor


def is_held(tensor: torch.Tensor) -> bool:
    """Whether the tensor stays alive anyway: graphs hold leaves, models their parameters."""
    return isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _live(reference: StorageWeakRef | None) -> torch.UntypedStorage | None:
    if reference is None:
        return None
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def _restore(packed: _Saved | Awake) -> torch.Tensor:
    return packed.restore()
