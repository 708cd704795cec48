"""torch's memory history as events, with what it does not know: windows and the library's own.

torch stamps what its calling thread was told onto each entry. The main thread always has a stamp;
autograd's has none, and that is how the two are told apart.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import time
from collections.abc import Iterator

import torch
import torch.cuda.memory as memory

FP32_BYTES, FP64_BYTES = 4, 8  # of an accumulator
SETTLE_S = 0.1


class Recorder:
    """What was recorded, once :func:`recording` is over."""

    def __init__(self):
        # Annotations need a tensor to hang on; it was there before and is in no trace.
        self._anchor = torch.empty(1, device="cuda")
        self._windows = 0
        self.entries: list[dict] = []
        self.figures: dict[str, int] = {}

    def stamp(self, scope: int) -> None:
        """From here on the main thread's allocations are made in that window."""
        memory._set_memory_metadata({"scope": scope})

    def open(self) -> None:
        """A window that was not there before."""
        self._windows += 1
        self.stamp(self._windows)

    def close(self) -> None:
        """No window is open."""
        self.stamp(0)

    def say(self, **fact) -> None:
        """Puts a fact between the entries, at this place."""
        memory._annotate_tensor(self._anchor, json.dumps(fact))

    def take(self) -> None:
        """Ends the recording."""
        stats = torch.cuda.memory_stats()
        self.figures = {
            "peak-requested-bytes": stats["requested_bytes.all.peak"] - self._anchor.nbytes,
            "peak-reserved-bytes": stats["reserved_bytes.all.peak"],
        }
        self.entries = memory._snapshot()["device_traces"][0]


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """What the main thread and its backward ask for inside."""
    if not memory._memory_metadata_supported():
        raise RuntimeError(f"torch {torch.__version__} cannot stamp its memory history")
    recorder = Recorder()
    # Collected when it says so, not when some allocation of Python's happens to be the 700th.
    gc.disable()
    _watch_nodes(recorder)
    _leave_unwritten()
    _let_backward_finish()
    memory._record_memory_history(enabled="all", context=None, stacks="python")
    recorder.close()
    yield recorder
    torch.cuda.synchronize()
    recorder.take()
    memory._record_memory_history(enabled=None)
    gc.enable()


def _leave_unwritten() -> None:
    """Fills and copies are what the stand-in does carry out, and memory that is written is memory
    that this machine must have. Nothing here reads a value."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("zero_", lambda tensor: tensor, "CUDA")
    library.impl("copy_", lambda tensor, source, non_blocking=False: tensor, "CUDA")
    torch._dormouse_traces_library = library  # it undoes itself when collected


def _let_backward_finish() -> None:
    """Waits for autograd's thread, which releases its graph shortly after backward returns:
    otherwise the freeing thread and the order of frees would differ between recordings."""

    def settled(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            result = function(*args, **kwargs)
            time.sleep(SETTLE_S)
            return result

        return run

    for name in ("backward", "grad"):
        setattr(torch.autograd, name, settled(getattr(torch.autograd, name)))


def _watch_nodes(recorder: Recorder) -> None:
    """Windows of phase A, and the accumulators that the library allocates itself."""
    import dormouse
    from dormouse import _native as native

    node = dormouse.Prefix
    mark, boundary, close = node.mark, node.boundary, node.close

    def mark_too(self, edge, layer):
        mark(self, edge, layer)
        if edge is native.Edge.FORWARD_BEGIN:
            recorder.open()
        elif edge is native.Edge.FORWARD_END:
            recorder.close()

    def boundary_too(self, layer, slot, address, nbytes, elems, dtype):
        boundary(self, layer, slot, address, nbytes, elems, dtype)
        width = FP64_BYTES if dtype is torch.float64 else FP32_BYTES
        recorder.say(accumulator=elems * width, node=id(self))

    def close_too(self):
        if self._handle is not None:
            recorder.say(end=id(self))
        close(self)

    node.mark, node.boundary, node.close = mark_too, boundary_too, close_too
