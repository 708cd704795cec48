"""Door C, by copy: tensors that autograd saves wait outside the GPU until backward asks.

For memory that must stay torch's own. One storage is copied once however often and in whatever
views it is saved, and comes back as one storage: views, broadcasts and aliases stay what they
were, bit for bit. A change in place after the save is the error it is without hooks.

What stays where it is: parameters, other leaves and views of them (their owner keeps that memory
anyway), whatever shares a storage named in ``keep``, tensors of subclasses, small ones, those on
other devices, and what a CUDA graph captures.
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

    def __init__(self, runtime: Runtime, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self._version = tensor._version
        # While these are held, no other tensor and no other storage can have the same identity.
        self._root = torch._C._WeakTensorRef(_root(tensor))
        self._original = StorageWeakRef(storage)
        self._address = storage.data_ptr()
        self._nbytes = storage.nbytes()
        self._runtime = runtime
        self.lock = threading.Lock()
        # Tensors on the storage, by identity and place.
        self._views: weakref.WeakValueDictionary[tuple, _View] = weakref.WeakValueDictionary()
        self._restored: StorageWeakRef | None = None
        # Written by the library: an interrupt may come before anything else could keep it.
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

    def __del__(self):
        # At interpreter exit the library may be gone, and nobody is left to be told.
        with contextlib.suppress(Exception):
            if self._id.value:
                native.call("stash_drop", self._runtime._handle, self._id.value)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, of the same identities, would be copied to the same bytes."""
        storage = tensor.untyped_storage()
        return (
            tensor._version == self._version
            # A storage may be freed and allocated anew under its own identity.
            and storage.data_ptr() == self._address
            and storage.nbytes() == self._nbytes
        )

    def save(self, tensor: torch.Tensor) -> _Saved:
        """One more who will ask for ``tensor``."""
        with self.lock:
            place = _Place.of(tensor)
            key = (tensor._cdata, *place)
            view = self._views.get(key)
            if view is None:
                view = self._views[key] = _View(self, tensor, place)
            return _Saved(view)

    def storage(self) -> torch.UntypedStorage:
        """The bytes on the device, in one storage for all who ask. Under the lock."""
        original = _live(self._original)
        # Somebody kept it all along; but its memory may have been given up without it.
        if original is not None and original.nbytes() >= self._nbytes:
            return original
        return self._about() or self._fetch()

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` has the bytes: the one copied, or the one restored last."""
        identities = {self._original.cdata, self._restored and self._restored.cdata}
        return storage._cdata in identities and storage.nbytes() >= self._nbytes

    def _about(self) -> torch.UntypedStorage | None:
        """What came back, where it is what was saved: a gradient alone may have it by now."""
        restored = _live(self._restored)
        is_about = restored is not None and any(view.is_about() for view in self._views.values())
        return restored if is_about else None

    def _fetch(self) -> torch.UntypedStorage:
        if _is_capturing(self._runtime.device):
            raise StateError(
                f"{self._nbytes} saved bytes wait outside the GPU, and a copy back is not captured "
                "in a CUDA graph; accepted: forward and backward in one capture, or none"
            )
        fresh = torch.UntypedStorage(self._nbytes, device=self._runtime.device)
        stream = self._runtime.stream()
        native.call("stash_get", self._runtime._handle, self._id.value, fresh.data_ptr(), stream)
        self._restored = StorageWeakRef(fresh)
        # Until each had them once, for the bytes are not to be moved twice.
        for view in self._views.values():
            view.hold(fresh)
        return fresh


class _Place(NamedTuple):
    """What a plain tensor is beside its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        return cls(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())


class _View:
    """A tensor whose storage waits outside, however often it was saved.

    One tensor for all who saved it, as it is without hooks: autograd takes a tensor that nobody
    else has for a gradient as it is, and looks at the tensor for that, not at its storage.
    """

    def __init__(self, copy: _Copy, tensor: torch.Tensor, place: _Place):
        self._copy = copy
        self.version = _Version.of(tensor)
        self._place = place
        # While this is held, no other tensor can have the same identity.
        self._identity = torch._C._WeakTensorRef(tensor)
        # What was saved, where a graph would give that itself, and then what was restored for it.
        self._tensor = TensorWeakRef(tensor) if tensor.is_leaf else None
        self._is_leaf = tensor.is_leaf
        self._is_read = False
        self.unread: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def is_about(self) -> bool:
        """Whether somebody has what came back, or will."""
        if any(saved.held is not None for saved in self.unread):
            return True
        # One with a history is another tensor for each who asks: nobody can say where they are.
        return self._about() is not None if self._is_leaf else self._is_read

    def hold(self, held: torch.UntypedStorage | torch.Tensor) -> None:
        """Keeps what came back for those who have not read yet."""
        for saved in self.unread:
            saved.held = held

    def read(self, saved: _Saved) -> torch.Tensor:
        with self._copy.lock:
            tensor = self._about()
            if tensor is None:
                tensor = self._on(self._copy.storage())
                self._tensor = TensorWeakRef(tensor)
            self.unread.discard(saved)
            saved.held = None
            self._is_read = True
            if self._is_leaf:
                self.hold(tensor)
        return tensor

    def _about(self) -> torch.Tensor | None:
        tensor = None if self._tensor is None else self._tensor()
        if tensor is None:
            return None
        storage = tensor.untyped_storage()
        # It may have been given other memory, or none.
        return tensor if self._copy.has(storage) and _Place.of(tensor) == self._place else None

    def _on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        with torch.inference_mode(False):
            place = torch.empty(0, dtype=self._place.dtype, device=storage.device)
            place.set_(storage, *self._place[1:])
            # On the counter of the tensor saved: a change of one is a change of the other.
            tensor = self.version.counter.detach()
            tensor.data = place
        return tensor


class _Saved:
    """One time that a tensor was saved."""

    __slots__ = ("__weakref__", "_view", "held")

    def __init__(self, view: _View):
        self._view = view
        # What came back for others before this one asked. It goes with it, whether it asks or not.
        self.held: torch.UntypedStorage | torch.Tensor | None = None
        view.unread.add(self)

    def restore(self) -> torch.Tensor:
        self._view.version.check()
        tensor = self._view.read(self)
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
    Parameters are found without, and views of them; of their ``.data`` and ``detach()`` nothing
    but the storage says whose they are. ``min_bytes``: smaller storages stay on the device.

    What the tiers have no room for stays on the device as well, also where a disk fails in the
    middle: ``Runtime.stats()["declined"]`` counts it, and ``Runtime.info()["closed_because"]`` has
    the reason. Changes that torch does not count (through ``.data``, by kernels of others, or where
    a storage's memory is given up and taken anew at its old place in its old size) are not seen
    between two saves of one storage. Aliases of which torch does not say that it counts their
    changes as one (``detach``) are copied apart. Where a backward hands a saved tensor with a
    history on as a leaf's gradient, both are on one storage, as with any hooks of torch. Hooks of
    others entered inside these, checkpointing's above all, take their place.
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
    def hooks(self) -> Iterator[ByCopy]:
        """What this thread's forward saves inside waits outside the device.

        Backward may run inside or outside, on any thread, and not at all: a copy goes with the
        graph that holds it. Raises in forward and backward what the library raises:
        :class:`DeviceError`, :class:`StateError`, and in backward :class:`StorageError`.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _restore):
            yield self

    def _pack(self, tensor: torch.Tensor) -> _Saved | _Awake:
        copy = self._copy(tensor) if self._may_leave(tensor) else None
        return _Awake.of(tensor) if copy is None else copy.save(tensor)

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
        # By one counter: those of others (``detach``, ``unsafe_split``) do not count its changes.
        identity = tensor.untyped_storage()._cdata, _root(tensor)._cdata
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


def _restore(packed: _Saved | _Awake) -> torch.Tensor:
    return packed.restore()
