"""One forward of a model: which saved tensors sleep, and when its backward needs them.

What may sleep is decided by ownership. A storage that only saved tensors hold can be accessed by
nothing but backward, which asks for it by the hook of the saved tensor. A storage that anything
else holds stays awake: a parameter, an input, an output, a local of the model's forward, a cache of
a module or of autocast. Locals are gone soon, so it is looked at again when the next layers end.
This needs neither a miniature of the step nor a walk of the graph, which would compute checkpointed
layers again.
"""

from __future__ import annotations

import threading
import time
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _native as native
from ..errors import StateError
from ..modes.copying import Awake, SavedTensorOffload, Version, base_of, is_held, is_plain
from ..runtime import Prefix, Runtime
from .report import OffloadReport

# A storage that is held at the end of this many layers since its first save stays awake. The
# output of a layer is held by the loop over the layers until the next one has ended.
LOOKS_MAX = 3

# When the backward of this call or of one below begins, the forward before starts to wake: what is
# left of the backward gives the reads time.
AHEAD_CALL = 1

# The number of their prefixes: apart from those of plans, whose residency follows the step before.
PREFIX_ID = 1 << 31


class Pass:
    """One forward and its backward. One thread runs the forward; backward runs on any thread."""

    def __init__(self, runtime: Runtime, report: OffloadReport, calls: int, window_layers: int):
        """``calls``: expected calls of layers, of which the last ``window_layers`` stay awake."""
        self.report = report
        self.calls_expected = calls
        # Whether what a layer saved came here, and not to hooks that were entered later.
        self.has_saves = False
        self._device = runtime.device
        # The first call whose saved tensors stay awake.
        self._awake_from = max(0, calls - window_layers)
        self._storages: dict[int, _Storage] = {}
        # Saved tensors hold it, so that it tells when the last of them is freed.
        self._graph: _Graph | None = _Graph(self)
        self._graph_alive = weakref.ref(self._graph)

    @property
    def is_over(self) -> bool:
        """Whether the forward has ended and no saved tensor is left."""
        return self._graph_alive() is None

    def begin_layer(self) -> None:
        """Called before a layer's forward."""
        self.report.layer_calls += 1

    def end_layer(self) -> None:
        """Called after a layer's forward, unless it was interrupted."""

    def end(self) -> None:
        """Called after the forward; if it was interrupted, before the next one or when the context
        ends."""
        self._graph = None
        self._storages.clear()

    def wake_ahead(self) -> None:
        """Starts to wake what backward needs first."""

    def finish(self) -> None:
        """Completes the report. Called when the pass is over."""

    def save(self, tensor: torch.Tensor):
        """Returns what the graph holds for a saved tensor: ``restore()`` returns the tensor."""
        if self._graph is None or self._call < 0:
            return Awake.of(tensor)
        self.has_saves = True
        if not self._may_leave(tensor):
            return Awake.of(tensor)
        return self._keep(tensor, self._storage_of(tensor))

    def _keep(self, tensor: torch.Tensor, storage: _Storage):
        raise NotImplementedError

    @property
    def _call(self) -> int:
        """The call of a layer that runs, or ran last; -1 before the first."""
        return self.report.layer_calls - 1

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if not is_plain(tensor) or tensor.device != self._device:
            return False
        return not (is_held(tensor) or is_held(base_of(tensor)))

    def _storage_of(self, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            known = self._storages[storage._cdata] = _Storage(storage, self._call)
            self.report.saved_bytes += known.nbytes
            if self._call >= self._awake_from:
                self.report.window_bytes += known.nbytes
        return known


class InPlace(Pass):
    """Saved tensors sleep at their addresses."""

    def __init__(
        self,
        runtime: Runtime,
        report: OffloadReport,
        calls: int,
        window_layers: int,
        before: Pass | None,
    ):
        """What calls after the expected ones make stays awake: they have no marks. ``before``: the
        forward before, whose backward may follow."""
        super().__init__(runtime, report, calls, window_layers)
        self._before = None if before is None else weakref.ref(before)
        self._pending: list[_Storage] = []
        self._lock = threading.Lock()
        self._phase = native.Phase.A
        # The call between its marks.
        self._open: int | None = None
        # What this call and later ones saved is awake.
        self._reached = calls
        # The stream that the latest wake was ordered before.
        self._woken_on: torch.cuda.Stream | None = None
        self._prefix = Prefix(runtime, None, calls, PREFIX_ID)
        self._prefix.enter(native.Phase.A)

    def begin_layer(self):
        super().begin_layer()
        if self._call < self.calls_expected:
            self._prefix.mark(native.Edge.FORWARD_BEGIN, self._call)
            self._open = self._call

    def end_layer(self):
        if self._open is not None:
            self._name_dormant()
            self._close_mark(native.Edge.FORWARD_END)

    def end(self):
        super().end()
        if self._phase is native.Phase.A:
            self.end_layer()
            self._name_dormant()
            self._pending.clear()
            self._prefix.enter(native.Phase.B)
            self._phase = native.Phase.B

    def reach(self, call: int) -> None:
        """Waits until what ``call`` and later ones saved is awake, on a GPU in the order of this
        thread's current stream. Backward calls it in falling order, but may leave calls out, which
        a later backward of the same graph reads."""
        # A call beyond the expected ones has no marks, but the last of them made its input.
        call = min(call, self.calls_expected - 1)
        if call >= self._reached:
            self._order_streams()
            return
        with self._lock:
            if call >= self._reached:
                self._order_streams()
                return
            if self._phase is native.Phase.A:
                self._allow_in_forward()
                return
            self._begin_backward()
            # What was woken for another stream stays ordered before all that is read from here on.
            self._order_streams()
            for reached in range(self._reached - 1, call - 1, -1):
                self._close_mark(native.Edge.BACKWARD_END)
                self._prefix.mark(native.Edge.BACKWARD_BEGIN, reached)
                self._open = self._reached = reached
            if self._device.type == "cuda":
                self._woken_on = torch.cuda.current_stream(self._device)
        before = None if self._before is None else self._before()
        if call <= AHEAD_CALL and before is not None and not before.is_over:
            before.wake_ahead()

    def wake_ahead(self):
        with self._lock:
            self._begin_backward()

    def _begin_backward(self) -> None:
        """Enters phase C, in which the last layers wake."""
        if self._phase is native.Phase.B:
            self._prefix.enter(native.Phase.C)
            self._phase = native.Phase.C

    def finish(self):
        self._close_mark(native.Edge.BACKWARD_END)
        figures = self._prefix.report()
        self._prefix.close()
        self.report.prefix = figures
        self.report.asleep_bytes = figures["asleep_bytes_peak"]
        self.report.file_bytes = figures["tier_bytes_peak"]["nvme"]
        self.report.wait_ns = figures["stall_ns"]
        self.report.stray_wakes = figures["stray_wakes"]

    def _keep(self, tensor, storage):
        kept = _Sleeping(tensor, self._call, self._graph)
        if storage.first <= self._awake_from:
            if not storage.saves:
                self._pending.append(storage)
            storage.saves.append(weakref.ref(kept))
            storage.last = self._call
        return kept

    def _close_mark(self, edge: native.Edge) -> None:
        if self._open is not None:
            self._prefix.mark(edge, self._open)
            self._open = None

    def _name_dormant(self) -> None:
        """Names the storages that nothing but saved tensors holds."""
        named: dict[int, list[int]] = {}
        pending = []
        for storage in self._pending:
            if storage.is_owned_by_saves():
                for call in storage.calls():
                    if 0 <= call < self._awake_from:
                        named.setdefault(call, []).append(storage.address)
            elif self._call - storage.first < LOOKS_MAX - 1:
                pending.append(storage)
        self._pending = pending
        for call, addresses in named.items():
            self._prefix.dormant(call, addresses)

    def _order_streams(self) -> None:
        if self._woken_on is not None:
            stream = torch.cuda.current_stream(self._device)
            if stream != self._woken_on:
                stream.wait_stream(self._woken_on)

    def _allow_in_forward(self) -> None:
        # On the host device an access wakes what sleeps.
        if self._device.type == "cuda":
            raise StateError(
                "a backward inside the forward reads saved tensors of earlier layers, which may "
                "sleep; accepted on a GPU: backward after the forward"
            )


class ByCopy(Pass):
    """Saved tensors are copied out of memory that stays torch's."""

    def __init__(
        self,
        runtime: Runtime,
        report: OffloadReport,
        calls: int,
        window_layers: int,
        copying: SavedTensorOffload,
    ):
        super().__init__(runtime, report, calls, window_layers)
        self._copying = copying

    def _keep(self, tensor, storage):
        if self._call >= self._awake_from:
            return Awake.of(tensor)
        began_ns = time.perf_counter_ns()
        kept = self._copying.save(tensor)
        self.report.wait_ns += time.perf_counter_ns() - began_ns
        if isinstance(kept, Awake):
            return kept
        if not storage.saves:
            self.report.asleep_bytes += storage.nbytes
        copied = _Copied(kept, self._graph)
        storage.saves.append(weakref.ref(copied))
        return copied


class _Graph:
    """Refers to a pass while any of its saved tensors is alive."""

    __slots__ = ("__weakref__", "owner")

    def __init__(self, owner: Pass):
        self.owner = owner


class _Storage:
    """A storage that was saved."""

    __slots__ = ("_identity", "address", "first", "last", "nbytes", "saves")

    def __init__(self, storage: torch.UntypedStorage, call: int):
        # A weak reference prevents reuse of the identity.
        self._identity = StorageWeakRef(storage)
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.first = self.last = call
        self.saves: list[weakref.ref] = []

    def is_owned_by_saves(self) -> bool:
        """Whether nothing but saved tensors holds the storage, each once."""
        alive = [save for each in self.saves if (save := each()) is not None]
        if not alive:
            return False
        # Python's object of the storage holds it too, once, while it is there.
        storage = alive[0].tensor.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) == len(alive) + 1

    def calls(self) -> tuple[int, ...]:
        """Returns the calls of which one allocated the storage, if it may sleep with that call: a
        layer is awake for its own backward and for that of the next one."""
        if self.last == self.first:
            # A layer saves its input, which the layer before it allocated.
            return self.first - 1, self.first
        return (self.first,) if self.last == self.first + 1 else ()


class _Sleeping:
    """One save of a tensor whose memory may sleep."""

    __slots__ = ("__weakref__", "_call", "_graph", "_saved", "tensor")

    def __init__(self, tensor: torch.Tensor, call: int, graph: _Graph):
        with torch._C.DisableTorchFunctionSubclass():
            # Of its own, so that it counts as one holder of the storage.
            self.tensor = tensor.detach()
        self._saved = self.tensor._version
        self._call = call
        self._graph = graph

    def restore(self) -> torch.Tensor:
        Version(self.tensor, self._saved).check()
        self._graph.owner.reach(self._call)
        return self.tensor


class _Copied:
    """One save of a tensor that was copied."""

    __slots__ = ("__weakref__", "_graph", "_saved")

    def __init__(self, saved, graph: _Graph):
        self._saved = saved
        self._graph = graph

    def restore(self) -> torch.Tensor:
        began_ns = time.perf_counter_ns()
        tensor = self._saved.restore()
        self._graph.owner.report.wait_ns += time.perf_counter_ns() - began_ns
        return tensor
