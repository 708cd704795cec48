"""Door C, by copy: tensors that autograd saves wait outside the GPU until backward asks.

For memory that must stay torch's own. One storage is copied once however often and in whatever
views it is saved, and comes back as one storage: views, broadcasts and aliases stay what they
were, bit for bit.
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

from .. import _native as native
from ..runtime import Runtime

# Smaller tensors stay: moving them costs more time than their memory is worth.
MIN_BYTES = 1 << 20

# Never given twice in a process, so that no two storages are taken for one.
_keys = itertools.count(1)


class _Copy:
    """One storage's bytes in the tiers, for as long as anything saved refers to it."""

    def __init__(self, runtime: Runtime, storage: torch.UntypedStorage, version: int):
        self.version = version
        # While this is held, no other storage can have the same identity.
        self.original = StorageWeakRef(storage)
        self._runtime = runtime
        self._nbytes = storage.nbytes()
        self._restored: StorageWeakRef | None = None
        self._lock = threading.Lock()
        out = ctypes.c_uint64()
        status = native.call(
            "stash_put",
            runtime._handle,
            storage.data_ptr(),
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

    def restore(self) -> torch.UntypedStorage:
        """The bytes on the device again, in one storage for all who ask while it lives."""
        with self._lock:
            live = self._restored and torch.UntypedStorage._new_with_weak_ptr(self._restored.cdata)
            if live is not None:
                return live
            fresh = torch.UntypedStorage(self._nbytes, device=self._runtime.device)
            stream = self._runtime.stream()
            native.call("stash_get", self._runtime._handle, self.id, fresh.data_ptr(), stream)
            self._restored = StorageWeakRef(fresh)
            return fresh


class _View(NamedTuple):
    """A saved tensor whose storage waits outside."""

    copy: _Copy
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def restore(self) -> torch.Tensor:
        storage = self.copy.restore()
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if tensor.is_cuda:
            # It may have come back for a reader on another stream.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor


class _Awake(NamedTuple):
    """A saved tensor left where it is. Hooks switch autograd's own check of changes off."""

    tensor: torch.Tensor
    version: int

    def restore(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "a tensor needed for gradient computation was modified by an inplace operation: "
                f"it is at version {self.tensor._version}, and was saved at {self.version}"
            )
        return self.tensor


class ByCopy:
    """Saved-tensor hooks that copy out what a forward saves. Any-thread.

    ``keep``: tensors whose storages are left alone, a model's parameters and buffers above all.
    ``min_bytes``: smaller storages stay on the device.

    What the tiers have no room for stays on the device as well. A tensor changed in place after it
    was saved comes back as it was saved; changes through ``.data`` are not seen.
    """

    def __init__(
        self, runtime: Runtime, keep: Iterable[torch.Tensor] = (), *, min_bytes: int = MIN_BYTES
    ):
        self._runtime = runtime
        self._keep = {tensor.untyped_storage().data_ptr() for tensor in keep}
        self._min_bytes = min_bytes
        self._copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[ByCopy]:
        """What this thread's forward saves inside waits outside the device."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _restore):
            yield self

    def _pack(self, tensor: torch.Tensor) -> _View | _Awake:
        copy = self._copy(tensor) if self._may_leave(tensor) else None
        if copy is None:
            return _Awake(tensor, tensor._version)
        return _View(copy, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        # Views that say more than where their elements lie.
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._is_zerotensor():
            return False
        storage = tensor.untyped_storage()
        return (
            tensor.device == self._runtime.device
            and storage.nbytes() >= max(self._min_bytes, 1)
            and storage.data_ptr() not in self._keep
        )

    def _copy(self, tensor: torch.Tensor) -> _Copy | None:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        with self._lock:
            copy = self._copies.get(identity)
            if copy is None or copy.version != tensor._version:
                copy = _Copy(self._runtime, storage, tensor._version)
                if copy.id is None:
                    return None
                self._copies[identity] = copy
            return copy


def _restore(packed: _View | _Awake) -> torch.Tensor:
    return packed.restore()
