"""torch's memory history in mode ``"allocator"``: ``torch.cuda.memory._record_memory_history``,
``_snapshot``, ``_dump_snapshot``, metadata and out-of-memory observers.

Torch refuses all of them to a pluggable allocator. The functions of ``torch._C`` behind them are
replaced; the library records (decision 0054), :mod:`.snapshot` writes torch's dictionaries.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

import torch

from .. import _native as native
from ..errors import StateError
from . import snapshot

# Limit of the events kept, and their number if the caller names no limit (torch's own is none).
EVENTS_MAX = 1 << 20
EVENTS_DEFAULT = 1 << 18
# Limit of the texts of metadata. Further ones are recorded as the last.
TEXTS_MAX = 1 << 16
_TOO_MANY_TEXTS = f"(more than {TEXTS_MAX} different texts)"

# What a recording of these contexts has of Python stacks: of allocations, and of frees too.
_STACKS = {None: 0, "state": 1, "alloc": 1, "all": 2}
_OF_PAGES = {"segment_alloc": "segment_map", "segment_free": "segment_unmap"}
_ENABLED = (None, "state", "all")
_KINDS = ("python", "all")
_OBSERVER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)

# What the history of torch's own allocator has and this one has not.
REFUSED = (
    "C++ frames (stacks='all' records Python frames)",
    "histories of pinned host memory (record_pinned_host_memory)",
    "compile_context and global_record_annotations",
)


def notice() -> str:
    """Returns a sentence about what torch's memory history lacks."""
    limits = f"at most {EVENTS_MAX} events, {EVENTS_DEFAULT} if none are asked for"
    return f"torch's memory history has {limits}; without: " + "; ".join(REFUSED)


class History:
    """What torch's functions record and return."""

    def __init__(self):
        self._texts, self._numbers = [""], {"": 0}
        self._mine = threading.local()
        self._observers: list[Callable] = []
        self._observer = _OBSERVER(self._tell)
        self._context: str | None = None
        self._skipped: set[str] = set()
        self._lock = threading.Lock()
        self._is_recording = False

    def replacements(self) -> dict[str, Callable]:
        """Returns replacements for those functions of ``torch._C`` that exist."""
        found = {
            "_cuda_record_memory_history": self.record,
            "_cuda_record_memory_history_legacy": self.record_legacy,
            "_cuda_isHistoryEnabled": lambda: self._is_recording,
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_attach_out_of_memory_observer": self.attach_observer,
            "_cuda_allocationTraceback": self.allocation_traceback,
            "_cuda_memoryMetadataSupported": lambda: True,
            "_cuda_setMemoryMetadata": self.set_metadata,
            "_cuda_getMemoryMetadata": lambda: getattr(self._mine, "text", ""),
            "_cuda_annotateMemory": self.annotate,
        }
        return {name: function for name, function in found.items() if hasattr(torch._C, name)}

    def record(
        self,
        enabled: str | None,
        context: str | None,
        stacks: str,
        max_entries: int,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: list[str] | None = None,
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        """Starts, changes or ends the recording, as torch's function of that name.

        ``stacks="all"`` records Python frames alone; ``compile_context`` and
        ``global_record_annotations`` have no effect. Raises RuntimeError, as torch does, for an
        unknown value, and for ``record_pinned_host_memory``.
        """
        _check("enabled", enabled, _ENABLED)
        _check("context", context, tuple(_STACKS))
        _check("stacks", stacks, _KINDS)
        skipped = set(skip_actions or ())
        for name in skipped:
            _check("skip_actions", name, tuple(snapshot.TORCH_ACTIONS))
        # Pages of ours come and go as those of torch's expandable segments.
        skipped |= {_OF_PAGES[name] for name in skipped & _OF_PAGES.keys()}
        if record_pinned_host_memory:
            raise RuntimeError(
                "record_pinned_host_memory is True; accepted in mode allocator: False"
            )
        if enabled is None or not record_cuda:
            self.stop()
            return
        wanted = 1 if enabled == "state" else max(max_entries, 1)
        count = EVENTS_DEFAULT if wanted == sys.maxsize else min(wanted, EVENTS_MAX)
        bits = snapshot.skipped_actions(skipped)
        native.call("torch_record_history", count, bits, _STACKS[context], bool(clear_history))
        self._context, self._skipped, self._is_recording = context, skipped, True
        # A thread that frees memory while the interpreter ends must not wait for its lock.
        atexit.unregister(self._end)
        atexit.register(self._end)

    def record_legacy(
        self,
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        record_context_cpp: bool = False,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: list[str] | None = None,
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        """The same for the older arguments of ``_record_memory_history``."""
        context = "alloc" if trace_alloc_record_context else "state" if record_context else None
        self.record(
            "all" if enabled else None,
            context,
            "all" if record_context_cpp else "python",
            trace_alloc_max_entries,
            clear_history,
            compile_context,
            global_record_annotations,
            skip_actions,
            record_pinned_host_memory,
            record_cuda,
        )

    def stop(self) -> None:
        """Ends the recording and forgets its events. Idempotent."""
        native.call("torch_record_history", 0, 0, 0, 0)
        self._context, self._skipped, self._is_recording = None, set(), False

    def _end(self) -> None:
        # A forked child has no history, and is refused.
        with contextlib.suppress(StateError):
            self.stop()

    def snapshot(self, mempool: tuple | None = None) -> dict:
        """Returns a snapshot like ``torch.cuda.memory._snapshot``: what is mapped on all GPUs, and
        the recorded events. Any-thread; segments and events of a GPU are of one moment.

        ``mempool``: None for everything, with the tiers as devices behind the GPUs: pinned host
        memory, then the file. Else the id of a pool of CUDA graphs, (0, 0) for all, and whether
        events are wanted; the tiers are left out.
        """
        with_events = mempool is None or len(mempool) < 3 or bool(mempool[2])
        recorded = {"count": 0, "max": 0}

        def count(figures: native.MemoryHistory) -> None:
            recorded["count"] = max(recorded["count"], figures.recorded_count)
            recorded["max"] = max(recorded["max"], figures.events_max)

        write = snapshot.Writer(
            self._texts,
            with_event_frames=self._context in ("alloc", "all"),
            skipped=self._skipped,
        )
        segments, traces = snapshot.read_all(write, count, with_events=with_events)
        if mempool is not None:
            gpus, wanted = torch.cuda.device_count(), tuple(mempool[:2])
            segments = [each for each in segments if each["device"] < gpus]
            traces = traces[:gpus]
            if any(wanted):
                segments = [each for each in segments if each["segment_pool_id"] == wanted]
        return {
            "segments": segments,
            "device_traces": traces,
            "allocator_settings": _settings(recorded["count"], recorded["max"]),
            "external_annotations": [],
            "host_segments": [],
            "host_traces": [],
        }

    def allocation_traceback(self, address: int) -> list[dict] | None:
        """Returns the stack of the allocation at ``address``; None if there is none."""
        for ordinal in range(torch.cuda.device_count()):
            for row in snapshot.Reading(ordinal, with_events=False).ranges:
                if row[0] == address and native.USES[row[7]] == "allocated" and row[10]:
                    return snapshot.Stacks()[row[10]]
        return None

    def attach_observer(self, observer: Callable[[int, int, int, int], object]) -> None:
        """Has ``observer(device, requested_bytes, limit_bytes, left_bytes)`` called where memory
        runs out, before the error is raised. What it raises is printed."""
        with self._lock:
            self._observers.append(observer)
            pointer = ctypes.cast(self._observer, ctypes.c_void_p)
            native.library().dormouse_torch_set_out_of_memory_observer(pointer)

    def detach_observers(self) -> None:
        """Has no observer called any more. Idempotent."""
        with self._lock:
            self._observers.clear()
            native.library().dormouse_torch_set_out_of_memory_observer(None)

    def _tell(self, device: int, requested: int, limit: int, left: int) -> None:
        for observer in list(self._observers):
            try:
                observer(device, requested, limit, left)
            except Exception:
                # The caller is C++: nothing can pass through it.
                traceback.print_exc()

    def set_metadata(self, text: str) -> None:
        """Sets the text that events of the calling thread carry."""
        native.library().dormouse_torch_set_metadata(self._number_of(text))
        self._mine.text = text

    def annotate(self, address: int, text: str) -> None:
        """Records an event with ``text`` for the block around ``address``."""
        native.library().dormouse_torch_annotate(address, self._number_of(text))

    def _number_of(self, text: str) -> int:
        with self._lock:
            number = self._numbers.get(text)
            if number is None:
                if len(self._texts) == TEXTS_MAX:
                    self._texts.append(_TOO_MANY_TEXTS)
                if len(self._texts) > TEXTS_MAX:
                    return TEXTS_MAX
                number = self._numbers[text] = len(self._texts)
                self._texts.append(text)
            return number


def _settings(recorded: int, events_max: int) -> dict:
    """Returns what viewers show as the allocator's settings: the effective configuration."""
    return {
        "backend": "dormouse",
        # Viewers read these of torch's own allocator.
        "expandable_segments": True,
        "trace_alloc_max_entries": events_max,
        "trace_alloc_overflowed": recorded > events_max > 0,
    } | dict(_parameters())


def _parameters() -> Iterator[tuple[str, str]]:
    """Yields name and effective value of every parameter of the library."""
    for index in itertools.count():
        param = native.Param()
        if native.call("param_get", index, ctypes.byref(param)) == native.END:
            return
        yield param.name.decode(), param.text("value")


def _check(name: str, value: object, accepted: tuple) -> None:
    if value not in accepted:
        names = ", ".join(map(repr, accepted))
        raise RuntimeError(f"{name} is {value!r}; accepted: {names}")
